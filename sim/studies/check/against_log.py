"""An engine's own log beside a replay of the same requests: whether both hit, missed and evicted alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from sim.base.errors import BadInput
from sim.base.tables import tabled
from sim.base.units import show_change, show_value
from sim.engine.counts import HIT as FOUND
from sim.engine.counts import LATE
from sim.figures import SCHEMA
from sim.run import execute, prepare
from sim.studies.check.engine_log import EVENTS, EVICT, HIT, MISS, Events, key_of, read_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.engine.engine import Engine
    from sim.engine.run_loop import Step
    from sim.options import RunSpec
    from sim.run import Outcome, Progress, Setup


class Difference(Struct, frozen=True):
    """Where log and replay part: in this pass (`step`, or `request` and `token`), while this layer ran.

    what: a lookup, or an eviction. layer, expert: of what the engine did, or of what the simulator did where the engine
    did nothing.
    """

    request: int | None
    token: int | None
    step: int | None
    at_layer: int
    what: str
    layer: int
    expert: int
    engine: str
    simulator: str


class LogVerdict(Struct, frozen=True, kw_only=True):
    """A log that was held against a replay: what `--json` prints.

    Attributes:
        events: those that were compared. engine, simulator: how many of each event. first_difference: None where both
            are equal.
    """

    schema: int = SCHEMA
    log: str
    run_id: str
    equal: bool
    events: tuple[str, ...]
    engine: dict[str, int]
    simulator: dict[str, int]
    first_difference: Difference | None


class Watch:
    """Turns the decisions of a run into hits, misses and evictions as an engine would log them.

    A needed expert is a hit where it has its room, or a copy of it is on its way, when the gate asks.
    """

    def __init__(self, setup: Setup, by_step: bool) -> None:
        model = setup.model
        self.n_experts = model.n_experts
        self.events = Events(model.n_moe_layers, model.n_experts)
        self.by_step = by_step
        self.parts = False
        self._held: set[int] = set()
        self._lookups: dict[int, str] = {}
        self._gone: list[tuple[int, int]] = []  # (layer that was running, who left)
        self._requests: dict[int, int] = {}  # by number in the trace, in order of running
        self._passes: dict[int, int] = {}
        self._engine: Engine | None = None

    def begun(self, engine: Engine) -> None:
        """Told of what is there at first."""
        self._engine = engine
        for piece in engine.residency.resident_pieces():
            self.parts = self.parts or not piece.serving
            self._held.add(piece.layer * self.n_experts + piece.expert)

    def log(self, kind: str, layer: int, expert: int) -> None:
        """Told of every decision."""
        assert self._engine is not None
        index, pending = layer * self.n_experts + expert, self._engine.pending
        if kind in ("fetch", "prefetch", "gpu", "cpu"):
            if layer == pending.layer and (kind in ("gpu", "cpu") or pending.tokens_of(layer, expert)):
                self._lookups.setdefault(index, HIT if index in self._held else MISS)
            if kind in ("fetch", "prefetch"):
                self._held.add(index)
        elif kind in ("evict", "cancel"):
            self._held.discard(index)
            if kind == "evict":
                self._gone.append((max(0, pending.layer), index))
        elif kind == "part":
            self.parts = True

    def step(self, step: Step) -> None:
        """Told of every iteration once it is over."""
        ranges = step.iteration.ranges
        if self.by_step:
            key = step.iteration.index
        elif len(ranges) > 1:
            raise BadInput(
                "log, got columns request and token: several requests share an iteration of this run; write a column "
                "`step`, the number of the iteration, in their place"
            )
        else:
            index = ranges[0].request.index
            request = self._requests.setdefault(index, len(self._requests))
            token = self._passes.get(index, 0)
            self._passes[index] = token + 1
            key = key_of(request, token)
        for index, event in self._lookups.items():
            layer, expert = divmod(index, self.n_experts)
            self.events.add(key, layer, layer, expert, event)
        for at_layer, index in self._gone:
            self.events.add(key, at_layer, *divmod(index, self.n_experts), EVICT)
        self._lookups.clear()
        self._gone.clear()


def check_log(
    path: Path,
    spec: RunSpec,
    events: Sequence[str] = EVENTS,
    progress: Progress | None = None,
    before: Callable[[Setup], None] | None = None,
) -> LogVerdict:
    """Replay a run and hold an engine's log against it.

    Args:
        events: what the engine logs; others are not compared. before: told of the run that is made ready.

    Raises:
        BadInput: the run cannot be made ready, has no whole experts to look up, or the log is none (file, line, field).
    """
    setup = prepare(spec)
    try:
        if before is not None:
            before(setup)
        if "lossy" in setup.policy.traits:
            raise BadInput(
                f"policy {setup.policy.name}, got a log: it changes what gates ask for, so hits have two meanings"
            )
        if setup.spec.replicas > 1:
            raise BadInput("--replicas, got a log: it is of one engine; check each replica by itself")
        theirs, by_step = read_log(path, setup.model.n_moe_layers, setup.model.n_experts)
        for event in EVENTS:
            if event not in events and theirs.counts[event]:
                raise BadInput(f"{path}: event, got {event!r}: --log-events says that the log has none; add it there")
        watch = Watch(setup, by_step)
        outcome = execute(
            setup, log=watch.log, progress=progress, on_step=watch.step, bounds=False, begun=watch.begun, by_layer=False
        )
        _check_seen(outcome, watch)
    finally:
        setup.close()
    first = _first(theirs, watch.events, events, by_step)
    engine, simulator = ({event: found.counts[event] for event in events} for found in (theirs, watch.events))
    return LogVerdict(
        log=str(path),
        run_id=setup.run_id,
        equal=first is None,
        events=tuple(events),
        engine=engine,
        simulator=simulator,
        first_difference=first,
    )


def _check_seen(outcome: Outcome, watch: Watch) -> None:
    """Hold what was seen against the run's own counts."""
    if watch.parts:
        name = outcome.setup.policy.name
        raise BadInput(f"policy {name}, got a log: it copies parts of experts, and a log names whole ones")
    hits = outcome.report.counts.tally.hits.values()
    found = sum(one.experts[kind] + one.aside[kind] for one in hits for kind in (FOUND, LATE))
    if found != watch.events.counts[HIT]:
        raise BadInput(
            f"policy {outcome.setup.policy.name}, got a log: {found} hits are counted and {watch.events.counts[HIT]} "
            "told by decisions, so that how each expert was found is not known; compare figures, without --log"
        )


def _first(engine: Events, simulator: Events, events: Sequence[str], by_step: bool) -> Difference | None:
    """The first row that only one of them has."""
    a, b = _sorted(engine, events), _sorted(simulator, events)
    n = min(len(a), len(b))
    differing = np.flatnonzero((a[:n] != b[:n]).any(axis=1))
    at = int(differing[0]) if len(differing) else n
    if at == len(a) == len(b):
        return None
    ours, theirs = (tuple(map(int, rows[at])) if at < len(rows) else None for rows in (b, a))
    size = engine.n_layers * engine.n_experts * 2
    first = min(row for row in (ours, theirs) if row is not None)
    evicts = first[1] // size % 2 == 1

    def of_group(events: Events, rows: np.ndarray) -> Counter[tuple[int, int, int, str]]:
        """What one side has of the same pass and layer, lookups of this expert alone or all evictions."""
        wide = size if evicts else 2
        same = (rows[:, 0] == first[0]) & (rows[:, 1] // wide == first[1] // wide)
        return Counter(events.told(int(code)) for code in rows[same, 1])

    did, simulated = of_group(engine, a), of_group(simulator, b)
    own, others = sorted(did - simulated), sorted(simulated - did)
    at_layer, layer, expert, _ = (own or others)[0]
    key = first[0]
    request, token, step = (None, None, key) if by_step else (key >> 32, key & 0xFFFFFFFF, None)
    what = "eviction" if evicts else "lookup"
    return Difference(request, token, step, at_layer, what, layer, expert, _said(own, what), _said(others, what))


def _said(own: list[tuple[int, int, int, str]], what: str) -> str:
    """In words what only one side did."""
    if not own:
        return f"no {what}"
    _, layer, expert, event = own[0]
    if event == EVICT:
        return f"evicted expert {expert} of layer {layer}"
    return event if len(own) == 1 else f"{event}, {len(own)} times"


def _sorted(events: Events, wanted: Sequence[str]) -> np.ndarray:
    """Rows [n, 2] of key and code, in the order of passes, layers, lookups before evictions, and experts."""
    rows = np.stack([np.frombuffer(column, dtype=np.int64) for column in (events.keys, events.codes)], axis=1)
    if len(wanted) < len(EVENTS):
        size = events.n_layers * events.n_experts * 2
        evicts, misses = rows[:, 1] // size % 2 == 1, rows[:, 1] % 2 == 1
        kept = {HIT: ~evicts & ~misses, MISS: ~evicts & misses, EVICT: evicts}
        rows = rows[np.logical_or.reduce([kept[event] for event in wanted])]
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def answer(found: LogVerdict) -> str:
    """The first line; it says, too, where the log lacks a whole kind of event."""
    one = found.first_difference
    if one is None:
        n = sum(found.simulator.values())
        return f"equal: {found.log} and the replay agree in all of {n:,} {', '.join(found.events)} events"
    where = f"step {one.step}" if one.step is not None else f"request {one.request}, token {one.token}"
    where += f", layer {one.at_layer}" + (f", expert {one.expert}" if one.what == "lookup" else "")
    lacking = [event for event in found.events if found.simulator[event] and not found.engine[event]]
    left = ",".join(event for event in found.events if event not in lacking)
    told = f"not equal: first in {where}: engine: {one.engine}; simulator: {one.simulator}"
    if lacking and left:
        told += f"; the log has no {' and no '.join(lacking)}: if the engine logs none, --log-events {left}"
    return told


def table_of(found: LogVerdict) -> str:
    """Counts of both, a row per event, and hit rates where both kinds of lookups are compared."""
    n, m = found.engine, found.simulator
    rows: list[tuple[str, float, float, str]] = [(event, n[event], m[event], "") for event in found.events]
    if HIT in found.events and MISS in found.events:
        engine, simulator = (counts[HIT] / max(1, counts[HIT] + counts[MISS]) for counts in (n, m))
        rows.append(("hit rate", engine, simulator, "frac"))
    cells = [(name, show_value(a, unit), show_value(b, unit), show_change(b, a, unit)) for name, a, b, unit in rows]
    return tabled(("event", "engine", "simulator", "difference"), cells)
