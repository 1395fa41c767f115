"""The engine counts: it applies each decision to the cache and hands the work to the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from sim.api import overrides
from sim.cache import PREFETCHED, Cache, Entry, tiling
from sim.decisions import (
    Cancel,
    DropQueue,
    Evict,
    Fetch,
    Predict,
    Prefetch,
    Requeue,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    WriteBack,
)
from sim.errors import IllegalDecision
from sim.machine import UNKNOWN_S, Machine, Ticket
from sim.tally import HIT, LATE, MISS, ON_CPU, PARTIAL
from sim.transfers import Log, Transfers
from sim.view import View

if TYPE_CHECKING:
    from sim.api import Decisions, Policy
    from sim.cost import Cost
    from sim.future import Future
    from sim.iterations import Arrays, Gate
    from sim.pieces import Piece, Pieces


class Engine(Transfers):
    """Applies decisions for one policy on one machine.

    Args:
        log: called with (kind, layer, expert) for every decision applied, or None.
    """

    def __init__(
        self, policy: Policy, machine: Machine, cache: Cache, pieces: Pieces, cost: Cost, arrays: Arrays,
        top_k: int, future: Future | None = None, log: Log | None = None,
    ) -> None:  # fmt: skip
        super().__init__(policy, machine, cache, log)
        self.pieces = pieces
        self.cost = cost
        self.arrays = arrays
        self.future = future
        self._ran_on_cpu: set[int] = set()
        self._joins: dict[int, list[Ticket]] = {}  # layer -> CPU results its stream must wait for
        self._ahead: dict[tuple[int, int], Ticket] = {}  # (layer, expert) -> CPU result computed ahead
        self._begun: dict[int, list[Piece]] = {}  # owed experts of which these pieces have run
        self._lower: dict[int, str] = {}  # experts of the current layer that may run in a lower precision
        self.view = View(self, cost.model.id, top_k, cost.model.hidden_size)
        self._does = self._verbs()
        self._own_gate = overrides(policy, "gate_done")
        self._own_expert_done = overrides(policy, "expert_done")

    # -- obeying ----------------------------------------------------------------------------------------------------

    def obey(self, decisions: Decisions) -> None:
        """Apply a hook's decisions in order; a generator receives each decision's ticket."""
        if decisions is None:
            return
        if isinstance(decisions, GeneratorType):
            answer: Any = None
            say, does = decisions.send, self._does
            while True:
                try:
                    decision = say(answer)
                except StopIteration:
                    return
                do = does.get(type(decision))
                answer = self.apply(decision) if do is None else do(decision)
        for decision in decisions:
            self.apply(decision)

    def apply(self, decision: Any) -> Ticket | None:
        """Apply one decision. Raises IllegalDecision naming decision, rule and state."""
        do = self._does.get(type(decision))
        if do is None:
            raise IllegalDecision(f"decision, got {decision!r}: not a decision; see sim.decisions")
        return do(decision)

    def _verbs(self) -> dict[type, Callable[[Any], Ticket | None]]:
        """What each kind of decision makes the engine do."""
        return {
            RunGpu: lambda d: self.run_gpu(d.expert, d.after, d.joined),
            RunPart: lambda d: self.run_part(d.piece, d.after),
            Fetch: lambda d: self.fetch(d.piece, d.after),
            Prefetch: lambda d: self.prefetch(d.piece, d.priority, d.after),
            RunCpu: lambda d: self.run_cpu(d.expert, d.join_layer),
            RunCpuAhead: lambda d: self.run_cpu_ahead(d.layer, d.expert, d.n_tokens),
            Serve: lambda _: self._serve_owed(),
            Requeue: lambda d: self.requeue(d.wanted, d.up_to_layer),
            Evict: lambda d: self.evict(d.piece),
            WriteBack: lambda d: self.write_back(d.piece, d.after),
            Predict: lambda d: self.machine.predict(d.duration_s, d.lane, d.blocking, d.basis),
            Wait: lambda d: self.wait(d.tickets),
            Cancel: lambda d: self.withdraw(d.piece),
            DropQueue: lambda d: self.drop(d.up_to_layer),
        }

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
        if self._own_gate:
            self.obey(self.policy.gate_done(gate, self.view))
        else:
            self._serve_owed()
        if self.unrun:
            raise IllegalDecision(
                f"layer {gate.layer} of {self.policy.name}: experts {sorted(self.unrun)} were not executed; "
                "every needed expert must run once, on GPU or CPU"
            )
        if self._ran_on_cpu:
            classes |= dict.fromkeys(self._ran_on_cpu, ON_CPU)
            self._ran_on_cpu.clear()
        counts = self.tally.hits[gate.iteration.phase]
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
                classes[expert] = self._classify_parts(piece)
        return classes

    def _classify_parts(self, piece: Piece) -> int:
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
        return HIT if all(entry in here for entry in enough) else LATE

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

    def run_gpu(self, expert: int, after: tuple[Ticket, ...] = (), joined: bool = False) -> Ticket:
        """Compute an owed expert on the GPU, each of its pieces (or of those that are left) as it arrives."""
        n_tokens = self.unrun.get(expert)
        if n_tokens is None:
            raise IllegalDecision(f"RunGpu({expert}): layer {self.layer} does not owe it; run each needed expert once")
        whole = self.pieces.whole[self.layer][expert]
        entry = self.cache.entries.get(whole)
        if entry is not None and expert not in self._begun:
            ticket = self._launch(entry, n_tokens, after)
            self._ran(expert, n_tokens, ())
            return ticket
        begun = self._begun.get(expert, ())
        enough = self.cache.sufficient(whole, self._lower.get(expert), begun)
        if enough is None:
            raise IllegalDecision(f"RunGpu({expert}): layer {self.layer}'s expert is not on the GPU; Fetch it first")
        if joined and len(enough) > 1:
            ticket = self._launch_joined(whole, enough, n_tokens, after)
        else:
            for used in enough:
                ticket = self._launch(used, n_tokens, after)
        self._ran(expert, n_tokens, [*begun, *(used.piece for used in enough)])
        return ticket

    def run_part(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Compute one resident piece of an owed expert; the last of them completes the expert."""
        expert, entry = piece.expert, self.cache.entries.get(piece)
        n_tokens = self.unrun.get(expert) if piece.layer == self.layer else None
        if n_tokens is None:
            raise IllegalDecision(f"RunPart of {piece}: layer {self.layer} does not owe it; run each part once")
        begun = self._begun.get(expert, [])
        if entry is None or piece.precision not in (self.pieces.precision, self._lower.get(expert)):
            raise IllegalDecision(f"RunPart of {piece}: not on the GPU, or not in a precision that serves; Fetch it")
        if any(other.start_frac < piece.stop_frac and piece.start_frac < other.stop_frac for other in begun):
            raise IllegalDecision(f"RunPart of {piece}: {begun} have run; run no column twice")
        if piece.kernels_frac < 1.0 and piece.start_frac > max((other.stop_frac for other in begun), default=0.0):
            raise IllegalDecision(f"RunPart of {piece}: a matrix needs what those before it come to; run them first")
        ticket = self._launch(entry, n_tokens, after)
        begun = [*begun, piece]
        if tiling((), begun) is not None:
            self._ran(expert, n_tokens, begun)
            return ticket
        self._begun[expert] = begun
        if self.log:
            self.log("part", self.layer, expert)
        if self.polls:
            self.poll()
        return ticket

    def _launch(self, entry: Entry, n_tokens: int, after: tuple[Ticket, ...]) -> Ticket:
        """Compute a resident piece once it has arrived."""
        arrival = entry.arrival
        ticket = entry.last_use = self.machine.expert(
            entry.piece, n_tokens, after if arrival is None else (arrival, *after)
        )
        if not entry.used:
            self.tally.used(entry)
        return ticket

    def _launch_joined(
        self, whole: Piece, parts: Sequence[Entry], n_tokens: int, after: tuple[Ticket, ...]
    ) -> Ticket:
        """Compute an expert from slices of columns side by side, once the last of them has arrived."""
        pieces = [entry.piece for entry in parts]
        if whole.expert in self._begun or any(p.precision != whole.precision or p.kernels_frac < 1.0 for p in pieces):
            raise IllegalDecision(f"RunGpu({whole.expert}, joined=True): {pieces} are not all of the expert in columns "
                                  "of the serving precision; leave `joined` out")  # fmt: skip
        arrivals = tuple(entry.arrival for entry in parts if entry.arrival is not None)
        ticket = self.machine.expert(whole, n_tokens, (*arrivals, *after), pieces)
        for entry in parts:
            entry.last_use = ticket
            if not entry.used:
                self.tally.used(entry)
        return ticket

    def _ran(self, expert: int, n_tokens: int, parts: Sequence[Piece]) -> None:
        """An owed expert has been launched for good, whole or in these parts."""
        tally = self.tally
        if parts:
            self._begun.pop(expert, None)
            if any(part.precision != self.pieces.precision for part in parts):
                tally.loss.lowered += n_tokens
        del self.unrun[expert]
        tally.n_executed += n_tokens
        if self.log:
            self.log("gpu", self.layer, expert)
        if self._own_expert_done:
            self.obey(self.policy.expert_done(self.layer, expert, self.view))
        if self.polls:
            self.poll()

    def run_cpu(self, expert: int, join_layer: int | None = None) -> Ticket:
        """Compute an owed expert on the CPU; its result joins the stream at the end of `join_layer`."""
        if expert in self._begun:
            raise IllegalDecision(f"RunCpu({expert}): a part of it has run on the GPU; run the rest there")
        n_tokens = self.unrun.pop(expert, None)
        if n_tokens is None:
            raise IllegalDecision(f"RunCpu({expert}): layer {self.layer} does not owe it; run each needed expert once")
        if "cpu" not in self.policy.traits:
            raise IllegalDecision(f"RunCpu({expert}) of {self.policy.name}: needs the trait 'cpu'; declare it")
        join_layer = self.layer if join_layer is None else join_layer
        if not self.layer <= join_layer < self.pieces.n_layers:
            raise IllegalDecision(f"RunCpu({expert}, join_layer={join_layer}): join at this layer or a later one")
        ticket = self._ahead.pop((self.layer, expert), None) or self.machine.cpu_expert(self.layer, expert, n_tokens)
        self._joins.setdefault(join_layer, []).append(ticket)
        self._ran_on_cpu.add(expert)
        self.tally.n_executed += n_tokens
        if self.log:
            self.log("cpu", self.layer, expert)
        return ticket

    def run_cpu_ahead(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        """Compute an expert of a later layer on the CPU now; `run_cpu` at that layer takes the result."""
        where = f"RunCpuAhead({layer}, {expert}, {n_tokens})"
        if "cpu" not in self.policy.traits or "lossy" not in self.policy.traits:
            raise IllegalDecision(f"{where} of {self.policy.name}: needs the traits 'cpu' and 'lossy' (its input is an "
                                  "earlier layer's); declare them")  # fmt: skip
        if not self.layer < layer < self.pieces.n_layers or not 0 <= expert < self.pieces.n_experts or n_tokens < 1:
            raise IllegalDecision(f"{where}: must name an expert of a later layer and at least one token")
        if (layer, expert) in self._ahead:
            raise IllegalDecision(f"{where}: computed already; ask once")
        ticket = self._ahead[layer, expert] = self.machine.cpu_expert(layer, expert, n_tokens)
        if self.log:
            self.log("cpu_ahead", layer, expert)
        return ticket
