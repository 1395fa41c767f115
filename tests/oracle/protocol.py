"""What a machine offers. `drive` speaks only these verbs, so simulator and hardware run the same loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from oracle.iterations import Iteration
    from oracle.pieces import Piece
    from sim.base.quantities import Source

UNKNOWN_S = -1.0
DEMAND, SPECULATIVE = 0, 1


class Ticket:
    """Something under way. `end_s` is when it ends, or `UNKNOWN_S` while that still depends on what comes.

    `cause` names the lane a waiter would be waiting for.
    """

    __slots__ = ("cause", "end_s")

    def __init__(self, end_s: float, cause: int) -> None:
        self.end_s = end_s
        self.cause = cause


class Machine(Protocol):
    """Verbs return tickets; device work starts at max(host launch, stream order, tickets in `after`)."""

    @property
    def now_s(self) -> float:
        """The host's clock (simulated or measured)."""

    def begin(self, iteration: Iteration) -> None:
        """Start an iteration: embed its tokens, price its layers."""

    def attention(self, layer: int) -> None:
        """Launch the attention block of MoE layer `layer`, with any dense layers before it."""

    def gate(self, layer: int) -> Ticket:
        """Launch the gate and start reading its choice back to the host."""

    def shared(self, layer: int) -> None:
        """Launch the shared expert (no-op for models without one)."""

    def sync(self, ticket: Ticket) -> None:
        """Block the host until `ticket` has ended and its result has been read."""

    def to_gate(self, layer: int) -> None:
        """`attention`, `gate` and `shared`, then `sync` with the gate."""

    def expert(self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...], parts: Sequence[Piece] = ()) -> Ticket:
        """Launch the expert of `piece` for `n_tokens` on the piece's GPU.

        Args:
            parts: `piece` lies there in these slices of columns, in their order: computed side by side, as one.
        """

    def cpu_expert(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        """Send activations down, compute on the CPU, send the result up; the ticket is the result's arrival."""

    def join(self, ticket: Ticket) -> None:
        """Make the compute stream wait for `ticket` before what is launched next."""

    def copy(self, piece: Piece, priority: int, after: tuple[Ticket, ...]) -> Ticket:
        """Queue a host-to-device copy; DEMAND overtakes every queued SPECULATIVE one, none in flight."""

    def copy_back(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket:
        """Queue a device-to-host copy of a piece; in order of asking among those that are ready."""

    def promote(self, ticket: Ticket) -> bool:
        """Make a queued speculative copy a demand copy; False when it has started."""

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw a queued speculative copy; False when it has started, or was demanded since."""

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """A lossy policy has changed the routing of layer `layer`: ids [n, k] (-1 where dropped) and weights [n, k]."""

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Source) -> Ticket:
        """Spend predictor time on `lane`; `blocking` makes the host wait for it."""

    def poll(self) -> list[Piece]:
        """Pieces whose copies have completed by now, in order of completion, each copy reported once."""

    def ended(self, ticket: Ticket) -> bool:
        """True when a copy has completed by now."""

    def quiet_s(self, tickets: Iterable[Ticket]) -> float:
        """Until when none of these copies can end, whatever is asked meanwhile; 0 where that cannot be known."""

    def end(self) -> None:
        """Finish the iteration: final layers and head, token read back by the host."""

    def wait_until(self, time_s: float) -> None:
        """Idle until an arrival."""

    def parts_s(self) -> list[float]:
        """GPU 0's timeline so far, partitioned in the order of `oracle.lanes.CAUSES`."""

    def drain(self) -> None:
        """Let every queued copy run dry, so that each byte asked for is billed."""
