"""Experts on the CPU: activations go down, the pool computes, the result comes up; in memory that copies share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.lanes import BACK
from sim.machine.copies import result_of
from sim.machine.host import Host
from sim.machine.lanes import CPU, SerialLane
from sim.machine.shared_memory import HostMemory
from sim.policy.tickets import Ticket, ends_at

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.lanes import Spans
    from sim.machine.runs import Paths

_BACK, _CPU = BACK, CPU  # machine integers where this is compiled


class CpuPool:
    """The CPU's lane, the way down to it, and what is known of experts there.

    `n_hybrid`: layers of which it computed an expert. `d2h_bytes`: activations. `busy_s`: seconds by the quantity they
    rest on.
    """

    def __init__(self, cost: Cost, host: Host, n_layers: int, spans: Spans | None, paths: Paths) -> None:
        self._cost = cost
        self._host = host
        self.d2h = SerialLane("d2h", spans, paths.of(BACK, 0))
        self.lane = SerialLane("cpu", spans, paths.of(CPU, 0))
        self.d2h_bytes = 0
        self.busy_s = [0.0] * len(cost.figures.entries)
        self.n_hybrid = 0
        self._launch_s, self._hybrid_s = cost.launches.cpu_s, cost.launches.hybrid_layer_s
        self._gpu_of = cost.gpu_of  # by layer, who is told its results
        self._n_begun = 0
        self._hybrid_in = [0] * n_layers  # the iteration (from 1) in which a layer had its last expert here
        # Tokens -> bytes, seconds there, seconds back and their place in the link's counters, seconds, basis, bytes/s.
        self._first: dict[int, tuple[int, float, float, int, float, int, float]] = {}
        self._joined: dict[int, tuple[int, float, float, int, float, int, float]] = {}  # experts after a layer's first
        self._shares = cost.sharing.on
        if self._shares and (cost.drive is not None or cost.sharing.both_ways):
            self._share()

    def _share(self) -> None:
        """Experts here draw from the memory that copies draw from: from the first on; at once above a drive, or where
        copies both ways are too much for it."""
        sharing, links, reads = self._cost.sharing, self._host.links, self._cost.drive is not None
        cpu, link = (sharing.stated.get(term, -1.0) for term in ("cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu"))
        self.lane.memory = HostMemory(sharing.host_bytes_per_s, len(links.h2d), cpu, link, reads)
        links.share(self.lane.memory, sharing, self._host.now_s)

    def begin(self) -> None:
        """An iteration begins."""
        self._n_begun += 1

    def run(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...], n_all: int) -> Ticket:
        """Compute an expert, no sooner than `after` have ended; the ticket is the result's arrival.

        Args:
            n_all: tokens of the iteration.
        """
        host = self._host
        if self._shares and self.lane.memory is None:
            self._share()
        joins = self._hybrid_in[layer] == self._n_begun
        if not joins:
            self._hybrid_in[layer] = self._n_begun
            self._begin_layer(layer, n_all)
        by_tokens = self._joined if joins else self._first
        known = by_tokens.get(n_tokens)
        if known is None:
            known = by_tokens[n_tokens] = self._work(n_tokens, joins)
        n_bytes, there_s, back_s, length, duration_s, attributed_to, draws_per_s = known
        host.spend("launch cpu_expert", layer, expert, n_tokens, n_bytes, self._launch_s)
        host.n_copies += 1
        host.experts_copied += 1.0
        arrived_s = self.d2h.use("activations", layer, expert, n_tokens, host.now_s, there_s)
        self.busy_s[attributed_to] += duration_s
        lane, links = self.lane, host.links
        waited_for = _BACK
        for read in after:  # its end is known: a demanded read waits for nothing
            if read.end_s > arrived_s:
                arrived_s = read.end_s
                waited_for = read.lane
        ended_s = lane.use("expert", layer, expert, n_tokens, arrived_s, duration_s, draws_per_s, waited_for)
        done = ends_at(ended_s, _CPU, _CPU)
        memory = lane.memory
        if memory is not None:
            links.pay()
        self.d2h_bytes += n_bytes
        link = links.first
        gpu: int = self._gpu_of[layer]
        if gpu:
            link = links.h2d[gpu]
            length = link.seconds.meter.at(back_s)
        back = result_of(layer, expert, n_bytes, back_s, length, host.now_s, done)
        if links.n > 1:
            host.look()
        if memory is not None:
            memory.awaits(done, back)
        link.submit(back, host.now_s)
        return back

    def _begin_layer(self, layer: int, n_all: int) -> None:
        """The first expert of a layer: the host submits, and will synchronise and merge."""
        self.n_hybrid += 1
        if self._hybrid_s:
            host = self._host
            host.spend("hybrid layer", layer, -1, n_all, 0, self._hybrid_s)
            host.look()  # what the stream waits for may end by then
            if not host.stream.n_pending:
                host.keep_waiting()  # what it waits for afterwards is the CPU's

    def _work(self, n_tokens: int, joins: bool) -> tuple[int, float, float, int, float, int, float]:
        """What tokens here move and take; `joins`: the expert is not the first of its layer here."""
        cost = self._cost
        price = cost.expert_cpu_joined(n_tokens) if joins else cost.expert_cpu(n_tokens)
        n_bytes = cost.activation_bytes(n_tokens)
        back_s = cost.copies.h2d_s(n_bytes)
        length = self._host.links.first.seconds.meter.at(back_s)
        there_s = cost.copies.d2h_s(n_bytes)
        return n_bytes, there_s, back_s, length, price.duration_s, price.attributed_to, price.draws_per_s
