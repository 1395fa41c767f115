"""What the host that drives the device pays for launches, waits and reads; copies between the two by size, in queues,
chunks and both directions; and anchors of the device's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, EnqueueClock, HostClock, LaneClock, OverlapClock
from calibrate.ops import copy_sizes, random_tensor, touched_buffer
from calibrate.stats import Effort
from calibrate.store import Key

MANY = Effort(min_block_s=5e-4, max_calls=256, n_samples=40)
EACH = Effort(min_block_s=0.0, max_calls=1, n_samples=100, max_s=0.5)
MIB = 1024 * 1024
# `single` asks for blocks of one copy; the event clock resolves 0.5 us, so it takes many samples instead.
SINGLE = Effort(min_block_s=0.0, n_samples=30, max_s=0.5)
QUEUED = Effort(min_block_s=2e-3, max_calls=256, max_s=0.5)
# Long blocks: the clock must have ramped, and a chip at its power limit must show it.
MATMUL = Effort(min_block_s=2e-2, max_s=1.5)


def host(bench: Bench) -> Iterator[Point]:
    """Launch, sustained launch, kernel floor, synchronise, read back, marks, waits, changing lanes."""
    device = bench.device
    torch, lane = device.torch, bench.compute
    tiny = random_tensor(device, (1, 8), "float32")
    ids = torch.zeros((1, 8), dtype=torch.int64, device=tiny.device)
    pinned = touched_buffer(device, 64, pinned=True).view(torch.int64).view(1, 8)

    def kernel() -> object:
        return tiny.add_(1.0)

    def enqueued(call: Call) -> tuple[Call, Clock]:
        return call, EnqueueClock(device, lane, now=bench.now)

    def on_host(call: Call, *, settle: Call = lambda: None, each: bool = False) -> tuple[Call, Clock]:
        return call, HostClock(settle, each=each, now=bench.now)

    def run(call: Call) -> Call:
        """On this thread with CUDA; on the lane's own thread, waited for, with the CPU backend."""

        def inner() -> None:
            lane.enqueue(call, 1)
            lane.synchronize()

        return inner

    yield Point({"what": "launch"}, lambda: enqueued(kernel), MANY)
    yield Point(
        {"what": "launch_sustained"},
        lambda: on_host(lambda: lane.enqueue(kernel, 2000), settle=device.settle, each=True),
        Effort(min_block_s=0.0, max_calls=1, n_samples=10),
        lambda: {"kernels": 2000},
    )
    yield Point(
        {"what": "kernel_floor"}, lambda: (kernel, LaneClock(device, lane)), Effort(min_block_s=1e-3, max_calls=256)
    )
    yield Point({"what": "lane_switch"}, lambda: on_host(lambda: lane.enqueue(lambda: None, 1)), MANY)
    yield Point({"what": "sync_idle"}, lambda: on_host(lane.synchronize), MANY)
    yield Point({"what": "sync_kernel"}, lambda: on_host(run(kernel)), EACH)
    yield Point({"what": "readback"}, lambda: on_host(run(ids.tolist)), EACH)
    yield Point({"what": "readback_pinned"}, lambda: on_host(run(lambda: pinned.copy_(ids, non_blocking=True))), EACH)
    yield Point({"what": "mark"}, lambda: on_host(lane.mark), MANY)
    mark = lane.mark()
    device.settle()
    yield Point({"what": "wait"}, lambda: on_host(lambda: lane.wait(mark)), MANY)
    yield Point({"what": "query"}, lambda: on_host(mark.query), MANY)
    if device.facts.kind == "cuda":  # on the CPU a lane's job cannot enqueue behind itself
        yield Point(
            {"what": "handoff"},
            lambda: (_ping_pong(bench, kernel), LaneClock(device, lane)),
            Effort(max_calls=32),
            lambda: {"handoffs": 2, "kernels": 2},
        )


def _ping_pong(bench: Bench, kernel: Call) -> Call:
    """A kernel on the compute lane, one on a copy lane after it, and back: two waits across lanes and two kernels."""

    def call() -> None:
        kernel()
        bench.h2d.wait(bench.compute.mark())
        bench.h2d.enqueue(kernel, 1)
        bench.compute.wait(bench.h2d.mark())

    return call


def anchors(bench: Bench) -> Iterator[Point]:
    """Device memory bandwidth (a large device-to-device copy: read and write both count) and the matmul rate."""
    n_bytes = min(1 << 30, bench.max_copy_bytes, bench.device_bytes // 8)
    yield Point({"what": "device_copy", "n_bytes": n_bytes}, partial(_device_copy, bench, n_bytes), Effort(max_s=1.0))
    for size in bench.matmul_sizes:
        yield Point({"what": "matmul", "size": size}, partial(_matmul, bench, size), MATMUL)


def _device_copy(bench: Bench, n_bytes: int) -> tuple[Call, Clock]:
    source, target = (random_tensor(bench.device, (n_bytes,), "uint8") for _ in range(2))
    return lambda: target.copy_(source), LaneClock(bench.device, bench.compute)


def _matmul(bench: Bench, size: int) -> tuple[Call, Clock]:
    device = bench.device
    a, b = (random_tensor(device, (size, size), bench.dtype) for _ in range(2))
    out = device.torch.empty_like(a)
    return lambda: device.torch.matmul(a, b, out=out), LaneClock(device, bench.compute)


def sizes(bench: Bench) -> Iterator[Point]:
    """One direction at a time, 64 KiB to 1 GiB: back to back (`queued`), one by one (`single`), and as waited for."""
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
        key: Key = {"direction": direction, "memory": memory, "n_bytes": n_bytes, "pattern": pattern}
        prepare = partial(_copy, bench, direction, memory, n_bytes, pattern)
        yield Point(key, prepare, SINGLE if pattern != "queued" else QUEUED)
    bench.drop("pageable")


def _copy(bench: Bench, direction: str, memory: str, n_bytes: int, pattern: str) -> tuple[Call, Clock]:
    device, lane = bench.device, bench.lane(direction)
    call = bench.copy_call(direction, memory, n_bytes)
    if pattern == "wall":
        return lambda: lane.enqueue(call, 1), HostClock(device.settle, now=bench.now)
    return call, LaneClock(device, lane)


def shapes_of_copy(bench: Bench) -> Iterator[Point]:
    """A whole expert against the same bytes in matrices or chunks; queues on two streams; both directions at once."""
    most, experts = bench.max_copy_bytes, {g.expert.weight_bytes(2) for g in bench.geometries}
    for whole in sorted(n for n in experts if n <= most):
        chunks = {"whole": whole, "matrices": whole // 3, "chunk_4m": 4 * MIB, "chunk_16m": 16 * MIB}
        for name, n_bytes in chunks.items():
            if n_bytes <= whole:
                key: Key = {"what": "chunks", "expert_bytes": whole, "chunk": name}
                yield Point(key, partial(_chunks, bench, n_bytes, -(-whole // n_bytes)), Effort(max_calls=8))
    for n_bytes in sorted(n for n in {16 * MIB, *experts} if 2 * n <= most):
        for what, direction, other in (
            ("two_streams", "h2d", "h2d"),
            ("both_ways", "h2d", "d2h"),
            ("both_ways", "d2h", "h2d"),
        ):
            key = {"what": what, "direction": direction, "n_bytes": n_bytes}
            prepare = partial(_both, bench, direction, other, n_bytes)
            yield Point(key, prepare, Effort(min_block_s=4e-3, max_calls=16))


def _chunks(bench: Bench, n_bytes: int, n: int) -> tuple[Call, Clock]:
    one = bench.copy_call("h2d", "pinned", n_bytes)

    def call() -> None:
        for _ in range(n):
            one()

    return call, LaneClock(bench.device, bench.h2d)


def _both(bench: Bench, direction: str, other: str, n_bytes: int) -> tuple[Call, Clock]:
    device, lane = bench.device, bench.lane(direction)
    call, background = (bench.copy_call(way, "pinned", n_bytes) for way in (direction, other))
    call_s = LaneClock(device, lane).total_s(call, 4) / 4
    beside = bench.d2h if direction == "h2d" else bench.h2d
    return call, OverlapClock(device, lane, background, beside, call_s=call_s, background_s=call_s)


def enqueue(bench: Bench) -> Iterator[Point]:
    """Host seconds to issue one asynchronous copy: small, middling and an expert."""
    experts = (g.expert.weight_bytes(2) for g in bench.geometries)
    effort = Effort(min_block_s=1e-4, max_calls=16, n_samples=30)
    for n_bytes in sorted(n for n in {64 * 1024, MIB, 16 * MIB, *experts} if n <= bench.max_copy_bytes):
        yield Point({"what": "copy_enqueue", "n_bytes": n_bytes}, partial(_issue, bench, n_bytes), effort)


def _issue(bench: Bench, n_bytes: int) -> tuple[Call, Clock]:
    return bench.copy_call("h2d", "pinned", n_bytes), EnqueueClock(bench.device, bench.h2d, now=bench.now)
