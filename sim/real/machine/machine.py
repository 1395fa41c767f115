"""The real machine: it launches, copies and computes, and reads a clock. Policies, engine and `drive` are the same."""

from __future__ import annotations

import time
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from sim.base.flat import floats
from sim.base.interrupts import POLL_S, heard
from sim.base.lanes import RESOURCES
from sim.machine.lanes import HOST, IDLE
from sim.machine.protocol import Machine
from sim.machine.waiting import Waiting
from sim.policy.tickets import Ticket
from sim.real.devices.work import Done, Work, works_of
from sim.real.machine.combine import Combine
from sim.real.machine.copies import Copies
from sim.real.machine.decoder import Decoder
from sim.real.machine.experts import Experts
from sim.real.machine.forward import Forward
from sim.real.machine.ledger import Ledger
from sim.real.machine.output import Output
from sim.real.machine.routing import Routing
from sim.real.machine.store import DeviceStore

if TYPE_CHECKING:
    from sim.base.quantities import Basis
    from sim.machine.lanes import Spans
    from sim.policy.pieces import Piece
    from sim.profiles.models import Model
    from sim.real.devices.lanes import Lanes
    from sim.real.weights.weights import Weights
    from sim.workload.iterations import Iteration


class RealMachine(Machine):
    """Implements `sim.machine.protocol.Machine` on one device: each verb is carried out by one of its parts, and the
    host's time for it goes to the ledger. Every ticket is `Work`, whose end is known once it has ended.

    Args:
        lanes: the device's. weights: of `model`'s geometry. arena_bytes: expert budget on each GPU.
        routing: which rows go to which expert (forced from a trace, or the model's own choice).
        max_positions: longest context. spans: called with every span, or None.
        report_copies: keep completions for `poll`. keep: collect every `Work` in `ledger.kept` (for calibration).
    """

    measured: Literal[True] = True

    def __init__(
        self,
        lanes: Lanes,
        model: Model,
        weights: Weights,
        arena_bytes: Sequence[int],
        routing: Routing,
        max_positions: int,
        max_tokens: int,
        spans: Spans | None = None,
        report_copies: bool = False,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self.lanes, self.model, self.weights, self.routing = lanes, model, weights, routing
        self.ledger = Ledger(spans, report_copies, keep, len(arena_bytes), model.n_moe_layers)
        # Its tables go to the device before the arena does, which waits for the device.
        self.decoder = Decoder(model, weights, lanes.torch, lanes.device.place, max_positions)
        self.store = DeviceStore(weights, lanes, arena_bytes)
        self.copies = Copies(lanes, self.store)
        combine = Combine()
        self.experts = Experts(lanes, weights, self.store, self.decoder, routing, combine)
        self.forward = Forward(lanes, model, self.decoder, routing, combine, max_tokens)
        self.output = Output()

    @property
    def now_s(self) -> float:
        return self.lanes.now_s()

    def now(self) -> float:
        return self.lanes.now_s()

    def _said(self, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, began_s: float) -> None:
        """A verb that began at `began_s` returns now."""
        self.ledger.leave_out(self.lanes.waited_s)
        self.lanes.waited_s = 0.0
        self.ledger.host(op, layer, expert, n_tokens, n_bytes, began_s, self.lanes.now_s())

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        began_s = self.now_s
        self.waiting.begin(iteration.number)
        self.routing.begin(iteration)
        self.forward.begin(iteration)
        self._said("begin", -1, -1, iteration.n_tokens, 0, began_s)

    def _dense_layers(self, moe_layer: int) -> None:
        for number in self.forward.dense_before(moe_layer):
            began_s = self.now_s
            self.forward.dense(number, moe_layer)
            self._said("launch dense_layer", moe_layer, -1, 0, 0, began_s)

    def attention(self, layer: int) -> None:
        self.waiting.enter(layer)
        self._dense_layers(layer)
        began_s = self.now_s
        self.forward.attention(layer)
        self._said("launch attention", layer, -1, 0, 0, began_s)

    def gate(self, layer: int) -> Ticket:
        began_s = self.now_s
        gate = self.forward.gate(layer)
        self.experts.begin_layer(layer, gate)
        self._said("launch gate", layer, -1, self.forward.iteration.n_tokens, 0, began_s)
        return gate

    def shared(self, layer: int) -> None:
        if not self.model.shared_intermediate_size:
            return
        began_s = self.now_s
        self.forward.shared(layer)
        self._said("launch shared_expert", layer, -1, 0, 0, began_s)

    def sync(self, ticket: Ticket) -> None:
        began_s = self.now_s
        if isinstance(ticket, Work):
            self.lanes.wait(ticket)
            self.lanes.waited_s = 0.0  # as all of this is waiting
            if ticket is self.experts.gate:
                self.routing.chose(self.experts.gate_layer, self.forward.chosen(), self.decoder)
        self.ledger.waited(ticket, began_s, self.now_s)

    def end(self) -> None:
        self._dense_layers(self.model.n_moe_layers)
        began_s, iteration = self.now_s, self.forward.iteration
        head = self.forward.head()
        self._said("launch head", -1, -1, len(iteration.ranges), 0, began_s)
        self.sync(head)
        self.output.read(iteration, self.decoder)
        self.routing.put_out(iteration, self.forward.next_ids())
        self.forward.end()
        self.ledger.take(self.lanes.finished)
        self.ledger.idle_until(self.now_s, HOST)

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        self.routing.changed(layer, ids, weights)

    # -- experts ----------------------------------------------------------------------------------------------------

    def expert(
        self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...], parts: Sequence[Piece]
    ) -> Ticket:
        began_s = self.now_s
        work = self.experts.launch(piece, n_tokens, works_of(after), parts)
        self._said("launch expert", piece.layer, piece.expert, n_tokens, 0, began_s)
        return work

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = ()) -> Ticket:
        began_s, n_bytes = self.now_s, self.experts.bytes_of(n_tokens)
        work = self.experts.on_cpu(layer, expert, n_tokens)
        self.copies.count_activations(n_bytes)
        self._said("launch cpu_expert", layer, expert, n_tokens, n_bytes, began_s)
        return work

    def join(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Work)
        self.experts.join(ticket)

    # -- copies -----------------------------------------------------------------------------------------------------

    def place(self, piece: Piece) -> None:
        """Put a piece in place before the run, outside its time."""
        self.copies.place(piece)

    def release(self, piece: Piece) -> None:
        """The cache has let go of a piece."""
        self.store.release(piece)

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        began_s = self.now_s
        work = self.copies.up(piece, priority, works_of(after))
        self._said("launch copy", piece.layer, piece.expert, 0, piece.n_bytes, began_s)
        return work

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        began_s = self.now_s
        work = self.copies.back(piece, works_of(after))
        self._said("launch copy", piece.layer, piece.expert, 0, piece.n_bytes, began_s)
        return work

    def promote(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Work)
        return self.lanes.promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Work)
        return self.copies.withdraw(ticket)

    def poll(self) -> list[Piece]:
        self.ledger.take(self.lanes.finished)
        arrived, self.ledger.arrived = self.ledger.arrived, []
        return arrived

    def ended(self, ticket: Ticket) -> bool:
        return not isinstance(ticket, Work) or self.lanes.over(ticket)

    # -- time -------------------------------------------------------------------------------------------------------

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        """Nothing more to spend: the policy's own code has just taken its real time (see `ledger.policy_s`)."""
        self.ledger.predict_asked_s += duration_s
        return Done(self.now_s)

    def wait_until(self, time_s: float) -> None:
        """Idle until an arrival: the one place where a real run waits for the clock."""
        while (left_s := time_s - self.now_s) > 0:
            time.sleep(min(left_s, POLL_S))
            heard()
        self.ledger.take(self.lanes.finished)
        self.ledger.idle_until(self.now_s, IDLE)

    def drain(self) -> None:
        self.lanes.settle()
        self.ledger.take(self.lanes.finished)

    # -- what it came to --------------------------------------------------------------------------------------------

    def parts_s(self) -> list[float]:
        self.waiting.leave()
        return list(self.ledger.parts_s)

    def path_s(self) -> MutableSequence[float]:
        # What held up a real lane is not known all the way down: what GPU 0 waited for last has to do.
        path_s = floats(len(RESOURCES))
        for cause, part_s in enumerate(self.ledger.parts_s):
            path_s[cause] = part_s
        return path_s

    @property
    def waiting(self) -> Waiting:
        """What GPU 0 waited for, by phase and layer."""
        return self.ledger.waiting

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane; the host's are its launches and reads, policy code apart."""
        return dict(self.ledger.busy_s)

    @property
    def h2d_bytes(self) -> int:
        return self.copies.h2d_bytes

    @property
    def d2h_bytes(self) -> int:
        return self.copies.d2h_bytes

    @property
    def written_back_bytes(self) -> int:
        return self.copies.written_back_bytes

    def broken_copies(self) -> list[Piece]:
        """Resident pieces whose bytes on the device differ from those on the host: none, unless a copy went wrong."""
        self.drain()
        return self.store.broken()
