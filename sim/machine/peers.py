"""Experts on other GPUs: hidden states live on GPU 0, cross to the expert's GPU and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.lanes import WIRE
from sim.machine.copies import Copy
from sim.machine.copy_queue import CopyQueue
from sim.machine.exchange import Exchange
from sim.machine.host import Host
from sim.machine.lanes import GPU
from sim.machine.price import Operation
from sim.machine.protocol import NO_TICKETS
from sim.machine.runs import Runs
from sim.machine.stream import Stream
from sim.policy.tickets import Ticket, ends_at

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.policy.pieces import Piece


class Peers:
    """What GPU 0 sends its peers and gets back.

    By default a transfer is added to the expert's time and queues nowhere; where the machine `gathers`, what crosses to
    a GPU in a layer crosses together, and queues at GPU 0's ports. With dense parts on all GPUs hidden states are there
    anyway. `gate`: the running layer's. `n_away`: GPUs whose results are to be brought back.

    Args:
        streams: compute streams by GPU. gpu_s: busy seconds of GPUs by the quantity they rest on; transfers count.
    """

    def __init__(self, cost: Cost, host: Host, streams: list[Stream], gpu_s: list[float], wire: Runs) -> None:
        self._cost = cost
        self._host = host
        self._streams = streams
        self._gpu_s = gpu_s
        self._wire = wire
        self.gathers = cost.several.gathers
        self._meets = cost.several.together
        self._exchange = Exchange(len(streams))
        self.n_away = 0
        self.gate: Ticket | None = None

    def run(
        self,
        piece: Piece,
        n_tokens: int,
        operation: Operation,
        host_s: float,
        arrived_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:
        """An expert has been launched on another GPU, from `host_s` on."""
        cost = self._cost
        first_s, last_s = host_s + operation.first_s, self._host.now_s + operation.tail_s
        if self.gathers:
            return self._with_the_others(piece, n_tokens, operation, first_s, last_s, arrived_s, after)
        if self._meets:
            return self._launched(piece, n_tokens, operation, 0.0, first_s, last_s, arrived_s, after)
        peer_s = cost.copies.p2p_s(cost.activation_bytes(n_tokens))
        crossing_s = peer_s  # back; and there, as far as the launch does not hide it
        if self.gate is not None and self.gate.end_s >= 0.0:
            after = (*after, ends_at(self.gate.end_s + peer_s, GPU, WIRE))
            if self._wire.began_s() != self.gate.end_s:
                self._wire.begin(self.gate.end_s, GPU)
            crossing_s += min(peer_s, max(0.0, self.gate.end_s + peer_s - first_s))
        if peer_s:
            latency_s = crossing_s * cost.copies.p2p_latency_s / peer_s
            self._gpu_s[cost.copies.q_p2p_latency] += latency_s
            self._gpu_s[cost.copies.q_p2p_bandwidth] += crossing_s - latency_s
        ticket = self._launched(piece, n_tokens, operation, peer_s, first_s, last_s, arrived_s, after)
        self._host.stream.join(ticket)
        return ticket

    def _launched(
        self,
        piece: Piece,
        n_tokens: int,
        operation: Operation,
        peer_s: float,
        first_s: float,
        last_s: float,
        arrived_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:
        """An expert on its GPU, which takes so much more than it computes."""
        stream: Stream = self._streams[piece.gpu]
        duration_s = operation.duration_s + peer_s
        stream.run(
            "expert",
            piece.layer,
            piece.expert,
            n_tokens,
            first_s,
            last_s,
            duration_s,
            stream.seconds.meter.at(duration_s),
            arrived_s,
            after,
            operation.slowed_s,
            operation.more_s,
            operation.tail_s,
        )
        return stream.newest()

    # -- all of a layer together ------------------------------------------------------------------------------------

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        """So many pairs of token and expert go to each GPU."""
        self._exchange.begin(layer)
        for gpu in range(1, len(self._streams)):
            if n_tokens[gpu]:
                self._send(layer, gpu, n_tokens[gpu])

    def _send(self, layer: int, gpu: int, n_tokens: int) -> None:
        exchange = self._exchange
        exchange.sent[gpu] = self._cross("dispatch", layer, n_tokens, self._host.links.p2p_out, NO_TICKETS)
        exchange.n_tokens[gpu] += n_tokens

    def _with_the_others(
        self,
        piece: Piece,
        n_tokens: int,
        operation: Operation,
        first_s: float,
        last_s: float,
        arrived_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:
        """On another GPU, once the tokens of all its experts of the layer are there."""
        exchange, gpu = self._exchange, piece.gpu
        if exchange.sent[gpu] is None:  # the gate asked for none there: its home is elsewhere
            self._send(piece.layer, gpu, n_tokens)
        sent = exchange.sent[gpu]
        assert sent is not None
        ticket = self._launched(piece, n_tokens, operation, 0.0, first_s, last_s, arrived_s, (*after, sent))
        if exchange.last[gpu] is None:
            self.n_away += 1
        exchange.last[gpu] = ticket
        return ticket

    def combine(self) -> None:
        """Bring back what other GPUs have computed; GPU 0 waits for it before it goes on."""
        exchange = self._exchange
        self.n_away = 0
        for gpu in exchange.away():
            last = exchange.last[gpu]
            assert last is not None
            n_tokens, port = exchange.n_tokens[gpu], self._host.links.p2p_in
            self._host.stream.join(self._cross("combine", exchange.layer, n_tokens, port, (last,)))
        exchange.begin(-1)

    def _cross(self, op: str, layer: int, n_tokens: int, port: CopyQueue, after: tuple[Ticket, ...]) -> Copy:
        """Hidden states cross to or from GPU 0, as soon as its port is free."""
        cost, host = self._cost, self._host
        n_bytes = cost.activation_bytes(n_tokens)
        seconds = cost.copies.p2p_s(n_bytes)
        host.spend(f"launch {op}", layer, -1, n_tokens, n_bytes, cost.launches.enqueue_s)
        host.n_copies += 1
        self._gpu_s[cost.copies.q_p2p_latency] += cost.copies.p2p_latency_s
        self._gpu_s[cost.copies.q_p2p_bandwidth] += seconds - cost.copies.p2p_latency_s
        length = port.seconds.meter.at(seconds)
        copy = Copy(op, layer, -1, n_bytes, seconds, length, True, host.now_s, after, None, GPU, len(after) > 0)
        host.look()
        port.submit(copy, host.now_s)
        return copy
