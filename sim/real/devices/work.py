"""A piece of work on a lane of a real machine, and what the machine asks of a device's lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sim.base.lanes import ON_DEVICE
from sim.machine.lanes import CPU, GPU, H2D, HOST, SIDE
from sim.machine.protocol import DEMAND, UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from sim.policy.pieces import Piece

COMPUTE, UP, DOWN, POOL = range(4)  # lanes: the compute stream, host to device, device to host, experts on the CPU
LANES = ON_DEVICE
CAUSE_OF = (GPU, H2D, HOST, CPU)

Call = Callable[[], Any]


class Work(Ticket):
    """One operation on one lane.

    `submit_s` is when the host handed it over, `start_s` and `end_s` when it ran, all on the machine's clock in seconds
    (`UNKNOWN_S` until known). `mark` is the device's own sign of completion: a `threading.Event`, or a CUDA event.
    """

    __slots__ = ("after", "begun", "call", "cancelled", "context", "expert", "failed", "gpu", "issued", "lane",
                 "layer", "mark", "n_bytes", "n_tokens", "op", "piece", "priority", "ready_s", "start_s", "submit_s",
                 "waited_for")  # fmt: skip

    def __init__(
        self, lane: int, op: str, call: Call, after: tuple[Work, ...] = (), *, layer: int = -1, expert: int = -1,
        n_tokens: int = 0, n_bytes: int = 0, priority: int = DEMAND,
    ) -> None:  # fmt: skip
        super().__init__(UNKNOWN_S, CAUSE_OF[lane])
        self.lane = lane
        self.op = op
        self.call = call
        self.after = after
        self.layer = layer
        self.expert = expert
        self.n_tokens = n_tokens
        self.n_bytes = n_bytes
        self.priority = priority
        self.submit_s = UNKNOWN_S
        self.start_s = UNKNOWN_S
        self.ready_s = UNKNOWN_S  # the later of being handed over and the end of what it waits for
        self.waited_for = HOST
        self.piece: Piece | None = None
        self.cancelled = False
        self.context = 0  # positions attended to, of attention alone
        self.issued = False  # handed to the device; always true on lanes without a queue of their own
        self.failed = False
        self.gpu = 0  # whose compute stream or copy engine, on the lanes that each GPU has
        self.begun: Any = None
        self.mark: Any = None


class Done(Ticket):
    """Something that is over already: the time policy code took as a predictor."""

    def __init__(self, end_s: float) -> None:
        super().__init__(end_s, SIDE)


def works_of(tickets: tuple[Ticket, ...]) -> tuple[Work, ...]:
    """Those that are work on a lane; the others are over already."""
    return tuple(ticket for ticket in tickets if isinstance(ticket, Work))


class Lanes(Protocol):
    """One device: its compute stream, its copy engines, and a pool of CPU threads."""

    torch: Any
    device: str  # where torch puts device tensors
    title: str

    @property
    def finished(self) -> deque[Work]:
        """Work that is over, in order of completion per lane; the reader takes from the left."""
        ...

    def now_s(self) -> float:
        """The machine's clock."""
        ...

    def restart_clock(self) -> None:
        """Set it to 0, with every lane idle."""
        ...

    def on_device(self, n_bytes: int) -> Any:
        """uint8 memory on the device, page-aligned. Raises DeviceFault when there is too little."""
        ...

    def on_host(self, n_bytes: int) -> Any:
        """uint8 host memory that the copy engine reads fast: page-locked on CUDA."""
        ...

    def host_buffers(self, n: int, each_bytes: int) -> list[Any]:
        """`n` such buffers of one size, at little more than their bytes. Raises DeviceFault when memory is short."""
        ...

    def upload(self, tensor: Any) -> Any:
        """A host tensor on the device, ordered on the lane that runs this, without blocking the host."""
        ...

    def used_here(self, tensor: Any) -> None:
        """The lane that runs this keeps reading a tensor that another lane's work has made."""
        ...

    def submit(self, work: Work) -> None:
        """Hand work to its lane."""
        ...

    def promote(self, work: Work) -> None:
        """Make a queued speculative copy a demand copy."""
        ...

    def cancel(self, work: Work) -> bool:
        """Withdraw a queued speculative copy; False when it has started or is demanded."""
        ...

    def over(self, work: Work) -> bool:
        """True when the work has ended; then its `end_s` is known."""
        ...

    def wait(self, work: Work) -> None:
        """Block the host until the work has ended. Raises what went wrong on a lane."""
        ...

    def settle(self) -> None:
        """Block the host until every lane is idle. Raises what went wrong on a lane."""
        ...

    def close(self) -> None:
        """Stop threads and give all memory back; never raises."""
        ...
