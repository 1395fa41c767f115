"""The tidy tables of `--out`: one row one fact, scalars only, columns fixed, units in their names.

Columns are documented in docs/output.md; a test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim.base.lanes import WAITED_FOR
from sim.engine.counts import CLASSES

TABLES = ("runs", "requests", "iterations", "decisions", "spans")
ROWS_PER_GROUP = 65_536

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
_STATISTICS = (("mean", _FLOAT), ("p50", _FLOAT), ("p95", _FLOAT), ("p99", _FLOAT), ("n", _INT))
_FATES = ("useful", "late", "wasted", "harmful", "issued", "cancelled", "refused")

if TYPE_CHECKING:
    from pandas import DataFrame

Cell = Callable[[dict[str, Any]], Any]


def _at(*path: str) -> Cell:
    def read(result: dict[str, Any]) -> Any:
        for key in path:
            result = result[key]
        return result

    return read


def _json_at(key: str) -> Cell:
    return lambda result: json.dumps(result[key], ensure_ascii=False, allow_nan=False)


def _run_columns() -> list[tuple[str, pa.DataType, Cell]]:
    """(column, type, how it is read from the result) of `runs`."""
    columns = [(name, _TEXT, _at(name)) for name in
               ("run_id", "name", "engine", "version", "policy", "hw", "model", "precision", "stack", "trace",
                "trace_sha256", "split", "hit_definition", "arrivals")]  # fmt: skip
    columns += [(f"{key}_json", _TEXT, _json_at(key)) for key in ("params", "overrides", "labels")]
    columns += [(name, _INT, _at(name)) for name in ("seed", "gpus", "batch", "requests", "decode_tokens")]
    for key in ("prompt_tokens", "output_tokens"):
        columns += [(f"{key}_{name}", _FLOAT if name == "mean" else _INT, _at("lengths", key, name))
                    for name in ("mean", "min", "max")]  # fmt: skip
    columns.append(("longest_context_tokens", _INT, _at("lengths", "longest_context_tokens")))
    for key in ("ttft", "tpot", "e2e"):
        for name, kind in _STATISTICS:
            column = f"{key}_n" if name == "n" else f"{key}_{name}_s"
            columns.append((column, kind, _at(f"{key}_s", name)))
    columns.append(("throughput_tokens_per_s", _FLOAT, _at("throughput_tokens_per_s")))
    columns += [(f"{name}_rate", _FLOAT, _at(f"{name}_rate")) for name in CLASSES]
    columns += [(f"prefill_{name}_rate", _FLOAT, _at("prefill_hit_rates", name)) for name in CLASSES]
    columns += [("gate_mass_kept_frac", _FLOAT, _at("gate_mass_kept")),
                ("activations_changed_frac", _FLOAT, _at("activations_changed_frac")),
                ("activations_lowered_frac", _FLOAT, _at("activations_lowered_frac"))]  # fmt: skip
    for fate in _FATES:
        columns += [(f"prefetch_{fate}_{what}", _INT, _at("prefetch", fate, what)) for what in ("n", "bytes")]
    columns += [("demand_copies_n", _INT, _at("demand_copies", "n")),
                ("demand_copies_bytes", _INT, _at("demand_copies", "bytes"))]  # fmt: skip
    columns += [(name, _INT, _at(name)) for name in
                ("h2d_bytes", "d2h_bytes", "peak_vram_bytes", "peak_host_bytes", "expert_bytes")]  # fmt: skip
    columns += [("vram_bytes", _INT, _at("memory", "vram_bytes")),
                ("expert_budget_bytes", _INT, lambda r: sum(r["expert_budget_bytes"])),
                ("peak_expert_bytes", _INT, lambda r: sum(r["peak_expert_bytes"])),
                ("bound_by", _TEXT, _at("bound_by", "resource"))]  # fmt: skip
    for phase in ("prefill", "decode"):
        columns.append((f"{phase}_time_s", _FLOAT, _at("phases", phase, "time_s")))
        columns += [(f"{phase}_{part}_frac", _FLOAT, _at("bound_by", phase, part)) for part in WAITED_FOR]
    columns += [(f"{source}_frac", _FLOAT, _at("provenance", source)) for source in
                ("measured", "datasheet", "assumed")]  # fmt: skip
    columns += [("uncertainty_low_factor", _FLOAT, _at("uncertainty", "low_factor")),
                ("uncertainty_high_factor", _FLOAT, _at("uncertainty", "high_factor")),
                ("simulated_s", _FLOAT, _at("simulated_s")), ("wall_s", _FLOAT, _at("wall_s"))]  # fmt: skip
    return columns


RUN_COLUMNS = _run_columns()

SCHEMAS: dict[str, pa.Schema] = {
    "runs": pa.schema([(name, kind) for name, kind, _ in RUN_COLUMNS]),
    "requests": pa.schema([
        ("run_id", _TEXT), ("request", _INT), ("task", _TEXT), ("prompt_tokens", _INT), ("output_tokens", _INT),
        ("arrival_s", _FLOAT), ("start_s", _FLOAT), ("first_token_s", _FLOAT), ("last_token_s", _FLOAT),
        ("ttft_s", _FLOAT), ("tpot_s", _FLOAT),
    ]),
    "iterations": pa.schema([
        ("run_id", _TEXT), ("iteration", _INT), ("phase", _TEXT), ("n_requests", _INT), ("n_tokens", _INT),
        ("start_s", _FLOAT), ("end_s", _FLOAT),
    ]),
    "decisions": pa.schema([
        ("run_id", _TEXT), ("decision", _INT), ("iteration", _INT), ("layer", pa.int32()), ("expert", pa.int32()),
        ("kind", _TEXT),
    ]),
    "spans": pa.schema([
        ("run_id", _TEXT), ("lane", _TEXT), ("op", _TEXT), ("layer", pa.int32()), ("expert", pa.int32()),
        ("n_tokens", pa.int32()), ("n_bytes", _INT), ("start_s", _FLOAT), ("end_s", _FLOAT),
    ]),
}  # fmt: skip


def run_row(result: dict[str, Any]) -> tuple[Any, ...]:
    """The one row of `runs`, from the JSON object."""
    return tuple(read(result) for _, _, read in RUN_COLUMNS)


def frame(name: str, run_id: str, rows: Iterable[tuple[Any, ...]]) -> DataFrame:
    """A table as a DataFrame; rows leave out `run_id`."""
    found: DataFrame = pa.Table.from_batches([_batch(SCHEMAS[name], run_id, list(rows))]).to_pandas()
    return found


def _batch(schema: pa.Schema, run_id: str, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [[run_id] * len(rows), *(list(column) for column in zip(*rows, strict=True))]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class TableWriter:
    """A Parquet file written a row group at a time: memory does not grow with the table.

    Rows leave out `run_id`, which is the same in all of them. None is null.
    """

    def __init__(self, folder: Path, name: str, run_id: str, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._schema = SCHEMAS[name]
        self._run_id = run_id
        self._limit = rows_per_group
        self._rows: list[tuple[Any, ...]] = []
        self._file = pq.ParquetWriter(folder / f"{name}.parquet", self._schema)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._file.close()

    def add(self, *row: Any) -> None:
        """Append one row."""
        self._rows.append(row)
        if len(self._rows) >= self._limit:
            self._flush()

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Append rows."""
        for row in rows:
            self.add(*row)

    def _flush(self) -> None:
        if not self._rows:
            return
        self._file.write_batch(_batch(self._schema, self._run_id, self._rows))
        self._rows.clear()
