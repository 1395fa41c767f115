"""The lanes of a machine, and what they do to one another. A new lane is made here, and asked for by a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.lanes import BACK, CPU, GPU, H2D, NVME, PEER_IN, PEER_OUT, SIDE
from sim.machine.events.bill import TERMS, WAYS
from sim.machine.events.copies import CopyEngine
from sim.machine.events.flow import Pool, Rest
from sim.machine.events.lanes import Serial, Stream
from sim.machine.runs import Paths, Runs

if TYPE_CHECKING:
    from sim.machine.copy_prices import CopyPrices
    from sim.machine.events.clock import Clock
    from sim.machine.lanes import Spans
    from sim.machine.memory_law import Sharing


class Lanes:
    """Every lane but the host: a compute stream and a copy engine per GPU, the way back, and lanes that serve in order.

    Args:
        report_copies: keep what copies to the GPUs have ended, because somebody polls. in_turn: GPUs compute one at a
            time, on one stream.
    """

    def __init__(
        self,
        clock: Clock,
        n_gpus: int,
        spans: Spans | None,
        report_copies: bool,
        n_layers: int = 1,
        in_turn: bool = False,
    ) -> None:
        self._clock = clock
        self._spans = spans
        self.paths = paths = Paths(n_gpus, 1 if in_turn else n_gpus)
        names = [""] if n_gpus == 1 else [str(gpu) for gpu in range(n_gpus)]
        self.streams = [
            Stream(f"gpu{name}", clock, spans, n_layers, paths.of(GPU, gpu))
            for gpu, name in enumerate([""] if in_turn else names)
        ]
        # A read that takes no time is over before the links choose: of what starts at one instant the drive is first.
        self.drive = CopyEngine("nvme", clock, 0, spans, False, paths.of(NVME, 0))  # reads into host memory
        self.h2d = [
            CopyEngine(f"h2d{name}", clock, gpu + 1, spans, report_copies, paths.of(H2D, gpu))
            for gpu, name in enumerate(names)
        ]
        back = paths.of(BACK, 0)
        self.write_backs = CopyEngine("d2h", clock, n_gpus + 1, spans, False, back)  # pieces written back
        # Ports of GPU 0, to its peers.
        self.p2p_out = CopyEngine("p2p_out", clock, n_gpus + 2, spans, False, paths.of(PEER_OUT, 0))
        self.p2p_in = CopyEngine("p2p_in", clock, n_gpus + 3, spans, False, paths.of(PEER_IN, 0))
        self.serial: list[Serial] = []
        self.d2h = self.add("d2h", back)  # the same engine for activations; a run uses one of the two
        self.cpu = self.add("cpu", paths.of(CPU, 0))
        self.side = self.add("predictor", paths.of(SIDE, 0))

    def stream_of(self, gpu: int) -> Stream:
        """What a GPU computes on: a stream of its own, or the one that all take turns on."""
        return self.streams[gpu if len(self.streams) > 1 else 0]

    def add(self, name: str, runs: Runs | None = None) -> Serial:
        """One more lane that serves in order of asking; results tell how busy it was.

        Args:
            runs: where it notes whom it has waited for. None: its time counts as the CPU's on the critical path.
        """
        self.serial.append(Serial(name, self._clock, self._spans, self.paths.of(CPU, 0) if runs is None else runs))
        return self.serial[-1]

    def busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        busy_s = {stream.name: stream.time.busy_s for stream in self.streams}
        busy_s |= {link.name: link.busy_s for link in self.h2d}
        busy_s |= {lane.name: lane.busy_s for lane in self.serial}
        busy_s["d2h"] += self.write_backs.busy_s
        return busy_s

    def ends_s(self) -> dict[str, float]:
        """When links and lanes that serve in order ended their last work."""
        ends_s = {link.name: link.free_s for link in self.h2d}
        ends_s |= {lane.name: lane.free_s for lane in self.serial}
        return ends_s | {"d2h": max(self.d2h.free_s, self.write_backs.free_s)}


def share_host_memory(lanes: Lanes, copies: CopyPrices) -> None:
    """All links draw from one memory, each at its own rate as long as there is enough for all."""
    pool = Pool(copies.shared_bytes_per_s)
    for link in lanes.h2d:
        pool.add(link.flow, copies.h2d_bytes_per_s)
    pool.add(lanes.write_backs.flow, copies.d2h_bytes_per_s)


def couple(lanes: Lanes, sharing: Sharing, reads: bool = False) -> None:
    """What slows what: terms that were measured or set, each a share of its time, and memory for all that has none.

    Args:
        reads: a drive writes what it reads to host memory.
    """
    cpu, back, stated = lanes.cpu.flow, lanes.write_backs.flow, sharing.stated
    terms = {term: stated.get(term, 0.0) for term in (*TERMS, *WAYS)}
    for gpu, link in enumerate(engine.flow for engine in lanes.h2d):
        stream = lanes.stream_of(gpu).flow
        stream.slowed_by(link, terms["gpu_slowdown_by_h2d"])
        link.slowed_by(stream, terms["h2d_slowdown_by_gpu"])
        cpu.slowed_by(link, terms["cpu_slowdown_by_h2d"])
        link.slowed_by(cpu, terms["h2d_slowdown_by_cpu"])
        link.slowed_by(back, terms["h2d_slowdown_by_d2h"])
        stream.slowed_by(back, terms["gpu_slowdown_by_d2h"])
        back.slowed_by(link, terms["d2h_slowdown_by_h2d"])
    if reads or not {"cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu"} <= stated.keys():
        pool = Pool(sharing.host_bytes_per_s)
        pool.add(cpu, slowed="cpu_slowdown_by_h2d" not in stated)
        for engine in (*lanes.h2d, lanes.write_backs):
            pool.add(engine.flow, slowed="h2d_slowdown_by_cpu" not in stated)
        if reads:
            pool.add(lanes.drive.flow)
    for gpu, copies in enumerate(lanes.h2d):  # each GPU's memory, of which the one that gives least counts
        kernels = lanes.stream_of(gpu)
        found = [("gpu_slowdown_by_h2d", copies), ("gpu_slowdown_by_d2h", lanes.write_backs)]
        if first := [engine.flow for term, engine in found if term not in stated]:
            Rest(sharing.gpu_bytes_per_s, first, kernels.flow)
