"""Clocks that time blocks of calls. A clock is an argument of every measurement, so tests pass a fake one.

Device work is timed by marks on its own lane (CUDA events); what a user waits for is timed on the host around a
synchronise; the cost of launching is timed on the host without one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sim.real.devices.protocol import Device, Stream

Call = Callable[[], object]

MAX_SPIN_S = 0.03
"""Longest time a lane is held while a block is enqueued behind it."""
MOST_BACKGROUND = 96  # calls beside a block


class Clock(Protocol):
    """Times `n` calls; `name` says what the figure means: `device`, `wall`, `enqueue`, `overlap` or `busy_host`."""

    name: str

    def total_s(self, call: Call, n: int) -> float:
        """Seconds that `n` calls take."""
        ...


@dataclass
class HostClock:
    """The host's own time. `each` synchronises after every call (what a user waits for); without it only once."""

    settle: Call
    each: bool = True
    now: Callable[[], float] = time.perf_counter
    name: str = "wall"

    def total_s(self, call: Call, n: int) -> float:
        """Host seconds for `n` calls, the closing synchronise included."""
        self.settle()
        start_s = self.now()
        for _ in range(n):
            call()
            if self.each:
                self.settle()
        if not self.each:
            self.settle()
        return self.now() - start_s


@dataclass
class EnqueueClock:
    """Host seconds to issue calls, the device's work left out: the host lane's bill."""

    device: Device
    lane: Stream
    now: Callable[[], float] = time.perf_counter
    name: str = "enqueue"

    def total_s(self, call: Call, n: int) -> float:
        """Seconds from the first call to the last one's return, starting on an idle device."""
        device = self.device
        device.settle()
        if device.facts.kind == "cuda":
            enqueue_s = self.lane.enqueue(call, n)
        else:  # a thread lane takes whole blocks; one job per call is what a launch costs there
            start_s = self.now()
            for _ in range(n):
                self.lane.enqueue(call, 1)
            enqueue_s = self.now() - start_s
        device.settle()
        return enqueue_s


@dataclass
class LaneClock:
    """Device seconds between two marks on a lane. The lane is held while the block is enqueued, so that gaps left by a
    slow host are not billed to the device; the host's time goes to `enqueue_s` (seconds per call, one per block).
    """

    device: Device
    lane: Stream
    enqueue_s: list[float] = field(default_factory=list)
    name: str = "device"

    def total_s(self, call: Call, n: int) -> float:
        """Seconds the lane was busy with `n` calls."""
        device, lane = self.device, self.lane
        device.settle()
        # Until a block has been timed nobody knows how long enqueuing takes; 100 us a call covers a cold first one.
        expected_s = n * (min(self.enqueue_s[-3:]) if self.enqueue_s else 1e-4)
        lane.hold(min(MAX_SPIN_S, 2e-5 + 1.5 * expected_s))
        start = lane.mark()
        self.enqueue_s.append(lane.enqueue(call, n) / n)
        end = lane.mark()
        device.settle()
        return device.elapsed_s(start, end)


@dataclass
class OverlapClock:
    """Device seconds of a block while `background` keeps another lane busy from its start to its end.

    `call_s`, `background_s`: seconds of one call of each, alone; they decide how many are enqueued. `covered` collects,
    per block, how much of the measured time the background really lasted (1 or more: all of it).
    """

    device: Device
    lane: Stream
    background: Call
    background_lane: Stream
    call_s: float
    background_s: float
    covered: list[float] = field(default_factory=list)
    name: str = "overlap"

    def total_s(self, call: Call, n: int) -> float:
        """Seconds of `n` calls on the measured lane."""
        device = self.device
        n_background = math.ceil(2.0 * n * self.call_s / self.background_s) + 1
        n_background = min(MOST_BACKGROUND, n_background)
        device.settle()
        # Both lanes start together, after everything is enqueued: the background's lane is held and the other waits.
        self.background_lane.hold(min(MAX_SPIN_S, 1e-3 + 1e-4 * (n_background + n)))
        gate = self.background_lane.mark()
        self.lane.wait(gate)
        start = self.lane.mark()
        self.background_lane.enqueue(self.background, n_background)
        background_end = self.background_lane.mark()
        self.lane.enqueue(call, n)
        end = self.lane.mark()
        device.settle()
        total_s = device.elapsed_s(start, end)
        self.covered.append(device.elapsed_s(start, background_end) / max(total_s, 1e-12))
        return total_s


@dataclass
class BusyHostClock:
    """Device seconds of a block while the calling thread keeps running `busy` (experts on the CPU) until it ends."""

    device: Device
    lane: Stream
    busy: Call
    name: str = "busy_host"

    def total_s(self, call: Call, n: int) -> float:
        """Seconds of `n` calls on the lane."""
        device = self.device
        device.settle()
        start = self.lane.mark()
        self.lane.enqueue(call, n)
        end = self.lane.mark()
        self.busy()
        while not end.query():
            self.busy()
        device.settle()
        return device.elapsed_s(start, end)


@dataclass
class BusyLaneClock:
    """Host seconds of calls made on this thread while `background` copies occupy a lane; each block queues enough."""

    device: Device
    background: Call
    lane: Stream
    call_s: float
    background_s: float
    now: Callable[[], float] = time.perf_counter
    covered: list[float] = field(default_factory=list)
    name: str = "busy_lane"

    def total_s(self, call: Call, n: int) -> float:
        """Host seconds of `n` calls."""
        device = self.device
        device.settle()
        n_background = min(512, math.ceil(1.6 * n * self.call_s / self.background_s) + 2)
        self.lane.enqueue(self.background, n_background)
        end = self.lane.mark()
        start_s = self.now()
        for _ in range(n):
            call()
        total_s = self.now() - start_s
        # The exact overhang is unknowable from the host without a stall; whether it lasted is what matters.
        self.covered.append(0.0 if end.query() else 1.0)
        device.settle()
        return total_s
