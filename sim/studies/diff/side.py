"""One side of a comparison, opened: its result, its tables, and where every request's time went."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.base.errors import MoesimError
from sim.engine.run_loop import Clockwork, RequestTimes, Step
from sim.policy.mistakes import blamed
from sim.policy.watchdog import watched
from sim.results.compared import facts_of
from sim.results.keep import Keep
from sim.run import Outcome, assemble, execute, finished, prepare, report_of, run_through
from sim.studies.diff.tables import CORE, OneRequest, of_sweep, requests_of
from sim.workload.iterations import PHASES, PREFILL

if TYPE_CHECKING:
    from sim.figures import Timed
    from sim.machine.waiting import Waiting
    from sim.options import RunSpec
    from sim.policy.api import Policy
    from sim.results.record import Result
    from sim.setup.setup import Setup
    from sim.studies.diff.named import Named

NOT_COMPARED = ("wall_s", "lower_bound", "simulator", "run_id", "name", "schema")
"""Keys of a result in which equal runs may differ: how long the simulation took, and what only names the run."""
SEVERAL = "it has several replicas, whose requests, layers and decisions are not taken apart"
COPY, DEMAND, PREFETCH, DRIVE, QUEUE, OTHERS = "copy", "demand", "prefetch", "drive", "queue", "others"
OWN = ("gpu", DEMAND, PREFETCH, "host", "cpu", "predictor", DRIVE)
"""What GPU 0 did or waited for in an iteration: copies are demanded ones, or prefetches that came late."""
PARTS = (*OWN, QUEUE, OTHERS)
"""What a request's time goes to: parts of iterations of its own, the wait until its prompt begins, and whatever else
ran before it was served. Of the drive only runs that have one tell."""
ROUNDING = 1e-10  # of a time: sums of the same numbers in two orders differ by less
Progress = Callable[[int, int], None]


@dataclass
class Side:
    """One run.

    Attributes:
        label: as it was called. meant: digests of what its names stand for. spec: what was asked for, with the policy
            (`kind`) where it is a class. tables: a folder with its tables, as far as there are any. requests: None
            where their times are not known. replayed: its times are from a replay.
        figures: those of its machine, model and stack, by dotted names. notes: what cannot be said of it, and why.
    """

    label: str
    result: Result
    meant: dict[str, Any]
    spec: RunSpec | None = None
    kind: type[Policy] | None = None
    tables: Path | None = None
    requests: dict[int, OneRequest] | None = None
    replayed: bool = False
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def facts(self) -> dict[str, float | None]:
        """All figures of its result in which equal runs agree, by their dotted names."""
        return facts_of(self.result, *NOT_COMPARED)


def opened(named: Named, scratch: Path, replay: bool, progress: Progress | None) -> Side:
    """Read what is recorded, and replay what is not, or what only a replay can tell.

    Args:
        scratch: an empty folder for tables that are nowhere yet. replay: whether a recorded run may be replayed.

    Raises:
        BadInput: a run that is to be replayed cannot be set up, or a record that is not what it says.
    """
    result = named.result
    if result is None:
        assert named.spec is not None
        setup = prepare(named.spec, named.kind)
        try:
            return _replayed(named, setup, scratch, progress)
        finally:
            setup.close()
    side = Side(named.label, result, named.meant, named.spec)
    if named.folder is not None:
        side.tables = None if result.replicas else named.folder
        side.requests = requests_of(named.folder, result)
    elif named.times is not None:
        side.requests = of_sweep(named.times, named.label)
    again = _same_run(named, result) if replay else "replays were not asked for"
    if isinstance(again, str):
        side.notes.append(f"as recorded, not replayed: {again}")
        return side
    try:
        return _again(named, side, again, scratch, progress)
    finally:
        again.close()


def _same_run(named: Named, result: Result) -> Setup | str:
    """The run that is recorded, set up again; or why it cannot be had."""
    if result.simulator == "real":
        return "it was measured on hardware"
    if result.replicas:
        return SEVERAL
    if named.spec is None:
        return "its configuration is not beside it (config.yaml)"
    if result.version != __version__:
        return f"it was made by version {result.version}, this is {__version__}"
    try:
        setup = prepare(named.spec, named.kind)
    except MoesimError as error:
        return f"what it was made of cannot be had: {error}"
    if setup.run_id == result.run_id:
        return setup
    now = setup.resolved()
    setup.close()
    changed = [
        f"{what} {now[what]}"
        for what in ("policy", "trace", "hw", "model", "engine")
        if named.meant.get(f"{what}_sha256") != now.get(f"{what}_sha256")
    ]
    said = f"; changed since: {', '.join(changed)}" if changed else ""
    return f"its inputs are no longer those it was made of (run_id {result.run_id}, now {setup.run_id}){said}"


def _again(named: Named, side: Side, setup: Setup, scratch: Path, progress: Progress | None) -> Side:
    """A recorded run, replayed; as it is recorded where the replay gives something else."""
    has_tables = side.tables is not None and all((side.tables / f"{name}.parquet").is_file() for name in CORE)
    fresh = _replayed(named, setup, None if has_tables else scratch, progress)
    for key, value in side.facts.items():
        found = fresh.facts.get(key, value)
        if found != value:
            side.notes.append(f"as recorded: a replay gives other figures, the first {key} {found!r} for {value!r}")
            return side
    if not side.result.by_layer:
        side.result.by_layer = fresh.result.by_layer
    fresh.result, fresh.facts = side.result, side.facts
    fresh.tables = side.tables if has_tables else fresh.tables
    return fresh


def _replayed(named: Named, setup: Setup, scratch: Path | None, progress: Progress | None) -> Side:
    """A run that is carried out now, with its tables where a folder for them is given."""
    if setup.spec.replicas > 1:
        return _fresh(named, setup, execute(setup, progress=progress), notes=[*setup.notes(), SEVERAL])
    from sim.results.sinks import recorded

    spent: list[Spent] = []

    def run(setup: Setup, log: Any = None, progress: Progress | None = None, on_step: Any = None, **_: Any) -> Outcome:
        with blamed(setup.policy), watched():
            engine, machine = assemble(setup, log=log)
            clockwork = Clockwork()
            spent.append(Spent(clockwork, machine.waiting))

            def step(done: Step) -> None:
                spent[0].take(done)
                if on_step is not None:
                    on_step(done)

            began_s = time.perf_counter()
            run_through(setup, engine, machine, step, progress, clockwork)
            return finished(setup, report_of(engine, machine, clockwork, began_s))

    folder = None if scratch is None else scratch / "run"
    outcome = run(setup, progress=progress) if folder is None else recorded(run, setup, progress, Keep(folder))
    requests = {times.request.index: _served(times, spent[0]) for times in outcome.report.requests}
    return _fresh(named, setup, outcome, tables=folder, requests=requests, replayed=True, notes=setup.notes())


def _fresh(named: Named, setup: Setup, outcome: Outcome, **more: Any) -> Side:
    found: dict[str, Any] = {}
    for group, described in (("hw", setup.hw), ("model", setup.model), ("engine", setup.stack)):
        found |= _flat(msgspec.to_builtins(described), f"{group}.")
    result, meant = outcome.result, setup.resolved()
    return Side(named.label, result, meant, setup.explicit(), named.kind, figures=found, **more)


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    """Nested data with dotted names; a figure with its source is the figure."""
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    if "value" in value and "source" in value:
        return {prefix.removesuffix("."): value["value"]}
    return {name: found for key, child in value.items() for name, found in _flat(child, f"{prefix}{key}.").items()}


def _served(times: RequestTimes, spent: Spent) -> OneRequest:
    one = times.request
    tokens = one.prompt_len, one.outputs
    when = times.start_s, times.last_token_s
    return OneRequest(one.index, one.task, *tokens, times.ttft_s, times.tpot_s, *when, spent.parts_of(times))


class Spent:
    """Where the time of every request went: told from iteration to iteration, while a run is replayed."""

    def __init__(self, clockwork: Clockwork, waiting: Waiting) -> None:
        self._clockwork, self._waiting = clockwork, waiting
        self._before_s = {name: self._parts_s(name) for name in clockwork.phases}
        self._own_s: dict[tuple[int, bool], list[float]] = {}

    def take(self, step: Step) -> None:
        """One more iteration is over."""
        phase = step.iteration.counted
        before_s, after_s = self._before_s[phase], self._parts_s(phase)
        self._before_s[phase] = after_s
        for one in step.iteration.ranges:
            own_s = self._own_s.setdefault((one.request.index, one.phase == PREFILL), [0.0] * len(OWN))
            for cause in range(len(OWN)):
                own_s[cause] += after_s[cause] - before_s[cause]

    def _parts_s(self, phase: str) -> list[float]:
        """Seconds of a phase so far, in the order of `OWN`."""
        gpu_s, copy_s, *others_s = self._clockwork.phases[phase].parts_s[: len(OWN) - 1]
        waiting, number = self._waiting, PHASES.index(phase)
        late_s = math.fsum(waiting.seconds(number, layer)[PREFETCH] for layer in range(waiting.n_layers))
        return [gpu_s, copy_s - late_s, late_s, *others_s]

    def parts_of(self, times: RequestTimes) -> dict[Timed, tuple[float, ...]]:
        """Of the time to the first token, the queue included; and per further token, where there are any."""
        found: dict[Timed, tuple[float, ...]] = {"ttft_s": self._parts(times, True, times.ttft_s, times.queue_s, 1)}
        further = times.request.outputs - 1
        if further:
            found["tpot_s"] = self._parts(times, False, times.last_token_s - times.first_token_s, 0.0, further)
        return found

    def _parts(
        self, times: RequestTimes, prefill: bool, whole_s: float, queue_s: float, over: int
    ) -> tuple[float, ...]:
        own_s = self._own_s.get((times.request.index, prefill), [0.0] * len(OWN))
        parts_s = (*own_s, queue_s, whole_s - queue_s - math.fsum(own_s))
        return tuple(s / over if abs(s) > ROUNDING * whole_s else 0.0 for s in parts_s)
