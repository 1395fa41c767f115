"""A run as a tape of what its engine asked of the machine, played to other machines: their clocks, no decisions.

Where no decision depends on time or prices, whoever leaves, comes and runs is the same on all hardware of one budget.
What does depend on time is kept here as the engine keeps it: when copies have arrived, until when experts are read,
and when room may be overwritten. Everything else is the machine's own arithmetic, so the figures are those of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.base.flat import floats, ints, longer_ints
from sim.engine.rooms import Rooms
from sim.engine.run_loop import Clockwork
from sim.machine.plain_layers import plain_layers
from sim.machine.protocol import DEMAND, NO_TICKETS
from sim.machine.simulated import SimulatedMachine
from sim.machine.turn import Turn
from sim.policy.pieces import Piece, Pieces
from sim.policy.tickets import Ticket
from sim.workload.iterations import Iteration

BEGIN, GATE, PLAIN, LEAVE, COME, RUN, TURN, END = range(8)
_BEGIN, _GATE, _PLAIN, _LEAVE, _COME, _RUN, _TURN, _DEMAND = BEGIN, GATE, PLAIN, LEAVE, COME, RUN, TURN, DEMAND
_VERB, _VERB_BITS, _MANY, _MANY_BITS = 7, 3, 0xFFFF, 16  # machine integers where this is compiled
_WHOLE: tuple[Piece, ...] = ()


class Tape:
    """What was asked for, as numbers: a verb in the lowest three bits, then what it is about.

    `BEGIN`: the next of `iterations`. `GATE`: the next layer. `LEAVE` and `COME`: an expert is evicted, demanded.
    `RUN`: an expert, and its tokens as a number of their own. `TURN`: how many experts, in as many numbers, run one
    after the other for one token each. `END`. An expert is the index of its piece. `placed`: those that are there from
    the start, in room for `budget_bytes`.

    `PLAIN` is a whole layer of which no more has to be known than how many of its experts are there, come, and leave:
    each for one token, into room of experts that nothing has read since the gate. When the host has read a gate,
    everything before it is over, so such room is clean and such experts have arrived on any machine.
    """

    def __init__(self) -> None:
        self.codes = ints(1024)
        self.n = 0
        self.iterations: list[Iteration] = []
        self.placed: list[int] = []
        self.budget_bytes = 0

    def put(self, code: int) -> None:
        """One number more."""
        if self.n == len(self.codes):
            self.codes = longer_ints(self.codes, 2 * self.n)
        self.codes[self.n] = code
        self.n += 1

    def said(self) -> list[int]:
        """All numbers."""
        return list(self.codes[: self.n])

    def say_again(self, numbers: list[int]) -> None:
        """Put all numbers of another."""
        self.codes = ints(max(1, len(numbers)))
        for code in numbers:
            self.put(code)

    def says(self, verb: int, about: int) -> None:
        """A verb."""
        self.put(verb + (about << _VERB_BITS))

    def plain(self, start: int, n_here: int, n_coming: int, n_leaving: int) -> None:
        """What has been put from `start` on is a plain layer."""
        self.n = start
        self.says(_PLAIN, (((n_leaving << _MANY_BITS) + n_here) << _MANY_BITS) + n_coming)


class Player:
    """One machine, and what lies on its only GPU by when."""

    def __init__(self, machine: SimulatedMachine, pieces: Pieces, budget_bytes: int, placed: Sequence[int]) -> None:
        n = pieces.n_layers * pieces.n_experts
        self.n_experts = pieces.n_experts
        self.machine = machine
        self.pieces = pieces.all
        self.rooms = Rooms([budget_bytes - len(placed) * pieces.all[0].n_bytes])
        self.turn = Turn(pieces.n_experts, pieces.all[0].n_bytes)
        self.here = ints(pieces.n_layers)  # of plain layers in a row
        self.coming = ints(pieces.n_layers)
        self.arrived_s = floats(n)
        self.busy_s = floats(n)  # until when it is read, or written
        self.arrival: list[Ticket | None] = [None] * n  # the same, where that is not settled at once
        self.busy: list[Ticket | None] = [None] * n

    def leave(self, index: int) -> None:
        """An expert's room is free once nothing reads it."""
        piece: Piece = self.pieces[index]
        busy: Ticket | None = self.busy[index]
        now_s = self.machine.now()
        if busy is None:
            self.rooms.give(0, piece.n_bytes, self.busy_s[index], NO_TICKETS, now_s)
        else:
            self.rooms.give(0, piece.n_bytes, 0.0, (busy,), now_s)

    def take(self, index: int) -> None:
        """Room for an expert: `rooms` says from when on."""
        piece: Piece = self.pieces[index]
        self.rooms.take(0, piece.n_bytes, self.machine.now())

    def come(self, index: int, arrival: Ticket | None, arrived_s: float) -> None:
        """An expert has been demanded."""
        self.arrival[index] = arrival
        self.busy[index] = arrival
        self.arrived_s[index] = arrived_s
        self.busy_s[index] = arrived_s

    def ran(self, index: int, ticket: Ticket | None, ends_s: float) -> None:
        """An expert has been launched: it is read until then."""
        self.busy[index] = ticket
        self.busy_s[index] = ends_s

    def _demand(self, index: int) -> None:
        rooms, machine = self.rooms, self.machine
        piece: Piece = self.pieces[index]
        self.take(index)
        if not rooms.waits and machine.demand(piece, rooms.ready_s):
            self.come(index, None, machine.ends_s)
            return
        ticket = machine.copy(piece, _DEMAND, rooms.ready_s, rooms.waits)
        self.come(index, ticket, machine.ends_s if ticket is None else 0.0)

    def _run(self, index: int, n_tokens: int) -> None:
        machine = self.machine
        piece: Piece = self.pieces[index]
        arrival: Ticket | None = self.arrival[index]
        after = NO_TICKETS if arrival is None else (arrival,)
        ticket = machine.expert(piece, n_tokens, self.arrived_s[index], after, _WHOLE)
        self.ran(index, ticket, machine.ends_s)

    def _run_turn(self, tape: Tape, at: int, n: int, layer: int) -> None:
        """Together where it is settled when each has arrived, else one by one."""
        turn = self.turn
        turn.begin(layer)
        settled = True
        for i in range(n):
            index = tape.codes[at + i]
            if self.arrival[index] is not None:
                settled = False
                break
            turn.experts[i] = index - turn.first
            turn.arrived_s[i] = self.arrived_s[index]
        turn.n = n
        turn.n_here = n
        if settled and self.machine.run_turn(turn):
            for i in range(n):
                self.ran(tape.codes[at + i], None, turn.ends_s[i])
        else:
            for i in range(n):
                self._run(tape.codes[at + i], 1)

    def _plain_layers(self, tape: Tape, at: int, layer: int) -> int:
        """The plain layers in a row from a place on the tape on, the first of them `layer`; how many there are."""
        n = 0
        while at + n < tape.n and tape.codes[at + n] & _VERB == _PLAIN:
            about = tape.codes[at + n] >> _VERB_BITS
            n_coming = about & _MANY
            self.here[n] = (about >> _MANY_BITS) & _MANY
            self.coming[n] = n_coming
            self.rooms.clean_bytes[0] += ((about >> 2 * _MANY_BITS) - n_coming) * self.turn.n_bytes
            n += 1
        if not plain_layers(self.machine, layer, n, self.here, self.coming, self.turn):
            for i in range(n):
                self._plain(layer + i, self.here[i], self.coming[i])
        return n

    def _plain(self, layer: int, n_here: int, n_coming: int) -> None:
        """A layer of which it does not matter which experts it runs."""
        machine, turn = self.machine, self.turn
        machine.to_gate(layer)
        for i in range(n_here):
            turn.arrived_s[i] = 0.0  # before the gate was read
        turn.n_here = n_here
        turn.n = n_here + n_coming
        if n_coming and not machine.demand_turn(turn):
            one: Piece = self.pieces[layer * self.n_experts]
            for i in range(n_here, turn.n):
                if not machine.demand(one, 0.0):
                    machine.copy(one, _DEMAND, 0.0, NO_TICKETS)
                turn.arrived_s[i] = machine.ends_s
        if not machine.run_turn(turn):
            one = self.pieces[layer * self.n_experts]
            for i in range(turn.n):
                machine.expert(one, 1, turn.arrived_s[i], NO_TICKETS, _WHOLE)

    def play(self, tape: Tape, clockwork: Clockwork) -> None:
        """All of it, as `drive` does."""
        machine = self.machine
        iterations = tape.iterations
        n_begun = 0
        layer = -1
        at = 0
        start_s = 0.0
        while at < tape.n:
            code = tape.codes[at]
            verb = code & _VERB
            about = code >> _VERB_BITS
            at += 1
            if verb == _PLAIN:
                n = self._plain_layers(tape, at - 1, layer + 1)
                layer += n
                at += n - 1
            elif verb == _GATE:
                layer += 1
                machine.to_gate(layer)
            elif verb == _TURN:
                self._run_turn(tape, at, about, layer)
                at += about
            elif verb == _LEAVE:
                self.leave(about)
            elif verb == _COME:
                self._demand(about)
            elif verb == _RUN:
                self._run(about, tape.codes[at])
                at += 1
            elif verb == _BEGIN:
                iteration = iterations[n_begun]
                n_begun += 1
                layer = -1
                start_s = machine.now()
                clockwork.begin(iteration, start_s, False)
                machine.begin(iteration)
            else:
                machine.end()
                clockwork.end(iteration, start_s, machine.now(), machine.parts_s(), machine.path_s())
        machine.drain()
