"""What a device supplies to calibration and to real runs: streams to enqueue on, marks in their order, memory.

A new device is a class with the methods of `Device`, and its streams. Everything above is written once: lanes, the
copy queue, stamps (`sim.real.devices.lanes`, `sim.real.devices.queue`), probes and clocks (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sim.real.devices.work import Work

Call = Callable[[], object]


@dataclass(frozen=True)
class Facts:
    """What a device is."""

    kind: str  # "cuda" or "cpu"
    title: str  # the product's name
    total_bytes: int  # memory of the device
    l2_bytes: int  # last-level cache that a cold weight must exceed
    n_sms: int
    dtype: str  # what it computes experts in: bfloat16 on GPUs that have it, else float16; float32 on the CPU
    int4: bool  # torch's own 4-bit product runs on it
    uuid: str = ""  # to find the same card through NVML; never recorded


class Mark(Protocol):
    """A point in a stream's order. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed it."""
        ...


class Stream(Protocol):
    """Runs what it is given, in order: enqueue, mark, wait."""

    def enqueue(self, call: Call, n: int = 1, begun: Mark | None = None, ended: Mark | None = None) -> float:
        """Run `call` `n` times, between two marks where they are given.

        Returns:
            Host seconds that handing the calls over took.
        """
        ...

    def mark(self) -> Mark:
        """A mark behind everything enqueued so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is enqueued from now on starts after `mark`."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream is idle: what reading a result back costs it."""
        ...

    def hold(self, duration_s: float) -> None:
        """Keep the stream busy for about `duration_s`, so that what follows starts only when it is fully enqueued."""
        ...


class Clock(Protocol):
    """The clock of a machine on this device; its zero is the last `restart`."""

    @property
    def base_s(self) -> float:
        """That zero, on the host's clock."""
        ...

    def now_s(self) -> float:
        """Seconds since the zero."""
        ...

    def restart(self) -> None:
        """Set it to 0, with every stream idle."""
        ...

    def place(self, work: Work, free_s: float) -> None:
        """Set start and end of work whose marks the host has just seen passed; its lane was busy until `free_s`."""
        ...


class Device(Protocol):
    """One device (or, on the CPU, `n_gpus` that stand for as many GPUs) and the host it hangs on."""

    torch: Any
    place: str  # where torch puts its tensors
    facts: Facts
    n_gpus: int
    busy_cores: int  # of the host, which its streams keep busy beside the thread that drives
    threaded: bool
    """Its streams are threads of the host: one can be told to wait for a mark that no stream has been given yet, and
    marks call back when they are passed (`sim.real.devices.threads.HostMark`)."""
    failed: Callable[[BaseException], None]
    """Called, on a thread of the device's own, with what an enqueued call raised; else `settle` raises it."""

    def stream(self, lane: int, gpu: int = 0) -> Stream:
        """The stream of lane `COMPUTE`, `H2D` or `D2H`; always the same one."""
        ...

    def mark(self) -> Mark:
        """A mark that no stream has been given yet."""
        ...

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, both passed."""
        ...

    def settle(self) -> None:
        """Block the host until every stream is idle."""
        ...

    def clock(self) -> Clock:
        """A clock for a machine on this device."""
        ...

    def bind_thread(self) -> None:
        """Make the device the calling thread's own."""
        ...

    def on_device(self, n_bytes: int) -> Any:
        """uint8 memory on the device, page-aligned, for every stream. Raises DeviceFault when there is too little."""
        ...

    def on_host(self, n_bytes: int, pinned: bool = True) -> Any:
        """uint8 host memory; `pinned`: that the copy engine reads fast (page-locked on CUDA)."""
        ...

    def host_buffers(self, n: int, each_bytes: int) -> list[Any]:
        """`n` such buffers of one size, at little more than their bytes. Raises DeviceFault when memory is short."""
        ...

    def upload(self, tensor: Any) -> Any:
        """A host tensor on the device, ordered on the stream that runs this, without blocking the host."""
        ...

    def used_here(self, tensor: Any) -> None:
        """The stream that runs this keeps reading a tensor that another stream's work has made."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nothing has taken."""
        ...

    def free(self) -> None:
        """Give unused memory back."""
        ...

    def close(self) -> None:
        """Stop threads and give all memory back; never raises."""
        ...
