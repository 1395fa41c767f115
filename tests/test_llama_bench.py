"""llama.cpp on an H200, as this project measured it: what stacks and cards have from it is worked out again."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.validation.llama_bench import SHOWN, cut, drawn, lines, measured, seconds, simulated_s
from sim.machine.copy_prices import CopyPrices
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import load_stack
from sim.setup.prepare import prepare
from sim.setup.spec import RunSpec

HW, STACK = load_hardware("h200-sxm"), load_stack("llama_cpp")
REPLAYED_S = STACK.on(HW, keeps_all=True).kernel_times.replayed_s.value  # type: ignore[union-attr]
MORE_BITS = 6  # of 12 layers have their down matrices in Q6_K, llama.cpp's rule for Q4_K_M


def of(**asked: Any) -> list[dict[str, Any]]:
    return [line for line in lines() if all(line.get(key) == value for key, value in asked.items())]


def test_what_a_hybrid_layer_costs_is_where_a_line_over_its_bytes_begins() -> None:
    model = load_model("qwen3-30b-a3b")
    matrix = model.hidden_size * model.expert_intermediate_size
    expert = matrix * (2 * 0.5625 + (MORE_BITS * 0.8203125 + (12 - MORE_BITS) * 0.5625) / 12)
    starts = {}
    for threads in (8, 12, 16):
        layer_s = []
        for used in (1, 2, 4, 8, 16):
            (gpu,), (cpu,) = (of(on="gpu", experts_used=used, threads=threads, n_cpu_moe=n) for n in (0, 12))
            layer_s.append((seconds(cpu) - seconds(gpu)) / 12)
        each_s, start_s = np.polyfit([expert * n for n in (1, 2, 4, 8, 16)], layer_s, 1, w=1 / np.array(layer_s))
        assert 3e10 < 1 / each_s < 6.5e10
        spared_s = STACK.kernels.expert * REPLAYED_S
        own_s = HW.cpu.expert_overhead_s.value + HW.host.copy_launch_s.value + HW.d2h.latency_s.value
        starts[threads] = start_s + spared_s - own_s - HW.h2d.latency_s.value
    assert starts == pytest.approx({8: 31e-6, 12: 39e-6, 16: 47e-6}, abs=1e-6)
    assert STACK.hybrid_layer_s.value == pytest.approx(statistics.median(starts.values()), rel=0.02)


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
            rest_s = seconds(line) - n_kernels * REPLAYED_S - read / HW.gpu.memory_bandwidth_bytes_per_s.value
            rates.append(2 * n * (dense + experts) / rest_s)
    for card in ("h200-sxm", "h100-sxm"):
        own: Any = load_hardware(card).gpu.quantised_flops_per_s
        assert own.value == pytest.approx(statistics.median(rates), rel=0.005)
        assert (own.low, own.high) == pytest.approx((min(rates), max(rates)), rel=0.01)


def test_every_test_that_is_shown_was_measured() -> None:
    found = [measured(**asked) for asked in SHOWN]
    assert len(set(found)) == len(found)
    assert all(0 < test.seconds < 2 for test in found)


def test_a_cut_model_keeps_what_its_layers_have(tmp_path: Path) -> None:
    assert cut("gpt-oss-20b", 24, None, tmp_path) == "gpt-oss-20b"
    whole, part = load_model("qwen3.6-35b-a3b"), load_model(cut("qwen3.6-35b-a3b", 12, None, tmp_path))
    assert (part.n_layers, part.top_k, part.hidden_size) == (12, whole.top_k, whole.hidden_size)
    assert load_model(cut("qwen3-30b-a3b", 12, 2, tmp_path)).top_k == 2
    assert Path(drawn(part, 3, tmp_path)).is_file()


def test_a_layer_on_the_cpu_costs_what_was_measured(tmp_path: Path) -> None:
    """Between experts on the GPU and on the CPU, 8 of 128 used: 0.43 ms a layer; no constant but the figure above."""
    tests = [measured(model="qwen3-30b-a3b", experts_used=8, generated=32, n_cpu_moe=n) for n in (0, 12)]
    ours = [simulated_s(test, tmp_path) for test in tests]
    assert (ours[1] - ours[0]) / 12 == pytest.approx((tests[1].seconds - tests[0].seconds) / 12, rel=0.15)


@pytest.mark.parametrize(
    ("policy", "settings", "experts", "states"),
    [
        ("llama_cpp", {}, "h2d_pageable", "h2d"),
        ("static_cache", {"slots": 1}, "h2d_pageable", "h2d"),
        ("llama_cpp", {"stack.pinned": True}, "h2d", "h2d"),
        ("llama_cpp", {"stack.pinned": False}, "h2d_pageable", "h2d_pageable"),
        ("llama_cpp", {"stack.maps_weights": False}, "h2d", "h2d"),
        ("moe_cache", {}, "h2d", "h2d"),
        ("lru", {}, "h2d", "h2d"),
    ],
)
def test_what_is_copied_straight_out_of_a_mapped_file_is_pageable(
    policy: str, settings: dict[str, Any], experts: str, states: str
) -> None:
    setup = prepare(RunSpec(policy=policy, hw="rtx3090", stack="llama_cpp", requests=1, set=settings))
    copies: CopyPrices = setup.cost().copies
    for link, found_s in ((experts, copies.expert_s(10**9)), (states, copies.h2d_s(10**9))):
        rate = getattr(setup.hw, link)
        calls = setup.stack.copy_calls if found_s == copies.expert_s(10**9) and link == experts else 1
        expected_s = rate.latency_s.value * calls + 1e9 / rate.bandwidth_bytes_per_s.value
        assert found_s == pytest.approx(expected_s, rel=1e-3)
    assert setup.stack.maps_weights is (experts != states)
