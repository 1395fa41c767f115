"""What the trace of a run is, in the words of the commands: recorded, drawn, or of a small model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import MoesimError
from sim.setup.spec import read_spec

if TYPE_CHECKING:
    from sim.pages.inputs import Run


def realism_of(run: Run) -> list[str]:
    """A line; none where the trace is not at hand, or is another by now."""
    from traces.format.catalogue import open_trace
    from traces.stats.realism import judge

    try:
        name = None if run.config is None else read_spec(run.config)[0].get("trace")
        if not isinstance(name, str):
            return []
        trace = open_trace(name)
        try:
            return [judge(trace, quick=True).line] if trace.sha256 == run.result.trace_sha256 else []
        finally:
            trace.close()
    except MoesimError:
        return []
