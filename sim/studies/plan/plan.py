"""A plan from what was asked to its verdict: the same for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.figures import SCHEMA
from sim.options import OPTIONS
from sim.policy.registry import find, policies
from sim.studies.hosts import of_specs
from sim.studies.plan.candidate import Candidate, machine_of, without_watts
from sim.studies.plan.goal import Goal, of_energy
from sim.studies.plan.headroom import Headroom, headroom
from sim.studies.plan.ladder import Level, climb, levels_of
from sim.studies.plan.limits import rule_out
from sim.studies.plan.prices import Prices, read_prices
from sim.studies.plan.remedy import Remedy, remedies
from sim.studies.plan.replays import Replays
from sim.studies.pool import answers, n_cores
from sim.studies.sweep.grid import Block, Point, PolicyAxis, points_of
from sim.studies.sweep.point_store import Records
from sim.studies.sweep.run import resolved
from sim.studies.sweep.work import OK, REFUSED, Resolved
from sim.workload.load import NONE

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.studies.runner import Answers, Progress

MOST_POINTS = 10_000
MOST_REPLICAS = 8
SEVERAL = ("hw", "precision", "gpus", "replicas", "ram", "drive", "vram", "cache")
"""Axes of which a plan takes several values: what is bought, and how much of it is used."""
NO_SYSTEM = frozenset({"bound", "oracle"})


@dataclass
class Asked:
    """What a plan was asked for.

    Attributes:
        goals: all of them have to be reached. block: policies, machines, budgets and what else makes a run.
        prices: a file. every: settle dearer settings than the answer, too.
        invert: say of every machine that fails what would have to be true. records: what is known from before.
    """

    goals: list[Goal]
    block: Block
    prices: Path | None = None
    every: bool = False
    invert: bool = True
    workers: int | None = None
    pool: Answers = answers
    records: Records = field(default_factory=Records)
    most: int = MOST_POINTS

    def replays(self, n_requests: int, progress: Progress, loaded: bool, by_layer: bool = False) -> Replays:
        """Replays of its runs, none of them counted yet."""
        return Replays(n_requests, self.workers, progress, self.pool, loaded, self.records, by_layer)


@dataclass
class Planned:
    """A plan that is made.

    Attributes:
        answer: the cheapest setting that reaches the goals. trace: what the figures rest on, in a line.
        remedies: by machine that fails, what would have to be true. searched: the replays that they took.
        headroom: under load, up to which rate the answer would hold.
    """

    asked: Asked
    prices: Prices | None
    levels: list[Level]
    answer: Level | None
    replays: Replays
    n_bounds: int
    trace: str
    remedies: dict[str, list[Remedy]] = field(default_factory=dict)
    searched: Replays | None = None
    headroom: Headroom | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """All of them, the cheapest setting first."""
        return [one for level in self.levels for one in level.candidates]

    @cached_property
    def hosts(self) -> str:
        """Where machines come with unlike hosts, a line that says so."""
        return of_specs(one.spec for one in self.candidates if one.ready)

    @property
    def reached(self) -> bool:
        """Whether any candidate reaches the goals."""
        return self.answer is not None

    @property
    def best(self) -> Candidate | None:
        """The policy with the largest margin in the cheapest setting that reaches the goals."""
        return None if self.answer is None else self.answer.reaching[0]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        from sim.studies.plan.text import answer

        replays, best = self.replays, self.best
        return {
            "schema": SCHEMA,
            "answer": answer(self),
            "reached": self.reached,
            "goals": [goal.to_dict() for goal in self.asked.goals],
            "prices": None if self.prices is None else {"file": str(self.prices.path), "unit": self.prices.unit},
            "trace": self.trace,
            "hosts": self.hosts or None,
            "best": None if best is None else best.to_dict(),
            **({} if self.headroom is None else {"up_to_rate": self.headroom._asdict()}),
            "work": {
                "candidates": len(self.candidates),
                "can_be_set_up": sum(one.ready for one in self.candidates),
                "lower_bounds": self.n_bounds,
                "replays": replays.n_runs,
                "replays_of_all_requests": replays.n_whole,
                "whole_replays": replays.share,
                "replays_for_remedies": 0 if self.searched is None else self.searched.n_runs,
            },
            "remedies": {name: [one.to_dict() for one in some] for name, some in self.remedies.items()},
            "candidates": [one.to_dict() for one in self.candidates],
        }


def plan(asked: Asked, progress: Progress, note: Callable[[str], None] = lambda _: None) -> Planned:
    """Make it.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    prices = None if asked.prices is None else read_prices(asked.prices)
    asked = replace(asked, block=_with_replicas(asked.block))
    candidates = candidates_of(asked, prices, progress)
    ready = [one for one in candidates if one.ready]
    if not ready:
        reasons = list(dict.fromkeys(one.reason for one in candidates))
        more = f" (and {show_count(len(reasons) - 1, 'other reason')})" if len(reasons) > 1 else ""
        raise BadInput(f"{reasons[0]}{more}")
    for text in dict.fromkeys(text for one in ready for text in one.asked.notes):
        note(text)
    n_requests, trace, loaded = facts_of(ready[0])
    n_bounds = rule_out(asked.goals, candidates, asked.workers or n_cores(), progress, asked.pool, asked.records)
    replays = asked.replays(n_requests, progress, loaded)
    levels = levels_of(candidates)
    found = climb(asked.goals, levels, replays, asked.every)
    planned = Planned(asked, prices, levels, found, replays, n_bounds, trace)
    if asked.invert and planned.best is not None and loaded:
        further = asked.replays(n_requests, progress, loaded)
        planned.headroom = headroom(asked.goals, planned.best, further)
    if asked.invert:
        workers = asked.workers or n_cores()
        searched = planned.searched = asked.replays(n_requests, progress, loaded)
        planned.remedies = remedies(asked, planned.candidates, searched, workers, progress)
    return planned


def _with_replicas(block: Block) -> Block:
    """Under load, and where nobody says how many: one replica, two, and so on."""
    loads = [source for source in block.axes.get("arrivals", []) if source not in (None, NONE)]
    if not loads or "replicas" in block.axes:
        return block
    return replace(block, axes={**block.axes, "replicas": [*range(1, MOST_REPLICAS + 1)]})


def facts_of(candidate: Candidate) -> tuple[int, str, bool]:
    """How many requests a run has, what its trace is, in a line, and whether requests come at times of their own."""
    from sim.run import prepare
    from traces.stats.realism import judge

    setup = prepare(candidate.spec)
    try:
        return len(setup.requests), judge(setup.trace, quick=True).line, setup.open_loop
    finally:
        setup.close()


def default_policies() -> list[PolicyAxis]:
    """Every installed system that leaves what the model computes as it is."""
    kinds = policies().items()
    return [PolicyAxis(name, named=False) for name, kind in kinds if not {"lossy", *NO_SYSTEM} & kind.traits]


def default_machines() -> list[Any]:
    """Every bundled GPU."""
    from sim.base.files import bundled
    from sim.profiles.hardware import GPUS

    return sorted(bundled(GPUS, ".yaml"))


def candidates_of(asked: Asked, prices: Prices | None, progress: Progress) -> list[Candidate]:
    """Everything that may be chosen, set up or not.

    Raises:
        BadInput: several values where a plan has one, a policy that is a bound, or a name that is wrong everywhere.
    """
    block = asked.block
    for name, values in block.axes.items():
        if name not in SEVERAL and len(values) > 1:
            raise BadInput(
                f"{OPTIONS.by_field[name].said}, got {len(values)} values: a plan varies machines, precisions, "
                "policies, drives "
                "and budgets; give one, or take moesim sweep"
            )
    for name, values in block.set.items():
        if len(values) > 1:
            raise BadInput(f"--set {name}, got {len(values)} values: a plan takes one; or take moesim sweep")
    for axis in block.policies:
        if axis.named and (traits := sorted(_kind(axis.name).traits & NO_SYSTEM)):
            raise BadInput(f"--policy, got {axis.name!r}: a {traits[0]}, no system that can be run; leave it out")
    named = "hw" in block.axes
    axes = block.axes if named else {**block.axes, "hw": default_machines()}
    full = Block(block.policies or default_policies(), axes, block.set, block.slo)
    full.check("plan")
    points, _ = points_of([full], asked.most)
    tried = points if named else [point._replace(named=False) for point in points]
    rows = resolved(tried, asked.workers or n_cores(), progress, asked.pool)
    _refuse_policies(points, rows)
    found: dict[str, Candidate] = {}
    for point, row in zip(points, rows, strict=True):
        one = Candidate(point, row, machine_of(row.spec, prices), "lossy" in _kind(row.spec.policy).traits)
        if row.status == OK and any(of_energy(goal) for goal in asked.goals) and (why := without_watts(row.spec)):
            one.asked = msgspec.structs.replace(row, status=REFUSED, reason=why)
        if not one.ready:
            one.failed(one.asked.reason)
        found.setdefault(row.id, one)
    return list(found.values())


def _kind(name: str) -> type[Policy]:
    return find(name)


def _refuse_policies(points: Sequence[Point], rows: Sequence[Resolved]) -> None:
    """Raises BadInput where a policy that was named is refused on every machine."""
    labels = dict.fromkeys(point.label for point in points if point.named)
    for label in labels:
        own = [row for point, row in zip(points, rows, strict=True) if point.label == label]
        if all(row.status == REFUSED for row in own):
            raise BadInput(own[0].reason)
