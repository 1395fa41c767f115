"""Serving stacks: `bare` costs nothing but launches, `hf` adds up to the published points it is derived from."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.base.quantities import quantities
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import PACKAGE, load_stack


def test_what_the_stacks_group_and_replay() -> None:
    """`bare` does what engines do by default; `separate` is what it was in version 0.1, with the same kernels."""
    assert {name: (load_stack(name).grouped, load_stack(name).graphs) for name in bundled(PACKAGE, ".yaml")} == {
        "bare": (True, True),
        "freetoken": (True, True),
        "hf": (False, False),
        "imp": (True, False),
        "ktransformers": (True, True),
        "llama_cpp": (True, True),
        "separate": (False, False),
        "tinyserve": (False, False),
    }
    assert load_stack("bare").kernels == load_stack("separate").kernels


def test_hf_adds_up_to_moepic() -> None:
    """57 ms per token for Qwen1.5-MoE with every expert resident (A6000): 24 layers of 4 experts, bound by the host."""
    hf, hw, model = load_stack("hf"), load_hardware("a6000"), load_model("qwen1.5-moe")
    kernels = hf.kernels
    per_layer = kernels.attention + kernels.gate + kernels.shared_expert + model.top_k * kernels.expert
    host_s = hf.per_layer_s.value + model.top_k * hf.per_expert_s.value
    layer_s = per_layer * hw.host.launch_s.value + hw.host.sync_s.value + host_s
    token_s = model.n_layers * layer_s + kernels.head * hw.host.launch_s.value + hf.per_iteration_s.value
    assert token_s == pytest.approx(57e-3, rel=0.01)
    # 165 ms for the 96 experts of a token, which a pinned copy alone would bring in 66 ms.
    link = hw.h2d
    copy_s = link.latency_s.value + model.expert_bytes() / link.bandwidth_bytes_per_s.value + hf.per_copy_s.value
    assert model.n_moe_layers * model.top_k * copy_s == pytest.approx(165e-3, rel=0.02)


def test_hf_expert_is_near_fiddler() -> None:
    """0.59 ms (standard deviation 0.14) by the host clock for one Mixtral expert on an RTX 4090."""
    hf, hw = load_stack("hf"), load_hardware("rtx4090")
    weights_s = load_model("mixtral").expert_bytes() / hw.gpu.memory_bandwidth_bytes_per_s.value
    total_s = weights_s + hf.per_expert_s.value + hf.kernels.expert * hw.host.launch_s.value
    assert total_s == pytest.approx(0.59e-3, abs=0.14e-3)


def test_imp_adds_up_to_its_author_s_counts() -> None:
    """1341 launches per token of Qwen3-30B-A3B; 92.3 us for a matrix, 76.2 of them in the call; 31.35 us for a read."""
    imp, hw, model = load_stack("imp"), load_hardware("rtx5090"), load_model("qwen3-30b-a3b")
    kernels = imp.kernels
    n_launches = model.n_layers * (kernels.attention + kernels.gate + kernels.expert) + kernels.head
    assert n_launches == pytest.approx(1341, rel=0.01)
    matrix_bytes = (768 + 96) * 1024
    link, host = hw.h2d_pageable, hw.host
    assert link.latency_s.value + matrix_bytes / link.bandwidth_bytes_per_s.value == pytest.approx(92.3e-6, rel=0.02)
    assert imp.per_copy_s.value / imp.copy_calls + host.copy_launch_s.value == pytest.approx(76.2e-6)
    assert imp.per_layer_s.value + host.sync_s.value == pytest.approx(31.35e-6, rel=0.02)


def test_tinyserve_adds_up_to_its_profile() -> None:
    """50.7 ms per token for gpt-oss-20b with every expert there, of them 18.9 ms in experts."""
    stack, host, model = load_stack("tinyserve"), load_hardware("rtx4090").host, load_model("gpt-oss-20b")
    expert_s = stack.per_expert_s.value + stack.kernels.expert * host.launch_s.value
    layer_s = stack.per_layer_s.value + host.sync_s.value
    layer_s += (stack.kernels.attention + stack.kernels.gate) * host.launch_s.value
    experts_s = model.n_layers * model.top_k * expert_s
    assert experts_s == pytest.approx(0.754 / 40, rel=0.01)
    assert model.n_layers * layer_s + experts_s == pytest.approx(2.029 / 40, rel=0.01)


def test_how_far_builds_of_2025_lie_apart_in_what_a_hybrid_layer_costs() -> None:
    """ik_llama.cpp #357, whose layers on the CPU were not varied: tokens/s on the CPU alone, and with some on it.

    Qwen3-30B-A3B in IQ4_XS (attention Q5_K, head Q6_K) on an RTX 4080, Qwen3-235B-A22B in Q6_K on one and two RTX 3090.
    """
    stack, hw = load_stack("llama_cpp"), load_hardware("rtx3090")
    assert stack.kernel_times is not None
    moves_s = hw.d2h.latency_s.value + hw.h2d.latency_s.value + hw.host.copy_launch_s.value
    kernel_s, kernels = stack.kernel_times.launched_s.value, stack.kernels
    small = ("qwen3-30b-a3b", (4.25, 5.5, 6.5625), 716.8e9, 25.29)
    large = ("qwen3-235b-a22b", (6.5625,) * 3, 936.2e9, 14.13)
    found = []
    for (name, bits, peak, alone), on_cpu, hybrid in ((small, 14, 68.68), (large, 89, 12.20), (large, 80, 17.10)):
        model = load_model(name)
        n, experts = model.n_layers, model.top_k * model.expert_params() * bits[0] / 8
        attention = 2 * model.hidden_size * model.head_dim * (model.n_heads + model.n_kv_heads)
        layer = experts + attention * bits[1] / 8 + 4 * model.hidden_size * model.n_experts
        layer += 576 * 2 * model.n_kv_heads * model.head_dim * 2  # 512 tokens of prompt, and half of 128
        read = n * layer + model.vocab_size * model.hidden_size * bits[2] / 8
        gpu_s = (read - on_cpu * experts) / (0.92 * peak)
        gpu_s += kernel_s * (n * (kernels.attention + kernels.gate) + (n - on_cpu) * kernels.expert + kernels.head)
        cpu_s = on_cpu * experts / (read * alone)
        found.append((1 / hybrid - gpu_s - cpu_s) / on_cpu - moves_s - hw.cpu.expert_overhead_s.value)
    assert found == pytest.approx([142e-6, 235e-6, 8e-6], abs=1e-6)
    assert stack.hybrid_layer_s.low == pytest.approx(min(found), abs=1e-6)


def test_every_figure_has_a_reason() -> None:
    for name in bundled(PACKAGE, ".yaml"):
        stack = load_stack(name)
        for path, figure in quantities(stack):
            assert figure.note, path
            assert set(figure.refs) <= set(stack.sources)


def test_overrides() -> None:
    stack = load_stack("hf", {"per_layer_s": 0, "pinned": False, "kernels.expert": 3, "copy_efficiency_frac": 0.5})
    assert (stack.per_layer_s.value, stack.pinned, stack.kernels.expert) == (0.0, False, 3)
    assert stack.copy_efficiency_frac.source == "assumed"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"per_layer_s": 2}, r"per_layer_s, got 2: from 0 to 1; did you write ms or us\? the unit is seconds"),
        ({"copy_efficiency_frac": 80}, r"got 80: above 0 and at most 1; it is a share, not a percentage"),
        ({"copy_efficiency_frac": 0}, r"got 0: above 0 and at most 1"),
        ({"per_layer": 1e-3}, r"--set engine\.per_layer, got 0\.001: no field .*; did you mean 'per_layer_s'\?"),
        ({"kernels.experts": 3}, r"no field 'experts'; did you mean 'expert'\?"),
        ({"kernels.expert": -1}, r"kernels\.expert: Expected `int` >= 0"),
        ({"pinned": "yes"}, r"pinned: Expected `bool`, got `str`"),
    ],
)
def test_bad_settings_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_stack("bare", overrides)


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    data = msgspec.to_builtins(load_stack("bare"))
    path.write_text(json.dumps(data))
    assert load_stack(path) == load_stack("bare")
    path.write_text(json.dumps(data | {"per_copy_s": 1e-3}))
    with pytest.raises(BadInput, match=r"per_copy_s: Expected `object`, got `float`; write \{value: NUMBER, source:"):
        load_stack(path)
    with pytest.raises(BadInput, match=r"engine, got 'bar': unknown; did you mean 'bare'\?"):
        load_stack("bar")
