"""How long a copy takes: latency + bytes / bandwidth of the link, host to device, back, and between GPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.base.quantities import Quantity
from sim.machine.several import PER_LINK, SHARED, SPLIT
from sim.profiles.stack import calls_of

if TYPE_CHECKING:
    from sim.machine.figures import Figures
    from sim.machine.measured import Measured
    from sim.machine.several import Several
    from sim.profiles.hardware import Hardware
    from sim.profiles.stack import Stack


def rates(hw: Hardware, stack: Stack) -> tuple[float, float]:
    """Bytes per second of one link, to the device and back."""
    ways = hw.h2d if stack.copies_pinned else hw.h2d_pageable, hw.d2h if stack.pinned else hw.d2h_pageable
    up, down = (way.bandwidth_bytes_per_s.value * stack.copy_efficiency_frac.value for way in ways)
    return up, down


def crowded(hw: Hardware, stack: Stack, several: Several) -> bool:
    """Whether links that share host memory ask for more than it has when all are busy, pieces written back included."""
    up, down = rates(hw, stack)
    return several.host_links == SHARED and several.n_gpus * up + down > hw.cpu.shared_by_copies.value


class CopyPrices:
    """Prices of copies on one (hardware, stack): page-locked or pageable, at the bandwidth that the stack reaches.

    `h2d_*`: of experts, which may lie in a mapped file where hidden states go through page-locked buffers.
    `shared_bytes_per_s`: what all links together draw from host memory at most, where they share it; else infinite.
    `q_*`: indices of the figures behind them.
    """

    def __init__(self, hw: Hardware, stack: Stack, measured: Measured, figures: Figures, several: Several) -> None:
        self._measured = measured
        self._calls = stack.copy_calls
        self._measured_bytes = measured.ranges.copy_bytes
        kind, h2d = ("h2d", hw.h2d) if stack.copies_pinned else ("h2d_pageable", hw.h2d_pageable)
        back, d2h = ("d2h", hw.d2h) if stack.pinned else ("d2h_pageable", hw.d2h_pageable)
        self.h2d_latency_s = h2d.latency_s.value
        self.call_latency_s = self.h2d_latency_s if stack.copy_calls else 0.0  # of a copy of an expert, at least
        self.d2h_latency_s = d2h.latency_s.value
        self.h2d_bytes_per_s, self.d2h_bytes_per_s = rates(hw, stack)
        self.p2p_latency_s = hw.p2p.latency_s.value
        self.p2p_bytes_per_s = hw.p2p.bandwidth_bytes_per_s.value
        self.q_h2d_latency = figures.enter(f"{kind}.latency_s", h2d.latency_s)
        self.q_h2d_bandwidth = figures.enter(f"{kind}.bandwidth_bytes_per_s", h2d.bandwidth_bytes_per_s)
        self.q_d2h_latency = figures.enter(f"{back}.latency_s", d2h.latency_s)
        self.q_d2h_bandwidth = figures.enter(f"{back}.bandwidth_bytes_per_s", d2h.bandwidth_bytes_per_s)
        self.shared_bytes_per_s = math.inf if several.host_links == PER_LINK else hw.cpu.shared_by_copies.value
        share = self.shared_bytes_per_s / several.n_gpus if several.host_links == SPLIT else math.inf
        if self.h2d_bytes_per_s > share:
            self.h2d_bytes_per_s = share
            name = "copies" if isinstance(hw.cpu.copies_bandwidth_bytes_per_s, Quantity) else "memory"
            self.q_h2d_bandwidth = figures.enter(f"cpu.{name}_bandwidth_bytes_per_s", hw.cpu.shared_by_copies)
        moves = hw.h2d if stack.pinned else hw.h2d_pageable  # hidden states lie in the engine's own buffers
        self._move_latency_s = moves.latency_s.value
        self._moves_bytes_per_s = min(moves.bandwidth_bytes_per_s.value * stack.copy_efficiency_frac.value, share)
        self.q_p2p_latency = figures.enter("p2p.latency_s", hw.p2p.latency_s)
        self.q_p2p_bandwidth = figures.enter("p2p.bandwidth_bytes_per_s", hw.p2p.bandwidth_bytes_per_s)

    def h2d_s(self, n_bytes: int) -> float:
        """Host-to-device seconds of one copy of hidden states, or of keys and values."""
        self._check(n_bytes)
        return self._move_latency_s + n_bytes / self._moves_bytes_per_s

    def expert_s(self, n_bytes: int, frac: float = 1.0) -> float:
        """Host-to-device seconds of an expert, or of the `frac` of it that a piece holds: its calls one by one."""
        self._check(n_bytes)
        whole_s = self.h2d_latency_s + n_bytes / self.h2d_bytes_per_s
        return whole_s + (calls_of(self._calls, frac) - 1) * self.h2d_latency_s if self._calls != 1 else whole_s

    def expert_back_s(self, n_bytes: int, frac: float = 1.0) -> float:
        """The same from device to host."""
        whole_s = self.d2h_s(n_bytes)
        return whole_s + (calls_of(self._calls, frac) - 1) * self.d2h_latency_s if self._calls != 1 else whole_s

    def d2h_s(self, n_bytes: int) -> float:
        """Device-to-host seconds of one copy."""
        self._check(n_bytes)
        return self.d2h_latency_s + n_bytes / self.d2h_bytes_per_s

    def p2p_s(self, n_bytes: int) -> float:
        """GPU-to-GPU seconds of one copy."""
        return self.p2p_latency_s + n_bytes / self.p2p_bytes_per_s

    def _check(self, n_bytes: int) -> None:
        if self._measured_bytes is not None:
            self._measured.check("copy", n_bytes, "bytes", self._measured_bytes)
