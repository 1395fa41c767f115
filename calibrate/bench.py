"""What every probe shares: the device, the shapes, buffers on both sides of the link, and how a point is described."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibrate.clock import Call, Clock
from calibrate.ops import MeasuredGeometry, Tensor, random_tensor, touched_buffer
from calibrate.stats import DEFAULT, Effort
from sim.real.devices.protocol import Device, Stream
from sim.real.devices.work import COMPUTE, D2H, H2D

PINNED_ARENA_BYTES = 4 << 30
PAGEABLE_ARENA_BYTES = 2 << 30


@dataclass(frozen=True)
class Point:
    """One thing to measure: `prepare` builds buffers and returns the call and its clock; `extra` is read afterwards."""

    key: Mapping[str, str | int]
    prepare: Callable[[], tuple[Call, Clock]]
    effort: Effort = DEFAULT
    extra: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class Probe:
    """A group of points that share buffers; `share` is its part of the time budget, relative to the others."""

    name: str
    share: float
    points: Callable[[Bench], Iterator[Point]]


class Ring:
    """Slices of a buffer in turn, so that a copied block is not still in a cache from the last time; `scattered`: in an
    order that no prefetcher foresees."""

    def __init__(self, buffer: Tensor, n_bytes: int, scattered: bool = False) -> None:
        step = -(-n_bytes // 4096) * 4096  # so that every slice is page-aligned, as an allocator would hand it out
        places = [at * step for at in range((buffer.numel() - n_bytes) // step + 1)]
        if scattered:
            random.Random(0).shuffle(places)  # noqa: S311 - no secret
        self._slices = itertools.cycle(buffer[at : at + n_bytes] for at in (*places[scattered:], *places[:scattered]))

    def next(self) -> Tensor:
        return next(self._slices)


@dataclass
class Bench:
    """Everything probes draw on. `threads` are the CPU thread counts to try, the last one all physical cores."""

    device: Device
    geometries: Sequence[MeasuredGeometry]
    dtype: str
    cpu_dtypes: Sequence[str]
    threads: Sequence[int]
    llc_bytes: int
    host_bytes: int
    max_copy_bytes: int = 1 << 30  # largest copy worth timing
    device_bytes: int = 1 << 30  # of the device's memory, for probes
    max_tokens: int = 4096
    max_context: int = 32768
    matmul_sizes: Sequence[int] = (8192, 4096)  # of the anchor; the last also warms up
    now: Callable[[], float] = time.perf_counter
    rng: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 - order of points only
    _arenas: dict[str, Tensor] = field(default_factory=dict)

    def arena(self, kind: str) -> Tensor:
        """The shared buffer `pinned`, `pageable` or `device`, allocated on first use; bytes (uint8)."""
        if kind not in self._arenas:
            largest = self.max_copy_bytes
            if kind == "device":
                size = min(2 * largest, self.device_bytes // 8)
                self._arenas[kind] = random_tensor(self.device, (size,), "uint8")
            else:
                wish = PINNED_ARENA_BYTES if kind == "pinned" else PAGEABLE_ARENA_BYTES
                size = max(largest, min(wish, 4 * largest, self.host_bytes // 8))
                self._arenas[kind] = touched_buffer(self.device, size, pinned=kind == "pinned")
        return self._arenas[kind]

    def drop(self, kind: str) -> None:
        """Forget a buffer."""
        self._arenas.pop(kind, None)
        self.device.free()

    def copy_call(self, direction: str, memory: str, n_bytes: int) -> Call:
        """A call that copies `n_bytes` between rotating places, asynchronously where the memory allows."""
        host, device = Ring(self.arena(memory), n_bytes), Ring(self.arena("device"), n_bytes)
        if direction == "h2d":
            return lambda: device.next().copy_(host.next(), non_blocking=True)
        return lambda: host.next().copy_(device.next(), non_blocking=True)

    def gather_call(self, n_pieces: int, piece_bytes: int) -> Call:
        """A call that copies an expert to the device, piece by piece out of page-locked memory where they lie apart."""
        host, device = Ring(self.arena("pinned"), piece_bytes, scattered=True), Ring(self.arena("device"), piece_bytes)

        def gather() -> None:
            for _ in range(n_pieces):
                device.next().copy_(host.next(), non_blocking=True)

        return gather

    @property
    def compute(self) -> Stream:
        return self.device.stream(COMPUTE)

    @property
    def h2d(self) -> Stream:
        return self.device.stream(H2D)

    @property
    def d2h(self) -> Stream:
        return self.device.stream(D2H)

    def lane(self, direction: str) -> Stream:
        return self.h2d if direction == "h2d" else self.d2h

    def expert_shapes(self) -> list[Any]:
        """Distinct expert shapes, largest first: the one whose time matters most is never the one skipped."""
        return sorted({g.expert for g in self.geometries}, key=lambda s: -s.weight_bytes(2))

    def tokens(self) -> list[int]:
        """1, 2, 4 .. `max_tokens`."""
        return [2**k for k in range(self.max_tokens.bit_length()) if 2**k <= self.max_tokens]
