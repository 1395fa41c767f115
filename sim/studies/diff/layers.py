"""Where two runs differ along the layers: waiting, misses and copies of each MoE layer, largest difference first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sim.studies.diff.tables import file_of

if TYPE_CHECKING:
    from sim.studies.diff.side import Side


class LayerRow(NamedTuple):
    """One figure of one layer and phase in both runs."""

    phase: str
    layer: int
    key: str
    a: float
    b: float


def rows_of(side: Side) -> list[dict[str, Any]]:
    """One row per phase and layer; empty where neither the result nor a table tells."""
    if side.told.by_layer or side.tables is None:
        return side.told.by_layer
    iterations = file_of(side.tables, "iterations", side.told.run_id)
    decisions = file_of(side.tables, "decisions", side.told.run_id)
    if iterations is None or decisions is None:
        return []
    from sim.results.by_layer import by_layer

    n_layers = side.facts.get("shape", {}).get("layers", 0)
    found = by_layer(iterations.read().to_pandas(), decisions.read().to_pandas(), n_layers)
    return [{str(key): value for key, value in row.items()} for row in found.to_dict("records")]


def by_layer(a: Side, b: Side) -> list[LayerRow]:
    """Every count and time of every layer that differs; empty where the layers are not alike, or nothing is known."""
    own, other = ({(row["phase"], row["layer"]): row for row in rows_of(side)} for side in (a, b))
    found = []
    for where, row in own.items():
        for key, value in row.items():
            if key in ("run_id", "phase", "layer") or where not in other or key not in other[where]:
                continue
            beside = other[where][key]
            if isinstance(value, int | float) and isinstance(beside, int | float) and value != beside:
                found.append(LayerRow(*where, key, value, beside))
    return found
