"""Lanes: their names and causes, and the plain one that serves in order of asking.

Compute streams (`stream.py`) serve in launch order, copies have priorities (`copy_queue.py`). A time that is known is a
number; work whose start is not settled yet is a `Ticket`.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.base.lanes import BACK, PEER
from sim.base.lanes import CPU as CPU
from sim.base.lanes import GPU as GPU
from sim.base.lanes import H2D as H2D
from sim.base.lanes import HOST as HOST
from sim.base.lanes import IDLE as IDLE
from sim.base.lanes import NVME as NVME
from sim.base.lanes import SIDE as SIDE
from sim.machine.runs import Paths, Runs
from sim.machine.shared_memory import HostMemory, Lately

CAUSES = ("gpu", "h2d", "host", "cpu", "predictor", "nvme", "idle")
OWED = "shared memory"
"""A lane pays what it owes to those it shared memory with (`shared_memory.py`)."""

Spans = Callable[[str, str, int, int, int, int, float, float], None]


def cause_of(resource: int, cause: int) -> int:
    """What a stream waits for that waits for `cause`, and meanwhile for a resource."""
    return GPU if resource == PEER else cause if resource == BACK else resource


class SerialLane:
    """A lane that serves in order of asking: the CPU pool, the predictor's side lane."""

    def __init__(self, name: str, spans: Spans | None = None, runs: Runs | None = None) -> None:
        self.name = name
        self.runs = Paths().of(CPU, 0) if runs is None else runs
        self.spans = spans
        self.memory: HostMemory | None = None  # that it shares, as lane 0
        self.slowed_s = 0.0  # what sharing added
        self.free_s = 0.0
        self.busy_s = 0.0

    def use(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        ready_s: float,
        duration_s: float,
        draws_per_s: float = 0.0,
        lane: int = HOST,
    ) -> float:
        """Serve next; return the end.

        Args:
            draws_per_s: bytes from the memory that it shares. lane: on which what it waits for ends, at `ready_s`.
        """
        memory = self.memory
        if memory is not None:
            cpu: Lately = memory.lanes[0]
            paid_s = memory.paid_s(0, self.free_s if self.free_s > cpu.last_s else cpu.last_s)
            if paid_s > self.free_s:
                self.slowed_s += paid_s - self.free_s
                self.busy_s += paid_s - self.free_s
                if self.spans is not None:
                    self.spans(self.name, OWED, -1, -1, 0, 0, self.free_s, paid_s)
                self.free_s = paid_s
        start_s = self.free_s
        if ready_s > start_s:
            start_s = ready_s
            self.runs.begin(start_s, lane)
        self.free_s = start_s + duration_s
        self.busy_s += duration_s
        if memory is not None:
            alone_s = self.free_s
            self.free_s = memory.place(0, start_s, duration_s, draws_per_s)
            self.slowed_s += self.free_s - alone_s
            self.busy_s += self.free_s - alone_s
        if self.spans is not None:
            self.spans(self.name, op, layer, expert, n_tokens, 0, start_s, self.free_s)
        return self.free_s
