"""What each second of a run rests on: busy seconds of every kind of lane, by the quantity behind their price."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.price import Price

TERMS = ("gpu_slowdown_by_h2d", "h2d_slowdown_by_gpu", "cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu")
WAYS = ("h2d_slowdown_by_d2h", "d2h_slowdown_by_h2d", "gpu_slowdown_by_d2h")


class Bill:
    """Seconds by quantity: an index into `cost.figures.entries`."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        n = len(cost.figures.entries)
        self.gpu_s = [0.0] * n  # of compute streams
        self.cpu_s = [0.0] * n
        self.side_s = [0.0] * n
        self.host_predict_s = [0.0] * n
        self.used: dict[Price, int] = {}  # operations of this iteration, added to `gpu_s` when it ends
        self.n_syncs = 0
        self.n_copy_launches = 0
        self.n_hybrid = 0  # layers of which the CPU computed an expert
        self.experts_launched = 0.0  # copies of experts, a part counting as its share
        self.d2h_bytes = 0
        self.written_back_bytes = 0
        self.kv_out_bytes = 0
        self.kv_in_bytes = 0
        self.kv_out_s = 0.0
        self.n_kv_out = 0  # copies

    def runs(self, price: Price) -> None:
        """An operation on a compute stream."""
        self.used[price] = self.used.get(price, 0) + 1

    def end_iteration(self) -> None:
        """Add up what the iteration's operations took."""
        for price, n in self.used.items():
            self.gpu_s[price.attributed_to] += n * price.duration_s
        self.used.clear()

    def crosses(self, crossing_s: float, peer_s: float) -> None:
        """Hidden states went to another GPU and back; `crossing_s` is what of that the launch did not hide."""
        cost = self.cost
        latency_s = crossing_s * cost.copies.p2p_latency_s / peer_s
        self.gpu_s[cost.copies.q_p2p_latency] += latency_s
        self.gpu_s[cost.copies.q_p2p_bandwidth] += crossing_s - latency_s

    def exchanged(self, seconds: float) -> None:
        """Hidden states of a layer cross together, one way."""
        copies = self.cost.copies
        self.n_copy_launches += 1
        self.gpu_s[copies.q_p2p_latency] += copies.p2p_latency_s
        self.gpu_s[copies.q_p2p_bandwidth] += seconds - copies.p2p_latency_s

    def copy_launched(self, frac: float, calls: int = 1) -> None:
        """The host has launched a copy of this share of an expert (1 for activations of an expert on the CPU)."""
        self.n_copy_launches += calls
        self.experts_launched += frac

    def stretched(self, gpu_s: float, cpu_s: float) -> None:
        """What contention added to the time of streams and CPU, at the end of a run."""
        sharing = self.cost.sharing
        if sharing.on:
            self.gpu_s[sharing.q_gpu] = gpu_s
            self.cpu_s[sharing.q_cpu] = cpu_s

    def host_shares(self) -> list[tuple[int, float]]:
        """The host's busy seconds by the quantity they rest on."""
        spent = self.cost.launches.spent(self.n_syncs, self.n_copy_launches, self.experts_launched, self.n_hybrid)
        return spent + [(figure, spent_s) for figure, spent_s in enumerate(self.host_predict_s) if spent_s]
