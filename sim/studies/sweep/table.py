"""The table of a sweep: one row per point, a column for everything that was varied or resolved, no time of day in it.

Columns are those of `runs` (docs/output.md) where a run has them; docs/sweep.md has the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim import __version__
from sim.base.files import replacing
from sim.options import OPTIONS, Option, Table
from sim.profiles.overrides import GROUPS
from sim.results.tables import RUN_COLUMNS
from sim.setup.naming import show
from sim.studies.common_bound import above_frac
from sim.studies.sweep.summary import Summary

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.results.record import Result
    from sim.studies.sweep.run import PointRow

_TEXT, _INT, _FLOAT, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
# `wall_s` differs from run to run; parameters and overrides have columns of their own.
_LEFT_OUT = {"wall_s", "params_json", "overrides_json"}
_ASKED = ("policy", "hw", "model", "precision", "engine", "trace", "split", "hit_definition", "seed", "gpus", "batch")
COMMON = "above_common_bound_frac"
_DIGESTS = ("policy_sha256", "hw_sha256", "model_sha256", "engine_sha256", "trace_sha256")

Cell = Callable[["PointRow"], object]


def _spec(name: str) -> Cell:
    return lambda row: getattr(row.asked.spec, name)


def _of_host(name: str) -> Cell:
    """Of host memory above a drive; None where it holds every expert."""

    def cell(row: PointRow) -> object:
        host = None if row.result is None else row.result.host_memory
        return None if host is None else getattr(host, name)

    return cell


def _of_energy(name: str) -> Cell:
    """Of joules, where they are counted; None where they are not, or not known."""

    def cell(row: PointRow) -> object:
        energy = None if row.result is None else row.result.energy
        return None if energy is None else getattr(energy, name)

    return cell


def _of_result(name: str, read: Callable[[Any], object]) -> Cell:
    def cell(row: PointRow) -> object:
        if row.result is not None:
            return read(row.result)
        if name == "version":
            return __version__
        if name in _DIGESTS:
            return row.asked.meant.get(name)
        return row.asked.meant.get(name, getattr(row.asked.spec, name)) if name in _ASKED else None

    return cell


def _digest(name: str) -> Cell:
    return lambda row: row.asked.meant.get(name)


def _band(which: str, end: int) -> Cell:
    def cell(row: PointRow) -> object:
        ends = None if row.result is None else getattr(row.result.uncertainty.sampling, which)
        return None if ends is None else ends[end]

    return cell


def _bound(name: str) -> Cell:
    def cell(row: PointRow) -> object:
        return None if row.result is None or row.result.bound is None else getattr(row.result.bound, name)

    return cell


def _tokens_per_step(row: PointRow) -> object:
    return None if row.result is None or row.result.draft is None else row.result.draft.tokens_per_step


FIRST: list[tuple[str, pa.DataType, Cell]] = [
    ("label", _TEXT, lambda row: row.label),
    ("status", _TEXT, lambda row: row.status),
    ("reason", _TEXT, lambda row: row.reason or None),
]
LAST: list[tuple[str, pa.DataType, Cell]] = [
    ("tpot_sampling_low_s", _FLOAT, _band("tpot_s", 0)),
    ("tpot_sampling_high_s", _FLOAT, _band("tpot_s", 1)),
    ("ttft_sampling_low_s", _FLOAT, _band("ttft_s", 0)),
    ("ttft_sampling_high_s", _FLOAT, _band("ttft_s", 1)),
    ("bound_tpot_s", _FLOAT, _bound("tpot_s")),
    ("bound_ttft_s", _FLOAT, _bound("ttft_s")),
    ("bound_lanes", _TEXT, _bound("lanes")),
    ("above_bound_frac", _FLOAT, _bound("above_frac")),
    ("cache", _TEXT, _spec("cache")),
    ("cache_bytes", _INT, lambda row: None if row.result is None else sum(row.result.expert_budget_bytes)),
    ("cache_frac", _FLOAT, lambda row: None if row.result is None else _share(row.result)),
    *((name, _TEXT, _digest(name)) for name in _DIGESTS if name != "trace_sha256"),
]


VARIED: list[tuple[str, pa.DataType, Cell]] = [
    ("tokens_per_step", _FLOAT, _tokens_per_step),
    ("ram_hit_rate", _FLOAT, _of_host("hit_rate")),
    ("read_bytes", _INT, _of_host("read_bytes")),
    ("energy_j", _FLOAT, _of_energy("energy_j")),
    ("joules_per_token", _FLOAT, _of_energy("joules_per_token")),
]
"""Columns of results that only some options bring."""
_TYPES = {str: _TEXT, int: _INT, float: _FLOAT, bool: _BOOL}


def asked_columns(table: Table = OPTIONS) -> list[tuple[str, pa.DataType, Cell]]:
    """A column for each option that may vary; one that no point changes from what is usual is left out."""
    told = {"cache", *(name for name, *_ in RUN_COLUMNS)}
    return [
        (row.columned, _TYPES[row.kind.column], _unless(row))
        for row in table.axes
        if row.columned not in told and row.field not in told
    ]


def _unless(option: Option) -> Cell:
    """The value that was asked for; None where it is the usual one."""

    def cell(row: PointRow) -> object:
        value = getattr(row.asked.spec, option.field)
        return None if value == option.default else value

    return cell


def _share(result: Result) -> float:
    """Of all experts, those that have room."""
    shape = result.shape
    return sum(result.expert_budget_bytes) / (result.expert_bytes * shape.layers * shape.experts)


def columns_of(rows: Sequence[PointRow], found: Summary) -> list[tuple[str, pa.DataType, list[Any]]]:
    """(name, type, cells) of every column, in order: what was said, what came out, what was resolved, and what each
    policy's parameters and each figure that was set had for values."""
    fixed = [
        *FIRST,
        *((name, kind, _of_result(name, read)) for name, kind, read in RUN_COLUMNS if name not in _LEFT_OUT),
    ]
    fixed += LAST
    common = None if found.bound is None else found.bound[0]
    fixed.append((COMMON, _FLOAT, lambda row: None if row.result is None else above_frac(row.result, common)))
    fixed += [one for one in (*asked_columns(), *VARIED) if any(one[2](row) is not None for row in rows)]
    columns = [(name, kind, [cell(row) for row in rows]) for name, kind, cell in fixed]
    columns.append(("pareto", _BOOL, [id(row) in found.on_front for row in rows]))
    columns.append(("rank_best", _INT, [None if (rank := found.rank(row)) is None else rank.best for row in rows]))
    columns.append(("rank_worst", _INT, [None if (rank := found.rank(row)) is None else rank.worst for row in rows]))
    params = [_params(row) for row in rows]
    own = sorted({key for one in params for key in one})
    shared = sorted({key for row in rows for key in row.asked.spec.set if _shared(key)})
    columns += [typed(f"param.{key}", [one.get(key) for one in params]) for key in own]
    return columns + [typed(key, [row.asked.spec.set.get(key) for row in rows]) for key in shared]


def _shared(key: str) -> bool:
    return "." in key and key.partition(".")[0] in GROUPS


def _params(row: PointRow) -> dict[str, Any]:
    """The policy's parameters as they were resolved; of a point that did not run, as they were asked for."""
    if row.result is not None:
        return row.result.params
    asked = {key.rpartition(".")[2]: value for key, value in row.asked.spec.set.items() if not _shared(key)}
    return {**row.asked.meant.get("params", {}), **asked}


def typed(name: str, cells: list[Any]) -> tuple[str, pa.DataType, list[Any]]:
    """The narrowest type that holds them all; text as it is typed where they are of several kinds."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds <= {bool}:
        return name, _BOOL, cells
    if kinds <= {int} and all(abs(cell) < 2**63 for cell in cells if cell is not None):
        return name, _INT, cells
    if kinds <= {int, float}:
        return name, _FLOAT, [None if cell is None else float(cell) for cell in cells]
    return name, _TEXT, [None if cell is None else cell if isinstance(cell, str) else show("", cell) for cell in cells]


def table_of(rows: Sequence[PointRow], found: Summary) -> pa.Table:
    """The table in memory."""
    return arrow(columns_of(rows, found))


def arrow(columns: Sequence[tuple[str, pa.DataType, list[Any]]]) -> pa.Table:
    """(name, type, cells) of every column as a table."""
    schema = pa.schema([(name, kind) for name, kind, _ in columns])
    return pa.Table.from_arrays([pa.array(cells, kind) for _, kind, cells in columns], schema=schema)


def write(path: Path, table: pa.Table, about: dict[str, Any]) -> None:
    """Write the table, whole or not at all; equal tables give equal files.

    Args:
        about: what the sweep says of itself, as the file's metadata under `moesim`; `moesim report` reads it.
    """
    said = {"moesim": json.dumps(about, ensure_ascii=False, sort_keys=True)}
    with replacing(path) as part:
        pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **said}), part)


def frame(table: pa.Table) -> DataFrame:
    """The same as a DataFrame."""
    found: DataFrame = table.to_pandas()
    return found
