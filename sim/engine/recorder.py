"""Writes down what an engine asks of a machine, as long as no time and no price has a part in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.flat import ints
from sim.engine.replay import BEGIN, COME, END, GATE, LEAVE, RUN, TURN, Player, Tape
from sim.machine.forwarding import ForwardingMachine
from sim.machine.protocol import DEMAND, NO_TICKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.base.quantities import Basis
    from sim.machine.cost import Cost
    from sim.machine.simulated import SimulatedMachine
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece, Pieces
    from sim.policy.tickets import Ticket
    from sim.workload.iterations import Iteration

MOST_CODES = 16_000_000
"""Of a tape; a run that says more is not kept in memory."""
_MOST = MOST_CODES  # machine integers where this is compiled
_BEGIN, _GATE, _LEAVE, _COME, _RUN, _TURN, _END, _DEMAND = BEGIN, GATE, LEAVE, COME, RUN, TURN, END, DEMAND


class AskedPrices:
    """A cost that notes whether a policy has asked what anything takes: its decisions may then rest on hardware."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.model = cost.model  # geometry is no price
        self.any = False

    def __getattr__(self, name: str) -> Any:
        self.any = True
        return getattr(self._cost, name)


class Recorder(ForwardingMachine):
    """Stands before a simulated machine; `tape` is what was asked for, `spoilt` why it is none.

    Every time that the engine hands over is held against what a `Player` of the tape would hand over: where they differ
    something else has a part in it (a policy that lets copies or experts wait for another thing). So are experts that
    have been demanded and not run before the next gate: whether that finds them there is a matter of time.
    """

    machine: SimulatedMachine
    player: Player  # who does what the tape says so far; there is none before the first iteration

    def __init__(self, machine: SimulatedMachine, pieces: Pieces) -> None:
        super().__init__(machine)
        self.keeps_pieces = True  # it is told what lies where, though the machine is not
        self.pieces = pieces
        self.tape = Tape()
        self.spoilt = ""
        self.begun = False
        self.n_whole = pieces.n_layers * pieces.n_experts
        self.under_way = bytearray(self.n_whole)  # demanded and not run yet
        self.n_under_way = 0
        self.taken = -1  # whose room has been taken
        # Of the layer that runs: where its gate stands on the tape (-1: nowhere yet), whether it is plain so far, how
        # many leave, come and have run, and by which layer an expert came last.
        self.start = -1
        self.is_plain = False
        self.n_leaving = 0
        self.n_coming = 0
        self.n_ran = 0
        self.n_gates = 0
        self.came = ints(self.n_whole)
        self.came_as = ints(self.n_whole)  # the how-manieth

    def spoil(self, why: str) -> None:
        """It cannot be played on other hardware."""
        if not self.spoilt:
            self.spoilt = why
            self.tape = Tape()  # let go of what there is
            self.start = -1

    def _close(self) -> None:
        """The layer that ran is over."""
        if self.n_under_way:
            self.spoil("copies that the gate may find under way")
        if self.start >= 0 and self.is_plain and self.n_ran:
            self.tape.plain(self.start, self.n_ran - self.n_coming, self.n_coming, self.n_leaving)
        self.start = -1

    # -- what is written down ---------------------------------------------------------------------------------------

    def place(self, piece: Piece) -> None:
        if piece.index >= self.n_whole:
            self.spoil("parts of experts")
        self.tape.placed.append(piece.index)

    def begin(self, iteration: Iteration) -> None:
        tape = self.tape
        if not self.begun:
            self.begun = True
            self.player = Player(self.machine, self.pieces, tape.budget_bytes, tape.placed)
        if tape.n > _MOST:
            self.spoil("its length")
        if not self.spoilt:
            tape.says(_BEGIN, 0)
            tape.iterations.append(iteration)
        self.machine.begin(iteration)

    def leave_unread(self, layers: frozenset[int]) -> None:
        self.spoil("layers whose routers nobody reads")
        self.machine.leave_unread(layers)

    def to_gate(self, layer: int) -> float:
        if not self.spoilt:
            self._close()
            self.start = self.tape.n
            self.is_plain = True
            self.n_leaving = 0
            self.n_coming = 0
            self.n_ran = 0
            self.n_gates += 1
            self.tape.says(_GATE, 0)
        return self.machine.to_gate(layer)

    def end(self) -> None:
        if not self.spoilt:
            self._close()
            self.tape.says(_END, 0)
        self.machine.end()

    def release(self, piece: Piece) -> None:
        index = piece.index
        if not self.begun or index >= self.n_whole or self.under_way[index]:
            self.spoil("parts of experts, or experts that leave unused")
        if not self.spoilt:
            if self.n_ran or self.came[index] == self.n_gates:
                self.is_plain = False
            self.n_leaving += 1
            self.tape.says(_LEAVE, index)
            self.player.leave(index)

    def demand(self, piece: Piece, ready_s: float) -> bool:
        index = piece.index
        self._take(index, ready_s, NO_TICKETS)
        known = self.machine.demand(piece, ready_s)
        if known:
            self._comes(index, None)
        else:
            self.taken = index  # it is asked for as a copy next
        return known

    def demand_turn(self, turn: Turn) -> bool:
        return False  # one by one, each with what its room says

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        index = piece.index
        if priority != _DEMAND:
            self.spoil("speculative copies")
        self._take(index, ready_s, after)
        ticket = self.machine.copy(piece, priority, ready_s, after)
        self._comes(index, ticket)
        return ticket

    def _take(self, index: int, ready_s: float, after: tuple[Ticket, ...]) -> None:
        """Hold what a copy waits for against what its room does."""
        if not self.begun or index >= self.n_whole:
            self.spoil("parts of experts")
        if not self.spoilt:
            player: Player = self.player
            if self.taken != index:
                player.take(index)
            if player.rooms.ready_s != ready_s or player.rooms.waits != after:
                self.spoil("what a copy waits for")
        self.taken = -1

    def _comes(self, index: int, ticket: Ticket | None) -> None:
        self.settled()
        if not self.spoilt:
            if self.n_ran or ticket is not None:
                self.is_plain = False
            self.came[index] = self.n_gates
            self.came_as[index] = self.n_coming
            self.n_coming += 1
            self.under_way[index] = 1
            self.n_under_way += 1
            self.tape.says(_COME, index)
            self.player.come(index, ticket, self.ends_s if ticket is None else 0.0)

    def expert(
        self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...], parts: Sequence[Piece]
    ) -> Ticket | None:
        index = piece.index
        if parts or not self.begun or index >= self.n_whole:
            self.spoil("parts of experts")
        if not self.spoilt:
            arrival: Ticket | None = self.player.arrival[index]
            own_s: float = self.player.arrived_s[index]
            told = arrival is None and arrived_s == 0.0 and len(after) == 1 and after[0].end_s == own_s
            if not told and (after != (NO_TICKETS if arrival is None else (arrival,)) or arrived_s != own_s):
                self.spoil("what an expert waits for")
        ticket = self.machine.expert(piece, n_tokens, arrived_s, after, parts)
        self.settled()
        if not self.spoilt:
            self.is_plain = False
            self.tape.says(_RUN, index)
            self.tape.put(n_tokens)
            self._ran(index, ticket, self.ends_s)
        return ticket

    def _ran(self, index: int, ticket: Ticket | None, ends_s: float) -> None:
        self.n_ran += 1
        if self.under_way[index]:
            self.under_way[index] = 0
            self.n_under_way -= 1
        self.player.ran(index, ticket, ends_s)

    def run_turn(self, turn: Turn) -> bool:
        if not self.machine.run_turn(turn):
            return False
        if self.spoilt:
            return True
        n_here = turn.n - self.n_coming
        if self.n_ran or n_here < 0:
            self.is_plain = False
        self.tape.says(_TURN, turn.n)
        for at in range(turn.n):
            index = turn.first + turn.experts[at]
            if self.player.arrival[index] is not None or self.player.arrived_s[index] != turn.arrived_s[at]:
                self.spoil("what an expert waits for")
                return True
            # Those that come run last, in the order in which they were asked for.
            coming = self.came[index] == self.n_gates
            if coming != (at >= n_here) or (coming and self.came_as[index] != at - n_here):
                self.is_plain = False
            self.tape.put(index)
            self._ran(index, None, turn.ends_s[at])
        return True

    # -- what a tape does not hold ----------------------------------------------------------------------------------

    def attention(self, layer: int) -> None:
        self.spoil("a hook between attention and gate")
        self.machine.attention(layer)

    def sync(self, ticket: Ticket) -> None:
        self.spoil("waiting")
        self.machine.sync(ticket)

    def ended(self, ticket: Ticket) -> bool:
        ended = self.machine.ended(ticket)
        if not ended:
            self.spoil("copies that the gate may find under way")
        return ended

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = NO_TICKETS) -> Ticket:
        self.spoil("experts on the CPU")
        return self.machine.cpu_expert(layer, expert, n_tokens, after)

    def join(self, ticket: Ticket) -> None:
        self.spoil("experts on the CPU")
        self.machine.join(ticket)

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        self.spoil("copies back")
        return self.machine.copy_back(piece, ready_s, after)

    def promote(self, ticket: Ticket) -> bool:
        self.spoil("copies that are promoted")
        return self.machine.promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        self.spoil("copies that are withdrawn")
        return self.machine.cancel(ticket)

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        self.spoil("predictions that take time")
        return self.machine.predict(duration_s, lane, blocking, basis)

    def poll(self) -> list[Piece]:
        self.spoil("completions")
        return self.machine.poll()

    def wait_until(self, time_s: float) -> None:
        self.spoil("arrivals")
        self.machine.wait_until(time_s)

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        self.spoil("several GPUs")
        self.machine.dispatch(layer, n_tokens)

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        self.spoil("reads from a drive")
        return self.machine.read(layer, expert, n_bytes, priority)

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        self.spoil("pages of the KV cache")
        self.machine.move_kv(n_pages, page_bytes, down)
