"""Requests of a run: rows of its folder's tables, read as untrusted data, or of a sweep's record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.results.tables import schema_of
from sim.studies.diff.named import MOST

if TYPE_CHECKING:
    from sim.figures import Timed
    from sim.results.record import Result

CORE = ("requests", "iterations", "decisions")
AT_ONCE = 65_536  # rows
MAY_BE_NULL = ("tpot_s",)
MOST_REQUESTS = 10_000_000
AGAIN = "write the run anew: simulate --config CONFIG --out DIR"
TIMES = ("request", "task", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "start_s", "last_token_s")


@dataclass
class OneRequest:
    """A request as one run served it. parts_s: of its times, in the order of `side.PARTS`, where it was replayed."""

    request: int
    task: str
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float
    tpot_s: float | None
    start_s: float | None = None
    last_token_s: float | None = None
    parts_s: dict[Timed, tuple[float, ...]] = field(default_factory=dict)


def rows(folder: Path | None, name: str, run_id: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]] | None:
    """A table row by row, some at once in memory; None where there is none. Raises BadInput, also while it is read."""
    path = None if folder is None else folder / f"{name}.parquet"
    return None if path is None or not path.is_file() else _read(path, name, run_id, list(columns))


def _read(path: Path, name: str, run_id: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """Raises BadInput: it is no Parquet file, lacks a column, is another run's, breaks off, or has nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        for one in schema_of(name):
            if one.name not in schema.names or schema.field(one.name).type != one.type:
                raise BadInput(f"{path}: {one.name}: no such column of type {one.type}; {AGAIN}")
        for batch in file.iter_batches(batch_size=1, columns=["run_id"]):
            if (found := batch.column(0)[0].as_py()) != run_id:
                raise BadInput(f"{path}: run_id: {found!r} is not its result's {run_id!r}; {AGAIN}")
            break
        for batch in file.iter_batches(batch_size=AT_ONCE, columns=columns):
            for column in columns:
                if column not in MAY_BE_NULL and batch.column(column).null_count:
                    raise BadInput(f"{path}: {column}: a null where there is none; {AGAIN}")
            yield from zip(*(batch.column(column).to_pylist() for column in columns), strict=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{path}: not a table of a run ({str(error).splitlines()[0][:120]}); {AGAIN}") from None


def requests_of(folder: Path, result: Result) -> dict[int, OneRequest] | None:
    """The requests of a run, None where no table holds them. Raises BadInput."""
    table, where = rows(folder, "requests", result.run_id, TIMES), folder / "requests.parquet"
    if table is None:
        return None
    found = {one[0]: OneRequest(*one) for one in islice(table, min(result.n_requests, MOST_REQUESTS) + 1)}
    if len(found) != result.n_requests:
        raise BadInput(f"{where}, got {len(found)} requests: its result has {result.n_requests} requests; {AGAIN}")
    for one in found.values():
        times = one.ttft_s, one.tpot_s, one.start_s, one.last_token_s
        if not all(time_s is None or -MOST < time_s < MOST for time_s in times):
            raise BadInput(f"{where}: request {one.request}: a time that is no number of seconds; {AGAIN}")
    return found


def of_sweep(times: list[Any], where: str) -> dict[int, OneRequest]:
    """Requests as the record of a sweep's point has them. Raises BadInput."""
    found: dict[int, OneRequest] = {}
    for at, one in enumerate(times):
        match one:
            case [int(request), float() | int() as ttft_s, (float() | int() | None) as tpot_s]:
                found[request] = OneRequest(request, "", None, None, ttft_s, tpot_s)
            case _:
                raise BadInput(f"{where}: requests[{at}]: not [request, TTFT, TPOT]; is it a sweep's point?")
    return found
