"""Tables of a run's folder, read as data: columns are checked first, and decisions go by without being held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.results.tables import schema_of
from sim.studies.diff.request import OneRequest
from sim.studies.diff.told import MOST

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from sim.studies.diff.told import Told

CORE = ("requests", "iterations", "decisions")
AT_ONCE = 65_536  # rows
MAY_BE_NULL = ("tpot_s",)
MOST_REQUESTS = 10_000_000
AGAIN = "write the run anew: simulate --config CONFIG --out DIR"


class Decision(NamedTuple):
    """One row of `decisions`."""

    iteration: int
    layer: int
    expert: int
    kind: str


def file_of(folder: Path, name: str, run_id: str) -> pq.ParquetFile | None:
    """A table whose columns are those it should have, None where there is none.

    Raises:
        BadInput: it is no Parquet file, lacks a column, or is another run's.
    """
    path = folder / f"{name}.parquet"
    if not path.is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        for field in schema_of(name):
            if field.name not in schema.names or schema.field(field.name).type != field.type:
                raise BadInput(f"{path}: {field.name}: no such column of type {field.type}; {AGAIN}")
        first = next(file.iter_batches(batch_size=1, columns=["run_id"]), None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{path}: not a table of a run ({str(error).splitlines()[0][:120]}); {AGAIN}") from None
    if first is not None and len(first) and first.column(0)[0].as_py() != run_id:
        raise BadInput(f"{path}: run_id: {first.column(0)[0].as_py()!r} is not its result's {run_id!r}; {AGAIN}")
    return file


def rows(file: pq.ParquetFile, columns: list[str], where: str) -> Iterator[tuple[Any, ...]]:
    """Row by row, some at once in memory. Raises BadInput for a file that breaks off, or has nulls."""
    from pyarrow import ArrowException

    try:
        for batch in file.iter_batches(batch_size=AT_ONCE, columns=columns):
            for name in columns:
                if name not in MAY_BE_NULL and batch.column(name).null_count:
                    raise BadInput(f"{where}: {name}: a null where there is none; {AGAIN}")
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
    except (ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{where}: not readable to its end ({str(error).splitlines()[0][:120]}); {AGAIN}") from None


def requests_of(folder: Path, told: Told) -> dict[int, OneRequest] | None:
    """The requests of a run, None where no table holds them. Raises BadInput."""
    file, where = file_of(folder, "requests", told.run_id), str(folder / "requests.parquet")
    if file is None:
        return None
    if file.metadata.num_rows != told.n_requests or told.n_requests > MOST_REQUESTS:
        raise BadInput(
            f"{where}, got {file.metadata.num_rows} rows: its result has {told.n_requests} requests; {AGAIN}"
        )
    names = ["request", "task", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "start_s", "last_token_s"]
    found: dict[int, OneRequest] = {}
    for one in rows(file, names, where):
        if not all(value is None or -MOST < value < MOST for value in one[4:]):
            raise BadInput(f"{where}: request {one[0]}: a time that is no number of seconds; {AGAIN}")
        found[one[0]] = OneRequest(*one)
    return found


def decisions_of(folder: Path, run_id: str) -> Iterator[Decision] | None:
    """Decisions in order, None where no table holds them. Raises BadInput."""
    file = file_of(folder, "decisions", run_id)
    if file is None:
        return None
    names = ["iteration", "layer", "expert", "kind"]
    return (Decision(*one) for one in rows(file, names, str(folder / "decisions.parquet")))
