"""What a kernel takes beside its bytes and products, what blocks of weights are multiplied at, and what an engine saves
where every expert is on the GPU: by hand, and from the published figures that they are derived from."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import random_worlds
from cli_help import moesim, simulated
from easy_numbers import execute_easy, figure, setup
from test_timeline_copies import Placed
from tiny_traces import from_rows

from policies.lru import Lru
from sim.base.errors import IllegalDecision
from sim.base.files import bundled
from sim.base.quantities import Quantity
from sim.bounds.time_bound import Bounds
from sim.machine.cost import Cost
from sim.policy import Evict, RunCpu, View
from sim.profiles.hardware import ASKED_FOR, GPUS, load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import Kernels, KernelTimes, Resident, Stack, load_stack
from sim.workload.iterations import DECODE, PREFILL, Iteration, Range, RequestInfo
from traces.format.reader import Trace

TIMES = KernelTimes(launched_s=figure(3.0), replayed_s=figure(2.0))
SCOREBOARD = {  # ggml-org/llama.cpp discussion 15013: Llama 2 7B Q4_0, no FlashAttention; pp512 and tg128, tokens/s
    "rtx5090": (14073.41, 290.02),
    "rtx4090": (11992.70, 186.21),
    "rtx3090": (5174.69, 158.16),
    "a6000": (4913.93, 138.73),
    "pro4000-epyc7302": (4992.83, 131.66),
    "a5000": (4028.16, 130.07),
    "rtx5060ti": (3737.25, 90.94),
    "rtx3060": (2137.50, 75.57),
}
TURING = {"quadro-rtx-6000": (2751.18, 102.77)}  # without graphs then
N_KERNELS = 32 * 27 + 4
READ_BYTES = 3.56 * 2**30 - 32000 * 4096 * 0.5625 + 32 * 2 * 4096 * 2 * 64  # less the embedding; keys of 64 tokens
MULTIPLIED = 6.738e9 - 2 * 32000 * 4096


def rest_s(card: str) -> float:
    """What a token takes beyond reading the weights, for each of the kernels."""
    tg = {**SCOREBOARD, **TURING}[card][1]
    return (1 / tg - READ_BYTES / load_hardware(card).gpu.memory_bandwidth_bytes_per_s.value) / N_KERNELS


def test_kernel_times_follow_from_the_scoreboard() -> None:
    replayed = [rest_s(card) for card in SCOREBOARD]
    for name in ("llama_cpp", "freetoken", "ktransformers"):
        times = load_stack(name).kernel_times
        assert times is not None
        assert times.replayed_s.value == pytest.approx(statistics.median(replayed), rel=0.005)
        assert times.replayed_s.low == pytest.approx(min(replayed), rel=0.005)
        assert max(replayed) <= (times.replayed_s.high or 0.0)
        # FreeToken's is its own: 39 calls of PyTorch in 143 us, the GPU busy in 44.7 of them (#338).
        launched_s = 143e-6 / 39 if name == "freetoken" else rest_s("quadro-rtx-6000")
        assert times.launched_s.value == pytest.approx(launched_s, rel=0.005)


DENSE = {  # of that file's bytes, kernels: as llama_cpp counts them, 27 a layer with delta nets and 22 of Gemma
    "Ministral 3 3B": (1.8e9, 26 * 20 + 4),
    "Qwen3.5 4B": (2.5e9, 32 * 27 + 4),
    "Qwen3.5 9B": (5.7e9 - 248320 * 4096 * 0.5625, 32 * 27 + 4),
    "Qwen3.6 27B": (16.8e9 - 248320 * 5120 * 0.5625, 64 * 27 + 4),
    "Gemma 4 31B": (18.3e9, 60 * 22 + 8),
}
KHMEL = {  # pavlokhmel.com, 7 June 2026: tokens/s of these, one request
    "v100-32g-pcie": (151, 113, 85, 31, 28),
    "a100-40g-pcie": (184, 145, 113, 41, 37),
    "a100-80g-sxm": (211, 154, 123, 46, 43),
    "h100-sxm": (305, 234, 190, 74, 68),
    "h200-sxm": (312, 241, 197, 76, 71),
}


def test_what_cards_of_data_centres_read_blocks_at_goes_by_dense_models() -> None:
    """Of an H200 it was measured (`tests/test_llama_bench.py`); of the others by what dense models leave for bytes."""
    stack = load_stack("llama_cpp")
    times = stack.kernel_times
    assert times is not None
    assert stack.quantised is not None
    assert stack.quantised.reads_of_card

    def read_at(card: str) -> float:
        rows = zip(KHMEL[card], DENSE.values(), strict=True)
        return statistics.median(n / (1 / rate - k * times.replayed_s.value) for rate, (n, k) in rows)

    cards = {name: load_hardware(name).gpu.quantised_bytes_per_s for name in bundled(GPUS, ".yaml")}
    known = {name: own for name, own in cards.items() if isinstance(own, Quantity)}
    assert set(KHMEL) == {name for name, own in known.items() if not own.note.startswith("as ")}
    measured = known["h200-sxm"]
    for card, own in known.items():
        like = own.note.split(":")[0].removeprefix("as ") if own.note.startswith("as ") else card
        times_as_much = read_at(like) / read_at("h200-sxm")
        for end in ("value", "low", "high"):
            assert getattr(own, end) == pytest.approx(times_as_much * getattr(measured, end), rel=0.005)


def test_a_dgx_spark_follows_from_dense_models() -> None:
    """llama.cpp's benches/dgx-spark, build 6989: tokens/s of Qwen2.5 7B in Q8_0 and Gemma 3 4B in Q4_0."""
    models = ((7.54 * 2**30 - 152064 * 3584 * 1.0625, 28 * 20 + 4, 30.66), (2.35 * 2**30, 34 * 22 + 8, 84.54))
    (bytes_1, kernels_1, rate_1), (bytes_2, kernels_2, rate_2) = models
    kernel_s = (1 / rate_2 - bytes_2 / bytes_1 / rate_1) / (kernels_2 - bytes_2 / bytes_1 * kernels_1)
    bandwidth = bytes_1 / (1 / rate_1 - kernels_1 * kernel_s)
    gpu = load_hardware("gb10").gpu
    assert kernel_s == pytest.approx(1.56e-6, rel=0.01)
    assert bandwidth == pytest.approx(gpu.memory_bandwidth_bytes_per_s.high, rel=0.005)
    measured = gpu.memory_bandwidth_bytes_per_s.value
    products_s = 2048 / 2272.74 - kernels_1 * 1.72e-6 - bytes_1 / measured
    assert isinstance(gpu.quantised_flops_per_s, Quantity)
    n_params = 7.6156e9 - 2 * 152064 * 3584
    assert gpu.quantised_flops_per_s.value == pytest.approx(2 * 2048 * n_params / products_s, rel=0.005)


# llmfit #774, #775, #778: layers, weights of one, of the head, -ngl (which counts the head as one), tokens/s.
PARTLY_ON_THE_CPU = {
    "Mistral Small 24B": (40, 5120 * (2 * 4096 + 2 * 1024 + 3 * 32768), 131072 * 5120, 16, 5.2),
    "Qwen3 14B": (40, 5120 * (2 * 5120 + 2 * 1024 + 3 * 17408), 151936 * 5120, 32, 16.9),
    "phi-4": (40, 5120 * (2 * 5120 + 2 * 1280 + 3 * 17920), 100352 * 5120, 32, 16.7),
    "Gemma 3 12B": (48, 3840 * (2 * 4096 + 2 * 2048 + 3 * 15360), 262208 * 3840, 44, 26.1),
    "Qwen2.5 14B": (48, 5120 * (2 * 5120 + 2 * 1024 + 3 * 13824), 152064 * 5120, 42, 20.8),
}


def test_what_a_10900x_reads_follows_from_dense_models_that_it_computes_layers_of() -> None:
    """Q4_K_M, 4.8 bits a weight and 6.5625 of the head, beside an RTX 2080."""
    hw, times = load_hardware("rtx2080"), load_stack("llama_cpp").kernel_times
    assert times is not None
    assert hw.cpu.id == "core-i9-10900x"
    found = []
    for n_layers, weights, head, ngl, rate in PARTLY_ON_THE_CPU.values():
        on_gpu = ngl - 1
        gpu_s = (on_gpu * weights * 0.6 + head * 0.8203125) / hw.gpu.memory_bandwidth_bytes_per_s.value
        gpu_s += on_gpu * 20 * times.replayed_s.value
        found.append((n_layers - on_gpu) * weights * 0.6 / (1 / rate - gpu_s))
    own = hw.cpu.memory_bandwidth_bytes_per_s
    assert own.value == pytest.approx(statistics.median(found), rel=0.005)
    assert own.low == pytest.approx(min(found), rel=0.005)


A100 = load_hardware("a100-80g-sxm")


def test_blocks_are_read_at_what_the_card_says_and_keys_at_what_its_memory_gives() -> None:
    """Qwen3-30B on an A100 after 100 tokens: in `q4_k_m` weights at 594 GB/s, in bf16 at all that there is."""
    model, memory = load_model("qwen3-30b-a3b"), A100.gpu.memory_bandwidth_bytes_per_s.value
    own: Any = A100.gpu.quantised_bytes_per_s
    for stack_name, precision, rate in (
        ("llama_cpp", "q4_k_m", own.value),
        ("llama_cpp", "bf16", memory),
        ("freetoken", "q4_k_m", memory),
    ):
        stack = load_stack(stack_name).on(A100, keeps_all=True)
        cost = Cost(A100, model, stack, precision)
        assert stack.kernel_times is not None
        fixed_s = cost.stack.kernels.attention * stack.kernel_times.replayed_s.value
        keys_s = 100 * 2 * 4 * 128 * 2 / memory
        products_s = model.attention_flops(1, 100) / cost.roofline.flops
        weights_s = (model.attention_bytes(precision) + 4 * 2 * 2048) / rate
        assert cost.attention_one_s(99) == pytest.approx(fixed_s + keys_s + products_s + weights_s)
        request = RequestInfo(0, 0, 100, 1, "", None)
        price = cost.attention(Iteration(0, [Range(request, 99, 100, DECODE, 99)], None))  # type: ignore[arg-type]
        assert price.duration_s == pytest.approx(cost.attention_one_s(99))
        assert price.n_bytes == pytest.approx(model.attention_bytes(precision) + 4 * 2 * 2048 + 100 * 2 * 4 * 128 * 2)


def test_no_block_is_read_faster_than_the_memory_gives() -> None:
    slow = load_hardware("a100-80g-sxm", {"gpu.memory_bandwidth_bytes_per_s": 5e11})
    cost = Cost(slow, load_model("qwen3-30b-a3b"), load_stack("llama_cpp"), "q4_k_m")
    assert (cost.roofline.bandwidth, cost.roofline.as_weights) == (5e11, 1.0)


def test_hardware_without_engines_says_nothing_of_blocks() -> None:
    assert A100.without(ASKED_FOR).gpu.quantised_bytes_per_s is msgspec.UNSET
    assert "khmel" not in A100.without(ASKED_FOR).sources


def test_launching_on_newer_cards_is_worth_less() -> None:
    """llama.cpp #18934: tokens/s without graphs and with them, experts of the first 8 layers on the CPU."""
    llama = load_stack("llama_cpp")
    times = llama.kernel_times
    assert times is not None
    saved = []
    for name, without, replayed in (("glm-4.5-air", 60.84, 63.12), ("gpt-oss-120b", 95.96, 100.93)):
        model, kernels = load_model(name), llama.of(name).kernels
        on_gpu = sum(layer >= 8 for layer in model.moe_layer_ids)
        n_kernels = model.n_layers * kernels.attention + len(model.dense_layers) * kernels.dense_ffn + kernels.head
        n_kernels += model.n_moe_layers * (kernels.gate + kernels.shared_expert * bool(model.n_shared_experts))
        saved.append((1 / without - 1 / replayed) / (n_kernels + on_gpu * kernels.expert))
    assert times.launched_s.low == pytest.approx(times.replayed_s.value + min(saved), rel=0.02)


def test_kernel_times_of_imp_follow_from_its_dense_models() -> None:
    """imp's table: Qwen3-8B at 269.5 and 270 tokens/s, Qwen3-14B at 164 and 159, in 4.5 bits but for the embedding."""
    bandwidth, imp = load_hardware("rtx5090").gpu.memory_bandwidth_bytes_per_s.value, load_stack("imp")
    assert (imp.kernel_times, imp.resident) != (None, None)
    kernels = imp.resident.kernels  # type: ignore[union-attr]
    times = imp.kernel_times
    shapes = ((36, 4096, 4096, 12288, (269.5, 270)), (40, 5120, 5120, 17408, (164, 159)))
    found = []
    for n_layers, hidden, heads, ffn, rates in shapes:
        params = n_layers * hidden * (2 * heads + 2 * 1024 + 3 * ffn) + 151936 * hidden
        n_kernels = n_layers * (kernels.attention + kernels.dense_ffn) + kernels.head
        found += [(1 / rate - params * 0.5625 / bandwidth) / n_kernels for rate in rates]
    assert times is not None
    assert times.replayed_s.value == pytest.approx(statistics.median(found), rel=0.005)
    assert (times.replayed_s.low, times.replayed_s.high) == pytest.approx((min(found), max(found)), rel=0.005)
    # Graphs forced off: 116.13 tokens/s in 790 launches (#1368), 1.5 ms of them bytes and FLOPs.
    assert 790 * times.launched_s.value + 1.5e-3 == pytest.approx(1 / 116.13, rel=0.01)


def test_a_prompt_s_kernels_cost_what_nodes_of_a_graph_do_by_llama_cpp_s_table() -> None:
    """llama.cpp #7676, 8B in Q4_0 on an RTX 4090: the line's start less the weights is nearer to `replayed_s`."""
    rates = {16: 1937.21, 32: 3427.61, 64: 5420.06, 128: 7443.66, 256: 9601.53, 512: 10358.75}
    line = statistics.linear_regression(list(rates), [n / rate for n, rate in rates.items()])
    params = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    read_s = params * 0.5625 / load_hardware("rtx4090").gpu.memory_bandwidth_bytes_per_s.value
    each_s = (line.intercept - read_s) / N_KERNELS
    times = load_stack("llama_cpp").kernel_times
    assert times is not None
    assert each_s == pytest.approx(2.25e-6, rel=0.01)
    assert abs(each_s - times.replayed_s.value) < abs(each_s - times.launched_s.value)


def test_rates_over_blocks_follow_from_the_scoreboard() -> None:
    shares = []
    for card, (pp, _) in {**SCOREBOARD, **TURING}.items():
        gpu, kernel_s = load_hardware(card).gpu, 3.7e-6 if card in TURING else 1.72e-6
        products_s = 512 / pp - N_KERNELS * kernel_s - READ_BYTES / gpu.memory_bandwidth_bytes_per_s.value
        own = gpu.quantised_flops_per_s
        assert isinstance(own, Quantity)
        assert own.value == pytest.approx(2 * MULTIPLIED * 512 / products_s, rel=0.005)
        shares.append(own.value / max(rate.value for kind, rate in gpu.flops_per_s.items() if kind in ("bf16", "fp16")))
    for name in ("llama_cpp", "freetoken", "ktransformers", "imp"):
        quantised = load_stack(name).quantised
        assert quantised is not None
        assert quantised.dense_frac.value == pytest.approx(statistics.median(shares), abs=0.01)
        assert (quantised.dense_frac.low, quantised.dense_frac.high) == pytest.approx(
            (min(shares), max(shares)), abs=0.005
        )


def test_a_resident_layer_by_hand() -> None:
    """imp, one token of Qwen3-30B-A3B in 4.5 bits on an RTX 5090, in microseconds.

    Attention: 9 kernels of 2.31, 10.6 MB at 1674.5 GB/s, 37.7 MFLOP at 203 TFLOPS; eight experts: 4 kernels, 21.3 MB,
    75.5 MFLOP at 0.196 of that.
    """
    hw, model = load_hardware("rtx5090"), load_model("qwen3-30b-a3b")
    stack = load_stack("imp").on(hw, keeps_all=True)
    cost = Cost(hw, model, stack, "q4_k")
    leader, slack_s = cost.leader(1, "q4_k")
    member, left_s = cost.member(slack_s, 1, "q4_k")
    assert (slack_s, left_s) == (0.0, 0.0)
    assert (leader.duration_s + 7 * member.duration_s) * 1e6 == pytest.approx(9.24 + 12.72 + 1.97, rel=0.01)
    assert cost.attention_one_s(0) * 1e6 == pytest.approx(20.79 + 6.36 + 0.19, rel=0.01)
    n_kernels = model.n_layers * (stack.kernels.attention + stack.kernels.gate + stack.kernels.expert)
    assert n_kernels + stack.kernels.head == 790


def test_kernels_that_a_prompt_has_besides() -> None:
    """imp: 33 a layer where decoding has 16, the mean of 36 in NVFP4 and 30 in Q4_K_M; 17 x 2.31 us, at any length."""
    counted = {"nvfp4": (14, 5, 17), "q4_k_m": (11, 5, 10 + 4)}
    hw, model = load_hardware("rtx5090"), load_model("qwen3-30b-a3b")
    stack = load_stack("imp").on(hw, keeps_all=True)
    decoding = stack.kernels.attention + stack.kernels.gate + stack.kernels.expert
    assert stack.prompt_kernels == statistics.mean(map(sum, counted.values())) - decoding
    assert load_stack("imp").on(hw, keeps_all=False).prompt_kernels == 0
    without = msgspec.structs.replace(stack, prompt_kernels=0)
    request, trace = RequestInfo(0, 0, 40, 9, "", None), SimpleNamespace(n_layers=48, n_experts=128)
    for phases, times in (([DECODE], 0), ([DECODE, DECODE], 0), ([PREFILL], 1), ([DECODE, PREFILL], 1)):
        iteration = Iteration(0, [Range(request, 0, 3, phase, 40) for phase in phases], trace)  # type: ignore[arg-type]
        more, less = (Cost(hw, model, one, "nvfp4").attention(iteration).duration_s for one in (stack, without))
        assert (more - less) * 1e6 == pytest.approx(times * 17 * 2.31, abs=1e-6)


def test_a_layer_of_a_prompt_by_hand() -> None:
    """llama.cpp on an RTX 3090, 512 tokens of Qwen3-30B-A3B in 4.5 bits, 32 for each of 128 experts, in milliseconds.

    340 MB at 860 GB/s and 38.7 GFLOP at 0.2 x 71.3 TFLOPS, and six kernels. NVFP4 is multiplied at the 16-bit rate.
    """
    hw, model = load_hardware("rtx3090"), load_model("qwen3-30b-a3b")
    cost = Cost(hw, model, load_stack("llama_cpp"), "q4_k")
    leader, slack_s = cost.leader(32, "q4_k")
    member, _ = cost.member(slack_s, 32, "q4_k")
    hidden_ms = 128 * 2 * 32 * 2048 * 2 / 860e9 * 1e3
    assert (leader.duration_s + 127 * member.duration_s) * 1e3 == pytest.approx(
        0.395 + 2.711 + 0.010 + hidden_ms, rel=0.01
    )
    products_ms = [
        Cost(hw, model, load_stack(name), precision).work(32, precision).duration_s * 1e3
        - (model.expert_bytes(precision) + 2 * 32 * 2048 * 2) / 860e9 * 1e3
        for name, precision in (("llama_cpp", "mxfp4"), ("freetoken", "nvfp4"), ("freetoken", "bf16"))
    ]
    assert products_ms == pytest.approx([302e6 / 14.26e12 * 1e3, 302e6 / 72e12 * 1e3, 302e6 / 72e12 * 1e3], rel=0.01)


def test_cards_without_a_rate_of_their_own_take_a_share_of_the_16_bit_rate() -> None:
    hw, model = load_hardware("a100-80g-sxm"), load_model("qwen3-30b-a3b")
    cost = Cost(hw, model, load_stack("llama_cpp"), "q4_k_m")
    assert cost.roofline.flops == pytest.approx(0.95 * hw.gpu.flops_per_s["bf16"].value)
    assert cost.of_experts.flops == pytest.approx(0.2 * cost.roofline.flops)
    names = {name for name, _ in cost.figures.entries}
    assert {"engine.quantised.dense_frac", "engine.quantised.expert_frac", "engine.kernel_times.replayed_s"} <= names


def test_what_a_stack_is_on_a_gpu() -> None:
    llama, imp, bare = load_stack("llama_cpp"), load_stack("imp"), load_stack("bare")
    pascal, turing = load_hardware("gtx1080ti"), load_hardware("quadro-rtx-4000")
    assert not llama.on(pascal, keeps_all=False).graphs
    assert not llama.on(pascal, keeps_all=True).graphs
    assert llama.on(turing, keeps_all=False) == llama
    assert imp.on(turing, keeps_all=False) == imp
    assert not imp.graphs
    assert imp.on(turing, keeps_all=True).graphs
    assert not imp.on(turing, keeps_all=True).reads_routers
    assert bare.on(pascal, keeps_all=True) == bare


def test_models_that_hold_more_have_kernels_of_their_own() -> None:
    """Four streams mixed around each half of a layer, or delta nets; what is set by hand goes before it."""
    llama = load_stack("llama_cpp")
    delta = llama.of("qwen3.6-35b-a3b").kernels
    rest = delta.gate + delta.expert + delta.shared_expert
    off = {n: abs(40 * (n + rest) + delta.head - 1456) for n in range(14, 30)}  # launches counted (lucebox #332)
    assert delta.attention == min(off, key=lambda n: off[n])
    assert llama.of("qwen3.5-122b-a10b").kernels == delta
    own = llama.of("qwen3.8-flash-next")
    assert (own.kernels.attention, own.kernels.gate, own.kernels.expert) == (23 + 23, 23 + 2, 6)
    assert own.kernels_of == {}
    assert llama.of("qwen3-30b-a3b").kernels == llama.kernels
    by_hand = load_stack("llama_cpp", {"kernels.attention": 20}).of("qwen3.8-flash-next")
    assert (by_hand.kernels.attention, by_hand.kernels.gate) == (20, llama.kernels.gate)


def test_figures_of_engines_alone_do_not_tell_other_runs_apart() -> None:
    hw = load_hardware("rtx5090")
    plain = hw.without(ASKED_FOR)
    assert "llama15013" in hw.sources
    assert "llama15013" not in plain.sources
    assert plain.gpu.quantised_flops_per_s is msgspec.UNSET
    assert plain.without(ASKED_FOR) == plain


def resident_in(stack: Stack, **own: Any) -> Stack:
    """A stack as it is where all experts are on the GPU."""
    resident = Resident(
        graphs=True, kernels=Kernels(attention=1, gate=0, expert=2, shared_expert=1, head=1, dense_ffn=1)
    )
    return msgspec.structs.replace(stack, resident=resident, **own).on(load_hardware("rtx3090"), keeps_all=True)


@pytest.mark.parametrize("engine", ["core", "simpy"])
def test_a_resident_token_is_launched_once_and_read_once(tmp_path: Path, engine: str) -> None:
    """Two layers of two experts, all there; a kernel takes 2 s, an attention has one, a group two, the head one.

    By layers: attention is launched at 0, runs from 1 to 3, its router is read at 8; experts from 9 to 13, attention
    until 15, read at 20, experts from 21 to 25, the head until 27, read at 32. As one graph kernels follow one another
    until 12; what is read and launched once per token, 5 + 1, is charged before the head, from 8 on, when the last
    router is done.
    """
    rows, there = [[[0, 1], [1, 2]]], [(layer, expert) for layer in (0, 1) for expert in (0, 1, 2)]
    ends = []
    for resident in (False, True):
        with Trace(from_rows(tmp_path / f"{engine}.safetensors", rows, 3)) as trace:
            made = setup(Placed(there), trace, 6, launch_s=1.0, sync_s=5.0)
            spec = msgspec.structs.replace(made.spec, sim_simulator=engine)
            stack = msgspec.structs.replace(made.stack, grouped=True, graphs=True, kernel_times=TIMES)
            seen = execute_easy(replace(made, spec=spec, stack=resident_in(stack) if resident else stack))
        ends.append(seen.end_s)
        shares = {f.figure: f.share for f in seen.result.provenance.figures}
        assert "engine.kernel_times.replayed_s" in shares
    assert ends == [32, 16]


class Kept(Placed):
    """The second layer's experts stay where they are."""

    def kept_layers(self, view: View) -> frozenset[int]:
        return frozenset({1})


@pytest.mark.parametrize("engine", ["core", "simpy"])
def test_routers_of_kept_layers_are_not_read(tmp_path: Path, engine: str) -> None:
    """As above by layers, but of the second one nobody reads the router: its attention runs from 13 to 15, its experts,
    launched meanwhile, until 19, the head until 21, read at 26."""
    rows, there = [[[0, 1], [1, 2]]], [(layer, expert) for layer in (0, 1) for expert in (0, 1, 2)]
    ends = []
    for policy in (Placed(there), Kept(there)):
        with Trace(from_rows(tmp_path / f"{engine}.safetensors", rows, 3)) as trace:
            made = setup(policy, trace, 6, launch_s=1.0, sync_s=5.0)
            spec = msgspec.structs.replace(made.spec, sim_simulator=engine)
            resident = Resident(graphs=True, kernels=made.stack.kernels)
            own = {"grouped": True, "graphs": True, "kernel_times": TIMES, "resident": resident}
            seen = execute_easy(replace(made, spec=spec, stack=msgspec.structs.replace(made.stack, **own)))
        assert seen.result.lower_bound.ttft_s <= seen.end_s
        ends.append(seen.end_s)
    assert ends == [32, 26]


@pytest.mark.parametrize(
    ("answer", "there", "said"),
    [
        (None, 6, "placed.kept_layers: got None: it answers with layers, 0 to 1"),
        ([2], 6, r"placed.kept_layers: got \[2\]: it answers with layers, 0 to 1"),
        ([True], 6, r"placed.kept_layers: got \[True\]: it answers with layers"),
        ([1], 5, r"placed.kept_layers: Piece\(layer=1, expert=2, bf16, gpu=0\) is not there: every expert of a layer"),
    ],
)
def test_what_a_policy_says_it_keeps_is_held_to(tmp_path: Path, answer: Any, there: int, said: str) -> None:
    class Says(Placed):
        def kept_layers(self, view: View) -> Any:
            return answer

    all_of_them = [(layer, expert) for layer in (0, 1) for expert in (0, 1, 2)]
    with Trace(from_rows(tmp_path / "t.safetensors", [[[0, 1], [1, 2]]], 3)) as trace:
        made = setup(Says(all_of_them[:there]), trace, 6)
        made = replace(
            made, stack=msgspec.structs.replace(made.stack, resident=Resident(graphs=True, kernels=made.stack.kernels))
        )
        with pytest.raises(IllegalDecision, match=said):
            execute_easy(made)


def test_what_is_kept_neither_leaves_nor_runs_on_the_cpu(tmp_path: Path) -> None:
    class Leaves(Kept):
        def layer_done(self, layer: int, view: View) -> Any:
            return [Evict(view.piece(1, 0))] if layer == 0 else None

    class OnCpu(Kept):
        traits = frozenset({"cpu"})

        def gate_done(self, gate: Any, view: View) -> Any:
            return [RunCpu(expert) for expert in gate.needs]

    there = [(layer, expert) for layer in (0, 1) for expert in (0, 1, 2)]
    for policy, said in (
        (Leaves, "Evict of .* says that its layer stays"),
        (OnCpu, "RunCpu.* layer 1 stays on"),
    ):
        with Trace(from_rows(tmp_path / "t.safetensors", [[[0, 1], [1, 2]]], 3)) as trace:
            made = setup(policy(there), trace, 6, cpu_s=1.0)
            made = replace(
                made,
                stack=msgspec.structs.replace(made.stack, resident=Resident(graphs=True, kernels=made.stack.kernels)),
            )
            with pytest.raises(IllegalDecision, match=said):
                execute_easy(made)


def test_a_comparison_gives_each_the_bound_of_a_run_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Where routers are not read the bound is lower: whoever is compared beside it has another."""
    words = ("--hw", "a100-80g-sxm", "--cache", "90%", "--engine", "llama_cpp", "--requests", 1, "--json")
    both = moesim(capsys, "compare", *words, "--policy", "static_cache", "--policy", "llama_cpp").json["runs"]
    alone = simulated(capsys, "--policy", "llama_cpp", *words).json
    found = next(run for run in both if run["policy"] == "llama_cpp")
    assert (found["run_id"], found["lower_bound"]["tpot_s"]) == (alone["run_id"], alone["lower_bound"]["tpot_s"])
    assert {run["lower_bound"]["tpot_s"] for run in both} > {alone["lower_bound"]["tpot_s"]}


def test_engines_agree_where_some_layers_are_kept(tmp_path: Path) -> None:
    """llama.cpp with some layers on the GPU, in drawn worlds."""
    n = 0
    for seed in range(40):
        of = random_worlds.world(seed, tmp_path, "llama_cpp")
        stack = of.facts["stack"]
        kernels = Kernels(attention=1, gate=0, expert=2, shared_expert=1, head=1, dense_ffn=1)
        of.facts["stack"] = msgspec.structs.replace(stack, resident=Resident(graphs=True, kernels=kernels))
        told, seen = random_worlds.engines_disagree(of)
        assert told is None, f"{of}\n  {told}"
        n += not seen.error and random_worlds.is_bounded(of)
        of.trace.unlink()
    assert n > 10


@pytest.mark.parametrize("resident", [False, True])
def test_engines_agree_and_no_policy_beats_the_bound(tmp_path: Path, resident: bool) -> None:
    for seed in range(8):
        of = random_worlds.world(seed, tmp_path, "drawn")
        stack = msgspec.structs.replace(of.facts["stack"], kernel_times=TIMES)
        of.facts["stack"] = resident_in(stack) if resident else stack
        told, _ = random_worlds.engines_disagree(of)
        of.trace.unlink()
        assert told is None, f"{of}\n  {told}"
    rows = [[[0, 1], [1, 2]], [[1, 2], [0, 2]], [[0, 1], [0, 1]]]
    with Trace(from_rows(tmp_path / "t.safetensors", rows, 3, [(1, 3)])) as trace:
        made = setup(Lru(), trace, 3, copy_launch_s=0.25, copy_s=6.0, cpu_s=2.0)
        stack = msgspec.structs.replace(made.stack, grouped=True, kernel_times=TIMES)
        made = replace(made, stack=resident_in(stack) if resident else stack)
        result = execute_easy(made).result
        tpot_s, _ = Bounds(made, False).means()
    assert tpot_s is not None
    assert 0.0 < tpot_s <= result.tpot_s.mean
