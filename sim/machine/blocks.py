"""Blocks: what the host launches in every layer and every iteration, between experts, and how it gets to the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.dense_parallel import Step, Together
from sim.machine.experts import Experts
from sim.machine.host import Host
from sim.machine.lanes import GPU, H2D, HOST
from sim.machine.operations import Operations
from sim.machine.peers import Peers
from sim.machine.price import Operation
from sim.machine.protocol import NO_TICKETS
from sim.machine.stream import Stream
from sim.machine.waiting import KINDS
from sim.policy.tickets import Ticket, ends_at

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.workload.iterations import Iteration, Range

_GPU, _H2D, _HOST, _KINDS = GPU, H2D, HOST, len(KINDS)  # machine integers where this is compiled


class Blocks:
    """Attention, gate and shared expert of each layer, dense layers between them, and the output head.

    They run on GPU 0, or (`together`) on all GPUs at once. `n_tokens`: of the iteration. `in_a_row`: what a loop
    has to know of a layer's attention, gate and shared expert.
    """

    _attention: Operation
    _gate: Operation
    _head: Operation
    _handed: Operation

    def __init__(
        self, cost: Cost, host: Host, streams: list[Stream], operations: Operations, experts: Experts, peers: Peers
    ) -> None:
        self._cost = cost
        self._host = host
        self._streams = streams
        self._stream = streams[0]
        self._operations = operations
        self._experts = experts
        self._peers = peers
        self.together = Together(cost) if cost.several.together else None
        self._has_dense = cost.has_dense
        self._in_turn = cost.several.in_turn
        self._n_hops_before = cost.n_hops_before
        self._begin_s = cost.launches.begin_s
        self._leaves_unread = False
        self._unread = [False] * (len(cost.n_dense_before) - 1)
        self.n_tokens = 0
        self.in_a_row = operations.blocks
        self.of_shared: Operation | None = None
        self.dense: Operation | None = None
        self._attentions: dict[int, Operation] = {}  # of one token, by the positions before it
        self._n_out = 0
        self._n_heads = -1  # of this many ranges `_head` is the price

    # -- what they take in an iteration -----------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        """Price what the iteration runs."""
        cost = self._cost
        self._operations.tell()
        self._host.now_s += self._begin_s
        self._n_out = iteration.n_out
        if self.together is not None:
            self.n_tokens = iteration.n_tokens
            self.together.begin(iteration)
            return
        anew = iteration.n_tokens != self.n_tokens
        self.n_tokens = iteration.n_tokens
        self._price_attention(iteration, anew)
        self.in_a_row.put(0, self._attention)
        if anew:
            self._gate = self._operations.of(cost.gate(self.n_tokens), cost.launches.gate)
            self.in_a_row.put(1, self._gate)
            if self._in_turn:
                self._handed = self._operations.of(cost.hand_over(self.n_tokens), cost.launches.handing_over)
            if cost.has_shared:
                self.of_shared = self._operations.of(cost.shared(self.n_tokens), cost.launches.shared)
                self.in_a_row.put(2, self.of_shared)
        if self._has_dense:
            self.dense = self._operations.of(cost.dense_layer(iteration), cost.launches.dense)

    def _price_attention(self, iteration: Iteration, anew: bool) -> None:
        """`anew`: the iteration has another number of tokens than the one before."""
        cost, operations = self._cost, self._operations
        if anew:
            self._attention = operations.of(cost.attention(iteration), cost.launches.attention)
        elif self.n_tokens == 1:
            alone: Range = iteration.ranges[0]
            known = self._attentions.get(alone.context)
            if known is None:  # of no earlier token there
                price = cost.attention(iteration)
                known = self._attentions[alone.context] = operations.of(price, cost.launches.attention)
            self._attention = known
        else:
            operations.reprice(self._attention, cost.attention(iteration))

    def meet(self) -> None:
        """A layer's blocks are used in a row for the first time since counters were told."""
        for operation in self.in_a_row.operations:
            self._operations.meet(operation)
        self.in_a_row.n_met = self.in_a_row.n

    def forget(self) -> None:
        """Operations begin anew."""
        self.n_tokens = 0
        self._n_heads = -1
        self._attentions.clear()

    # -- one by one -------------------------------------------------------------------------------------------------

    def attention(self, layer: int) -> None:
        """Launch attention, after the dense layers before it."""
        self._stream.enter(layer)
        if self.together is not None:
            self._on_all(self.together.attention(layer), layer)
            return
        if self._in_turn:
            self._hand_over(layer, layer)
        self._dense_layers(self._cost.n_dense_before[layer], layer)
        self._launch("attention", layer, self._attention)

    def _hand_over(self, at: int, layer: int) -> None:
        """Hidden states go on to the GPU that has the layer `at`, where another had the one before."""
        for _ in range(self._n_hops_before[at]):
            self._launch("hand_over", layer, self._handed)

    def _dense_layers(self, n: int, layer: int) -> None:
        if self.dense is not None:
            for _ in range(n):
                self._launch("dense_layer", layer, self.dense)

    def gate(self, layer: int) -> Ticket:
        """Launch the gate, which the host reads."""
        if self.together is not None:
            return self._on_all(self.together.gate(layer), layer)
        self._peers.gate = self._launch("gate", layer, self._gate)
        return self._peers.gate

    def shared(self, layer: int) -> None:
        """Launch the shared expert, if there is one."""
        if self.together is not None:
            self._on_all(self.together.shared(), layer)
        elif self.of_shared is not None:
            self._launch("shared_expert", layer, self.of_shared)

    def head(self) -> Ticket:
        """Launch what ends an iteration; the ticket is the head's."""
        cost = self._cost
        if self.together is not None:
            return self._on_all(self.together.end(), -1)
        n_layers = self._stream.waiting.n_layers
        if self._in_turn:
            self._hand_over(n_layers, -1)
        self._dense_layers(cost.n_dense_before[n_layers], -1)
        if self._n_out != self._n_heads:
            self._n_heads = self._n_out
            self._head = self._operations.of(cost.head(self._n_out), cost.launches.head_of(self._n_out))
        return self._launch("head", -1, self._head)

    def _launch(self, op: str, layer: int, operation: Operation) -> Ticket:
        """Launch on GPU 0's stream, after what the stream must join first."""
        if self._peers.n_away:
            self._peers.combine()
        host, stream = self._host, self._stream
        host_s = host.now_s
        host.now_s = launched_s = host_s + operation.all_s
        self._operations.use(operation)
        self._experts.close()
        after = stream.joined
        stream.joined = NO_TICKETS
        if host.spans is not None:
            host.spans("host", f"launch {op}", layer, -1, self.n_tokens, 0, host_s, launched_s)
        work = stream.launch(op, layer, -1, self.n_tokens, operation, host_s, launched_s, 0.0, after)
        return ends_at(stream.free_s, stream.blame, _GPU) if work is None else work

    def _on_all(self, steps: list[Step], layer: int) -> Ticket:
        """Launch on all GPUs, each with its own price; the ticket of the last one on GPU 0."""
        host, first = self._host, self._stream
        ticket = Ticket(0.0, GPU)
        for op, launch, prices, meets in steps:
            host_s = host.now_s
            host.spend(f"launch {op}", layer, -1, self.n_tokens, 0, launch.all_s)
            launch.n += 1
            self._experts.close()
            after = NO_TICKETS
            if meets:
                after, first.joined = (*first.joined, *[one.newest() for one in self._streams]), NO_TICKETS
            for gpu, price in enumerate(prices):
                if price is None:
                    continue
                stream: Stream = self._streams[gpu]
                operation = self._operations.used_on(stream, price, launch)
                work = stream.launch(op, layer, -1, self.n_tokens, operation, host_s, host.now_s, 0.0, after)
                if gpu == 0:
                    ticket = ends_at(stream.free_s, stream.blame, _GPU) if work is None else work
        return ticket

    # -- up to the gate ---------------------------------------------------------------------------------------------

    def leave_unread(self, layers: frozenset[int]) -> None:
        """In these layers the host goes on without the gate's choice."""
        self._leaves_unread = True
        self._unread = [layer in layers for layer in range(len(self._unread))]

    def _to_gate_one_by_one(self, layer: int) -> float:
        self.attention(layer)
        gate = self.gate(layer)
        self.shared(layer)
        if not self._unread[layer]:
            self._host.sync(gate)
        self._experts.close()
        return self._host.now_s

    def to_gate(self, layer: int) -> float:
        """Launch a layer's blocks and read its gate; the host's clock then."""
        stream, host, row = self._stream, self._host, self.in_a_row
        if stream.n_pending > 0 or len(stream.joined) > 0 or self._peers.n_away > 0 or stream.written_s > host.now_s:
            return self._to_gate_one_by_one(layer)
        if self.together is not None or host.spans is not None or self.dense is not None:
            return self._to_gate_one_by_one(layer)
        if self._in_turn and self._n_hops_before[layer]:
            return self._to_gate_one_by_one(layer)
        # Nothing to wait for and nobody looking: the sums that those four would do, without their calls.
        if stream.owed_s > 0.0:
            stream.pay()
        now_s = host.now_s
        free_s = stream.free_s
        copied_s = stream.copied_s
        starved_s = stream.gaps_s[_HOST]
        at = stream.row
        waited_s = stream.gaps_s[_H2D]
        stream.waited_s[at + _HOST] += starved_s - stream.charged_host_s
        stream.waited_s[at + _H2D] += waited_s - stream.charged_h2d_s
        stream.charged_host_s = starved_s
        stream.charged_h2d_s = waited_s
        stream.row = stream.first_row + layer * _KINDS
        if row.n_met == 0:
            self.meet()
        gate_s = 0.0
        since_s = gate_since_s = -1.0  # of the stretch that runs, where it began here; only two of them matter later
        for place in range(row.n):
            row.n_used[place] += 1
            costs = 8 * place
            start_s = now_s + row.costs_s[costs + 1]  # first_s
            now_s += row.costs_s[costs]  # all_s
            if start_s > free_s:
                starved_s += start_s - free_s
                since_s = free_s = start_s
            start_s = free_s
            free_s += row.costs_s[costs + 2]  # duration_s
            slowed_s = row.costs_s[costs + 4]
            if start_s < copied_s:
                free_s += slowed_s
                stream.slowed_s += slowed_s
            elif stream.remembers and (slowed_s > 0.0 or row.costs_s[costs + 5] > 0.0):
                stream.note(start_s, free_s, slowed_s, row.costs_s[costs + 5])
            last_s = now_s + row.costs_s[costs + 3]  # tail_s
            if last_s > free_s:
                starved_s += last_s - free_s
                since_s = last_s - row.costs_s[costs + 3]
                free_s = last_s
            if place == 1:
                gate_s = free_s
                gate_since_s = since_s
        if gate_since_s >= 0.0:
            stream.runs.begin(gate_since_s, _HOST)
        if since_s > gate_since_s:
            stream.runs.begin(since_s, _HOST)
        stream.free_s = free_s
        stream.gaps_s[_HOST] = starved_s
        self._experts.group.open = False
        if len(self._streams) > 1:
            self._experts.close()
            self._peers.gate = Ticket(gate_s, GPU)
        host.now_s = now_s
        if not self._leaves_unread or not self._unread[layer]:
            if gate_s > now_s:
                now_s = gate_s
                host.runs.begin(now_s, _GPU)
            host.now_s = now_s + host.sync_s
            host.n_syncs += 1
        return host.now_s
