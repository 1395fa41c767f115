"""What stacks cost beyond launches: layers shared with the CPU, regions there, and copies of several calls, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import random_worlds
from cli_help import mixtral_shaped, simulated
from easy_numbers import Run, execute_easy, figure, setup
from test_timeline_copies import Placed
from tiny_traces import from_rows

from policies.lru import Lru
from sim.base.errors import BadInput
from sim.policy.api import Policy
from sim.policy.decisions import RunCpu
from sim.profiles.stack import calls_of, load_stack
from sim.run import Setup
from traces.format.reader import Trace

ENGINES = ("core", "simpy")
SET = ("engine.hybrid_layer_s=7e-4", "engine.copy_calls=3", "engine.cpu_region=layer")


class OnCpu(Placed):
    """Every expert on the CPU."""

    traits = frozenset({"cpu", "timing"})

    def gate_done(self, gate: Any, view: Any) -> list[Any]:
        return [RunCpu(expert) for expert in gate.needs]


def ran(
    policy: Policy, path: Path, rows: Any, engine: str, machine: dict[str, float] | None = None, **stack: Any
) -> Run:
    with Trace(from_rows(path / f"{engine}.safetensors", rows, 3)) as trace:
        made = setup(policy, trace, 3, **(machine or {}))
        spec = msgspec.structs.replace(made.spec, sim_simulator=engine)
        return execute_easy(replace(made, spec=spec, stack=msgspec.structs.replace(made.stack, **stack)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_that_the_cpu_shares_is_charged_once(tmp_path: Path, engine: str) -> None:
    seen = ran(OnCpu(), tmp_path, [[[0, 1]]], engine, hybrid_layer_s=figure(3.0))
    assert seen.lane("host") == [("hybrid layer 0", 1, 4)]
    assert seen.lane("cpu") == [("expert 0.0", 5, 10), ("expert 0.1", 10, 15)]
    assert seen.end_s == 17  # results are up at 16, then the head; 14 without the host's three
    shares = {f.figure: f.share for f in seen.result.provenance.figures}
    assert shares["engine.hybrid_layer_s"] == pytest.approx(3 / 17)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_layer_of_each_token_is_charged_and_none_without_the_cpu(tmp_path: Path, engine: str) -> None:
    rows = [[[0, 1], [1, 2]]] * 3
    free = ran(OnCpu(), tmp_path, rows, engine)
    paid = ran(OnCpu(), tmp_path, rows, engine, hybrid_layer_s=figure(3.0))
    assert paid.end_s - free.end_s == 3 * 2 * 3
    assert [what for what, *_ in paid.lane("host")].count("hybrid layer 1") == 3
    on_gpu = [ran(Lru(), tmp_path, rows, engine, hybrid_layer_s=figure(s)).end_s for s in (0.0, 3.0)]
    assert on_gpu[0] == on_gpu[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_as_one_region_pays_the_overhead_once(tmp_path: Path, engine: str) -> None:
    # 5 s are all overhead here, so the second expert takes none; its result goes up after the first one's.
    seen = ran(OnCpu(), tmp_path, [[[0, 1]], [[0, 1]]], engine, cpu_region="layer")
    assert seen.lane("cpu") == [("expert 0.0", 2, 7), ("expert 0.0", 12, 17)]
    assert seen.end_s == 2 * 10


def in_calls(made: Setup, engine: str, **stack: Any) -> Setup:
    """With a link of 2 s latency, and copies as the stack makes them."""
    h2d = msgspec.structs.replace(made.hw.h2d, latency_s=figure(2.0))
    return replace(
        made,
        spec=msgspec.structs.replace(made.spec, sim_simulator=engine),
        hw=msgspec.structs.replace(made.hw, h2d=h2d),
        stack=msgspec.structs.replace(made.stack, **stack),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_each_call_of_a_copy_is_enqueued_and_waits_for_the_link(tmp_path: Path, engine: str) -> None:
    with Trace(from_rows(tmp_path / "t.safetensors", [[[0]]], 3)) as trace:
        made = setup(Lru(), trace, 3, copy_launch_s=1.0)
        seen = execute_easy(in_calls(made, engine, copy_calls=3, per_copy_s=figure(0.5)))
    assert seen.lane("host") == [("launch copy 0.0", 1, 4.5)]
    assert seen.lane("h2d") == [("demand 0.0", 4.5, 20.5)]
    assert seen.end_s == 23.5
    spent = dict(seen.machine.host_shares())
    figures = seen.machine.cost.launches
    assert (spent[figures.q_copy], spent[figures.q_stack_copy]) == (3.0, 0.5)


def test_copies_shorter_than_their_issue_come_as_fast_as_they_are_issued(tmp_path: Path) -> None:
    # three copies of 0.25 s, each issued in 2 calls of 1 s: the link idles in between
    machine = {"copy_launch_s": 1.0, "copy_s": 0.25}
    seen = ran(Lru(), tmp_path, [[[0, 1, 2]]], "core", machine, copy_calls=2)
    assert [(start, end) for _, start, end in seen.lane("h2d")] == [(3, 3.25), (5, 5.25), (7, 7.25)]


def test_a_part_takes_its_share_of_the_calls_rounded_up() -> None:
    assert [calls_of(3, frac) for frac in (1.0, 2 / 3, 0.5, 1 / 3, 0.1)] == [3, 2, 2, 1, 1]
    assert [calls_of(1, frac) for frac in (1.0, 0.1)] == [1, 1]
    assert [calls_of(0, frac) for frac in (1.0, 0.1)] == [0, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_kernel_that_gathers_pays_neither_calls_nor_latency(tmp_path: Path, engine: str) -> None:
    """Three experts of 4 s at a latency of 2 s and 1 s a call: 6 s each, and 5 s of them before the first is here."""
    ends = {}
    for calls in (1, 0):
        with Trace(from_rows(tmp_path / f"{engine}{calls}.safetensors", [[[0, 1, 2]]], 3)) as trace:
            made = setup(Lru(), trace, 3, copy_launch_s=1.0, copy_s=4.0)
            seen = execute_easy(in_calls(made, engine, copy_calls=calls))
        ends[calls] = [(start, end) for _, start, end in seen.lane("h2d")]
        assert seen.lane("host") == ([(f"launch copy 0.{n}", 1 + n, 2 + n) for n in range(3)] if calls else [])
        shares = {f.figure: f.share for f in seen.result.provenance.figures}
        assert ("h2d.latency_s" in shares) is bool(calls)
    assert ends == {1: [(2, 8), (8, 14), (14, 20)], 0: [(1, 5), (5, 9), (9, 13)]}


@pytest.mark.parametrize("policy", ["fiddler", "moepic", "mixtral_offloading"])
def test_engines_agree_with_a_stack_that_has_all(
    tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--hw",
        "rtx3090",
        "--trace",
        mixtral_shaped(tmp_path),
        "--model",
        "mixtral-8x7b",
        "--cache",
        "60experts",
        "--set",
        "sim.contention=off",
    ]
    words += [word for item in SET for word in ("--set", item)]
    one, other = (
        simulated(capsys, "--policy", policy, *words, "--set", f"sim.simulator={engine}", "--json").json
        for engine in ENGINES
    )
    for result in (one, other):
        for key in ("simulator", "wall_s", "by_layer"):
            result.pop(key, None)
    assert one == other


@pytest.mark.parametrize("policy", ["drawn", "fiddler", "hybrimoe", "ktransformers", "daop", "moepic"])
def test_engines_agree_in_random_worlds(tmp_path: Path, policy: str) -> None:
    n_hybrid = 0
    for seed in range(14):
        of = random_worlds.world(seed, tmp_path, policy)
        own = {"hybrid_layer_s": figure(3.0 * (seed % 3)), "copy_calls": seed % 4, "cpu_region": "layer"}
        of.facts["stack"] = msgspec.structs.replace(of.facts["stack"], **own)
        told, seen = random_worlds.engines_disagree(of)
        of.trace.unlink()
        assert told is None, f"{of}\n  {told}"
        n_hybrid += any(span[1] == "hybrid layer" for span in seen.spans)
    assert n_hybrid or policy == "moepic"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hybrid_layer_s": 2}, r"hybrid_layer_s, got 2: from 0 to 1"),
        ({"copy_calls": -1}, r"copy_calls: Expected `int` >= 0"),
        ({"cpu_region": "layers"}, r"cpu_region: Invalid enum value 'layers'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_stack("bare", settings)
