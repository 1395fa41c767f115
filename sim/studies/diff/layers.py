"""Where two runs differ along the layers: counts and waits of every phase and MoE layer that are not the same."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.results.by_layer import MISSES, WAITS
from sim.studies.diff.tables import AGAIN, decisions_of, file_of, rows
from sim.workload.iterations import DECODE, PHASES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.studies.diff.side import Side

Row = dict[str, Any]
Where = tuple[str, int]
"""A phase and a layer."""
COUNTED = {"fetch": "demand_copies_n", "evict": "evict_n"}
"""Kinds of decisions that stand for a count, where a result of an older version has none by layer."""


class LayerRow(NamedTuple):
    """One figure of one layer and phase in both runs."""

    phase: str
    layer: int
    key: str
    a: float
    b: float


def by_layer(a: Side, b: Side) -> list[LayerRow]:
    """Every figure of every layer that differs; empty where the layers are not alike, or nothing is known."""
    own, other = layers_of(a), layers_of(b)
    found = []
    for (phase, layer), row in own.items():
        beside = other.get((phase, layer), {})
        for key, value in row.items():
            also = beside.get(key)
            if isinstance(value, int | float) and isinstance(also, int | float) and value != also:
                found.append(LayerRow(phase, layer, key, value, also))
    return found


def layers_of(side: Side) -> Mapping[Where, Row]:
    """Figures by phase and layer: the result's, or what can be counted from its decisions; empty without either.

    Raises:
        BadInput: rows that are of no layer.
    """
    found: dict[Where, Row] = {}
    for at, row in enumerate(side.told.by_layer):
        phase, layer = row.get("phase"), row.get("layer")
        if phase not in PHASES or not isinstance(layer, int) or (phase, layer) in found:
            raise BadInput(f"{side.label}: by_layer[{at}]: of no phase and layer of its own; {AGAIN}")
        found[phase, layer] = {key: value for key, value in row.items() if key not in ("phase", "layer")}
    return found or _counted(side)


def seconds_of(row: Row) -> dict[str, float]:
    """What GPU 0 waited for, by kind; empty where that is not recorded."""
    return {kind: float(row[f"wait_{kind}_s"]) for kind in WAITS if isinstance(row.get(f"wait_{kind}_s"), int | float)}


class LayerWait(NamedTuple):
    """What GPU 0 waited for in a layer, in seconds per iteration of decode, and the kind of wait that changed most."""

    layer: int
    a_s: float
    b_s: float
    largest: str
    largest_s: float
    misses_a: int | None
    misses_b: int | None

    @property
    def difference_s(self) -> float:
        """B less A."""
        return self.b_s - self.a_s


def waits(a: Side, b: Side) -> list[LayerWait]:
    """Layers whose waiting in decode differs, the largest difference first; empty where it is not recorded."""
    own, other = layers_of(a), layers_of(b)
    n_a, n_b = a.told.phases.decode.iterations, b.told.phases.decode.iterations
    found = []
    for (phase, layer), row in own.items():
        beside = other.get((phase, layer))
        if phase != DECODE or beside is None or not n_a or not n_b:
            continue
        mine, also = seconds_of(row), seconds_of(beside)
        changes = {kind: also.get(kind, 0.0) / n_b - mine.get(kind, 0.0) / n_a for kind in WAITS}
        kind = max(changes, key=lambda name: abs(changes[name]))
        if mine and also and changes[kind]:
            sums = math.fsum(mine.values()) / n_a, math.fsum(also.values()) / n_b
            found.append(LayerWait(layer, *sums, kind, changes[kind], row.get("miss_n"), beside.get("miss_n")))
    return sorted(found, key=lambda one: (-abs(one.difference_s), one.layer))


class Reason(NamedTuple):
    """Why experts were missed in decode, as shares of what gates asked for."""

    reason: str
    a: float
    b: float


def misses(a: Side, b: Side) -> list[Reason]:
    """Every reason that there is in either run; empty where it is not recorded."""
    own, other = _reasons(a), _reasons(b)
    if not own or not other:
        return []
    return [Reason(name, own[name], other[name]) for name in MISSES if own[name] or other[name]]


def _reasons(side: Side) -> dict[str, float]:
    decoded = [row for (phase, _), row in layers_of(side).items() if phase == DECODE]
    keys = ["asked_n", *(f"miss_{name}_n" for name in MISSES)]
    if not decoded or not all(isinstance(row.get(key), int) for row in decoded for key in keys):
        return {}
    asked = sum(row["asked_n"] for row in decoded)
    return {name: sum(row[f"miss_{name}_n"] for row in decoded) / asked for name in MISSES} if asked else {}


def _counted(side: Side) -> dict[Where, Row]:
    if side.tables is None:
        return {}
    iterations = file_of(side.tables, "iterations", side.told.run_id)
    decisions = decisions_of(side.tables, side.told.run_id)
    if iterations is None or decisions is None:
        return {}
    phases = [phase for (phase,) in rows(iterations, ["phase"], str(side.tables / "iterations.parquet"))]
    if not phases:
        return {}
    counts: Counter[tuple[str, int, str]] = Counter()
    for one in decisions:  # what is decided after the last iteration counts as that one's
        counts[phases[min(max(0, one.iteration), len(phases) - 1)], one.layer, one.kind] += 1
    found: dict[Where, Row] = {}
    for phase, layer, _ in sorted(counts):
        found[phase, layer] = {name: counts[phase, layer, kind] for kind, name in COUNTED.items()}
    return found
