"""Policies of others: what is no decision, never ends or ends the program is refused, by hook and layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_help import mixtral_shaped, simulated

from sim.base.errors import BadInput, IllegalDecision
from sim.engine import engine
from sim.options import RunSpec
from sim.policy.api import Assignment, Policy
from sim.policy.decisions import (
    Evict,
    Fetch,
    Foresee,
    Predict,
    Prefetch,
    Requeue,
    RequeueFrom,
    RunCpu,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    WriteBack,
)
from sim.policy.order import Rank
from sim.policy.outlook import Outlook
from sim.policy.pieces import Piece, Pieces
from sim.policy.wishes import Wishes
from sim.run import execute, prepare
from sim.workload.batching import Batching
from sim.workload.iterations import RequestInfo
from sim.workload.schedulers.fcfs import FirstCome


class Sound(Policy):
    """First in, first out."""

    name, title, source = "mine", "Mine", "none"

    def victim(self, piece: Any, speculative: bool, view: Any) -> Any:
        return next(other for other in view.residents() if view.evictable(other))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("traces"), n_requests=3, outputs=6)


Run = Callable[..., Any]
LOSSY = {"traits": frozenset({"lossy"}), "needs": frozenset({"experts", "weights"})}


@pytest.fixture
def run(trace: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Execute a policy class."""
    return lambda kind, **more: executed(kind, trace, monkeypatch, **more)


def executed(kind: type[Policy], trace: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    monkeypatch.setattr("sim.setup.prepare.find", lambda _: kind)
    setup = prepare(RunSpec(policy="mine", hw="rtx3090", trace=str(trace), cache="40experts", **more))
    try:
        return execute(setup, bounds=False)
    finally:
        setup.close()


def deciding(*decisions: Any, hook: str = "layer_enter", traits: frozenset[str] = frozenset()) -> type[Policy]:
    """A policy that says this at layer 3, or at the end of an iteration."""

    def say(self: Policy, what: Any, view: Any) -> Iterator[Any]:
        if view.layer == 3 or hook == "iteration_end":
            yield from decisions

    return type("Deciding", (Sound,), {hook: say, "traits": traits})


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (RunGpu(10**9), r"RunGpu.*1000000000"),
        (RunGpu("a"), "RunGpu.*a"),
        (RunGpu([1]), r"RunGpu.*expert \[1\]"),
        (RunGpu(None), "RunGpu.*None"),
        (RunGpu(-1), "RunGpu.*-1"),
        (Fetch(("a", 1)), r"Fetch, got piece \('a', 1\): must be a Piece"),
        (Fetch(7), "Fetch, got piece 7"),
        (Fetch([1]), r"Fetch, got piece \[1\]"),
        (Prefetch(None), "Prefetch, got piece None: must be a Piece"),
        (Prefetch({}), "Prefetch, got piece {}"),
        (Evict("lru"), "Evict, got piece 'lru'"),
        (Wait((1,)), "Wait, got tickets"),
        (Wait(5), "Wait, got tickets 5"),
        (RunPart(3), "RunPart, got piece 3"),
        (WriteBack("x"), "WriteBack, got piece 'x'"),
        (Predict("long"), "Predict"),
        (Predict(-1.0), "Predict"),
        (Predict(float("nan")), "Predict"),
        (Predict(1e308), "Predict.*at most 1e.09"),  # sums of such times are infinite
        (Predict(10**400), "Predict.*at most 1e.09"),
        (Predict(1e-3, "gpu9"), "Predict.*'gpu9'"),
        (7, "decision, got 7: not a decision"),
        ("Serve", "decision, got 'Serve': not"),
        (Fetch, "not a decision"),
        ([1], "decision, got 1: not"),
        ([[1]], r"decision, got \[1\]: not"),  # several at once, but no several of several
    ],
)
def test_what_is_no_decision(run: Run, decision: Any, said: str) -> None:
    with pytest.raises(IllegalDecision, match=rf"mine\.layer_enter at layer 3: .*{said}"):
        run(deciding(decision))


def test_of_traits(run: Run) -> None:
    with pytest.raises(IllegalDecision, match=r"mine\.layer_enter at layer 3: .*RunCpu.*x"):
        run(deciding(RunCpu("x"), traits=frozenset({"cpu"})))
    for wanted in (5, [1], [(None, 1.0, ())], [("a", "b", "c")]):
        kind = type("Queueing", (deciding(Requeue(wanted), traits=frozenset({"timing"})),), {"prefetch_depth": 1})
        with pytest.raises(IllegalDecision, match=r"mine.* at layer 3: .*(Requeue|Prefetch)"):
            run(kind)


@pytest.mark.parametrize("answer", [5, "ab", 1.5, (1, 2), [None], {"a": 1}, object()])
def test_what_a_hook_returns(run: Run, answer: Any) -> None:
    kind = type("Returning", (Sound,), {"layer_done": lambda self, layer, view: answer if layer == 2 else None})
    with pytest.raises(IllegalDecision, match=r"mine\.layer_done at layer 2: "):
        run(kind)


def test_without_a_layer_the_hook_is_named(run: Run) -> None:
    with pytest.raises(IllegalDecision, match=r"mine\.iteration_end: decision, got 7"):
        run(deciding(7, hook="iteration_end"))


def answering(victim: Callable[..., Any], how: str) -> type[Policy]:
    """A policy with this `victim`, asked in the default service, for a decision, for a prefetch or while all is placed.

    Prefetches ask for room before and, with a queue, after the hook that wished for them.
    """
    hooks: dict[str, Any] = {"victim": victim}
    if how == "decision":
        hooks["gate_done"] = lambda self, gate, view: [Serve()]
    elif how != "default":
        hooks["layer_enter"] = lambda self, layer, view: [
            Prefetch(view.piece(at, e)) for at in range(view.n_layers) for e in range(view.n_experts)
        ]
    if how == "queue":
        hooks |= {"traits": frozenset({"timing"}), "prefetch_depth": 1}
    return type("Answering", (Sound,), hooks)


WAYS = ["default", "decision", "prefetch", "queue"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("answer", ["a word", 3, [1], {}, ("a", 1)])
def test_a_victim_that_is_none(run: Run, how: str, answer: Any) -> None:
    seen: list[str] = []
    kind = answering(lambda self, piece, speculative, view: seen.append("") or answer, how)
    with pytest.raises(IllegalDecision, match=r"^mine\.victim at layer \d+: got .*: it answers with a resident Piece"):
        run(kind)
    assert seen


@pytest.mark.parametrize("how", WAYS)
def test_a_victim_that_is_not_there(run: Run, how: str) -> None:
    kind = answering(lambda self, piece, speculative, view: piece, how)
    with pytest.raises(IllegalDecision, match=r"^mine\.victim at layer \d+: Evict of .*: "):
        run(kind)


@pytest.mark.parametrize(
    "endless",
    [
        lambda: itertools.repeat(Wait(())),
        lambda: (Serve() for _ in itertools.count()),
        lambda: (Predict(0.0) for _ in itertools.count()),
    ],
)
def test_what_never_ends(run: Run, endless: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_DECISIONS", 5000)
    kind = type("Endless", (Sound,), {"layer_enter": lambda self, layer, view: endless() if layer == 1 else None})
    with pytest.raises(IllegalDecision, match=r"mine\.layer_enter at layer 1: more than 5000 decisions, the last of "):
        run(kind)


def test_as_many_as_allowed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_DECISIONS", 50)
    for decisions in (lambda: [Wait(())] * 49, lambda: (Wait(()) for _ in range(49))):
        run(type("Busy", (Sound,), {"layer_enter": lambda self, layer, view, d=decisions: d()}))


class TestItsProgram:
    @pytest.mark.parametrize("how", [SystemExit, SystemExit(0), GeneratorExit])
    def test_it_is_not_ended_by_a_hook(self, run: Run, how: Any) -> None:
        def layer_enter(self: Policy, layer: int, view: Any) -> None:
            if layer == 4:
                raise how

        with pytest.raises(IllegalDecision, match=r"mine\.layer_enter at layer 4: it ended the program with "):
            run(type("Leaving", (Sound,), {"layer_enter": layer_enter}))

    def test_nor_before_the_run(self, run: Run) -> None:
        def bind(self: Policy, *_: Any) -> None:
            raise SystemExit(0)

        def __init__(self: Policy, *_: Any) -> None:  # noqa: N807
            raise SystemExit(0)

        for hook in (bind, __init__):
            with pytest.raises(IllegalDecision, match=rf"mine\.{hook.__name__}: it ended the program"):
                run(type("Leaving", (Sound,), {hook.__name__: hook}))

    def test_on_the_command_line(
        self, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = type("Leaving", (Sound,), {"bind": lambda self, view: exit(0)})
        monkeypatch.setattr("sim.setup.prepare.find", lambda _: kind)
        said = simulated(capsys, "--policy", "mine", "--hw", "rtx3090", "--trace", trace)
        assert said.code == 1
        assert said.err.startswith("error: mine: it ended the program with SystemExit(0)")

    def test_its_own_mistakes_keep_their_traceback(self, run: Run) -> None:
        for mistake in (lambda: 1 / 0, lambda: {}["a"], lambda: None.x):
            kind = type("Broken", (Sound,), {"layer_enter": lambda self, layer, view, m=mistake: m()})
            with pytest.raises((ZeroDivisionError, KeyError, AttributeError)):
                run(kind)

    def test_also_in_a_generator_and_behind_the_view(self, run: Run) -> None:
        def broken(self: Policy, layer: int, view: Any) -> Iterator[Any]:
            view.evictable("x")
            yield Serve()

        with pytest.raises(TypeError, match="evictable, got 'x': a Piece"):
            run(type("Broken", (Sound,), {"layer_enter": broken}))


@pytest.mark.parametrize("n_bytes", [-1, -5e9, float("nan"), float("inf"), "1 GB", None])
def test_predictor_bytes(run: Run, n_bytes: Any) -> None:
    kind = type("Lending", (Sound,), {"predictor_bytes": lambda self, view: n_bytes})
    with pytest.raises(IllegalDecision, match=r"mine\.predictor_bytes, got .*: a number that is finite and not "):
        run(kind)


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        (frozenset({"timng"}), "got trait 'timng': no such trait; did you mean 'timing'"),
        (frozenset({3}), "got trait 3: no such trait"),
        ("cpu", "got traits 'cpu': a set of words"),
    ],
)
def test_traits(run: Run, traits: Any, said: str) -> None:
    with pytest.raises(BadInput, match=f"policy mine, {said}"):
        run(type("Misspelt", (Sound,), {"traits": traits}))


@pytest.mark.parametrize("answer", [5, (1, 2), Assignment(np.zeros((9, 9, 9)), None), Assignment("abc", None)])  # type: ignore[arg-type]
def test_an_assignment_that_is_none(run: Run, answer: Any) -> None:
    kind = type("Lossy", (Sound,), {**LOSSY, "assign": lambda self, gate, view: answer})
    with pytest.raises(IllegalDecision, match="assign"):
        run(kind)


def another() -> Piece:
    """Of another run, and of no run at all."""
    return Pieces(9, 9, "bf16", 1, lambda _: 16).all[-1]


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Fetch(another()), "belongs to another run"),
        (Evict(another()), "belongs to another run"),
        (Prefetch(Piece(0, 0, 0.0, 1.0, "bf16", 0, 16, -5)), "belongs to another run"),
        (Prefetch(Piece(0, 0, 0.0, 1.0, "bf16", 7, 16, 10**6)), "belongs to another run"),
        (Wait((None,)), "Wait, got tickets"),
        (RunGpu(0, (None,)), "RunGpu, got after"),
        (RunGpu(0, 5), "RunGpu, got after"),
        (WriteBack(None), "WriteBack, got piece None"),
        (RunPart(None), "RunPart, got piece None"),
        (Evict(None), "Evict, got piece None"),
    ],
)
def test_what_nothing_looks_up_unseen(run: Run, decision: Any, said: str) -> None:
    """Compiled, an index that is none would be memory of others."""
    with pytest.raises(IllegalDecision, match=rf"mine\.layer_enter at layer 3: .*{said}"):
        run(deciding(decision))


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (lambda piece: Prefetch(piece, float("nan")), "priority nan: must be a number"),
        (lambda piece: Prefetch(piece, "first"), "Prefetch, got priority 'first': must be a number"),
        (lambda piece: Requeue([(piece, 1.0, (None,))]), "Requeue, got wanted"),
        (lambda piece: Requeue([(piece, float("nan"), ())]), "priority nan: must be a number"),
        (lambda piece: Requeue([(another(), 1.0, ())]), "belongs to another run"),
        (lambda piece: RequeueFrom(Wishes([0, 10**6], [1.0, 1.0]), 0, 2, 0), "got piece index 1000000"),
        (lambda piece: RequeueFrom(Wishes([-1], [1.0]), 0, 1, 0), "got piece index -1"),
        (lambda piece: RequeueFrom(Wishes([0], [1.0]), 0, 2, 0), "entries 0 to 2: there are 1"),
        (lambda piece: RequeueFrom(None, 0, 0, 0), "RequeueFrom, got wishes None"),
        (lambda piece: RequeueFrom(Wishes([0], [1.0]), 0, 1, 0, (None,)), "RequeueFrom, got after"),
        (lambda piece: Foresee(None, 0), "Foresee, got outlook None: must be an Outlook"),
        (lambda piece: Foresee(Outlook(8, 8, 1, Rank(64)), 0, 0.5), "Foresee, got predict 0.5: must be a Predict"),
        (lambda piece: Foresee(Outlook(8, 8, 1, Rank(64)), 0, Predict(-1.0)), "seconds, not negative and at most"),
    ],
)
def test_what_a_queue_refuses(run: Run, decision: Callable[[Piece], Any], said: str) -> None:
    def layer_enter(self: Policy, layer: int, view: Any) -> list[Any]:
        return [decision(view.part(7, 0, 0.0, 0.5))] if layer == 3 else []

    with pytest.raises(IllegalDecision, match=rf"mine\.layer_enter at layer 3: .*{said}"):
        run(type("Queueing", (Sound,), {"layer_enter": layer_enter, "traits": {"timing"}, "prefetch_depth": 1}))


def test_wishes_have_a_priority_each() -> None:
    with pytest.raises(ValueError, match="2 indices, 1 priorities"):
        Wishes([0, 1], [1.0])


@pytest.mark.parametrize("answer", [5, ["a"], [None], None])
def test_what_is_there_at_first(run: Run, answer: Any) -> None:
    with pytest.raises(IllegalDecision, match=r"^mine\.initial: got .*: it answers with pieces$"):
        run(type("Beginning", (Sound,), {"initial": lambda self, view: answer}))
    with pytest.raises(IllegalDecision, match="belongs to another run"):
        run(type("Beginning", (Sound,), {"initial": lambda self, view: [another()]}))


@pytest.mark.parametrize("answer", [5, [[1]], ["ab"], [[None] * 32], [5]])
def test_budgets_that_are_none(run: Run, answer: Any) -> None:
    with pytest.raises(IllegalDecision, match=r"^mine.*layer_budgets.* it answers with bytes by GPU and layer$"):
        run(type("Dividing", (Sound,), {"layer_budgets": lambda self, view: answer}))


@pytest.mark.parametrize("answer", [5, "ab", [], [[]], [5], [["a"]], [np.zeros(3)], None])
def test_passes_that_are_none(answer: Any) -> None:
    two = [RequestInfo(i, 5 * i, 2, 4, "", None) for i in range(2)]
    wrong = type("Wrong", (FirstCome,), {"passes": lambda self, ranges: answer})
    batching = Batching(wrong(two), 2)
    assert [len(batching.next(0.0) or ()) for _ in range(2)] == [1, 1]  # two prompts; then both decode
    with pytest.raises(
        IllegalDecision, match=r"^passes of scheduler \w+, got .*: every token of a decode step runs in one pass"
    ):
        batching.next(0.0)


@pytest.mark.parametrize("order", [5, "lru", Rank, Rank(3), Rank(10**6)])
def test_an_order_that_is_none(run: Run, order: Any) -> None:
    def bind(self: Policy, view: Any) -> None:
        self.order = order

    with pytest.raises(IllegalDecision, match=r"^mine.*order, got "):
        run(type("Ordering", (Sound,), {"bind": bind}))


def test_a_gpu_that_is_not_there(run: Run) -> None:
    for look in (lambda view: view.free_bytes(1), lambda view: view.capacity_of(-1), lambda view: view.free_bytes(99)):
        with pytest.raises(IndexError, match="of 1"):
            run(type("Looking", (Sound,), {"layer_enter": lambda self, layer, view, look=look: look(view)}))


def test_a_piece_that_is_none_behind_the_view(run: Run) -> None:
    looks = (lambda view: view.holds(None), lambda view: view.arrived(None), lambda view: view.first_evictable(["x"]))
    for look in looks:
        with pytest.raises(TypeError, match="a Piece"):
            hooks = {"traits": {"timing"}, "layer_enter": lambda self, layer, view, look=look: look(view)}
            run(type("Looking", (Sound,), hooks))
