"""What counts: it applies each decision to what is resident and hands the work to a machine."""

from sim.base.flat import COMPILED


def compiled() -> bool:
    """Whether this process runs the engine as machine code."""
    return COMPILED
