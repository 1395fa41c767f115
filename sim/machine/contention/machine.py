"""The simulated machine when copies, kernels and CPU experts slow one another: fluid lanes on SimPy events.

Same verbs, same order of service and same bookkeeping as `SimMachine`; only ends are not known beforehand. The host
stays a plain clock: whenever it moves, events up to its time happen. `docs/contention.md` has the model and an example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sim.machine.contention.clock import Clock
from sim.machine.contention.lanes import FluidLink, FluidPool, FluidStream
from sim.machine.copy_queue import Copy
from sim.machine.lanes import IDLE, Spans
from sim.machine.protocol import DEMAND, Ticket
from sim.machine.simulated import SimMachine

if TYPE_CHECKING:
    from sim.base.quantities import Source
    from sim.machine.cost import Cost
    from sim.machine.price import Launch, Price
    from sim.policy.pieces import Piece

TERMS = ("gpu_slowdown_by_h2d", "h2d_slowdown_by_gpu", "cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu")
WAYS = ("h2d_slowdown_by_d2h", "d2h_slowdown_by_h2d", "gpu_slowdown_by_d2h")


class FluidMachine(SimMachine):
    """Implements `sim.machine.protocol.Machine` with lanes that slow one another; arguments as for `SimMachine`.

    A ticket's `end_s` is unknown until its copy starts; while a copy is in flight it is the end as things stand.
    """

    def __init__(self, cost: Cost, n_gpus: int = 1, spans: Spans | None = None, report_copies: bool = False) -> None:
        self._rests = self._figures(cost)
        super().__init__(cost, n_gpus, spans, report_copies)
        self.clock = clock = Clock()
        self._fluid = [FluidStream(stream.name, clock) for stream in self.streams]
        self._pool = FluidPool(self.cpu.name, clock)
        links = [FluidLink(link.name, clock, index) for index, link in enumerate((*self.up, self.back))]
        for stream in self._fluid:
            stream.spans = spans
        for link in links:
            link.spans, link.report = spans, report_copies
        self._pool.spans = spans
        self.streams, self.cpu = [*self._fluid], self._pool
        self.up, self.links, self.back = [*links[:-1]], [*links[:-1]], links[-1]
        self.back.report = False  # nobody polls for what is written back
        terms = cost.hw.contention
        for stream, link in zip(self._fluid, links[:-1], strict=True):
            stream.flow.slowed_by(link.flow, terms.gpu_slowdown_by_h2d.value)
            link.flow.slowed_by(stream.flow, terms.h2d_slowdown_by_gpu.value)
            self._pool.flow.slowed_by(link.flow, terms.cpu_slowdown_by_h2d.value)
            link.flow.slowed_by(self._pool.flow, terms.h2d_slowdown_by_cpu.value)
            link.flow.slowed_by(links[-1].flow, terms.h2d_slowdown_by_d2h.value)
            stream.flow.slowed_by(links[-1].flow, terms.gpu_slowdown_by_d2h.value)
            links[-1].flow.slowed_by(link.flow, terms.d2h_slowdown_by_h2d.value)

    @staticmethod
    def _figures(cost: Cost) -> dict[str, int]:
        """Let results rest on the active terms too: index into `cost.rests_on` by term."""
        indices = {}
        for term in (*TERMS, *WAYS):
            figure = getattr(cost.hw.contention, term)
            if figure.value > 0.0:
                indices[term] = len(cost.rests_on)
                cost.rests_on.append((f"contention.{term}", figure))
        return indices

    # -- the host moves, and what was due by then happens -----------------------------------------------------------

    def _advance(self) -> None:
        self.clock.run_up_to(self.now_s)

    def _launch(self, op: str, layer: int, launch: Launch, price: Price, after: tuple[Ticket, ...]) -> Ticket:
        ticket = super()._launch(op, layer, launch, price, after)
        self._advance()
        return ticket

    def expert(
        self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...], parts: Sequence[Piece] = ()
    ) -> Ticket:
        ticket = super().expert(piece, n_tokens, after, parts)
        self._advance()
        return ticket

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Source) -> Ticket:
        ticket = super().predict(duration_s, lane, blocking, basis)
        self._advance()
        return ticket

    def to_gate(self, layer: int) -> None:
        self.attention(layer)
        ticket = self.gate(layer)
        self.shared(layer)
        self.sync(ticket)

    def quiet_s(self, tickets: Iterable[Ticket]) -> float:
        return 0.0  # ends move

    def sync(self, ticket: Ticket) -> None:
        while ticket in self.clock.open:
            if not self.clock.n_left:
                raise RuntimeError("deadlock: the host waits for work that waits for nothing (a bug in the engine)")
            self.clock.step()
        super().sync(ticket)
        self._advance()

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.now_s = time_s
            self._advance()
            self.streams[0].idle_until(time_s, IDLE)

    # -- what ends when others let it -------------------------------------------------------------------------------

    def cpu_expert(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        cost = self.cost
        n_bytes = cost.activation_bytes(n_tokens)
        begun_s = self.now_s
        self.now_s = begun_s + cost.cpu_launch_s
        self.n_copy_launches += 1
        self.experts_launched += 1.0
        if self.spans is not None:
            self.spans("host", "launch cpu_expert", layer, expert, n_tokens, n_bytes, begun_s, self.now_s)
        arrived_s = self.down.use("activations", layer, expert, n_tokens, self.now_s, cost.back_s(n_bytes))
        price = cost.expert_cpu(n_tokens)
        self.cpu_s[price.rests_on] += price.duration_s
        done = self._pool.ask("expert", layer, expert, n_tokens, arrived_s, price.duration_s)
        self.d2h_bytes += n_bytes
        back = Copy("activations", layer, expert, n_bytes, cost.copy_s(n_bytes), DEMAND, self.now_s, (done,))
        back.cause = done.cause
        self.up[0].submit(back, self.now_s)
        return back

    def drain(self) -> None:
        self.clock.run()
        rests = self._rests
        slowed = next((term for term in ("gpu_slowdown_by_h2d", "gpu_slowdown_by_d2h") if term in rests), None)
        if slowed is not None:  # of two terms the first stands for both
            self.gpu_s[rests[slowed]] = math.fsum(stream.stretched_s for stream in self._fluid)
        if "cpu_slowdown_by_h2d" in rests:
            self.cpu_s[rests["cpu_slowdown_by_h2d"]] = self._pool.stretched_s
