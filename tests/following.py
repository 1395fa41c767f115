"""Write a run down as `sim.reference` is told it, and hold it to what the reference makes of that.

The engine is a parameter: `Today` runs a setup on the one of this version, and says what is read of it on the way.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from easy_numbers import Run

import sim.run
from sim.policy.api import Policy, overrides
from sim.policy.decisions import Foresee, Requeue, RequeueFrom, Serve, WriteBack
from sim.policy.order import Rank
from sim.policy.pieces import Piece
from sim.reference.layers import Reference
from sim.reference.residency import CLASSES, Copy
from sim.reference.script import Differs, Said, Script
from sim.results.by_layer import COUNTS, expert_table
from sim.run import execute
from sim.setup.setup import Setup

DECIDES = ("request_start", "drafting", "layer_enter", "gate_input", "layer_done", "copy_done", "request_end", "idle")
TOLD = ("accessed", "placed", "evicted")
ANSWERS = ("assign", "victim", "layer_budgets", "predictor_bytes", "initial")


class Today:
    """The engine beside the core. Another one is held to the references by a class with these methods."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.engine: Any = None

    def run(self, spans: Any, log: Any) -> Run:
        """The finished run, and the state that it leaves; `log` is told of each deed at once, `spans` of each span."""
        before, sim.run.use_core = sim.run.use_core, False
        try:
            return Run(execute(self.setup, spans, log, bounds=False, begun=self.begun), self.engine)
        finally:
            sim.run.use_core = before

    def begun(self, engine: Any) -> None:
        self.engine = engine

    def now_s(self) -> float:
        """The host's clock."""
        return self.engine.machine.now() if self.engine else 0.0

    def state(self) -> tuple[list[Piece], list[Piece]]:
        """What is resident, oldest first, and which prefetches wait, best first."""
        return list(self.engine.view.residents()), self.engine.copies.queue.pieces()

    def newest(self) -> Any:
        """The copy asked for last, of which `copied_s` tells later when it began and ended."""
        residency = self.engine.residency
        index = residency.resident_pieces()[-1].index
        return residency.arrival[index] or residency.copied_at(index)

    def copied_s(self, copy: Any) -> tuple[float, float]:
        """Infinite where it was withdrawn, or the run broke off before."""
        if copy.end_s < 0.0 or getattr(copy, "cancelled", False):
            return math.inf, math.inf
        return getattr(copy, "start_s", -math.inf), copy.end_s


@dataclass
class Followed:
    """A run that is followed, and its reference."""

    setup: Setup
    script: Script = field(default_factory=Script)
    predictor_bytes: int = 0
    layer_bytes: list[list[int]] | None = None
    states: dict[int, Any] = field(default_factory=dict)  # when a policy decided, by how much had been said

    def follow(self, kind: Callable[[Setup], Any], spans: Any, log: Any) -> Run:
        """Run it and write it down. Its policy's class becomes one that is watched."""
        script, policy, engine = self.script, self.setup.policy, kind(self.setup)
        copies: list[Any] = []
        asked_s: list[float] = []

        def lasted(*span: Any) -> None:
            if span[:2] == ("host", "launch copy"):
                asked_s[:] = [span[6]]
            spans(*span)

        def did(what: str, layer: int, expert: int) -> None:
            now_s = engine.now_s()
            if what in ("fetch", "prefetch"):
                copies.append(engine.newest())
                now_s = asked_s.pop() if asked_s else now_s
            script.done.append((what, layer, expert, now_s))
            log(what, layer, expert)

        policy.__class__ = watched(type(policy), self, engine)
        try:
            return engine.run(lasted, did)
        finally:
            script.copies_s = [engine.copied_s(copy) for copy in copies]

    @property
    def room_bytes(self) -> list[int]:
        """For experts, of each GPU."""
        room_bytes = list(self.setup.memory.expert_bytes)
        room_bytes[0] -= self.predictor_bytes  # which lies on GPU 0
        return room_bytes

    def reference(self) -> Rooms:
        """Of the policy, as it is bound."""
        setup, policy = self.setup, self.setup.policy
        tells = [hook for hook in TOLD if overrides(policy, hook)]
        return Rooms(setup.pieces, self.room_bytes, self.layer_bytes, policy.order, policy.prefetch_depth, tells)


def watched(base: Any, followed: Followed, engine: Any) -> Any:
    """The class of a policy that tells what it says."""
    script, setup = followed.script, followed.setup
    has = {name for name in (*DECIDES, *TOLD, *ANSWERS) if overrides_of(base, name)}
    polls = "timing" in setup.policy.traits
    gates: list[Any] = []  # what `assign` answered of the layer
    begun: list[Said] = []  # the iteration that is about to begin

    def say(policy: Any, what: str, *facts: Any, now_s: float | None = None) -> Said:
        now_s = engine.now_s() if now_s is None else now_s
        said = Said(what, now_s, list(facts), len(script.done))
        script.said.append(said)
        if what == "decision":
            followed.states[len(script.said)] = engine.state()
        ranked(policy, said)
        return said

    def ranked(policy: Any, said: Said) -> None:
        order = policy.order
        if isinstance(order, Rank):
            said.rank, said.bar = order.rank.tolist(), order.bar.tolist()

    def one(policy: Any, hook: str, decision: Any) -> Iterator[Any]:
        if isinstance(decision, list | tuple):
            tickets = []
            for each in decision:
                tickets.append((yield from one(policy, hook, each)))  # noqa: PERF401 - no generator in a list
            return tickets
        if type(decision) is Foresee:  # as its docstring says
            after = ()
            if decision.predict is not None:
                after = ((yield from one(policy, hook, decision.predict)),)
                decision.outlook.foresee(decision.layer)
            decision = decision.outlook.ahead(decision.layer, after)
        if type(decision) is RequeueFrom:
            wishes, pieces = decision.wishes, setup.pieces.all
            places = range(decision.start, decision.stop)
            wanted = [(pieces[wishes.indices[at]], wishes.priorities[at]) for at in places]
            say(policy, "requeue", hook, wanted, decision.up_to_layer, decision.most)
        elif type(decision) is Requeue:
            wanted = [tuple(one)[:2] for one in decision.wanted]
            say(policy, "requeue", hook, wanted, decision.up_to_layer, None)
        else:
            say(policy, "decision", hook, decision)
        return (yield decision)

    def steps(policy: Any, hook: str, decisions: Any) -> Iterator[Any]:
        yield from every(policy, hook, decisions)
        say(policy, "decision", hook, None)

    def every(policy: Any, hook: str, decisions: Any) -> Iterator[Any]:
        if decisions is None:
            return
        if not hasattr(decisions, "send"):
            for decision in decisions:
                yield from one(policy, hook, decision)
            return
        answer = None
        while True:
            try:
                decision = decisions.send(answer)
            except StopIteration:
                return
            answer = yield from one(policy, hook, decision)

    def begins(policy: Any) -> None:
        if not begun:
            begun.append(say(policy, "iteration", ""))

    body: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}

    def hook(name: str) -> Any:
        def method(self: Any, *args: Any) -> Iterator[Any]:
            if name in ("request_start", "drafting"):
                begins(self)
            yield from steps(self, name, getattr(base, name)(self, *args))
            if name == "idle":
                arrivals_s = [r.arrival_s for r in setup.requests if r.arrival_s is not None]
                now_s = engine.now_s()
                say(self, "looks", now_s=min([at_s for at_s in arrivals_s if at_s > now_s], default=now_s))

        return method

    for name in has & set(DECIDES) | ({"idle"} if polls else set()):
        body[name] = hook(name)

    def iteration_start(self: Any, iteration: Any, view: Any) -> Iterator[Any]:
        begins(self)
        begun.pop().facts[0] = iteration.counted
        yield from steps(self, "iteration_start", base.iteration_start(self, iteration, view))

    def layer_enter(self: Any, layer: int, view: Any) -> Iterator[Any]:
        say(self, "looked")
        yield from steps(self, "layer_enter", base.layer_enter(self, layer, view))

    def gate_done(self: Any, gate: Any, view: Any) -> Iterator[Any]:
        if "assign" not in has:
            say(self, "looked")
        answer = gates.pop() if gates else None
        after = None if answer is None else [list(map(int, row)) for row in answer.ids]
        say(self, "gate", gate.layer, gate.iteration.ids(gate.layer).tolist(), after, dict(gate.precision))
        said = base.gate_done(self, gate, view) if overrides_of(base, "gate_done") else [Serve()]
        yield from steps(self, "gate_done", said)
        say(self, "served")

    def layer_done(self: Any, layer: int, view: Any) -> Iterator[Any]:
        yield from steps(self, "layer_done", base.layer_done(self, layer, view))
        say(self, "looks")

    def iteration_end(self: Any, iteration: Any, view: Any) -> Iterator[Any]:
        say(self, "looked")
        yield from steps(self, "iteration_end", base.iteration_end(self, iteration, view))

    body |= {"iteration_start": iteration_start, "gate_done": gate_done}
    if polls:
        body |= {"layer_enter": layer_enter, "layer_done": layer_done, "iteration_end": iteration_end}
    elif overrides_of(base, "iteration_end"):
        body["iteration_end"] = iteration_end

    def assign(self: Any, gate: Any, view: Any) -> Any:
        say(self, "looked")
        gates[:] = [answer := base.assign(self, gate, view)]
        return answer

    def victim(self: Any, piece: Any, speculative: bool, view: Any) -> Any:
        said = say(self, "victim", piece, speculative)
        said.facts.append(answer := base.victim(self, piece, speculative, view))
        return answer

    def layer_budgets(self: Any, view: Any) -> Any:
        followed.layer_bytes = base.layer_budgets(self, view)
        return followed.layer_bytes

    def predictor_bytes(self: Any, view: Any) -> Any:
        followed.predictor_bytes = base.predictor_bytes(self, view)
        return followed.predictor_bytes

    def bind(self: Any, view: Any) -> None:  # or `victim` would be newer than what settles the order
        base.bind(self, view)

    def initial(self: Any, view: Any) -> Any:
        pieces = list(base.initial(self, view))
        say(self, "initial", pieces)
        return pieces

    def accessed(self: Any, piece: Any, hit: bool, view: Any) -> None:
        said = say(self, "accessed", piece, hit)
        base.accessed(self, piece, hit, view)
        ranked(self, said)

    def placed(self: Any, piece: Any, view: Any) -> None:
        said = say(self, "placed", piece)
        base.placed(self, piece, view)
        ranked(self, said)

    def evicted(self: Any, piece: Any, view: Any) -> None:
        said = say(self, "evicted", piece)
        base.evicted(self, piece, view)
        ranked(self, said)

    body["bind"] = bind
    answers = (assign, victim, layer_budgets, predictor_bytes, initial, accessed, placed, evicted)
    body |= {function.__name__: function for function in answers if function.__name__ in has}
    return type(base.__name__, (base,), body)


def overrides_of(base: Any, hook: str) -> bool:
    return getattr(base, hook) is not getattr(Policy, hook)


# -- holding a run to its reference ------------------------------------------------------------------------------------


def difference_from_reference(followed: Followed, run: Run | None, spans: Sequence[Any]) -> str | None:
    """Where a run that was followed, None if it broke off, differs first from its reference."""
    reference = followed.reference()
    reference.watch(followed.states, spans)
    try:
        is_whole = reference.replay(followed.script)
    except Differs as error:
        return str(error)
    if run is None:
        return None
    if not is_whole:
        return f"after deed {followed.script.n_done}: the reference refuses what the engine has done"
    return reference.overwritten() or next(differences(reference, run.outcome.report, run.outcome.result), None)


class Rooms(Reference):
    """Looks, besides, at what is resident and what waits whenever a policy decides, and at rooms by the run's times.

    A copy lies in its room from its begin until the last computation that reads it ends.
    """

    def watch(self, states: dict[int, Any], spans: Sequence[Any]) -> None:
        """Take the states and spans of the run, before it is replayed."""
        self.states = states
        self.until_s: dict[Copy, float] = {}
        self.gone: list[Copy] = []
        self.run_s: float | None = None  # when the computation ends that slices share
        self.joined = False
        self.began_s: dict[tuple[int, int, float], float] = {}  # of a copy, by its end
        ends_s: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        for lane, op, layer, expert, *_, start_s, end_s in sorted(spans, key=lambda span: span[6:]):
            if lane.startswith("h2d"):
                self.began_s[layer, expert, end_s] = start_s
            elif lane != "cpu" and op in ("expert", "write_back"):
                ends_s[op, layer, expert].append(end_s)
        self.ends_s = {name: iter(found) for name, found in ends_s.items()}

    def decision(self, hook: str, said: Any) -> None:
        state = list(self.resident), sorted(self.queue, key=self.queue.__getitem__)
        for what, mine, found in zip(("resident", "waits"), state, self.states[self.script.n_said], strict=True):
            if mine != found:
                raise Differs(f"when {said} is said, {what}: expected {mine}, got {found}")
        before = self.joined, self.run_s
        self.joined, self.run_s = bool(getattr(said, "joined", False) or getattr(said, "slices", ())), None
        super().decision(hook, said)
        self.joined, self.run_s = before
        if isinstance(said, WriteBack) and not self.pieces.n_parts:  # of parts spans do not say which
            self.read(said.piece, self.end_s("write_back", said.piece))

    def use(self, piece: Piece) -> None:
        if self.run_s is None or not self.joined:
            self.run_s = self.end_s("expert", piece)
        self.read(piece, self.run_s)
        super().use(piece)

    def end_s(self, op: str, piece: Piece) -> float:
        """When the next of these ends; of a run that breaks off some are never told."""
        return next(self.ends_s.get((op, piece.layer, piece.expert), iter(())), math.inf)

    def read(self, piece: Piece, until_s: float) -> None:
        copy = self.resident[piece]
        self.until_s[copy] = max(until_s, self.until_s.get(copy, -math.inf))

    def leave(self, piece: Piece) -> Copy:
        self.gone.append(super().leave(piece))
        return self.gone[-1]

    def lay_s(self, copy: Copy) -> tuple[float, float]:
        """From when to when."""
        since_s = end_s = -math.inf
        if copy.number >= 0:
            since_s, end_s = self.script.copies_s[copy.number]
            since_s = self.began_s.get((copy.piece.layer, copy.piece.expert, end_s), since_s)
        is_there = self.resident.get(copy.piece) is copy
        return since_s, math.inf if is_there else max(end_s, self.until_s.get(copy, end_s))

    def overwritten(self) -> str | None:
        """Where more lies on a GPU than it has room for: a copy began while what it overwrites was still read."""
        changes: list[tuple[float, int, int]] = []  # when, bytes less or more, on which GPU
        for copy in [*self.gone, *self.resident.values()]:
            (since_s, until_s), n_bytes, gpu = self.lay_s(copy), copy.piece.n_bytes, copy.piece.gpu
            if since_s < math.inf:  # else it was withdrawn
                changes += [(since_s, n_bytes, gpu), (until_s, -n_bytes, gpu)]
        taken_bytes = [0] * len(self.room_bytes)
        for time_s, n_bytes, gpu in sorted(changes):  # at one time what ends comes first
            taken_bytes[gpu] += n_bytes
            if taken_bytes[gpu] > self.room_bytes[gpu]:
                return f"GPU {gpu} at {time_s} s: {taken_bytes[gpu]} bytes lie in room for {self.room_bytes[gpu]}"
        return None


def differences(reference: Reference, report: Any, result: Any) -> Iterator[str]:
    """Where the counts of a run differ from its reference's."""
    n, totals = reference.n, Counter[str]()
    for (name, _, _, _), number in n.items():
        totals[name] += number
    pairs: list[tuple[str, Any, Any]] = []
    for phase, layer, expert, *values in expert_table(report):
        wanted = {name: n[name, phase, layer, expert] for name in COUNTS}
        wanted["asked_n"] = sum(wanted[f"{kind}_n"] for kind in CLASSES)
        pairs += [
            (f"{name} of {phase} {layer}.{expert}", wanted[name], got) for name, got in zip(COUNTS, values, strict=True)
        ]
    shares = reference.shares(result.hit_definition)
    pairs += [(f"{kind}_rate", shares[kind], getattr(result, f"{kind}_rate")) for kind in CLASSES]
    tokens = reference.shares("token")
    pairs += [(f"token_hit_rates.{kind}", tokens[kind], getattr(result.token_hit_rates, kind)) for kind in CLASSES]
    for phase in ("prefill", "decode", "mixed"):
        counts = report.counts.tally.hits[phase]
        of_phase = Counter[str]()
        for (name, counted, _, _), number in n.items():
            of_phase[name] += number if counted == phase else 0
        pairs += [(f"{phase} tokens", [of_phase[f"{kind} tokens"] for kind in CLASSES], counts.tokens)]
        pairs += [(f"{phase} set aside", [of_phase[f"{kind} aside"] for kind in CLASSES], counts.aside)]
    lowered = totals["lowered tokens"] / totals["executed tokens"] if totals["executed tokens"] else 0.0
    pairs += [("activations_lowered_frac", lowered, result.activations_lowered_frac)]
    changed = totals["changed activations"] / totals["activations"] if totals["activations"] else 0.0
    pairs += [("activations_changed_frac", changed, result.activations_changed_frac)]
    pairs += [("cache_peak_bytes", reference.peak_bytes, result.cache_peak_bytes)]
    pairs += [("cache_capacity_bytes", list(reference.room_bytes), result.cache_capacity_bytes)]
    for fate in ("issued", "useful", "late", "wasted", "harmful", "cancelled"):
        copies = getattr(result.prefetch, fate)
        pairs += [(f"prefetch.{fate}", totals[f"prefetch_{fate}_n"], copies.n)]
        pairs += [(f"prefetch.{fate}", totals[f"prefetch_{fate}_bytes"], copies.bytes)]
    pairs += [("prefetch.refused", totals["prefetch_refused_n"], result.prefetch.refused.n)]
    pairs += [("demand_copies", totals["demand_copies_n"], result.demand_copies.n)]
    pairs += [("demand_copies", totals["demand_copies_bytes"], result.demand_copies.bytes)]
    for what, wanted, got in pairs:
        if wanted != got:
            yield f"{what}: expected {wanted}, got {got}"
