"""Counts by phase and expert: how its gates found it, why it was missing, what was copied and evicted.

Totals of a run (`sim.engine.counts`) are the sums over phases and experts; docs/output.md defines each count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.base.flat import ints
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.engine.residency import Residency
    from sim.policy.pieces import Piece

# Columns. The first seven are `counts.CLASSES`, but what ran on the GPU stands in the place of hits, which are what is
# left of it; and a miss is counted by why it was one: "cold" stands in its place.
COLUMNS = (
    "gpu",
    "partial_hit",
    "late_hit",
    "miss_cold",
    "cpu",
    "substituted",
    "dropped",
    "miss_capacity",
    "miss_evicted_unused",
    "miss_wrong_prediction",
    "miss_too_late",
    "instead",  # served for another that the gate had asked for
    "ran_on_cpu",
    "ran_ahead",
    "part",
    "evict_piece",  # evictions of whole experts are what came, less what stayed; of other pieces they are counted
    "demand",  # whole experts in the serving precision; other pieces in the next two
    "demand_piece",
    "demand_piece_bytes",
    "issued",
    "issued_bytes",
    "cancel",
    "cancelled",
    "cancelled_bytes",
    "refused",
    "write_back",
    "write_back_bytes",
    "useful",  # from here the fates of prefetches, as `counts.FATES`
    "late",
    "wasted",
    "harmful",
    "useful_bytes",
    "late_bytes",
    "wasted_bytes",
    "harmful_bytes",
    "exchanged_cold",  # misses of experts that were copied and run together; counted nowhere else
    "exchanged_capacity",
    "exchanged_evicted_unused",
    "held",  # whole experts there when the phase began, less those there when it ended
    "issued_whole",
    "cancel_whole",
)
MISSES = ("miss_cold", "miss_capacity", "miss_evicted_unused", "miss_wrong_prediction", "miss_too_late")
(INSTEAD, RAN_ON_CPU, RAN_AHEAD, PART, EVICT_PIECE, DEMAND, DEMAND_PIECE, DEMAND_PIECE_BYTES) = range(11, 19)
(ISSUED, ISSUED_BYTES, CANCEL, CANCELLED, CANCELLED_BYTES, REFUSED, WRITE_BACK, WRITE_BACK_BYTES, FATE) = range(19, 28)
FATE_BYTES = FATE + 4
GPU, EXCHANGED = 0, FATE_BYTES + 4
HELD, ISSUED_WHOLE, CANCEL_WHOLE = range(EXCHANGED + 3, EXCHANGED + 6)
# Machine integers where this is compiled.
(_MISS, _CAPACITY, _EVICTED_UNUSED, _WRONG_PREDICTION, _TOO_LATE) = (3, 7, 8, 9, 10)
_EVICT_PIECE, _HELD, _AGAIN = EVICT_PIECE, HELD, EXCHANGED + 1


class ByExpert:
    """Counts in one flat array by column, phase and expert, and what tells one miss from another.

    A *pass* is an iteration: every layer's gate speaks once in it. A prediction for a layer counts for the pass in
    which that layer's gate speaks next.
    """

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.n_rows = n_layers * n_experts
        self.stride = len(PHASES) * self.n_rows  # from one column to the next
        self.n = ints(len(COLUMNS) * self.stride)
        self.first = 0  # of the running phase within a column
        self.pass_n = 1  # the one that runs, or ran last
        self.spoken = n_layers  # the last layer of which the gate has spoken in it
        self.predicts = False  # whether the policy has ever asked for a prefetch
        self.wanted_for = ints(self.n_rows)  # by expert, the pass for which it was predicted last
        self.predicted_for = ints(n_layers)  # by layer, the pass for which any expert was

    def begin(self, phase: int, residency: Residency) -> None:
        """A pass of a phase begins, by its number in `PHASES`."""
        first = phase * self.n_rows
        if first != self.first:
            self.end(residency)
            self.first = first
            self._hold(residency, 1)
        self.pass_n += 1
        self.spoken = -1

    def end(self, residency: Residency) -> None:
        """The phase is over: take what was counted by row."""
        self._hold(residency, -1)
        again = self.first + _AGAIN * self.stride
        for row in range(self.n_rows):
            self.n[self.first + row] += residency.rows[row].n_ran  # the first column: who ran
            self.n[again + row] += residency.rows[row].n_again
            residency.rows[row].n_ran = residency.rows[row].n_again = 0

    def _hold(self, residency: Residency, sign: int) -> None:
        """What is there when a phase begins (1) or ends (-1)."""
        column = _HELD * self.stride + self.first
        for row in range(self.n_rows):
            self.n[column + row] += sign * residency.here[row]

    def table(self) -> NDArray[np.int64]:
        """All counts, [columns, phases, layers, experts]."""
        return np.asarray(self.n).reshape(len(COLUMNS), len(PHASES), self.n_layers, self.n_experts)

    def add(self, column: int, piece: Piece, n: int) -> None:
        """Count `n` more for the expert of a piece."""
        self.n[column * self.stride + self.first + piece.layer * self.n_experts + piece.expert] += n

    def more(self, column: int, row: int, n: int) -> None:
        """Count `n` more for an expert."""
        self.n[column * self.stride + self.first + row] += n

    def take_in(self, other: ByExpert) -> None:
        """Count what another replica counted, too."""
        for at in range(len(COLUMNS) * self.stride):
            self.n[at] += other.n[at]

    def why(self, layer: int, row: int, left: int) -> int:
        """Why an expert of which nothing is there or coming is missing, when its gate asks, by when it left last."""
        if left == self.pass_n:
            return _EVICTED_UNUSED
        if self.predicts and self.wanted_for[row] == self.pass_n:
            return _TOO_LATE
        if left == 0:
            return _MISS
        if self.predicts and self.predicted_for[layer] == self.pass_n:
            return _WRONG_PREDICTION
        return _CAPACITY

    def predicted(self, piece: Piece) -> None:
        """The policy has asked for a piece before its gate."""
        layer = piece.layer
        aim = self.pass_n + (layer <= self.spoken)
        self.predicts = True
        self.predicted_for[layer] = aim
        self.wanted_for[layer * self.n_experts + piece.expert] = aim

    def evicted(self, piece: Piece) -> None:
        """A piece is taken off what is resident."""
        if not piece.serving:
            self.n[_EVICT_PIECE * self.stride + self.first + piece.layer * self.n_experts + piece.expert] += 1
