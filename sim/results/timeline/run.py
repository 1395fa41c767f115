"""One run's lanes, counters and arrows, of the iterations that its window shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from sim.results.timeline.links import Copy, Expert, Link, Uses
from sim.results.timeline.window import Counter

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.run_loop import Step
    from sim.results.timeline.document import Process
    from sim.results.timeline.window import Present, Window

COPIED, SENT, RETURNED = "copied for", "sent to the CPU", "result of the CPU"


class Span(NamedTuple):
    """What a lane did, as the engine tells it."""

    lane: str
    op: str
    layer: int
    expert: int
    n_tokens: int
    n_bytes: int
    start_s: float
    end_s: float

    def draw(self, process: Process, window: Window) -> None:
        facts = {"layer": self.layer, "expert": self.expert, "tokens": self.n_tokens or -1, "bytes": self.n_bytes or -1}
        layer, expert = (f" {what}{n}" if n >= 0 else "" for what, n in (("L", self.layer), ("E", self.expert)))
        shown = {key: value for key, value in facts.items() if value >= 0}
        process.slice(self.lane, self.op + layer + expert, self.op, self.start_s, self.end_s, shown)


class Iterated(NamedTuple):
    """An iteration that is over."""

    name: str
    phase: str
    n_tokens: int
    n_requests: int
    start_s: float
    end_s: float

    def draw(self, process: Process, window: Window) -> None:
        facts = {"tokens": self.n_tokens, "requests": self.n_requests}
        process.slice("iterations", self.name, self.phase, self.start_s, self.end_s, facts)


class Arrow(NamedTuple):
    """From one slice to a later one; it is there where both are."""

    kind: str
    lane: str
    from_s: float
    from_end_s: float
    to_lane: str
    start_s: float
    end_s: float

    def draw(self, process: Process, window: Window) -> None:
        if window.shows(self.from_s, self.from_end_s):
            process.arrow(self.kind, self.lane, self.from_s, self.to_lane, self.start_s)


class Sample(NamedTuple):
    """What a counter has come to."""

    counter: Counter
    values: tuple[int, ...]
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s

    def draw(self, process: Process, window: Window) -> None:
        self.counter.sample(process, window, self.start_s, self.values)


Item = Span | Iterated | Arrow | Sample


class Timeline:
    """Takes what a run tells its sinks; holds an iteration and writes it once that is over, in order of time."""

    def __init__(self, process: Process, window: Window, present: Present | None = None) -> None:
        self._process, self._window, self._present = process, window, present
        self._requests = None if present is None else Counter("requests", ("running", "waiting"))
        self._held: list[Item] = []
        self._new: list[Span] = []  # since the last iteration
        self._over = False  # nothing more will be shown
        self._n_withdrawn = 0
        self._leaving: tuple[Link, Expert, int, float] | None = None  # evicted or cancelled: maybe never copied
        self._sent: dict[Expert, Span] = {}
        self._on_cpu: dict[Expert, Span] = {}

    def begun(self, engine: Engine) -> None:
        """Take the engine that is about to run: where copies lie, and how much is there already."""
        self._engine, n_gpus = engine, engine.residency.n_gpus
        whole = engine.pieces.whole
        gpus = ["gpu" if n_gpus == 1 else f"gpu{gpu}" for gpu in range(n_gpus)]
        self._links = [Link("h2d" if n_gpus == 1 else f"h2d{gpu}") for gpu in range(n_gpus)]
        self._link_of = {link.lane: link for link in self._links}
        self._gpus = frozenset(("gpu", *gpus))  # one lane where GPUs take turns
        self._uses = Uses(whole[0][0].n_bytes, self._resident)
        self._used_bytes = [0] * n_gpus
        self._taken = [Counter(f"{gpu} expert bytes", ("taken",)) for gpu in gpus]
        self._flight = [Counter(f"{link.lane} bytes in flight", ("moving", "waiting")) for link in self._links]
        self._waiting = [Counter(f"{link.lane} copies waiting", ("copies",)) for link in self._links]
        self._queue = Counter("prefetch queue", ("pieces",)) if engine.copies.depth >= 0 else None
        self._n_queued = 0
        self._take_room(0.0)

    def _resident(self, expert: Expert) -> bool:
        """Whether anything of an expert has its room."""
        residency, pieces, (layer, number) = self._engine.residency, self._engine.pieces, expert
        if residency.holds(pieces.whole[layer][number]):
            return True
        parts = pieces.all[len(pieces.whole) * pieces.n_experts :]
        return any(part.layer == layer and part.expert == number and residency.holds(part) for part in parts)

    # -- what the run tells -----------------------------------------------------------------------------------------

    def span(
        self, lane: str, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, start_s: float, end_s: float
    ) -> None:
        """Take one span; the same signature as the engine's."""
        window = self._window
        span = Span(lane, op, layer, expert, n_tokens, n_bytes, start_s, end_s)
        if self._over:
            if window.shows(start_s, end_s):
                span.draw(self._process, window)
            return
        self._new.append(span)
        if lane == "host":
            self._by_host(span)
        elif (link := self._link_of.get(lane)) is not None:
            if op == "activations":
                link.result_moved(n_bytes, start_s, end_s)
            elif op != "kv_in":
                link.moved((layer, expert), n_bytes, start_s, end_s)

    def log(self, kind: str, layer: int, expert: int) -> None:
        """Take one decision that the engine has applied."""
        if self._over or kind in ("gpu", "part", "cpu", "cpu_ahead"):
            return
        self._withdraw()
        link, where = self._link(layer, expert), (layer, expert)
        if kind == "write_back":
            copy = link.mistaken(where)
            if copy is not None:
                self._uses.mistaken(where, copy)
            return
        now_s = self._engine.machine.now()
        freed_bytes = -self._take_room(now_s)
        if kind in ("evict", "cancel"):
            self._leaving = (link, where, freed_bytes, now_s)
            self._uses.evicted(where, freed_bytes)
        self._look_at_queue(now_s)

    def step(self, step: Step) -> None:
        """Take the end of an iteration."""
        if self._over:
            return
        self._withdraw()
        self._look_at_queue(step.end_s)
        self._window.step(step)
        iteration = step.iteration
        name = f"{iteration.counted} {iteration.index}"
        what = iteration.counted, iteration.n_tokens, iteration.n_requests
        self._held.append(Iterated(name, *what, step.start_s, step.end_s))
        if self._present is not None and self._requests is not None:
            self._held += [Sample(self._requests, n, time_s) for time_s, n in self._present.step(step)]
        self._look_back(step.end_s)
        self._write(step.end_s)
        closes_s = self._window.closes_s
        self._over = self._window.closed and all(link.known_s(step.end_s) >= closes_s for link in self._links)
        if self._over:
            self._finish()

    def close(self) -> None:
        """The run is over. Raises BadInput where the window has not opened."""
        if not self._over:
            self._withdraw()
            self._look_back(math.inf)
            self._write(math.inf)
            self._finish()
        self._window.check()

    # -- what follows -----------------------------------------------------------------------------------------------

    def _by_host(self, span: Span) -> None:
        self._withdraw()
        self._look_at_queue(span.start_s)
        expert = (span.layer, span.expert)
        if span.op == "launch copy":
            copy = self._link(*expert).asked(expert, span.n_bytes, span.start_s)
            self._uses.asked(expert, copy)
        elif span.op == "launch expert":
            self._uses.launched(expert, self._single_bytes(*expert))
        elif span.op == "launch cpu_expert":
            self._results_to(span.layer).results_due += 1

    def _single_bytes(self, layer: int, expert: int) -> int | None:
        """Bytes of the piece that an expert is about to run from, where precisions lie beside one another."""
        residency, lower = self._engine.residency, self._engine.layer.lower
        if not residency.n_parts:
            return None
        pieces = residency.sufficient(self._engine.pieces.whole[layer][expert], lower.get(expert))
        return pieces[0].n_bytes if pieces is not None and len(pieces) == 1 else None

    def _results_to(self, layer: int) -> Link:
        """The link that results of the CPU come up."""
        return self._links[self._engine.cost.gpu_of[layer]]

    def _link(self, layer: int, expert: int) -> Link:
        return self._links[self._engine.pieces.whole[layer][expert].gpu]

    def _withdraw(self) -> None:
        """A piece has left, and then a copy was withdrawn: it was that piece's."""
        n = self._engine.tally.prefetch.n_cancelled
        if n != self._n_withdrawn and self._leaving is not None:
            link, expert, n_bytes, time_s = self._leaving
            link.withdrawn(expert, n_bytes, time_s)
        self._n_withdrawn, self._leaving = n, None

    def _take_room(self, now_s: float) -> int:
        """Look at the room that experts take; by how much it has grown since."""
        grown_bytes = 0
        for gpu, counter in enumerate(self._taken):
            used_bytes = int(self._engine.residency.used_bytes[gpu])
            grown_bytes += used_bytes - self._used_bytes[gpu]
            self._used_bytes[gpu] = used_bytes
            self._held.append(Sample(counter, (used_bytes,), now_s))
        return grown_bytes

    def _look_at_queue(self, now_s: float) -> None:
        if self._queue is not None and (n := self._engine.copies.queue.n_waiting) != self._n_queued:
            self._n_queued = n
            self._held.append(Sample(self._queue, (n,), now_s))

    def _look_back(self, now_s: float) -> None:
        """An iteration is over: what links had before them, and which copies its experts have used."""
        for link, flight, waiting in zip(self._links, self._flight, self._waiting, strict=True):
            for time_s, moving_bytes, waiting_bytes, waiting_n in link.flights(now_s):
                self._held.append(Sample(flight, (moving_bytes, waiting_bytes), time_s))
                self._held.append(Sample(waiting, (waiting_n,), time_s))
        new, self._new = sorted(self._new, key=_start), []
        for span in new:
            self._held.extend(self._arrows(span))
        self._held.extend(new)

    def _arrows(self, span: Span) -> Iterator[Arrow]:
        """Arrows that end at a span."""
        expert = (span.layer, span.expert)
        if span.op == "expert" and span.lane in self._gpus:
            for copy in self._uses.computed(expert, span.start_s):
                yield _arrow(COPIED, copy, span)
        elif span.op == "expert" and expert in self._sent:
            yield _arrow(SENT, self._sent.pop(expert), span)
            self._on_cpu[expert] = span
        elif span.op == "activations" and span.lane in self._link_of:
            if expert in self._on_cpu:
                yield _arrow(RETURNED, self._on_cpu.pop(expert), span)
        elif span.op == "activations":
            self._sent[expert] = span

    def _write(self, limit_s: float) -> None:
        """Write what begins before `limit_s`; before the window has opened, keep what may reach into it."""
        window = self._window
        later: list[Item] = []
        ready: list[Item] = []
        for item in self._held:
            (ready if item.start_s < limit_s else later).append(item)
        for item in sorted(ready, key=_start):
            if isinstance(item, Sample):
                if window.opens_s is None:
                    item.counter.skip(item.start_s, item.values)
                else:
                    item.draw(self._process, window)
            elif window.opens_s is None:
                if item.end_s > limit_s:
                    later.append(item)
            elif window.shows(item.start_s, item.end_s):
                item.draw(self._process, window)
        self._held = later

    def _finish(self) -> None:
        some = [counter for counter in (self._queue, self._requests) if counter is not None]
        for counter in (*self._taken, *self._flight, *self._waiting, *some):
            counter.write(self._process, self._window)
        self._held.clear()


def _start(item: Item) -> float:
    return item.start_s


def _arrow(kind: str, source: Span | Copy, target: Span) -> Arrow:
    return Arrow(kind, source.lane, source.start_s, source.end_s, target.lane, target.start_s, target.end_s)
