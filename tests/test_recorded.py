"""A run timed by another's recording is, to the bit, what it is when it decides for itself."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pytest
from cli_help import mixtral_shaped, moesim
from easy_numbers import setup
from grids import few_each_time
from random_worlds import World, drawn_hardware, drawn_stack, setup_of, world
from tiny_traces import from_rows

from policies.lru import Lru
from sim.base.errors import MoesimError
from sim.engine.recording import Recording
from sim.policy.decisions import Fetch, Predict, RunGpu, Serve
from sim.results.sampling import times_of
from sim.run import Outcome, execute, record, tellable, timed
from sim.studies.runner import work
from traces.format.reader import Trace

PLAIN = ("lru", "lfu", "fifo", "lcp", "mrs", "random", "belady", "lynx")


def figures(outcome: Outcome) -> tuple[Any, ...]:
    return {**outcome.result.to_dict(), "wall_s": 0.0}, times_of(outcome.report), outcome.report.phases


def held_against(of: World, n_machines: int) -> int:
    """How many machines were timed by the world's recording, each equal to a run of its own; 0 without one."""
    with Trace(of.trace) as trace:
        try:
            if not tellable(setup_of(of, trace)):
                return 0
            alone = execute(setup_of(of, trace), bounds=False)
        except MoesimError:
            return 0
        outcome, recording = record(setup_of(of, trace))
        assert figures(outcome) == figures(alone)
        if recording is None:
            return 0
        for seed in range(n_machines):
            rng = Random(seed)
            of.facts["hw"], of.facts["stack"] = drawn_hardware(rng)[0], drawn_stack(rng)
            one = setup_of(of, trace)
            shape = one.model.n_moe_layers, one.model.n_experts
            again = Recording.from_bytes(recording.to_bytes(), trace, one.requests, one.pieces, shape)
            alone = figures(execute(setup_of(of, trace), bounds=False))
            assert figures(timed(one, recording)) == alone
            assert figures(timed(setup_of(of, trace), again)) == alone
        return n_machines


@pytest.mark.parametrize("policy", few_each_time(PLAIN, ("lru", "lcp", "belady")))
def test_a_recording_times_any_machine(tmp_path: Path, policy: str) -> None:
    """Worlds with ties, dense layers, graphs, groups, less room than a layer's experts; other hardware and stacks."""
    assert sum(held_against(world(seed, tmp_path, policy), 4) for seed in range(24)) >= 20


def test_whatever_a_policy_does_it_is_the_same_run_while_it_is_recorded(tmp_path: Path) -> None:
    for seed in range(60):
        held_against(world(seed, tmp_path, "drawn"), 2)


class Plain(Lru):
    """A cache that says each time what is to be done."""

    name = "plain"

    def gate_done(self, gate: Any, view: Any) -> Any:
        yield Serve()


class AsksPrices(Plain):
    name = "asks_prices"

    def gate_done(self, gate: Any, view: Any) -> Any:
        view.prices.copy_s()
        yield Serve()


class Waits(Plain):
    """Lets an expert wait for another one, which a machine's times decide."""

    name = "waits"

    def gate_done(self, gate: Any, view: Any) -> Any:
        first, *others = gate.needs
        yield Fetch(view.piece(gate.layer, first))
        ticket = yield RunGpu(first)
        for expert in others:
            yield Fetch(view.piece(gate.layer, expert))
            yield RunGpu(expert, (ticket,))


class FetchesAhead(Plain):
    """What it demands for the next layer may still be under way when that asks for it."""

    name = "fetches_ahead"

    def layer_done(self, layer: int, view: Any) -> Any:
        if layer + 1 < view.n_layers and not view.resident(layer + 1, 0):
            yield Fetch(view.piece(layer + 1, 0))


class Predicts(Plain):
    name = "predicts"

    def layer_enter(self, layer: int, view: Any) -> Any:
        yield Predict(0.5, "host", False)


@pytest.mark.parametrize("kind", [Plain, AsksPrices, Waits, FetchesAhead, Predicts])
def test_only_decisions_that_no_hardware_has_a_part_in_are_recorded(tmp_path: Path, kind: type[Lru]) -> None:
    rows = [[[0, 1], [0, 2]], [[1, 2], [0, 3]], [[2, 3], [1, 2]], [[0, 3], [2, 3]]]
    with Trace(from_rows(tmp_path / "rows.safetensors", rows, 4)) as trace:
        alone = execute(setup(kind(), trace, 4), bounds=False)
        outcome, recording = record(setup(kind(), trace, 4))
    assert figures(outcome) == figures(alone)
    assert (recording is not None) == (kind is Plain)


def test_one_run_decides_for_all_hardware_of_a_sweep(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Of 3 policies by 2 budgets on 6 machines: `lru` and `lfu` run once per budget, `fiddler`, which asks prices, runs
    on each; and the table is that of runs which decide for themselves."""
    trace, calls = mixtral_shaped(tmp_path), {"record": 0, "timed": 0, "execute": 0}
    words = ["sweep", "--trace", trace, "--policy", "lru", "--policy", "lfu", "--policy", "fiddler", "--workers", 1]
    words += [
        "--hw",
        "rtx3090,a6000",
        "--cache",
        "32experts,48experts",
        "--set",
        "hw.h2d.bandwidth_bytes_per_s=1.2e10,2e10,4e10",
    ]

    def counting(name: str) -> Any:
        function = getattr(work, name)

        def counted(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return function(*args, **more)

        return counted

    for name in calls:
        monkeypatch.setattr(work, name, counting(name))
    said = moesim(capsys, *words, "--out", tmp_path / "once")
    assert said.code == 0
    assert "36 points: " in said.out
    assert "16 replayed, 20 timed by the decisions of these" in " ".join(said.out.split())
    assert calls == {"record": 6, "timed": 20, "execute": 10}
    monkeypatch.setattr(work, "tellable", lambda _: False)
    assert moesim(capsys, *words, "--out", tmp_path / "each", "--json").json["work"] == {
        "there": 0,
        "replayed": 36,
        "timed_by_recording": 0,
    }
    assert calls == {"record": 6, "timed": 20, "execute": 46}
    assert len(pd.read_parquet(tmp_path / "once" / "sweep.parquet")) == 36
    assert (tmp_path / "once" / "sweep.parquet").read_bytes() == (tmp_path / "each" / "sweep.parquet").read_bytes()


BY_CLOCK = """
from sim.workload.scheduler import Scheduler


class ByClock(Scheduler):
    name = "by_clock"
    n_running = 0

    def pick(self, now_s):
        waits = self.n_running and now_s < 8.0
        return None if waits else next(self.arrived_by(now_s), None)

    def started(self, request):
        self.n_running += 1

    def finished(self, request):
        self.n_running -= 1
"""


def test_a_scheduler_of_ones_own_may_go_by_the_clock(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "clock.py").write_text(BY_CLOCK, encoding="utf-8")
    trace, link = mixtral_shaped(tmp_path), "hw.h2d.bandwidth_bytes_per_s"
    words = ["--trace", trace, "--policy", "lru", "--hw", "rtx3090", "--cache", "48experts", "--batch", "2"]
    words += ["--scheduler", tmp_path / "clock.py", "--json"]
    rows = moesim(capsys, "sweep", *words, "--set", f"{link}=1e10,6e10", "--workers", 1).json["rows"]
    for row in rows:
        alone = moesim(capsys, "run", *words, "--set", f"{link}={row[link]}").json
        assert (row["run_id"], row["tpot_s.mean"]) == (alone["run_id"], alone["tpot_s"]["mean"])
