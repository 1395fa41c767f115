"""What happens when two things run at once: copies beside device compute, copies beside experts on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from calibrate.bench import Bench, Point
from calibrate.clock import BusyHostClock, BusyLaneClock, Call, Clock, LaneClock, OverlapClock
from calibrate.ops import BYTES, Attention, Experts, rotations
from calibrate.probes_cpu import host_call, host_experts
from calibrate.stats import Effort
from calibrate.tensors import random_tensor
from sim.real.devices.protocol import Stream

MIB = 1024 * 1024
LONG = Effort(min_block_s=8e-3, max_calls=48, max_s=0.6)


def points(bench: Bench) -> Iterator[Point]:
    """Device compute against copies, then CPU experts against copies; each `alone` sits beside its `both`."""
    yield from _device(bench)
    yield from _host(bench)


def _pair(
    bench: Bench,
    key: dict[str, str | int],
    lane: Stream,
    call: Callable[[], Call],
    other_lane: Stream,
    other: Callable[[], Call],
    effort: Effort = LONG,
) -> Iterator[Point]:
    """`call` alone, then `call` while `other` runs on its own lane."""
    device = bench.device
    yield Point({**key, "state": "alone"}, lambda: (call(), LaneClock(device, lane)), effort)
    clocks: list[OverlapClock] = []

    def both() -> tuple[Call, Clock]:
        measured, background = call(), other()
        each_s = []
        for one, on in ((measured, lane), (background, other_lane)):
            clock = LaneClock(device, on)
            clock.total_s(one, 4)
            each_s.append(clock.total_s(one, 8) / 8)
        clocks.append(OverlapClock(device, lane, background, other_lane, call_s=each_s[0], background_s=each_s[1]))
        return measured, clocks[-1]

    yield Point({**key, "state": "both"}, both, effort, lambda: {"covered": clocks[-1].covered[-effort.n_samples :]})


def _device(bench: Bench) -> Iterator[Point]:
    device = bench.device
    shape = bench.expert_shapes()[0]
    n = rotations(shape.weight_bytes(BYTES[bench.dtype]), device.facts.l2_bytes)
    weights = Experts(shape, bench.dtype, n, partial(random_tensor, device))
    n_bytes = min(16 * MIB, bench.max_copy_bytes // 4)

    def expert(n_tokens: int) -> Call:
        return weights.call(device.torch, random_tensor(device, (n_tokens, shape.hidden), bench.dtype), "plain")

    for direction in ("h2d", "d2h"):
        for n_tokens in [n for n in (1, 64, 512) if n <= bench.max_tokens][: 3 if direction == "h2d" else 1]:
            yield from _pair(
                bench,
                {"what": f"gpu_by_{direction}", "work": "expert", "n_tokens": n_tokens},
                bench.compute,
                lambda n=n_tokens: expert(n),  # type: ignore[misc]
                bench.lane(direction),
                lambda way=direction: bench.copy_call(way, "pinned", n_bytes),  # type: ignore[misc]
            )
    context = min(8192, bench.max_context)
    block = Attention(device, bench.geometries[0].attention, bench.dtype)
    yield from _pair(
        bench,
        {"what": "gpu_by_h2d", "work": "attention", "n_tokens": 1},
        bench.compute,
        lambda: block.call(1, 1, context),
        bench.h2d,
        lambda: bench.copy_call("h2d", "pinned", n_bytes),
        Effort(min_block_s=2e-3, max_calls=16),
    )
    for n_tokens in [n for n in (1, 512) if n <= bench.max_tokens]:
        yield from _pair(
            bench,
            {"what": "h2d_by_gpu", "work": "expert", "n_tokens": n_tokens},
            bench.h2d,
            lambda: bench.copy_call("h2d", "pinned", n_bytes),
            bench.compute,
            lambda n=n_tokens: expert(n),  # type: ignore[misc]
            Effort(min_block_s=3e-3, max_calls=16),
        )


def _host(bench: Bench) -> Iterator[Point]:
    """CPU experts on all and on half of the cores, each beside host-to-device copies, and the copies beside them."""
    device = bench.device
    torch = device.torch
    before = torch.get_num_threads()
    shape, dtype = bench.expert_shapes()[0], bench.cpu_dtypes[0]
    weights = host_experts(bench, shape, dtype)
    n_bytes = min(16 * MIB, bench.max_copy_bytes // 4)
    effort = Effort(min_block_s=2e-2, max_s=1.2, n_samples=15)
    try:
        for n_threads in sorted({bench.threads[-1], max(1, bench.threads[-1] // 2)}, reverse=True):
            for n_tokens in [n for n in (1, 16) if n <= bench.max_tokens]:
                key = {"work": "cpu_expert", "n_tokens": n_tokens, "threads": n_threads}

                def alone(n_tokens: int = n_tokens, n_threads: int = n_threads) -> tuple[Call, Clock]:
                    return host_call(bench, weights, n_tokens, n_threads)

                clocks: list[BusyLaneClock] = []

                def cpu_beside(
                    alone: Callable[[], tuple[Call, Clock]] = alone, clocks: list[BusyLaneClock] = clocks
                ) -> tuple[Call, Clock]:
                    call, by_host = alone()
                    by_host.total_s(call, 1)
                    call_s = by_host.total_s(call, 2) / 2
                    copy = bench.copy_call("h2d", "pinned", n_bytes)
                    copy_s = LaneClock(device, bench.h2d).total_s(copy, 4) / 4
                    clock = BusyLaneClock(device, copy, bench.h2d, call_s=call_s, background_s=copy_s, now=bench.now)
                    clocks.append(clock)
                    return call, clock

                def copy_beside(alone: Callable[[], tuple[Call, Clock]] = alone) -> tuple[Call, Clock]:
                    return bench.copy_call("h2d", "pinned", n_bytes), BusyHostClock(device, bench.h2d, alone()[0])

                yield Point({"what": "cpu_by_h2d", **key, "state": "alone"}, alone, effort)
                yield Point(
                    {"what": "cpu_by_h2d", **key, "state": "both"},
                    cpu_beside,
                    effort,
                    lambda clocks=clocks: {"covered": clocks[-1].covered[-15:]},  # type: ignore[misc]
                )
                # Long blocks: the CPU expert in flight when the last copy ends must be a small part of the overlap.
                yield Point(
                    {"what": "h2d_by_cpu", **key, "state": "both"},
                    copy_beside,
                    Effort(min_block_s=6e-2, max_s=1.2, n_samples=12, max_calls=256),
                )
        yield Point(
            {"what": "h2d_by_cpu", "state": "alone"},
            lambda: (bench.copy_call("h2d", "pinned", n_bytes), LaneClock(device, bench.h2d)),
            Effort(min_block_s=2e-2, max_calls=256),
        )
    finally:
        torch.set_num_threads(before)
