"""Where two runs differ along the layers: counts and waits of every phase and MoE layer that are not the same."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.studies.diff.tables import AGAIN, decisions_of, file_of, rows
from sim.workload.iterations import DECODE, PREFILL

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
        if phase not in (PREFILL, DECODE) or not isinstance(layer, int) or (phase, layer) in found:
            raise BadInput(f"{side.label}: by_layer[{at}]: of no phase and layer of its own; {AGAIN}")
        found[phase, layer] = {key: value for key, value in row.items() if key not in ("phase", "layer")}
    return found or _counted(side)


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
