"""What a plan is asked for, and the candidates that come of it: the same for each of its questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.base.units import show_count
from sim.options import OPTIONS
from sim.policy.registry import find, policies
from sim.profiles.hardware import GPUS
from sim.results.routing_words import labels_of, routing_words
from sim.studies.hosts import of_specs
from sim.studies.plan.candidate import Candidate, Prices, Setting, hardware_of, read_prices, settings_of
from sim.studies.plan.goal import Goal
from sim.studies.runner.points import resolved
from sim.studies.runner.pool import Answers, answers, n_cores
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Runner
from sim.studies.runner.searches import Replays
from sim.studies.runner.work import OK, REFUSED, Resolved
from sim.studies.sweep.grid import Block, Point, PolicyAxis, key_of, points_of
from sim.workload.load import NONE

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.runner.runner import Progress

MOST_POINTS = 10_000
MOST_REPLICAS = 8
SEVERAL = ("hw", "precision", "gpus", "replicas", "ram", "drive", "vram", "cache")
"""Axes of which a plan takes several values: what is bought, and how much of it is used."""
NO_SYSTEM = frozenset({"bound", "oracle"})


@dataclass
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        goals: all of them have to be reached. block: policies, machines, capacities and what else makes a run.
        prices: a file. every: settle dearer settings than the answer, too. suggest: say of every machine that fails
            what would have to be true. records: what is known from before. progress: told of (done, in all, what).
        note: told what was asked for and cannot be had in full.
    """

    goals: list[Goal]
    block: Block
    prices: Path | None = None
    every: bool = False
    suggest: bool = True
    workers: int | None = None
    pool: Answers = answers
    records: Records = field(default_factory=Records)
    progress: Progress = lambda *_: None
    note: Callable[[str], None] = lambda _: None

    @property
    def said(self) -> str:
        """The goals, in a sentence."""
        return " and ".join(goal.said for goal in self.goals)


@dataclass
class Candidates:
    """Everything that may be chosen, set up or not, and the replays of it. trace: what figures rest on, in a line."""

    request: PlanRequest
    every: list[Candidate]
    prices: Prices | None
    replays: Replays
    trace: str

    @cached_property
    def ready(self) -> list[Candidate]:
        """Those that can be set up."""
        return [one for one in self.every if one.ready]

    @cached_property
    def settings(self) -> list[Setting]:
        """The cheapest first."""
        return settings_of(self.every)

    @cached_property
    def hosts(self) -> str | None:
        """Where machines come with unlike hosts, a line that says so."""
        return of_specs(one.spec for setting in self.settings for one in setting.candidates if one.ready) or None

    @cached_property
    def routing(self) -> str:
        """What stands behind an answer where routing rests on little."""
        from sim.profiles.models import load_model
        from traces.format.catalogue import open_trace

        spec = self.ready[0].spec
        assert spec.trace is not None and spec.model is not None
        with open_trace(spec.trace) as trace:
            words = routing_words(labels_of(trace), load_model(spec.model).id)
        return f"; {words}" if words else ""

    @property
    def sources(self) -> list[str]:
        """How drives are read where nobody said it, and why so; and the trace."""
        return [
            *(f"drives: {told}" for told in dict.fromkeys(one.asked.drive for one in self.ready) if told),
            self.trace,
        ]

    def rule_out(self) -> None:
        """By lower bounds, what no lossless policy can reach."""
        bounded = [one for one in self.ready if one.lossless]
        limits = zip(bounded, self.replays.limits([one.asked for one in bounded]), strict=True)
        own = {key_of(one.spec): limit for one, limit in limits}
        for one in bounded:
            limit = own[key_of(one.spec)]
            if limit is None and one.replicas > 1:  # of the same on one machine
                of_one = own.get(key_of(msgspec.structs.replace(one.spec, replicas=1)))
                limit = None if of_one is None else of_one.of_any_replicas
            if limit is not None:
                one.bounded(limit, limit.readings(self.request.goals))


def candidates_of(request: PlanRequest, by_layer: bool = False) -> Candidates:
    """Everything that may be chosen; `by_layer`: with results that have `by_layer`.

    Raises:
        BadInput: several values where a plan has one, a policy that is a bound, a name that is wrong everywhere, or
            nothing that can be set up.
    """
    from sim.run import prepare
    from traces.stats.realism import judge

    prices = None if request.prices is None else read_prices(request.prices)
    every = _every(request, prices)
    ready = [one for one in every if one.ready]
    if not ready:
        raise BadInput(reasons_in_a_line(one.reason for one in every))
    for text in dict.fromkeys(text for one in ready for text in one.asked.notes):
        request.note(text)
    runner = Runner(request.records, request.workers, request.progress, request.pool, by_layer)
    with closing(prepare(ready[0].spec)) as setup:
        replays = Replays(runner, len(setup.requests), setup.open_loop)
        return Candidates(request, every, prices, replays, judge(setup.trace, quick=True).line)


def reasons_in_a_line(some: Iterable[str | None]) -> str:
    """The first, and how many others there are."""
    reasons = [reason for reason in dict.fromkeys(some) if reason]
    more = f" (and {show_count(len(reasons) - 1, 'other reason')})" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}"


def with_replicas(block: Block) -> Block:
    """Under load, and where nobody says how many: one replica, two, and so on."""
    loads = [source for source in block.axes.get("arrivals", []) if source not in (None, NONE)]
    if not loads or "replicas" in block.axes:
        return block
    return replace(block, axes={**block.axes, "replicas": [*range(1, MOST_REPLICAS + 1)]})


def default_policies() -> list[PolicyAxis]:
    """Every installed system that leaves what the model computes as it is."""
    kinds = policies().items()
    return [PolicyAxis(name, named=False) for name, kind in kinds if not {"lossy", *NO_SYSTEM} & kind.traits]


def _every(request: PlanRequest, prices: Prices | None) -> list[Candidate]:
    block = request.block
    given = {OPTIONS.by_field[name].said: some for name, some in block.axes.items() if name not in SEVERAL}
    for said, some in {**given, **{f"--set {name}": some for name, some in block.set.items()}}.items():
        if len(some) > 1:
            varies = "a plan varies machines, precisions, policies, drives and capacities"
            raise BadInput(f"{said}, got {len(some)} values: {varies}; give one, or take moesim sweep")
    for axis in block.policies:
        if axis.named and (traits := sorted(find(axis.name).traits & NO_SYSTEM)):
            raise BadInput(f"--policy, got {axis.name!r}: a {traits[0]}, no system that can be run; leave it out")
    named = "hw" in block.axes
    full = replace(block, policies=block.policies or default_policies())
    if not named:
        full.axes = {**block.axes, "hw": [*sorted(bundled(GPUS, ".yaml"))]}
    full.check("plan")
    points, _ = points_of([full], MOST_POINTS)
    tried = points if named else [point._replace(named=False) for point in points]
    rows = resolved(tried, request.workers or n_cores(), request.progress, request.pool)
    _refuse_policies(points, rows)
    joules = any(goal.key.startswith("energy.") for goal in request.goals)
    found: dict[str, Candidate] = {}
    for point, row in zip(points, rows, strict=True):
        if joules and row.status == OK and (why := _without_watts(row.spec)):
            row = msgspec.structs.replace(row, status=REFUSED, reason=why)
        if row.id not in found:
            found[row.id] = Candidate.of(point.label, row, prices)
    return list(found.values())


def _without_watts(spec: RunSpec) -> str:
    """Why nobody knows the joules that a run is to count, in a line; empty where its profile has watts."""
    if spec.sim_energy is None or not (blocks := hardware_of(spec).lacking(spec.sim_energy)):
        return ""
    missing = " and ".join(f"hw.{block}" for block in blocks)
    way_out = "give its watts in a profile of yours (docs/energy.md)"
    return f"--set sim.energy, got {spec.sim_energy}: the machine's profile has no {missing}; {way_out}"


def _refuse_policies(points: Sequence[Point], rows: Sequence[Resolved]) -> None:
    """Raises BadInput where a policy that was named is refused on every machine."""
    for label in dict.fromkeys(point.label for point in points if point.named):
        own = [row for point, row in zip(points, rows, strict=True) if point.label == label]
        if all(row.status == REFUSED for row in own):
            raise BadInput(own[0].reason)
