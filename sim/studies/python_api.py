"""`moesim.compare`, `moesim.sweep` and `moesim.curve`: studies from Python, answered as DataFrames."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sim.base.errors import BadInput, IllegalDecision
from sim.base.extras import need
from sim.base.kinds import Kind
from sim.options import OPTIONS
from sim.policy.registry import name_in_file
from sim.studies.keywords import plain, with_options
from sim.studies.option_types import Axes, Name, Options
from sim.studies.sweep.grid import MOST_POINTS, Block, PolicyAxis, policy_of
from sim.studies.sweep.grid import block_of as sorted_block
from sim.studies.sweep.values import Scalar, kind_of, of_data
from sim.workload.slo import slo_of

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.policy.api import Policy

Who = Name | type["Policy"]
TABLES = ("by_layer",)  # keys of a result that are tables of their own: `moesim.simulate(...)` has them as DataFrames


@with_options
def compare(
    policy: Who | Iterable[Who],
    hw: Name,
    *,
    workers: int | None = None,
    against: Name | None = None,
    **options: Unpack[Options],
) -> DataFrame:
    """Rank policies by time per output token: what `moesim compare` does on the command line.

    Args:
        policy: names, with parameters of their own behind them (`"lfu scope=layer"`), files, or classes whose text is
            in a file; `"all"` stands for every installed one. hw: a name that `moesim hw` lists, or a file.
        workers: processes; None: the cores, if it is worth it.
        against: the policy that the others are held against; it is compared if `policy` does not name it.
        options: the others of `moesim.simulate`; `scheduler` may name several, `"fcfs,sjf"`, each for every policy.
            `set` has what holds for every policy, hw.*, model.* and engine.*.

    Returns:
        A row per policy, the fastest first, with the keys of `moesim compare --json` as columns: nested ones by their
        dotted names, as `--expect` has them (`tpot_s.mean`). `attrs` has "answer", the first line that the command
        prints, "realism" of the trace, "common_bound", the lower bound that holds for every row, and "not_run",
        reasons by policy.

    Warns:
        UserWarning: what the command line notes: fewer requests than asked for, or the same run twice.

    Raises:
        BadInput: whatever has to be changed, in one line. IllegalDecision: a policy broke a rule.
    """
    need("compare()", "pandas")
    import pandas as pd

    from sim.studies.compare import compare as run_compare
    from sim.studies.compare import points_of

    fields = OPTIONS.values({key: plain(value) for key, value in {"hw": hw, **options}.items()})
    held = None if against is None else os.fspath(against)
    points = points_of([_name(kind) for kind in _several(policy)], fields, held)
    found = run_compare(points, held, workers, _warn, lambda *_: None)
    if found.broken is not None:
        raise IllegalDecision(f"policy {found.broken.label}: {found.broken.reason}")
    said = found.to_dict()
    frame = pd.DataFrame([dict(_flat(run)) for run in said["runs"]])
    frame.attrs |= {key: said[key] for key in ("answer", "common_bound", "realism")}
    frame.attrs["not_run"] = {one["applied_as"]: one["reason"] for one in said["not_run"]}
    return frame


@with_options
def sweep(
    policy: Who | Iterable[Who] = (),
    hw: Name | Iterable[Name] = (),
    *,
    grid: Name | None = None,
    out: Name | None = None,
    resume: bool = False,
    workers: int | None = None,
    cluster: str | None = None,
    max_points: int = MOST_POINTS,
    columns: str | Iterable[str] | None = None,
    **axes: Unpack[Axes],
) -> DataFrame:
    """Replay every combination of what is given: what `moesim sweep` does on the command line.

    Args:
        policy: names (`"lfu scope=layer"`, `"fine_moe distance=1:4"`), files, or classes whose text is in a file.
        hw: names or files. grid: a YAML file of axes. out: a folder for records and table; resume: go on there.
        cluster: `tcp://HOST:PORT` of a Dask scheduler, whose workers do it.
        workers: processes; None: the cores, if it is worth it. max_points: a larger grid is refused.
        columns: keys of figures and names of options, or starts of them; `"all"`; None: some thirty (docs/sweep.md).
        axes: the other fields of a run's configuration.

    Returns:
        The table (docs/sweep.md), one row per point; `attrs["answer"]` is the first line that the command prints,
        `attrs["hosts"]` the second where cards come with unlike hosts.

    Warns:
        UserWarning: of requests or a batch there are fewer than was asked for.

    Raises:
        BadInput: whatever has to be changed, in one line. A point that cannot run is a row with its reason instead.
    """
    need("sweep()", "pandas", "pyarrow")
    from sim.studies.runner.cluster import answers_of
    from sim.studies.runner.pool import answers
    from sim.studies.sweep.sweep import Asked
    from sim.studies.sweep.sweep import sweep as run_sweep

    asked = Asked(
        block_of(policy, hw, axes, "sweep"),
        None if grid is None else Path(grid),
        out=None if out is None else Path(out),
        resume=resume,
        workers=workers,
        most=max_points,
        pool=answers if cluster is None else answers_of(cluster),
        columns=columns if columns is None or isinstance(columns, str) else list(columns),
    )
    swept = run_sweep(asked, _warn, lambda *_: None)
    table: DataFrame = swept.shown().to_pandas()
    table.attrs |= {"answer": swept.answer(), "hosts": swept.hosts or None}
    return table


def curve(
    policy: Who | Iterable[Who],
    *,
    out: Name | None = None,
    workers: int | None = None,
    **axes: Unpack[Axes],
) -> DataFrame:
    """Hit rate over capacity, from one pass over the trace: what `moesim curve` does on the command line.

    Args:
        policy: lru, lfu, lcp, mrs, or one of yours that is such a cache (docs/curve.md).
        out: a folder for the table. workers: processes; None: this one.
        axes: trace, model and workload, each one value, several, or a range; sizes by `cache`, none for all.

    Returns:
        The table (docs/curve.md), one row per policy and size; `attrs["answer"]` is the command's first line.

    Raises:
        BadInput: an axis that no hit depends on, or a policy without a curve.
    """
    need("curve()", "pandas", "pyarrow")
    from sim.studies.curve import curves

    block = block_of(policy, (), axes, "curve")
    found = curves(block, None if out is None else Path(out), workers, lambda *_: None)
    for text in found.notes():
        _warn(text)
    table: DataFrame = found.frame().to_pandas()
    table.attrs["answer"] = found.answer()
    return table


def block_of(policy: Who | Iterable[Who], hw: Name | Iterable[Name], axes: Mapping[str, Any], what: str) -> Block:
    """The block that a call of `what` asks for. Raises BadInput."""
    fields: dict[str, Any] = {"hw": hw, **axes}
    sets, slo = fields.pop("set", {}), fields.pop("slo", None)
    found: dict[str, list[Scalar]] = {}
    for name, data in fields.items():
        row = OPTIONS.row(name, f"{what}()")
        if not row.axis:
            raise BadInput(f"{what}(), got {name}: it is no axis; leave it out")
        if values := _values(data, row.kind, name):
            found[row.field] = values
    settings = {key: _values(data, kind_of(key), f"set {key}") for key, data in dict(sets).items()}
    # A text may have parameters behind the name, a path or a class has none.
    policies = [
        axis
        for kind in _several(policy)
        for axis in (policy_of(kind) if isinstance(kind, str) else [PolicyAxis(_name(kind))])
    ]
    return sorted_block(policies, found, settings, {} if slo is None else slo_of(slo), "set")


def _several(policy: Who | Iterable[Who]) -> list[Who]:
    return [policy] if isinstance(policy, str | os.PathLike) or inspect.isclass(policy) else list(policy)


def _name(kind: Who) -> str:
    """A policy as the command line takes it."""
    return os.fspath(kind) if isinstance(kind, str | os.PathLike) else name_in_file(kind)


def _values(data: Any, kind: Kind, what: str) -> list[Scalar]:
    """One value or several, as plain data."""
    if isinstance(data, str | os.PathLike | bool | int | float) or data is None or getattr(data, "ndim", None) == 0:
        return of_data(plain(data), kind, what)
    return [value for one in data for value in of_data(plain(one), kind, what)]


def _warn(text: str) -> None:
    warnings.warn(text.removeprefix("note: "), stacklevel=4)


def _flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a result by their dotted names; what was set, and other lists, as they are."""
    for key, value in facts.items():
        if above == "" and key in TABLES:
            continue
        if isinstance(value, Mapping) and key not in ("params", "overrides"):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value
