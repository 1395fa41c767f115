"""Dividing VRAM: arithmetic by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from easy_numbers import EXPERT_BYTES, hardware, model

from sim.base.errors import BadInput, DoesNotFit
from sim.base.kinds import capacity_of
from sim.base.quantities import Quantity
from sim.options import RunSpec
from sim.results.text import memory_lines
from sim.run import execute, prepare
from sim.setup.memory import RESERVE_BYTES, BudgetRule, Demand, activation_bytes, check_host, host_need, plan

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


def cap(text: str) -> BudgetRule:
    return BudgetRule(cache=capacity_of(text))


def test_what_is_left_goes_to_experts_up_to_all_of_them():
    assert divide(1000).expert_bytes == (1000,)
    assert divide(10**9).expert_bytes == (12 * EXPERT_BYTES,)


def test_caps():
    assert divide(10**9, cap("5experts")).expert_bytes == (5 * EXPERT_BYTES,)
    assert divide(10**9, cap("5experts"), gpus=2).expert_bytes == (3 * EXPERT_BYTES, 2 * EXPERT_BYTES)
    assert divide(10**9, cap("50%")).expert_bytes == (6 * EXPERT_BYTES,)
    assert divide(10**9, cap("1000B")).expert_bytes == (1000,)
    assert divide(10**9, cap("1000B"), gpus=2).expert_bytes == (500, 500)


def test_kv_of_the_longest_requests_counts():
    made = divide(1000)
    assert made.parts.kv_tokens == 10
    assert made.parts.kv_cache_bytes == 10 * 3 * 2 * 2  # layers x (K, V of one head of one) x 2 bytes
    assert made.parts.reserve_bytes == RESERVE_BYTES
    assert made.parts.all_bytes + made.expert_bytes[0] == made.vram_bytes == gpu(1000).vram_bytes.value


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (cap("13experts"), "the model has 12 experts; give 1 to 12"),
        (cap("100B"), "one expert takes 160 B"),
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
    with pytest.raises(DoesNotFit, match=r"--cache 9experts \(1.44 kB on GPU 0\): easy has 1.00 kB left"):
        divide(1000, cap("9experts"))


def test_bounds_may_run_in_hypothetical_memory():
    made = divide(1000, hypothetical=True, whole=True)
    assert made.hypothetical
    assert made.expert_bytes == (12 * EXPERT_BYTES,)
    assert made.needs_bytes == gpu(1000).vram_bytes.value - 1000 + 12 * EXPERT_BYTES
    assert not divide(10**9, hypothetical=True, whole=True).hypothetical


def test_host_memory():
    check_host(MODEL, hardware(), "bf16")
    assert host_need(MODEL, "bf16") == 12 * EXPERT_BYTES
    assert host_need(MODEL, "bf16", kept=[0]) == (12 - MODEL.n_experts) * EXPERT_BYTES
    import msgspec

    small = msgspec.structs.replace(
        hardware(), cpu=msgspec.structs.replace(hardware().cpu, memory_bytes=Quantity(value=1000.0, source="assumed"))
    )
    with pytest.raises(DoesNotFit, match=r"its experts need 1.92 kB \(.*\) of host memory"):
        check_host(MODEL, small, "bf16")


# -- what lies on GPUs for good -------------------------------------------------------------------------------------

ENGINE: dict[str, Any] = {"policy": "llama_cpp", "hw": "rtx3090", "requests": 1, "engine": "llama_cpp"}


def replayed(**fields: Any) -> Any:
    made = prepare(RunSpec(**ENGINE | fields))
    try:
        return execute(made, bounds=False, by_layer=False).result
    finally:
        made.close()


def test_without_a_mapped_file_layers_on_the_gpu_need_no_host_memory():
    mapped, pinned = replayed(), replayed(set={"engine.pinned": True})
    on_gpu_bytes = pinned.policy_stats["layers_on_gpu"] * pinned.shape.experts * pinned.expert_bytes
    assert on_gpu_bytes > 0
    assert pinned.ram_peak_bytes == mapped.ram_peak_bytes - on_gpu_bytes
    # The least that holds it is enough, and a byte less is refused with what would do.
    least = pinned.ram_peak_bytes
    assert replayed(set={"engine.pinned": True}, ram=least).tpot_s == pinned.tpot_s
    with pytest.raises(DoesNotFit, match=r"that stay off the GPU need .*; take more RAM"):
        replayed(set={"engine.pinned": True}, ram=least - 1)
    with pytest.raises(DoesNotFit, match=r"take more RAM .*, --set engine.pinned=true \(llama.cpp's --no-mmap"):
        replayed(ram=least)
    with pytest.raises(DoesNotFit, match=r"take more RAM .*; engine.pinned=true alone is not enough"):
        replayed(ram=least - 1)


def test_a_cache_that_lets_experts_go_keeps_all_of_them_in_host_memory():
    made = prepare(RunSpec(**ENGINE | {"policy": "lru", "engine": "bare"}))
    made.close()
    assert made.in_host_bytes(()) == host_need(made.model, "bf16")


def test_layers_that_do_not_fit_are_refused_with_the_staging_room():
    with pytest.raises(
        DoesNotFit,
        match=r"fit beside staging room of 3 experts \([0-9.e+,]+ MB\) .*; set it to \d+ or more, set op_off",
    ):
        replayed(set={"n_cpu_moe": 1})
    with pytest.raises(DoesNotFit, match=r"and \d+ fit; set it to \d+ or more, or leave it out"):
        replayed(set={"n_cpu_moe": 1, "op_offload": False})
