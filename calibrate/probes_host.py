"""The host lane: what launching, recording, waiting and reading back cost the thread that drives the device."""

from __future__ import annotations

from collections.abc import Iterator

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, EnqueueClock, HostClock, LaneClock
from calibrate.ops import random_tensor, touched_buffer
from calibrate.stats import Effort

MANY = Effort(min_block_s=5e-4, max_calls=256, n_samples=40)
EACH = Effort(min_block_s=0.0, max_calls=1, n_samples=100, max_s=0.5)


def points(bench: Bench) -> Iterator[Point]:
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
