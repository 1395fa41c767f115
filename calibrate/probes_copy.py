"""Copies between host and device: sizes, queues, chunks, both directions; and anchors of the device's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, EnqueueClock, HostClock, LaneClock, OverlapClock
from calibrate.geometry import copy_sizes
from calibrate.stats import Effort
from calibrate.tensors import random_tensor

MIB = 1024 * 1024


def anchors(bench: Bench) -> Iterator[Point]:
    """Device memory bandwidth (a large device-to-device copy: read and write both count) and the matmul rate."""
    device = bench.device
    torch = device.torch
    n_bytes = min(1 << 30, bench.max_copy_bytes, bench.device_bytes // 8)

    def copy() -> tuple[Call, Clock]:
        source, target = (random_tensor(device, (n_bytes,), "uint8") for _ in range(2))
        return lambda: target.copy_(source), LaneClock(device, bench.compute)

    yield Point({"what": "device_copy", "n_bytes": n_bytes}, copy, Effort(max_s=1.0))
    for size in bench.matmul_sizes:

        def matmul(size: int = size) -> tuple[Call, Clock]:
            a, b = (random_tensor(device, (size, size), bench.dtype) for _ in range(2))
            out = torch.empty_like(a)
            return lambda: torch.matmul(a, b, out=out), LaneClock(device, bench.compute)

        # Long blocks: the clock must have ramped, and a chip at its power limit must show it.
        yield Point({"what": "matmul", "size": size}, matmul, Effort(min_block_s=2e-2, max_s=1.5))


def sizes(bench: Bench) -> Iterator[Point]:
    """One direction at a time, 64 KiB to 1 GiB: back to back (`queued`), one by one (`single`), and as waited for."""
    device = bench.device
    every = copy_sizes(bench.geometries, bench.max_copy_bytes)
    first = {every[0], every[len(every) // 2], every[-2]}  # enough for a fit when time is short
    grid = [
        (memory, direction, n_bytes, pattern)
        for memory, patterns in (("pinned", ("queued", "single", "wall")), ("pageable", ("wall",)))
        for direction in ("h2d", "d2h")
        for n_bytes in every
        for pattern in patterns
    ]
    bench.rng.shuffle(grid)
    # What the fits rest on comes first, the other ways of timing page-locked copies last; random within each.
    grid.sort(key=lambda g: (g[0] == "pinned" and g[3] != "queued", g[2] not in first))
    for memory, direction, n_bytes, pattern in grid:
        key: dict[str, str | int] = {"direction": direction, "memory": memory, "n_bytes": n_bytes, "pattern": pattern}

        def prepare(
            direction: str = direction, memory: str = memory, n_bytes: int = n_bytes, pattern: str = pattern
        ) -> tuple[Call, Clock]:
            call, lane = bench.copy_call(direction, memory, n_bytes), bench.lane(direction)
            if pattern == "wall":
                return lambda: lane.enqueue(call, 1), HostClock(device.settle, now=bench.now)
            return call, LaneClock(device, lane)

        # `single` asks for blocks of one copy; the event clock resolves 0.5 us, so it takes many samples instead.
        one = Effort(min_block_s=0.0, n_samples=30, max_s=0.5)
        yield Point(key, prepare, one if pattern != "queued" else Effort(min_block_s=2e-3, max_calls=256, max_s=0.5))
    bench.drop("pageable")


def shapes_of_copy(bench: Bench) -> Iterator[Point]:
    """A whole expert against the same bytes in matrices or chunks; queues on two streams; both directions at once."""
    device = bench.device
    for whole in sorted({g.expert.weight_bytes(2) for g in bench.geometries}):
        if whole > bench.max_copy_bytes:
            continue
        chunks = {"whole": whole, "matrices": whole // 3, "chunk_4m": 4 * MIB, "chunk_16m": 16 * MIB}
        for name, n_bytes in chunks.items():
            if n_bytes > whole:
                continue

            def split(n_bytes: int = n_bytes, n: int = -(-whole // n_bytes)) -> tuple[Call, Clock]:
                one = bench.copy_call("h2d", "pinned", n_bytes)

                def call() -> None:
                    for _ in range(n):
                        one()

                return call, LaneClock(device, bench.h2d)

            yield Point({"what": "chunks", "expert_bytes": whole, "chunk": name}, split, Effort(max_calls=8))
    for n_bytes in sorted({16 * MIB, *(g.expert.weight_bytes(2) for g in bench.geometries)}):
        for what, direction, other in (
            ("two_streams", "h2d", "h2d"),
            ("both_ways", "h2d", "d2h"),
            ("both_ways", "d2h", "h2d"),
        ):
            if n_bytes * 2 > bench.max_copy_bytes:
                continue
            clocks: list[OverlapClock] = []

            def both(
                direction: str = direction,
                other: str = other,
                n_bytes: int = n_bytes,
                clocks: list[OverlapClock] = clocks,
            ) -> tuple[Call, Clock]:
                call, background = (bench.copy_call(way, "pinned", n_bytes) for way in (direction, other))
                call_s = LaneClock(device, bench.lane(direction)).total_s(call, 4) / 4
                clock = OverlapClock(
                    device,
                    bench.lane(direction),
                    background,
                    bench.d2h if direction == "h2d" else bench.h2d,
                    call_s=call_s,
                    background_s=call_s,
                )
                clocks.append(clock)
                return call, clock

            yield Point(
                {"what": what, "direction": direction, "n_bytes": n_bytes},
                both,
                Effort(min_block_s=4e-3, max_calls=16),
                partial(_covered, clocks),
            )


def _covered(clocks: list[OverlapClock]) -> dict[str, list[float]]:
    return {"covered": clocks[-1].covered[-20:]}


def enqueue(bench: Bench) -> Iterator[Point]:
    """Host seconds to issue one asynchronous copy: small, middling and an expert."""
    device = bench.device
    for n_bytes in sorted({64 * 1024, MIB, 16 * MIB, *(g.expert.weight_bytes(2) for g in bench.geometries)}):
        if n_bytes > bench.max_copy_bytes:
            continue

        def prepare(n_bytes: int = n_bytes) -> tuple[Call, Clock]:
            return bench.copy_call("h2d", "pinned", n_bytes), EnqueueClock(device, bench.h2d, now=bench.now)

        yield Point(
            {"what": "copy_enqueue", "n_bytes": n_bytes}, prepare, Effort(min_block_s=1e-4, max_calls=16, n_samples=30)
        )
