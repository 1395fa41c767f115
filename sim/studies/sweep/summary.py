"""What a sweep says: which points compete, the best of each group, the axes that vary, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sim.base.errors import BadInput, did_you_mean
from sim.options import OPTIONS
from sim.profiles.overrides import of_profile
from sim.studies.rows import Common, Group, Rank, Row, common_bound, pareto
from sim.workload.slo import slo_text

WORKLOAD = tuple(row.key for row in OPTIONS.rows if row.workload)
"""Between these nothing is ranked: another model, other requests or others beside them are another question."""
MOST_PAIRS = 20_000
"""Systems are held against one another as long as all groups together have no more pairs; else against the fastest."""


@dataclass
class Summary:
    """Groups in the order in which they first came, the axes that vary, and who lies on the front.

    Attributes:
        by: what points of a group have in common. one_workload: whether all of them serve the same.
    """

    varied: dict[str, list[Any]]
    by: list[str]
    groups: list[Group]
    fronts: list[list[Row]]
    failed: list[Row]
    one_workload: bool = False

    @cached_property
    def common(self) -> Common | None:
        """The lower bound of all points; None where they serve several workloads."""
        return common_bound(row for group in self.groups for row in group.rows) if self.one_workload else None

    @property
    def leaders(self) -> list[Row]:
        """The best of every group that has a system."""
        return [row for group in self.groups if (row := group.best) is not None]

    @property
    def axes(self) -> list[str]:
        """What varies but the policy."""
        return [name for name in self.varied if name != "policy"]

    @cached_property
    def ranks(self) -> dict[Row, Rank]:
        """Places among the systems of a group."""
        return {row: rank for group in self.groups for row, rank in group.ranks.items()}


def settings_of(row: Row) -> dict[str, Any]:
    """Everything that may be varied -> its value here: fields of the run as asked for, figures that were set, and the
    policy with its parameters as one."""
    fields = {option.key: getattr(row.spec, option.field) for option in OPTIONS.axes}
    shared = {key: value for key, value in row.spec.set.items() if of_profile(key)}
    return {**fields, **shared, "slo": slo_text(row.spec.slo) or None, "policy": row.label}


def summarise(rows: Sequence[Row], by: Sequence[str] | None = None) -> Summary:
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
    drawn = any(row.spec.arrivals is not None for row in rows)  # requests and gaps by seed
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

    grouped = _alike(rows, settings, common)
    each = sum(len(some) ** 2 for _, some in grouped) <= MOST_PAIRS
    workloads = _alike(rows, settings, [name for name in varied if name in workload and name != "precision"])
    workloads = [(shared, ran) for shared, some in workloads if (ran := _ran(some))]
    return Summary(
        varied,
        common,
        [Group(_ran(some), shared, each) for shared, some in grouped],
        [front for _, some in workloads if (front := pareto(some))],
        [row for row in rows if row.result is None],
        len(workloads) == 1 and "precision" not in varied,
    )


def _alike(
    rows: Sequence[Row], settings: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[tuple[dict[str, Any], list[Row]]]:
    """(what they have in common, rows) by the values of these settings."""
    found: dict[tuple[Any, ...], tuple[dict[str, Any], list[Row]]] = {}
    for row, own in zip(rows, settings, strict=True):
        shared = {name: own.get(name) for name in names}
        found.setdefault(tuple(map(_hashable, shared.values())), (shared, []))[1].append(row)
    return list(found.values())


def _ran(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.result is not None]


def _hashable(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value
