"""The tidy tables of `--out`: one row one fact, columns fixed, units in their names.

The columns of `runs` are the rows of `sim.figures`, under the same keys; the others are documented in docs/output.md,
and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.json import to_json
from sim.figures import Row, figures
from sim.results.by_layer import COUNTS, WAITS_S

if TYPE_CHECKING:
    import pyarrow as pa
    from pandas import DataFrame

    from sim.engine.report import Report
    from sim.results.record import Result

ROWS_PER_GROUP = 65_536

_COUNTED = " ".join(COUNTS)
_COLUMNS = {
    "requests": "run_id request task prompt_tokens output_tokens arrival_s start_s begun_s first_token_s last_token_s "
    "queue_s ttft_s tpot_s preemptions_n",
    "iterations": "run_id iteration phase n_requests n_tokens start_s end_s",
    "decisions": "run_id decision iteration layer:int32 expert:int32 kind",
    "spans": "run_id lane op layer:int32 expert:int32 n_tokens:int32 n_bytes start_s end_s",
    "layers": f"run_id phase layer:int32 iterations_n {_COUNTED} {' '.join(WAITS_S)} fetch_n prefetch_n fetched_frac",
    "experts": f"run_id phase layer:int32 expert:int32 {_COUNTED}",
}
"""Table -> its columns, whose types their names say: `_s` and `_frac` are numbers, words are `_WORDS`, others count."""
_WORDS = ("run_id", "task", "phase", "kind", "lane", "op")

BY_REPLICA = ("requests", "iterations", "decisions", "spans")
"""Tables that say of which replica a row is, in one more column, where there are several (docs/replicas.md)."""


def run_figures() -> list[Row]:
    """The figures of a run that are columns, in order."""
    return [row for row in figures().values() if row.shown != "json"]


def columns_of(name: str) -> dict[str, str]:
    """Column -> type of a table."""
    if name == "runs":
        return {row.key: type_of(row) for row in run_figures()}
    found = {}
    for one in _COLUMNS[name].split():
        column, _, kind = one.partition(":")
        usual = "text" if column in _WORDS else "float" if column.endswith(("_s", "_frac")) else "int"
        found[column] = kind or usual
    return found


def type_of(row: Row) -> str:
    """The type of a figure's column: lists stay lists, objects with names of their own are JSON."""
    return f"list of {row.of or 'text'}" if row.kind == "list" else "text" if row.kind == "open" else row.kind


def cell(row: Row, result: Result) -> Any:
    """A figure of a result as its column has it."""
    found = row.read(result)
    return to_json(msgspec.to_builtins(found)) if row.kind == "open" and found is not None else found


def run_row(result: Result) -> tuple[Any, ...]:
    """The one row of `runs`."""
    return tuple(cell(row, result) for row in run_figures())


def request_rows(report: Report) -> Iterator[tuple[Any, ...]]:
    """Of the table `requests`; where there are several replicas, each with its own."""
    for times in report.requests:
        request = times.request
        what = request.index, request.task, request.prompt_len, request.outputs, request.arrival_s
        when = times.start_s, times.begun_s, times.first_token_s, times.last_token_s
        row = *what, *when, times.queue_s, times.ttft_s, times.tpot_s, times.n_preemptions
        yield (*row, report.replica_of[request.index]) if report.replicas else row


def arrow_type(kind: str) -> pa.DataType:
    """A type of a column as Arrow has it."""
    import pyarrow as pa

    if kind.startswith("list of "):
        return pa.list_(arrow_type(kind.removeprefix("list of ")))
    made: pa.DataType = {
        "text": pa.string,
        "int": pa.int64,
        "int32": pa.int32,
        "float": pa.float64,
        "bool": pa.bool_,
    }[kind]()
    return made


def schema_of(name: str, replicas: bool = False) -> pa.Schema:
    """Of a table, in a run of several replicas or of one."""
    import pyarrow as pa

    own = {"replica": "int32"} if replicas and name in BY_REPLICA else {}
    return pa.schema([(column, arrow_type(kind)) for column, kind in {**columns_of(name), **own}.items()])


def frame(name: str, run_id: str, rows: Iterable[tuple[Any, ...]], replicas: bool = False) -> DataFrame:
    """A table as a DataFrame; rows leave out `run_id`."""
    import pyarrow as pa

    found: DataFrame = pa.Table.from_batches([_batch(schema_of(name, replicas), run_id, list(rows))]).to_pandas()
    return found


def _batch(schema: pa.Schema, run_id: str, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    import pyarrow as pa

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
        import pyarrow.parquet as pq

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
