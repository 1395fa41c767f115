"""What moves: room made and given back, copies demanded and speculative, and the policy's queue of prefetches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sim.base.errors import IllegalDecision
from sim.engine.by_expert import (
    CANCEL,
    CANCEL_WHOLE,
    DEMAND_PIECE,
    DEMAND_PIECE_BYTES,
    HELD,
    ISSUED_WHOLE,
    REFUSED,
    WRITE_BACK,
    WRITE_BACK_BYTES,
)
from sim.engine.by_expert import DEMAND as DEMAND_WHOLE
from sim.engine.counts import Tally
from sim.engine.flying import Flying
from sim.engine.pending_experts import PendingExperts
from sim.engine.prefetch_queue import PrefetchQueue
from sim.engine.residency import DEMANDED, PLACED, PREFETCHED, Residency
from sim.engine.rooms import Rooms
from sim.engine.victims import Victims
from sim.machine.lanes import H2D
from sim.machine.protocol import DEMAND, NO_TICKETS, SPECULATIVE, Machine
from sim.machine.runs import lane_of
from sim.policy.api import overrides
from sim.policy.mistakes import located
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket, ends_at
from sim.policy.wishes import Wishes

if TYPE_CHECKING:
    from sim.policy.api import Decisions, Policy
    from sim.policy.decisions import Wanted
    from sim.policy.view import View

Log = Callable[[str, int, int], None]
# Machine integers where this is compiled.
_DEMAND, _SPECULATIVE, _DEMANDED, _PREFETCHED, _H2D = DEMAND, SPECULATIVE, DEMANDED, PREFETCHED, H2D
_NEVER_S = math.inf  # a name of this module is found sooner than one of another
_DEMAND_WHOLE = DEMAND_WHOLE


class Copies:
    """Fills the cache of one policy on one machine.

    Args:
        log: called with (kind, layer, expert) for every decision applied, or None.
    """

    view: View

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        residency: Residency,
        pending: PendingExperts,
        tally: Tally,
        log: Log | None,
    ) -> None:
        self.policy = policy
        self.machine = machine
        self.residency = residency
        self.pending = pending
        self.tally = tally
        self.prefetched = tally.prefetch
        self.log = log
        self.by_expert = tally.by_expert
        self.queue = PrefetchQueue(residency, self.by_expert)
        self.rooms = Rooms(residency.budget_bytes)
        self.victims: Victims | None = None  # of a policy that names a native order
        self.flying = Flying(residency.n_gpus)
        self.timing = "timing" in policy.traits
        self.depth = -1  # of the copy engines' queues; -1: pieces are handed over as they are asked for
        self.checked_s = -1.0  # when it was last asked which speculative copies have ended
        self.quiet_s = 0.0  # until when none of these can end
        self.tells_evicted = False
        self.tells_placed = False
        self.tells_copied = False
        self.polls = False
        self.take_hooks()

    def take_hooks(self) -> None:
        """Bind the hooks that are asked and told of room: once, not at each of millions of calls."""
        self._victim = self.policy.victim
        self._evicted = self.policy.evicted
        self._copy_done = self.policy.copy_done

    def start(self, view: View, victims: Victims | None, obey: Callable[[Decisions, str], None]) -> None:
        """Take over what binding the policy has settled: budgets, how deep it queues, who leaves.

        Args:
            obey: applies what a hook decides.
        """
        policy = self.policy
        self.obey = obey
        self.view = view
        self.victims = victims
        self.rooms = Rooms(self.residency.budget_bytes)
        self.depth = -1 if policy.prefetch_depth is None else policy.prefetch_depth
        self.tells_evicted = overrides(policy, "evicted")
        self.tells_placed = overrides(policy, "placed")
        self.tells_copied = overrides(policy, "copy_done")
        self.polls = self.tells_copied or self.depth >= 0
        if self.polls:
            self.needs_timing("copy_done and prefetch_depth")

    def needs_timing(self, what: str) -> None:
        """Raises IllegalDecision where the policy may not ask how far copies have come."""
        if not self.timing:
            raise IllegalDecision(f"{what} of {self.policy.name}: it depends on time; declare the trait 'timing'")

    # -- room -------------------------------------------------------------------------------------------------------

    def place(self, pieces: Iterable[Piece]) -> None:
        """Put pieces in place before the run, at no cost."""
        if not isinstance(pieces, Iterable):
            raise self._answered("initial", pieces, "pieces")
        for piece in pieces:
            if not isinstance(piece, Piece):
                raise self._answered("initial", piece, "pieces")
            self.residency.known(piece)
            self.residency.add(piece, None, 0.0, PLACED)
            if piece.serving:
                self.by_expert.add(HELD, piece, 1)
            self.rooms.clean_bytes[piece.gpu] -= piece.n_bytes
            self.machine.place(piece)
            if self.victims is not None:
                self.victims.placed(piece.index)

    def evict(self, piece: Piece) -> None:
        """Free a piece; its room can be overwritten once its last computation (or its own copy) is over."""
        self._take_off(piece)
        self._left(piece, self.machine.now())

    def _take_off(self, piece: Piece) -> None:
        """Take a piece off what is resident. Raises IllegalDecision where it has to stay, or is not there."""
        if self.pending.tokens_of(piece.layer, piece.expert):
            raise IllegalDecision(f"Evict of {piece}: layer {self.pending.layer} still needs it; evict it after it ran")
        self.residency.remove(piece)

    def _left(self, piece: Piece, now_s: float) -> None:
        """What follows from a piece's leaving, for its room and for those who are told."""
        index = piece.index
        if self.victims is not None:
            self.victims.left(index)
        if self.log is not None or self.machine.keeps_pieces:
            self._tell_of(piece, "evict")
        self.tally.n_evicted += 1
        self.by_expert.evicted(piece)
        if self.residency.rows[index].unused:
            if self._never_came(piece):
                return
            self.prefetched.gone(piece)
        self.residency.gone(piece, self.by_expert.pass_n)
        busy: Ticket | None = self.residency.busy[index]
        busy_s = self.residency.rows[index].busy_s if busy is None else busy.end_s
        if 0.0 <= busy_s <= now_s and not self.residency.read_back:  # nothing reads it: nearly always so
            self.rooms.clean_bytes[piece.gpu] += piece.n_bytes
        else:
            self._give_after(piece, now_s)
        if self.tells_evicted:
            self._evicted(piece, self.view)

    def _never_came(self, piece: Piece) -> bool:
        """Whether the copy of a prefetched piece could be withdrawn before it began."""
        arrival: Ticket | None = self.residency.arrival[piece.index]
        if arrival is None or not self.machine.cancel(arrival):
            return False
        self._withdrawn(piece)
        return True

    def _give_after(self, piece: Piece, now_s: float) -> None:
        """Give a room back of which only tickets say until when it is read or written."""
        residency, index = self.residency, piece.index
        busy: Ticket | None = residency.busy[index]
        busy_s = residency.rows[index].busy_s if busy is None else 0.0
        if busy is None and busy_s == residency.rows[index].arrived_s and busy_s > now_s:
            busy = residency.copied_at(index)  # nothing has read it yet
            busy_s = 0.0
        readers = NO_TICKETS if busy is None else (busy,)
        copied: Ticket | None = residency.read_back.pop(index, None)
        if copied is not None:
            readers = (*readers, copied)
        self.rooms.give(piece.gpu, piece.n_bytes, busy_s, readers, now_s)

    def _tell_of(self, piece: Piece, why: str) -> None:
        """Tell the machine and the log that a piece is no longer resident."""
        if self.machine.keeps_pieces:
            self.machine.release(piece)
        if self.log is not None:
            self.log(why, piece.layer, piece.expert)

    def write_back(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Copy a resident piece to the host; whoever overwrites its room waits for that copy."""
        residency, index = self.residency, piece.index
        if not residency.holds(piece) or "cpu" in self.policy.traits:
            rule = "it is not resident"
            if residency.holds(piece):
                rule = "a policy with the trait 'cpu' uses that lane otherwise"
            raise IllegalDecision(f"WriteBack of {piece}: {rule}; leave it out")
        busy: Ticket | None = residency.busy[index]
        busy_s = residency.rows[index].busy_s if busy is None else 0.0
        if busy is None and busy_s == residency.rows[index].arrived_s and busy_s > self.machine.now():
            busy = residency.copied_at(index)
            busy_s = 0.0
        ticket = self.machine.copy_back(piece, busy_s, after if busy is None else (busy, *after))
        residency.read_back[index] = ticket
        self.quiet_s = 0.0  # one link more to look at
        self.by_expert.add(WRITE_BACK, piece, 1)
        self.by_expert.add(WRITE_BACK_BYTES, piece, piece.n_bytes)
        if self.log is not None:
            self.log("write_back", piece.layer, piece.expert)
        return ticket

    def _withdrawn(self, piece: Piece) -> None:
        """A prefetch has left the copy engine's queue before it started; its room waits for what it waited for."""
        self.flying.drop(piece.index, piece.gpu)
        self.prefetched.cancelled(piece)
        ready_s, waits = self.residency.room_after.pop(piece.index, (0.0, NO_TICKETS))
        self.rooms.give(piece.gpu, piece.n_bytes, ready_s, waits, self.machine.now())
        if self.tells_evicted:
            self._evicted(piece, self.view)

    def _make_room(self, piece: Piece, speculative: bool, gone: list[Piece] | None, now_s: float) -> bool:
        """Evict what the policy names until the piece fits, into `gone`; False when it refuses."""
        while True:
            if self.victims is not None:
                index = self.victims.victim(piece, speculative)
                if index < 0:
                    return False
                victim: Piece = self.residency.pieces.all[index]
                self.residency.remove(victim)
            else:
                named = self._victim(piece, speculative, self.view)
                if named is None:
                    return False
                victim = self._checked(named)
            self._left(victim, now_s)
            if gone is not None:
                gone.append(victim)
            if self.residency.fits(piece):
                return True

    def _checked(self, named: Piece) -> Piece:
        """Take off what the policy has named to leave."""
        if not isinstance(named, Piece):
            raise self._answered("victim", named, "a resident Piece, or with None")
        try:
            self.residency.known(named)
            self._take_off(named)
        except IllegalDecision as error:
            raise located(error, self.policy, "victim", self.pending.layer) from error
        return named

    def _answered(self, hook: str, got: object, rule: str) -> IllegalDecision:
        error = IllegalDecision(f"got {got!r}: it answers with {rule}")
        return located(error, self.policy, hook, self.pending.layer)

    # -- copies -----------------------------------------------------------------------------------------------------

    def fetch(self, piece: Piece, after: tuple[Ticket, ...] = (), asked: bool = True) -> Ticket | None:
        """Demand a piece; its ticket, if that is asked for. One already on its way is moved to the front instead."""
        if self.residency.holds(piece):
            self.promote(piece)
            return self.residency.arrival_of(piece.index) if asked else None
        self.queue.remove(piece)
        if not self.demand(piece, after):
            raise IllegalDecision(
                f"Fetch of {piece}: no room and {self.policy.name}.victim named nothing to evict; {self._way_to_room()}"
            )
        return self.residency.arrival_of(piece.index) if asked else None

    def _way_to_room(self) -> str:
        if self.policy.layer_budgets(self.view) is not None:
            return "name an expert of the layer's own that `view.evictable` allows, or give it a larger budget"
        return (
            "name a piece on that GPU that `view.evictable` allows, whatever its layer; a cache per layer says so "
            "by `layer_budgets`, or one layer's experts take the room of all (docs/policies.md)"
        )

    def promote(self, piece: Piece) -> None:
        """What is needed now goes first, and is no longer among the prefetches that `DropQueue` withdraws."""
        arrival: Ticket | None = self.residency.arrival[piece.index]
        if arrival is not None and arrival.end_s < 0.0 and self.machine.promote(arrival):
            self.flying.drop(piece.index, piece.gpu)

    def demand(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> bool:
        """Make room for a piece and copy it; False when the policy refuses room."""
        now_s = self.machine.now()
        if not self.residency.fits(piece) and not self._make_room(piece, False, None, now_s):
            return False
        self.rooms.take(piece.gpu, piece.n_bytes, now_s)
        if not after and not self.rooms.waits and self.machine.demand(piece, self.rooms.ready_s):
            self.residency.add(piece, None, self.machine.ends_s, _DEMANDED)
        else:
            self._demand_after(piece, after)
        if self.victims is not None:
            self.victims.placed(piece.index)
        if self.prefetched.n_issued:
            self.prefetched.forget(piece)
        self.tally.n_demand += 1
        self.tally.demand_bytes += piece.n_bytes
        if piece.serving:
            self.by_expert.add(_DEMAND_WHOLE, piece, 1)
        else:
            self.by_expert.add(DEMAND_PIECE, piece, 1)
            self.by_expert.add(DEMAND_PIECE_BYTES, piece, piece.n_bytes)
        if self.log is not None:
            self.log("fetch", piece.layer, piece.expert)
        return True

    def _demand_after(self, piece: Piece, after: tuple[Ticket, ...]) -> None:
        """Demand a copy of which nobody knows yet when it ends."""
        rooms = self.rooms
        waits = rooms.waits + after
        ticket = self.machine.copy(piece, _DEMAND, rooms.ready_s, waits)
        self.residency.add(piece, ticket, self.machine.ends_s if ticket is None else 0.0, _DEMANDED)

    def prefetch(self, piece: Piece, priority: float = 0.0, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        """Ask for a speculative copy; a piece already there or on its way is left alone."""
        self.by_expert.predicted(piece)
        if self.residency.holds(piece):
            return None
        if self.depth >= 0:
            self.queue.push(piece, priority, after)
            self.pump()
            return None
        return self._hand_over(piece, after)

    def requeue(self, wanted: Sequence[Wanted], up_to_layer: int | None = None) -> None:
        """Replace the policy's queue and keep the copy engine fed."""
        self.needs_queue("Requeue")
        self._begin_anew(up_to_layer)
        self.queue.replace(wanted)
        self.pump()

    def requeue_from(
        self,
        wishes: Wishes,
        start: int,
        stop: int,
        fresh: int,
        after: tuple[Ticket, ...],
        up_to_layer: int | None,
        most: int,
    ) -> None:
        """The same with a slice of an iteration's wishes, of which those from `fresh` on wait for `after`."""
        self.needs_queue("RequeueFrom")
        if not 0 <= start <= stop <= len(wishes):
            raise IllegalDecision(f"RequeueFrom, got entries {start} to {stop}: there are {len(wishes)}; name some")
        self._begin_anew(up_to_layer)
        self.queue.take(wishes, start, stop, fresh, after, most)
        self.pump()

    def needs_queue(self, what: str) -> None:
        if self.depth < 0:
            raise IllegalDecision(f"{what} of {self.policy.name}: it has no queue; declare a prefetch_depth")

    def _begin_anew(self, up_to_layer: int | None) -> None:
        """Empty the queue before copies for layers up to this one are withdrawn; None withdraws none."""
        if up_to_layer is not None:
            self.queue.clear()
            self._withdraw(up_to_layer)

    def _hand_over(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket | None:
        gone: list[Piece] = []
        rooms, machine = self.rooms, self.machine
        now_s = machine.now()
        if not self.residency.fits(piece) and not self._make_room(piece, True, gone, now_s):
            self.prefetched.n_dropped += 1
            self.by_expert.add(REFUSED, piece, 1)
            return None
        rooms.take(piece.gpu, piece.n_bytes, now_s)
        ready_s, room_waits = rooms.ready_s, rooms.waits
        ticket = machine.copy(piece, _SPECULATIVE, ready_s, room_waits + after)
        if ticket is None:
            ticket = ends_at(machine.ends_s, _H2D, lane_of(_H2D, piece.gpu))
        self.residency.add(piece, ticket, 0.0, _PREFETCHED)
        if ready_s > 0.0 or room_waits:
            self.residency.room_after[piece.index] = (ready_s, room_waits)
        elif self.residency.room_after:
            self.residency.room_after.pop(piece.index, None)
        if self.victims is not None:
            self.victims.placed(piece.index)
        self.prefetched.forget(piece)
        self.prefetched.issue(piece, gone)
        if piece.serving:
            self.by_expert.add(ISSUED_WHOLE, piece, 1)
        self.flying.add(piece.index, piece.gpu, ticket)
        if self.depth >= 0:
            quiet_s = machine.ends_after_s(ticket)
            if quiet_s < self.quiet_s:
                self.quiet_s = quiet_s
        if self.tells_placed:
            self.policy.placed(piece, self.view)
        if self.log is not None:
            self.log("prefetch", piece.layer, piece.expert)
        return ticket

    def arrived(self, piece: Piece) -> bool:
        """Whether a piece is there: resident, and its copy has completed by now."""
        if not self.residency.holds(piece):
            return False
        arrival: Ticket | None = self.residency.arrival[piece.index]
        if arrival is not None:
            return self.machine.ended(arrival)
        arrived_s: float = self.residency.rows[piece.index].arrived_s
        return arrived_s <= self.machine.now()

    def n_arrived(self, pieces: Iterable[Piece]) -> int:
        """How many of these pieces are there."""
        n = 0
        for piece in pieces:
            if self.arrived(self.residency.known(piece)):
                n += 1
        return n

    def pump(self) -> None:
        """Hand queued prefetches to the copy engines, as many to each link as the policy's depth allows."""
        if self.depth < 0 or not self.queue.n_waiting:
            return
        queue, flying = self.queue, self.flying
        full = False
        for link in range(flying.n_links):
            full = full or flying.n[link] >= self.depth
        if full:
            now_s = self.machine.now()
            if now_s >= self.quiet_s and now_s != self.checked_s:  # while no time passes nothing ends
                self.checked_s = now_s
                self._forget_ended()
        while True:
            link = queue.best(flying, self.depth)
            if link < 0:
                return
            piece = queue.pop(link)
            if not self.residency.holds(piece):
                self._hand_over(piece, queue.after[piece.index])

    def poll(self) -> None:
        """A polling point: tell the policy what has arrived, and keep the copy engine fed."""
        if self.tells_copied:
            for piece in self.machine.poll():
                said = self._copy_done(piece, self.view)
                if said is not None:
                    self.obey(said, "copy_done")
        if self.queue.n_waiting:
            self.pump()

    def _forget_ended(self) -> None:
        machine, flying = self.machine, self.flying
        now_s = machine.now()
        quiet_s = _NEVER_S
        for link in range(flying.n_links):
            index = flying.after(link)
            while index >= 0:
                after = flying.after(link, index)
                ticket: Ticket = flying.tickets[index]
                end_s = ticket.end_s
                if 0.0 <= end_s <= now_s or (end_s < 0.0 and machine.ended(ticket)):
                    flying.drop(index, link)
                else:
                    quiet_s = min(quiet_s, machine.ends_after_s(ticket))
                index = after
        self.quiet_s = quiet_s

    def cancel(self, piece: Piece) -> None:
        """Withdraw a prefetch that has not started; one in flight finishes."""
        if self.queue.remove(piece):
            return
        residency, index = self.residency, piece.index
        if not residency.holds(piece) or not residency.rows[index].unused:
            return
        arrival: Ticket | None = residency.arrival[index]
        if arrival is not None and self.machine.cancel(arrival):
            residency.remove(piece)
            if self.victims is not None:
                self.victims.left(index)
            self.by_expert.add(CANCEL, piece, 1)
            if piece.serving:
                self.by_expert.add(CANCEL_WHOLE, piece, 1)
            self._tell_of(piece, "cancel")
            self._withdrawn(piece)

    def drop_queue(self, up_to_layer: int | None) -> None:
        """Withdraw queued prefetches (all, or up to a layer), in the policy's queue and on the copy engine."""
        if up_to_layer is None:
            self.queue.clear()
        else:
            self.queue.drop(up_to_layer)
        self._withdraw(up_to_layer)

    def _withdraw(self, up_to_layer: int | None) -> None:
        """Take back what has been handed over and has not started."""
        flying = self.flying
        last = self.residency.pieces.n_layers if up_to_layer is None else up_to_layer
        aimed = False
        for link in range(flying.n_links):
            index = flying.after(link)
            while index >= 0:
                piece: Piece = self.residency.pieces.all[index]
                aimed = aimed or piece.layer <= last
                index = flying.after(link, index)
        if not aimed:
            return
        self._forget_ended()
        for link in range(flying.n_links):
            index = flying.after(link)
            while index >= 0:
                after = flying.after(link, index)
                piece = self.residency.pieces.all[index]
                if piece.layer <= last:
                    self.cancel(piece)
                index = after
