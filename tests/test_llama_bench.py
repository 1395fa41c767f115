"""llama.cpp on an H200, as this project measured it: what stacks and cards have from it is worked out again."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.base.errors import BadInput
from sim.machine.copy_prices import CopyPrices
from sim.options import RunSpec
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import load_stack
from sim.setup.prepare import prepare
from tools.validation.llama_bench import PRECISIONS, cut, drawn, lines, measured, seconds, simulated_s

HW, STACK = load_hardware("h200-sxm"), load_stack("llama_cpp")
REPLAYED_S = STACK.on(HW, keeps_all=True).kernel_times.replayed_s.value  # type: ignore[union-attr]
READS: Any = HW.gpu.quantised_bytes_per_s
MORE_BITS = 6  # of 12 layers have their down matrices in Q6_K, llama.cpp's rule for Q4_K_M


def of(**asked: Any) -> list[dict[str, Any]]:
    return [line for line in lines() if all(line.get(key) == value for key, value in asked.items())]


def test_what_a_hybrid_layer_costs_is_where_a_line_over_its_bytes_begins() -> None:
    model, host = load_model("qwen3-30b-a3b"), HW.host
    matrix = model.hidden_size * model.expert_intermediate_size
    expert = matrix * (2 * 0.5625 + (MORE_BITS * 0.8203125 + (12 - MORE_BITS) * 0.5625) / 12)
    spared_s = STACK.kernels.expert * REPLAYED_S
    own_s = HW.cpu.expert_overhead_s.value + host.sync_s.value + host.copy_launch_s.value
    own_s += HW.d2h.latency_s.value + HW.h2d.latency_s.value
    assert (spared_s, own_s) == pytest.approx((10.3e-6, 39.9e-6), abs=0.1e-6)
    costs_s, rates = {}, {}
    for threads in (8, 12, 16):
        read, layer_s = [], []
        for used in (1, 2, 4, 8, 16):
            took_s = {n: seconds(*of(experts_used=used, threads=threads, n_cpu_moe=n)) for n in (0, 6, 12)}
            for n in (6, 12):
                read.append(expert * used)
                layer_s.append((took_s[n] - took_s[0]) / n)
        each_s, start_s = np.polyfit(read, layer_s, 1, w=1 / np.array(layer_s))
        costs_s[threads], rates[threads] = start_s + spared_s - own_s, 1 / each_s
    assert costs_s == pytest.approx({8: 15e-6, 12: 14e-6, 16: 23e-6}, abs=1e-6)
    assert rates == pytest.approx({8: 36e9, 12: 51e9, 16: 63e9}, rel=0.02)
    assert STACK.hybrid_layer_s.value == pytest.approx(statistics.median(costs_s.values()), rel=0.02)


def test_what_blocks_are_read_at_follows_from_tokens_one_by_one_and_a_few_at_once(tmp_path: Path) -> None:
    """Each of 37 tests with every expert resident, up to eight tokens at once, less its kernels: bytes over the rest. A
    routing that is even asks for experts x (1 - (1 - k / experts)^tokens)."""
    found: dict[str, list[float]] = {}
    for line in of(n_cpu_moe=0, graphs=True, threads=16, depth=0):
        n_tokens = line["prompt"] or 1
        if n_tokens > 8:
            continue
        model = load_model(cut(line["model"], line["layers"], line.get("experts_used"), tmp_path))
        precision, kernels = PRECISIONS.get(line["model"], "q4_k_m"), STACK.of(model.id).kernels
        n_kernels = model.n_layers * kernels.attention + len(model.dense_layers) * kernels.dense_ffn + kernels.head
        of_moe = kernels.gate + kernels.expert + kernels.shared_expert * bool(model.n_shared_experts)
        asked = model.n_experts * (1 - (1 - model.top_k / model.n_experts) ** n_tokens)
        layer = (
            model.gate_bytes(precision) + model.shared_expert_bytes(precision) + asked * model.expert_bytes(precision)
        )
        read = model.n_layers * model.attention_bytes(precision) + model.head_bytes(precision)
        read += model.n_moe_layers * layer + len(model.dense_layers) * model.dense_ffn_bytes(precision)
        rest_s = seconds(line) - (n_kernels + model.n_moe_layers * of_moe) * REPLAYED_S
        found.setdefault(model.id, []).append(read / rest_s)
    every = [rate for rates in found.values() for rate in rates]
    assert len(every) == 37
    assert READS.value == pytest.approx(statistics.median(every), rel=0.005)
    assert (READS.low, READS.high) == pytest.approx((min(every), max(every)), rel=0.005)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    assert medians == {name: pytest.approx(READS.value, rel=0.12) for name in medians}  # of five models alike


def test_what_blocks_are_multiplied_at_follows_from_prompts() -> None:
    assert STACK.quantised is not None
    rates = []
    for name, embedding in (("gpt-oss-20b", 1.0625), ("qwen3-30b-a3b", 0.5625)):
        model, kernels = load_model(name), STACK.of(name).kernels
        attention = 2 * model.hidden_size * model.head_dim * (model.n_heads + model.n_kv_heads)
        dense = model.n_layers * (attention + model.hidden_size * model.n_experts)
        experts = model.n_layers * model.top_k * model.expert_params() / STACK.quantised.expert_frac.value
        n_kernels = model.n_layers * (kernels.attention + kernels.gate + kernels.expert) + kernels.head
        for n in (512, 1024, 2048):
            (line,) = of(model=name, layers=model.n_layers, prompt=n, n_cpu_moe=0)
            read = line["file_bytes"] - model.vocab_size * model.hidden_size * embedding
            rest_s = seconds(line) - n_kernels * REPLAYED_S - read / READS.value
            rates.append(2 * n * (dense + experts) / rest_s)
    for card in ("h200-sxm", "h100-sxm"):
        own: Any = load_hardware(card).gpu.quantised_flops_per_s
        assert own.value == pytest.approx(statistics.median(rates), rel=0.005)
        assert (own.low, own.high) == pytest.approx((min(rates), max(rates)), rel=0.01)


def test_a_cut_model_keeps_what_its_layers_have(tmp_path: Path) -> None:
    assert cut("gpt-oss-20b", 24, None, tmp_path) == "gpt-oss-20b"
    whole, part = load_model("qwen3.6-35b-a3b"), load_model(cut("qwen3.6-35b-a3b", 12, None, tmp_path))
    assert (part.n_layers, part.top_k, part.hidden_size) == (12, whole.top_k, whole.hidden_size)
    assert STACK.of(part.id).kernels == STACK.of(whole.id).kernels != STACK.kernels
    assert load_model(cut("qwen3-30b-a3b", 12, 2, tmp_path)).top_k == 2
    assert Path(drawn(part, 3, tmp_path)).is_file()


def test_a_layer_on_the_cpu_costs_what_was_measured(tmp_path: Path) -> None:
    """Between experts on the GPU and on the CPU, 8 of 128 used: 0.43 ms a layer; no constant but the figure above."""
    tests = [measured(model="qwen3-30b-a3b", experts_used=8, generated=32, n_cpu_moe=n) for n in (0, 12)]
    ours = [simulated_s(test, tmp_path) for test in tests]
    assert (ours[1] - ours[0]) / 12 == pytest.approx((tests[1].seconds - tests[0].seconds) / 12, rel=0.1)


def copies_of(policy: str, settings: dict[str, Any], **more: Any) -> tuple[CopyPrices, Any]:
    setup = prepare(RunSpec(policy=policy, hw="rtx3090", engine="llama_cpp", requests=1, set=settings, **more))
    return setup.cost().copies, setup


@pytest.mark.parametrize(
    ("policy", "settings", "experts", "states"),
    [
        ("llama_cpp", {}, "h2d_pageable", "h2d"),
        ("static_cache", {"slots": 1}, "h2d_pageable", "h2d"),
        ("llama_cpp", {"engine.pinned": True}, "h2d", "h2d"),
        ("llama_cpp", {"engine.pinned": False}, "h2d_pageable", "h2d_pageable"),
        ("llama_cpp", {"engine.maps_weights": False}, "h2d", "h2d"),
        ("moe_cache", {}, "h2d", "h2d"),
        ("lru", {}, "h2d", "h2d"),
    ],
)
def test_what_is_copied_straight_out_of_a_mapped_file_is_pageable(
    policy: str, settings: dict[str, Any], experts: str, states: str
) -> None:
    copies, setup = copies_of(policy, settings)
    of_experts, of_states = getattr(setup.hw, experts), getattr(setup.hw, states)
    calls_s = setup.stack.copy_calls * of_experts.latency_s.value
    assert copies.expert_s(10**9) == pytest.approx(calls_s + 1e9 / of_experts.bandwidth_bytes_per_s.value)
    expected_s = of_states.latency_s.value + 1e9 / of_states.bandwidth_bytes_per_s.value
    assert copies.h2d_s(10**9) == pytest.approx(expected_s)


def test_hidden_states_have_a_share_of_host_memory_that_is_split() -> None:
    links = [
        copies_of(name, {}, gpus=8, gpus_host_bandwidth="split", parallel="gpu0")[0]
        for name in ("llama_cpp", "moe_cache")
    ]
    moves_s = [copies.h2d_s(10**9) - copies.h2d_s(0) for copies in links]
    assert moves_s[0] == pytest.approx(moves_s[1])
    assert moves_s[0] > 1e9 / load_hardware("rtx3090").h2d.bandwidth_bytes_per_s.value


@pytest.mark.parametrize(
    ("policy", "settings", "said"),
    [
        ("lru", {"engine.maps_weights": True}, "engine.maps_weights, got true: lru copies through buffers of its own"),
        ("llama_cpp", {"engine.maps_weights": True, "engine.pinned": True}, "got it with engine.pinned"),
    ],
)
def test_what_would_be_of_no_effect_is_refused(policy: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        copies_of(policy, settings)
