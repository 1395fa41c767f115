"""What one operation costs: seconds on a device and what they rest on, and what launching it costs the host."""

from __future__ import annotations


class Price:
    """Seconds, the index of the quantity that bounds them, and the bytes moved meanwhile (0 where nobody knows)."""

    __slots__ = ("attributed_to", "duration_s", "n_bytes")

    def __init__(self, duration_s: float, attributed_to: int, n_bytes: float = 0.0) -> None:
        self.duration_s = duration_s
        self.attributed_to = attributed_to
        self.n_bytes = n_bytes

    @property
    def draws_per_s(self) -> float:
        """Bytes per second that it moves when nothing slows it."""
        return self.n_bytes / self.duration_s if self.duration_s > 0.0 else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Price):
            return NotImplemented
        return self.duration_s == other.duration_s and self.attributed_to == other.attributed_to

    def __hash__(self) -> int:
        return hash((self.duration_s, self.attributed_to))

    def __repr__(self) -> str:
        return f"Price({self.duration_s!r}, {self.attributed_to})"


class Launch:
    """Host seconds of one operation: until its first kernel is launched, and until its last is; `n` counts uses.

    `tail_frac` is the share of the operation's device time its last kernel takes: equal shares, for want of better.
    """

    __slots__ = ("all_s", "extra_s", "first_s", "kernels_s", "launch_s", "n", "n_kernels", "tail_frac")

    def __init__(self, n_kernels: float, launch_s: float, extra_s: float) -> None:
        self.n_kernels = n_kernels
        self.launch_s = launch_s
        self.extra_s = extra_s
        self.kernels_s = n_kernels * launch_s
        self.first_s = extra_s + min(launch_s, self.kernels_s)
        self.all_s = extra_s + self.kernels_s
        self.tail_frac = min(1.0, 1.0 / n_kernels) if n_kernels else 0.0
        self.n = 0


class Operation:
    """A price and its launch, with the sums that every use needs.

    `length` and `priced` are the counters of its seconds on the stream and of its price (`sim.machine.meter`); `n` are
    uses that have not been handed to them yet. `next` is what an expert costs that joins a group after this one,
    `place` how many joined before it, and `slack_s` what this one leaves to fill of the group's floor; all for whole
    experts of one token. `slowed_s` is what it takes longer beside a copy, `more_s` what more beside pieces written
    back (`sim.machine.shared_memory`).
    """

    __slots__ = (
        *("all_s", "duration_s", "first_s", "launch", "length", "more_s", "n", "next", "place", "priced", "slack_s"),
        *("slowed_s", "tail_s"),
    )

    next: Operation | None

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.first_s = launch.first_s
        self.all_s = launch.all_s
        self.duration_s = 0.0
        self.tail_s = 0.0
        self.length = 0
        self.priced = 0
        self.n = 0
        self.next = None
        self.place = 0
        self.slack_s = 0.0
        self.slowed_s = 0.0
        self.more_s = 0.0

    def cost(self, duration_s: float, length: int, priced: int) -> None:
        """From now on it takes this long."""
        self.duration_s = duration_s
        self.tail_s = self.launch.tail_frac * duration_s
        self.length = length
        self.priced = priced


def kernels_of(n_kernels: float, frac: float) -> float:
    """Kernels that a slice of an operation runs: its share, and at least one where the operation has any."""
    return min(n_kernels, max(1.0, frac * n_kernels))
