"""Several GPUs: what crosses between them queues at ports; either engine says the same, and bounds stay bounds.

Numbers of `easy_numbers` unless a test says otherwise: copy of an expert 10 s, expert 2 s, attention and head 1 s. A
hidden state is 16 bytes; ports move it at 16 bytes/s after 1 s of latency. Expert e lives on GPU e modulo their number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import random_worlds
import several_worlds
from easy_numbers import EXPERT_BYTES, TOKEN_BYTES, Run, execute_easy, figure, setup
from scopes import one_cache
from test_timeline_copies import Placed
from tiny_traces import from_rows, tiny_trace

from policies.belady import Belady
from policies.lru import Lru
from sim.base.errors import BadInput
from sim.machine.copy_prices import rates
from sim.machine.cost import Cost, key_share
from sim.machine.several import Several
from sim.options import RunSpec
from sim.policy.decisions import Predict, Prefetch
from sim.profiles.hardware import Link, load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import load_stack
from sim.run import execute, prepare
from traces.format.reader import Trace

ENGINES = ("core", "simpy")
PORTS = ("p2p_out", "p2p_in")


def shared_out(
    policy: Any,
    trace: Trace,
    room: int,
    gpus: int,
    engine: str | None,
    ways: dict[str, Any],
    peer: tuple[float, float] = (1.0, TOKEN_BYTES),
    **world: Any,
) -> Run:
    made = setup(policy, trace, room, gpus=gpus, **world)
    spec = msgspec.structs.replace(made.spec, sim_simulator=engine, **ways)
    enough_for_one = figure(made.hw.h2d.bandwidth_bytes_per_s.value)
    cpu = msgspec.structs.replace(made.hw.cpu, copies_bandwidth_bytes_per_s=enough_for_one)
    p2p = Link(latency_s=figure(peer[0]), bandwidth_bytes_per_s=figure(peer[1]))
    return execute_easy(replace(made, spec=spec, hw=msgspec.structs.replace(made.hw, p2p=p2p, cpu=cpu)))


def by_hand(tmp_path: Path, rows: Any, there: Any, engine: str, gpus: int = 3, **ways: Any) -> Run:
    with Trace(from_rows(tmp_path / "easy.safetensors", rows, 6)) as trace:
        return shared_out(Placed(there), trace, 2, gpus, engine, ways)


ALL_TO_ALL = {"gpus_dispatch": "all-to-all"}


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_of_one_gpu_share_a_transfer_there_and_one_back(tmp_path, engine):
    # Expert 1 is on GPU 1, experts 2 and 5 on GPU 2; attention and gate until 1.
    #   out: to GPU 1 1 + 1 s: 1..3; to GPU 2 1 + 2 s, once the port is free: 3..6
    #   experts: 1 at 3..5; 2 at 6..8, 5 at 8..10; back: 5..7 and 10..13; head 13..14
    seen = by_hand(tmp_path, [[[1, 2, 5]]], [(0, 1), (0, 2), (0, 5)], engine, **ALL_TO_ALL)
    assert seen.lane("p2p_out") == [("dispatch 0", 1, 3), ("dispatch 0", 3, 6)]
    assert seen.lane("gpu1") == [("expert 0.1", 3, 5)]
    assert seen.lane("gpu2") == [("expert 0.2", 6, 8), ("expert 0.5", 8, 10)]
    assert seen.lane("p2p_in") == [("combine 0", 5, 7), ("combine 0", 10, 13)]
    assert seen.end_s == 14
    # One by one: each pays 2 s there, beside the others, and 2 s back on its stream: 3..7 twice, 7..11; head 11..12.
    apart = by_hand(tmp_path, [[[1, 2, 5]]], [(0, 1), (0, 2), (0, 5)], engine)
    assert apart.lane("gpu2") == [("expert 0.2", 3, 7), ("expert 0.5", 7, 11)]
    assert (apart.end_s, apart.lane("p2p_out")) == (12, [])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_layer_waits_for_the_last_result_and_what_stays_sends_nothing(tmp_path, engine):
    seen = by_hand(tmp_path, [[[0, 1], [0, 3]]], [(0, 0), (0, 1), (1, 0), (1, 3)], engine, gpus=2, **ALL_TO_ALL)
    # Six experts: 1.0 is the seventh, on GPU 0; 1.3 on GPU 1. GPU 0 runs its own beside: 0.0 at 1..3.
    #   layer 0: out 1..3, expert 0.1 3..5, back 5..7; layer 1: attention 7..8, out 8..10, 1.3 10..12, back 12..14
    assert seen.lane("gpu0") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 7, 8),
        ("expert 1.0", 8, 10),
        ("head", 14, 15),
    ]
    assert seen.lane("gpu1") == [("expert 0.1", 3, 5), ("expert 1.3", 10, 12)]
    assert seen.outcome.result.lane_utilisation["p2p_out"] == pytest.approx(4 / 15)


def test_the_host_enqueues_each_transfer(tmp_path):
    with Trace(from_rows(tmp_path / "easy.safetensors", [[[1, 2]]], 6)) as trace:
        policy = Placed([(0, 1), (0, 2)])
        seen = shared_out(policy, trace, 2, 3, "core", ALL_TO_ALL, copy_launch_s=0.5)
    # Gate at 1; enqueued at 1.5 and 2: out 1.5..3.5, 3.5..5.5. Experts until 5.5 and 7.5; back enqueued by 2.5 and 3.
    assert seen.lane("p2p_out") == [("dispatch 0", 1.5, 3.5), ("dispatch 0", 3.5, 5.5)]
    assert seen.lane("p2p_in") == [("combine 0", 5.5, 7.5), ("combine 0", 7.5, 9.5)]
    assert seen.machine.host_shares()[5][1] == 4 * 0.5


# -- host memory ----------------------------------------------------------------------------------------------------


class Later(Placed):
    """Asks for each of `ahead` once a search of as many `seconds` on the side lane is over."""

    def __init__(self, ahead: Any, seconds: Any) -> None:
        super().__init__([(0, 0), (0, 3)], ahead)
        self.seconds = seconds

    def request_start(self, request: Any, view: Any) -> Any:
        for at, seconds in zip(self.ahead, self.seconds, strict=True):
            ticket = yield Predict(seconds, "side")
            yield Prefetch(view.piece(*at), after=(ticket,))


def from_host(
    policy: Any, tmp_path: Path, rows: Any, room: int, links: float, gpus: int = 2, way: str = "shared"
) -> Run:
    """Host memory gives as much as this many links take."""
    with Trace(from_rows(tmp_path / "easy.safetensors", rows, 2 * gpus)) as trace:
        made = setup(policy, trace, room, gpus=gpus)
        made = replace(made, spec=msgspec.structs.replace(made.spec, gpus_host_bandwidth=way))
        cpu = msgspec.structs.replace(made.hw.cpu, copies_bandwidth_bytes_per_s=figure(links * EXPERT_BYTES / 10))
        made = replace(made, hw=msgspec.structs.replace(made.hw, cpu=cpu))
        return execute_easy(made)


def test_two_links_share_what_one_could_take(tmp_path):
    # Prefetch of 1.1 (GPU 1) from 0 on, of 1.2 (GPU 0) from 4 on; each 10 s alone, half as fast beside the other.
    #   1.1: 4 s done by 4, the other 6 s until 16; 1.2: 6 s done by 16, the other 4 s alone: until 20
    policy = Later([(1, 1), (1, 2)], [0.0, 4.0])
    seen = from_host(policy, tmp_path, [[[0, 3], [1, 2]]], 3, 1.0)
    assert seen.lane("h2d1") == [("prefetch 1.1", 0, 16)]
    assert seen.lane("h2d0") == [("prefetch 1.2", 4, 20)]
    assert seen.result.simulator == "simpy"


def test_memory_for_one_link_and_a_half(tmp_path):
    # Both at 3/4: 10 s of work take 13 1/3. With memory for two, nobody notices anybody; split, each has half of 1.5.
    rows, there = [[[1, 2]]], Placed([])
    shared, enough = (from_host(there, tmp_path, rows, 2, links) for links in (1.5, 2.0))
    assert shared.lane("h2d0") == [("demand 0.2", 1, pytest.approx(1 + 40 / 3))]
    assert shared.lane("h2d1") == [("demand 0.1", 1, pytest.approx(1 + 40 / 3))]
    assert enough.lane("h2d0") == [("demand 0.2", 1, 11)]
    split = from_host(there, tmp_path, rows, 2, 1.5, way="split")
    assert split.lane("h2d0") == [("demand 0.2", 1, pytest.approx(1 + 40 / 3))]
    # One link alone takes what it can where memory is shared, and its part of it where that is split.
    alone = [
        from_host(there, tmp_path, [[[1]]], 2, 1.5, way=way).lane("h2d1") for way in ("shared", "split", "per-link")
    ]
    assert alone == [[("demand 0.1", 1, 11)], [("demand 0.1", 1, pytest.approx(1 + 40 / 3))], [("demand 0.1", 1, 11)]]


def test_links_never_draw_more_than_host_memory_gives(tmp_path):
    """Of any two instants: what was copied wholly between them is no more than memory gives in that time."""
    n_tight = 0
    for seed in range(24):
        of = several_worlds.several(seed, tmp_path, gpus_host_bandwidth="shared")
        hw, stack = of.facts["hw"], of.facts["stack"]
        up, _ = rates(hw, stack)
        if not 0.0 < up < math.inf:
            continue
        gives = up * Random(seed).choice((0.4, 1.0, 1.3, 1.9))
        cpu = msgspec.structs.replace(hw.cpu, copies_bandwidth_bytes_per_s=figure(gives))
        of.facts["hw"] = msgspec.structs.replace(hw, cpu=cpu)
        seen = random_worlds.run(of, random_worlds.by_engine)
        assert not seen.crash, seen.crash
        copies = [span for span in seen.spans if span[0].startswith("h2d") and span[1] != "activations"]
        copies += [span for span in seen.spans if span[1] == "write_back"]
        for since_s in {span[6] for span in copies}:
            after = sorted((span for span in copies if span[6] >= since_s), key=lambda span: span[7])
            moved = 0
            for *_, n_bytes, _, end_s in after:
                moved += n_bytes
                assert moved <= gives * (end_s - since_s) * (1 + 1e-9)
                n_tight += moved > 0.9 * gives * (end_s - since_s)
    assert n_tight > 100


# -- dense parts on all GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_tensor_parallel_by_hand(tmp_path, engine):
    # All-reduce of a token: two steps of 1 s and of half of it, 3 s. Logits, 16 x 2 bytes: 1 s and half of them.
    #   attention 0..1, all-reduce 1..4; experts where they are, without a transfer; all-reduce when both are done
    seen = by_hand(tmp_path, [[[0, 1]]], [(0, 0), (0, 1)], engine, gpus=2, parallel="tensor")
    dense = [("attention 0", 0, 1), ("all_reduce 0", 1, 4)]
    after = [("all_reduce", 6, 9), ("head", 9, 10), ("all_gather", 10, 12)]
    assert seen.lane("gpu0") == [*dense, ("expert 0.0", 4, 6), *after]
    assert seen.lane("gpu1") == [*dense, ("expert 0.1", 4, 6), *after]
    # Expert 1 missing: copied 4..14, so GPU 0 waits for the link from 6 to 16.
    missing = by_hand(tmp_path, [[[0, 1]]], [(0, 0)], engine, gpus=2, parallel="tensor")
    assert missing.lane("gpu0")[-3:] == [("all_reduce", 16, 19), ("head", 19, 20), ("all_gather", 20, 22)]
    assert missing.machine.parts_s() == [12, 10, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_data_parallel_by_hand(tmp_path, engine):
    # One request, on GPU 0: of its pairs one goes to GPU 1, 1 s and 1 s of latency, and comes back.
    seen = by_hand(tmp_path, [[[0, 1]]], [(0, 0), (0, 1)], engine, gpus=2, parallel="data")
    there, back = ("all_to_all 0", 1, 3), ("all_to_all", 5, 7)
    assert seen.lane("gpu0") == [("attention 0", 0, 1), there, ("expert 0.0", 3, 5), back, ("head", 7, 8)]
    assert seen.lane("gpu1") == [there, ("expert 0.1", 3, 5), back]


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_are_dealt_out_and_stay_where_they_are(tmp_path, engine):
    # Two requests of a prompt of one token and two outputs: prefilled one after the other, decoded together.
    rows = [[[0, 2]], [[0, 2]], [[0, 2]], [[1, 3]]]  # all of GPU 0's experts, but for the last: of GPU 1's, from GPU 1
    with Trace(from_rows(tmp_path / "easy.safetensors", rows, 4, [(1, 2), (1, 2)])) as trace:
        policy = Placed([(0, 0), (0, 1), (0, 2), (0, 3)])
        seen = shared_out(policy, trace, 2, 2, engine, {"parallel": "data"}, batch=2)
    # First: nothing crosses, only the latency; 0..1, 1..2, experts 2..6, 6..7, head 7..8. Second, on GPU 1: two pairs
    # cross: 8..9, 9..12, experts 12..16, 16..19, head 19..20. Then both: 20..21, 21..22, 22..26, 26..27, 27..28.
    attended = {gpu: [row for row in seen.lane(gpu) if row[0] in ("attention 0", "head")] for gpu in ("gpu0", "gpu1")}
    first, second, both = ([("attention 0", a, a + 1), ("head", b, b + 1)] for a, b in ((0, 7), (8, 19), (20, 27)))
    assert attended == {"gpu0": [*first, *both], "gpu1": [*second, *both]}
    assert [row for row in seen.lane("gpu0") if row[0].startswith("all")][2:4] == [
        ("all_to_all 0", 9, 12),
        ("all_to_all", 16, 19),
    ]


def test_what_collectives_and_shares_cost():
    hw, model = load_hardware("a100-40g-sxm"), load_model("mixtral-8x7b")
    whole, shared = (Cost(hw, model, load_stack("bare"), "bf16", Several(4, dense=way)) for way in ("gpu0", "tensor"))
    latency_s, rate = hw.p2p.latency_s.value, hw.p2p.bandwidth_bytes_per_s.value
    assert shared.all_reduce(100).duration_s == pytest.approx(6 * latency_s + 1.5 * 100 * 8192 / rate)
    assert shared.all_gather_logits(3).duration_s == pytest.approx(3 * latency_s + 0.75 * 3 * 32000 * 2 / rate)
    assert shared.all_to_all(100).duration_s == pytest.approx(3 * latency_s + 100 * 8192 / rate)
    memory = hw.gpu.memory_bandwidth_bytes_per_s.value
    assert shared.head(1).duration_s == pytest.approx((32000 * 4096 * 2 / 4 + 8192) / memory)
    assert whole.head(1).duration_s == pytest.approx((32000 * 4096 * 2 + 8192) / memory)
    assert shared.expert(1, "bf16").duration_s == whole.expert(1, "bf16").duration_s
    # One token after a million others: a quarter of 84 MB of weights and of 4096 bytes for each, keys and values.
    weights = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096)
    n_bytes = weights / 4 + 1e6 * 4096 / 4 + 4 * 8192
    assert shared.attention_one_s(999_999) == pytest.approx(n_bytes / memory, rel=1e-3)
    # Twelve GPUs and eight heads of keys: each head lies on more than one of them.
    assert (key_share(model, 4), key_share(model, 12), key_share(load_model("deepseek-v2-lite"), 4)) == (0.25, 0.125, 1)


def test_memory_of_each_way(tiny_path):
    parts, rooms = {}, {}
    for way in ("gpu0", "tensor", "data"):
        made = prepare(
            RunSpec(policy="lru", hw="rtx3090", gpus=4, batch=2, trace=str(tiny_path), split="all", parallel=way)
        )
        parts[way], rooms[way] = made.memory.parts, made.memory.expert_bytes
        model = made.model
        made.close()
    routers = model.n_moe_layers * model.gate_bytes("bf16")
    assert 0 <= 4 * (parts["tensor"].dense_bytes - routers) - (model.dense_bytes("bf16") - routers) < 4
    assert parts["data"].dense_bytes == parts["gpu0"].dense_bytes == model.dense_bytes("bf16")
    assert parts["tensor"].kv_cache_bytes == parts["gpu0"].kv_cache_bytes / 4
    assert parts["data"].kv_cache_bytes == parts["gpu0"].kv_cache_bytes / 2  # one of two requests
    # Room for experts: the same on each GPU but under gpu0; most in all where nothing is held twice.
    assert [len(set(rooms[way])) for way in rooms] == [2, 1, 1]
    assert sum(rooms["data"]) < sum(rooms["tensor"])


# -- a placement of one's own ----------------------------------------------------------------------------------------


def placed(tmp_path: Path, text: str, tiny_path: Path, **rest: Any) -> Any:
    (tmp_path / "placement.yaml").write_text(text)
    made = {"policy": "lru", "gpus": 3, "gpus_map": str(tmp_path / "placement.yaml"), **rest}
    return prepare(RunSpec(hw="rtx3090", trace=str(tiny_path), split="all", **made))


UNEVEN = "experts: [0, 0, 0, 0, 0, 1, 1, 2]\nlayers: {3: [2, 2, 2, 2, 1, 1, 1, 1]}\n"


@pytest.mark.parametrize("policy", ["lru", "lfu", "gpu_only", "on_demand", "moe_infinity", "belady", "fiddler"])
def test_experts_run_where_they_are_placed(tmp_path, tiny_path, policy):
    shown = []
    for engine in ENGINES:
        hw = {"hw.vram_bytes": 1e12} if policy == "gpu_only" else {}
        made = placed(tmp_path, UNEVEN, tiny_path, policy=policy, sim_simulator=engine, set=hw, sim_contention=False)
        spans: list[Any] = []
        result = execute(made, lambda *span, to=spans: to.append(span)).result
        made.close()
        shown.append(sorted(spans))
        assert result.lower_bound.tpot_s <= result.tpot_s.mean
    assert shown[0] == shown[1]
    row, third = [0, 0, 0, 0, 0, 1, 1, 2], [2, 2, 2, 2, 1, 1, 1, 1]
    ran = {(span[2], span[3], span[0]) for span in shown[0] if span[1] == "expert" and span[0].startswith("gpu")}
    assert ran
    assert all(lane == f"gpu{(third if layer == 3 else row)[expert]}" for layer, expert, lane in ran)


def test_memory_is_planned_for_what_lives_where(tmp_path, tiny_path):
    made = placed(
        tmp_path, "experts: [0, 0, 0, 0, 0, 1, 1, 2]", tiny_path, policy="gpu_only", set={"hw.vram_bytes": 1e12}
    )
    size = made.model.expert_bytes("bf16")
    assert made.memory.expert_bytes == (32 * 5 * size, 32 * 2 * size, 32 * size)
    made.close()


def test_a_bound_knows_where_experts_are_placed(tmp_path, tiny_path):
    """All on GPU 0: nothing crosses, however long a transfer would take."""
    dear = {"hw.vram_bytes": 1e12, "hw.p2p.latency_s": 1.0}
    rows = "experts: [0, 0, 0, 0, 0, 0, 0, 0]"
    made = placed(tmp_path, rows, tiny_path, policy="gpu_only", gpus=2, set=dear)
    result = execute(made).result
    made.close()
    assert 0.0 < result.lower_bound.tpot_s <= result.tpot_s.mean < 1.0
    made = placed(tmp_path, rows, tiny_path, gpus=2, cache="64experts")
    result = execute(made).result
    made.close()
    assert result.lower_bound.ttft_s <= result.ttft_s.mean


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("experts: [0, 1]", "placement.yaml: experts, got 2 GPUs: one for each of the 8 experts of a layer"),
        (
            "experts: [0, 1, 2, 3, 0, 1, 2, 3]",
            "placement.yaml: experts[3], got 3: GPUs are 0 to 2; correct it, or --gpus",
        ),
        (
            "layers: {0: [0, 1, 2, 0, 1, 2, 0, 1]}",
            "placement.yaml: layers, got none for layer 1: give it, or `experts`",
        ),
        (
            "layers: {3: [0], '3': [1]}",
            "placement.yaml: layers, got one of them twice, as a number and as a word; keep",
        ),
        ("layers: {'-1': [0]}", "placement.yaml: layers, got -1: the model has MoE layers 0 to 31; correct it"),
        ("layers: {last: [0]}", "placement.yaml: key of layers: Expected `int`, got `str`; correct the field"),
        ("layers: {32: [0]}", "placement.yaml: layers, got 32: the model has MoE layers 0 to 31; correct it"),
        ("expert: [0]", "placement.yaml: top level: Object contains unknown field `expert`; did you mean 'experts'?"),
        ("experts: [0, x, 2, 0, 1, 2, 0, 1]", "placement.yaml: experts[1]: Expected `int`, got `str`"),
        ("experts: [", "placement.yaml"),
    ],
)
def test_a_placement_that_is_wrong_is_refused_in_a_line(tmp_path, tiny_path, text, said):
    with pytest.raises(BadInput) as refused:
        placed(tmp_path, text, tiny_path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# -- what must hold in any world -------------------------------------------------------------------------------------


def worlds(first: int, n: int, folder: Path, **ways: Any) -> list[Any]:
    """What runs showed, of worlds in which both engines agree to the last bit."""
    shown = []
    for seed in range(first, first + n):
        of = several_worlds.several(seed, folder, **ways)
        told, seen = random_worlds.engines_disagree(of)
        assert told is None, f"{of}\n  {told}"
        if not seen.error:
            shown.append((of, seen))
    assert len(shown) > n // 2
    return shown


def test_engines_agree_and_a_port_never_moves_more_than_it_can(tmp_path):
    n_moved = 0
    for of, seen in worlds(0, 60, tmp_path, **ALL_TO_ALL):
        hw = of.facts["hw"]
        moved = {port: [span for span in seen.spans if span[0] == port] for port in PORTS}
        for spans in moved.values():
            free_s = 0.0
            for _, _, _, _, _, n_bytes, start_s, end_s in sorted(spans, key=lambda span: span[6:]):
                assert start_s >= free_s
                least_s = hw.p2p.latency_s.value + n_bytes / hw.p2p.bandwidth_bytes_per_s.value
                assert end_s == start_s + least_s
                free_s = end_s
        # All that goes out comes back, but for what was computed on the CPU instead.
        there, back = (sum(span[5] for span in moved[port]) for port in PORTS)
        assert back <= there
        if not any(span[0] == "cpu" for span in seen.spans):
            assert back == there
        n_moved += len(moved["p2p_out"])
    assert n_moved > 500


def test_as_many_bytes_cross_as_tokens_of_experts_elsewhere_have(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 3, 6, 2, n_requests=2, prompt=4, outputs=5, levels=set())) as trace:
        seen = shared_out(Lru(scope="global"), trace, 6, 3, "core", ALL_TO_ALL)
        n_pairs = sum(n for gpu in (1, 2) for what, n in seen.tokens(f"gpu{gpu}") if what.startswith("expert"))
    for port in PORTS:
        assert sum(span[5] for span in seen.spans if span[0] == port) == n_pairs * TOKEN_BYTES > 0


@pytest.mark.parametrize("ways", (*several_worlds.WAYS, {"gpus_host_bandwidth": "shared"}), ids=str)
@pytest.mark.parametrize("gpus", [2, 3])
def test_bounds_stay_bounds(tmp_path, ways, gpus):
    for seed in range(4):
        path = tiny_trace(tmp_path / f"{seed}", 3, 6, 2, n_requests=3, prompt=3, outputs=4, levels=set(), seed=seed)
        with Trace(path) as trace:
            for kind in (Lru, Belady):
                for room in (2, 6):
                    world = {"launch_s": 0.25 * (seed % 2), "copy_s": 1.0 + 4 * (seed // 2), "shared": bool(seed % 2)}
                    result = shared_out(one_cache(kind), trace, room, gpus, None, ways, (0.1, 160.0), **world).result
                    assert 0 < result.lower_bound.tpot_s <= result.tpot_s.mean
                    assert 0 < result.lower_bound.ttft_s <= result.ttft_s.mean


@pytest.mark.parametrize(
    ("ways", "bound_s"),
    [
        ({}, 1 + (3 * 2 + 2) + 1),  # attention; three experts on GPU 1 and one result back (of three); the head
        ({"gpus_dispatch": "all-to-all"}, 1 + (3 * 2 + 2) + 1),
        ({"parallel": "tensor"}, (1 + 3) + (3 * 2 + 3) + (1 + 2)),  # each with its collective, as above
        ({"parallel": "data"}, (1 + 4) + (3 * 2 + 4) + 1),  # three pairs there, three back
    ],
    ids=str,
)
def test_a_bound_by_hand_where_nothing_is_missing(tmp_path, ways, bound_s):
    with Trace(from_rows(tmp_path / "easy.safetensors", [[[0, 1, 3, 5]]], 6, [(1, 1)])) as trace:
        seen = shared_out(Placed([(0, 0), (0, 1), (0, 3), (0, 5)]), trace, 3, 2, "core", ways)
    assert seen.result.lower_bound.ttft_s == pytest.approx(bound_s)
    assert seen.result.ttft_s.mean == 16  # with the way there, and each result by itself or all in one


# -- as users ask for it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_trace(tmp_path_factory.mktemp("t") / "t.safetensors", 32, 8, 2, prompt=4, outputs=3, levels=set())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus_dispatch": "all"}, "--set gpus.dispatch, got 'all': no such value; known: all-to-all, per-expert"),
        (
            {"gpus_host_bandwidth": "half"},
            "--set gpus.host_bandwidth, got 'half': no such value; known: per-link, shared, split",
        ),
        (
            {
                "gpus_host_bandwidth": "shared",
                "sim_simulator": "core",
                "set": {"hw.cpu.copies_bandwidth_bytes_per_s": 3e10},
            },
            "--set sim.simulator, got 'core': it cannot tell who shares host memory with whom, and 2 links ask for "
            "more",
        ),
        ({"parallel": "data", "gpus": 1}, "--parallel, got 'data' with one GPU: there is no other to share with"),
        ({"parallel": "tensor", "gpus": 3}, "--parallel, got 'tensor' on 3 GPUs: mixtral-8x7b has 32 heads"),
        (
            {"parallel": "data", "gpus_dispatch": "all-to-all"},
            "--set gpus.dispatch, got 'all-to-all' with --parallel data, which has collectives",
        ),
        ({"parallel": "data", "kv_memory": 10**9}, "--kv-memory with --parallel data: pages are of one GPU's memory"),
        (
            {"gpus_dispatch": "all-to-all", "gpus": 1},
            "--set gpus.dispatch, got 'all-to-all' with one GPU: there is no other to share with",
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_in_a_line(tiny_path, given, said):
    with pytest.raises(BadInput) as refused:
        prepare(RunSpec(policy="lru", hw="rtx3090", trace=str(tiny_path), **{"gpus": 2, **given}))
    assert said in str(refused.value)
