"""What probes need of a device: lanes that run calls in order, marks on them, and memory on both sides of the link.

Two implementations: `backend_cuda` (streams, events, pinned memory) and `backend_cpu` (threads, an arena, memcpy). Only
they import torch; probes reach it as `backend.torch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Lane = Any
Mark = Any
Tensor = Any


class Backend(Protocol):
    """One device with a compute lane, a copy lane per direction, and the host it hangs on."""

    torch: Any
    kind: str  # "cuda" or "cpu"
    device: str  # what torch calls the place of device tensors
    title: str  # the product's name
    l2_bytes: int  # last-level cache that a cold weight must exceed
    total_bytes: int  # memory of the device
    device_bytes: int  # memory free for probes
    n_sms: int
    dtype: str  # what it computes experts in: bfloat16 on GPUs that have it, else float16; float32 on the CPU
    int4: bool  # torch's own 4-bit product runs on it
    uuid: str  # to find the same card through NVML; never recorded
    max_copy_bytes: int  # largest copy worth timing
    compute: Lane
    h2d: Lane
    d2h: Lane

    def on_device(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A device tensor filled with small random numbers (zeros would draw less power and clock higher)."""
        ...

    def on_host(self, n_bytes: int, *, pinned: bool) -> Tensor:
        """A uint8 host tensor whose pages have been touched."""
        ...

    def block(self, lane: Lane, call: Callable[[], object], n: int) -> float:
        """Enqueue `n` calls on a lane; returns the host seconds that took."""
        ...

    def spin(self, lane: Lane, duration_s: float) -> None:
        """Hold a lane for about `duration_s`, so that what follows starts only when it is fully enqueued."""
        ...

    def mark(self, lane: Lane) -> Mark:
        """A point in a lane's order whose time can be read after `settle`."""
        ...

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Later work on `lane` starts after `mark`."""
        ...

    def done(self, mark: Mark) -> bool:
        """Whether a mark has been reached."""
        ...

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to another, both reached."""
        ...

    def join(self, lane: Lane) -> None:
        """Return when one lane is idle: what reading a result back costs the host."""
        ...

    def settle(self) -> None:
        """Return when every lane is idle."""
        ...

    def free(self) -> None:
        """Give unused memory back after a probe or a fault."""
        ...

    def close(self) -> None:
        """Stop threads and drop all memory."""
        ...
