"""`--parallel layers`: each GPU has whole layers, experts and all, and one computes at a time.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s, attention and head 1 s; hidden states of a token go on to
the next GPU in 2 s, 1 s of it latency. Of three layers the first two are on GPU 0, the last one and the head on GPU 1.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import random_worlds
import several_worlds
from cli_help import simulated
from easy_numbers import TOKEN_BYTES, Run, execute_easy, figure, setup
from hypothesis import given
from hypothesis import strategies as st
from scopes import one_cache
from test_timeline_copies import Placed
from tiny_traces import from_rows, tiny_trace

from policies.belady import Belady
from policies.lru import Lru
from sim.base.errors import BadInput, DoesNotFit
from sim.machine.several import homes_by_layer, stages, way_of
from sim.options import RunSpec
from sim.policy.pieces import Pieces
from sim.policy.registry import policies
from sim.profiles.hardware import Link
from sim.profiles.models import load_model
from sim.run import execute, prepare
from sim.setup.memory import dense_bytes_by_gpu
from sim.setup.request_estimates import estimated
from sim.workload.known_requests import Profiled
from traces.format.reader import Trace

ENGINES = ("core", "simpy")


def in_turn(
    policy: Any, trace: Trace, room: int | list[int], engine: str = "core", dense: str = "layers", **world: Any
) -> Run:
    made = setup(policy, trace, room, gpus=2, **world)
    spec = msgspec.structs.replace(made.spec, sim_simulator=engine, parallel=dense)
    p2p = Link(latency_s=figure(1.0), bandwidth_bytes_per_s=figure(TOKEN_BYTES))
    hw = msgspec.structs.replace(made.hw, p2p=p2p)
    homes = homes_by_layer(made.model, spec.several.stages_of(made.model.n_layers))
    pieces = Pieces(trace.n_layers, trace.n_experts, "bf16", 2, made.model.expert_bytes, homes)
    return execute_easy(replace(made, spec=spec, hw=hw, homes=homes, pieces=pieces))


def by_hand(tmp_path: Path, there: Any, engine: str, **world: Any) -> Run:
    with Trace(from_rows(tmp_path / "easy.safetensors", [[[0], [1], [2]]], 3)) as trace:
        return in_turn(Placed(there), trace, 3, engine, **world)


def test_layers_are_dealt_out_as_llama_cpp_does():
    assert stages(48, [1, 1]) == [0] * 25 + [1] * 24  # the head counts as a layer
    assert stages(3, [1, 1]) == [0, 0, 1, 1]
    assert stages(4, [1]) == [0] * 5
    assert stages(48, [3, 1]) == [0] * 37 + [1] * 12
    assert stages(3, [1, 3]) == [0, 1, 1, 1]


@given(st.integers(1, 100), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_shares_are_llama_cpps_tensor_split(n_layers, shares):
    """`get_layer_buft_list` of llama-model.cpp: the first device whose end lies above the layer's place."""
    ends = np.cumsum(shares) / sum(shares)
    places = np.arange(n_layers + 1) / (n_layers + 1)
    far = np.abs(ends[:, None] - places[None]).min(axis=0) > 1e-9  # where rounding decides nothing
    found = np.searchsorted(ends, places, side="right")
    assert np.array_equal(np.array(stages(n_layers, shares))[far], found[far])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("tensor:3/1", "only layers come in shares"),
        ("layers:", "shares of the layers are numbers"),
        ("layers:3/x", "shares of the layers are numbers"),
        ("layers:3/-1", "shares of the layers are numbers"),
        ("layers:3/1e9", "shares of the layers are numbers"),
        ("layers:3/1.2345", "six and three decimals"),
        ("layers:3/1234567890", "at most nine digits"),
        ("layers:3/\u0663", "shares of the layers are numbers"),
        ("layers:" + "/".join("1" * 2000), "shares of the layers are numbers"),
        ("layers:3/.", "shares of the layers are numbers"),
        ("layers:3/\u00b2", "shares of the layers are numbers"),
        ("layers:3/0", "a GPU without layers has nothing to do"),
    ],
)
def test_shares_that_are_none(said, why):
    with pytest.raises(BadInput, match=why):
        way_of(said)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_on_the_first_and_two_on_the_second(tmp_path, engine):
    seen = by_hand(tmp_path, [(0, 0), (1, 1), (2, 2)], engine, dense="layers:1/3")
    assert [step for step in seen.lane("gpu") if step[0].startswith("hand_over")] == [("hand_over 1", 3, 5)]


@pytest.mark.parametrize("engine", ENGINES)
def test_one_computes_at_a_time_and_hands_over(tmp_path, engine):
    seen = by_hand(tmp_path, [(0, 0), (1, 1), (2, 2)], engine)
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 3, 4),
        ("expert 1.1", 4, 6),
        ("hand_over 2", 6, 8),
        ("attention 2", 8, 9),
        ("expert 2.2", 9, 11),
        ("head", 11, 12),
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_waits_for_copies_to_its_own_gpu_and_all_waits_count(tmp_path, engine):
    # Missing in layer 1: copied 4..14 to GPU 0; in layer 2: from its gate, 14 + 2 + 2 + 1, 19..29 to GPU 1.
    seen = by_hand(tmp_path, [(0, 0)], engine)
    assert seen.lane("h2d0") == [("demand 1.1", 4, 14)]
    assert seen.lane("h2d1") == [("demand 2.2", 19, 29)]
    assert seen.end_s == 32
    assert seen.machine.parts_s() == [12, 20, 0, 0, 0, 0, 0]
    by_layer = seen.machine.waiting
    assert [by_layer.seconds(0, layer)["demand"] for layer in range(3)] == [0, 10, 10]


def test_the_bound_by_hand(tmp_path):
    resident = by_hand(tmp_path, [(0, 0), (1, 1), (2, 2)], "core").result
    assert resident.lower_bound.ttft_s == pytest.approx(12.0)  # what it takes: nothing is missing


@pytest.mark.parametrize("seed", range(4))
def test_bounds_stay_bounds(tmp_path, seed):
    path = tiny_trace(tmp_path / "t", 5, 6, 2, n_requests=3, prompt=3, outputs=4, levels=set(), seed=seed)
    with Trace(path) as trace:
        for kind in (Lru, Belady):
            for room in (2, 8):
                world = {"launch_s": 0.25 * (seed % 2), "copy_s": 1.0 + 4 * (seed // 2), "shared": bool(seed % 2)}
                result = in_turn(one_cache(kind), trace, room, **world).result
                assert 0 < result.lower_bound.tpot_s <= result.tpot_s.mean
                assert 0 < result.lower_bound.ttft_s <= result.ttft_s.mean


def test_as_if_one_gpu_had_the_memory_of_all(tmp_path):
    """Nobody leaves, so all copies are those of one GPU; what is added are hand-overs."""
    path = tiny_trace(tmp_path / "t", 3, 6, 2, n_requests=2, prompt=3, outputs=6, levels=set())
    with Trace(path) as trace:
        both = in_turn(Lru(scope="global"), trace, [12, 6])  # of two layers and of one
    with Trace(path) as trace:
        one = execute_easy(setup(Lru(scope="global"), trace, 18))
    assert both.result.hit_rate == one.result.hit_rate
    assert both.result.h2d_bytes == one.result.h2d_bytes
    crossings_s = (1.0 + 3.0) + 5 * (1.0 + 1.0)  # a prompt of three tokens, and five more
    assert both.end_s == pytest.approx(one.end_s + crossings_s)


# -- every policy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(policies()))
def test_engines_agree_and_bounds_hold_for_every_policy(tmp_path, policy):
    n = 0
    for seed in (7, 100, 103):
        of = several_worlds.several(seed, tmp_path, policy, parallel="layers")
        told, seen = random_worlds.engines_disagree(of)
        assert told is None, f"{of}\n  {told}"
        assert seen.error in ("", None, "DoesNotFit", "BadInput"), f"{of}\n  {seen.error}"
        if not seen.error:
            n += 1
            random_worlds.is_bounded(of)
    assert n


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_trace(tmp_path_factory.mktemp("t") / "t.safetensors", 32, 8, 2, prompt=4, outputs=3, levels=set())


def made(tiny_path: Path, **given: Any) -> Any:
    spec = {"policy": "lru", "hw": "rtx3090", "gpus": 2, "parallel": "layers", "trace": str(tiny_path), "split": "all"}
    return prepare(RunSpec(**{**spec, **given}))


@pytest.mark.parametrize("policy", ["llama_cpp", "llama_cpp_lru", "mixtral_offloading", "static_cache", "hybrimoe"])
def test_a_cache_per_layer_has_what_its_gpu_has_for_its_layers(policy):
    """Not half of it, as where each layer's experts lie on both."""
    spec = {"policy": policy, "hw": "rtx3090", "cache": "40%", "requests": 1, "gpus": 2}
    rates = []
    for dense in ("gpu0", "layers"):
        setup_ = prepare(RunSpec(**spec, parallel=dense))
        rates.append(execute(setup_).result.hit_rate)
        setup_.close()
    assert rates[1] > 0.7 * rates[0]


def test_a_stack_says_how_its_engine_uses_several_gpus(tiny_path):
    def told(**given: Any) -> tuple[str, str]:
        spec = {
            "policy": "lru",
            "hw": "rtx3090",
            "gpus": 2,
            "cache": "60experts",
            "trace": str(tiny_path),
            "split": "all",
        }
        found = prepare(RunSpec(**{**spec, **given}))
        found.close()
        return found.several.dense, found.run_id

    assert told()[0] == told(parallel="gpu0")[0] == told(engine="llama_cpp", parallel="gpu0")[0] == "gpu0"
    assert told()[1] == told(parallel="gpu0")[1]
    assert told(engine="llama_cpp") == told(engine="llama_cpp", parallel="layers")
    assert told(engine="llama_cpp")[0] == "layers"
    assert told(engine="llama_cpp", gpus_dispatch="all-to-all")[0] == "gpu0"
    assert told(engine="llama_cpp", gpus=1)[0] == "gpu0"
    with pytest.raises(BadInput, match=r"with --gpus 2 and engine llama_cpp, which splits a model by layers: pages"):
        told(engine="llama_cpp", kv_memory=10**9)


def test_llama_cpp_with_room_for_all_is_gpu_only():
    """Nobody reads a router, no expert is in host memory; one layer on the CPU, and it is a hybrid again."""

    def result(policy: str, **settings: Any) -> Any:
        spec = {"hw": "a100-80g-sxm", "model": "olmoe-1b-7b", "precision": "q4_k_m", "engine": "llama_cpp"}
        found = prepare(RunSpec(policy=policy, **spec, requests=1, set=settings))
        one = execute(found).result
        found.close()
        return one

    kept = result("gpu_only")
    for settings in ({}, {"placement": "n_cpu_moe"}, {"placement": "ngl"}, {"placement": "ngl", "n_gpu_layers": 99}):
        fit = result("llama_cpp", **settings)
        assert fit.tpot_s.mean == kept.tpot_s.mean
        assert fit.ram_peak_bytes == kept.ram_peak_bytes == 0
    some = result("llama_cpp", placement="n_cpu_moe", n_cpu_moe=1)
    assert some.tpot_s.mean > 1.05 * kept.tpot_s.mean
    assert some.ram_peak_bytes > 0


def held(policy: str, *, dense: str = "layers", gpus: int = 2, **given: Any) -> Any:
    settings = given.pop("settings", {})
    found = prepare(RunSpec(policy=policy, hw="rtx3090", gpus=gpus, parallel=dense, requests=1, set=settings, **given))
    result = execute(found).result
    found.close()
    return result


def test_a_gpu_keeps_what_its_layers_have_room_for():
    """Each had half of it while a layer's experts were taken to lie on every GPU."""
    every = held("moe_lightning", precision="int4")
    assert every.hit_rate == 1.0
    assert every.tpot_s.mean < 1.3 * held("moe_lightning", precision="int4", dense="gpu0").tpot_s.mean
    static = {"selection": "static", "scope": "layer"}
    assert held("random", cache="40%", settings=static).hit_rate > 0.38
    assert sum(held("moe_cache", settings={"pool": 256, "hw.vram_bytes": 1e12}).cache_capacity_bytes) > 0


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "qwen3-30b-a3b", "nllb-moe-54b"])
def test_tied_embeddings_are_on_the_first_and_the_last_gpu(name):
    model = load_model(name)
    again = model.head_bytes("bf16") if model.tied_embeddings else 0
    assert (
        sum(dense_bytes_by_gpu(model, "bf16", stages(model.n_layers, [1, 1, 1]))) == model.dense_bytes("bf16") + again
    )


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_lies_with_the_layers(tiny_path):
    one = made(tiny_path, gpus=1, parallel="gpu0")
    model, whole = one.model, one.memory.parts
    one.close()
    for dense, shares in (("layers", [1, 1]), ("layers", [1, 1, 1]), ("layers:3/2/1", [3, 2, 1])):
        gpus, of_layer = len(shares), stages(32, shares)
        found = made(tiny_path, gpus=gpus, parallel=dense)
        held = dense_bytes_by_gpu(model, "bf16", of_layer)
        assert sum(held) == model.dense_bytes("bf16") == whole.dense_bytes
        assert found.memory.parts.dense_bytes == held[0]
        layers = [of_layer[:-1].count(gpu) for gpu in range(gpus)]
        assert found.memory.parts.kv_cache_bytes == -(-whole.kv_cache_bytes * layers[0] // 32)
        rooms = found.memory.expert_bytes
        if dense == "layers":
            assert rooms[0] < rooms[-1]  # more layers, and the embedding
        assert rooms[-1] <= found.homes.count(gpus - 1) * model.expert_bytes("bf16")
        assert sum(held[1:]) > 0
        found.close()


def test_a_refusal_says_by_which_shares_it_fits():
    """Ten layers of 2.8 GB: all would be on the second of two GPUs that have room for seven each."""
    spec = RunSpec(policy="llama_cpp", hw="rtx3090", gpus=2, parallel="layers", engine="llama_cpp", requests=1)

    def with_cpu_layers(n: int, dense: str = "layers") -> RunSpec:
        return msgspec.structs.replace(spec, parallel=dense, set={"placement": "n_cpu_moe", "n_cpu_moe": n})

    says = (
        r"10 layers on the GPU, and 7 fit beside .* give the first GPU more layers \(--parallel layers:27/5\), set op_"
    )
    with pytest.raises(DoesNotFit, match=says):
        run_of(with_cpu_layers(22))
    assert run_of(with_cpu_layers(22, "layers:27/5")).token_hit_rates.hit == pytest.approx(10 / 32)
    with pytest.raises(DoesNotFit, match=r"and 7 fit beside .*; set it to 25 or more, set op_offload=false"):
        run_of(with_cpu_layers(20))  # six each, and room for seven: too near to be sure


def run_of(spec: RunSpec) -> Any:
    with closing(prepare(spec)) as ready:
        return execute(ready, bounds=False).result


@pytest.mark.parametrize("cap", [{"cache": "100%"}, {"cache": "256experts"}], ids=str)
def test_a_cap_is_dealt_out_by_what_lives_where(tiny_path, cap):
    found = made(tiny_path, set={"hw.vram_bytes": 1e12}, gpus=3, **cap)
    size = found.model.expert_bytes("bf16")
    assert found.memory.expert_bytes == tuple(found.homes.count(gpu) * size for gpu in range(3))
    found.close()
    half = made(tiny_path, set={"hw.vram_bytes": 1e12}, gpus=3, cache="50%")
    assert sum(half.memory.expert_bytes) == 128 * size
    half.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"gpus_dispatch": "all-to-all"},
            "--set gpus.dispatch, got 'all-to-all' with --parallel layers, where experts lie with their layers",
        ),
        ({"parallel": ""}, "--parallel, got '': no such way"),
        ({"parallel": "layers:1/1/1"}, "--parallel, got 3 shares with --gpus 2: one for each GPU"),
        (
            {"parallel": "layers:99/1"},
            "--parallel, got 'layers:99/1' on 2 GPUs: dealt out with the head, the layers of mixtral-8x7b leave",
        ),
        ({"gpus_map": "p.yaml"}, "--set gpus.map, got 'p.yaml' with --parallel layers: experts lie with their layers"),
        (
            {"gpus": 40},
            "--parallel, got 'layers' on 40 GPUs: dealt out with the head, the layers of mixtral-8x7b leave a",
        ),
        ({"cache": f"{705 * 10**6}B"}, "one expert takes 352 MB on each of 2 GPU(s); give at least 752 MB"),
        ({"kv_memory": 10**9}, "--kv-memory with --parallel layers: pages are of one GPU's memory"),
        ({"parallel": "layer"}, "--parallel, got 'layer': no such way; did you mean 'layers'?"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_in_a_line(tiny_path, given, said):
    with pytest.raises(BadInput) as refused:
        made(tiny_path, **given)
    assert said in str(refused.value)


def test_two_gpus_of_whole_layers_are_one_with_the_memory_of_both(capsys):
    """llama.cpp's default over two cards: as quick as one card that held everything would be, and a hand-over."""
    options = ("--policy", "gpu_only", "--engine", "llama_cpp", "--hw", "rtx3090", "--requests", 1, "--json")
    model = ("--model", "qwen3-30b-a3b", "--precision", "q4_k_m")
    one = simulated(capsys, *options, *model).json["tpot_s"]["mean"]
    both = simulated(capsys, *options, *model, "--gpus", 2, "--parallel", "layers").json
    assert 0 < both["tpot_s"]["mean"] - one < 0.01 * one
    assert both["lower_bound"]["above_frac"] > 0.0
    assert set(both["lane_utilisation"]) >= {"gpu", "h2d0", "h2d1"}


def test_schedulers_expect_what_one_gpu_would_take():
    """Two GPUs in turn are no quicker at a prompt than one; experts dealt out over both would be."""
    expected = {}
    for dense in ("layers", "gpu0", None):
        ways = {"gpus": 2, "parallel": dense} if dense else {}
        found = prepare(RunSpec(policy="lru", hw="a100-80g-sxm", requests=1, **ways))
        expected[dense] = estimated(found, Profiled(), ("prices",)).token_s
        found.close()
    assert expected["layers"] == expected[None] > 1.2 * expected["gpu0"]
