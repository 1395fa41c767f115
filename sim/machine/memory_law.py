"""What runs at the same time shares memory: which bandwidth is there, and which terms were measured instead.

By the law of one memory, everything draws bytes per second: an operation its bytes over the time it takes alone.

- Host memory: where experts on the CPU, copies and a drive's reads ask for more than there is, all of them are slowed
  in proportion.
- GPU memory: copies keep the rate of their link, which is a small part of it; kernels get what that leaves.

`docs/contention.md` has the reasons, and what a term that was measured or set changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.base.quantities import Quantity

if TYPE_CHECKING:
    from sim.machine.copy_prices import CopyPrices
    from sim.machine.figures import Figures
    from sim.machine.several import Several
    from sim.profiles.hardware import Hardware

ON, OFF = "on", "off"
WAYS = (ON, OFF)

GPU_BY_COPIES = ("gpu_slowdown_by_h2d", "gpu_slowdown_by_d2h")
STATIC = ("gpu_slowdown_by_h2d", "cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu")
"""Terms that the arithmetic engine knows; where another is more than 0, SimPy replays the run."""

SLOWS = {
    "cpu": ("cpu_slowdown_by_h2d",),
    "h2d": ("h2d_slowdown_by_cpu", "h2d_slowdown_by_gpu", "h2d_slowdown_by_d2h"),
    "d2h": ("d2h_slowdown_by_h2d",),
    "gpu": ("gpu_slowdown_by_h2d", "gpu_slowdown_by_d2h"),
    "nvme": (),
}
"""Activity -> the terms that may slow it."""
BY_LAW = ("cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu", "gpu_slowdown_by_h2d", "gpu_slowdown_by_d2h")
"""Terms in whose place the law stands where nobody states them."""


def needs_events(hw: Hardware) -> bool:
    """Whether a term that was measured or set slows what the arithmetic engine never slows."""
    return any(figure.value > 0.0 for term, figure in hw.contention.stated.items() if term not in STATIC)


class Sharing:
    """How much there is to share on one (hardware, stack), and what is known besides; nothing is, where `on` is False.

    `stated`: terms that were measured or set, by name. `host_bytes_per_s`, `gpu_bytes_per_s`: of memories; infinite
    where nothing is shared. `both_ways`: copies to GPUs and back ask for more than host memory has. `up_bytes_per_s`,
    `down_bytes_per_s`: what a copy draws from either. `q_*`: indices of the figures that slowed time rests on.
    """

    def __init__(self, hw: Hardware, copies: CopyPrices, several: Several, figures: Figures, on: bool) -> None:
        self.on = on
        self.stated: dict[str, float] = {}
        self.host_bytes_per_s = self.gpu_bytes_per_s = math.inf
        self.up_bytes_per_s = self.down_bytes_per_s = 0.0
        self.q_host = self.q_gpu = self.q_cpu = 0
        self.both_ways = False
        if not on:
            return
        self.up_bytes_per_s, self.down_bytes_per_s = copies.h2d_bytes_per_s, copies.d2h_bytes_per_s
        # Links were measured one way at a time: memory gives at least what each way takes when no core reads it.
        up, down, all_links = several.n_gpus * self.up_bytes_per_s, self.down_bytes_per_s, copies.shared_bytes_per_s
        self.host_bytes_per_s = max(hw.cpu.shared_by_all.value, min(max(up, down), all_links))
        self.both_ways = min(up + down, all_links) > self.host_bytes_per_s
        self.gpu_bytes_per_s = max(
            hw.gpu.memory_bandwidth_bytes_per_s.value, 2.0 * (self.up_bytes_per_s + self.down_bytes_per_s)
        )
        host, gpu = hw.cpu.shared_by_all, hw.gpu.memory_bandwidth_bytes_per_s
        name = "total" if isinstance(hw.cpu.total_bandwidth_bytes_per_s, Quantity) else "memory"
        self.q_host = self.q_cpu = figures.enter(f"shared cpu.{name}_bandwidth_bytes_per_s", _by_law(host))
        self.q_gpu = figures.enter("shared gpu.memory_bandwidth_bytes_per_s", _by_law(gpu))
        for term, figure in hw.contention.stated.items():
            self.stated[term] = figure.value
            if figure.value > 0.0:
                entered = figures.enter(f"contention.{term}", figure)
                if term == "cpu_slowdown_by_h2d":
                    self.q_cpu = entered
                elif term == "gpu_slowdown_by_h2d" or (
                    term == "gpu_slowdown_by_d2h" and not self.stated.get("gpu_slowdown_by_h2d")
                ):
                    self.q_gpu = entered

    def together(self, draws_per_s: float) -> tuple[float, float]:
        """How many times as long an expert on the CPU that draws so much takes beside a copy, and a copy beside it."""
        by_law = max(1.0, (draws_per_s + self.up_bytes_per_s) / self.host_bytes_per_s)
        cpu, link = (self.stated.get(term) for term in ("cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu"))
        return by_law if cpu is None else 1.0 + cpu, by_law if link is None else 1.0 + link


def _by_law(figure: Quantity) -> Quantity:
    """The bandwidth that is shared; that it is shared so, nobody measured."""
    return Quantity(value=figure.value, source="assumed", ref=figure.ref, note="shared by all that runs at once")
