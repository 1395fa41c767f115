"""What a machine offers. The engine speaks only these verbs, so simulator and hardware run the same loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    import numpy as np

    from sim.base.quantities import Basis
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece
    from sim.workload.iterations import Iteration

DEMAND, SPECULATIVE = 0, 1
NO_TICKETS: tuple[Ticket, ...] = ()


class Machine:
    """Verbs that start something answer with a ticket; it starts at max(host launch, stream order, `after`).

    `expert` and `copy` may answer None: its end is settled already, and is `ends_s`, for the cause `cause`. Only
    arithmetic knows that. What such a machine has settled comes back as plain times (`arrived_s`, `ready_s`); they are
    0 on a machine that always answers with tickets. One that `keeps_pieces` is told by `place` and `release` what lies
    where; one that `gathers` is told by `dispatch` how many tokens go to which GPU.
    """

    __slots__ = ("cause", "ends_s", "gathers", "keeps_pieces")

    def __init__(self) -> None:
        self.ends_s = 0.0
        self.cause = 0
        self.keeps_pieces = True
        self.gathers = False

    def now(self) -> float:
        """The host's clock (simulated or measured)."""
        raise NotImplementedError

    def begin(self, iteration: Iteration) -> None:
        """Start an iteration: embed its tokens, price its layers."""
        raise NotImplementedError

    def attention(self, layer: int) -> None:
        """Launch the attention block of MoE layer `layer`, with any dense layers before it."""
        raise NotImplementedError

    def gate(self, layer: int) -> Ticket:
        """Launch the gate and start reading its choice back to the host."""
        raise NotImplementedError

    def shared(self, layer: int) -> None:
        """Launch the shared expert (no-op for models without one)."""
        raise NotImplementedError

    def sync(self, ticket: Ticket) -> None:
        """Block the host until `ticket` has ended and its result has been read."""
        raise NotImplementedError

    def to_gate(self, layer: int) -> float:
        """`attention`, `gate` and `shared`, then `sync` with the gate; what the host's clock says then."""
        self.attention(layer)
        ticket = self.gate(layer)
        self.shared(layer)
        self.sync(ticket)
        return self.now()

    def leave_unread(self, layers: frozenset[int]) -> None:
        """In these layers the host does not wait to read the gate's choice; a machine that has to, does."""

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        """The gate has been read: so many pairs of token and expert go to each GPU."""

    def expert(
        self,
        piece: Piece,
        n_tokens: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        parts: Sequence[Piece],
    ) -> Ticket | None:
        """Launch the expert of `piece` for `n_tokens` on the piece's GPU.

        Args:
            arrived_s: when its copies had ended, where that is known. after: what else it waits for, copies first.
            parts: `piece` lies there in these slices of columns, in their order: computed side by side, as one.
        """
        raise NotImplementedError

    def run_turn(self, turn: Turn) -> bool:
        """Launch experts one after the other, all of whose times are known then; False where they are not, undone."""
        return False

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Send activations down, compute on the CPU, send the result up; the ticket is the result's arrival.

        Args:
            after: the CPU does not begin before these have ended.
        """
        raise NotImplementedError

    def join(self, ticket: Ticket) -> None:
        """Make the compute stream wait for `ticket` before what is launched next."""
        raise NotImplementedError

    def demand(self, piece: Piece, ready_s: float) -> bool:
        """`copy` of a demanded piece, no sooner than `ready_s`, whose end is known then: `ends_s`.

        False where it is not known, and nothing was done.
        """
        return False

    def demand_turn(self, turn: Turn) -> bool:
        """`demand` of the experts of a turn that are not there, into clean room: `turn.arrived_s` of each."""
        return False

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        """Queue a host-to-device copy; DEMAND overtakes every queued SPECULATIVE one, none in flight.

        Args:
            ready_s: it starts no sooner. after: nor before these have ended.
        """
        raise NotImplementedError

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        """Queue a read of an expert from the drive into host memory; priorities as in `copy`."""
        raise NotImplementedError

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        """Queue a device-to-host copy of a piece; in order of asking among those that are ready."""
        raise NotImplementedError

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        """Copy pages of the KV cache to host memory (`down`) or back, each in one copy; GPU 0 waits for the last."""
        raise NotImplementedError

    def promote(self, ticket: Ticket) -> bool:
        """Make a queued speculative copy or read a demanded one; False when it has started."""
        raise NotImplementedError

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw a queued speculative copy or read; False when it has started, or was demanded since."""
        raise NotImplementedError

    def place(self, piece: Piece) -> None:
        """A piece lies on its GPU from the start."""

    def release(self, piece: Piece) -> None:
        """A piece's room is given up; what still reads it goes on reading."""

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """A lossy policy has changed the routing of layer `layer`: ids [n, k] (-1 where dropped) and weights [n, k]."""

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        """Spend predictor time on `lane`; `blocking` makes the host wait for it."""
        raise NotImplementedError

    def poll(self) -> list[Piece]:
        """Pieces whose copies have completed by now, in order of completion, each copy reported once."""
        raise NotImplementedError

    def ended(self, ticket: Ticket) -> bool:
        """True when a copy has completed by now."""
        raise NotImplementedError

    def ends_after_s(self, ticket: Ticket) -> float:
        """Until when a copy cannot end, whatever is asked meanwhile; 0 where that cannot be known."""
        return 0.0

    def end(self) -> None:
        """Finish the iteration: final layers and head, token read back by the host."""
        raise NotImplementedError

    def wait_until(self, time_s: float) -> None:
        """Idle until an arrival."""
        raise NotImplementedError

    def parts_s(self) -> list[float]:
        """GPU 0's timeline so far, partitioned in the order of `sim.machine.lanes.CAUSES`."""
        raise NotImplementedError

    def path_s(self) -> MutableSequence[float]:
        """Seconds of the critical path up to the host's clock, by `sim.base.lanes.RESOURCES`; what is charged to none
        of these was spent waiting for arrivals. To be asked between iterations; the answer is written over by the next
        one.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Let every queued copy run dry, so that each byte asked for is billed."""
        raise NotImplementedError
