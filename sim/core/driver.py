"""The order of hooks above the core: what `sim.engine.engine` is to today's machine."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.base.errors import IllegalDecision
from sim.base.flat import COMPILED
from sim.core.core import ORDERS, Core, Lanes, View
from sim.core.prices import Prices
from sim.core.supports import BEFORE, BETWEEN, TOLD
from sim.engine import reassign
from sim.engine.counts import Tally
from sim.engine.engine import LANES, MAX_DECISIONS
from sim.engine.residency import ORIGINS, check_division
from sim.engine.victims import check_order
from sim.machine.protocol import Machine
from sim.machine.waiting import Waiting
from sim.policy.api import HOOKS, answers_anew, overrides
from sim.policy.decisions import Cancel, DropQueue, Predict, Prefetch, Requeue, RequeueFrom
from sim.policy.mistakes import PUZZLED, SECONDS, located, wrong
from sim.policy.order import EXPERT, Rank, Recency
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket, all_tickets
from sim.workload.iterations import PHASES, PREFILL, Feed, Iteration, RequestInfo

if TYPE_CHECKING:
    from sim.base.quantities import Basis
    from sim.engine.copies import Log
    from sim.machine.cost import Cost
    from sim.machine.lanes import Spans
    from sim.policy.api import Policy
    from sim.policy.pieces import Pieces
    from sim.workload.draft_steps import Drafts
    from sim.workload.future import Future
    from sim.workload.gate import Arrays, Gate


class Room:
    """What the budget is, and who lies in it, for who asks by pieces."""

    def __init__(self, core: Core, pieces: Pieces, budget_bytes: Sequence[int]) -> None:
        self.core = core
        self.pieces = pieces
        self.budget_bytes = list(budget_bytes)
        self.layer_bytes: list[int] | None = None

    @property
    def peak_bytes(self) -> list[int]:
        """The most that was taken, by GPU."""
        return [self.core.peak]

    def divide(self, layer_budget_bytes: list[list[int]]) -> None:
        """Give every layer a budget of its own. Raises IllegalDecision where they exceed the whole."""
        check_division(layer_budget_bytes, self.pieces.n_layers, self.budget_bytes)
        self.layer_bytes = layer_budget_bytes[0]

    def holds(self, piece: Piece) -> bool:
        """True when a piece has its room."""
        return bool(self.core.holds(piece.index))


class Placing:
    """Puts pieces in place before the run."""

    polls = False

    def __init__(self, engine: CoreEngine) -> None:
        self.engine = engine

    def place(self, pieces: Iterable[Piece]) -> None:
        """At no cost."""
        engine = self.engine
        if not isinstance(pieces, Iterable):
            raise engine.answered("initial", pieces, "pieces")
        for piece in pieces:
            if not isinstance(piece, Piece):
                raise engine.answered("initial", piece, "pieces")
            engine.view.known(piece)
            engine.core.put(piece.index)


class CoreEngine:
    """Asks a policy in order, and lets the core do what it decides."""

    def __init__(
        self,
        policy: Policy,
        machine: CoreMachine,
        pieces: Pieces,
        budget_bytes: Sequence[int],
        cost: Cost,
        arrays: Arrays,
        top_k: int,
        future: Future | None,
        log: Log | None,
        spans: Spans | None,
    ) -> None:
        self.policy = policy
        self.machine = machine
        self.lanes = lanes = machine.lanes
        self.pieces = pieces
        self.cost = cost
        self.arrays = arrays
        self.future = future
        self.log, self.spans = log, spans
        self.kept: frozenset[int] = frozenset()
        self.core = Core(lanes, pieces.n_layers, pieces.n_experts, pieces.all, pieces.all[0].n_bytes, log is not None)
        self.residency = Room(self.core, pieces, budget_bytes)
        self.view: Any = View(policy, self.core, pieces, cost, arrays, top_k, future, self.residency)
        self.copies = Placing(self)
        self.tally = Tally(pieces.n_layers, pieces.n_experts)
        self.drafts: Drafts | None = None  # of decode steps that verify some
        self.on_assign = False
        self.strides = False  # many tokens in a row without anybody asked in between (`Loop.stride`)
        self._begun: set[int] = set()

    @property
    def pending(self) -> Any:
        """Where the pass is, for who names the place of a mistake."""
        return self.core

    def start(self) -> None:
        """Take over what binding the policy has settled."""
        policy, order = self.policy, self.policy.order
        if order is not None and answers_anew(policy, "victim", "bind"):
            raise IllegalDecision(
                f"victim of {policy.name}: the `bind` it inherits names a native order, which decides instead; "
                "set self.order = None in a `bind` of its own"
            )
        kind, per_layer, options = "asked", False, (False, False, True)
        ranks: Any = None
        bars: Any = None
        if order is not None:
            check_order(order, self.pieces)
            per_layer = order.per_layer
            if isinstance(order, Rank):
                kind, options = "ranks", (order.spares_unused, order.guarded, order.ties == EXPERT)
                ranks, bars = order.rank, order.bar
                if not COMPILED:  # single numbers are read in a quarter of an array's time
                    ranks, bars = memoryview(ranks), memoryview(bars)
            else:
                kind = "recency" if isinstance(order, Recency) else "insertion"
        depth = -1 if policy.prefetch_depth is None else policy.prefetch_depth
        if depth >= 0:
            self.needs_timing("copy_done and prefetch_depth")
        room = self.residency
        self.core.bind(room.budget_bytes[0], room.layer_bytes, depth, ORDERS[kind], per_layer, ranks, bars, options)
        # Settings may make a policy of a lossy kind lossless: then it changes no routing, and is not asked.
        lossless = "lossy" in type(policy).traits and "lossy" not in policy.traits
        self.on_assign = overrides(policy, "assign") and not lossless
        self.take_hooks()
        asked = {hook for hook in HOOKS if overrides(policy, hook)} - BEFORE
        self.strides = (
            not asked and self.future is None and not self.cost.has_dense and self.cost.attention_of_one is not None
        )
        self.on_drafting = overrides(policy, "drafting")
        self.on_request_start = overrides(policy, "request_start")
        self.on_iteration_start = overrides(policy, "iteration_start")
        self.on_iteration_end = overrides(policy, "iteration_end")
        self.on_request_end = overrides(policy, "request_end")
        self.on_idle = overrides(policy, "idle")

    def take_hooks(self) -> None:
        """Bind hooks that are called for each layer and expert, as they are now."""
        policy = self.policy
        hooks = {name: getattr(policy, name) for name in (*TOLD, *BETWEEN) if overrides(policy, name)}
        self.core.listen(self.view, self, {"victim": policy.victim, **hooks}, self.on_assign)

    def needs_timing(self, what: str) -> None:
        """Raises IllegalDecision where the policy may not ask how far copies have come."""
        if "timing" not in self.policy.traits:
            raise IllegalDecision(f"{what} of {self.policy.name}: it depends on time; declare the trait 'timing'")

    # -- what is refused --------------------------------------------------------------------------------------------

    def answered(self, hook: str, got: object, rule: str) -> IllegalDecision:
        error = IllegalDecision(f"got {got!r}: it answers with {rule}")
        return located(error, self.policy, hook, self.core.layer)

    def victim(self, named: Any) -> int:
        """The key of what the policy has named to leave."""
        if not isinstance(named, Piece):
            raise self.answered("victim", named, "a resident Piece, or with None")
        try:
            self.view.known(named)
            self.may_leave(named)
        except IllegalDecision as error:
            raise located(error, self.policy, "victim", self.core.layer) from error
        return named.index

    def may_leave(self, piece: Piece) -> None:
        """Raises IllegalDecision where a piece has to stay, or is not there."""
        if self.core.pending_of(piece.layer, piece.expert):
            raise IllegalDecision(f"Evict of {piece}: layer {self.core.layer} still needs it; evict it after it ran")
        if not self.core.holds(piece.index):
            raise IllegalDecision(f"Evict of {piece}: it is not resident; evict a resident piece")

    def no_room(self, piece: Piece) -> IllegalDecision:
        """Of a piece that somebody demands."""
        if self.policy.layer_budgets(self.view) is not None:
            way = "name an expert of the layer's own that `view.evictable` allows, or give it a larger budget"
        else:
            way = (
                "name a piece on that GPU that `view.evictable` allows, whatever its layer; a cache per layer says so "
                "by `layer_budgets`, or one layer's experts take the room of all (docs/policies.md)"
            )
        return IllegalDecision(f"Fetch of {piece}: no room and {self.policy.name}.victim named nothing to evict; {way}")

    def too_much(self, piece: Piece, origin: int) -> IllegalDecision:
        """Of a piece that is put where no room is left, or is there."""
        if self.core.holds(piece.index):
            return IllegalDecision(f"{ORIGINS[origin]} of {piece}: it is resident; run it, or evict it first")
        return IllegalDecision(
            f"{ORIGINS[origin]} of {piece}: {self.core.taken + piece.n_bytes} bytes would exceed the expert "
            f"budget of {self.core.budget} on GPU {piece.gpu} or its layer's share; evict first, or answer `victim`"
        )

    def unserved(self) -> IllegalDecision:
        """Of a layer that a policy has left unfinished."""
        return IllegalDecision(
            f"layer {self.core.layer} of {self.policy.name}: experts {sorted(self.core.experts())} were not executed; "
            "every needed expert must run once, on GPU or CPU"
        )

    def not_owed(self, expert: Any) -> IllegalDecision:
        """Of an expert that the layer has not asked for, or that ran."""
        return IllegalDecision(
            f"RunGpu({expert}): layer {self.core.layer} does not owe it; run each needed expert once"
        )

    def not_there(self, expert: int) -> IllegalDecision:
        """Of an expert that is not resident."""
        return IllegalDecision(f"RunGpu({expert}): layer {self.core.layer}'s expert is not on the GPU; Fetch it first")

    def no_key(self, index: int) -> IllegalDecision:
        """Of a wish for nobody."""
        return IllegalDecision(
            f"RequeueFrom, got piece index {index}: there are {len(self.pieces.all)}; name a Piece.index"
        )

    def no_number(self, piece: Piece, priority: float) -> IllegalDecision:
        """Of a wish without a place among others."""
        return IllegalDecision(f"Prefetch of {piece}, got priority {priority!r}: must be a number")

    def no_seconds(self, asked: Predict) -> IllegalDecision:
        """Of a prediction that takes no time, or no lane's."""
        return IllegalDecision(f"{asked!r}: {SECONDS}, on a lane of {', '.join(LANES)}")

    def several(self, said: Any) -> Any:
        """What a hook has returned, as something to go through."""
        try:
            return iter(said)
        except TypeError as error:
            raise IllegalDecision(f"got {said!r}: a hook returns decisions, yields them, or returns None") from error

    def endless(self, decision: Any) -> IllegalDecision:
        """Of a hook that never comes to an end."""
        return IllegalDecision(
            f"more than {MAX_DECISIONS} decisions, the last of them {decision!r}: it never ends; "
            "a hook decides about one moment and returns"
        )

    def blame(self, error: Exception, decision: Any, hook: str) -> None:
        """Name the hook whose decision went wrong; whoever asks raises the error where that says nothing more."""
        if isinstance(error, IllegalDecision):
            raise located(error, self.policy, hook, self.core.layer) from error.__cause__
        if isinstance(error, PUZZLED):
            found = None if decision is None else wrong(decision, self.pieces.n_experts)
            if found is not None:
                raise located(IllegalDecision(found), self.policy, hook, self.core.layer) from error

    def needs_queue(self, what: str) -> None:
        """Raises IllegalDecision where the policy has no line of wishes."""
        if self.core.depth < 0:
            raise IllegalDecision(f"{what} of {self.policy.name}: it has no queue; declare a prefetch_depth")

    # -- decisions that are no verbs of the core ----------------------------------------------------------------------

    def apply(self, decision: Any) -> Ticket | None:
        """Apply one decision; what is none is refused."""
        core, kind = self.core, type(decision)
        if kind is RequeueFrom:
            self.needs_queue("RequeueFrom")
            start, stop, n = decision.start, decision.stop, len(decision.wishes)
            if not 0 <= start <= stop <= n:
                raise IllegalDecision(f"RequeueFrom, got entries {start} to {stop}: there are {n}; name some")
            after = all_tickets(decision.after)
            core.requeue_from(decision.wishes, start, stop, decision.fresh, after, decision.up_to_layer, decision.most)
        elif kind is Requeue:
            self.needs_queue("Requeue")
            core.requeue([self._wanted(one) for one in decision.wanted], decision.up_to_layer)
        elif kind is Cancel:
            self.needs_timing("Cancel")
            core.cancel(core.key(decision.piece))
        elif kind is DropQueue:
            self.needs_timing("DropQueue")
            core.drop_line(decision.up_to_layer)
        else:
            raise IllegalDecision(f"decision, got {decision!r}: not a decision; see sim.policy.decisions")
        return None

    def _wanted(self, one: Any) -> tuple[int, float, tuple[Ticket, ...]]:
        """A wish in numbers."""
        piece, priority, after = one.values() if type(one) is Prefetch else one
        return self.core.key(piece), float(priority), all_tickets(after)

    # -- an iteration -----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        """Start an iteration, and tell the policy."""
        policy, view = self.policy, self.view
        view.phase = iteration.phase
        self.core.begin(iteration.number)
        self.tally.by_expert.first = iteration.number * self.tally.by_expert.n_rows
        self.arrays.begin(iteration)
        self.lanes.begin(iteration)
        if self.on_request_start:
            for r in iteration.ranges:
                if r.phase == PREFILL and r.context == 0 and r.request.index not in self._begun:
                    self._begun.add(r.request.index)
                    self.core.obey(policy.request_start(r.request, view), "request_start")
        if self.drafts is not None:
            self._draft(self.drafts, iteration)
        if self.on_iteration_start:
            self.core.obey(policy.iteration_start(iteration, view), "iteration_start")

    def _draft(self, drafts: Drafts, iteration: Iteration) -> None:
        """Tokens are drafted one after the other, on the compute stream; the host reads them before it goes on."""
        machine = self.machine
        tickets = [machine.predict(took_s, "gpu", False, drafts.basis) for took_s in drafts.each_s(iteration)]
        if self.on_drafting:
            self.core.obey(self.policy.drafting(iteration, tickets, self.view), "drafting")
        if tickets:
            self.lanes.sync_ticket(tickets[-1])

    def reassign(self, gate: Gate) -> Gate:
        """Let a lossy policy change the routing."""
        engine: Any = self
        return reassign.reassign(engine, gate)

    def run_layers(self, iteration: Iteration) -> None:
        """All layers of an iteration, then the output head."""
        core = self.core
        core.run_layers(iteration, self.arrays, self.future)
        if self.on_iteration_end:
            core.obey(self.policy.iteration_end(iteration, self.view), "iteration_end")
        self.look_on()

    def ready_to_stride(self) -> bool:
        """Whether prices of one decode token are there: the iteration before was one."""
        return self.lanes.n_tokens == 1 and self.core.phase == 1

    def stride(self, feed: Feed, request: RequestInfo, row: int, n: int, sums: list[float]) -> float:
        """Decode `n` tokens of a request from a row on; when that ends. `sums` as `Clockwork.decoding` says."""
        stop = row + n
        while row < stop:
            block = feed.rest(request, row)
            self.core.stride(block, self.view.top_k, block.n_rows, row - request.first_row, sums)
            row += block.n_rows
            self.look_on()
        return self.lanes.now

    def look_on(self) -> None:
        """Tell those who look on of what has been decided and done since the last time."""
        if self.log is not None:
            self.core.tell_log(self.log)
        if self.spans is not None:
            self.lanes.tell_spans(self.spans)

    def end_request(self, request: RequestInfo) -> None:
        """Tell the policy that a request is complete."""
        self.core.obey(self.policy.request_end(request, self.view), "request_end")
        self.look_on()

    def wait_until(self, until_s: float) -> None:
        """Nobody is there until then; the policy is told before."""
        if self.on_idle:
            self.core.obey(self.policy.idle(self.view), "idle")
        self.lanes.wait_until(until_s)
        self.core.poll()

    def finish(self) -> None:
        """Nobody comes any more: close the counts."""
        self.core.finish()
        self.look_on()
        self._fill_tally()

    def _fill_tally(self) -> None:
        """Numbers out."""
        tally, found = self.tally, self.core.counts()
        size = self.pieces.all[0].n_bytes
        put(tally.by_expert.n, found["by_expert"])
        for number, phase in enumerate(PHASES):
            hits, first = tally.hits[phase], 14 * number
            put(hits.n_experts, found["classes"][first : first + 14 : 2])
            put(hits.n_tokens, found["classes"][first + 1 : first + 14 : 2])
            put(hits.n_aside, found["aside"][7 * number : 7 * number + 7])
            hits.prefetched = found["prefetched"][number]
        prefetch = tally.prefetch
        put(prefetch.n_of, found["fates"])
        put(prefetch.bytes_of, [n * size for n in found["fates"]])
        for name in ("n_issued", "n_cancelled", "n_dropped", "n_unused"):
            setattr(prefetch, name, found[name])
        prefetch.issued_bytes = found["n_issued"] * size
        prefetch.cancelled_bytes = found["n_cancelled"] * size
        tally.n_demand, tally.n_evicted = found["n_demand"], found["n_evicted"]
        tally.demand_bytes = found["n_demand"] * size
        tally.n_executed = found["n_executed"]


def put(into: Any, numbers: Any) -> None:
    """Add to an array of numbers."""
    if COMPILED:
        view = np.asarray(into)
        view += numbers
    else:
        into[:] = [one + other for one, other in zip(into, numbers, strict=True)]


class LinkUse(NamedTuple):
    """Copies to a GPU, and the seconds that its link was busy."""

    n_copies: int
    busy_s: float


class CoreMachine:
    """The core's lanes as a finished machine, and as what the loop asks of the clock."""

    measured = False
    gathers = False
    route = Machine.route  # nobody computes what a policy's routing comes to

    def __init__(self, cost: Cost, n_layers: int, n_experts: int, piece: Piece, spans: Spans | None) -> None:
        self.cost = cost
        self.prices = Prices(cost)
        self.lanes = Lanes(n_layers, n_experts, len(cost.figures.entries), self.prices, spans is not None)
        launches = cost.launches
        self.lanes.put_kind(
            0, cost.copies.expert_s(piece.n_bytes), launches.copy_s, 1.0, piece.n_bytes, launches.calls(1.0)
        )
        self.n_layers = n_layers
        self.cpu_s = [0.0] * len(cost.figures.entries)
        self.copies_slowed_s = self.write_backs_slowed_s = self.reads_slowed_s = 0.0
        self.n_reads = self.read_bytes = self.d2h_bytes = 0

    def now(self) -> float:
        """The host's clock."""
        return self.lanes.now

    def parts_s(self) -> list[float]:
        """GPU 0's time line until now."""
        parts_s: list[float] = self.lanes.parts_s()
        return parts_s

    def path_s(self) -> array[float]:
        """The critical path until now."""
        return array("d", self.lanes.path_s())

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        """Spend a predictor's time on a lane; when that ends."""
        ticket: Ticket = self.lanes.predict(duration_s, lane, blocking, basis)
        return ticket

    # -- what it has done -------------------------------------------------------------------------------------------

    @property
    def gpu_s(self) -> list[float]:
        """Busy seconds of the stream by figure."""
        by_figure_s: list[float] = self.lanes.by_figure_s()
        if self.cost.sharing.on:
            by_figure_s[self.cost.sharing.q_gpu] = math.fsum([self.lanes.slowed])
        return by_figure_s

    @property
    def side_s(self) -> list[float]:
        """Seconds of predictors beside it, by figure."""
        by_figure_s: list[float] = self.lanes.predictors_s()[0]
        return by_figure_s

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the GPU."""
        return self.lanes.copied_bytes

    @property
    def waiting(self) -> Waiting:
        """What the stream waited for."""
        found = Waiting(self.n_layers)
        put(found.waited_s, self.lanes.waits_s())
        return found

    @property
    def h2d(self) -> list[LinkUse]:
        """What each GPU's link did."""
        return [LinkUse(self.lanes.n_copies, self.lanes.busy_s()[1])]

    def host_shares(self) -> list[tuple[int, float]]:
        """The host's busy seconds by figure."""
        lanes = self.lanes
        for number, launch in enumerate(self.prices.launches):
            launch.n = lanes.uses_of(number)
        spent = self.cost.launches.spent(lanes.n_syncs, lanes.n_calls, lanes.experts_copied, 0)
        return spent + [(figure, spent_s) for figure, spent_s in enumerate(lanes.predictors_s()[1]) if spent_s]

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        gpu_s, h2d_s = self.lanes.busy_s()
        host_s = math.fsum([share for _, share in self.host_shares()])
        return {"gpu": gpu_s, "h2d": h2d_s, "d2h": 0.0, "cpu": 0.0, "predictor": self.lanes.side_busy, "host": host_s}

    def lane_ends_s(self) -> dict[str, float]:
        """When links and lanes that serve in order ended their last work."""
        return {"h2d": self.lanes.link, "d2h": 0.0, "cpu": 0.0, "predictor": self.lanes.side}
