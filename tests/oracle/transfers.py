"""What moves: room taken and freed, copies demanded and speculative, and the policy's queue of prefetches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from oracle.counts import Tally
from oracle.hooks import overrides
from oracle.orders import Stamps
from oracle.orders import victim as victim_by_order
from oracle.prefetch_queue import PrefetchQueue
from oracle.protocol import DEMAND, SPECULATIVE, UNKNOWN_S, Machine, Ticket
from oracle.residency import DEMANDED, PLACED, PREFETCHED, Cache, Entry
from sim.base.errors import IllegalDecision

if TYPE_CHECKING:
    from oracle.pieces import Piece
    from oracle.view import View
    from sim.policy.api import Decisions, Policy
    from sim.policy.decisions import Wanted

Log = Callable[[str, int, int], None]


class Transfers:
    """The part of the engine that fills the cache; `Execution` adds what computes, `Engine` what serves layers.

    Args:
        log: called with (kind, layer, expert) for every decision applied, or None.
    """

    view: View

    def __init__(self, policy: Policy, machine: Machine, cache: Cache, log: Log | None) -> None:
        self.policy = policy
        self.machine = machine
        self.cache = cache
        self.log = log
        self.tally = Tally()
        self.queue = PrefetchQueue(len(cache.budget_bytes))
        self.layer = -1
        self.unrun: dict[int, int] = {}  # experts the current layer still owes, with their tokens
        # By link: speculative copies handed over and not known to have ended.
        self._speculative: list[dict[Piece, Ticket]] = [{} for _ in cache.budget_bytes]
        self._freed: list[deque[tuple[int, Ticket]]] = [deque() for _ in cache.budget_bytes]
        self._clean_bytes = list(cache.budget_bytes)  # room whose last computation is over
        self.tells_evicted = overrides(policy, "evicted")
        self._tells_placed = overrides(policy, "placed")
        self._own_copy_done = overrides(policy, "copy_done")
        self.stamps = Stamps()
        self.polls = False
        self._depth: int | None = None
        self._checked_s = -1.0  # when it was last asked which speculative copies have ended
        self._quiet_s = 0.0  # until when none of them can end

    if TYPE_CHECKING:

        def obey(self, decisions: Decisions, hook: str = "") -> None:
            """Apply a hook's decisions; `Engine` does."""

    def start(self) -> None:
        """Take over what binding the policy has settled: the cache's budgets, and whether polling is needed."""
        self._clean_bytes = list(self.cache.budget_bytes)
        self._depth = self.policy.prefetch_depth
        self.polls = self._own_copy_done or self._depth is not None
        if self.polls:
            self._needs_timing("copy_done and prefetch_depth")

    def _needs_timing(self, what: str) -> None:
        if "timing" not in self.policy.traits:
            raise IllegalDecision(f"{what} of {self.policy.name}: it depends on time; declare the trait 'timing'")

    # -- room -------------------------------------------------------------------------------------------------------

    def place(self, pieces: Iterable[Piece]) -> None:
        """Put pieces in place before the run, at no cost."""
        for piece in pieces:
            self.cache.add(piece, None, PLACED)
            self.stamps.stamp(piece)
            self._clean_bytes[piece.gpu] -= piece.n_bytes

    def evict(self, piece: Piece) -> None:
        """Free a piece; its room can be overwritten once its last computation (or its own copy) is over."""
        if piece.layer == self.layer and piece.expert in self.unrun:
            raise IllegalDecision(f"Evict of {piece}: layer {self.layer} still needs it; evict it after it ran")
        entry = self.cache.remove(piece)
        if self.log:
            self.log("evict", piece.layer, piece.expert)
        self.tally.n_evicted += 1
        if entry.origin == PREFETCHED and not entry.used:
            if entry.arrival is not None and self.machine.cancel(entry.arrival):
                self._withdrawn(entry)
                return
            self.tally.prefetch.gone(piece)
        busy = entry.last_use or entry.arrival
        if entry.copied_down is None and (busy is None or UNKNOWN_S < busy.end_s <= self.machine.now_s):
            self._clean_bytes[piece.gpu] += piece.n_bytes
        else:
            self._free(piece, () if busy is None else (busy,), entry.copied_down)
        if self.tells_evicted:
            self.policy.evicted(piece, self.view)

    def write_back(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Copy a resident piece to the host; whoever overwrites its room waits for that copy."""
        entry = self.cache.entries.get(piece)
        if entry is None or "cpu" in self.policy.traits:
            rule = "it is not resident" if entry is None else "a policy with the trait 'cpu' uses that lane otherwise"
            raise IllegalDecision(f"WriteBack of {piece}: {rule}; leave it out")
        busy = entry.last_use or entry.arrival
        ticket = entry.copied_down = self.machine.copy_back(piece, after if busy is None else (busy, *after))
        self._quiet_s = 0.0  # one link more to look at
        if self.log:
            self.log("write_back", piece.layer, piece.expert)
        return ticket

    def _withdrawn(self, entry: Entry) -> None:
        """A prefetch has left the copy engine's queue before it started; its room waits for what it waited for."""
        piece = entry.piece
        self._speculative[piece.gpu].pop(piece, None)
        self.tally.prefetch.cancelled(piece)
        self._free(piece, entry.room_after)
        if self.tells_evicted:
            self.policy.evicted(piece, self.view)

    def _free(self, piece: Piece, readers: tuple[Ticket, ...], copied_down: Ticket | None = None) -> None:
        """Give room back; whoever takes it waits for what still reads it."""
        now_s = self.machine.now_s
        if copied_down is not None:
            readers = (*readers, copied_down)
        busy = [ticket for ticket in readers if ticket.end_s == UNKNOWN_S or ticket.end_s > now_s]
        if busy:
            self._freed[piece.gpu].extend((0, ticket) for ticket in busy[:-1])
            self._freed[piece.gpu].append((piece.n_bytes, busy[-1]))
        else:
            self._clean_bytes[piece.gpu] += piece.n_bytes

    def _make_room(self, piece: Piece, speculative: bool) -> list[Piece] | None:
        """Evict what the policy names until the piece fits; None when it refuses. Returns the victims."""
        cache, victims = self.cache, []
        while not cache.fits(piece):
            victim = victim_by_order(self, piece, speculative)
            if victim is None:
                return None
            self.evict(victim)
            victims.append(victim)
        return victims

    def _take_room(self, piece: Piece) -> tuple[Ticket, ...]:
        """Computations that must end before the piece's room can be overwritten."""
        gpu, now_s = piece.gpu, self.machine.now_s
        freed, clean_bytes = self._freed[gpu], self._clean_bytes[gpu]
        while freed and UNKNOWN_S < freed[0][1].end_s <= now_s:
            clean_bytes += freed.popleft()[0]
        waits: tuple[Ticket, ...] = ()
        lacks_bytes, n_before = piece.n_bytes, 0  # of `waits`, those for room taken whole
        while clean_bytes < piece.n_bytes and freed:
            n_bytes, ticket = freed.popleft()
            clean_bytes += n_bytes
            waits = (*waits, ticket)
            if n_bytes > lacks_bytes:
                self._leave(gpu, n_bytes - lacks_bytes, waits[n_before:])
                clean_bytes -= n_bytes - lacks_bytes
            elif n_bytes:
                lacks_bytes, n_before = lacks_bytes - n_bytes, len(waits)
        self._clean_bytes[gpu] = clean_bytes - piece.n_bytes
        return waits

    def _leave(self, gpu: int, n_bytes: int, readers: tuple[Ticket, ...]) -> None:
        """What a smaller piece leaves of a room that is still read: whoever takes it next waits for the same."""
        self._freed[gpu].appendleft((n_bytes, readers[-1]))
        self._freed[gpu].extendleft((0, ticket) for ticket in reversed(readers[:-1]))

    # -- copies -----------------------------------------------------------------------------------------------------

    def fetch(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        """Demand a piece. One already on its way is moved to the front of the queue instead."""
        entry = self.cache.entries.get(piece)
        if entry is not None:
            self._promote(entry)
            return entry.arrival
        self.queue.remove(piece)
        ticket = self._demand(piece, after)
        if ticket is None:
            raise IllegalDecision(
                f"Fetch of {piece}: no room and {self.policy.name}.victim named nothing to evict; {self._way_to_room()}"
            )
        return ticket

    def _way_to_room(self) -> str:
        if self.policy.layer_budgets(self.view) is not None:
            return "name an expert of the layer's own that `view.evictable` allows, or give it a larger budget"
        return (
            "name a piece on that GPU that `view.evictable` allows, whatever its layer; a cache per layer says so "
            "by `layer_budgets`, or one layer's experts take the room of all (docs/policies.md)"
        )

    def _promote(self, entry: Entry) -> None:
        """What is needed now goes first, and is no longer among the prefetches that `DropQueue` withdraws."""
        if entry.arrival is None or entry.arrival.end_s != UNKNOWN_S:
            return
        if self.machine.promote(entry.arrival):  # Correction: one that has started stays under way
            self._speculative[entry.piece.gpu].pop(entry.piece, None)

    def _demand(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        """Make room for a piece and copy it; None when the policy refuses room."""
        if self._make_room(piece, speculative=False) is None:
            return None
        waits = self._take_room(piece)
        ticket = self.machine.copy(piece, DEMAND, waits + after if after else waits)
        self.cache.add(piece, ticket, DEMANDED)
        self.stamps.stamp(piece)
        self._count_demand(piece)
        return ticket

    def _count_demand(self, piece: Piece) -> None:
        tally = self.tally
        if tally.prefetch.n_issued:
            tally.prefetch.forget(piece)
        tally.n_demand += 1
        tally.demand_bytes += piece.n_bytes
        if self.log:
            self.log("fetch", piece.layer, piece.expert)

    def prefetch(self, piece: Piece, priority: float = 0.0, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        """Ask for a speculative copy; a piece already there or on its way is left alone."""
        if piece in self.cache.entries:
            return None
        if self._depth is not None:
            self.queue.push(piece, priority, after)
            self.pump()
            return None
        return self._hand_over(piece, after)

    def requeue(self, wanted: Sequence[Wanted], up_to_layer: int | None = None) -> None:
        """Replace the policy's queue and keep the copy engine fed."""
        if self._depth is None:
            raise IllegalDecision(f"Requeue of {self.policy.name}: it has no queue; declare a prefetch_depth")
        if up_to_layer is not None:
            self.queue.drop(None)
            self._withdraw(up_to_layer)
        self.queue.replace(wanted, but=self.cache.entries)
        self.pump()

    def _hand_over(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket | None:
        victims = self._make_room(piece, speculative=True)
        if victims is None:
            self.tally.prefetch.n_dropped += 1
            return None
        waits = self._take_room(piece)
        ticket = self.machine.copy(piece, SPECULATIVE, waits + after if after else waits)
        self.cache.add(piece, ticket, PREFETCHED).room_after = waits
        self.stamps.stamp(piece)
        self._count_prefetch(piece, ticket, victims)
        return ticket

    def _count_prefetch(self, piece: Piece, ticket: Ticket, victims: list[Piece]) -> None:
        prefetch = self.tally.prefetch
        prefetch.forget(piece)
        prefetch.issue(piece, victims)
        self._speculative[piece.gpu][piece] = ticket
        self._quiet_s = min(self._quiet_s, self.machine.quiet_s((ticket,)))
        if self._tells_placed:
            self.policy.placed(piece, self.view)
        if self.log:
            self.log("prefetch", piece.layer, piece.expert)

    def pump(self) -> None:
        """Hand queued prefetches to the copy engines, as many to each link as the policy's depth allows."""
        depth = self._depth
        if depth is None or not self.queue.waiting:
            return
        if any(len(flying) >= depth for flying in self._speculative):
            now_s = self.machine.now_s
            if now_s >= self._quiet_s and now_s != self._checked_s:  # while no time passes nothing ends
                self._checked_s = now_s
                self._forget_ended()
        links = [link for link, flying in enumerate(self._speculative) if len(flying) < depth]
        while links:
            link = links[0] if len(links) == 1 else self.queue.best(links)
            item = None if link is None else self.queue.pop(link)
            if link is None or item is None:
                return
            piece, after = item
            if piece not in self.cache.entries:
                self._hand_over(piece, after)
                if len(self._speculative[link]) >= depth:
                    links.remove(link)

    def _forget_ended(self) -> None:
        machine = self.machine
        now_s = machine.now_s
        left: list[Ticket] = []
        for flying in self._speculative:
            over = [
                piece
                for piece, ticket in flying.items()
                if UNKNOWN_S < ticket.end_s <= now_s or (ticket.end_s == UNKNOWN_S and machine.ended(ticket))
            ]
            for piece in over:
                del flying[piece]
            left += flying.values()
        self._quiet_s = machine.quiet_s(left)

    def cancel(self, piece: Piece) -> None:
        """Withdraw a prefetch that has not started; one in flight finishes."""
        if self.queue.remove(piece):
            return
        entry = self.cache.entries.get(piece)
        if entry is None or entry.origin != PREFETCHED or entry.used or entry.arrival is None:
            return
        if self.machine.cancel(entry.arrival):
            self.cache.remove(piece)
            if self.log:
                self.log("cancel", piece.layer, piece.expert)
            self._withdrawn(entry)

    def drop_queue(self, up_to_layer: int | None) -> None:
        """Withdraw queued prefetches (all, or up to a layer), in the policy's queue and on the copy engine."""
        self.queue.drop(up_to_layer)
        self._withdraw(up_to_layer)

    def _withdraw(self, up_to_layer: int | None) -> None:
        """Take back what has been handed over and has not started."""
        aimed = [
            piece
            for flying in self._speculative
            for piece in flying
            if up_to_layer is None or piece.layer <= up_to_layer
        ]
        if aimed:
            self._forget_ended()
            for piece in aimed:
                if piece in self._speculative[piece.gpu]:
                    self.cancel(piece)

    def poll(self) -> None:
        """A polling point: tell the policy what has arrived, and keep the copy engine fed."""
        if self._own_copy_done:
            for piece in self.machine.poll():
                self.obey(self.policy.copy_done(piece, self.view), "copy_done")
        if self.queue.waiting:
            self.pump()
