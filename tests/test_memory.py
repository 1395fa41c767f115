"""Dividing VRAM: arithmetic by hand, and what is refused."""

from __future__ import annotations

import pytest
from easy_numbers import EXPERT_BYTES, hardware, model

from sim.base.errors import BadInput, DoesNotFit
from sim.base.quantities import Quantity
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.results.text import memory_lines
from sim.setup.memory import RESERVE_BYTES, BudgetRule, Demand, activation_bytes, check_host, plan

MODEL = model(3, 4, 2)  # 12 experts
DEMAND = Demand(contexts=(10,), iteration_tokens=4, batch=1)


def gpu(extra_bytes: int):
    """A GPU with exactly this much left for experts."""
    import msgspec

    fixed = MODEL.dense_bytes("bf16") + 10 * MODEL.kv_bytes_per_token("bf16") + activation_bytes(MODEL, 4, 1, "bf16")
    vram = Quantity(value=float(fixed + RESERVE_BYTES + extra_bytes), source="assumed")
    return msgspec.structs.replace(hardware(), vram_bytes=vram)


def divide(extra_bytes: int, rule: BudgetRule | None = None, gpus: int = 1, hypothetical: bool = False, whole=False):
    return plan(MODEL, gpu(extra_bytes), "bf16", DEMAND, rule or BudgetRule(), gpus, hypothetical, whole)


def test_what_is_left_goes_to_experts_up_to_all_of_them():
    assert divide(1000).expert_bytes == (1000,)
    assert divide(10**9).expert_bytes == (12 * EXPERT_BYTES,)


def test_caps():
    assert divide(10**9, BudgetRule(n_experts=5)).expert_bytes == (5 * EXPERT_BYTES,)
    assert divide(10**9, BudgetRule(n_experts=5), gpus=2).expert_bytes == (3 * EXPERT_BYTES, 2 * EXPERT_BYTES)
    assert divide(10**9, BudgetRule(cache_frac=0.5)).expert_bytes == (6 * EXPERT_BYTES,)
    assert divide(10**9, BudgetRule(expert_cache_bytes=1000)).expert_bytes == (1000,)
    assert divide(10**9, BudgetRule(expert_cache_bytes=1000), gpus=2).expert_bytes == (500, 500)


def test_kv_of_the_longest_requests_counts():
    made = divide(1000)
    assert made.parts.kv_tokens == 10
    assert made.parts.kv_cache_bytes == 10 * 3 * 2 * 2  # layers x (K, V of one head of one) x 2 bytes
    assert made.parts.reserve_bytes == RESERVE_BYTES
    assert made.parts.all_bytes + made.expert_bytes[0] == made.vram_bytes == gpu(1000).vram_bytes.value


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (BudgetRule(n_experts=13), "the model has 12 experts; give 1 to 12"),
        (BudgetRule(n_experts=0), "give 1 to 12"),
        (BudgetRule(cache_frac=0.0), r"a share of all experts in \(0, 1\]"),
        (BudgetRule(cache_frac=1.5), r"in \(0, 1\]"),
        (BudgetRule(expert_cache_bytes=100), "one expert takes 160 B"),
        (BudgetRule(expert_cache_bytes=1000, n_experts=2), "one cap at a time"),
        (BudgetRule(vram_bytes=10**15), "--vram, got 1000 TB: easy has"),
    ],
)
def test_caps_that_make_no_sense(rule, message):
    with pytest.raises(BadInput, match=message):
        divide(10**9, rule)


def test_refusals_carry_the_table():
    with pytest.raises(DoesNotFit, match="dense parts need") as refused:
        divide(-1)
    lines = memory_lines(refused.value.sizes)
    assert lines[1] == f"  {'KV cache, 10 tokens':<34}{'120 B':>12}"
    assert [line[2:36].rstrip() for line in lines[::2]] == ["dense weights", "activations, 4 tokens", "VRAM"]
    with pytest.raises(DoesNotFit, match=r"--experts 9 \(1.44 kB on GPU 0\): easy has 1.00 kB left"):
        divide(1000, BudgetRule(n_experts=9))


def test_bounds_may_run_in_hypothetical_memory():
    made = divide(1000, hypothetical=True, whole=True)
    assert made.hypothetical
    assert made.expert_bytes == (12 * EXPERT_BYTES,)
    assert made.needs_bytes == gpu(1000).vram_bytes.value - 1000 + 12 * EXPERT_BYTES
    assert not divide(10**9, hypothetical=True, whole=True).hypothetical


def test_host_memory():
    assert check_host(MODEL, hardware(), "bf16") == 12 * EXPERT_BYTES
    import msgspec

    small = msgspec.structs.replace(
        hardware(), cpu=msgspec.structs.replace(hardware().cpu, memory_bytes=Quantity(value=1000.0, source="assumed"))
    )
    with pytest.raises(DoesNotFit, match=r"its experts need 1.92 kB of host memory"):
        check_host(MODEL, small, "bf16")


@pytest.mark.parametrize(("model", "precision"), [("mixtral-8x7b", "bf16"), ("deepseek-v3-r1", "fp8")])
def test_the_host_memory_that_is_advised_is_enough(model, precision):
    small = {"cpu.memory_bytes": "100MB"}
    with pytest.raises(DoesNotFit, match=r"--set hw\.cpu\.memory_bytes=") as told:
        check_host(load_model(model), load_hardware("rtx3090", small), precision)
    advised = {"cpu.memory_bytes": str(told.value).rpartition("=")[2]}
    assert check_host(load_model(model), load_hardware("rtx3090", advised), precision) > 1e9
