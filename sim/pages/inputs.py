"""What a path is: a run, a comparison, a sweep, a validation, a plan, rates.

Files are anybody's: sizes, schemas and types are checked. A file is known by what is in it, not by its name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sim.base.errors import BadInput, MoesimError
from sim.base.extras import need
from sim.base.files import read_object
from sim.figures import check_schema
from sim.results.record import Result
from sim.results.run_folder import CONFIG, RESULT
from sim.studies.answer_file import ANSWER
from sim.studies.rows import Row

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_TABLE_BYTES = 512 * 1024 * 1024
SWEEP, HITS = "sweep.parquet", "curve.parquet"
ANSWERS = "the folder of a run, sweep, comparison or plan (`--out`), what `--json` printed, or a profile"


@dataclass(eq=False)
class Run(Row):
    """A result, and the folder of its tables where there is one."""

    result: Result
    folder: Path | None = None

    @property
    def in_turn(self) -> bool:
        """Whether each GPU has whole layers, so that one computes at a time."""
        return self.result.gpus > 1 and "gpu" in self.result.lane_utilisation

    def has(self, table: str) -> bool:
        """Whether that table was written."""
        return self.folder is not None and (self.folder / f"{table}.parquet").is_file()

    def table(self, name: str, columns: list[str], filters: Any = None) -> DataFrame:
        """Some columns of a table, some rows. Raises BadInput where it is another table, or another run's."""
        assert self.folder is not None
        path = self.folder / f"{name}.parquet"
        found = read_table(path, [*columns, "run_id"], filters)
        if len(found) and set(found["run_id"]) != {self.result.run_id}:
            raise BadInput(f"{path}: of another run than {RESULT} beside it; simulate again with --out")
        return found.drop(columns="run_id")

    @property
    def config(self) -> Path | None:
        """The configuration it can be run again from."""
        path = None if self.folder is None else self.folder / CONFIG
        return path if path is not None and path.is_file() else None

    def realism(self) -> list[str]:
        """What its trace is, recorded, drawn or of a small model, in a line; none where the trace is not at hand, or is
        another by now."""
        from sim.setup.config_file import read_spec
        from traces.format.catalogue import open_trace
        from traces.stats.realism import judge

        try:
            name = None if self.config is None else read_spec(self.config)[0].get("trace")
            if not isinstance(name, str):
                return []
            trace = open_trace(name)
            try:
                return [judge(trace, quick=True).line] if trace.sha256 == self.result.trace_sha256 else []
            finally:
                trace.close()
        except MoesimError:
            return []


@dataclass
class Comparison:
    """What `moesim compare --json` printed, or `--out` kept."""

    answer: str
    realism: str
    runs: list[Run]
    ranks: list[tuple[int, int] | None]
    not_run: list[tuple[str, str]]
    against: str = ""


@dataclass
class Grid:
    """The table of a sweep and what it says; `hits`: of `moesim curve`."""

    answer: str
    notes: list[str]
    varied: list[str]
    rows: list[dict[str, Any]]
    hits: bool


@dataclass
class Answer:
    """What another command printed or kept: `plan`, `saturate` or `validate`."""

    kind: Literal["plan", "saturation", "validation"]
    data: Any


Input = Run | Comparison | Grid | Answer


def read(path: Path) -> Input:
    """What lies there. Raises BadInput, naming file, field and remedy."""
    if path.is_dir():
        if (path / RESULT).is_file():
            return _result(_json(path / RESULT), path / RESULT, path)
        for name in (SWEEP, HITS):
            if (path / name).is_file():
                return _grid(path / name)
        if (path / ANSWER).is_file():
            return read(path / ANSWER)
        raise BadInput(f"{path}: a folder without {RESULT}, {SWEEP}, {HITS} or {ANSWER}; give {ANSWERS}")
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder; give {ANSWERS}")
    if path.suffix == ".parquet":
        return _grid(path)
    data = _json(path)
    if "schema" in data:
        check_schema(data, path, "let the command that wrote it write it again, with this version")
    if {"candidates", "ways", "explanations"} & set(data):
        return Answer("plan", data)
    if "policies" in data and "attain_frac" in data:
        return Answer("saturation", data)
    if "run_id" in data:
        return _result(data, path, None)
    if "runs" in data and "realism" in data:
        return _comparison(data, path)
    if "rows" in data and "answer" in data:
        return Grid(*_text_of(data, path), _rows(data["rows"], path), hits="demand_copies_n" in _columns(data))
    if "comparisons" in data or "checkpoint" in data:
        from sim.real.comparison import read as kept

        return Answer("validation", kept(path))
    raise BadInput(f"{path}: JSON of no kind that is known here; give {ANSWERS}")


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, MAX_JSON_BYTES, f"give {ANSWERS}")


def _result(data: dict[str, Any], path: Path, folder: Path | None, label: str = "") -> Run:
    check_schema(data, path, "simulate again with this version")
    try:
        result = msgspec.convert(data, Result)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"{path}: not a result as `simulate` writes it ({error}); simulate again") from None
    return Run(label or result.policy, result, folder=folder)


def _comparison(data: dict[str, Any], path: Path) -> Comparison:
    runs, ranks = [], []
    if not isinstance(data["runs"], list) or not data["runs"]:
        raise BadInput(f"{path}: runs, got {data['runs']!r}: a list of results; run `moesim compare --json` again")
    for one in data["runs"]:
        if not isinstance(one, dict):
            raise BadInput(f"{path}: runs: not a list of results; run `moesim compare --json` again")
        runs.append(_result(one, path, None, str(one.get("applied_as", ""))))
        ranks.append(_checked(one.get("rank"), tuple[int, int] | None, path, "rank"))
    missing = _checked(data.get("not_run", []), list[dict[str, str]], path, "not_run")
    answer = _checked(data.get("answer", ""), str, path, "answer")
    realism = _checked(data["realism"], str, path, "realism")
    told = [(one.get("applied_as", ""), one.get("reason", "")) for one in missing]
    return Comparison(answer, realism, runs, ranks, told, _checked(data.get("against", ""), str, path, "against"))


def _checked(value: Any, kind: Any, path: Path, field: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"{path}: {field}: {error}; let the command write it again") from None


def _text_of(data: dict[str, Any], path: Path) -> tuple[str, list[str], list[str]]:
    """What a sweep says of itself: its answer, what is known of its traces, and what varies in it."""
    varied, hosts = data.get("varied", []), _checked(data.get("hosts"), str | None, path, "hosts")
    return (
        _checked(data.get("answer", ""), str, path, "answer"),
        [*([hosts] if hosts else []), *_checked(data.get("realism", []), list[str], path, "realism")],
        _checked(list(varied) if isinstance(varied, dict) else varied, list[str], path, "varied"),
    )


def _columns(data: dict[str, Any]) -> set[str]:
    rows = data["rows"]
    first = rows[0] if isinstance(rows, list) and rows else {}
    return set() if not isinstance(first, dict) or "status" in first else set(first)


def _rows(data: Any, path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _checked(
        data, list[dict[str, str | int | float | bool | list[str | int | float | None] | None]], path, "rows"
    )
    return rows


def _grid(path: Path) -> Grid:
    need(str(path), "pyarrow")
    import pyarrow.parquet as pq

    from sim.base.json import finite

    table = _opened(path, lambda: pq.read_table(path))
    names = set(table.column_names)
    hits = "status" not in names
    said = (table.schema.metadata or {}).get(b"moesim")
    about: dict[str, Any] = {}
    if said is not None:
        try:
            about = _checked(json.loads(said), dict[str, Any], path, "metadata")
            check_schema(about, path, "sweep again with this version")
        except (ValueError, RecursionError):
            raise BadInput(f"{path}: its metadata is not JSON; sweep again") from None
    needed = {"label", "experts", "hit_rate"} if hits else {"label", "status", "tpot_s.mean", "peak_vram_bytes"}
    if not needed <= names:
        lacking = ", ".join(sorted(needed - names))
        raise BadInput(f"{path}: no table of `moesim sweep` (it lacks {lacking}); give {ANSWERS}")
    return Grid(*_text_of(about, path), _rows(finite(table.to_pylist()), path), hits=hits)


def read_table(path: Path, columns: list[str], filters: Any = None) -> DataFrame:
    """Some columns of a table. Raises BadInput where the file is none, or lacks them."""
    need(str(path), "pandas", "pyarrow")
    import pyarrow.parquet as pq

    def opened() -> Any:
        names = pq.read_schema(path).names
        if lacking := [name for name in columns if name not in names]:
            raise BadInput(f"{path}: it lacks the column {lacking[0]!r}; simulate again with this version")
        return pq.read_table(path, columns=columns, filters=filters).to_pandas()

    found: DataFrame = _opened(path, opened)
    return found


def _opened(path: Path, read_it: Any) -> Any:
    import pyarrow as pa

    try:
        n_bytes = path.stat().st_size
        if n_bytes > MAX_TABLE_BYTES:
            raise BadInput(f"{path}, got {n_bytes} bytes: at most {MAX_TABLE_BYTES} are read; report fewer requests")
        return read_it()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or 'not a Parquet file'}; give {ANSWERS}") from None
    except (pa.ArrowException, UnicodeDecodeError):  # pyarrow decodes names of columns
        raise BadInput(f"{path}: not a Parquet file as this project writes it; give {ANSWERS}") from None


def whose(runs: Sequence[Run]) -> str:
    """On whose time line a page is cut into what was computed and waited for."""
    return "the GPUs in turn" if all(run.in_turn for run in runs) else "GPU 0"
