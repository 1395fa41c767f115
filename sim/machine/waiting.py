"""What GPU 0's stream waited for, by phase and layer: the gaps of its time line, for `by_layer`."""

from __future__ import annotations

from sim.base.flat import floats
from sim.base.lanes import H2D, HOST, IDLE
from sim.workload.iterations import PHASES

# A wait for the copy link is for a copy that was demanded, or for a prefetch that came late; the others are by cause.
KINDS = ("gpu", "demand", "host", "cpu", "predictor", "nvme", "idle", "prefetch")
PREFETCH = 7
_H2D, _HOST, _PREFETCH, _KINDS = H2D, HOST, PREFETCH, len(KINDS)  # machine integers where this is compiled


class Waiting:
    """Seconds by phase, layer and kind.

    A wait counts for the layer of the operation that waited. What a block of a layer waits for besides its launch are
    experts of the layer before, on the CPU or on other GPUs: those waits count there. Waits of the output head count
    for the last layer, what comes before the first layer for that one. Between iterations nobody is waiting.
    """

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.n_rows = len(PHASES) * n_layers
        self.waited_s = floats((self.n_rows + 1) * len(KINDS))  # the last row: between iterations
        self.first = self.row = self.n_rows * len(KINDS)

    def begin(self, phase: int) -> None:
        """An iteration of a phase begins, by its number in `PHASES`."""
        self.first = self.row = phase * self.n_layers * _KINDS

    def enter(self, layer: int) -> None:
        """What names no layer from now on counts for this one."""
        self.row = self.first + layer * _KINDS

    def leave(self) -> None:
        """The iteration is over."""
        self.first = self.row = self.n_rows * _KINDS

    def row_of(self, layer: int, expert: int, cause: int) -> int:
        """Where a wait counts that an operation has before it; no layer (-1): the one that runs."""
        if layer < 0 or self.first == self.n_rows * _KINDS:
            return self.row
        if expert < 0 and cause != _HOST and layer > 0:
            layer -= 1
        return self.first + (layer if layer < self.n_layers else self.n_layers - 1) * _KINDS

    def charge(self, at: int, cause: int, speculative: bool, gap_s: float) -> None:
        """Count a wait."""
        self.waited_s[at + (_PREFETCH if speculative and cause == _H2D else cause)] += gap_s

    def wait(self, layer: int, expert: int, cause: int, speculative: bool, gap_s: float) -> None:
        """Count a wait before an operation, or (-1) while the host does something."""
        self.charge(self.row_of(layer, expert, cause), cause, speculative, gap_s)

    def take_in(self, other: Waiting) -> None:
        """Add what another replica waited for."""
        for at in range(len(self.waited_s)):
            self.waited_s[at] += other.waited_s[at]

    def seconds(self, phase: int, layer: int) -> dict[str, float]:
        """Seconds by kind of a layer in a phase (its number in `PHASES`)."""
        at = (phase * self.n_layers + layer) * _KINDS
        return {name: self.waited_s[at + kind] for kind, name in enumerate(KINDS) if kind != IDLE}
