"""From samples on the real machine's lanes to the figures of a profile: curves, links, host, contention."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibrate import duplex
from calibrate.in_situ_file import Samples
from calibrate.stats import assumed, doubted, measured, summarise
from sim.base.errors import BadInput

WITHIN = ("gpu_slowdown_by_h2d", "h2d_slowdown_by_gpu", "cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu")
"""Terms that the samples contain: they were taken beside the copies of a run."""
OF_A_GPU = ("cpu_expert", "unpack")
"""Operations whose samples a GPU's profile takes from the lanes. Kernels are launched one by one between an event
before the first and one after the last, and what lies between is mostly the launching, which the host is charged for:
those of blocks and experts keep what they take alone. Unpacking's launches are in no other figure."""
EXPERT_BYTES_AT_LEAST = 1 << 20
"""Copies of hidden states are smaller."""
Copies = Mapping[int, list[float]]
"""Seconds of copies by bytes."""
POOLED = ("attention_decode", "expert", "cpu_expert")  # abscissas that routing decides, many and each rarely


def curve(samples: Samples, op: str) -> dict[str, Any] | None:
    """One operation's curve as plain data; points of fewer than three samples are left out, near ones are pooled."""
    points: dict[float, list[float]] = {}
    for (name, at), cases in samples.operations.items():
        if name == op:
            key = float(_bucket(at)) if op in POOLED else at
            for seconds in cases.values():
                points.setdefault(key, []).extend(seconds)
    found = [(at, typical(seconds), summarise(seconds)) for at, seconds in sorted(points.items()) if len(seconds) >= 3]
    if not found:
        return None
    return {
        "at": [at for at, _, _ in found],
        "seconds": [value for _, value, _ in found],
        "iqr_s": [s.iqr for _, _, s in found],
        "n": [s.n for _, _, s in found],
    }


def typical(seconds: list[float]) -> float:
    """Mean of the samples but for the lowest and highest 2.5 %.

    A token's time is a sum of thousands of operations, and only means add up: the sum of medians of skewed times falls
    short. What is cut off are pauses of the machine that no two runs share.
    """
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    cut = int(0.025 * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def _bucket(context: float) -> int:
    """Contexts pooled into steps of about a quarter."""
    step = max(1, 2 ** max(0, int(np.log2(max(context, 1.0))) - 2))
    return int(context // step * step + step // 2)


def on_threads(samples: Samples) -> bool:
    """Whether the lanes were threads of the host: handing work to one takes no part of the work's own time."""
    return bool(samples.environment["device"] == "CPU backend")


def curves(samples: Samples) -> dict[str, Any]:
    """The block `curves` of a profile."""
    from sim.profiles.curves import AGAINST

    wanted = AGAINST if on_threads(samples) else OF_A_GPU
    operations = {op: found for op in wanted if (found := curve(samples, op)) is not None}
    launches = {}
    for verb, runs in samples.verbs.items():
        name = verb.removeprefix("launch ")
        if verb not in ("sync", "before sync") and name != "copy" and any(runs.values()):
            launches[name] = of_runs(runs)
    found = {
        "model": samples.environment["model"],
        "precision": samples.environment["precision"],
        "operations": operations,
        "launches": launches,
    }
    slowdown = policy_slowdown(samples)
    return found if slowdown is None else {**found, "policy_slowdown": slowdown}


def policy_slowdown(samples: Samples) -> dict[str, Any] | None:
    """Extra time of policy code in runs, where threads of lanes want the interpreter too; None without whole runs."""
    alone_s = math.fsum(alone for _, alone in samples.policy)
    if alone_s <= 0.0:
        return None
    ratios = [run_s / alone for run_s, alone in samples.policy if alone > 0.0]
    value = min(10.0, max(0.0, math.fsum(run_s for run_s, _ in samples.policy) / alone_s - 1.0))
    note = "all cases together, against the same hooks in a simulation"
    return measured(value, summarise(ratios).iqr, len(ratios), note, "lanes")


def figure(seconds: list[float], note: str = "") -> dict[str, Any]:
    """A measured figure of a profile."""
    found = summarise(seconds)
    return measured(typical(seconds), found.iqr, found.n, note, "lanes")


def of_runs(runs: Mapping[str, list[float]]) -> dict[str, Any]:
    """A figure of the host's: the middle of the runs' means.

    Runs differ by what goes on beside them: in one, blocks are launched only when experts on the CPU have been computed
    and the wait is in their time; in another the machine was busy. No such run decides what the others pay.
    """
    pooled = [second for seconds in runs.values() for second in seconds]
    value = statistics.median(typical(seconds) for seconds in runs.values() if seconds)
    return {**figure(pooled), "value": value}


def beside_bytes(by_bytes: Copies, alone: Mapping[str, Any]) -> dict[str, Any] | None:
    """A link of a GPU, whose copies were measured alone too: their bandwidth, and what a run adds to each as latency.

    Of the smallest experts or parts of them, since whatever slows a copy by its bytes is the less in it. None without.
    """
    sizes = [n for n, seconds in by_bytes.items() if len(seconds) >= 3 and n >= EXPERT_BYTES_AT_LEAST]
    if not sizes:
        return None
    n_bytes, rate = min(sizes), float(alone["bandwidth_bytes_per_s"]["value"])
    seconds = by_bytes[n_bytes]
    latency_s = max(float(alone["latency_s"]["value"]), typical(seconds) - n_bytes / rate)
    note = f"what copies of {n_bytes} bytes take in runs beyond their bytes"
    return {**alone, "latency_s": {**figure(seconds, note), "value": latency_s}}


def link(by_bytes: Copies) -> dict[str, Any] | None:
    """Latency and bandwidth through the smallest and the largest copies; None with one size alone.

    Where a busy machine made small copies take as long as large ones, the two are not told apart: then the bandwidth is
    what the largest copies had, latency included, which the link has at least.
    """
    sizes = sorted(n for n, seconds in by_bytes.items() if len(seconds) >= 3)
    if len(sizes) < 2 or sizes[-1] < 256 * sizes[0]:
        return None
    small, large = (summarise(by_bytes[n]) for n in (sizes[0], sizes[-1]))
    small_s, large_s = (typical(by_bytes[n]) for n in (sizes[0], sizes[-1]))
    note = f"whole experts and {sizes[0]} bytes of hidden state, on the real machine's copy lane"
    if large_s - small_s > max(small.iqr, large.iqr):
        rate = (sizes[-1] - sizes[0]) / (large_s - small_s)
    else:
        rate = sizes[-1] / large_s
        note = f"not told apart from the time of {sizes[-1]} bytes; calibrate again on an idle machine"
    latency_s = max(0.0, large_s - sizes[-1] / rate)
    return {
        "latency_s": measured(latency_s, small.iqr, small.n, note, "lanes"),
        "bandwidth_bytes_per_s": measured(rate, rate * large.noise_frac, large.n, ref="lanes"),
    }


def _both_ways(samples: Samples) -> dict[str, Any]:
    """What copies up and write-backs cost each other; empty where swaps were not seen."""
    sizes, ratio = [n for n, seconds in samples.copies.items() if len(seconds) >= 3], duplex.ratio_down(samples.alone)
    if not sizes or ratio is None:
        return {}
    up_s = typical(samples.copies[max(sizes)])
    found = {
        "h2d_slowdown_by_d2h": duplex.slowdown(samples.swaps.get("up", []), up_s),
        "d2h_slowdown_by_h2d": duplex.slowdown(samples.swaps.get("down", []), ratio * up_s),
    }
    experts = [seconds for pairs in samples.overlap.values() for _, seconds in pairs]
    if experts and on_threads(samples):  # on a GPU most of them is launching
        found["gpu_slowdown_by_d2h"] = duplex.slowdown(samples.swaps.get("expert", []), typical(experts))
    return {name: term for name, term in found.items() if term is not None}


def _links_of_threads(
    copies: Copies, sends: Copies, alone: Mapping[str, list[float]], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Links of the CPU backend, page-locked or not: both ways are copies through one memory."""
    up, down = link(copies), link(sends)
    found = {} if up is None else {"h2d": up, "h2d_pageable": up}
    if down is None and sends:
        rate = (up or data["d2h"])["bandwidth_bytes_per_s"]
        bandwidth = duplex.rate_down(alone, rate) or assumed(rate["value"], "as to the device; only tokens came back")
        down = {"latency_s": figure(sends[min(sends)]), "bandwidth_bytes_per_s": bandwidth}
    return found if down is None else {**found, "d2h": down, "d2h_pageable": down}


def _links_of_a_gpu(copies: Copies, sends: Copies, data: Mapping[str, Any]) -> dict[str, Any]:
    """Page-locked links as they are alone, with what runs add; pageable copies are another matter, measured alone."""
    up = beside_bytes(copies, data["h2d"])
    found = {} if up is None else {"h2d": up}
    return {**found, "d2h": {**data["d2h"], "latency_s": figure(sends[min(sends)])}} if sends else found


def judged(node: Any) -> Any:
    """The same data, in which what was measured on the lanes is assumed where its samples are too bad to call it
    measured. They are means of many, so that no range follows from their scatter where it is not as bad as that."""
    if not isinstance(node, dict):
        return node
    if node.get("ref") != "lanes" or node.get("iqr") is None:
        return {name: child if name == "policy_slowdown" else judged(child) for name, child in node.items()}
    return doubted(node, "lanes")


def apply(data: dict[str, Any], samples: Samples, name: str, others: Sequence[Samples] = ()) -> dict[str, Any]:
    """A profile's plain data with what was measured on the real machine's lanes in place of what was measured alone.

    `others` are samples of further models: they give curves of their own, and sizes of copies.

    Raises:
        BadInput: samples of a run in which the host never waited.
    """
    waits = [samples.verbs.get(verb, {}) for verb in ("sync", "before sync")]
    if not all(any(runs.values()) for runs in waits):
        raise BadInput(f"{name}.lanes.json.gz: no samples of the host's waiting; calibrate again")
    syncs, before = map(of_runs, waits)
    every = (*others, samples)  # where two measured one size, the first model's samples count
    copies = {n: seconds for one in every for n, seconds in one.copies.items()}
    sends = {n: seconds for one in every for n, seconds in one.sends.items()}
    on_cpu = on_threads(samples)
    links = _links_of_threads(copies, sends, samples.alone, data) if on_cpu else _links_of_a_gpu(copies, sends, data)
    ranges = dict(data.get("ranges", {}))
    if "h2d" in links:
        sizes = [float(n) for one in every for n, seconds in one.copies.items() if len(seconds) >= 3]
        sizes += [] if on_cpu else map(float, ranges.get("copy_bytes", ()))  # a GPU's bandwidth is that of all of these
        ranges["copy_bytes"] = [min(sizes), max(sizes)]
    data = {**data, **links, "curves": curves(samples)}
    if others:
        data["more_curves"] = [curves(s) for s in others]
    host = {**data["host"], "sync_s": {**syncs, "value": syncs["value"] + before["value"]}}
    if any((launched := samples.verbs.get("launch copy", {})).values()):
        host["copy_launch_s"] = of_runs(launched)
    # Slow-downs by copies are inside the medians above; counting them again would bill them twice.
    none = measured(0.0, note="inside the curves, measured beside copies", ref="lanes")
    machine = samples.environment["machine"]
    lanes = (
        f"{name}.lanes.json.gz ({machine['cpu']}, {samples.environment['cores']} cores, torch "
        f"{machine['versions']['torch']}, {samples.environment['measured']}, load "
        f"{', '.join(f'{x:.1f}' for x in samples.environment['load'])})"
    )
    if on_cpu:
        note = "the arena that stands for device memory lies in host memory"
        data["vram_bytes"] = measured(machine["memory_bytes"], note=note, ref="lanes")
    within = WITHIN if on_cpu else ("cpu_slowdown_by_h2d",)
    terms = {**({} if on_cpu else data.get("contention", {})), **dict.fromkeys(within, none), **_both_ways(samples)}
    data = {**data, "host": host, "ranges": ranges, "sources": {**data["sources"], "lanes": lanes}}
    return {**judged(data), "contention": terms}  # a slow-down is near zero where there is none, whatever it scatters
