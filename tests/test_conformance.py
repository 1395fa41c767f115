"""Every policy keeps every rule that applies to it, and every rule notices a policy that breaks it."""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner

from policies.common.cache import scope_param
from policies.lru import Lru
from sim.cli import moesim
from sim.conformance import behaviour, form, safety
from sim.conformance.suite import CHECKS, FAIL, PASS, SKIP, World, conform, judge, name_of
from sim.policy.api import Assignment, Policy, param
from sim.policy.contract import imports_of
from sim.policy.decisions import Evict, Prefetch, Serve
from sim.policy.registry import find, policies
from sim.workload.iterations import PREFILL

N_CHECKS = 22
# What the project began with; more policies may join, none of these may leave.
FIRST = {"belady", "fine_moe", "gpu_only", "lfu", "lru", "on_demand"}
N_POLICIES = 48  # built in
# (policy, check) -> why it fails; strict: one that passes again must leave this list.
KNOWN_FAILURES: dict[tuple[str, str], str] = {}

GRID = [(kind, check) for kind in policies().values() for check in CHECKS]


@pytest.fixture(scope="module")
def worlds():
    made: dict[type[Policy], World] = {}

    def world_of(kind):
        if kind not in made:
            made[kind] = World(kind)
        return made[kind]

    yield world_of
    for world in made.values():
        world.__exit__(None, None, None)


@pytest.fixture(scope="module")
def judged(worlds):
    """The verdict of a check on a policy, worked out once for all tests of a process."""
    return cache(lambda kind, check: judge(check, worlds(kind)))


@pytest.mark.parametrize(("kind", "check"), GRID, ids=[f"{kind.name}-{name_of(check)}" for kind, check in GRID])
def test_policy_keeps_the_rule(kind, check, judged, request):
    if reason := KNOWN_FAILURES.get((kind.name, name_of(check))):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    verdict = judged(kind, check)
    assert verdict.verdict in (PASS, SKIP), verdict.reason
    assert verdict.verdict == PASS or verdict.reason


def test_no_check_and_no_policy_is_lost():
    assert len(CHECKS) == len({name_of(check) for check in CHECKS}) == N_CHECKS
    assert set(policies()) >= FIRST
    assert len(GRID) == N_POLICIES * N_CHECKS
    defined = {name for module in (safety, behaviour, form) for name in vars(module) if name.startswith("check_")}
    assert {check.__name__ for check in CHECKS} == defined
    assert all((check.__doc__ or "").endswith(".") for check in CHECKS)


def test_few_rules_skip_a_plain_cache(judged):
    skipped = {name_of(check) for check in CHECKS if judged(Lru, check).verdict == SKIP}
    assert skipped == {"executes_what_it_assigned"}


# -- rules notice what breaks them -------------------------------------------------------------------------------------


class Mutant(Lru):
    """Base of the mutants: lru with one fault each."""

    name = "mutant"
    scope: str = scope_param("global")

    def bind(self, view):
        super().bind(view)
        if "victim" in vars(type(self)):
            self.order = None  # it says itself who leaves


class Moody(Mutant):
    """Remembers earlier runs."""

    runs = 0

    def bind(self, view):
        super().bind(view)
        type(self).runs += 1

    def victim(self, piece, speculative, view):
        free = [p for p in view.residents() if view.evictable(p)]
        return free[self.runs % len(free)] if free else None


class Clairvoyant(Mutant):
    """Reads rows of the trace that have not been served."""

    def victim(self, piece, speculative, view):
        free = [p for p in view.residents() if view.evictable(p)]
        rows = view._arrays.trace.experts
        return free[int(rows[-9:].sum()) % len(free)] if free else None


class Hasty(Mutant):
    """Asked for all layers at once, lets the last one speak for each."""

    needs = frozenset({"experts", "scores"})

    def gate_done(self, gate, view):
        self._pick = gate.at_once(lambda scores: [int(scores[0, -1].argmax())] * view.n_layers)
        yield Serve()

    def victim(self, piece, speculative, view):
        free = [p for p in view.residents() if view.evictable(p)]
        return free[self._pick % len(free)] if free else None


class Peeker(Mutant):
    """Looks up what later layers of the token being served will choose."""

    def iteration_start(self, iteration, view):
        self.iteration = iteration

    def layer_enter(self, layer, view):
        if layer == 0:
            return [Prefetch(view.piece(view.n_layers - 1, e)) for e in self.iteration.chosen(view.n_layers - 1)]
        return None


class Pregated(Peeker):
    """Says so: its model is fine-tuned to choose three layers ahead."""

    known_ahead = 3
    labels = ("fine-tuned",)


class Crammer(Mutant):
    """Learns what is scored: begins with the experts that the test split uses most."""

    def learn(self, store):
        rows = store.trace.experts[-9:]
        self.best = int(np.bincount(rows[:, 0].ravel().astype(int)).argmax())

    def initial(self, view):
        return [view.piece(0, self.best)]


class ClockReader(Mutant):
    """Decides by the clock without saying so."""

    def victim(self, piece, speculative, view):
        free = [p for p in view.residents() if view.evictable(p)]
        return free[int(view._machine.now() * 1e6) % len(free)] if free else None


class Forgetful(Mutant):
    """Throws everything out after each layer, however large the cache."""

    def layer_done(self, layer, view):
        return [Evict(piece) for piece in list(view.residents())]


class Sly(Mutant):
    """Reads a level it did not declare."""

    def gate_done(self, gate, view):
        assert gate.scores.shape
        yield Serve()


class Demanding(Mutant):
    """Says one expert is enough, and needs two."""

    def victim(self, piece, speculative, view):
        return next((p for p in view.residents() if view.evictable(p)), None) if view.capacity > 1 else None


class Generous(Mutant):
    """Gives itself twice the memory."""

    def bind(self, view):
        super().bind(view)
        view._residency.budget_bytes[0] *= 2


class Odd(Mutant):
    """A default outside its own range."""

    window: int = param(5, "how far it looks", within=(10, 20))


class Nan(Mutant):
    """A figure that JSON does not know."""

    def stats(self):
        return {"accuracy": float("nan")}


class Amnesiac(Mutant):
    """Does not use what it saves."""

    window: int = param(5, "how far it looks")

    def __init__(self, **values):
        super().__init__(**values)
        self.settings = {**self.settings, "window": self.window * 2}


class Nameless(Mutant):
    """Has a name that no command line takes."""

    name = "Name Less"


class Watchful(Mutant):
    """Looks at a clock of its own."""

    def layer_enter(self, layer, view):
        import time

        self.now_s = time.perf_counter()


class DoubleBooker(Mutant):
    """Counts a byte too many."""

    def layer_done(self, layer, view):
        view._copies.tally.demand_bytes += 1


class Inflated(Mutant):
    """Counts prefetches nobody issued."""

    def layer_done(self, layer, view):
        view._copies.tally.prefetch.n_issued += 1


class Optimist(Mutant):
    """Counts hits nobody had."""

    def layer_done(self, layer, view):
        view._copies.tally.hits[view.phase].count(0, 0)


class Cheat(Mutant):
    """Hides its copies."""

    def layer_done(self, layer, view):
        view._copies.tally.n_demand = 0


class Deaf(Mutant):
    """Declares a level the trace must have, but the trace is never asked for (needs are looked up on the instance)."""

    needs = frozenset({"experts", "scores"})

    def __init__(self, **values):
        super().__init__(**values)
        self.needs = frozenset({"experts"})


class Idle(Mutant):
    """Pretends an expert has run."""

    def gate_done(self, gate, view):
        view._pending.settle(view.pending_experts()[-1])
        yield Serve()


class Whole(Mutant):
    """Takes every prompt for a whole one, which has nothing before it."""

    def gate_done(self, gate, view):
        if gate.phase == PREFILL and any(r.context for r in gate.iteration.ranges):
            view._pending.settle(view.pending_experts()[-1])
        yield Serve()


class Twice(Mutant):
    """Computes half of every expert once more than it says."""

    def gate_done(self, gate, view):
        yield Serve()
        for expert in gate.needs:
            view._machine.expert(view.part(gate.layer, expert, 0.0, 0.5), 1, 0.0, (), ())


BROKEN = {
    "is_deterministic": Moody,
    "knows_no_future": Clairvoyant,
    "knows_no_clock": ClockReader,
    "copies_nothing_twice_when_everything_fits": Forgetful,
    "needs_are_honoured": Sly,
    "works_at_its_smallest_budget": Demanding,
    "never_exceeds_its_budget": Generous,
    "every_parameter_can_be_set": Odd,
    "result_is_json": Nan,
    "rebuilds_from_its_settings": Amnesiac,
    "declares_itself": Nameless,
    "bytes_add_up": DoubleBooker,
    "prefetches_add_up": Inflated,
    "hit_classes_add_up": Optimist,
    "copies_no_less_than_belady": Cheat,
    "executes_each_needed_expert_once": Idle,
    "computes_each_column_once": Twice,
    "imports_no_clock": Watchful,
    "runs": Sly,
}
CHECK = {name_of(check): check for check in CHECKS}


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_notices(rule):
    kind = BROKEN[rule]
    with World(kind) as world:
        verdict = judge(CHECK[rule], world)
    assert verdict.verdict == FAIL
    assert verdict.reason
    assert not verdict.reason.startswith(("AttributeError", "TypeError")), "the mutant itself is at fault"


def test_who_knows_no_parts_of_prompts_is_noticed():
    with World(Whole) as world:
        verdict = judge(CHECK["executes_each_needed_expert_once"], world)
    assert verdict.verdict == FAIL
    assert "needed" in verdict.reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Peeker, r"decision \d+ .* of the first 8 iterations and 2 layers differs"),
        (type("Unlabelled", (Pregated,), {"labels": (), "__doc__": ""}), "without the label 'fine-tuned'"),
        (Crammer, "learnt from the test split"),
    ],
)
def test_every_way_to_the_future_is_watched(kind, reason):
    with World(kind) as world:
        verdict = judge(CHECK["knows_no_future"], world)
    assert verdict.verdict == FAIL
    assert re.search(reason, verdict.reason), verdict.reason


def test_a_fine_tuned_model_may_choose_ahead():
    with World(Pregated) as world:
        assert judge(CHECK["knows_no_future"], world).verdict == PASS


def test_a_need_that_is_not_enforced_is_noticed():
    with World(Deaf) as world:
        assert "was accepted" in judge(CHECK["needs_are_honoured"], world).reason


def test_who_looks_at_gates_that_have_not_spoken_is_noticed():
    with World(Hasty) as world:
        assert "layers still to come" in judge(CHECK["knows_no_future"], world).reason


class TopOne(Mutant):
    """Drops the second choice of every token."""

    traits = frozenset({"lossy"})
    needs = frozenset({"experts", "weights"})

    def assign(self, gate, view):
        ids = gate.ids.copy()
        ids[:, 1] = -1
        return Assignment(ids, np.ones(ids.shape))


def test_a_lossy_policy_is_held_to_what_it_says():
    with World(TopOne) as world:
        verdicts = {v.check: v for v in (judge(check, world) for check in CHECKS)}
    assert verdicts["executes_what_it_assigned"].verdict == PASS
    assert verdicts["executes_each_needed_expert_once"].verdict == SKIP
    assert not {v.check for v in verdicts.values() if v.verdict == FAIL}


class EarlyBird(Mutant):
    """Prefetches the next layer's lowest experts without a clock."""

    def layer_enter(self, layer, view):
        if layer + 1 < view.n_layers:
            return [Prefetch(view.piece(layer + 1, expert)) for expert in range(2)]
        return None


def test_a_policy_that_prefetches_without_a_clock_keeps_the_rules():
    with World(EarlyBird) as world:
        verdicts = [judge(check, world) for check in CHECKS]
        assert world.run(12).engine.tally.prefetch.n_issued > 0
    assert not [v.check for v in verdicts if v.verdict == FAIL], verdicts


def test_imports_inside_functions_and_helpers_are_seen():
    import sim.conformance.world as module

    assert {"sim.machine.cost", "sim.machine.simulated"} <= imports_of(module).keys()
    assert "sim.engine.run_loop" not in imports_of(module)  # for type checking only


# -- the command ------------------------------------------------------------------------------------------------------


def test_command():
    done = CliRunner().invoke(moesim, ["conformance", "accelerate"])
    assert done.output.startswith("on_demand keeps every rule that applies: 20 pass, 0 fail, 2 not applicable")
    assert "streams: it forgets experts on purpose" in done.output


def test_command_as_json():
    done = CliRunner().invoke(moesim, ["conformance", "gpu_only", "--json"])
    told = json.loads(done.output)
    assert (told["policy"], told["fail"], len(told["checks"])) == ("gpu_only", 0, N_CHECKS)
    assert all(check["rule"] for check in told["checks"])


def test_command_fails_when_a_rule_does(monkeypatch):
    monkeypatch.setattr("sim.policy.registry.find", lambda name: Nameless)
    done = CliRunner().invoke(moesim, ["conformance", "mutant"], standalone_mode=False)
    assert done.return_value == 1
    assert "breaks" in done.output


def test_conform_yields_every_rule():
    assert len(list(conform(Lru))) == N_CHECKS


# -- a run and conformance judge alike ---------------------------------------------------------------------------------

SMALL = '''"""A small policy."""

from sim.policy import Evict, Fetch, Policy, Prefetch, RunGpu, Serve, param
{head}

class Small(Policy):
    """First in, first out."""

    name, title, source = "small", "Small", "nowhere in particular"
    {declared}

    def victim(self, piece, speculative, view):
        return next((p for p in view.residents() if view.evictable(p)), None)

{body}
'''


def hook(line, name="gate_done", takes="gate, view"):
    return f"    def {name}(self, {takes}):\n        {line}\n        yield Serve()\n"


def small(declared="", body="", head=""):
    return SMALL.format(head=head, declared=declared or "pass", body=body)


def needs(*levels):
    return f"needs = frozenset({{'experts', {', '.join(map(repr, levels))}}})"


LEARNS = "    def learn(self, store):\n        store.trace.scores(0, 1)\n"
DECODES = "gate.phase == 'decode' and gate.layer + 1 < view.n_layers and "
READS = {
    "scores": "gate.scores",
    "weights": "gate.weights",
    "next_scores_1": DECODES + "gate.next_scores(1)",
    "embeddings": "view.embeddings()",
}
# What a small policy is like, whether it is in order, and a word of the reason where it is not.
JUDGED_ALIKE = {
    "sound": (small(), ""),
    "undescribed": (
        "from sim.policy import Policy, Recency\n\n\nclass Small(Policy):\n    name = 'small'\n    order = Recency()\n",
        "",
    ),
    **{f"reads {level}": (small("", hook(line)), repr(level)) for level, line in READS.items()},
    **{f"declares {level}": (small(needs(level), hook(line)), "") for level, line in READS.items()},
    "at once": (small("", hook("gate.at_once(lambda scores: [0] * view.n_layers)")), "'scores'"),
    "by layer": (small("", hook("gate.by_layer(lambda a: [0] * a.shape[1], 'scores')")), "'scores'"),
    "by layer, declared": (small(needs("scores"), hook("gate.by_layer(lambda a: [0] * a.shape[1], 'scores')")), ""),
    "another's weights": (small(needs("weights"), hook("gate.weights_of(gate.ids)")), "'scores'"),
    "learns": (small("", LEARNS), "'scores'"),
    "learns, declared": (small(needs("scores"), LEARNS), ""),
    "clock": (small(head="import time"), "clock"),
    "clock, from": (small(head="from datetime import datetime"), "clock"),
    "clock, inside": (small(body=hook("import os, time")), "clock"),
    "thread": (small(head="import threading"), "import of threading"),
    "torch": (small(body=hook("if view.layer < 0: import torch")), "predicts_with"),
    "torch, said": (small("predicts_with = frozenset({'torch'})", hook("if view.layer < 0: import torch")), ""),
    "torch, clock": (small("predicts_with = frozenset({'torch'})", head="import time"), "clock"),
    "predicts with a clock": (small("predicts_with = frozenset({'time'})", head="import time"), "predicts_with"),
    "no such trait": (small("traits = frozenset({'cpus'})"), "cpus"),
    "traits in a list": (small("traits = ['cpu']"), "a set of words"),
    "needs in a list": (small("needs = ['experts']"), "a set of words"),
    "no such need": (small("needs = frozenset({'experts', 'score'})"), "no such level"),
    "no experts": (small("needs = frozenset({'scores'})"), "'experts'"),
    "lossy": (small("traits = frozenset({'lossy'})"), "gate mass"),
    "a default out of range": (small("a: int = param(1, 'what it is', within=(2, 3))"), "default"),
    "a list of parameters": (small("params = ('a',)"), "each parameter is an attribute"),
    "a name with a space": (small("name = 'Small one'"), "lower-case"),
    "a hook misspelt": (small(body=hook("pass", "gate_don")), "gate_done"),
    "clock of the machine": (small(body=hook("view.arrived(view.piece(0, 0))")), "'timing'"),
    "raises": (small(body=hook("{}[gate.layer]")), "KeyError"),
    "runs too little": (small(body="    def gate_done(self, gate, view):\n        return []\n"), "small"),
    "evicts what is needed": (
        small(body=hook("yield [Evict(view.piece(gate.layer, e)) for e in gate.needs]")),
        "small",
    ),
    "figures that are none": (small(body="    def stats(self):\n        return {'a': float('nan')}\n"), "nan"),
    "figures that are words": (small(body="    def stats(self):\n        return {'a': object()}\n"), "a"),
}


@pytest.mark.parametrize("case", JUDGED_ALIKE)
def test_a_run_and_conformance_judge_alike(case, tmp_path):
    """What a run refuses a rule refuses for the same reason, said once; what a run takes keeps every rule."""
    text, reason = JUDGED_ALIKE[case]
    path = tmp_path / "small.py"
    path.write_text(text)
    ran = CliRunner().invoke(moesim, ["run", "--policy", str(path), "--hw", "rtx3090", "--requests", "1"])
    told = ran.output + repr(ran.exception)
    judged = CliRunner().invoke(moesim, ["conformance", str(path)], standalone_mode=False)
    assert (ran.exit_code == 0) == (judged.return_value == 0) == (not reason), (told, judged.output)
    failed = []
    if judged.exception is None:
        failed = [verdict for verdict in conform(find(str(path))) if verdict.verdict == FAIL]
        assert len(failed) == bool(reason), failed
    said = " ".join([str(judged.exception), *(verdict.reason for verdict in failed)])
    assert reason in said
    assert reason in told
