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
MATRICES = 3  # of an expert, each in a place of its own
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
    """CPU experts on all and on half of the cores, each beside large copies to the device, and the copies beside them;
    then, as an engine that shares a layer out has them, beside experts gathered from all over host memory."""
    device = bench.device
    torch = device.torch
    before = torch.get_num_threads()
    shape, dtype = bench.expert_shapes()[0], bench.cpu_dtypes[0]
    weights = host_experts(bench, shape, dtype)
    n_bytes = min(16 * MIB, bench.max_copy_bytes // 4)
    piece_bytes = min(shape.weight_bytes(BYTES[bench.dtype]) // MATRICES, n_bytes)
    linear = partial(bench.copy_call, "h2d", "pinned", n_bytes)
    gather = partial(bench.gather_call, MATRICES, piece_bytes)
    try:
        for n_threads in sorted({bench.threads[-1], max(1, bench.threads[-1] // 2)}, reverse=True):
            for n_tokens in [n for n in (1, 16) if n <= bench.max_tokens]:
                key: dict[str, str | int] = {"work": "cpu_expert", "n_tokens": n_tokens, "threads": n_threads}
                yield from _beside(bench, weights, linear, "h2d", key, {})
        yield _alone(bench, linear, {"what": "h2d_by_cpu"})
        key = {"work": "cpu_expert", "n_tokens": 1, "threads": bench.threads[-1]}
        moved = {"cpu_bytes": shape.weight_bytes(BYTES[dtype]), "copy_bytes": MATRICES * piece_bytes}
        yield from _beside(bench, weights, gather, "gather", key, moved)
        yield _alone(bench, gather, {"what": "gather_by_cpu", **moved})
    finally:
        torch.set_num_threads(before)


def _alone(bench: Bench, copies: Callable[[], Call], key: dict[str, str | int]) -> Point:
    """Copies with the CPU idle."""
    effort = Effort(min_block_s=2e-2, max_calls=256)
    return Point({**key, "state": "alone"}, lambda: (copies(), LaneClock(bench.device, bench.h2d)), effort)


def _beside(
    bench: Bench,
    weights: Experts,
    copies: Callable[[], Call],
    name: str,
    key: dict[str, str | int],
    moved: dict[str, str | int],
) -> Iterator[Point]:
    """Experts on the CPU alone, then while copies of that kind run; then those copies while experts run.

    Args:
        name: of the copies, in `what` of the points. moved: bytes that one call of each moves, added to their keys.
    """
    device, effort = bench.device, Effort(min_block_s=2e-2, max_s=1.2, n_samples=15)
    n_tokens, n_threads = int(key["n_tokens"]), int(key["threads"])
    clocks: list[BusyLaneClock] = []

    def alone() -> tuple[Call, Clock]:
        return host_call(bench, weights, n_tokens, n_threads)

    def cpu_beside() -> tuple[Call, Clock]:
        call, by_host = alone()
        by_host.total_s(call, 1)
        call_s = by_host.total_s(call, 2) / 2
        copy = copies()
        copy_s = LaneClock(device, bench.h2d).total_s(copy, 4) / 4
        clocks.append(BusyLaneClock(device, copy, bench.h2d, call_s=call_s, background_s=copy_s, now=bench.now))
        return call, clocks[-1]

    def copy_beside() -> tuple[Call, Clock]:
        return copies(), BusyHostClock(device, bench.h2d, alone()[0])

    yield Point({"what": f"cpu_by_{name}", **key, **moved, "state": "alone"}, alone, effort)
    yield Point(
        {"what": f"cpu_by_{name}", **key, **moved, "state": "both"},
        cpu_beside,
        effort,
        lambda: {"covered": clocks[-1].covered[-15:]},
    )
    # Long blocks: the CPU expert in flight when the last copy ends must be a small part of the overlap.
    long = Effort(min_block_s=6e-2, max_s=1.2, n_samples=12, max_calls=256)
    yield Point({"what": f"{name}_by_cpu", **key, **moved, "state": "both"}, copy_beside, long)
