"""The engine counts: it applies each decision to the cache and hands the work to the machine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from oracle.counts import HIT, LATE, MISS, ON_CPU, PARTIAL, HitCounts
from oracle.execution import Execution
from oracle.hooks import overrides, seconds
from oracle.protocol import UNKNOWN_S, Machine, Ticket
from oracle.residency import PREFETCHED, Cache
from oracle.transfers import Log
from oracle.view import View
from sim.base.errors import IllegalDecision
from sim.policy.decisions import (
    Cancel,
    DropQueue,
    Evict,
    Fetch,
    Foresee,
    Predict,
    Prefetch,
    Requeue,
    RequeueFrom,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    WriteBack,
)

if TYPE_CHECKING:
    from oracle.cost import Cost
    from oracle.future import Future
    from oracle.iterations import Arrays, Gate
    from oracle.pieces import Piece, Pieces
    from sim.policy.api import Decisions, Policy


MAX_DECISIONS = 1_000_000
"""Of one call of a hook; asking for every piece of every expert of the largest models takes a tenth of that."""
END = object()
LANES = ("side", "gpu", "host")


class Engine(Execution):
    """Applies decisions for one policy on one machine.

    Args:
        log: called with (kind, layer, expert) for every decision applied, or None.
    """

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        cache: Cache,
        pieces: Pieces,
        cost: Cost,
        arrays: Arrays,
        top_k: int,
        future: Future | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__(policy, machine, cache, pieces, log)
        self.cost = cost
        self.arrays = arrays
        self.future = future
        self.view = View(self, cost.model.id, top_k, cost.model.hidden_size)
        self._does = self._verbs()
        self._own_gate = overrides(policy, "gate_done")

    # -- obeying ----------------------------------------------------------------------------------------------------

    def obey(self, decisions: Decisions, hook: str = "") -> None:
        """Apply a hook's decisions in order; a generator receives each decision's ticket.

        Raises:
            IllegalDecision: naming hook and layer; also for a hook that never comes to an end.
        """
        if decisions is None:
            return
        try:
            if isinstance(decisions, Generator):
                answer: Any = None
                say, does = decisions.send, self._does
                for _ in repeat(None, MAX_DECISIONS):
                    try:
                        decision = say(answer)
                    except StopIteration:
                        return
                    do = does.get(type(decision))
                    answer = self.apply(decision) if do is None else do(decision)
            else:
                several = iter(decisions)
                for decision in islice(several, MAX_DECISIONS):
                    self.apply(decision)
                if next(several, END) is END:
                    return
            raise IllegalDecision(
                f"more than {MAX_DECISIONS} decisions, the last of them {decision!r}: it never ends; "
                "a hook decides about one moment and returns"
            )
        except IllegalDecision as error:
            raise IllegalDecision(f"{self.policy.name}.{hook} at layer {self.layer}: {error}") from error

    def apply(self, decision: Any) -> Ticket | None:
        """Apply one decision. Raises IllegalDecision naming decision, rule and state."""
        do = self._does.get(type(decision))
        if do is None:
            raise IllegalDecision(f"decision, got {decision!r}: not a decision; see sim.policy.decisions")
        return do(decision)

    def _verbs(self) -> dict[type, Callable[[Any], Ticket | None]]:
        """What each kind of decision makes the engine do."""
        return {
            list: lambda several: [self.apply(one) for one in several],
            tuple: lambda several: [self.apply(one) for one in several],
            RunGpu: lambda d: self.run_gpu(d.expert, d.after, d.joined),
            RunPart: lambda d: self.run_part(d.piece, d.after, d.slices),
            Fetch: lambda d: self.fetch(d.piece, d.after),
            Prefetch: lambda d: self.prefetch(d.piece, d.priority, d.after),
            RunCpu: lambda d: self.run_cpu(d.expert, d.join_layer),
            RunCpuAhead: lambda d: self.run_cpu_ahead(d.layer, d.expert, d.n_tokens),
            Serve: lambda _: self._serve_owed(),
            Requeue: lambda d: self.requeue(d.wanted, d.up_to_layer),
            RequeueFrom: self._requeue_from,
            Foresee: self._foresee,
            Evict: lambda d: self.evict(d.piece),
            WriteBack: lambda d: self.write_back(d.piece, d.after),
            Predict: self._predict,
            Wait: lambda d: self.wait(d.tickets),
            Cancel: lambda d: self.withdraw(d.piece),
            DropQueue: lambda d: self.drop(d.up_to_layer),
        }

    def _requeue_from(self, d: RequeueFrom) -> None:
        """`Requeue` of the pieces that a slice of wishes names, as far as they are not resident; at most `most`."""
        if d.up_to_layer is not None:
            self.queue.drop(None)
            self._withdraw(d.up_to_layer)
        wanted: dict[Piece, Any] = {}
        for at in range(d.start, d.stop):
            layer, expert = divmod(d.wishes.indices[at], self.pieces.n_experts)
            piece = self.pieces.whole[layer][expert]
            if piece not in self.cache.entries and piece not in wanted:
                wanted[piece] = (piece, d.wishes.priorities[at], d.after if at >= d.fresh else ())
                if len(wanted) == d.most:
                    break
        self.requeue(list(wanted.values()))

    def _foresee(self, d: Foresee) -> None:
        after: tuple[Ticket, ...] = ()
        if d.predict is not None:
            after = (self._predict(d.predict),)
            d.outlook.foresee(d.layer)
        self._requeue_from(d.outlook.ahead(d.layer, after))

    def _predict(self, asked: Predict) -> Ticket:
        if not seconds(asked.duration_s) or asked.lane not in LANES:
            raise IllegalDecision(f"{asked!r}: seconds, finite and not negative, on a lane of {', '.join(LANES)}")
        return self.machine.predict(asked.duration_s, asked.lane, asked.blocking, asked.basis)

    def wait(self, tickets: tuple[Ticket, ...]) -> None:
        """Block the host until all of them have ended."""
        for ticket in tickets:
            self.machine.sync(ticket)

    def withdraw(self, piece: Piece) -> None:
        """`Cancel`, for those who may ask how far a copy has come."""
        self._needs_timing("Cancel")
        self.cancel(piece)

    def drop(self, up_to_layer: int | None) -> None:
        """`DropQueue`, for those who may ask how far copies have come."""
        self._needs_timing("DropQueue")
        self.drop_queue(up_to_layer)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def serve(self, gate: Gate) -> None:
        """Serve one layer whose gate has spoken: classify, let the policy decide, check that nothing is owed."""
        self.unrun = gate.needs.copy()
        self._lower = gate.precision
        classes = self._classify(gate)
        counts = self.tally.hits[gate.iteration.phase]
        if gate.asked is not gate.needs:
            for expert in gate.needs.keys() - gate.asked.keys():  # a lossy policy's substitutes: no gate asked for them
                counts.aside[self._found(self.pieces.whole[gate.layer][expert])] += 1
        if self._own_gate:
            self.obey(self.policy.gate_done(gate, self.view), "gate_done")
        else:
            self._serve_owed()
        if self.unrun:
            raise IllegalDecision(
                f"layer {gate.layer} of {self.policy.name}: experts {sorted(self.unrun)} were not executed; "
                "every needed expert must run once, on GPU or CPU"
            )
        if self._ran_on_cpu:
            for expert in self._ran_on_cpu:
                if expert in classes:
                    counts.aside[classes[expert]] += 1
                    classes[expert] = ON_CPU
            self._ran_on_cpu.clear()
        experts, tokens = counts.experts, counts.tokens
        for expert, n_tokens in gate.asked.items():
            kind = classes[expert]
            experts[kind] += 1
            tokens[kind] += n_tokens
        if self._ahead and gate.layer == self.pieces.n_layers - 1:
            self._ahead.clear()
        if self._joins:
            for ticket in self._joins.pop(gate.layer, ()):
                self.machine.join(ticket)

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
                if arrival is None or UNKNOWN_S < arrival.end_s <= now_s or self.machine.ended(arrival):
                    classes[expert] = HIT
                    if not entry.used and entry.origin == PREFETCHED:
                        counts.prefetched += 1
                else:
                    classes[expert] = LATE
                    prefetch.asked_while_late(piece)
            else:
                classes[expert] = self._classify_parts(piece, counts)
        return classes

    def _found(self, piece: Piece) -> int:
        """The class of an expert that no gate asked for, as `_classify` gives it: no prefetch is judged by it."""
        lower = self._lower.get(piece.expert)
        enough = self.cache.sufficient(piece, lower)
        parts = enough or [self.cache.entries[part] for part in self.cache.parts(piece, lower)]
        here = [e.arrival is None or self.machine.ended(e.arrival) for e in parts]
        if enough:
            return HIT if all(here) else LATE
        return PARTIAL if any(here) else LATE if here else MISS

    def _classify_parts(self, piece: Piece, counts: HitCounts) -> int:
        lower = self._lower.get(piece.expert)
        parts = self.cache.parts(piece, lower)
        if not parts:
            self.tally.prefetch.asked_but_absent(piece)
            return MISS
        entries = [self.cache.entries[part] for part in parts]
        here = [e for e in entries if e.arrival is None or self.machine.ended(e.arrival)]
        for entry in entries:
            if entry not in here:
                self.tally.prefetch.asked_while_late(entry.piece)
        enough = self.cache.sufficient(piece, lower)
        if enough is None:
            return PARTIAL if here else LATE
        if not all(entry in here for entry in enough):
            return LATE
        counts.prefetched += any(not entry.used and entry.origin == PREFETCHED for entry in enough)
        return HIT

    def _serve_owed(self) -> None:
        """The default service: fetch what is missing, run residents meanwhile, then what arrives, in router order."""
        policy, view, whole = self.policy, self.view, self.pieces.whole[self.layer]
        entries = self.cache.entries
        residents, missing = [], []
        for expert in self.unrun:
            piece = whole[expert]
            entry = entries.get(piece)
            if entry is None and expert in self._lower:
                piece = self.pieces.part(self.layer, expert, 0.0, 1.0, self._lower[expert])
                entry = entries.get(piece)
            if entry is None:
                missing.append(piece)
                continue
            residents.append(expert)
            if entry.arrival is not None and entry.arrival.end_s == UNKNOWN_S:
                self._promote(entry)
            policy.accessed(piece, True, view)
        later: list[Piece] = []
        for piece in missing:
            self.queue.remove(piece)
            if self._demand(piece) is None:
                later.append(piece)
                continue
            policy.accessed(piece, False, view)
            residents.append(piece.expert)  # or will be, by the time it runs
        for expert in residents:
            self.run_gpu(expert)
        for piece in later:  # more experts than room: each waits until one before it has run
            self.fetch(piece)
            policy.accessed(piece, False, view)
            self.run_gpu(piece.expert)
