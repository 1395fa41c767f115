"""What happens when two things run at once: copies beside device compute, copies beside experts on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from calibrate.bench import Bench, Point
from calibrate.clock import BusyHostClock, BusyLaneClock, Call, Clock, LaneClock, OverlapClock
from calibrate.ops import BYTES, Attention, Experts, random_tensor
from calibrate.probes_compute import host_call, host_experts, on_device
from calibrate.stats import Effort
from sim.real.devices.protocol import Stream

MIB = 1024 * 1024
MATRICES = 3  # of an expert, each in a place of its own
LONG = Effort(min_block_s=8e-3, max_calls=48, max_s=0.6)
On = tuple[Stream, Callable[[], Call]]
"""A lane, and what makes the call that runs on it."""


def points(bench: Bench) -> Iterator[Point]:
    """Device compute against copies, then CPU experts against copies; each `alone` sits beside its `both`."""
    yield from _device(bench)
    yield from _host(bench)


def _alone(bench: Bench, one: On) -> tuple[Call, Clock]:
    lane, make = one
    return make(), LaneClock(bench.device, lane)


def _beside(bench: Bench, one: On, other: On) -> tuple[Call, Clock]:
    device, each_s = bench.device, []
    calls = [make() for _, make in (one, other)]
    for (lane, _), call in zip((one, other), calls, strict=True):
        clock = LaneClock(device, lane)
        clock.total_s(call, 4)
        each_s.append(clock.total_s(call, 8) / 8)
    return calls[0], OverlapClock(device, one[0], calls[1], other[0], call_s=each_s[0], background_s=each_s[1])


def _pair(bench: Bench, key: dict[str, str | int], one: On, other: On, effort: Effort = LONG) -> Iterator[Point]:
    """The first alone, then while the other runs on its own lane."""
    yield Point({**key, "state": "alone"}, partial(_alone, bench, one), effort)
    yield Point({**key, "state": "both"}, partial(_beside, bench, one, other), effort)


def _device(bench: Bench) -> Iterator[Point]:
    device = bench.device
    shape = bench.expert_shapes()[0]
    weights = on_device(bench, shape)
    n_bytes = min(16 * MIB, bench.max_copy_bytes // 4)

    def expert(n_tokens: int) -> Call:
        return weights.call(device.torch, random_tensor(device, (n_tokens, shape.hidden), bench.dtype), "plain")

    def copies(direction: str) -> On:
        return bench.lane(direction), partial(bench.copy_call, direction, "pinned", n_bytes)

    for direction in ("h2d", "d2h"):
        for n_tokens in [n for n in (1, 64, 512) if n <= bench.max_tokens][: 3 if direction == "h2d" else 1]:
            key: dict[str, str | int] = {"what": f"gpu_by_{direction}", "work": "expert", "n_tokens": n_tokens}
            yield from _pair(bench, key, (bench.compute, partial(expert, n_tokens)), copies(direction))
    block = Attention(device, bench.geometries[0].attention, bench.dtype)
    decode = bench.compute, partial(block.call, 1, 1, min(8192, bench.max_context))
    key = {"what": "gpu_by_h2d", "work": "attention", "n_tokens": 1}
    yield from _pair(bench, key, decode, copies("h2d"), Effort(min_block_s=2e-3, max_calls=16))
    for n_tokens in [n for n in (1, 512) if n <= bench.max_tokens]:
        key = {"what": "h2d_by_gpu", "work": "expert", "n_tokens": n_tokens}
        beside = bench.compute, partial(expert, n_tokens)
        yield from _pair(bench, key, copies("h2d"), beside, Effort(min_block_s=3e-3, max_calls=16))


def _host(bench: Bench) -> Iterator[Point]:
    """CPU experts on all and on half of the cores, each beside large copies to the device, and the copies beside them;
    then, as an engine that shares a layer out has them, beside experts gathered from all over host memory."""
    torch = bench.device.torch
    before = torch.get_num_threads()
    shape, dtype = bench.expert_shapes()[0], bench.cpu_dtypes[0]
    weights = cache(partial(host_experts, bench, shape, dtype))
    n_bytes = min(16 * MIB, bench.max_copy_bytes // 4)
    piece_bytes = min(shape.weight_bytes(BYTES[bench.dtype]) // MATRICES, n_bytes)
    linear = partial(bench.copy_call, "h2d", "pinned", n_bytes)
    gather = partial(bench.gather_call, MATRICES, piece_bytes)
    alone = Effort(min_block_s=2e-2, max_calls=256)
    try:
        for n_threads in sorted({bench.threads[-1], max(1, bench.threads[-1] // 2)}, reverse=True):
            for n_tokens in [n for n in (1, 16) if n <= bench.max_tokens]:
                key: dict[str, str | int] = {"work": "cpu_expert", "n_tokens": n_tokens, "threads": n_threads}
                yield from _on_both(bench, weights, linear, "h2d", key)
        yield Point({"what": "h2d_by_cpu", "state": "alone"}, partial(_alone, bench, (bench.h2d, linear)), alone)
        moved = {"cpu_bytes": shape.weight_bytes(BYTES[dtype]), "copy_bytes": MATRICES * piece_bytes}
        key = {"work": "cpu_expert", "n_tokens": 1, "threads": bench.threads[-1], **moved}
        yield from _on_both(bench, weights, gather, "gather", key)
        key = {"what": "gather_by_cpu", **moved, "state": "alone"}
        yield Point(key, partial(_alone, bench, (bench.h2d, gather)), alone)
    finally:
        torch.set_num_threads(before)


def _on_both(
    bench: Bench, weights: Callable[[], Experts], copies: Callable[[], Call], name: str, key: dict[str, str | int]
) -> Iterator[Point]:
    """Experts on the CPU alone, then while copies of that kind run; then those copies while experts run.

    Args:
        name: of the copies, in `what` of the points.
    """
    effort = Effort(min_block_s=2e-2, max_s=1.2, n_samples=15)
    on_cpu = partial(host_call, bench, weights, int(key["n_tokens"]), int(key["threads"]))
    yield Point({"what": f"cpu_by_{name}", **key, "state": "alone"}, on_cpu, effort)
    beside = partial(_cpu_beside, bench, on_cpu, copies)
    yield Point({"what": f"cpu_by_{name}", **key, "state": "both"}, beside, effort)
    # Long blocks: the CPU expert in flight when the last copy ends must be a small part of the overlap.
    long = Effort(min_block_s=6e-2, max_s=1.2, n_samples=12, max_calls=256)
    yield Point({"what": f"{name}_by_cpu", **key, "state": "both"}, partial(_copy_beside, bench, on_cpu, copies), long)


def _cpu_beside(
    bench: Bench, on_cpu: Callable[[], tuple[Call, Clock]], copies: Callable[[], Call]
) -> tuple[Call, Clock]:
    call, by_host = on_cpu()
    by_host.total_s(call, 1)
    call_s = by_host.total_s(call, 2) / 2
    copy = copies()
    copy_s = LaneClock(bench.device, bench.h2d).total_s(copy, 4) / 4
    return call, BusyLaneClock(bench.device, copy, bench.h2d, call_s=call_s, background_s=copy_s, now=bench.now)


def _copy_beside(
    bench: Bench, on_cpu: Callable[[], tuple[Call, Clock]], copies: Callable[[], Call]
) -> tuple[Call, Clock]:
    return copies(), BusyHostClock(bench.device, bench.h2d, on_cpu()[0])
