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

from sim.base.lanes import ALWAYS
from sim.engine.counts import CLASSES
from sim.results.by_layer import COUNTS, WAITS_S

TABLES = ("runs", "requests", "iterations", "decisions", "spans", "layers", "experts")
ROWS_PER_GROUP = 65_536

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
_FATES = ("useful", "late", "wasted", "harmful", "issued", "cancelled", "refused")

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.results.record import Result
    from sim.results.schema import HitRates, Length, Phase, Phased, Statistic

Cell = Callable[["Result"], object]
Column = tuple[str, pa.DataType, Cell]
"""Its name, its type, and how it is read from the result."""


def _statistic(name: str, read: Callable[[Result], Statistic]) -> list[Column]:
    return [
        (f"{name}_mean_s", _FLOAT, lambda r: read(r).mean),
        (f"{name}_p50_s", _FLOAT, lambda r: read(r).p50),
        (f"{name}_p95_s", _FLOAT, lambda r: read(r).p95),
        (f"{name}_p99_s", _FLOAT, lambda r: read(r).p99),
        (f"{name}_n", _INT, lambda r: read(r).n),
    ]


def _length(name: str, read: Callable[[Result], Length]) -> list[Column]:
    return [
        (f"{name}_mean", _FLOAT, lambda r: read(r).mean),
        (f"{name}_min", _INT, lambda r: read(r).min),
        (f"{name}_max", _INT, lambda r: read(r).max),
    ]


def _rates(prefix: str, read: Callable[[Result], HitRates]) -> list[Column]:
    def column(name: str) -> Column:
        return f"{prefix}{name}_rate", _FLOAT, lambda r: read(r).by_class()[name]

    return [column(name) for name in CLASSES]


def _copies(fate: str) -> list[Column]:
    return [
        (f"prefetch_{fate}_n", _INT, lambda r: r.prefetch.by_fate()[fate].n),
        (f"prefetch_{fate}_bytes", _INT, lambda r: r.prefetch.by_fate()[fate].bytes),
    ]


def _phase(phase: Phased, read: Callable[[Result], Phase]) -> list[Column]:
    def column(part: str) -> Column:
        return f"{phase}_{part}_frac", _FLOAT, lambda r: r.bound_by.of(phase).by_part()[part]

    return [(f"{phase}_time_s", _FLOAT, lambda r: read(r).time_s), *(column(part) for part in ALWAYS)]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _run_columns() -> list[Column]:
    columns: list[Column] = [
        ("run_id", _TEXT, lambda r: r.run_id),
        ("name", _TEXT, lambda r: r.name),
        ("engine", _TEXT, lambda r: r.engine),
        ("version", _TEXT, lambda r: r.version),
        ("policy", _TEXT, lambda r: r.policy),
        ("hw", _TEXT, lambda r: r.hw),
        ("model", _TEXT, lambda r: r.model),
        ("precision", _TEXT, lambda r: r.precision),
        ("stack", _TEXT, lambda r: r.stack),
        ("trace", _TEXT, lambda r: r.trace),
        ("trace_sha256", _TEXT, lambda r: r.trace_sha256),
        ("split", _TEXT, lambda r: r.split),
        ("hit_definition", _TEXT, lambda r: r.hit_definition),
        ("arrivals", _TEXT, lambda r: r.arrivals),
        ("params_json", _TEXT, lambda r: _json(r.params)),
        ("overrides_json", _TEXT, lambda r: _json(r.overrides)),
        ("labels_json", _TEXT, lambda r: _json(r.labels)),
        ("seed", _INT, lambda r: r.seed),
        ("gpus", _INT, lambda r: r.gpus),
        ("batch", _INT, lambda r: r.batch),
        ("requests", _INT, lambda r: r.n_requests),
        ("decode_tokens", _INT, lambda r: r.decode_tokens),
    ]
    columns += _length("prompt_tokens", lambda r: r.lengths.prompt_tokens)
    columns += _length("output_tokens", lambda r: r.lengths.output_tokens)
    columns += [("longest_context_tokens", _INT, lambda r: r.lengths.longest_context_tokens)]
    columns += _statistic("ttft", lambda r: r.ttft_s)
    columns += _statistic("tpot", lambda r: r.tpot_s)
    columns += _statistic("e2e", lambda r: r.e2e_s)
    columns += _statistic("queue", lambda r: r.queue_s)
    columns += _statistic("service", lambda r: r.service_s)
    columns += [
        ("arrivals_per_s", _FLOAT, lambda r: None if r.load is None else r.load.arrivals_per_s),
        ("capacity_per_s", _FLOAT, lambda r: None if r.load is None else r.load.capacity_per_s),
        ("slo_attained_frac", _FLOAT, lambda r: None if r.slo is None else r.slo.attained_frac),
        ("goodput_requests_per_s", _FLOAT, lambda r: None if r.slo is None else r.slo.goodput_requests_per_s),
        ("goodput_tokens_per_s", _FLOAT, lambda r: None if r.slo is None else r.slo.goodput_tokens_per_s),
    ]
    columns += [
        ("kv_preemptions_n", _INT, lambda r: None if r.kv is None else r.kv.preemptions),
        ("kv_recomputed_tokens", _INT, lambda r: None if r.kv is None else r.kv.recomputed_tokens),
        ("kv_swap_out_bytes", _INT, lambda r: None if r.kv is None else r.kv.kv_swap_out_bytes),
        ("kv_swap_in_bytes", _INT, lambda r: None if r.kv is None else r.kv.kv_swap_in_bytes),
        ("kv_peak_frac", _FLOAT, lambda r: None if r.kv is None else r.kv.peak_pages / r.kv.pages),
    ]
    columns += [("throughput_tokens_per_s", _FLOAT, lambda r: r.throughput_tokens_per_s)]
    columns += _rates("", lambda r: r.hit_rates)
    columns += _rates("prefill_", lambda r: r.prefill_hit_rates)
    columns += [
        ("gate_mass_kept_frac", _FLOAT, lambda r: r.gate_mass_kept),
        ("activations_changed_frac", _FLOAT, lambda r: r.activations_changed_frac),
        ("activations_lowered_frac", _FLOAT, lambda r: r.activations_lowered_frac),
    ]
    for fate in _FATES:
        columns += _copies(fate)
    columns += [
        ("demand_copies_n", _INT, lambda r: r.demand_copies.n),
        ("demand_copies_bytes", _INT, lambda r: r.demand_copies.bytes),
        ("h2d_bytes", _INT, lambda r: r.h2d_bytes),
        ("d2h_bytes", _INT, lambda r: r.d2h_bytes),
        ("peak_vram_bytes", _INT, lambda r: r.peak_vram_bytes),
        ("peak_host_bytes", _INT, lambda r: r.peak_host_bytes),
        ("expert_bytes", _INT, lambda r: r.expert_bytes),
        ("vram_bytes", _INT, lambda r: r.memory.vram_bytes),
        ("expert_budget_bytes", _INT, lambda r: sum(r.expert_budget_bytes)),
        ("peak_expert_bytes", _INT, lambda r: sum(r.peak_expert_bytes)),
        ("bound_by", _TEXT, lambda r: r.bound_by.resource),
    ]
    columns += _phase("prefill", lambda r: r.phases.prefill)
    columns += _phase("decode", lambda r: r.phases.decode)
    columns += [
        ("measured_frac", _FLOAT, lambda r: r.provenance.measured),
        ("datasheet_frac", _FLOAT, lambda r: r.provenance.datasheet),
        ("assumed_frac", _FLOAT, lambda r: r.provenance.assumed),
        ("uncertainty_low_factor", _FLOAT, lambda r: r.uncertainty.low_factor),
        ("uncertainty_high_factor", _FLOAT, lambda r: r.uncertainty.high_factor),
        ("simulated_s", _FLOAT, lambda r: r.simulated_s),
        ("wall_s", _FLOAT, lambda r: r.wall_s),
    ]
    return columns


RUN_COLUMNS = _run_columns()

SCHEMAS: dict[str, pa.Schema] = {
    "runs": pa.schema([(name, kind) for name, kind, _ in RUN_COLUMNS]),
    "requests": pa.schema(
        [
            ("run_id", _TEXT),
            ("request", _INT),
            ("task", _TEXT),
            ("prompt_tokens", _INT),
            ("output_tokens", _INT),
            ("arrival_s", _FLOAT),
            ("start_s", _FLOAT),
            ("begun_s", _FLOAT),
            ("first_token_s", _FLOAT),
            ("last_token_s", _FLOAT),
            ("queue_s", _FLOAT),
            ("ttft_s", _FLOAT),
            ("tpot_s", _FLOAT),
            ("preemptions_n", _INT),
        ]
    ),
    "iterations": pa.schema(
        [
            ("run_id", _TEXT),
            ("iteration", _INT),
            ("phase", _TEXT),
            ("n_requests", _INT),
            ("n_tokens", _INT),
            ("start_s", _FLOAT),
            ("end_s", _FLOAT),
        ]
    ),
    "decisions": pa.schema(
        [
            ("run_id", _TEXT),
            ("decision", _INT),
            ("iteration", _INT),
            ("layer", pa.int32()),
            ("expert", pa.int32()),
            ("kind", _TEXT),
        ]
    ),
    "spans": pa.schema(
        [
            ("run_id", _TEXT),
            ("lane", _TEXT),
            ("op", _TEXT),
            ("layer", pa.int32()),
            ("expert", pa.int32()),
            ("n_tokens", pa.int32()),
            ("n_bytes", _INT),
            ("start_s", _FLOAT),
            ("end_s", _FLOAT),
        ]
    ),
    "layers": pa.schema(
        [
            ("run_id", _TEXT),
            ("phase", _TEXT),
            ("layer", pa.int32()),
            ("iterations_n", _INT),
            *((name, _INT) for name in COUNTS),
            *((name, _FLOAT) for name in WAITS_S),
            ("fetch_n", _INT),
            ("prefetch_n", _INT),
            ("fetched_frac", _FLOAT),
        ]
    ),
    "experts": pa.schema(
        [
            ("run_id", _TEXT),
            ("phase", _TEXT),
            ("layer", pa.int32()),
            ("expert", pa.int32()),
            *((name, _INT) for name in COUNTS),
        ]
    ),
}


BY_REPLICA = ("requests", "iterations", "decisions", "spans")
"""Tables that say of which replica a row is, in one more column, where there are several (docs/replicas.md)."""


def schema_of(name: str, replicas: bool = False) -> pa.Schema:
    """Of a table, in a run of several replicas or of one."""
    schema = SCHEMAS[name]
    return schema.append(pa.field("replica", pa.int32())) if replicas and name in BY_REPLICA else schema


def run_row(result: Result) -> tuple[Any, ...]:
    """The one row of `runs`."""
    return tuple(read(result) for _, _, read in RUN_COLUMNS)


def frame(name: str, run_id: str, rows: Iterable[tuple[Any, ...]], replicas: bool = False) -> DataFrame:
    """A table as a DataFrame; rows leave out `run_id`."""
    found: DataFrame = pa.Table.from_batches([_batch(schema_of(name, replicas), run_id, list(rows))]).to_pandas()
    return found


def _batch(schema: pa.Schema, run_id: str, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [[run_id] * len(rows), *(list(column) for column in zip(*rows, strict=True))]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class TableWriter:
    """A Parquet file written a row group at a time: memory does not grow with the table.

    Rows leave out `run_id`, which is the same in all of them. None is null.
    """

    def __init__(
        self, folder: Path, name: str, run_id: str, rows_per_group: int = ROWS_PER_GROUP, replicas: bool = False
    ) -> None:
        self._schema = schema_of(name, replicas)
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
