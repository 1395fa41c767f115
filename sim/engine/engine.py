"""The engine counts: it applies each decision to what is resident and hands the work to the machine."""

from __future__ import annotations

from collections.abc import Generator
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeGuard

from sim.base.errors import IllegalDecision
from sim.base.flat import COMPILED
from sim.engine import reassign  # as a module: each of the two may be the first that is imported
from sim.engine.copies import Copies, Log
from sim.engine.counts import Tally
from sim.engine.default_service import Service
from sim.engine.layer import Layer
from sim.engine.pending_experts import PendingExperts
from sim.engine.residency import Residency
from sim.engine.victims import victims_of
from sim.machine.protocol import Machine
from sim.policy.api import answers_anew, overrides
from sim.policy.decisions import (
    Cancel,
    DropQueue,
    Evict,
    Fetch,
    Foresee,
    Predict,
    Prefetch,
    Requeue,
    RequeueFrom,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    WriteBack,
)
from sim.policy.mistakes import LONGEST_S, PUZZLED, SECONDS, located, seconds, wrong
from sim.policy.outlook import Outlook
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket, all_tickets
from sim.policy.view import View
from sim.workload.gate import gate_of
from sim.workload.iterations import PREFILL, Iteration, RequestInfo

if TYPE_CHECKING:
    from cython.cimports.sim.engine.steps import moesim_step  # C, and only where this is compiled

    from sim.machine.cost import Cost
    from sim.policy.api import Decisions, Policy
    from sim.workload.draft_steps import Drafts
    from sim.workload.future import Future
    from sim.workload.gate import Arrays

MAX_DECISIONS = 1_000_000
"""Of one call of a hook; asking for every piece of every expert of the largest models takes a tenth of that."""
LANES = ("side", "gpu", "host")


def _step(steps: Generator[Any, Any, None], answer: Any) -> Any:
    """What a generator yields, given an answer; the generator itself where it has come to its end."""
    try:
        return steps.send(answer)
    except StopIteration:
        return steps


class Engine:
    """Applies decisions for one policy on one machine.

    Args:
        log: called with (kind, layer, expert) for every decision applied, or None.
    """

    strides = False  # many tokens in a row without anybody asked in between (`Loop.stride`)

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        residency: Residency,
        cost: Cost,
        arrays: Arrays,
        top_k: int,
        future: Future | None = None,
        log: Log | None = None,
    ) -> None:
        self.policy = policy
        self.machine = machine
        self.kept: frozenset[int] = frozenset()  # layers that stay on their GPUs, whose routers nobody reads
        self.residency = residency
        self.pieces = pieces = residency.pieces
        self.cost = cost
        self.arrays = arrays
        self.future = future
        self.tally = Tally(pieces.n_layers, pieces.n_experts)
        residency.count_in(self.tally.by_expert.n)
        self.pending = PendingExperts(pieces.n_experts)
        self.copies = Copies(policy, machine, residency, self.pending, self.tally, log)
        self.layer = Layer(policy, machine, residency, self.pending, self.copies, self.tally, log)
        self.service = Service(policy, machine, residency, self.pending, self.copies, self.layer, self.tally, log)
        self.view = View(
            policy, residency, self.pending, self.copies, machine, cost, arrays, top_k, cost.model.hidden_size, future
        )
        self.counts = self.tally.hits[PREFILL]
        self.drafts: Drafts | None = None  # of decode steps that verify some
        self._begun: set[int] = set()  # requests that the policy has been told of
        self._steps: type = GeneratorType  # of the last hook that yielded; that of a compiled policy is another
        self.take_hooks()

    def start(self) -> None:
        """Take over what binding the policy has settled, before pieces are placed."""
        policy = self.policy
        order = policy.order
        if order is not None and answers_anew(policy, "victim", "bind"):
            raise IllegalDecision(
                f"victim of {policy.name}: the `bind` it inherits names a native order, which decides instead; "
                "set self.order = None in a `bind` of its own"
            )
        victims = None if order is None else victims_of(order, self.residency, self.pending)
        self.copies.start(self.view, victims, self.obey)
        self.layer.start(self.view)
        self.service.start(self.view)
        # Hooks that a policy does not implement cost nothing.
        self.on_drafting = overrides(policy, "drafting")
        self.on_request_start = overrides(policy, "request_start")
        self.on_iteration_start = overrides(policy, "iteration_start")
        self.on_layer_enter = overrides(policy, "layer_enter")
        self.on_gate_input = overrides(policy, "gate_input")
        # Settings may make a policy of a lossy kind lossless: then it changes no routing, and is not asked.
        lossless = "lossy" in type(policy).traits and "lossy" not in policy.traits
        self.on_assign = overrides(policy, "assign") and not lossless
        self.on_gate_done = overrides(policy, "gate_done")
        self.on_layer_done = overrides(policy, "layer_done")
        self.on_iteration_end = overrides(policy, "iteration_end")
        self.on_request_end = overrides(policy, "request_end")
        self.on_idle = overrides(policy, "idle")

    def take_hooks(self) -> None:
        """Bind the hooks that are called for each layer and expert, as they are now; `drive` does so when it begins."""
        policy = self.policy
        self._layer_enter = policy.layer_enter
        self._gate_input = policy.gate_input
        self._gate_done = policy.gate_done
        self._layer_done = policy.layer_done
        self.copies.take_hooks()
        self.service.take_hooks()

    # -- obeying ----------------------------------------------------------------------------------------------------

    def obey(self, decisions: Decisions, hook: str) -> None:
        """Apply a hook's decisions in order; a generator receives each decision's ticket, of a list those of all.

        Raises:
            IllegalDecision: naming hook and layer; also for a hook that never comes to an end.
        """
        if decisions is None:
            return
        n = 0
        most = MAX_DECISIONS  # a machine integer where this is compiled
        decision: Any = None
        try:
            if type(decisions) is list:
                for decision in decisions:
                    self.apply(decision, False)
                    n += 1
                    if n > most:
                        break
            elif self._are_steps(decisions):
                answer: Any = None
                while n <= most:
                    decision = None
                    decision = moesim_step(decisions, answer) if COMPILED else _step(decisions, answer)
                    if decision is decisions:
                        return
                    if type(decision) is list or type(decision) is tuple:
                        several = decision
                        tickets: list[Ticket | None] = []
                        for decision in several:
                            tickets.append(self.apply(decision))
                        n += len(tickets)
                        answer = tickets
                    else:
                        answer = self.apply(decision)
                        n += 1
            else:
                for decision in self._several(decisions):
                    self.apply(decision, False)
                    n += 1
                    if n > most:
                        break
            if n > most:
                raise IllegalDecision(
                    f"more than {MAX_DECISIONS} decisions, the last of them {decision!r}: it never ends; "
                    "a hook decides about one moment and returns"
                )
        except IllegalDecision as error:
            raise located(error, self.policy, hook, self.pending.layer) from error.__cause__
        except PUZZLED as error:
            found = None if decision is None else wrong(decision, self.pieces.n_experts)
            if found is None:
                raise
            raise located(IllegalDecision(found), self.policy, hook, self.pending.layer) from error

    def _are_steps(self, decisions: Any) -> TypeGuard[Generator[Any, Any, None]]:
        """Whether a hook has answered with a generator; of the kind that the last one was, no more is asked."""
        if type(decisions) is self._steps:
            return True
        if not isinstance(decisions, Generator):
            return False
        self._steps = type(decisions)
        return True

    def _several(self, decisions: Any) -> Any:
        """What a hook has returned, as something to go through."""
        try:
            return iter(decisions)
        except TypeError as error:
            raise IllegalDecision(
                f"got {decisions!r}: a hook returns decisions, yields them, or returns None"
            ) from error

    def apply(self, decision: Any, asked: bool = True) -> Ticket | None:
        """Apply one decision. Raises IllegalDecision naming decision, rule and state.

        Args:
            asked: whether anybody takes the ticket; if not, one that nothing else needs is not made.
        """
        kind = type(decision)
        if kind is RunGpu:
            run: RunGpu = decision
            return self.layer.run_gpu(run.expert, all_tickets(run.after), run.joined)
        if kind is Fetch:
            fetch: Fetch = decision
            return self.copies.fetch(self.residency.known(fetch.piece), all_tickets(fetch.after), asked)
        if kind is Evict:
            evict: Evict = decision
            leaving = self.residency.known(evict.piece)
            if self.kept and leaving.layer in self.kept:
                raise IllegalDecision(f"Evict of {leaving}: `kept_layers` says that its layer stays; leave it there")
            self.copies.evict(leaving)
            return None
        if kind is Prefetch:
            ask: Prefetch = decision
            return self.copies.prefetch(self.residency.known(ask.piece), ask.priority, all_tickets(ask.after))
        if kind is RunPart:
            part: RunPart = decision
            return self.layer.run_part(self.residency.known(part.piece), all_tickets(part.after), part.slices)
        if kind is RunCpu:
            on_cpu: RunCpu = decision
            if self.kept and self.pending.layer in self.kept:
                raise IllegalDecision(
                    f"RunCpu({on_cpu.expert}): `kept_layers` says that layer {self.pending.layer} stays on the GPU; "
                    "run it there"
                )
            return self.layer.run_cpu(on_cpu.expert, on_cpu.join_layer)
        if kind is Wait:
            wait: Wait = decision
            for ticket in all_tickets(wait.tickets):
                self.machine.sync(ticket)
            return None
        if kind is Predict:
            return self._predict(decision)
        if kind is Serve:
            self.service.serve()
            return None
        if kind is Foresee:
            self._foresee(decision)
            return None
        if kind is Requeue:
            queue: Requeue = decision
            self.copies.requeue(queue.wanted, queue.up_to_layer)
            return None
        if kind is RequeueFrom:
            line: RequeueFrom = decision
            after = all_tickets(line.after)
            self.copies.requeue_from(line.wishes, line.start, line.stop, line.fresh, after, line.up_to_layer, line.most)
            return None
        return self._apply_seldom(decision)

    def _apply_seldom(self, decision: Any) -> Ticket | None:
        kind = type(decision)
        if kind is WriteBack:
            return self.copies.write_back(self.residency.known(decision.piece), all_tickets(decision.after))
        if kind is RunCpuAhead:
            return self.layer.run_cpu_ahead(decision.layer, decision.expert, decision.n_tokens)
        if kind is Cancel:
            withdrawn: Cancel = decision
            self.copies.needs_timing("Cancel")
            self.copies.cancel(self.residency.known(withdrawn.piece))
            return None
        if kind is DropQueue:
            self.copies.needs_timing("DropQueue")
            self.copies.drop_queue(decision.up_to_layer)
            return None
        raise IllegalDecision(f"decision, got {decision!r}: not a decision; see sim.policy.decisions")

    def _predict(self, asked: Predict) -> Ticket:
        duration_s = asked.duration_s
        plain = type(duration_s) is float and 0.0 <= duration_s <= LONGEST_S  # as nearly always: without a call
        if not (plain or seconds(duration_s)) or asked.lane not in LANES:
            raise IllegalDecision(f"{asked!r}: {SECONDS}, on a lane of {', '.join(LANES)}")
        return self.machine.predict(duration_s, asked.lane, asked.blocking, asked.basis)

    def _foresee(self, asked: Foresee) -> None:
        outlook, layer = asked.outlook, asked.layer
        predict = asked.predict
        self.copies.needs_queue("Foresee")
        if not isinstance(outlook, Outlook) or not (predict is None or type(predict) is Predict):
            raise TypeError(f"got {asked!r}: an Outlook, and a Predict or None")
        after: tuple[Ticket, ...] = ()
        if predict is not None:
            after = (self._predict(predict),)
            outlook.foresee(layer)
        self.copies.requeue_from(outlook.wishes, 0, outlook.look_ahead(layer), outlook.n_fresh, after, layer, -1)

    # -- an iteration -----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        """Start an iteration, and tell the policy."""
        policy, view = self.policy, self.view
        view.phase = iteration.phase
        self.counts = self.tally.hits[iteration.counted]
        self.tally.by_expert.begin(iteration.number, self.residency)
        self.arrays.begin(iteration)
        self.machine.begin(iteration)
        if self.on_request_start:
            for r in iteration.ranges:
                if r.phase == PREFILL and r.context == 0 and r.request.index not in self._begun:
                    self._begun.add(r.request.index)
                    self.obey(policy.request_start(r.request, view), "request_start")
        if self.drafts is not None:
            self._draft(iteration)
        if self.on_iteration_start:
            self.obey(policy.iteration_start(iteration, view), "iteration_start")

    def _draft(self, iteration: Iteration) -> None:
        """Tokens are drafted one after the other, on the compute stream; the host reads them before it goes on."""
        assert self.drafts is not None
        machine, basis = self.machine, self.drafts.basis
        tickets = [machine.predict(took_s, "gpu", False, basis) for took_s in self.drafts.each_s(iteration)]
        if self.on_drafting:
            self.obey(self.policy.drafting(iteration, tickets, self.view), "drafting")
        if tickets:
            self.machine.sync(tickets[len(tickets) - 1])

    def run_layers(self, iteration: Iteration) -> None:
        """All layers of an iteration, then the output head."""
        for layer in range(self.pieces.n_layers):
            self.run_layer(iteration, layer)
        self.pending.layer = -1
        self.machine.end()
        if self.copies.polls:
            self.copies.poll()
        if self.on_iteration_end:
            self.obey(self.policy.iteration_end(iteration, self.view), "iteration_end")

    def run_layer(self, iteration: Iteration, layer: int) -> None:
        """Attention, gate, the policy's answer, the experts. The host blocks once: to read the gate's choice."""
        view, machine, pending, copies = self.view, self.machine, self.pending, self.copies
        pending.begin()
        pending.layer = layer
        view.layer = layer
        if self.future is not None:
            self.future.advance(iteration.index, layer)
        if copies.polls:
            copies.poll()
        if self.on_layer_enter:
            self.obey(self._layer_enter(layer, view), "layer_enter")
        if self.on_gate_input:
            machine.attention(layer)
            self.obey(self._gate_input(layer, view), "gate_input")
            ticket = machine.gate(layer)
            machine.shared(layer)
            machine.sync(ticket)
            now_s = machine.now()
        else:
            now_s = machine.to_gate(layer)
        if copies.polls:
            copies.poll()
            now_s = machine.now()
        if self.on_gate_done or self.on_assign:
            self._serve_gate(iteration, layer)
        else:
            self._serve_chosen(iteration, layer, now_s)
        if self.on_layer_done:
            self.obey(self._layer_done(layer, view), "layer_done")
        if copies.polls:
            copies.poll()

    def _owe(self, iteration: Iteration, layer: int) -> None:
        """What the gate has chosen is pending."""
        row = iteration.token
        if row is not None:
            self.pending.add_row(row.block, row.at + layer * row.top_k, row.top_k)
        else:
            for expert, n_tokens in iteration.chosen(layer).items():
                self.pending.add(expert, n_tokens)

    def _dispatch(self, layer: int) -> None:
        """Tell the machine how many pairs of token and expert go to each GPU: experts have their homes."""
        n_tokens = [0] * self.pieces.n_gpus
        first = layer * self.pieces.n_experts
        for expert in self.pending.experts():
            piece: Piece = self.pieces.all[first + expert]
            n_tokens[piece.gpu] += self.pending.tokens[expert]
        self.machine.dispatch(layer, n_tokens)

    def _serve_chosen(self, iteration: Iteration, layer: int, now_s: float) -> None:
        """Serve a layer for a policy that leaves it to the engine."""
        self._owe(iteration, layer)
        if self.machine.gathers:
            self._dispatch(layer)
        self.service.serve_chosen(self.counts, now_s)
        if self.layer.joins:
            self.layer.join(layer)

    def _serve_gate(self, iteration: Iteration, layer: int) -> None:
        """Serve a layer: classify, let the policy decide, check that no expert is left pending."""
        gate = gate_of(layer, iteration, iteration.chosen(layer), self.arrays)
        server = self.layer
        if self.on_assign:
            gate = reassign.reassign(self, gate)
        for expert, n_tokens in gate.needs.items():
            self.pending.add(expert, n_tokens)
        if self.machine.gathers:
            self._dispatch(layer)
        plain = gate.asked is gate.needs
        server.lower = gate.precision
        if plain:
            server.classify(layer, self.counts)
        else:
            server.classify_asked(gate, self.counts)
        if self.on_gate_done:
            self.obey(self._gate_done(gate, self.view), "gate_done")
        else:
            self.service.serve()
        if self.pending.n_left:
            raise IllegalDecision(
                f"layer {layer} of {self.policy.name}: experts {sorted(self.pending.experts())} were not executed; "
                "every needed expert must run once, on GPU or CPU"
            )
        if server.ran_on_cpu:
            server.count_on_cpu(layer, gate.asked, self.counts)
        server.join(layer)

    def end_request(self, request: RequestInfo) -> None:
        """Tell the policy that a request is complete."""
        self.obey(self.policy.request_end(request, self.view), "request_end")

    def wait_until(self, until_s: float) -> None:
        """Nobody is there until then; the policy is told before."""
        if self.on_idle:
            self.obey(self.policy.idle(self.view), "idle")
        self.machine.wait_until(until_s)
        if self.copies.polls:
            self.copies.poll()

    def finish(self) -> None:
        """Nobody comes any more: let what is under way end, and close the counts."""
        self.machine.drain()
        self.tally.prefetch.finish()
        self.tally.by_expert.end(self.residency)
