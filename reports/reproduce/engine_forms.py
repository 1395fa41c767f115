"""Rows of engines that need no replay: two lanes on one memory, small copies, ladders at hit rates that are printed."""

from __future__ import annotations

import math

import numpy as np

from reports.reproduce.closed_form import GB, METHODS, Settings, cost_of, method
from reports.reproduce.rows import Figure, Row
from sim.machine.cost import Cost
from sim.machine.drive_prices import DrivePrices
from sim.machine.figures import Figures
from sim.profiles.drives import DRIVES
from sim.profiles.hardware import load_hardware
from sim.profiles.pcie import bandwidth, bus_of
from traces.stats.curves import lru_curve
from traces.synth.fitted import load
from traces.synth.latent import chosen_mask

__all__ = ["METHODS"]  # those of papers, and what is below

IMP = "rtx5090"
LINK = "gen4x16"
UNMEASURED = "rtx4090"  # a profile in which no pair was measured, so that the law holds
# Row -> GB/s of the host's memory (STREAM), experts on the CPU and copies, each measured alone. C3 prints no STREAM.
ALONE = {"C1": (84.5, 63.8, 24.9), "C2": (31.75, 29.97, 13.09), "C3": (71.5 + 14.8, 65.9, 25.2)}
IMP_HITS = {"8 of 128": 0.366, "24 of 128": 0.741, "49 of 128": 0.894, "81 of 128": 0.962}
COLD_TOKENS, COLD_EXPERTS, COLD_TOP_K, COLD_DRAWS = 300, 512, 10, 8
FIT, FIT_EXPERTS, FIT_TOKENS = "qwen3-30b-a3b", 128, 4096
# Row -> tokens decoded and, by slots of a layer, misses of their look-ups (43 layers, 6 experts). N1 prints 113 tokens,
# 30,270 look-ups and the misses of these; N1-stall 255 tokens and 70,540 (issues 23 and 30). Look-ups beyond the
# tokens' own (1,116 and 4,750) are the prompt's, which a cold cache misses.
CROW = {
    "N1": (113, {"24 slots": 9_399 - 1_116, "32 slots": 8_079 - 1_116, "40 slots": 7_583 - 1_116}),
    "N1-stall": (255, {"24 slots": 29_053 - 4_750, "32 slots": 25_375 - 4_750, "40 slots": 22_545 - 4_750}),
}
CROW["N1-calls"] = CROW["N1"]
# imp before #1370, counted by its author: launches of a token of Qwen3-30B with the experts of its 48 layers on the
# host (#1367) and with none there (#1368). B5: 20 layers copied for 3.0 ms at 6.5 GB/s.
IMP_LAUNCHES, IMP_RESIDENT_LAUNCHES, IMP_LAYERS = 3091, 790, 48
IMP_HOST_LAYERS, IMP_COPIED_BYTES = 20, 3.0e-3 * 6.5e9
CROW_DRIVE = "gen5x4"  # of that repository
CROW_THREADS, CROW_PARTS = 8, 3  # a thread reads the matrices of an expert
CROW_UPLOAD_BYTES_PER_S = 17.694e9  # out of pageable memory, 3.2 MB at a time (nibor1896/Crow@1bd8b57)
COPIES_SHARE = (84.0, 88.0)  # Q4: per cent of the time per token


@method
def together(row: Row, _: Settings) -> dict[str, Figure]:
    """What the simulator does on a host of which no pair was measured, but its bandwidths alone."""
    memory, cpu, copies = ALONE[row.id]
    settings = {
        "hw.cpu.total_bandwidth_bytes_per_s": memory * GB,
        "hw.h2d.bandwidth_bytes_per_s": copies * GB,
        "hw.d2h.bandwidth_bytes_per_s": copies * GB,
    }
    law = cost_of(UNMEASURED, "qwen3-30b-a3b", settings=settings, shares=True).sharing
    slower_cpu, slower_copies = law.together(cpu * GB)
    return {"CPU": cpu / slower_cpu, "copies": copies / slower_copies}


@method
def host_calls(_row: Row, _: Settings) -> dict[str, Figure]:
    """What the profile charges the host."""
    host = load_hardware(IMP).host
    return {"launch": 1e6 * host.launch_s.value, "copy": 1e6 * host.copy_launch_s.value}


def first_rung(row: Row) -> tuple[str, float]:
    """That of a ladder, which its constant comes from."""
    first, printed = next(iter(row.published.items()))
    assert isinstance(printed, float)
    return first, printed


def _miss_s(cost: Cost) -> float:
    """The copy of an expert by the stack as it is: whichever takes longer, the link or the host in its calls."""
    return max(cost.copies.expert_s(cost.model.expert_bytes("q4_k_m")), cost.launches.copy_part_s(1.0))


@method
def imp_ladder(row: Row, _: Settings) -> dict[str, Figure]:
    """A token is a constant and its misses."""
    cost = cost_of(IMP, "qwen3-30b-a3b", "q4_k_m", stack="imp")
    model = cost.model
    activations = model.n_moe_layers * model.top_k
    misses = {rung: activations * (1 - IMP_HITS[rung]) for rung in row.published}
    first, printed = first_rung(row)
    return {rung: 1 / (1 / printed + (n - misses[first]) * _miss_s(cost)) for rung, n in misses.items()}


@method
def imp_added(_row: Row, _: Settings) -> dict[str, Figure]:
    """What layers with their experts on the host add to a token without graphs: they launch more kernels, the host
    reads their routers, and what they miss is copied."""
    cost = cost_of(IMP, "qwen3.6-35b-a3b", "q4_k_m", stack="imp")
    times, n_copied = cost.stack.kernel_times, IMP_COPIED_BYTES / cost.model.expert_bytes("q4_k_m")
    assert times is not None
    kernels_s = (IMP_LAUNCHES - IMP_RESIDENT_LAUNCHES) / IMP_LAYERS * times.launched_s.value
    router_s = cost.stack.per_layer_s.value + cost.hw.host.sync_s.value
    return {"added": 1e3 * (IMP_HOST_LAYERS * (kernels_s + router_s) + n_copied * _miss_s(cost))}


def crow_waits_ms(row: Row) -> dict[str, float]:
    """What a token waits for experts from the drive, by rung. Each that a layer misses has a thread of its own, which
    reads its matrices one after the other and uploads each before it reads the next (nibor1896/Crow@2c4a917): the layer
    waits for that, or for the drive, whichever is longer. Look-ups of a layer miss independently of one another.
    """
    model = cost_of(IMP, "deepseek-v4-flash", "mxfp4").model
    part = model.expert_bytes("mxfp4") // CROW_PARTS
    alone, together = (DrivePrices(DRIVES[CROW_DRIVE], depth, part, part, Figures()) for depth in (1, CROW_THREADS))
    upload_s = part / CROW_UPLOAD_BYTES_PER_S
    own_s = CROW_PARTS * (alone.alone_s(part) + upload_s)
    waits_s = [max(own_s, CROW_PARTS * n * together.block_s + upload_s) if n else 0.0 for n in range(model.top_k + 1)]
    n_tokens, misses = CROW[row.id]
    look_ups = n_tokens * model.n_moe_layers * model.top_k

    def token_ms(rate: float) -> float:
        layer_s = sum(
            math.comb(model.top_k, n) * rate**n * (1 - rate) ** (model.top_k - n) * wait_s
            for n, wait_s in enumerate(waits_s)
        )
        return 1e3 * model.n_moe_layers * layer_s

    return {rung: token_ms(misses[rung] / look_ups) for rung in row.published}


@method
def drive_stall(row: Row, _: Settings) -> dict[str, Figure]:
    """What a token waits for reads."""
    return dict(crow_waits_ms(row))


@method
def drive_calls(row: Row, _: Settings) -> dict[str, Figure]:
    """What a layer waits for reads on an average, by that engine's count of its passes: the prompt is one, whose waits
    it counts apart."""
    n_tokens = CROW[row.id][0]
    n_layers = cost_of(IMP, "deepseek-v4-flash", "mxfp4").model.n_moe_layers
    return {rung: n_tokens / (n_tokens + 1) * wait_ms / n_layers for rung, wait_ms in crow_waits_ms(row).items()}


@method
def drive_ladder(row: Row, _: Settings) -> dict[str, Figure]:
    """A token is a constant and what it waits for reads."""
    waits_ms = crow_waits_ms(row)
    first, printed = first_rung(row)
    return {rung: printed + (wait_ms - waits_ms[first]) for rung, wait_ms in waits_ms.items()}


def cold_hits(exponent: float, sizes: list[int]) -> list[float]:
    """Per cent of hits of LRU from a cold start, where experts are drawn independently by a power of their rank."""
    rng = np.random.default_rng(0)
    logits = -exponent * np.log(np.arange(1, COLD_EXPERTS + 1))
    drawn = logits + rng.gumbel(size=(COLD_TOKENS, COLD_DRAWS, COLD_EXPERTS))
    chosen = np.argpartition(-drawn, COLD_TOP_K, axis=-1)[..., :COLD_TOP_K]
    return [100 * float(rate) for rate in lru_curve(chosen, COLD_EXPERTS, sizes).mean(axis=1)]


@method
def cold_ladder(row: Row, _: Settings) -> dict[str, Figure]:
    """The exponent is the one at which the first rung comes out; hits rise with it, so halving finds it."""
    sizes = {rung: int(rung.split()[0]) for rung in row.published}
    low, high = 0.0, 2.0
    first, printed = first_rung(row)
    for _step in range(12):
        middle = (low + high) / 2
        (found,) = cold_hits(middle, [sizes[first]])
        low, high = (middle, high) if found < printed else (low, middle)
    return dict(zip(row.published, cold_hits((low + high) / 2, list(sizes.values())), strict=True))


@method
def hidden_at_most(_row: Row, _: Settings) -> dict[str, Figure]:
    """Copies can hide behind all else at most, and all else behind copies."""
    low, high = (min(share, 100 - share) for share in reversed(COPIES_SHARE))
    return {"bound": [low, high]}


@method
def top_share(row: Row, _: Settings) -> dict[str, Figure]:
    """Of choices by the popularity that the fit has, from which experiments of this shape are drawn, layer by layer."""
    profile = load(FIT).profile
    noise = np.random.default_rng(0).standard_normal((FIT_TOKENS, FIT_EXPERTS))
    shares = []
    for bias in np.array(profile.bias):
        counts = np.sort(chosen_mask(noise + bias, profile.top_k).sum(axis=0))[::-1]
        shares.append(np.cumsum(counts) / counts.sum())
    mean = np.mean(shares, axis=0)
    return {label: 100 * float(mean[round(FIT_EXPERTS * float(label.split()[0]) / 100) - 1]) for label in row.published}


@method
def link_word(row: Row, _: Settings) -> dict[str, Figure]:
    """What `--pcie` says of a link, whatever the card."""
    rate = bandwidth(bus_of(LINK), up=True).value / GB
    return dict.fromkeys(row.published, rate)
