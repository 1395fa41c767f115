"""How long a read from the drive takes: latency, so many requests of a size at a time, and what it gives at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.machine.figures import Figures
    from sim.profiles.drives import Drive


class DrivePrices:
    """Prices of reads on one drive, asked for in blocks, so many at a time.

    A request alone takes its latency and its bytes at the rate of a single one; the drive serves as many requests at
    once as are asked for, up to its bandwidth less what each costs the controller (Little's law under a roof):

        rate = min(depth * block / (latency + block / alone), block / (request + block / bandwidth))

    An expert keeps the lane busy for its bytes at that rate. Reads follow one another without a gap, so latency is paid
    by who waits, not by the lane: what was read is there `lag_s` after its lane has gone on. An infinite rate without
    latency takes no time at all.

    Args:
        depth: requests under way at a time. block_bytes: of one. expert_bytes: of what is read; a block is no larger.
    """

    def __init__(self, drive: Drive, depth: int, block_bytes: int, expert_bytes: int, figures: Figures) -> None:
        self.q_latency = figures.enter("drive.latency_s", drive.latency_s)
        self.q_bandwidth = figures.enter("drive.bandwidth_bytes_per_s", drive.bandwidth_bytes_per_s)
        block = min(block_bytes, expert_bytes)
        one_at_a_time = min(drive.request_bytes_per_s.value, drive.bandwidth_bytes_per_s.value)
        alone_s = drive.latency_s.value + block / one_at_a_time
        roof_s = drive.request_s.value + block / drive.bandwidth_bytes_per_s.value
        self.block_s = max(alone_s / depth, roof_s)
        """Between two blocks, while reads follow one another."""
        self.block_bytes = block
        self.latency_s = drive.latency_s.value
        self.lag_s = alone_s - self.block_s if alone_s > self.block_s else 0.0
        """From the last byte's turn on the lane until it has come."""

    @property
    def bytes_per_s(self) -> float:
        """What reads in a row reach; infinite where a block takes no time."""
        return self.block_bytes / self.block_s if self.block_s else float("inf")

    def busy_s(self, n_bytes: int) -> float:
        """Seconds for which a read of so many bytes keeps the drive from others."""
        return n_bytes / self.block_bytes * self.block_s

    def alone_s(self, n_bytes: int) -> float:
        """Seconds of a read on an idle drive."""
        return self.busy_s(n_bytes) + self.lag_s
