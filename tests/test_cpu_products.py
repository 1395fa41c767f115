"""Experts on the CPU in ggml's blocks: whichever is more of their bytes and of unpacking them, worked out by hand."""

from __future__ import annotations

import pytest

from sim.machine.cost import Cost
from sim.profiles.cpu_products import TOKENS_PER_S, expert_flops_frac, flops_per_weight
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.profiles.precisions import BLOCKS
from sim.profiles.stack import load_stack

WEIGHTS = 3 * 2048 * 768  # of an expert of Qwen3-30B-A3B: 4,718,592
US = 1e-6


def expert_us(precision: str, n_tokens: int) -> float:
    """On ten cores: 15 us, then 44.1 GB/s or 0.59 TFLOP/s."""
    cost = Cost(load_hardware("rtx2080"), load_model("qwen3-30b"), load_stack("llama_cpp"), precision)
    return cost.expert_cpu(n_tokens).duration_s / US


def test_an_expert_in_q4_k_takes_its_bytes():
    # 4,718,592 weights x 144 / 256 bytes = 2,654,208 bytes: 60.2 us at 44.1 GB/s.
    # Unpacking and products: 2 x 78.58 / 108.40 = 1.45 operations a weight, 6.84e6 of them, 11.6 us.
    assert expert_us("q4_k", 1) == pytest.approx(15 + 2654208 / 44.1e9 / US)
    assert expert_us("q4_k", 1) == pytest.approx(75.2, abs=0.05)


def test_of_many_tokens_it_takes_its_products():
    # Eight tokens: 8 x 6.84e6 operations are 92.8 us, more than the bytes.
    assert expert_us("q4_k", 8) == pytest.approx(15 + 92.8, abs=0.1)
    # In bf16 two operations a weight, as ever: 64 x 2 x 4,718,592 / 0.59e12 = 1,024 us.
    assert expert_us("bf16", 64) == pytest.approx(15 + 64 * 2 * WEIGHTS / 0.59e12 / US)


def test_iq3_s_is_bound_by_unpacking_from_two_tokens_on():
    # 2,027,520 bytes take 46.0 us; 2 x 78.58 / 30.20 = 5.2 operations a weight take 41.6 us for each token.
    assert expert_us("iq3_s", 1) == pytest.approx(15 + 46.0, abs=0.1)
    assert expert_us("iq3_s", 2) == pytest.approx(15 + 83.3, abs=0.1)


def test_a_mix_is_the_mean_of_its_matrices():
    # Q4_K_M: gate and up are Q4_K, down Q6_K in half of the layers (24 of 48) and Q4_K in the others.
    q4, q6 = flops_per_weight("q4_k"), flops_per_weight("q6_k")
    assert expert_flops_frac(load_model("qwen3-30b"), "q4_k_m") == pytest.approx((5 / 6 * q4 + 1 / 6 * q6) / 2)


def test_a_mix_falls_back_with_its_blocks():
    # Rows of 2880 weights do not divide into blocks of 256: Q4_K becomes Q5_0, Q6_K becomes Q8_0.
    q5, q8 = flops_per_weight("q5_0"), flops_per_weight("q8_0")
    frac = expert_flops_frac(load_model("gpt-oss-20b"), "q4_k_m")
    assert min(q5, q8) < 2 * frac < max(q5, q8)


def test_every_block_type_has_a_rate_and_nothing_else_changes():
    assert set(TOKENS_PER_S) == set(BLOCKS)
    for precision in ("fp32", "bf16", "fp8", "int4", "nvfp4"):
        assert expert_flops_frac(load_model("qwen3-30b"), precision) == 1.0
    # One maker's choice of types, of which nobody says more.
    assert expert_flops_frac(load_model("qwen3.6-35b-a3b"), "ud-q4_k_xl") == 1.0
