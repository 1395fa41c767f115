"""The table of a sweep: one row per point, a column for everything that was varied or resolved, no time of day in it.

A figure's column is its key in the JSON (`sim.figures`), an option's its name. The file that `--out` keeps has all
columns, since a figure that is wanted later would cost a replay and a column that is not read costs nothing; what is
printed and what Python gets are some thirty (`chosen`), unless it is asked for others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import __version__
from sim.base.errors import BadInput, did_you_mean
from sim.base.files import replacing
from sim.figures import SCHEMA, figures
from sim.options import OPTIONS, Option, Table
from sim.profiles.overrides import of_profile
from sim.results.tables import arrow_type, cell, run_figures, type_of
from sim.setup.naming import show
from sim.studies.sweep.summary import Summary

if TYPE_CHECKING:
    import pyarrow as pa

    from sim.figures import Row as Figured
    from sim.results.record import Result
    from sim.studies.rows import Row

Column = tuple[str, str, list[Any]]
"""Its name, its type (`sim.results.tables`), and its cells."""

POINT = ("label", "status", "reason")
COMMON = "above_common_bound_frac"
PLACES = ("pareto", "rank_best", "rank_worst")
ALL = "all"
# `wall_s` differs from run to run; parameters and what was set have columns of their own.
_LEFT_OUT = {"wall_s", "params", "overrides"}
_DIGESTS = ("policy_sha256", "hw_sha256", "model_sha256", "engine_sha256")


def columns_of(rows: Sequence[Row], found: Summary) -> list[Column]:
    """Every column, in order: what was said, what came out, what was asked for, and what each policy's parameters and
    each figure that was set had for values."""
    columns: list[Column] = [(name, "text", [getattr(row, name) or None for row in rows]) for name in POINT]
    columns += [
        (one.key, type_of(one), [_figure(one, row) for row in rows])
        for one in run_figures()
        if one.key not in _LEFT_OUT
    ]
    columns += [(name, kind, [read(row) for row in rows]) for name, kind, read in CAPACITY]
    for option in asked_columns():
        cells = [getattr(row.asked.spec, option.field) for row in rows]
        if any(value != option.default for value in cells):
            columns.append((option.columned, _TYPES[option.kind.column], cells))
    columns += [(name, "text", [row.asked.meant.get(name) for row in rows]) for name in _DIGESTS]
    common, front = found.common, {row for front in found.fronts for row in front}
    above = [None if row.result is None or common is None else common.above_frac(row) for row in rows]
    ranks = [found.ranks.get(row) for row in rows]
    columns += [
        (COMMON, "float", above),
        ("pareto", "bool", [row in front for row in rows]),
        ("rank_best", "int", [None if rank is None else rank.best for rank in ranks]),
        ("rank_worst", "int", [None if rank is None else rank.worst for rank in ranks]),
    ]
    params = [_params(row) for row in rows]
    own = sorted({key for one in params for key in one})
    shared = sorted({key for row in rows for key in row.asked.spec.set if of_profile(key)})
    columns += [typed(f"params.{key}", [one.get(key) for one in params]) for key in own]
    return columns + [typed(key, [row.asked.spec.set.get(key) for row in rows]) for key in shared]


def _figure(one: Figured, row: Row) -> Any:
    """A figure of a point; of one that did not run, what it was asked for."""
    if row.result is not None:
        return cell(one, row.result)
    if one.key == "version":
        return __version__
    if one.key not in ASKED:
        return None
    return row.asked.meant.get(one.key, getattr(row.asked.spec, one.key))


def _share(result: Result) -> float:
    """Of all experts, those that have room."""
    shape = result.shape
    return sum(result.cache_capacity_bytes) / (result.expert_bytes * shape.layers * shape.experts)


CAPACITY: list[tuple[str, str, Callable[[Row], object]]] = [
    ("cache", "text", lambda row: row.asked.spec.cache),
    ("cache_bytes", "int", lambda row: None if row.result is None else sum(row.result.cache_capacity_bytes)),
    ("cache_frac", "float", lambda row: None if row.result is None else _share(row.result)),
]
"""Room for experts as it was asked for, over all GPUs, and as a share of all experts."""
_TYPES = {str: "text", int: "int", float: "float", bool: "bool"}
ASKED = {row.field for row in OPTIONS.rows if row.columned == row.field and row.field != "set"}
"""Options that a result tells of under the same name."""


def asked_columns(table: Table = OPTIONS) -> list[Option]:
    """Options that may vary and have a column of their own, where some point changes them from what is usual."""
    told = {"cache", *figures()}
    return [row for row in table.axes if row.columned not in told and row.field not in told]


def chosen(table: pa.Table, found: Summary, columns: str | Sequence[str] | None = None) -> pa.Table:
    """Some columns of a table, after those that tell a point from others: its label, what became of it, what varies.

    Args:
        columns: `all`; names, or the starts of names (`prefetch`); None: the figures that are shown first, those of
            parts that only some runs have where any has it, and how the points stand to one another.

    Raises:
        BadInput: no column is called so.
    """
    if columns == ALL:
        return table
    names = table.column_names
    there = {name for name in names if table.column(name).null_count < len(table)}
    varied = [_column(name) for name in found.varied if name != "policy"]
    several = [name for name in names if name.startswith("params.") and len(set(table.column(name).to_pylist())) > 1]
    if columns is None:
        first = [row for row in figures().values() if row.shown == "first"]
        wanted = {row.key for row in first if not row.part or row.key in there} | {COMMON, *PLACES}
    else:
        asked = [columns] if isinstance(columns, str) else list(columns)
        wanted = set()
        for one in asked:
            some = {name for name in names if name == one or name.startswith(f"{one}.")}
            if not some:
                raise BadInput(f"--columns, got {one!r}: no column of a sweep; {did_you_mean(one, names)}")
            wanted |= some
    kept = {*POINT, *varied, *several, *wanted}
    return table.select([name for name in names if name in kept])


def _column(name: str) -> str:
    """The column of an axis."""
    return next((row.columned for row in OPTIONS.axes if row.key == name), name)


def _params(row: Row) -> dict[str, Any]:
    """The policy's parameters as they were resolved; of a point that did not run, as they were asked for."""
    if row.result is not None:
        return row.result.params
    asked = {key.rpartition(".")[2]: value for key, value in row.asked.spec.set.items() if not of_profile(key)}
    return {**row.asked.meant.get("params", {}), **asked}


def typed(name: str, cells: list[Any]) -> Column:
    """The narrowest type that holds them all; text as it is typed where they are of several kinds."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds <= {bool}:
        return name, "bool", cells
    if kinds <= {int} and all(abs(cell) < 2**63 for cell in cells if cell is not None):
        return name, "int", cells
    if kinds <= {int, float}:
        return name, "float", [None if cell is None else float(cell) for cell in cells]
    return name, "text", [None if cell is None else cell if isinstance(cell, str) else show("", cell) for cell in cells]


def arrow(columns: Sequence[Column]) -> pa.Table:
    """Columns as a table."""
    import pyarrow as pa

    schema = pa.schema([(name, arrow_type(kind)) for name, kind, _ in columns])
    arrays = [pa.array(cells, field.type) for (_, _, cells), field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def write(path: Path, table: pa.Table, about: dict[str, Any]) -> None:
    """Write the table, whole or not at all; equal tables give equal files.

    Args:
        about: what the sweep says of itself, as the file's metadata under `moesim`; `moesim report` reads it.
    """
    import pyarrow.parquet as pq

    said = {"moesim": json.dumps({"schema": SCHEMA, **about}, ensure_ascii=False, sort_keys=True)}
    with replacing(path) as part:
        pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **said}), part)
