"""The engine counts: it applies each decision to the cache and hands the work to the machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from sim.api import overrides
from sim.cache import DEMANDED, PLACED, PREFETCHED, Cache, Entry
from sim.decisions import (
    Cancel,
    DropQueue,
    Evict,
    Fetch,
    Predict,
    Prefetch,
    Requeue,
    RunCpu,
    RunGpu,
    Serve,
    WriteBack,
)
from sim.errors import IllegalDecision
from sim.machine import DEMAND, SPECULATIVE, UNKNOWN_S, Machine, Ticket
from sim.prefetch_queue import PrefetchQueue
from sim.tally import HIT, LATE, MISS, ON_CPU, PARTIAL, Tally
from sim.view import View

if TYPE_CHECKING:
    from sim.api import Decisions, Policy
    from sim.cost import Cost
    from sim.future import Future
    from sim.iterations import Arrays, Gate
    from sim.pieces import Piece, Pieces

Log = Callable[[str, int, int], None]


class Engine:
    """Applies decisions for one policy on one machine.

    Args:
        log: called with (kind, layer, expert) for every decision applied, or None.
    """

    def __init__(
        self, policy: Policy, machine: Machine, cache: Cache, pieces: Pieces, cost: Cost, arrays: Arrays,
        top_k: int, future: Future | None = None, log: Log | None = None,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.machine = machine
        self.cache = cache
        self.pieces = pieces
        self.cost = cost
        self.arrays = arrays
        self.future = future
        self.log = log
        self.tally = Tally()
        self.queue = PrefetchQueue()
        self.layer = -1
        self.unrun: dict[int, int] = {}  # experts the current layer still owes, with their tokens
        self._ran_on_cpu: set[int] = set()
        self._joins: dict[int, list[Ticket]] = {}  # layer -> CPU results its stream must wait for
        self._speculative: dict[Piece, Ticket] = {}  # speculative copies handed over and not known to have ended
        self._freed: list[deque[tuple[int, Ticket]]] = [deque() for _ in cache.budget_bytes]
        self._clean_bytes = list(cache.budget_bytes)  # room whose last computation is over
        self.view = View(self, cost.model.id, top_k, cost.model.hidden_size)
        self.tells_evicted = overrides(policy, "evicted")
        self._tells_placed = overrides(policy, "placed")
        self._own_gate = overrides(policy, "gate_done")
        self._own_expert_done = overrides(policy, "expert_done")
        self._own_copy_done = overrides(policy, "copy_done")
        self.polls = False

    # -- obeying ----------------------------------------------------------------------------------------------------

    def obey(self, decisions: Decisions) -> None:
        """Apply a hook's decisions in order; a generator receives each decision's ticket."""
        if decisions is None:
            return
        if isinstance(decisions, Generator):
            answer: Any = None
            while True:
                try:
                    decision = decisions.send(answer)
                except StopIteration:
                    return
                answer = self.apply(decision)
        for decision in decisions:
            self.apply(decision)

    def apply(self, decision: Any) -> Ticket | None:
        """Apply one decision. Raises IllegalDecision naming decision, rule and state."""
        if isinstance(decision, RunGpu):
            return self.run_gpu(decision.expert, decision.after)
        if isinstance(decision, Fetch):
            return self.fetch(decision.piece, decision.after)
        if isinstance(decision, Prefetch):
            return self.prefetch(decision.piece, decision.priority, decision.after)
        if isinstance(decision, RunCpu):
            return self.run_cpu(decision.expert, decision.join_layer)
        if isinstance(decision, Serve):
            self._serve_owed()
        elif isinstance(decision, Requeue):
            self.requeue(decision.wanted)
        elif isinstance(decision, Evict):
            self.evict(decision.piece)
        elif isinstance(decision, WriteBack):
            return self.write_back(decision.piece, decision.after)
        elif isinstance(decision, Predict):
            return self.machine.predict(decision.duration_s, decision.lane, decision.blocking, decision.basis)
        elif isinstance(decision, Cancel):
            self._needs_timing("Cancel")
            self.cancel(decision.piece)
        elif isinstance(decision, DropQueue):
            self._needs_timing("DropQueue")
            self.drop_queue(decision.up_to_layer)
        else:
            raise IllegalDecision(f"decision, got {decision!r}: not a decision; see sim.decisions")
        return None

    def start(self) -> None:
        """Take over what binding the policy has settled: the cache's budgets, and whether polling is needed."""
        self._clean_bytes = list(self.cache.budget_bytes)
        self.polls = self._own_copy_done or self.policy.prefetch_depth is not None
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
        if busy is not None and (busy.end_s == UNKNOWN_S or busy.end_s > self.machine.now_s):
            self._freed[piece.gpu].append((piece.n_bytes, busy))
        else:
            self._clean_bytes[piece.gpu] += piece.n_bytes
        self._told_evicted(piece)

    def write_back(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Copy a resident piece to the host; whoever overwrites its room waits for that copy."""
        entry = self.cache.entries.get(piece)
        if entry is None or "cpu" in self.policy.traits:
            rule = "it is not resident" if entry is None else "a policy with the trait 'cpu' uses that lane otherwise"
            raise IllegalDecision(f"WriteBack of {piece}: {rule}; leave it out")
        busy = entry.last_use or entry.arrival
        ticket = entry.last_use = self.machine.copy_back(piece, after if busy is None else (busy, *after))
        if self.log:
            self.log("write_back", piece.layer, piece.expert)
        return ticket

    def _withdrawn(self, entry: Entry) -> None:
        """A prefetch has left the copy engine's queue before it started; its room waits for what it waited for."""
        piece, now_s = entry.piece, self.machine.now_s
        self._speculative.pop(piece, None)
        self.tally.prefetch.cancelled(piece)
        busy = [ticket for ticket in entry.room_after if ticket.end_s == UNKNOWN_S or ticket.end_s > now_s]
        if busy:
            self._freed[piece.gpu].extend((0, ticket) for ticket in busy[:-1])
            self._freed[piece.gpu].append((piece.n_bytes, busy[-1]))
        else:
            self._clean_bytes[piece.gpu] += piece.n_bytes
        self._told_evicted(piece)

    def _told_evicted(self, piece: Piece) -> None:
        if self.tells_evicted:
            self.policy.evicted(piece, self.view)

    def _make_room(self, piece: Piece, speculative: bool) -> list[Piece] | None:
        """Evict what the policy names until the piece fits; None when it refuses. Returns the victims."""
        victims: list[Piece] = []
        while not self.cache.fits(piece):
            victim = self.policy.victim(piece, speculative, self.view)
            if victim is None:
                return None
            self.evict(victim)
            victims.append(victim)
        return victims

    def _take_room(self, piece: Piece) -> tuple[Ticket, ...]:
        """Computations that must end before the piece's room can be overwritten."""
        gpu, now_s = piece.gpu, self.machine.now_s
        freed = self._freed[gpu]
        while freed and freed[0][1].end_s != UNKNOWN_S and freed[0][1].end_s <= now_s:
            self._clean_bytes[gpu] += freed.popleft()[0]
        waits: list[Ticket] = []
        while self._clean_bytes[gpu] < piece.n_bytes and freed:
            n_bytes, ticket = freed.popleft()
            self._clean_bytes[gpu] += n_bytes
            waits.append(ticket)
        self._clean_bytes[gpu] -= piece.n_bytes
        return tuple(waits)

    # -- copies -----------------------------------------------------------------------------------------------------

    def fetch(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        """Demand a piece. One already on its way is moved to the front of the queue instead."""
        entry = self.cache.entries.get(piece)
        if entry is not None:
            self._promote(entry)
            return entry.arrival
        self.queue.remove(piece)
        if self._make_room(piece, speculative=False) is None:
            raise IllegalDecision(
                f"Fetch of {piece}: no room and {self.policy.name}.victim named nothing to evict; "
                "give the policy a larger expert budget, or evict first"
            )
        return self._fetch_into_room(piece, after)

    def _promote(self, entry: Entry) -> None:
        """What is needed now goes first, and is no longer among the prefetches that `DropQueue` withdraws."""
        if entry.arrival is not None and entry.arrival.end_s == UNKNOWN_S:
            self.machine.promote(entry.arrival)
            self._speculative.pop(entry.piece, None)

    def _fetch_into_room(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket:
        waits = self._take_room(piece)
        ticket = self.machine.copy(piece, DEMAND, waits + after if after else waits)
        self.cache.add(piece, ticket, DEMANDED)
        if self.tally.prefetch.n_issued:
            self.tally.prefetch.forget((piece,))
        self.tally.n_demand += 1
        self.tally.demand_bytes += piece.n_bytes
        if self.log:
            self.log("fetch", piece.layer, piece.expert)
        return ticket

    def prefetch(self, piece: Piece, priority: float = 0.0, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        """Ask for a speculative copy; a piece already there or on its way is left alone."""
        if piece in self.cache.entries:
            return None
        if self.policy.prefetch_depth is not None:
            self.queue.push(piece, priority, after)
            self.pump()
            return None
        return self._hand_over(piece, after)

    def requeue(self, wanted: tuple[Prefetch, ...]) -> None:
        """Replace the policy's queue and keep the copy engine fed."""
        if self.policy.prefetch_depth is None:
            raise IllegalDecision(f"Requeue of {self.policy.name}: it has no queue; declare a prefetch_depth")
        self.queue.drop(None)
        entries, push = self.cache.entries, self.queue.push
        for piece, priority, after in wanted:
            if piece not in entries:
                push(piece, priority, after)
        self.pump()

    def _hand_over(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket | None:
        victims = self._make_room(piece, speculative=True)
        if victims is None:
            self.tally.prefetch.n_dropped += 1
            return None
        self.tally.prefetch.forget((piece,))
        waits = self._take_room(piece)
        ticket = self.machine.copy(piece, SPECULATIVE, waits + after if after else waits)
        self.cache.add(piece, ticket, PREFETCHED).room_after = waits
        self._speculative[piece] = ticket
        self.tally.prefetch.issue(piece, victims)
        if self._tells_placed:
            self.policy.placed(piece, self.view)
        if self.log:
            self.log("prefetch", piece.layer, piece.expert)
        return ticket

    def pump(self) -> None:
        """Hand queued prefetches to the copy engine, as many as the policy's depth allows."""
        depth = self.policy.prefetch_depth
        if depth is None or not self.queue:
            return
        if len(self._speculative) >= depth:
            self._forget_ended()
        while len(self._speculative) < depth:
            item = self.queue.pop()
            if item is None:
                return
            piece, after = item
            if piece not in self.cache.entries:
                self._hand_over(piece, after)

    def _forget_ended(self) -> None:
        ended = self.machine.ended
        for piece in [piece for piece, ticket in self._speculative.items() if ended(ticket)]:
            del self._speculative[piece]

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
        self._forget_ended()
        for piece in [p for p in self._speculative if up_to_layer is None or p.layer <= up_to_layer]:
            self.cancel(piece)

    def poll(self) -> None:
        """A polling point: tell the policy what has arrived, and keep the copy engine fed."""
        if not self.polls:
            return
        if self._own_copy_done:
            for piece in self.machine.poll():
                self.obey(self.policy.copy_done(piece, self.view))
        self.pump()

    # -- a layer ----------------------------------------------------------------------------------------------------

    def serve(self, gate: Gate) -> None:
        """Serve one layer whose gate has spoken: classify, let the policy decide, check that nothing is owed."""
        self.unrun = dict(gate.needs)
        classes = self._classify(gate)
        if self._own_gate:
            self.obey(self.policy.gate_done(gate, self.view))
        else:
            self._serve_owed()
        if self.unrun:
            raise IllegalDecision(
                f"layer {gate.layer} of {self.policy.name}: experts {sorted(self.unrun)} were not executed; "
                "every needed expert must run once, on GPU or CPU"
            )
        counts = self.tally.hits[gate.iteration.phase]
        for expert, n_tokens in gate.asked.items():
            kind = ON_CPU if expert in self._ran_on_cpu else classes[expert]
            counts.experts[kind] += 1
            counts.tokens[kind] += n_tokens
        if self._ran_on_cpu:
            self._ran_on_cpu.clear()
        self._join(gate.layer)

    def _classify(self, gate: Gate) -> dict[int, int]:
        """How the gate finds each expert it asks for, before the policy reacts."""
        entries, whole = self.cache.entries, self.pieces.whole[gate.layer]
        now_s, prefetch, counts = self.machine.now_s, self.tally.prefetch, self.tally.hits[gate.iteration.phase]
        classes = {}
        for expert in gate.asked:
            piece = whole[expert]
            entry = entries.get(piece)
            if entry is not None:
                arrival = entry.arrival
                if arrival is None or (UNKNOWN_S < arrival.end_s <= now_s) or self.machine.ended(arrival):
                    classes[expert] = HIT
                    if not entry.used and entry.origin == PREFETCHED:
                        counts.prefetched += 1
                else:
                    classes[expert] = LATE
                    prefetch.asked_while_late(piece)
            else:
                classes[expert] = self._classify_parts(piece)
        return classes

    def _classify_parts(self, piece: Piece) -> int:
        parts = self.cache.parts(piece.layer, piece.expert)
        if not parts:
            self.tally.prefetch.asked_but_absent(piece)
            return MISS
        entries = [self.cache.entries[part] for part in parts]
        here = [e for e in entries if e.arrival is None or self.machine.ended(e.arrival)]
        for entry in entries:
            if entry not in here:
                self.tally.prefetch.asked_while_late(entry.piece)
        enough = self.cache.sufficient(piece)
        if enough is None:
            return PARTIAL if here else LATE
        return HIT if all(entry in here for entry in enough) else LATE

    def _serve_owed(self) -> None:
        """The default service: fetch what is missing, run residents meanwhile, then what arrives, in router order."""
        policy, view, whole = self.policy, self.view, self.pieces.whole[self.layer]
        entries = self.cache.entries
        residents, missing = [], []
        for expert in self.unrun:
            piece = whole[expert]
            entry = entries.get(piece)
            if entry is None:
                missing.append(piece)
                continue
            residents.append(expert)
            self._promote(entry)
            policy.accessed(piece, True, view)
        later: list[Piece] = []
        fetched: list[Piece] = []
        for piece in missing:
            self.queue.remove(piece)
            if self._make_room(piece, speculative=False) is None:
                later.append(piece)
                continue
            self._fetch_into_room(piece)
            policy.accessed(piece, False, view)
            fetched.append(piece)
        for expert in residents:
            self.run_gpu(expert)
        for piece in fetched:
            self.run_gpu(piece.expert)
        for piece in later:  # more experts than room: each waits until one before it has run
            self.fetch(piece)
            policy.accessed(piece, False, view)
            self.run_gpu(piece.expert)

    def run_gpu(self, expert: int, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Compute an owed expert on the GPU, each of its pieces as it arrives."""
        n_tokens = self.unrun.get(expert)
        if n_tokens is None:
            raise IllegalDecision(f"RunGpu({expert}): layer {self.layer} does not owe it; run each needed expert once")
        whole = self.pieces.whole[self.layer][expert]
        entry = self.cache.entries.get(whole)
        enough = [entry] if entry is not None else self.cache.sufficient(whole)
        if enough is None:
            raise IllegalDecision(f"RunGpu({expert}): layer {self.layer}'s expert is not on the GPU; Fetch it first")
        for used in enough:
            ticket = self._compute(used, n_tokens, after)
        del self.unrun[expert]
        self.tally.n_executed += n_tokens
        if self.log:
            self.log("gpu", self.layer, expert)
        if self._own_expert_done:
            self.obey(self.policy.expert_done(self.layer, expert, self.view))
        if self.polls:
            self.poll()
        return ticket

    def _compute(self, entry: Entry, n_tokens: int, after: tuple[Ticket, ...]) -> Ticket:
        if entry.arrival is not None:
            after = (entry.arrival, *after)
        ticket = self.machine.expert(entry.piece, n_tokens, after)
        entry.last_use = ticket
        if not entry.used:
            self.tally.used(entry)
        return ticket

    def run_cpu(self, expert: int, join_layer: int | None = None) -> Ticket:
        """Compute an owed expert on the CPU; its result joins the stream at the end of `join_layer`."""
        n_tokens = self.unrun.pop(expert, None)
        if n_tokens is None:
            raise IllegalDecision(f"RunCpu({expert}): layer {self.layer} does not owe it; run each needed expert once")
        if "cpu" not in self.policy.traits:
            raise IllegalDecision(f"RunCpu({expert}) of {self.policy.name}: needs the trait 'cpu'; declare it")
        join_layer = self.layer if join_layer is None else join_layer
        if not self.layer <= join_layer < self.pieces.n_layers:
            raise IllegalDecision(f"RunCpu({expert}, join_layer={join_layer}): join at this layer or a later one")
        ticket = self.machine.cpu_expert(self.layer, expert, n_tokens)
        self._joins.setdefault(join_layer, []).append(ticket)
        self._ran_on_cpu.add(expert)
        self.tally.n_executed += n_tokens
        if self.log:
            self.log("cpu", self.layer, expert)
        return ticket

    def _join(self, layer: int) -> None:
        for ticket in self._joins.pop(layer, ()):
            self.machine.join(ticket)
