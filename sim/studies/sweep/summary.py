"""What a sweep says: the best of each group, what the requests do not tell apart from it, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput, did_you_mean
from sim.options import OPTIONS
from sim.profiles.overrides import of_profile
from sim.studies.common_bound import common_bound
from sim.studies.promised import keeps_most
from sim.studies.ranking import Rank, is_bound, is_lossy, placed
from sim.workload.slo import slo_text

if TYPE_CHECKING:
    from sim.figures import Bound
    from sim.studies.sweep.run import PointRow

WORKLOAD = (
    "model",
    "trace",
    "split",
    "requests",
    "arrivals",
    "arrivals.scale",
    "slo",
    "batch",
    "gpus",
    "replicas",
    "precision",
)
"""Between these nothing is ranked: another model, other requests or others beside them are another question."""
MOST_PAIRS = 20_000
"""Systems are held against one another as long as all groups together have no more pairs; else against the fastest."""


@dataclass
class Group:
    """Points that compete: what they have in common, systems fastest first, bounds beside them.

    `ranks`: by position among the systems; empty where no sampling error is to be had.
    """

    by: dict[str, Any]
    systems: list[PointRow] = field(default_factory=list)
    bounds: list[PointRow] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    @property
    def faithful(self) -> list[PointRow]:
        """Lossless systems; where all are lossy, all of them."""
        return [row for row in self.systems if not _lossy(row)] or self.systems

    @property
    def best(self) -> PointRow | None:
        """The fastest lossless system; where all are lossy, the fastest of them."""
        return next(iter(self.faithful), None)

    @property
    def keeps(self) -> PointRow | None:
        """The lossless system most of whose requests kept their SLO; where all are lossy, that one of them."""
        return keeps_most(self.faithful, lambda row: row.ran)

    def tied(self, row: PointRow) -> list[PointRow]:
        """Systems that the requests do not tell apart from it."""
        if not self.ranks:
            return []
        at = _at(self.systems, row)
        return [other for other in self.systems if other is not row and _title(other) in self.ranks[at].tied]

    def next_to(self, row: PointRow) -> PointRow | None:
        """The next slower system that is as faithful."""
        later = self.systems[_at(self.systems, row) + 1 :]
        return next((other for other in later if _lossy(row) or not _lossy(other)), None)


@dataclass
class Summary:
    """Groups in the order in which they first came, the axes that vary, and who lies on the front."""

    varied: dict[str, list[Any]]
    by: list[str]
    groups: list[Group]
    fronts: list[list[PointRow]]
    on_front: set[int]
    failed: list[PointRow]
    _ranks: dict[int, Rank] = field(default_factory=dict)
    one_workload: bool = False

    @cached_property
    def bound(self) -> tuple[Bound, PointRow] | None:
        """The lower bound of all points, and one whose own it is; None where they serve several workloads."""
        ran = [row for group in self.groups for row in (*group.systems, *group.bounds)]
        found = common_bound(row.ran for row in ran) if self.one_workload else None
        return None if found is None else (found[0], next(row for row in ran if row.result is found[1]))

    @property
    def leaders(self) -> list[PointRow]:
        """The best of every group that has a system."""
        return [row for group in self.groups if (row := group.best) is not None]

    @property
    def axes(self) -> list[str]:
        """What varies but the policy."""
        return [name for name in self.varied if name != "policy"]

    def rank(self, row: PointRow) -> Rank | None:
        """Its place among the systems of its group."""
        return self._ranks.get(id(row))


def settings_of(row: PointRow) -> dict[str, Any]:
    """Everything that may be varied -> its value here: fields of the run as asked for, figures that were set, and the
    policy with its parameters as one."""
    spec = row.point.spec
    fields = {option.key: getattr(spec, option.field) for option in OPTIONS.axes}
    shared = {key: value for key, value in spec.set.items() if of_profile(key)}
    return {**fields, **shared, "slo": slo_text(spec.slo) or None, "policy": row.label}


def summarise(rows: Sequence[PointRow], by: Sequence[str] | None = None) -> Summary:
    """The groups and the front.

    Args:
        by: what points of one group have in common. None: all that varies but the policy; where the policy does not,
            the workload, so that settings compete.

    Raises:
        BadInput: `by` names what does not vary.
    """
    settings = [settings_of(row) for row in rows]
    names = list(dict.fromkeys(name for own in settings for name in own))
    values = {name: list({_hashable(own.get(name)): own.get(name) for own in settings}.values()) for name in names}
    varied = {name: found for name, found in values.items() if len(found) > 1}
    drawn = any(row.point.spec.arrivals is not None for row in rows)  # requests and gaps by seed
    workload = (*WORKLOAD, "seed") if drawn else WORKLOAD
    if by is not None:
        for name in by:
            if name not in varied:
                raise BadInput(f"--group-by, got {name!r}: it does not vary here; {did_you_mean(name, varied)}")
        common = [name for name in varied if name in (*by, *workload)]
    elif "policy" in varied:
        common = [name for name in varied if name != "policy"]
    else:
        common = [name for name in varied if name in workload]
    groups: dict[tuple[Any, ...], Group] = {}
    workloads: dict[tuple[Any, ...], list[PointRow]] = {}
    alike = [name for name in varied if name in workload and name != "precision"]
    for row, own in zip(rows, settings, strict=True):
        group = groups.setdefault(_key(own, common), Group({name: own.get(name) for name in common}))
        if row.result is not None:
            (group.bounds if is_bound(row.result) else group.systems).append(row)
            workloads.setdefault(_key(own, alike), []).append(row)
    found: dict[int, Rank] = {}
    each = sum(len(group.systems) ** 2 for group in groups.values()) <= MOST_PAIRS
    for group in groups.values():
        group.systems.sort(key=lambda row: row.speed_s)
        group.bounds.sort(key=lambda row: row.speed_s)
        group.ranks = _ranks(group.systems, each)
        found |= {id(row): rank for row, rank in zip(group.systems, group.ranks, strict=False)}
    fronts = [front for one in workloads.values() if (front := pareto(one))]
    on_front = {id(row) for front in fronts for row in front}
    failed = [row for row in rows if row.result is None]
    alone = len(workloads) == 1 and "precision" not in varied
    return Summary(varied, common, list(groups.values()), fronts, on_front, failed, found, alone)


def pareto(rows: Sequence[PointRow]) -> list[PointRow]:
    """Lossless systems that no other beats in time and peak memory at once, least memory first."""
    front: list[PointRow] = []
    systems = [row for row in rows if row.result is not None and not is_bound(row.result) and not _lossy(row)]
    for row in sorted(systems, key=lambda row: (row.ran.peak_vram_bytes, row.speed_s)):
        if not front or row.speed_s < front[-1].speed_s:
            front.append(row)
    return front


def _ranks(systems: Sequence[PointRow], each: bool) -> list[Rank]:
    """Rank of each; where not `each` is held against all, only who is tied with the fastest is told."""
    samples = [row.sample for row in systems if row.sample is not None]
    if each or not samples:
        return placed([_title(row) for row in systems], samples)
    first = samples[0]
    if first.n < 2:
        return []
    tied = {i for i, other in enumerate(samples) if i and not first.significant(other)}
    places = [Rank(1, 1 + len(tied), [_title(systems[i]) for i in sorted(tied)])]
    for i in range(1, len(samples)):
        best = 1 if i in tied else 2
        places.append(Rank(best, len(samples), [_title(systems[0])] if i in tied else []))
    return places


def _title(row: PointRow) -> str:
    return row.asked.id


def _at(rows: Sequence[PointRow], row: PointRow) -> int:
    return next(at for at, other in enumerate(rows) if other is row)


def _lossy(row: PointRow) -> bool:
    return is_lossy(row.ran)


def _hashable(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


def _key(own: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_hashable(own.get(name)) for name in names)


def ratio(slower: PointRow, faster: PointRow) -> float:
    """How many times as long the slower one takes."""
    return slower.speed_s / faster.speed_s if faster.speed_s > 0 else math.inf
