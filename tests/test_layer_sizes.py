"""Files whose layers hold experts of unlike size: what it leaves out to take each for the mean, and that it is so."""

from __future__ import annotations

import copy
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

import moesim
from sim.figures import SizesByLayer
from sim.machine.cost import Cost
from sim.machine.events.groups import Groups
from sim.machine.events.machine import EventMachine
from sim.profiles.models import load_model
from sim.results.some_runs import sizes_by_layer
from sim.results.text import render

MACHINE: dict[str, Any] = {"hw": "rtx4090-5955wx", "engine": "llama_cpp", "model": "qwen1.5-moe-a2.7b", "requests": 1}


def row(phase: str, layer: int, **counts: int) -> dict[str, Any]:
    names = ("experts_n", "gpu_n", "cpu_ahead_n", *(f"prefetch_{name}_bytes" for name in ("issued", "cancelled")))
    return {"phase": phase, "layer": layer, "demand_copies_bytes": 0, **dict.fromkeys(names, 0), **counts}


def test_by_hand() -> None:
    """Experts of 90 and of 110 bytes, taken for 100: a link of 10 bytes/s, a CPU of 4, a GPU of 1000; 40 s of decode.

    The link carried 400 and 100 bytes: 360 and 110 in truth, 30 less. The CPU read the second layer's twice: 20 more.
    """
    cost: Any = SimpleNamespace(
        copies=SimpleNamespace(h2d_bytes_per_s=10.0),
        hw=SimpleNamespace(cpu=SimpleNamespace(memory_bandwidth_bytes_per_s=SimpleNamespace(value=4.0))),
        of_experts=SimpleNamespace(bandwidth=1000.0),
    )
    rows = [
        row("prefill", 0, experts_n=7, gpu_n=7, demand_copies_bytes=700),
        row("prefill", 1, experts_n=7, gpu_n=7),
        row("decode", 0, experts_n=1, gpu_n=1, demand_copies_bytes=300, prefetch_issued_bytes=200)
        | {"prefetch_cancelled_bytes": 100},
        row("decode", 1, experts_n=2, gpu_n=1, cpu_ahead_n=1, demand_copies_bytes=100),
    ]
    found = sizes_by_layer([90, 110], 100, rows, 40.0, cost)
    assert (found.least_bytes, found.most_bytes) == (90, 110)
    assert found.h2d_frac == pytest.approx(-30 / 500)
    assert found.cpu_frac == pytest.approx(20 / 200)
    assert found.gpu_frac == pytest.approx(0.0)
    assert found.tpot_frac == pytest.approx((-30 / 10 + 20 / 4) / 40)
    side_by_side = sizes_by_layer([90, 110], 100, rows, 0.0, cost)
    assert side_by_side == SizesByLayer(90, 110, found.h2d_frac, found.cpu_frac, found.gpu_frac, None)
    nothing = sizes_by_layer([90, 110], 100, rows[:2], 0.0, cost)
    assert (nothing.h2d_frac, nothing.cpu_frac, nothing.gpu_frac) == (None, None, None)


def test_a_run_says_what_the_mean_leaves_out() -> None:
    """llama.cpp's layers: what the CPU reads is of the last ones."""
    result = moesim.simulate(policy="llama_cpp", precision="q4_k_m", cache="50%", **MACHINE)
    sizes = load_model(MACHINE["model"]).expert_bytes_by_layer("q4_k_m")
    n = [one["cpu_n"] for one in result.by_layer if one["phase"] == "decode"]
    found = result.sizes_by_layer
    assert found is not None
    assert (found.least_bytes, found.most_bytes) == (min(sizes), max(sizes))
    true_bytes = sum(each * size for each, size in zip(n, sizes, strict=True))
    assert found.cpu_frac == pytest.approx(true_bytes / (sum(n) * result.expert_bytes) - 1)
    assert found.h2d_frac is None
    assert found.cpu_frac is not None
    text = " ".join(render(result).split())
    assert "(a mean: layers differ)" in text
    assert f"told apart, decode would read {100 * found.cpu_frac:.1f} % more for experts on the CPU" in text


def test_several_links_are_not_added_up_and_alike_layers_have_nothing_to_say() -> None:
    two = moesim.simulate(policy="lru", precision="q4_k_m", cache="50%", gpus=2, **MACHINE)
    assert two.sizes_by_layer is not None
    assert two.sizes_by_layer.h2d_frac is not None
    assert two.sizes_by_layer.tpot_frac is None
    served = moesim.simulate(
        policy="lru", precision="q4_k_m", cache="50%", replicas=2, arrivals="closed:2", **{**MACHINE, "requests": 2}
    )
    assert served.sizes_by_layer is not None
    assert served.sizes_by_layer.tpot_frac is not None
    for precision in ("q4_k", "gguf-q8_0"):  # one block type, and a file that mixes types but not by layer
        alike = moesim.simulate(policy="lru", precision=precision, cache="50%", **MACHINE)
        assert alike.sizes_by_layer is None
        assert "sizes_by_layer" not in alike.to_dict()
        assert "layers differ" not in render(alike)


@pytest.mark.parametrize("model", ["olmoe-1b-7b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_one_layer_more_or_fewer_fits_in_bytes(model: str) -> None:
    """Whole layers, from the first or from the last one on, in 999 rooms: what docs/formats.md says of them."""
    sizes = load_model(model).expert_bytes_by_layer("q4_k_m")
    mean, apart = sum(sizes) / len(sizes), set()
    for order in (sizes, sizes[::-1]):
        ends = list(accumulate(order))
        rooms = [sum(sizes) * part / 1000 for part in range(1, 1000)]
        gaps = [bisect_right(ends, room) - int(room / mean + 1e-9) for room in rooms]
        assert set(gaps) <= {-1, 0, 1}
        apart.add(round(sum(map(abs, gaps)) / len(gaps), 1))
    assert apart == {{"olmoe-1b-7b": 0.1, "qwen3-30b-a3b": 0.2, "qwen3-235b-a22b": 0.4}[model]}


def of_size(cost: Cost, n_bytes: int, kept: dict[tuple[int, int], tuple[Cost, Cost]]) -> Cost:
    """The same prices for experts of another size."""
    if (id(cost), n_bytes) not in kept:
        other: Any = copy.copy(cost)
        other._expert_bytes = lambda _precision: n_bytes
        other._experts, other._members, other._leaders = {}, {}, {}
        other.model = SimpleNamespace(
            expert_bytes=other._expert_bytes, expert_flops=cost.model.expert_flops, hidden_size=cost.model.hidden_size
        )
        for name in ("expert_cpu", "expert_cpu_joined", "work"):
            setattr(other, name, cache(getattr(other, f"_{name}")))
        kept[id(cost), n_bytes] = other, cost  # the other keeps the id from being used again
    return kept[id(cost), n_bytes][0]


class Sized:
    """A piece with its own layer's bytes."""

    def __init__(self, piece: Any, n_bytes: int) -> None:
        self._piece, self.n_bytes = piece, n_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._piece, name)


@pytest.mark.parametrize(
    ("policy", "settings", "cache_frac"),
    [
        ("llama_cpp", {}, 0.85),
        pytest.param("lru", {}, 0.5, marks=pytest.mark.thorough),
        pytest.param("lru", {"scope": "layer"}, 0.5, marks=pytest.mark.thorough),
        pytest.param("moe_cache", {}, 0.2, marks=pytest.mark.thorough),
        pytest.param("llama_cpp", {"gpus_map": "n_cpu_moe"}, 0.2, marks=pytest.mark.thorough),
    ],
)
def test_replays_with_true_sizes_agree(
    policy: str, settings: dict[str, str], cache_frac: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and kernels priced by the size of their layer, rooms of the mean: the TPOT moves by what was foretold."""
    spec: dict[str, Any] = {"policy": policy, "precision": "q4_k_m", "cache": cache_frac, "set": settings}
    taken = moesim.simulate(**spec, **MACHINE)
    assert taken.sizes_by_layer is not None
    sizes, mean = load_model(MACHINE["model"]).expert_bytes_by_layer("q4_k_m"), taken.expert_bytes
    kept: dict[tuple[int, int], tuple[Cost, Cost]] = {}
    priced, copied, on_cpu = Groups.priced, EventMachine.copy, EventMachine.cpu_expert

    def sized(self: Any, layer: int, call: Any) -> Any:
        whole = self.cost
        self.cost = of_size(whole, sizes[layer], kept)
        try:
            return call()
        finally:
            self.cost = whole

    def sized_piece(piece: Any) -> Any:
        return Sized(piece, round(piece.n_bytes * sizes[piece.layer] / mean))

    monkeypatch.setattr(
        Groups, "priced", lambda self, piece, *args: sized(self, piece.layer, lambda: priced(self, piece, *args))
    )
    monkeypatch.setattr(
        EventMachine, "cpu_expert", lambda self, at, *args: sized(self, at, lambda: on_cpu(self, at, *args))
    )
    monkeypatch.setattr(
        EventMachine,
        "copy",
        lambda self, piece, *args: copied(self, sized_piece(piece), *args),
    )
    true = moesim.simulate(**spec, **MACHINE, sim_simulator="simpy")
    assert taken.tpot_s.mean and true.tpot_s.mean
    moved = true.tpot_s.mean / taken.tpot_s.mean - 1
    assert true.hit_rate == taken.hit_rate
    assert abs(moved) > 2e-4, "else nothing is tried"
    assert moved == pytest.approx(taken.sizes_by_layer.tpot_frac, abs=1.5e-3)
