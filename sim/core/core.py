# cython: infer_types=False
"""One core: when things happen (`Lanes`), and who is resident and what is counted (`Core`).

Compiled, its numbers and records are C's; not compiled, the same lines run on lists and small objects. Experts are
keys, layer * experts + expert, as `Piece.index`. Times are seconds; -1.0 is a time that is not settled yet, and then a
ticket (a number) stands for it.

A token, layer by layer (`Core.decode`): a layer's blocks go onto the stream, and the host reads the gate
(`Lanes.to_gate`); what the gate asks for is noted (`ask`), how that is found is counted (`classify`), and it is served
(`serve`): what is missing is demanded (`demand`: who leaves, which room is taken, when the copy runs), what is there
runs (`run`), then what arrives. `end` runs the output head.

To add a verb: its state in the class that it belongs to, its rule as a method, the types of both in `core.pxd`, its
price from `sim.core.prices`, its line in `sim.core.supports`; then run it beside today's engine (`tests/test_core.py`).
Uncompiled, a record in an array is an object: write `self.row[k].here`, never `r = self.row[k]`. Uncompiled, whole
numbers never overflow: give every product a type.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import IllegalDecision
from sim.base.flat import COMPILED, floats, ints, longer_floats, longer_places, places, records
from sim.base.lanes import ATTENDED, RESOURCES
from sim.engine import by_expert
from sim.policy.decisions import Evict, Fetch, Foresee, Predict, Prefetch, RunGpu, Serve, Wait
from sim.policy.mistakes import seconds
from sim.policy.outlook import Outlook
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket, all_tickets, ends_at
from sim.policy.view import Prices
from sim.workload.gate import gate_of
from sim.workload.levels import require_declared

if TYPE_CHECKING:
    from cython.cimports.sim.engine.steps import moesim_step  # C, and only where this is compiled


def _record(layout: str) -> tuple[Any, list[tuple[str, str]]]:
    """A record's class, whose fields begin at 0, and its fields with their types, as `records` takes them."""
    fields = [(name, kind) for kind, *names in map(str.split, layout.split(";")) for name in names]
    zeros = {name: 0.0 if kind == "f8" else 0 for name, kind in fields}
    lines = "".join(f"        self.{name} = {zero}\n" for name, zero in zeros.items())
    space: dict[str, Any] = {}
    exec(f"class Record:\n    __slots__ = {tuple(zeros)}\n    def __init__(self):\n{lines}", space)  # noqa: S102
    return space["Record"], fields


RECORDS = {
    "Row": _record(
        "f8 arrive busy; i4 coming reading prev next mark left_in came ran again demanded; i2 here origin unused"
    ),
    "Op": _record("f8 first all dur tail tail_frac slow slack; i4 launch priced length next n"),
    "Kind": _record("f8 dur launch share; i8 n_bytes; i4 calls; i8 n"),
    "Copy": _record("f8 ready; i4 lane after key demanded ticket"),
    "Late": _record("f8 first last dur tail slow arrive; i4 cause lane spec after ticket key row op layer n_tokens"),
    "Node": _record("i4 ticket next"),
    "Room": _record("f8 ready; i8 n_bytes; i4 lane after"),
    "End": _record("f8 at; i4 lane cause spec copies"),
    "Stretch": _record("f8 since; i4 after"),
    "Event": _record("i4 kind key"),
    "Span": _record("f8 start end; i8 n_bytes; i4 lane op layer expert n_tokens"),
    "Fate": _record("i4 issue late harmful gone_in gone_for"),
    "Wish": _record("f8 pri after; i8 asked; i4 lane waits"),
}
"""Records of arrays, as `core.pxd` has them; what each field is stands there."""

# Lanes by number (`sim.base.lanes`); what a stream waits for goes by the same numbers, up to IDLE.
GPU = 0
H2D = 1
HOST = 2
SIDE = 4
IDLE = 6
KINDS = 8  # of waits (`sim.machine.waiting.KINDS`): those causes, and late prefetches
LATE_PREFETCH = 7
N_LANES = len(ATTENDED)
N_RESOURCES = len(RESOURCES)
# Operations that have a place of their own among all; experts' follow.
ATTENTION = 0
GATE = 1
SHARED = 2
HEAD = 3
DENSE = 4
PREDICT = 5
N_BLOCKS = 6
PLACES = {"attention": ATTENTION, "gate": GATE, "shared": SHARED, "head": HEAD, "dense": DENSE}
# What spans tell of besides.
EXPERT = 6
DEMAND_COPY = 7
PREFETCH_COPY = 8
SYNC = 9
OWED = 10
LAUNCH = 16  # and the operation; of a copy LAUNCH + DEMAND_COPY
OPS = ("attention", "gate", "shared_expert", "head", "dense_layer", "predict", "expert", "demand", "prefetch", "sync")
SPANS = dict(enumerate((*OPS, "shared memory")))
SPANS |= {16 + op: f"launch {name}" for op, name in SPANS.items()} | {16 + 7: "launch copy"}
SPAN_LANES = {0: "gpu", 1: "h2d", 2: "host", 4: "predictor"}
NOTED = 64  # operations that a stream remembers, as long as a copy may yet slow them
MOST_LENGTHS = 512  # durations with counters of their own, before they begin anew
INF = float("inf")
PREDICTORS = ("side", "gpu", "host")


def power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 1).bit_length()


class Later(Ticket):
    """A ticket whose end is told when it is known; `number` is the lanes' own."""

    __slots__ = ("number",)
    number: int


def next_of(steps: Any, answer: Any) -> Any:
    """What a generator yields, given an answer; the generator itself where it has come to its end."""
    try:
        return steps.send(answer)
    except StopIteration:
        return steps


def many(kind: str, n: int) -> Any:
    """`n` records of a kind."""
    return records(n, *RECORDS[kind])


def longer(kind: str, old: Any) -> Any:
    """Twice as many, the first of them as they are."""
    new = many(kind, 2 * len(old))
    if COMPILED:
        np.asarray(new)[: len(old)] = np.asarray(old)
    else:
        new[: len(old)] = old
    return new


class Lanes:
    """When things happen: the host's clock, a compute stream, a link, the predictor's lane, memory that they share.

    The host is the only submitter, so lanes are arithmetic (`sim/DESIGN.md`). A demanded copy that nothing can overtake
    and an operation whose inputs have known ends are settled when they are asked for. Others wait: copies in `q`,
    operations in `late`; they settle when the host's clock has passed (`advance`), when somebody demands
    (`settle_demand`), or when the host waits (`settle_next`).
    """

    def __init__(self, n_layers: int, n_experts: int, n_figures: int, prices: Any, tells_spans: bool) -> None:
        n = n_layers * n_experts
        n_late, n_tickets = power(16 * n_experts + 64), power(4 * n + 64 * n_experts + 1024)
        self.n_layers, self.n_experts = n_layers, n_experts
        self.prices = prices
        self.now = self.free = self.link = self.side = self.side_busy = 0.0
        self.begin_s, self.sync_s, self.kernel_s = prices.begin_s, prices.sync_s, prices.kernel_s
        self.n_syncs = self.n_calls = self.n_copies = self.copied_bytes = 0
        self.experts_copied = self.charged_host = self.charged_copy = self.run_s = self.start_s = 0.0
        self.w_between = self.w_first = self.w_row = 3 * n_layers * KINDS
        self.l_first = self.n_late = self.n_q = self.n_demanded = self.n_kinds_met = self.n_tickets = 0
        self.l_mask, self.t_mask = n_late - 1, n_tickets - 1
        self.free_node = -1
        self.told: dict[int, Later] = {}
        self.row = many("Row", 0)  # `Core` has them
        self.n_told = 0
        self.shares = prices.shares
        self.remembers = False
        self.copied = self.owed = self.slowed = 0.0
        self.n_noted = self.n_ops = self.n_tokens = self.n_met = self.n_priced = self.n_lengths = 0
        self.grouped, self.has_shared = prices.grouped, prices.has_shared
        self.g_open = False
        self.g_launched = self.g_slack = 0.0
        self.g_op = self.lead = -1
        self.g_waits: tuple[Any, ...] | None = None
        self.priced_at: dict[tuple[int, float], int] = {}
        self.length_at: dict[float, int] = {}
        self.s_room = 256
        self.n_spans = 0
        self.span_cap = 4096 if tells_spans else 0
        self.gaps = floats(7)
        self.parts = floats(7)
        self.waited = floats((3 * n_layers + 1) * 8)
        self.late = many("Late", n_late)
        self.q = many("Copy", n + 8)
        self.kinds = many("Kind", 64)
        self.kind_of = places(n)
        self.kind_order = places(64)
        self.ends = many("End", n_tickets)
        self.node = many("Node", 64)
        self.noted = floats(3 * 64)
        self.ops = many("Op", 64)
        self.n_before = places(n_layers + 1)
        self.met = places(64)
        self.uses = ints(64)
        self.p_dur = floats(1024)
        self.p_for = places(1024)
        self.p_n = places(1024)
        self.p_order = places(1024)
        self.l_dur = floats(1024)
        self.l_n = places(1024)
        self.l_order = places(1024)
        self.side_spent = floats(n_figures)
        self.host_spent = floats(n_figures)
        self.spent = floats(n_figures + 1)  # the last: of predictors, who count their own
        self.stretch = many("Stretch", N_LANES * self.s_room)
        self.s_n = places(N_LANES)
        self.based = places(N_LANES)
        self.base = floats(N_LANES * N_RESOURCES)
        self.walk_at = places(N_LANES)
        self.kept = places(N_LANES)
        self.kept_s = floats(N_LANES * N_RESOURCES)
        self.path = floats(N_RESOURCES)
        self.resource = places(N_LANES)
        self.spans = many("Span", self.span_cap)
        for i in range(N_LANES):
            self.s_n[i] = self.based[i] = 1
            self.resource[i] = ATTENDED[i]
        for i in range(64):
            self.node[i].next = i - 1
        self.free_node = 63
        for i in range(n_layers + 1):
            self.n_before[i] = prices.n_dense_before[i]
        self.forget()

    # -- prices -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Prices of experts and counters of equal operations begin anew, between iterations."""
        self.n_ops = N_BLOCKS
        self.n_priced = self.n_lengths = 0
        self.priced_at.clear()
        self.length_at.clear()
        self.lead = self.g_op = -1
        self.g_open = False

    def are_many(self) -> bool:
        """Whether it is time for that, so that memory does not grow with the trace."""
        return self.n_lengths > MOST_LENGTHS

    def put_op(self, place: Any, launch: Any, host: Any, price: Any, slack_s: Any) -> Any:
        """The operation at a place (-1: a new one) costs this from now on; its place.

        Args:
            launch: the number of its launch. host: seconds of the host until its first kernel and until the last is
                launched, and the share of the last kernel. price: seconds, figure, and seconds longer beside a copy.
        """
        o = place
        if o < 0:
            o = self.n_ops
            self.n_ops += 1
            if o >= len(self.ops):
                self.ops = longer("Op", self.ops)
                self.met = longer_places(self.met, 2 * o)
        first_s, all_s, tail_frac = host
        duration_s, figure, slowed_s = price
        self.put_seconds(o, duration_s, figure)
        self.ops[o].first = first_s
        self.ops[o].all = all_s
        self.ops[o].tail_frac = tail_frac
        self.ops[o].tail = tail_frac * duration_s
        self.ops[o].slow = slowed_s
        self.ops[o].slack = slack_s
        self.ops[o].launch = launch
        self.ops[o].next = -1
        self.ops[o].n = 0
        return o

    def put_seconds(self, o: int, duration_s: Any, figure: Any) -> int:
        """An operation takes so long from now on."""
        priced = self.priced_at.get((figure, duration_s))
        if priced is None:
            priced = self.priced_at[figure, duration_s] = self.n_priced
            if priced == len(self.p_n):
                self.p_dur = longer_floats(self.p_dur, 2 * priced)
                self.p_for = longer_places(self.p_for, 2 * priced)
                self.p_n = longer_places(self.p_n, 2 * priced)
                self.p_order = longer_places(self.p_order, 2 * priced)
            self.p_dur[self.n_priced] = duration_s
            self.p_for[self.n_priced] = figure
            self.p_n[self.n_priced] = 0
            self.n_priced += 1
        length = self.length_at.get(duration_s)
        if length is None:
            length = self.length_at[duration_s] = self.n_lengths
            if length == len(self.l_n):
                self.l_dur = longer_floats(self.l_dur, 2 * length)
                self.l_n = longer_places(self.l_n, 2 * length)
                self.l_order = longer_places(self.l_order, 2 * length)
            self.l_dur[self.n_lengths] = duration_s
            self.l_n[self.n_lengths] = 0
            self.n_lengths += 1
        self.ops[o].dur = duration_s
        self.ops[o].tail = self.ops[o].tail_frac * duration_s
        self.ops[o].priced = priced
        self.ops[o].length = length
        return 0

    def put_kind(self, kind: Any, duration_s: Any, launch_s: Any, share: Any, n_bytes: Any, calls: Any) -> Any:
        """What copies of a kind cost."""
        k = kind
        while k >= len(self.kinds):
            self.kinds = longer("Kind", self.kinds)
            self.kind_order = longer_places(self.kind_order, len(self.kinds))
        self.kinds[k].dur = duration_s
        self.kinds[k].launch = launch_s
        self.kinds[k].share = share
        self.kinds[k].n_bytes = n_bytes
        self.kinds[k].calls = calls
        self.kinds[k].n = 0

    def use(self, o: int) -> None:
        """An operation is launched."""
        if self.ops[o].n == 0:
            self.met[self.n_met] = o
            self.n_met += 1
        self.ops[o].n += 1

    def tell_uses(self) -> None:
        """Add up the seconds of what ran since the last time, of equal operations as one product, as first met."""
        n_p = 0
        n_l = 0
        for i in range(self.n_met):
            o = self.met[i]
            p = self.ops[o].priced
            if self.p_n[p] == 0:
                self.p_order[n_p] = p
                n_p += 1
            self.p_n[p] += self.ops[o].n
            p = self.ops[o].length
            if self.l_n[p] == 0:
                self.l_order[n_l] = p
                n_l += 1
            self.l_n[p] += self.ops[o].n
            self.uses[self.ops[o].launch] += self.ops[o].n
            self.ops[o].n = 0
        self.n_met = 0
        for i in range(n_p):
            p = self.p_order[i]
            self.spent[self.p_for[p]] += self.p_n[p] * self.p_dur[p]
            self.p_n[p] = 0
        for i in range(n_l):
            p = self.l_order[i]
            self.run_s += self.l_n[p] * self.l_dur[p]
            self.l_n[p] = 0

    # -- who looks on -----------------------------------------------------------------------------------------------

    def span(
        self, lane: int, op: int, layer: int, expert: int, n_tokens: int, n_bytes: int, start: float, end: float
    ) -> None:
        """A lane was busy."""
        i = self.n_spans
        if i == self.span_cap:
            self.spans = longer("Span", self.spans)
            self.span_cap *= 2
        self.spans[i].lane = lane
        self.spans[i].op = op
        self.spans[i].layer = layer
        self.spans[i].expert = expert
        self.spans[i].n_tokens = n_tokens
        self.spans[i].n_bytes = n_bytes
        self.spans[i].start = start
        self.spans[i].end = end
        self.n_spans += 1

    def tell_spans(self, told: Any) -> Any:
        """Tell of what lanes did since the last time."""
        for i in range(self.n_spans):
            told(
                SPAN_LANES[self.spans[i].lane],
                SPANS[self.spans[i].op],
                self.spans[i].layer,
                self.spans[i].expert,
                self.spans[i].n_tokens,
                self.spans[i].n_bytes,
                self.spans[i].start,
                self.spans[i].end,
            )
        self.n_spans = 0

    # -- the critical path (`sim.machine.runs` says what it is) -----------------------------------------------------

    def began(self, lane: int, since: float, after: int) -> None:
        """A lane works again, once something has ended on another."""
        n = self.s_n[lane]
        if n == self.s_room:
            self.widen()
        self.s_n[lane] = n + 1
        n += lane * self.s_room
        self.stretch[n].since = since
        self.stretch[n].after = after

    def widen(self) -> None:
        """Twice as much room for the stretches of each lane."""
        old = self.s_room
        self.stretch = longer("Stretch", self.stretch)
        self.s_room = 2 * old
        for lane in range(N_LANES - 1, 0, -1):
            for i in range(self.s_n[lane] - 1, -1, -1):
                self.stretch[lane * 2 * old + i].since = self.stretch[lane * old + i].since
                self.stretch[lane * 2 * old + i].after = self.stretch[lane * old + i].after

    def walk(self, lane: int, time: float, start: float) -> None:
        """Charge all time from an instant (-1: the start of the run) up to what ended on a lane, to `path`."""
        for i in range(N_RESOURCES):
            self.path[i] = 0.0
        for i in range(N_LANES):
            self.walk_at[i] = self.s_n[i]
        while True:
            first = lane * self.s_room
            i = first + self.walk_at[lane] - 1
            while i > first and self.stretch[i].since > time:
                i -= 1
            if i < first:
                i = first
            self.walk_at[lane] = i - first
            since = self.stretch[i].since
            if since <= start:
                self.path[self.resource[lane]] += time - start
                return
            self.path[self.resource[lane]] += time - since
            time = since
            if i > first:
                lane = self.stretch[i].after
            elif self.based[lane]:
                break
            else:
                lane = HOST
        for i in range(N_RESOURCES):
            self.path[i] += self.base[lane * N_RESOURCES + i]

    def settle_path(self) -> None:
        """Charge what led up to the host's clock; stretches before it are forgotten, but of lanes that are busy."""
        for lane in range(N_LANES):
            self.kept[lane] = -1
            until = self.free if lane == GPU else self.link if lane == H2D else self.side if lane == SIDE else 0.0
            if until > self.now:
                self.keep(lane)
        self.walk(HOST, self.now, -1.0)
        for lane in range(N_LANES):
            if self.kept[lane] >= 0:
                n = self.kept[lane]
                for i in range(lane * self.s_room, lane * self.s_room + self.s_n[lane] - n):
                    self.stretch[i].since = self.stretch[i + n].since
                    self.stretch[i].after = self.stretch[i + n].after
                self.s_n[lane] -= n
                self.based[lane] = 1
                for i in range(lane * N_RESOURCES, (lane + 1) * N_RESOURCES):
                    self.base[i] = self.kept_s[i]
            elif lane != IDLE:
                self.s_n[lane] = 1
                self.stretch[lane * self.s_room].since = self.now
                self.based[lane] = 0
        self.based[HOST] = 1
        for i in range(N_RESOURCES):
            self.base[HOST * N_RESOURCES + i] = self.path[i]

    def keep(self, lane: int) -> None:
        """Work out what was charged before the stretch in which a lane is now."""
        first = lane * self.s_room
        own = lane * N_RESOURCES
        i = self.s_n[lane] - 1
        while i > 0 and self.stretch[first + i].since > self.now:
            i -= 1
        self.kept[lane] = i
        if i == 0 and self.based[lane]:
            for r in range(N_RESOURCES):
                self.kept_s[own + r] = self.base[own + r]
            return
        self.walk(self.stretch[first + i].after if i else HOST, self.stretch[first + i].since, -1.0)
        for r in range(N_RESOURCES):
            self.kept_s[own + r] = self.path[r]

    # -- waits of the stream ----------------------------------------------------------------------------------------

    def charge(self) -> None:
        """What gaps have grown by is charged to the layer that runs."""
        self.waited[self.w_row + HOST] += self.gaps[HOST] - self.charged_host
        self.waited[self.w_row + H2D] += self.gaps[H2D] - self.charged_copy
        self.charged_host = self.gaps[HOST]
        self.charged_copy = self.gaps[H2D]

    def wait(self, w: int, cause: int, spec: bool, gap: float) -> None:
        """The stream stands still."""
        if w == self.w_row and not spec and (cause == HOST or cause == H2D):
            self.gaps[cause] += gap  # told apart when the layer ends
            return
        self.charge()
        self.gaps[cause] += gap
        self.charged_host = self.gaps[HOST]
        self.charged_copy = self.gaps[H2D]
        self.waited[w + (LATE_PREFETCH if spec and cause == H2D else cause)] += gap

    # -- memory that copies share with kernels (`sim.machine.shared_memory`) -----------------------------------------

    def beside(self, start: float, end: float, slow: float) -> float:
        """When an operation ends that starts then: a copy that runs while it starts slows all of it."""
        if start < self.copied:
            if slow > 0.0:
                self.slowed += slow
                end += slow
            return end
        if self.remembers:
            i = 3 * (self.n_noted % NOTED)
            self.noted[i] = start
            self.noted[i + 1] = end
            self.noted[i + 2] = slow
            self.n_noted += 1
        return end

    def copies(self, start: float, end: float) -> None:
        """Something is copied then: operations that are placed owe what that adds."""
        if start < self.free:
            self.remembers = True
            for b in range(self.n_noted if self.n_noted < NOTED else NOTED):
                i = 3 * ((self.n_noted - 1 - b) % NOTED)
                if self.noted[i + 1] <= start:
                    break
                if self.noted[i] < end and self.noted[i + 2] > 0.0:
                    both = self.noted[i + 1] if self.noted[i + 1] < end else end
                    both -= self.noted[i] if self.noted[i] > start else start
                    self.owed += both * self.noted[i + 2] / (self.noted[i + 1] - self.noted[i] + self.noted[i + 2])
        if end > self.copied:
            self.copied = end

    def pay(self) -> None:
        """The stream is free later, by what it owes."""
        free = self.free
        self.free += self.owed
        self.slowed += self.owed
        self.owed = 0.0
        if self.span_cap:
            self.span(GPU, OWED, -1, -1, 0, 0, free, self.free)

    # -- the stream -------------------------------------------------------------------------------------------------

    def place(
        self, w: int, start: float, cause: int, lane: int, spec: bool, last: float, dur: float, tail: float, slow: float
    ) -> float:
        """Settle an operation that may start then, once something has ended on a lane; its end.

        Args:
            w: where its waits count. last: when its last kernel ends at best.
        """
        if self.owed > 0.0:
            self.pay()
        if start > self.free:
            self.began(GPU, start, lane)
            self.wait(w, cause, spec, start - self.free)
        else:
            start = self.free
        end = start + dur
        if slow != 0.0:
            end = self.beside(start, end, slow)
        self.start_s = start
        self.free = end
        if last > end:  # kernels shorter than their launches: the stream starves between them
            self.began(GPU, last - tail, HOST)
            self.wait(w, HOST, False, last - end)
            self.free = last
        return end

    def block(self, o: int, layer: int) -> float:
        """Launch what waits for nothing but the host; its end, or -1.0 where work before it is not settled."""
        host = self.now
        self.now = host + self.ops[o].all
        self.use(o)
        self.g_open = False
        if self.span_cap:
            self.span(HOST, LAUNCH + o, layer, -1, self.n_tokens, 0, host, self.now)
        if self.n_late:
            self.put_late(o, o, layer, -1, self.n_tokens, host, 0.0, HOST, HOST, False, -1)
            return -1.0
        end = self.place(
            self.w_row,
            host + self.ops[o].first,
            HOST,
            HOST,
            False,
            self.now + self.ops[o].tail,
            self.ops[o].dur,
            self.ops[o].tail,
            self.ops[o].slow,
        )
        if self.span_cap:
            self.span(GPU, o, layer, -1, self.n_tokens, 0, self.start_s, end)
        return self.free

    def put_late(
        self,
        o: int,
        told: int,
        layer: int,
        k: int,
        n_tokens: int,
        host: float,
        arrive: float,
        cause: int,
        lane: int,
        spec: bool,
        after: int,
    ) -> int:
        """Launch what cannot be settled yet; its ticket."""
        i = (self.l_first + self.n_late) & self.l_mask
        t = self.ticket()
        self.late[i].first = host + self.ops[o].first
        self.late[i].last = self.now + self.ops[o].tail
        self.late[i].dur = self.ops[o].dur
        self.late[i].tail = self.ops[o].tail
        self.late[i].slow = self.ops[o].slow
        self.late[i].arrive = arrive
        self.late[i].cause = cause
        self.late[i].lane = lane
        self.late[i].spec = spec
        self.late[i].after = after
        self.late[i].ticket = t
        self.late[i].key = k
        self.late[i].row = self.w_row
        self.late[i].op = told
        self.late[i].layer = layer
        self.late[i].n_tokens = n_tokens
        self.n_late += 1
        return t

    def progress(self) -> None:
        """Settle late operations as far as what they wait for has settled."""
        while self.n_late:
            i = self.l_first
            start = self.late[i].first
            cause = lane = HOST
            spec = False
            if self.late[i].arrive > start:
                start = self.late[i].arrive
                cause = self.late[i].cause
                lane = self.late[i].lane
                spec = self.late[i].spec
            j = self.late[i].after
            while j >= 0:
                t = self.node[j].ticket
                e = self.ends[t].at
                if e < 0.0:
                    return
                if e > start:
                    start = e
                    cause = self.ends[t].cause
                    lane = self.ends[t].lane
                    spec = self.ends[t].spec
                j = self.node[j].next
            self.drop_nodes(self.late[i].after)
            self.l_first = (i + 1) & self.l_mask
            self.n_late -= 1
            row = self.w_row
            k = self.late[i].key
            if self.late[i].layer < 0 and self.late[i].row != row:  # waits count for the layer in which it was launched
                self.charge()
                self.w_row = self.late[i].row
            e = self.place(
                self.late[i].row,
                start,
                cause,
                lane,
                spec and cause == H2D,
                self.late[i].last,
                self.late[i].dur,
                self.late[i].tail,
                self.late[i].slow,
            )
            if self.span_cap:
                t = k % self.n_experts if k >= 0 else -1
                self.span(GPU, self.late[i].op, self.late[i].layer, t, self.late[i].n_tokens, 0, self.start_s, e)
            if self.w_row != row:
                self.charge()
                self.w_row = row
            t = self.late[i].ticket
            self.settle(t, self.free, GPU, GPU, False)
            if k >= 0 and self.row[k].reading == t:
                self.row[k].reading = -1
                self.row[k].busy = self.free

    # -- tickets ----------------------------------------------------------------------------------------------------

    def ticket(self) -> int:
        """A number for something whose end is not known yet."""
        t = self.n_tickets & self.t_mask
        self.n_tickets += 1
        self.ends[t].at = -1.0
        self.ends[t].spec = self.ends[t].copies = 0
        return t

    def settle(self, t: int, end: float, lane: int, cause: int, spec: bool) -> None:
        """It is known now."""
        self.ends[t].at = end
        self.ends[t].lane = lane
        self.ends[t].cause = cause
        self.ends[t].spec = spec
        if self.n_told:
            self.tell(t)

    def tell(self, t: int) -> None:
        """Tell whoever has a ticket of when it ended."""
        known = self.told.pop(t, None)
        if known is not None:
            self.n_told -= 1
            known.end_s = self.ends[t].at
            known.lane = self.ends[t].lane
            known.cause = self.ends[t].cause
            known.speculative = self.ends[t].spec != 0

    def add_node(self, first: int, t: int) -> int:
        """One more ticket to wait for, the last; the first of them."""
        i = self.free_node
        j = first
        if i < 0:
            i = len(self.node)
            self.node = longer("Node", self.node)
            for j in range(i, 2 * i):
                self.node[j].next = j - 1 if j > i else -1
            i = 2 * i - 1
            j = first
        self.free_node = self.node[i].next
        self.node[i].ticket = t
        self.node[i].next = -1
        if first < 0:
            return i
        while self.node[j].next >= 0:
            j = self.node[j].next
        self.node[j].next = i
        return first

    def drop_nodes(self, first: int) -> None:
        """Nothing waits for these any more."""
        while first >= 0:
            i = self.node[first].next
            self.node[first].next = self.free_node
            self.free_node = first
            first = i

    def numbers_of(self, first: int) -> Any:
        """Several tickets, by number."""
        found = []
        while first >= 0:
            found.append(self.node[first].ticket)
            first = self.node[first].next
        return found

    def number_of(self, ticket: Any) -> int:
        """A ticket's number; one that is settled gets one anew."""
        if ticket.end_s < 0.0:
            number: int = ticket.number
            return number
        t = self.ticket()
        self.ends[t].at = ticket.end_s
        self.ends[t].lane = ticket.lane
        self.ends[t].cause = ticket.cause
        self.ends[t].spec = ticket.speculative
        return t

    # -- the link ---------------------------------------------------------------------------------------------------

    def ready_of(self, i: int) -> float:
        """When a queued copy may start; -1.0: that is not known yet."""
        j = self.q[i].after
        r: float = self.q[i].ready
        while j >= 0:
            e = self.ends[self.node[j].ticket].at
            if e < 0.0:
                return -1.0
            if e > r:
                r = e
            j = self.node[j].next
        return r

    def waited_for(self, i: int) -> int:
        """The lane of what it waited for last."""
        j = self.q[i].after
        r = self.q[i].ready
        lane: int = self.q[i].lane
        while j >= 0:
            if self.ends[self.node[j].ticket].at > r:
                r = self.ends[self.node[j].ticket].at
                lane = self.ends[self.node[j].ticket].lane
            j = self.node[j].next
        return lane

    def carry(self, k: int, start: float, lane: int, op: int) -> float:
        """The link copies an expert from then on; its end."""
        c = self.kind_of[k]
        end: float = start + self.kinds[c].dur
        if start > self.link:
            self.began(H2D, start, lane)
        self.link = end
        if self.shares:
            self.copies(start, end)
        if self.kinds[c].n == 0:
            self.kind_order[self.n_kinds_met] = c
            self.n_kinds_met += 1
        self.kinds[c].n += 1
        self.n_copies += 1
        self.copied_bytes += self.kinds[c].n_bytes
        if self.span_cap:
            self.span(H2D, op, k // self.n_experts, k % self.n_experts, 0, self.kinds[c].n_bytes, start, end)
        return end

    def serve_copy(self, i: int, start: float) -> None:
        """A queued copy starts."""
        t = self.q[i].ticket
        k = self.q[i].key
        spec = self.ends[t].spec != 0
        e = self.carry(k, start, self.waited_for(i), PREFETCH_COPY if spec else DEMAND_COPY)
        self.unqueue(i)
        self.settle(t, e, H2D, H2D, spec)
        if self.row[k].coming == t:
            self.row[k].coming = -1
            self.row[k].arrive = e
        if self.row[k].reading == t:
            self.row[k].reading = -1
            self.row[k].busy = e
        if self.n_late:
            self.progress()

    def unqueue(self, i: int) -> None:
        """A copy leaves the queue."""
        self.n_q -= 1
        self.n_demanded -= self.q[i].demanded
        self.drop_nodes(self.q[i].after)
        while i < self.n_q:
            self.move(i, i + 1)
            i += 1

    def move(self, i: int, j: int) -> None:
        """One place of the queue as another."""
        self.q[i].ready = self.q[j].ready
        self.q[i].lane = self.q[j].lane
        self.q[i].after = self.q[j].after
        self.q[i].key = self.q[j].key
        self.q[i].demanded = self.q[j].demanded
        self.q[i].ticket = self.q[j].ticket

    def queue_copy(self, k: int, ready: float, lane: int, after: int, demanded: int, t: int) -> None:
        """A copy comes last in the queue."""
        i = self.n_q
        self.q[i].ready = ready
        self.q[i].lane = lane
        self.q[i].after = after
        self.q[i].key = k
        self.q[i].demanded = demanded
        self.q[i].ticket = t
        self.n_q += 1
        self.n_demanded += demanded

    def next_copy(self) -> int:
        """The next copy, which starts at `start_s`: at the first time that any is ready, the best of those; or -1."""
        best = -1
        first = -1.0
        if self.n_q == 1:
            r = self.ready_of(0)
            if r < 0.0:
                return -1
            self.start_s = r if r > self.link else self.link
            return 0
        for i in range(self.n_q):
            r = self.ready_of(i)
            if r >= 0.0 and (first < 0.0 or r < first):
                first = r
        if first < 0.0:
            return -1
        if first < self.link:
            first = self.link
        for i in range(self.n_q):
            if best < 0 or (self.q[i].demanded and not self.q[best].demanded):
                r = self.ready_of(i)
                if 0.0 <= r <= first:
                    best = i
        self.start_s = first
        return best

    def advance(self) -> None:
        """Settle what starts before the host's clock, and demands at it: speculation can still be overtaken then."""
        while self.n_q and self.link <= self.now:
            i = self.next_copy()
            if i < 0 or self.start_s > self.now or (self.start_s == self.now and not self.q[i].demanded):
                return
            self.serve_copy(i, self.start_s)

    def settle_demand(self) -> None:
        """Settle queued demands in the order they will run, as far as no later demand can precede them."""
        r = 0.0
        while True:
            t = self.link if self.link > self.now else self.now
            best = -1
            for i in range(self.n_q):
                if self.q[i].demanded:
                    r = self.ready_of(i)
                    if r < 0.0:
                        return  # asked earlier, and may be ready first: leave it to the order of time
                    if r <= t:
                        best = i
                        break
            if best < 0:
                return
            self.serve_copy(best, self.link if self.link > r else r)

    def settle_next(self) -> bool:
        """Let the next copy start, whatever the host's clock; False when none can."""
        i = self.next_copy()
        if i < 0:
            return False
        self.serve_copy(i, self.start_s)
        return True

    def launch_copy(self, k: int) -> None:
        """The host launches a copy."""
        c = self.kind_of[k]
        host = self.now
        self.now = host + self.kinds[c].launch
        self.experts_copied += self.kinds[c].share
        self.n_calls += self.kinds[c].calls
        if self.span_cap:
            self.span(
                HOST,
                LAUNCH + DEMAND_COPY,
                k // self.n_experts,
                k % self.n_experts,
                0,
                self.kinds[c].n_bytes,
                host,
                self.now,
            )
        if self.n_q:
            self.advance()

    def demand(self, k: int, ready: float, lane: int, after: int) -> None:
        """Copy an expert that somebody waits for, not before `ready` (the end of something on a lane) and after these;
        its copy has been launched."""
        if after < 0 and self.n_demanded == 0 and (ready <= self.now or ready <= self.link):
            self.row[k].arrive = self.row[k].busy = self.carry(
                k, ready if ready > self.link else self.link, lane, DEMAND_COPY
            )
            self.row[k].coming = self.row[k].reading = -1
            if self.n_late:
                self.progress()
            return
        t = self.ticket()
        self.ends[t].copies = 1
        self.row[k].arrive = self.row[k].busy = -1.0
        self.row[k].coming = self.row[k].reading = t
        self.queue_copy(k, ready, lane, after, 1, t)
        if self.n_demanded > 1:
            self.settle_demand()
        else:
            ready = self.ready_of(self.n_q - 1)
            if ready >= 0.0 and (ready <= self.now or ready <= self.link):
                self.serve_copy(self.n_q - 1, ready if ready > self.link else self.link)

    def speculate(self, k: int, ready: float, lane: int, after: int) -> int:
        """Queue a speculative copy of an expert, to be made as `demand` says, when nobody demands; its ticket."""
        t = self.ticket()
        self.ends[t].spec = self.ends[t].copies = 1
        self.row[k].arrive = self.row[k].busy = -1.0
        self.row[k].coming = self.row[k].reading = t
        self.queue_copy(k, ready, lane, after, 0, t)
        return t

    def promote(self, k: int) -> bool:
        """What is needed now goes first; False where its copy has started."""
        t = self.row[k].coming
        self.advance()
        if self.row[k].coming != t:
            return False
        for i in range(self.n_q):
            if self.q[i].ticket == t:
                if not self.q[i].demanded:
                    self.put_last(i)
                    self.settle_demand()
                break
        return True

    def put_last(self, i: int) -> None:
        """A queued copy is a demand from now on."""
        last = self.n_q
        self.move(last, i)
        while i < last:
            self.move(i, i + 1)
            i += 1
        self.q[last - 1].demanded = 1
        self.n_demanded += 1

    def withdraw(self, k: int) -> bool:
        """Take the copy of an expert back; False where it has started or was demanded."""
        t = self.row[k].coming
        if t < 0:
            return False
        self.advance()
        for i in range(self.n_q):
            if self.q[i].ticket == t:
                if self.q[i].demanded:
                    return False
                self.unqueue(i)
                self.settle(t, self.now, HOST, H2D, True)
                self.row[k].coming = -1
                if self.row[k].reading == t:
                    self.row[k].reading = -1
                    self.row[k].busy = self.now
                if self.n_late:
                    self.progress()
                return True
        return False

    def has_arrived(self, k: int) -> bool:
        """Whether an expert's copy has ended by now."""
        if self.row[k].coming >= 0 and not self.link > self.now:
            self.advance()
        if self.row[k].coming >= 0:
            return False
        arrive: float = self.row[k].arrive
        return arrive <= self.now

    # -- experts ----------------------------------------------------------------------------------------------------

    def expert_op(self, n: int, joins: bool) -> int:
        """The operation of an expert for `n` tokens: one that joins a group, begins one, or runs by itself."""
        if joins:
            o = self.ops[self.g_op].next if n == 1 else -1
            if o < 0:
                o = self.prices.expert(self, self.g_slack, n)
                if n == 1:
                    self.ops[self.g_op].next = o
        elif n == 1 and self.lead >= 0:
            o = self.lead
        else:
            o = self.prices.expert(self, -1.0, n)
            if n == 1:
                self.lead = o
        self.g_op = o
        self.g_slack = self.ops[o].slack
        return o

    def expert(self, k: int, n: int) -> int:
        """Launch an expert for `n` tokens once its copy has ended."""
        cause = HOST
        after = -1
        t = self.row[k].coming
        if t >= 0 and self.g_open:
            self.advance()
            t = self.row[k].coming
        arrive = self.row[k].arrive
        if self.g_open and t < 0 and arrive <= self.g_launched:
            o = self.expert_op(n, True)
        else:
            self.g_open = self.grouped
            self.g_launched = self.now
            if self.g_waits is not None:
                self.g_waits = None
            o = self.expert_op(n, False)
        host = self.now
        self.now = host + self.ops[o].all
        self.use(o)
        if self.span_cap:
            self.span(HOST, LAUNCH + EXPERT, k // self.n_experts, k % self.n_experts, n, 0, host, self.now)
        if self.n_late or t >= 0:
            if t >= 0:
                arrive = 0.0
                after = self.add_node(-1, t)
            t = self.put_late(
                o, EXPERT, k // self.n_experts, k, n, host, arrive, H2D, H2D, self.row[k].origin == 1, after
            )
            self.row[k].busy = -1.0
            self.row[k].reading = t
            return 0
        start = host + self.ops[o].first
        if arrive > start:
            start = arrive
            cause = H2D
        end = self.place(
            self.w_row,
            start,
            cause,
            cause,
            cause == H2D and self.row[k].origin == 1,
            self.now + self.ops[o].tail,
            self.ops[o].dur,
            self.ops[o].tail,
            self.ops[o].slow,
        )
        if self.span_cap:
            self.span(GPU, EXPERT, k // self.n_experts, k % self.n_experts, n, 0, self.start_s, end)
        self.row[k].busy = self.free
        self.row[k].reading = -1
        return 0

    def expert_after(self, k: int, n: int, arrival: Any, after: tuple[Any, ...]) -> int:
        """The same once these tickets have ended, too; it joins a group whose first waits for the same.

        Args:
            arrival: the ticket that a policy has of its copy, if any.
        """
        cause = HOST
        lane = HOST
        spec = False
        joins = self.g_open
        chain = -1
        t = self.row[k].coming
        if t >= 0 and joins:
            self.advance()
            t = self.row[k].coming
        arrive = self.row[k].arrive
        if joins and (t >= 0 or arrive > self.g_launched):
            joins = arrival is not None and self.g_waits is not None and arrival in self.g_waits
        if joins:
            for ticket in after:
                if ticket.end_s < 0.0:
                    self.advance()
                if not 0.0 <= ticket.end_s <= self.g_launched:
                    if self.g_waits is None or ticket not in self.g_waits:
                        joins = False
                        break
        if joins:
            o = self.expert_op(n, True)
        else:
            self.g_open = self.grouped
            self.g_launched = self.now
            self.g_waits = None
            if after:
                self.g_waits = after if arrival is None else (arrival, *after)
            o = self.expert_op(n, False)
        host = self.now
        self.now = host + self.ops[o].all
        self.use(o)
        if self.span_cap:
            self.span(HOST, LAUNCH + EXPERT, k // self.n_experts, k % self.n_experts, n, 0, host, self.now)
        start = host + self.ops[o].first
        if t >= 0:
            chain = self.add_node(-1, t)
        elif arrive > start:
            start = arrive
            cause = lane = H2D
            spec = self.row[k].origin == 1
        for ticket in after:
            if chain >= 0 or ticket.end_s < 0.0:
                chain = self.add_node(chain, self.number_of(ticket))
            elif ticket.end_s > start:
                start = ticket.end_s
                cause = ticket.cause
                lane = ticket.lane
                spec = ticket.speculative
        if self.n_late or chain >= 0:
            t = self.put_late(o, EXPERT, k // self.n_experts, k, n, host, start, cause, lane, spec, chain)
            self.row[k].busy = -1.0
            self.row[k].reading = t
            return 0
        start = self.place(
            self.w_row,
            start,
            cause,
            lane,
            spec and cause == H2D,
            self.now + self.ops[o].tail,
            self.ops[o].dur,
            self.ops[o].tail,
            self.ops[o].slow,
        )
        if self.span_cap:
            self.span(GPU, EXPERT, k // self.n_experts, k % self.n_experts, n, 0, self.start_s, start)
        self.row[k].busy = self.free
        self.row[k].reading = -1
        return 0

    # -- the host ---------------------------------------------------------------------------------------------------

    def sync(self, end: float, lane: int, cause: int, spec: bool) -> None:
        """The host waits for what ends then, and reads it."""
        if end > self.now:
            self.now = end
            self.began(HOST, end, lane)
            if self.n_late:
                self.advance()  # copies that have started by now
            if cause == H2D and not self.n_late:
                self.idle_until(end, cause, spec)  # a stream that idles meanwhile waits for that copy, too
        self.n_syncs += 1
        host = self.now
        self.now = host + self.sync_s
        self.g_open = False
        if self.span_cap:
            self.span(HOST, SYNC, -1, -1, 0, 0, host, self.now)

    def settle_until(self, t: int) -> int:
        """The host is blocked: let copies start, in time order, until a ticket's end is known."""
        while self.ends[t].at < 0.0:
            if not self.settle_next():
                raise RuntimeError("deadlock: the host waits for work that waits for no copy (a bug in the core)")
        return 0

    def idle_until(self, time: float, cause: int, spec: bool) -> None:
        """Charge the stream's time up to then."""
        if time > self.free:
            self.began(GPU, time, HOST)  # the host goes on now
            self.wait(self.w_row, cause, spec and cause == H2D, time - self.free)
            self.free = time

    def read(self, end: float) -> int:
        """The host reads what the stream was given last, which ends then (-1.0: with the last ticket)."""
        if end < 0.0:
            t = (self.n_tickets - 1) & self.t_mask
            self.settle_until(t)
            end = self.ends[t].at
        self.sync(end, GPU, GPU, False)
        return 0

    def begin(self, iteration: Any) -> None:
        """An iteration begins: price it."""
        if self.are_many():
            self.forget()
            self.prices.forget()
        self.charge()
        self.w_first = self.w_row = iteration.number * self.n_layers * KINDS
        self.now += self.begin_s
        self.n_tokens = iteration.n_tokens
        self.prices.begin(self, iteration)

    def begin_alone(self, context: int) -> int:
        """An iteration begins of one decode token behind so many others, after another like that."""
        o = ATTENTION
        if self.n_lengths > MOST_LENGTHS:
            self.forget()
            self.prices.forget()
            self.prices.begin_alone(self)
        self.charge()
        self.w_first = self.w_row = self.n_layers * KINDS
        self.now += self.begin_s
        duration_s, figure, slowed_s = self.prices.attention(context)
        self.put_seconds(o, duration_s, figure)
        self.ops[o].slow = slowed_s
        return 0

    def to_gate(self, layer: int) -> int:
        """Launch a layer's blocks, and let the host read its gate."""
        self.charge()
        self.w_row = self.w_first + layer * KINDS
        for i in range(self.n_before[layer]):
            self.block(DENSE, layer)
        self.block(ATTENTION, layer)
        gate = self.block(GATE, layer)
        t = (self.n_tickets - 1) & self.t_mask
        if self.has_shared:
            self.block(SHARED, layer)
        if gate < 0.0:
            self.settle_until(t)
            gate = self.ends[t].at
        self.sync(gate, GPU, GPU, False)
        return 0

    def head(self) -> int:
        """The output head, which the host reads."""
        for i in range(self.n_before[self.n_layers]):
            self.block(DENSE, -1)
        self.read(self.block(HEAD, -1))
        self.idle_until(self.now, HOST, False)
        self.tell_uses()
        return 0

    def predict(self, duration_s: float, lane: Any, blocking: bool, basis: Any) -> Any:
        """Spend a predictor's time: on a lane of its own (`side`), the host's or the stream's; when that ends."""
        figure = self.prices.predictors[basis]
        host = self.now
        if lane == "side":
            if blocking:  # a blocked host launches nothing: its waiting is then what the stream waits for
                self.host_spent[figure] += duration_s
            else:
                self.side_spent[figure] += duration_s
            if host > self.side:
                self.side = host
                self.began(SIDE, host, HOST)
            if self.span_cap:
                self.span(SIDE, PREDICT, -1, -1, 0, 0, self.side, self.side + duration_s)
            self.side += duration_s
            self.side_busy += duration_s
            ticket = ends_at(self.side, SIDE, SIDE)
        elif lane == "host":
            self.g_open = False
            self.host_spent[figure] += duration_s
            self.now = host + duration_s
            if self.span_cap:
                self.span(HOST, PREDICT, -1, -1, 0, 0, host, self.now)
            ticket = ends_at(self.now, HOST, HOST)
        else:
            ticket = self.predict_on_gpu(self.prices.prediction(self, duration_s), figure)
        if blocking:
            self.sync_ticket(ticket)
        return ticket

    def predict_on_gpu(self, o: int, figure: int) -> Any:
        """A predictor on the stream, whose operation has a place."""
        host = self.now
        self.g_open = False
        self.now = host + self.ops[o].all
        self.use(o)
        self.spent[figure] += self.ops[o].dur
        if self.n_late:
            return self.ticket_of(self.put_late(o, PREDICT, -1, -1, 0, host, 0.0, HOST, HOST, False, -1))
        end = self.place(
            self.w_row, host + self.ops[o].first, HOST, HOST, False, self.now, self.ops[o].dur, 0.0, self.ops[o].slow
        )
        if self.span_cap:
            self.span(GPU, PREDICT, -1, -1, 0, 0, self.start_s, end)
        return ends_at(self.free, GPU, GPU)

    def ticket_of(self, number: Any) -> Any:
        """A ticket that a policy may hold, told when it is settled."""
        t = number
        known = self.told.get(t)
        if known is None:
            known = Later(-1.0, GPU if not self.ends[t].copies else H2D)
            known.number = t
            known.speculative = self.ends[t].spec != 0
            self.told[t] = known
            self.n_told += 1
        return known

    def attention(self, layer: Any) -> Any:
        """The blocks of a layer before its gate."""
        self.charge()
        self.w_row = self.w_first + layer * KINDS
        for i in range(self.n_before[layer]):
            self.block(DENSE, layer)
        self.block(ATTENTION, layer)

    def gate(self, layer: Any) -> Any:
        """Its gate, and what follows until the host has read it."""
        gate = self.block(GATE, layer)
        t = (self.n_tickets - 1) & self.t_mask
        if self.has_shared:
            self.block(SHARED, layer)
        if gate < 0.0:
            self.settle_until(t)
            gate = self.ends[t].at
        self.sync(gate, GPU, GPU, False)

    def sync_ticket(self, ticket: Any) -> int:
        """The host waits for what a ticket stands for."""
        if ticket.end_s < 0.0:
            self.settle_until(ticket.number)
        self.sync(ticket.end_s, ticket.lane, ticket.cause, ticket.speculative)
        return 0

    def wait_until(self, time_s: float) -> None:
        """Nothing is asked for until then."""
        if time_s > self.now:
            self.now = time_s
            self.began(HOST, self.now, IDLE)
            self.idle_until(self.now, IDLE, False)

    def parts_s(self) -> Any:
        """GPU 0's time line until now: busy, or waiting, by cause."""
        self.settle_parts()
        return [self.parts[i] for i in range(7)]

    def settle_parts(self) -> None:
        """Charge them until now."""
        self.tell_uses()
        if not self.n_late:
            self.idle_until(self.now, HOST, False)  # hooks after the last read may have kept the host busy
        self.charge()
        self.w_first = self.w_row = self.w_between
        for i in range(7):
            self.parts[i] = self.gaps[i]
        self.parts[0] += self.run_s + self.slowed

    def path_s(self) -> Any:
        """Time until now by the resource on the critical path."""
        if not self.shares:
            self.advance()
        self.settle_path()
        return [self.path[i] for i in range(N_RESOURCES)]

    def drain(self) -> None:
        """Let what is queued start."""
        while self.settle_next():
            pass

    def busy_s(self) -> Any:
        """Seconds of the stream, and of the link."""
        self.tell_uses()
        by_s: dict[float, int] = {}
        for i in range(self.n_kinds_met):
            c = self.kind_order[i]
            by_s[self.kinds[c].dur] = by_s.get(self.kinds[c].dur, 0) + self.kinds[c].n
        link = 0.0
        for duration_s, n in by_s.items():
            link += n * duration_s
        return self.run_s + self.slowed, link

    def by_figure_s(self) -> Any:
        """Seconds of operations by the figure that they rest on."""
        return [self.spent[i] for i in range(len(self.spent) - 1)]

    def predictors_s(self) -> tuple[list[float], list[float]]:
        """Seconds of predictors on a lane of their own, and of the host's, by figure."""
        return list(self.side_spent), list(self.host_spent)

    def waits_s(self) -> Any:
        """What GPU 0 waited for, by phase, layer and kind."""
        return [self.waited[i] for i in range((3 * self.n_layers + 1) * KINDS)]

    def uses_of(self, launch: Any) -> Any:
        """How often a launch was used, by its number."""
        i = launch
        return self.uses[i]


# Orders of leaving.
RECENCY = 0
INSERTION = 1
RANKS = 2  # the least of the ranks that a policy writes
ASKED = 3  # a policy in Python names who leaves
ORDERS = {"recency": RECENCY, "insertion": INSERTION, "ranks": RANKS, "asked": ASKED}
# How a gate finds an expert (`sim.engine.counts.CLASSES`), and why it misses one: columns of `by`.
HIT = 0
LATE = 2
MISS = 3
CAPACITY = 7
EVICTED_UNUSED = 8
WRONG_PREDICTION = 9
TOO_LATE = 10
DEMANDED = by_expert.DEMAND
ISSUED = by_expert.ISSUED
ISSUED_WHOLE = by_expert.ISSUED_WHOLE
ISSUED_BYTES = by_expert.ISSUED_BYTES
CANCEL = by_expert.CANCEL
CANCEL_WHOLE = by_expert.CANCEL_WHOLE
CANCELLED = by_expert.CANCELLED
CANCELLED_BYTES = by_expert.CANCELLED_BYTES
REFUSED = by_expert.REFUSED
FATE = by_expert.FATE
FATE_BYTES = by_expert.FATE_BYTES
HELD = by_expert.HELD
INSTEAD = by_expert.INSTEAD
N_COLUMNS = len(by_expert.COLUMNS)
# What becomes of a prefetch.
USEFUL = 0
LATE_USE = 1
WASTED = 2
HARMFUL = 3
MOST = 1_000_000  # decisions of one call of a hook
# Kinds of a log's events.
EVENTS = ("evict", "fetch", "gpu", "prefetch", "cancel")
LEFT = 0
FETCHED = 1
RAN = 2
HANDED = 3
WITHDRAWN = 4


class Core:
    """Who is resident, who leaves, what a layer still needs, and what all of that is counted as. Its `lanes` say when.

    A copy takes its room when it is asked for. Room that something still reads stands in `rooms`, longest freed first;
    whoever takes it waits for that.
    """

    def __init__(self, lanes: Lanes, n_layers: int, n_experts: int, pieces: Any, size: int, tells_log: bool) -> None:
        n = n_layers * n_experts
        self.lanes = lanes
        self.L, self.E, self.size, self.pieces = n_layers, n_experts, size, pieces
        self.budget = self.taken = self.peak = self.clean = 0
        self.divided = self.per_layer = self.spares_unused = self.guarded = self.predicts = False
        self.r_first = self.n_rooms = self.n_came = self.n_res = self.n_want = self.n_left = self.n_left_for = 0
        self.r_mask = power(2 * n) - 1
        self.ready_s, self.ready_lane, self.ready_after = 0.0, HOST, -1
        self.order, self.layer, self.entered, self.tick = ASKED, -1, 0, 1
        self.depth, self.n_line, self.n_asked, self.n_fly = -1, 0, 0, 0
        self.quiet, self.checked = 0.0, -1.0
        self.wish_after: dict[int, tuple[Any, ...]] = {}
        self.after_tickets: dict[int, list[int]] = {}
        self.arrivals: dict[int, Any] = {}
        self.waits_after = False
        self.asked_from: Any = None
        self.w_tickets: tuple[Any, ...] | None = None
        self.w_after, self.w_lane = 0.0, HOST
        self.spoken, self.phase, self.by_first, self.pass_n = n_layers, 0, 0, 1
        self.n_issued = self.n_cancelled = self.n_dropped = self.n_unused = 0
        self.n_demand = self.n_evicted = self.n_executed = 0
        self.n_events = 0
        self.log_cap = 4096 if tells_log else 0
        nobody: Any = None
        self.view = self.judge = self.block = nobody
        self.tells_accessed = self.tells_evicted = self.tells_placed = False
        self.on_accessed = self.on_evicted = self.on_placed = self.on_victim = nobody
        self.row = many("Row", n + n_layers)
        self.flags = bytearray(n)
        self.layer_budget = ints(n_layers)
        self.layer_taken = ints(n_layers)
        self.rooms = many("Room", self.r_mask + 1)
        self.res = places(n)
        self.stands = places(n)
        self.tie = places(n)
        self.want = places(n_experts)
        self.asked = places(n_experts)
        self.tokens = places(n_experts)
        self.turn = places(n_experts)
        self.lack = places(n_experts)
        self.left = places(n)
        self.wishes = many("Wish", n)
        self.line = places(n)
        self.fly = places(n)
        self.fly_in = places(n)
        self.fly_ticket = places(n)
        self.after_ready = floats(n)
        self.after_lane = places(n)
        self.fate = many("Fate", n)
        self.wanted_for = places(n)
        self.predicted_for = places(n_layers)
        self.by = ints(N_COLUMNS * 3 * n)
        self.sums = floats(33)
        self.n_class = ints(3 * 7 * 2)
        self.n_aside = ints(21)
        self.n_prefetched = ints(3)
        self.n_fate = ints(4)
        self.events = many("Event", self.log_cap)
        self.lanes.row = self.row
        for k in range(n):
            self.row[k].coming = self.row[k].reading = -1
            self.tie[k] = (k % self.E) * self.L + k // self.E
        for k in range(n, n + n_layers):
            self.row[k].prev = self.row[k].next = k

    # -- before the run ---------------------------------------------------------------------------------------------

    def bind(
        self,
        budget: Any,
        layer_budgets: Any,
        depth: Any,
        order: Any,
        per_layer: Any,
        ranks: Any = None,
        bars: Any = None,
        options: Any = (False, False, True),
    ) -> Any:
        """Take over what binding the policy has settled.

        Args:
            layer_budgets: bytes by layer where the cache is divided. order: who leaves; of RANKS the policy's arrays,
                and whether it spares unused prefetches, guards residents against
                prefetches of lower ranks, and breaks ties by expert.
        """
        self.budget = self.clean = budget
        self.divided = layer_budgets is not None
        for k in range(self.L if self.divided else 0):
            self.layer_budget[k] = layer_budgets[k]
        self.depth, self.order, self.per_layer = depth, order, per_layer
        self.spares_unused, self.guarded, by_expert_first = options
        if not by_expert_first:
            for k in range(self.L * self.E):
                self.tie[k] = k
        if ranks is not None:
            self.rank, self.bar = ranks, bars

    def listen(self, view: Any, judge: Any, hooks: dict[str, Any], assigns: bool) -> None:
        """Hooks of the policy that are asked and told of layers and pieces, by name; `judge` refuses what is wrong."""
        self.view, self.judge = view, judge
        self.on_victim, self.on_accessed = hooks["victim"], hooks.get("accessed")
        self.on_evicted, self.on_placed = hooks.get("evicted"), hooks.get("placed")
        self.on_layer_enter, self.on_gate_input = hooks.get("layer_enter"), hooks.get("gate_input")
        self.on_gate_done, self.on_layer_done = hooks.get("gate_done"), hooks.get("layer_done")
        self.tells_accessed, self.tells_evicted = self.on_accessed is not None, self.on_evicted is not None
        self.tells_placed = self.on_placed is not None
        self.assigns = assigns

    def put(self, key: Any) -> Any:
        """An expert is there from the start."""
        k = key
        if self.row[k].here or not self.fits(k):
            raise self.judge.too_much(self.pieces[k], 2)
        self.add(k, 2)
        self.row[k].arrive = self.row[k].busy = 0.0
        self.by[HELD * 3 * self.L * self.E + self.by_first + k] += 1
        self.clean -= self.size
        self.come(k)

    # -- counts -----------------------------------------------------------------------------------------------------

    def more(self, column: int, k: int, n: int) -> None:
        """Count `n` more for an expert."""
        self.by[column * 3 * self.L * self.E + self.by_first + k] += n

    def note(self, kind: int, k: int) -> None:
        """Write a decision into the log."""
        if self.n_events == self.log_cap:
            self.events = longer("Event", self.events)
            self.log_cap *= 2
        self.events[self.n_events].kind = kind
        self.events[self.n_events].key = k
        self.n_events += 1

    def tell_log(self, log: Any) -> Any:
        """Tell of decisions since the last time."""
        for i in range(self.n_events):
            log(EVENTS[self.events[i].kind], self.events[i].key // self.E, self.events[i].key % self.E)
        self.n_events = 0

    def begin(self, phase: Any) -> Any:
        """A pass of a phase begins."""
        if phase != self.phase:
            self.end_phase()
            self.phase = phase
            self.by_first = self.phase * self.L * self.E
            for k in range(self.L * self.E):
                self.more(HELD, k, self.row[k].here)
        self.pass_n += 1
        self.spoken = -1

    def end_phase(self) -> Any:
        """Take what was counted in rows."""
        for k in range(self.L * self.E):
            self.more(HELD, k, -self.row[k].here)
            self.more(0, k, self.row[k].ran)
            self.more(CAPACITY, k, self.row[k].again)
            self.more(DEMANDED, k, self.row[k].demanded)
            self.row[k].ran = self.row[k].again = self.row[k].demanded = 0

    def missed(self, k: int) -> None:
        """Count why an expert is missing, of which nothing is there or coming when its gate asks."""
        left = self.row[k].left_in
        if left == self.pass_n:
            self.more(EVICTED_UNUSED, k, 1)
        elif self.predicts and self.wanted_for[k] == self.pass_n:
            self.more(TOO_LATE, k, 1)
        elif left == 0:
            self.more(MISS, k, 1)
        elif self.predicts and self.predicted_for[self.layer] == self.pass_n:
            self.more(WRONG_PREDICTION, k, 1)
        else:
            self.row[k].again += 1

    # -- who leaves -------------------------------------------------------------------------------------------------

    def ring(self, k: int) -> int:
        """Where the ring of an expert's cache begins and ends."""
        return self.L * self.E + (k // self.E if self.per_layer else 0)

    def cut(self, k: int) -> None:
        """An expert leaves its ring."""
        before = self.row[k].prev
        after = self.row[k].next
        self.row[before].next = after
        self.row[after].prev = before

    def push(self, k: int) -> None:
        """It comes last in the ring of its cache."""
        end = self.ring(k)
        last = self.row[end].prev
        self.row[last].next = k
        self.row[k].prev = last
        self.row[k].next = end
        self.row[end].prev = k

    def come(self, k: int) -> None:
        """An expert has taken its room."""
        if self.order <= INSERTION:
            self.push(k)
        elif self.order == RANKS:
            self.res[self.n_res] = k
            self.stands[k] = self.n_res
            self.n_res += 1

    def gone(self, k: int) -> None:
        """It has given its room up."""
        if self.order <= INSERTION:
            self.cut(k)
        elif self.order == RANKS:
            self.n_res -= 1
            last = self.res[self.n_res]
            self.res[self.stands[k]] = last
            self.stands[last] = self.stands[k]

    def touch(self, k: int) -> None:
        """It is used where it lies."""
        if self.order == RECENCY:
            self.cut(k)
            self.push(k)

    def leaver(self, k: int, speculative: bool) -> int:
        """Who makes room for an expert; -1: nobody may."""
        if self.order <= INSERTION:
            e = self.ring(k)
            v = self.row[e].next
            while v != e and self.row[v].mark == self.tick:
                v = self.row[v].next
            return -1 if v == e else v
        if self.order == RANKS:
            v = self.least(k, speculative)
            return -1 if v >= 0 and speculative and self.guarded and not self.rank[v] < self.rank[k] else v
        named = self.on_victim(self.pieces[k], speculative, self.view)
        if named is None:
            return -1
        if type(named) is Piece:
            one: Piece = named
            v = one.index
            known = 0 <= v < self.L * self.E and self.pieces[v] is named
            if known and self.row[v].here and self.row[v].mark != self.tick:
                return v
        return int(self.judge.victim(named))  # which says what is wrong with it

    def least(self, k: int, speculative: bool) -> int:
        """The least rank of residents, by bars (`sim.policy.order.Rank`)."""
        best = -1
        best_bar = 1
        best_rank = 0.0
        most = INF  # above it none is better than the best so far
        first = k - k % self.E
        for i in range(self.E if self.per_layer else self.n_res):
            v = first + i if self.per_layer else self.res[i]
            r = self.rank[v]
            if r > most or self.row[v].mark == self.tick or not self.row[v].here:
                continue
            b = self.bar[v]
            if b == 0 and self.spares_unused and self.row[v].unused:
                b = 1
            if b == 1 and not speculative:
                b = 0
            if b == 3 or (b and speculative):
                continue
            if best >= 0:
                if b > best_bar or (b == best_bar and r > best_rank):
                    continue
                if b == best_bar and r == best_rank and self.tie[v] > self.tie[best]:
                    continue
            best = v
            best_bar = b
            best_rank = r
            if b == 0:
                most = r
        return best

    # -- room -------------------------------------------------------------------------------------------------------

    def fits(self, k: int) -> bool:
        """Whether an expert can come without another's leaving."""
        if self.divided and self.layer_taken[k // self.E] + self.size > self.layer_budget[k // self.E]:
            return False
        return self.taken + self.size <= self.budget

    def add(self, k: int, origin: int) -> None:
        """An expert takes its room."""
        self.taken += self.size
        if self.taken > self.peak:
            self.peak = self.taken
        if self.divided:
            self.layer_taken[k // self.E] += self.size
        self.row[k].here = self.flags[k] = 1
        self.row[k].origin = origin
        self.row[k].unused = origin == 1
        self.row[k].came = self.n_came
        self.n_came += 1

    def take_off(self, k: int) -> None:
        """An expert is resident no more."""
        self.taken -= self.size
        if self.divided:
            self.layer_taken[k // self.E] -= self.size
        self.row[k].here = self.flags[k] = 0

    def give(self, n_bytes: int, ready: float, lane: int, after: int) -> None:
        """Room is free again once what reads or writes it has ended: at `ready` (on a lane), and these tickets."""
        if after < 0 and ready <= self.lanes.now:
            self.clean += n_bytes
            return
        i = (self.r_first + self.n_rooms) & self.r_mask
        self.rooms[i].n_bytes = n_bytes
        self.rooms[i].ready = ready
        self.rooms[i].lane = lane
        self.rooms[i].after = after
        self.n_rooms += 1

    def is_over(self, i: int, now: float) -> bool:
        """Whether nothing reads a freed room any more."""
        j = self.rooms[i].after
        if self.rooms[i].ready > now:
            return False
        while j >= 0:
            e = self.lanes.ends[self.lanes.node[j].ticket].at
            if e < 0.0 or e > now:
                return False
            j = self.lanes.node[j].next
        return True

    def take(self, n_bytes: int, now: float) -> None:
        """Take room, what was freed longest first; `ready_*` say what must be over before it is overwritten."""
        lacks = n_bytes
        self.ready_s = 0.0
        self.ready_lane = HOST
        self.ready_after = -1
        while self.n_rooms and self.is_over(self.r_first, now):
            self.clean += self.rooms[self.r_first].n_bytes
            self.lanes.drop_nodes(self.rooms[self.r_first].after)
            self.r_first = (self.r_first + 1) & self.r_mask
            self.n_rooms -= 1
        while self.clean < n_bytes and self.n_rooms:
            i = self.r_first
            more = self.rooms[i].n_bytes
            if self.rooms[i].ready > self.ready_s:
                self.ready_s = self.rooms[i].ready
                self.ready_lane = self.rooms[i].lane
            j = self.rooms[i].after
            while j >= 0:
                self.ready_after = self.lanes.add_node(self.ready_after, self.lanes.node[j].ticket)
                j = self.lanes.node[j].next
            if more > lacks:  # what is left of it waits for the same
                self.rooms[i].n_bytes = more - lacks
                more = lacks
            else:
                self.lanes.drop_nodes(self.rooms[i].after)
                self.r_first = (i + 1) & self.r_mask
                self.n_rooms -= 1
                lacks -= more
            self.clean += more
        self.clean -= n_bytes

    def make_room(self, k: int, speculative: bool) -> int:
        """Evict until an expert fits; 0: nobody may leave for it."""
        while not self.fits(k):
            v = self.leaver(k, speculative)
            if v < 0:
                return 0
            self.evict(v)
            if speculative:
                self.left[self.n_left_for] = v
                self.n_left_for += 1
        return 1

    def evict(self, v: int) -> int:
        """An expert leaves."""
        after = -1
        lane = GPU
        ready = self.row[v].busy
        self.take_off(v)
        self.gone(v)
        self.n_evicted += 1
        if self.log_cap:
            self.note(LEFT, v)
        if self.row[v].unused:
            if self.lanes.withdraw(v):
                self.withdrawn(v)
                return 0
            self.becomes(v, WASTED)
        self.row[v].left_in = self.pass_n
        if ready < 0.0 and self.row[v].reading >= 0:  # withdrawing may have settled it
            after = self.lanes.add_node(-1, self.row[v].reading)
            ready = 0.0
        elif self.row[v].busy == self.row[v].arrive:  # nothing has read it: its own copy is what writes it
            ready = self.row[v].busy
            lane = H2D
        else:
            ready = self.row[v].busy
        self.give(self.size, ready, lane, after)
        if self.tells_evicted:
            self.on_evicted(self.pieces[v], self.view)
        return 0

    def demand(self, k: int) -> int:
        """Copy an expert that somebody waits for; 0: nobody may leave for it."""
        ready = 0.0
        lane = HOST
        after = -1
        now = self.lanes.now
        if not self.fits(k) and not self.make_room(k, False):
            return 0
        if self.n_rooms:
            self.take(self.size, now)
            ready = self.ready_s
            lane = self.ready_lane
            after = self.ready_after
        else:
            self.clean -= self.size
        self.lanes.launch_copy(k)
        if ready <= self.lanes.now:
            ready = self.lanes.now
            lane = HOST
        if self.waits_after:  # what the policy has it wait for
            self.waits_after = False
            if self.wishes[k].after > ready:
                ready = self.wishes[k].after
                lane = self.wishes[k].lane
            for ticket in self.wish_after.pop(k, ()):
                after = self.lanes.add_node(after, self.lanes.number_of(ticket))
        self.lanes.demand(k, ready, lane, after)
        self.add(k, 0)
        self.come(k)
        if self.n_issued:
            self.fate[k].gone_in = 0
        self.n_demand += 1
        self.row[k].demanded += 1
        if self.log_cap:
            self.note(FETCHED, k)
        return 1

    # -- a layer ----------------------------------------------------------------------------------------------------

    def enter(self, layer: int) -> None:
        """A layer begins: nothing is asked for yet."""
        if self.n_left:
            for i in range(self.n_want):
                self.tokens[self.want[i] % self.E] = 0
        self.tick += 1
        self.layer = layer
        if layer >= 0:
            self.entered = layer
        self.n_want = self.n_left = 0

    def ask(self, expert: int, n_tokens: int) -> None:
        """The gate asks for one more expert."""
        k = self.layer * self.E + expert
        self.want[self.n_want] = k
        self.asked[self.n_want] = n_tokens
        self.tokens[expert] = n_tokens
        self.row[k].mark = self.tick
        self.n_want += 1
        self.n_left += 1

    def find(self, k: int) -> int:
        """How the gate finds an expert, before anybody reacts; what that says of prefetches, and why a miss is one, is
        counted."""
        if self.row[k].here:
            if self.lanes.has_arrived(k):
                self.n_prefetched[self.phase] += self.row[k].unused
                return HIT
            self.fate[k].late = 1
            self.more(LATE, k, 1)
            return LATE
        self.missed(k)
        if self.n_issued and self.fate[k].gone_in:  # whoever evicted it for speculation did harm
            by = self.fate[k].gone_for
            if self.fate[by].issue == self.fate[k].gone_in and not self.fate[by].harmful:
                self.fate[by].harmful = 1
                self.count_fate(by, HARMFUL)
            self.fate[k].gone_in = 0
        return MISS

    def classify(self) -> None:
        """How the gate finds what it has asked for."""
        self.spoken = self.layer
        for i in range(self.n_want):
            c = self.phase * 14 + 2 * self.find(self.want[i])
            self.n_class[c] += 1
            self.n_class[c + 1] += self.asked[i]

    def classify_asked(self, asked: Any) -> Any:
        """The same of the gate's own choice, expert -> tokens, where a lossy policy has changed it; and of others that
        serve in their place, of which no prefetch is judged."""
        first = self.layer * self.E
        self.spoken = self.layer
        for expert, n_tokens in asked.items():
            k = first + expert
            c = self.phase * 14 + 2 * self.find(k)
            self.n_class[c] += 1
            self.n_class[c + 1] += n_tokens
        for i in range(self.n_want):
            k = self.want[i]
            if k - first not in asked:
                c = MISS if not self.row[k].here else HIT if self.lanes.has_arrived(k) else LATE
                self.n_aside[self.phase * 7 + c] += 1
                self.more(INSTEAD, k, 1)

    def serve(self) -> int:
        """Fetch what is missing, run residents meanwhile, then what arrives, in the order of the gate."""
        n = 0
        n_missing = 0
        n_later = 0
        early = self.depth < 0  # nobody makes room between runs: who is there may be touched before
        for i in range(self.n_want):
            k = self.want[i]
            if self.row[k].mark != self.tick:
                continue  # it ran
            if self.row[k].here:
                self.turn[n] = k
                n += 1
                if self.row[k].coming >= 0:
                    self.promote(k)
                if early:
                    self.touch(k)
                if self.tells_accessed:
                    self.on_accessed(self.pieces[k], True, self.view)
            else:
                self.lack[n_missing] = k
                n_missing += 1
        for i in range(n_missing):
            k = self.lack[i]
            if self.n_line:
                self.leave_line(k)
            if self.demand(k):
                self.turn[n] = k
                n += 1
                if self.tells_accessed:
                    self.on_accessed(self.pieces[k], False, self.view)
            else:
                self.lack[n_later] = k
                n_later += 1
        for i in range(n):
            if not early:
                self.touch(self.turn[i])
            self.run(self.turn[i])
        for i in range(n_later):  # more experts than room: each waits until one before it has run
            k = self.lack[i]
            self.fetch(k)
            if self.tells_accessed:
                self.on_accessed(self.pieces[k], False, self.view)
            self.touch(k)
            self.run(k)
        return 0

    def fetch(self, k: int) -> int:
        """Demand an expert; one on its way goes first instead."""
        if self.row[k].here:
            if self.row[k].coming >= 0:
                self.promote(k)
            return 0
        if self.n_line:
            self.leave_line(k)
        if not self.demand(k):
            raise self.judge.no_room(self.pieces[k])
        return 0

    def run(self, k: int) -> int:
        """Compute an expert that is there, or will be."""
        return self.run_after(k, ())

    def run_after(self, k: int, after: tuple[Any, ...]) -> int:
        """The same, once these have ended, too."""
        expert = k - self.layer * self.E
        n = self.tokens[expert]
        if after or self.lanes.g_waits is not None:
            self.lanes.expert_after(k, n, self.arrivals.get(k), after)
        else:
            self.lanes.expert(k, n)
        if self.row[k].unused:
            self.row[k].unused = 0
            self.becomes(k, LATE_USE if self.fate[k].late else USEFUL)
        self.row[k].mark = 0
        self.tokens[expert] = 0
        self.n_left -= 1
        self.row[k].ran += 1
        self.n_executed += n
        if self.log_cap:
            self.note(RAN, k)
        if self.n_line:
            self.pump()
        return 0

    # -- prefetches -------------------------------------------------------------------------------------------------

    def count_fate(self, k: int, fate: int) -> None:
        """Count what became of a prefetch."""
        self.n_fate[fate] += 1
        self.more(FATE + fate, k, 1)
        self.more(FATE_BYTES + fate, k, self.size)

    def becomes(self, k: int, fate: int) -> None:
        """What becomes of a prefetch is settled."""
        if self.fate[k].issue == 0:
            return
        self.fate[k].issue = 0
        self.n_unused -= 1
        if fate <= WASTED:
            self.count_fate(k, fate)
        else:
            self.n_cancelled += 1
            self.more(CANCELLED, k, 1)
            self.more(CANCELLED_BYTES, k, self.size)

    def predicted(self, k: int) -> None:
        """The policy has asked for an expert before its gate."""
        layer = k // self.E
        aim = self.pass_n + (1 if layer <= self.spoken else 0)
        self.predicts = True
        self.predicted_for[layer] = aim
        self.wanted_for[k] = aim

    def unfly(self, k: int) -> None:
        """A copy is no prefetch under way any more."""
        i = 0
        if not self.fly_in[k]:
            return
        self.fly_in[k] = 0
        while self.fly[i] != k:
            i += 1
        self.n_fly -= 1
        while i < self.n_fly:
            self.fly[i] = self.fly[i + 1]
            i += 1

    def promote(self, k: int) -> None:
        """What is needed now goes first."""
        if self.lanes.promote(k):
            self.unfly(k)

    def withdrawn(self, k: int) -> int:
        """A prefetch has left the link's queue; its room waits for what it waited for."""
        after = -1
        self.unfly(k)
        self.becomes(k, HARMFUL)
        if self.after_tickets:
            for ticket in self.after_tickets.pop(k, ()):
                after = self.lanes.add_node(after, ticket)
        self.give(self.size, self.after_ready[k], self.after_lane[k], after)
        if self.tells_evicted:
            self.on_evicted(self.pieces[k], self.view)
        return 0

    def hand_over(self, k: int) -> int:
        """Ask for a speculative copy, after what the expert's wish says; 0: nobody may leave for it."""
        ready = 0.0
        lane = HOST
        after = -1
        now = self.lanes.now
        tickets = self.wish_after.pop(k, ()) if self.wish_after else ()
        self.n_left_for = 0
        if not self.fits(k) and not self.make_room(k, True):
            self.n_dropped += 1
            self.more(REFUSED, k, 1)
            return 0
        if self.n_rooms:
            self.take(self.size, now)
            ready = self.ready_s
            lane = self.ready_lane
            after = self.ready_after
        else:
            self.clean -= self.size
        self.after_ready[k] = ready
        self.after_lane[k] = lane
        if after >= 0:
            self.after_tickets[k] = self.lanes.numbers_of(after)
        elif self.after_tickets:
            self.after_tickets.pop(k, None)
        self.lanes.launch_copy(k)
        if ready <= self.lanes.now:
            ready = self.lanes.now
            lane = HOST
        if self.wishes[k].after > ready:
            ready = self.wishes[k].after
            lane = self.wishes[k].lane
        for ticket in tickets:
            after = self.lanes.add_node(after, self.lanes.number_of(ticket))
        t = self.lanes.speculate(k, ready, lane, after)
        self.add(k, 1)
        self.come(k)
        self.n_issued += 1
        self.n_unused += 1
        self.fate[k].gone_in = self.fate[k].late = self.fate[k].harmful = 0
        self.fate[k].issue = self.n_issued
        self.more(ISSUED, k, 1)
        self.more(ISSUED_BYTES, k, self.size)
        self.more(ISSUED_WHOLE, k, 1)
        for i in range(self.n_left_for):
            self.fate[self.left[i]].gone_in = self.n_issued
            self.fate[self.left[i]].gone_for = k
        if not self.fly_in[k]:
            self.fly_in[k] = 1
            self.fly[self.n_fly] = k
            self.n_fly += 1
        self.fly_ticket[k] = t
        if self.lanes.link < self.quiet:
            self.quiet = self.lanes.link
        if self.tells_placed:
            self.on_placed(self.pieces[k], self.view)
        if self.log_cap:
            self.note(HANDED, k)
        return 1

    def forget_ended(self) -> None:
        """Forget prefetches whose copies have ended; until when none of the others can end is `quiet`."""
        n = 0
        quiet = INF
        for i in range(self.n_fly):
            k = self.fly[i]
            if self.lanes.ends[self.fly_ticket[k]].at < 0.0 and not self.lanes.link > self.lanes.now:
                self.lanes.advance()
            e = self.lanes.ends[self.fly_ticket[k]].at
            if 0.0 <= e <= self.lanes.now:
                self.fly_in[k] = 0
                continue
            if e < 0.0:
                e = self.lanes.link
            if e < quiet:
                quiet = e
            self.fly[n] = k
            n += 1
        self.n_fly = n
        self.quiet = quiet

    def pump(self) -> int:
        """Hand queued prefetches over, as many as the depth allows."""
        if self.n_line == 0:
            return 0
        if self.n_fly >= self.depth and self.lanes.now >= self.quiet and self.lanes.now != self.checked:
            self.checked = self.lanes.now  # while no time passes nothing ends
            self.forget_ended()
        while self.n_line and self.n_fly < self.depth:
            self.n_line -= 1
            k = self.line[self.n_line]
            self.wishes[k].waits = 0
            if not self.row[k].here:
                self.hand_over(k)
        return 0

    def poll(self) -> Any:
        """The host looks: what has ended makes room on the link for what is wished for."""
        if self.n_line:
            self.pump()

    def wait_for(self, after: tuple[Any, ...]) -> None:
        """Note when the last of these has ended, for wishes that wait for them; or that nobody knows yet."""
        self.w_after = 0.0
        self.w_tickets = None
        for ticket in after:
            if ticket.end_s < 0.0:
                self.w_after = 0.0
                self.w_tickets = after
                return
            if ticket.end_s > self.w_after:
                self.w_after = ticket.end_s
                self.w_lane = ticket.lane

    def wish(self, k: int, pri: float, waits: bool) -> int:
        """Note a wish, and whether it waits for what `wait_for` has noted."""
        if pri != pri:
            raise self.judge.no_number(self.pieces[k], pri)
        self.n_asked += 1
        self.wishes[k].pri = pri
        self.wishes[k].asked = self.n_asked
        self.wishes[k].after = self.w_after if waits else 0.0
        self.wishes[k].lane = self.w_lane
        if waits and self.w_tickets is not None:
            self.wish_after[k] = self.w_tickets
        elif self.wish_after:
            self.wish_after.pop(k, None)
        return 0

    def wish_for(self, k: int, pri: float, after: tuple[Any, ...]) -> int:
        """Note a wish that waits for these."""
        self.wait_for(after)
        return self.wish(k, pri, True)

    def join_line(self, k: int) -> None:
        """An expert waits to be handed over: largest priority last, ties: who was asked for first."""
        i = self.n_line
        while i > 0:
            o = self.line[i - 1]
            if self.wishes[o].pri < self.wishes[k].pri:
                break
            self.line[i] = o
            i -= 1
        self.line[i] = k
        self.wishes[k].waits = 1
        self.n_line += 1

    def leave_line(self, k: int) -> bool:
        """An expert is wished for no more; False: it was not."""
        i = 0
        if not self.wishes[k].waits:
            return False
        self.wishes[k].waits = 0
        while self.line[i] != k:
            i += 1
        self.n_line -= 1
        while i < self.n_line:
            self.line[i] = self.line[i + 1]
            i += 1
        return True

    def clear_line(self) -> None:
        """Nothing is wished for."""
        for i in range(self.n_line):
            self.wishes[self.line[i]].waits = 0
        self.n_line = 0

    def prefetch(self, k: int, pri: float, after: tuple[Any, ...]) -> Any:
        """Wish for an expert; its ticket where no line keeps it waiting."""
        self.predicted(k)
        if self.row[k].here:
            return None
        if self.depth >= 0:
            self.leave_line(k)
            self.wish_for(k, pri, after)
            self.join_line(k)
            self.pump()
            return None
        self.wish_for(k, 0.0, after)
        return self.arrival(k) if self.hand_over(k) else None

    def withdraw_up_to(self, layer: int) -> int:
        """Take back what has been handed over for layers up to one and has not started."""
        stop = (layer + 1) * self.E
        aimed = False
        for i in range(self.n_fly):
            aimed = aimed or self.fly[i] < stop
        if not aimed:
            return 0
        self.forget_ended()
        i = 0
        while i < self.n_fly:
            k = self.fly[i]
            if k >= stop or not self.cancel(k):
                i += 1
        return 0

    def cancel(self, k: int) -> int:
        """Withdraw a prefetch that has not started; 1: its copy was under way to the link."""
        if self.leave_line(k):
            return 0
        if not self.row[k].here or not self.row[k].unused or not self.lanes.withdraw(k):
            return 0
        self.take_off(k)
        self.gone(k)
        self.more(CANCEL, k, 1)
        self.more(CANCEL_WHOLE, k, 1)
        if self.log_cap:
            self.note(WITHDRAWN, k)
        self.withdrawn(k)
        return 1

    def drop_line(self, up_to: Any) -> Any:
        """Withdraw wishes for layers up to one; None: all."""
        n = 0
        stop = self.L * self.E if up_to is None else (up_to + 1) * self.E
        for i in range(self.n_line):
            if self.line[i] < stop:
                self.wishes[self.line[i]].waits = 0
            else:
                self.line[n] = self.line[i]
                n += 1
        self.n_line = n
        self.withdraw_up_to(self.L if up_to is None else up_to)

    def begin_line(self, up_to: Any) -> int:
        """The line begins anew; copies for layers up to one are withdrawn before."""
        if up_to is not None:
            self.clear_line()
            self.withdraw_up_to(up_to)
        self.clear_line()
        return 0

    def requeue(self, wanted: Any, up_to: Any) -> Any:
        """Make the line of these: key, priority, tickets."""
        self.begin_line(up_to)
        for key, pri, after in wanted:
            k = key
            self.predicted(k)
            if not self.row[k].here:
                self.leave_line(k)
                self.wish_for(k, pri, after)
                self.join_line(k)
        self.pump()

    def requeue_from(
        self, wishes: Any, start: int, stop: int, fresh: int, after: tuple[Any, ...], up_to: Any, most: int
    ) -> Any:
        """Make the line of wishes, at most so many; from `fresh` on they wait for these."""
        self.begin_line(up_to)
        if wishes is not self.asked_from:
            self.asked_from = wishes
            self.w_key, self.w_pri = wishes.indices, wishes.priorities
        self.wait_for(after)
        for i in range(start, stop):
            if not 0 <= self.w_key[i] < self.L * self.E:
                raise self.judge.no_key(self.w_key[i])
            k = self.w_key[i]
            self.predicted(k)
            if not self.row[k].here and not self.wishes[k].waits:
                self.wish(k, self.w_pri[i], i >= fresh)
                self.join_line(k)
                if self.n_line == most:
                    break
        self.pump()

    def waiting(self) -> Any:
        """Keys of the line, best first."""
        return [self.line[self.n_line - 1 - i] for i in range(self.n_line)]

    def arrival(self, k: int) -> Any:
        """The ticket of a resident expert's copy; None for what was there from the start."""
        t = self.row[k].coming
        known = self.arrivals.get(k)
        if known is not None:
            if (known.end_s < 0.0 and known.number == t) or (known.end_s >= 0.0 and known.end_s == self.row[k].arrive):
                return known
        if t >= 0:
            known = self.lanes.ticket_of(t)
        elif self.row[k].origin == 2:
            return None
        else:
            known = ends_at(self.row[k].arrive, H2D, H2D)
            known.speculative = self.row[k].origin == 1
        self.arrivals[k] = known
        return known

    # -- decisions of a policy --------------------------------------------------------------------------------------

    def key(self, piece: Any) -> int:
        """The index of a piece of this run. Raises TypeError for none, IllegalDecision for another run's."""
        if type(piece) is not Piece:
            raise TypeError(f"got {piece!r}: a Piece")
        k = piece.index
        if k < 0 or k >= len(self.pieces) or self.pieces[k] is not piece:
            raise IllegalDecision(f"{piece}: it belongs to another run; take pieces from view.piece and view.part")
        return k

    def obey(self, said: Any, hook: Any) -> Any:
        """What a hook returns or yields, applied in order; a generator is sent each decision's ticket."""
        n = 0
        decision = answer = None
        if said is None:
            return
        try:
            if type(said) is not list and isinstance(said, Generator):
                while n <= MOST:
                    decision = None
                    decision = moesim_step(said, answer) if COMPILED else next_of(said, answer)
                    if decision is said:
                        return
                    if type(decision) is list or type(decision) is tuple:
                        several = decision
                        answer = []
                        for decision in several:
                            answer.append(self.apply(decision, True))
                        n += len(several)
                    else:
                        answer = self.apply(decision, True)
                        n += 1
            else:
                for decision in said if type(said) is list else self.judge.several(said):
                    self.apply(decision, False)
                    n += 1
                    if n > MOST:
                        break
            if n > MOST:
                raise self.judge.endless(decision)
        except Exception as error:
            self.judge.blame(error, decision, hook)
            raise

    def apply(self, decision: Any, asked: bool) -> Any:
        """Apply one decision; its ticket where it is asked for and has one."""
        kind = type(decision)
        if kind is RunGpu:
            run: RunGpu = decision
            return self.run_gpu(run.expert, all_tickets(run.after), asked)
        if kind is Fetch:
            fetch: Fetch = decision
            return self.fetch_after(self.key(fetch.piece), all_tickets(fetch.after), asked)
        if kind is Evict:
            leaving: Evict = decision
            k = self.key(leaving.piece)
            self.judge.may_leave(leaving.piece)
            self.evict(k)
            return None
        if kind is Prefetch:
            ask: Prefetch = decision
            return self.prefetch(self.key(ask.piece), ask.priority, all_tickets(ask.after))
        if kind is Wait:
            wait: Wait = decision
            for ticket in all_tickets(wait.tickets):
                self.lanes.sync_ticket(ticket)
            return None
        if kind is Serve:
            self.serve()
            return None
        if kind is Predict:
            return self.predict(decision)
        if kind is Foresee:
            self.foresee(decision)
            return None
        return self.judge.apply(decision)

    def predict(self, asked: Predict) -> Any:
        """Spend a predictor's time on a lane."""
        if not seconds(asked.duration_s) or asked.lane not in PREDICTORS:
            raise self.judge.no_seconds(asked)
        return self.lanes.predict(asked.duration_s, asked.lane, asked.blocking, asked.basis)

    def foresee(self, asked: Foresee) -> None:
        """Predict, believe in what an outlook has chosen, and wish for what lies ahead."""
        outlook, predict = asked.outlook, asked.predict
        self.judge.needs_queue("Foresee")
        if not isinstance(outlook, Outlook) or not (predict is None or type(predict) is Predict):
            raise TypeError(f"got {asked!r}: an Outlook, and a Predict or None")
        after: tuple[Any, ...] = ()
        if predict is not None:
            after = (self.predict(predict),)
            outlook.foresee(asked.layer)
        n = outlook.look_ahead(asked.layer)
        self.requeue_from(outlook.wishes, 0, n, outlook.n_fresh, after, asked.layer, -1)

    def fetch_after(self, k: int, after: tuple[Any, ...], asked: bool) -> Any:
        """Demand an expert, whose copy waits for these; its ticket where it is asked for."""
        if after and not self.row[k].here:
            self.leave_line(k)
            self.wish_for(k, 0.0, after)
            self.waits_after = True
        self.fetch(k)
        return self.arrival(k) if asked else None

    def run_gpu(self, expert: Any, after: tuple[Any, ...], asked: bool) -> Any:
        """Compute an expert that is pending."""
        if not self.pending_of(self.layer, expert):
            raise self.judge.not_owed(expert)
        k = self.layer * self.E + expert
        if not self.row[k].here:
            raise self.judge.not_there(expert)
        self.touch(k)
        self.run_after(k, after)
        if not asked:
            return None
        if self.row[k].reading >= 0:
            return self.lanes.ticket_of(self.row[k].reading)
        return ends_at(self.row[k].busy, GPU, GPU)

    # -- the pass ---------------------------------------------------------------------------------------------------

    def feed(self, block: Any) -> None:
        """Where the choices of decode tokens are read from now on."""
        self.block = block
        self.ids = block.ids

    def ask_row(self, block: Any, at: int, n: int) -> Any:
        """What the gate of one token chooses: `n` experts of a block, from a place on."""
        if block is not self.block:
            self.feed(block)
        for i in range(n):
            self.ask(self.ids[at + i], 1)

    def decode(self, block: Any, at: int, n: int) -> Any:
        """All layers of one token, for who is asked of nothing in between."""
        for layer in range(self.L):
            self.enter(layer)
            self.lanes.to_gate(layer)
            self.ask_row(block, at + layer * n, n)
            self.classify()
            self.serve()

    def ask_all(self, needs: Any) -> None:
        """What a gate chooses: expert -> tokens."""
        for expert, n_tokens in needs.items():
            self.ask(expert, n_tokens)

    def stride(self, block: Any, top_k: Any, n: Any, context: Any, sums: Any) -> Any:
        """Decode tokens in a row, of a block of rows, behind so many others; sums as `Clockwork.decoding` says."""
        width = self.L * top_k
        s = self.sums
        for i in range(33):
            s[i] = sums[i]
        for i in range(n):
            start = self.lanes.now
            self.pass_n += 1
            self.spoken = -1
            self.lanes.begin_alone(context + i)
            self.decode(block, i * width, top_k)
            self.enter(-1)
            self.lanes.head()
            s[0] += self.lanes.now - start
            self.lanes.settle_parts()
            for j in range(7):
                s[1 + j] += self.lanes.parts[j] - s[8 + j]
                s[8 + j] = self.lanes.parts[j]
            if not self.lanes.shares:
                self.lanes.advance()
            self.lanes.settle_path()
            for j in range(N_RESOURCES):
                s[15 + j] += self.lanes.path[j] - s[24 + j]
                s[24 + j] = self.lanes.path[j]
        for i in range(33):
            sums[i] = s[i]

    def run_layers(self, iteration: Any, arrays: Any, future: Any) -> Any:
        """All layers of an iteration, then the output head."""
        row = iteration.token
        silent = self.on_layer_enter is None and self.on_gate_input is None and self.on_gate_done is None
        silent = silent and not self.assigns
        if row is not None and silent and self.on_layer_done is None and future is None:
            self.decode(row.block, row.at, row.top_k)
        else:
            for layer in range(self.L):
                if future is not None:
                    future.advance(iteration.index, layer)
                self.run_layer(iteration, layer, row, arrays)
        self.enter(-1)
        self.lanes.head()
        self.poll()

    def run_layer(self, iteration: Any, layer: int, row: Any, arrays: Any) -> int:
        """Attention, gate, the policy's answer, the experts. The host blocks once: to read the gate's choice."""
        self.enter(layer)
        self.poll()
        if self.on_layer_enter is not None:
            self.obey(self.on_layer_enter(layer, self.view), "layer_enter")
        if self.on_gate_input is not None:
            self.lanes.attention(layer)
            self.obey(self.on_gate_input(layer, self.view), "gate_input")
            self.lanes.gate(layer)
        else:
            self.lanes.to_gate(layer)
        self.poll()
        if self.on_gate_done is not None or self.assigns:
            gate = gate_of(layer, iteration, iteration.chosen(layer), arrays)
            if self.assigns:
                gate = self.judge.reassign(gate)
            self.ask_all(gate.needs)
            if gate.asked is gate.needs:
                self.classify()
            else:
                self.classify_asked(gate.asked)
            if self.on_gate_done is not None:
                self.obey(self.on_gate_done(gate, self.view), "gate_done")
            else:
                self.serve()
            if self.n_left:
                raise self.judge.unserved()
        else:
            if row is not None:
                self.ask_row(row.block, row.at + layer * row.top_k, row.top_k)
            else:
                self.ask_all(iteration.chosen(layer))
            self.classify()
            self.serve()
        if self.on_layer_done is not None:
            self.obey(self.on_layer_done(layer, self.view), "layer_done")
        self.poll()
        return 0

    def finish(self) -> Any:
        """Nobody comes any more."""
        self.lanes.drain()
        for k in range(self.L * self.E):
            self.becomes(k, WASTED)
        self.end_phase()

    # -- looking ----------------------------------------------------------------------------------------------------

    def holds(self, k: int) -> Any:
        """Whether an expert has its room."""
        return self.row[k].here != 0

    def experts(self) -> Any:
        """Experts that the layer has asked for and not computed, in the order of the gate."""
        return [self.want[i] % self.E for i in range(self.n_want) if self.row[self.want[i]].mark == self.tick]

    def pending_of(self, layer: int, expert: int) -> Any:
        """Tokens that an expert is pending for."""
        return self.tokens[expert] if layer == self.layer and layer >= 0 and 0 <= expert < self.E else 0

    def residents(self) -> Any:
        """Keys of residents, oldest first."""
        found = [(self.row[k].came, k) for k in range(self.L * self.E) if self.row[k].here]
        return [key for _, key in sorted(found)]

    def held(self) -> np.ndarray:
        """Whether each expert has its room, live."""
        return np.frombuffer(self.flags, dtype=np.uint8)

    def counts(self) -> Any:
        """Numbers out, by the names of `sim.engine.counts`."""
        return {
            "by_expert": self.by,
            "classes": [self.n_class[i] for i in range(42)],
            "aside": [self.n_aside[i] for i in range(21)],
            "prefetched": [self.n_prefetched[i] for i in range(3)],
            "fates": [self.n_fate[i] for i in range(4)],
            "n_issued": self.n_issued,
            "n_cancelled": self.n_cancelled,
            "n_dropped": self.n_dropped,
            "n_unused": self.n_unused,
            "n_demand": self.n_demand,
            "n_evicted": self.n_evicted,
            "n_executed": self.n_executed,
        }


class View:
    """The run as its policy may know it (`sim.policy.view.View`), looked up in the core."""

    def __init__(
        self, policy: Any, core: Core, pieces: Any, cost: Any, arrays: Any, top_k: int, future: Any, room: Any
    ) -> None:
        self._policy, self.core, self._pieces, self._all = policy, core, pieces, pieces.all
        self._arrays, self._future, self._room = arrays, future, room
        self.model_name, self.hidden_size = cost.model.id, cost.model.hidden_size
        self.n_layers, self.n_experts, self.n_gpus = pieces.n_layers, pieces.n_experts, pieces.n_gpus
        self.top_k = top_k
        self.expert_bytes = pieces.all[0].n_bytes
        self.prices = Prices(cost, self.expert_bytes)
        self.phase = ""

    @property
    def layer(self) -> Any:
        """The MoE layer entered last."""
        return self.core.entered

    # -- pieces and residency ---------------------------------------------------------------------------------------

    def known(self, piece: Any) -> Any:
        """The same piece, of this run."""
        self.core.key(piece)
        return piece

    def piece(self, layer: int, expert: int) -> Any:
        """The whole expert as a piece."""
        return self._pieces.whole[layer][expert]

    def resident(self, layer: int, expert: int) -> Any:
        """True when the whole expert has its room."""
        return self.core.row[self._pieces.whole[layer][expert].index].here != 0

    def holds(self, piece: Any) -> Any:
        """True when this very piece has its room."""
        return self.core.row[self.core.key(piece)].here != 0

    def held_of(self, pieces: Any) -> list[Piece]:
        """Those of these pieces that have their room."""
        return [piece for piece in pieces if self.core.row[self.core.key(piece)].here]

    @property
    def held(self) -> Any:
        """Which pieces have their room, uint8 by `Piece.index`; read-only."""
        held = self.core.held()
        held.flags.writeable = False
        return held

    @property
    def unused_prefetches(self) -> Any:
        """Prefetched pieces that have their room and have not been used."""
        return self.core.n_unused

    def residents(self) -> Iterator[Piece]:
        """Every piece that has its room, oldest first."""
        return iter([self._all[k] for k in self.core.residents()])

    def evictable(self, piece: Any) -> Any:
        """False while the layer being served still needs the piece's expert."""
        if type(piece) is not Piece:
            raise TypeError(f"evictable, got {piece!r}: a Piece")
        one: Piece = piece
        return one.layer != self.core.entered or self.core.tokens[one.expert] == 0

    def first_evictable(self, pieces: Any) -> Any:
        """The first of these that `evictable` is True for, None where there is none."""
        for piece in pieces:
            if type(piece) is not Piece:
                raise TypeError(f"evictable, got {piece!r}: a Piece")
            one: Piece = piece
            if one.layer != self.core.entered or self.core.tokens[one.expert] == 0:
                return piece
        return None

    def pending_experts(self) -> Any:
        """Experts that the running layer has asked for and not computed yet."""
        return self.core.experts()

    def pending_tokens(self, piece: Any) -> Any:
        """Tokens that the running layer has still to compute the piece's expert for."""
        return self.core.pending_of(piece.layer, piece.expert)

    @property
    def capacity(self) -> Any:
        """Whole experts that fit the budget."""
        return sum([self.capacity_of(gpu) for gpu in range(self.n_gpus)])

    def capacity_of(self, gpu: int) -> Any:
        """Whole experts that fit one GPU's budget."""
        return self._room.budget_bytes[self._gpu(gpu)] // self.expert_bytes

    def free_bytes(self, gpu: int = 0) -> Any:
        """Expert budget of a GPU not taken."""
        return self._room.budget_bytes[self._gpu(gpu)] - self.core.taken

    def _gpu(self, gpu: int) -> Any:
        if not 0 <= gpu < self.n_gpus:
            raise IndexError(f"GPU {gpu} of {self.n_gpus}")
        return gpu

    # -- the pass ---------------------------------------------------------------------------------------------------

    def embeddings(self) -> Any:
        """Embedding-layer outputs of the iteration's tokens [n, h] (needs `embeddings`)."""
        require_declared("embeddings", self._policy.needs)
        return self._arrays.embeddings()

    def part(self, layer: int, expert: int, start_frac: float, stop_frac: float, precision: str | None = None) -> Any:
        """The whole expert as a piece; the core knows no others yet."""
        found = self._pieces.whole[layer][expert]
        if (start_frac, stop_frac) != (0.0, 1.0) or precision not in (None, found.precision):
            raise RuntimeError("the core has no parts of experts (a bug in sim.core.supports)")
        return found

    # -- with a trait -----------------------------------------------------------------------------------------------

    def arrived(self, piece: Any) -> Any:
        """True when the piece's copy has completed by now. Trait `timing`."""
        k = self.core.key(piece)
        self._require("timing", "arrived")
        return self.core.row[k].here != 0 and self.core.lanes.has_arrived(k)

    def n_arrived(self, pieces: Any) -> Any:
        """Of how many of these pieces the copy has completed by now. Trait `timing`."""
        self._require("timing", "n_arrived")
        return sum([self.arrived(piece) for piece in pieces])

    def queued(self) -> list[Piece]:
        """Pieces waiting in the policy's own prefetch queue, best first. Trait `timing`."""
        self._require("timing", "queued")
        return [self._all[k] for k in self.core.waiting()]

    @property
    def waiting(self) -> Any:
        """Whether anything waits in the policy's own prefetch queue. Trait `timing`."""
        self._require("timing", "waiting")
        return self.core.n_line > 0

    @property
    def future(self) -> Any:
        """What will be asked for. Trait `oracle`."""
        self._require("oracle", "future")
        return self._future

    def _require(self, trait: str, what: str) -> None:
        if trait not in self._policy.traits:
            name = self._policy.name
            raise IllegalDecision(f"view.{what} of {name}: needs the trait {trait!r}; declare it in `traits`")
