"""A baseline: a YAML file of runs with the figures that each should have, and how far they may be off."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import MAX_YAML_BYTES, parse_yaml, read_text, to_struct
from sim.figures import check_schema
from sim.results.compared import Tolerance
from sim.results.figure import parse_figure
from sim.setup.naming import show
from sim.studies.sweep.grid import Point
from sim.studies.sweep.grid_file import Written, gathered
from sim.workload.slo import slo_text

USUAL = ("hit_rate", "tpot_s.mean", "h2d_bytes")
"""What is recorded of a run where the file names no figures."""
LAST_BITS = "0.0001%"
"""How far a figure may be off where the file does not say: what the last bits of another machine's sums may move."""
ANY = "default"  # the key of a tolerance for all figures without one of their own

Number = int | float | str


class WrittenRun(Written, frozen=True, kw_only=True):
    """One run of the file: the fields of a configuration, its figures, and tolerances of its own."""

    name: str | None = None
    figures: dict[str, Number | None] | None = None
    tolerance: dict[str, Number] = msgspec.field(default_factory=dict)


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds.

    Attributes:
        run: fields that every run has unless it says otherwise. figures: what `--update` records of a run without any.
        tolerance: by figure, or `default`. inputs: digests of what names meant when the figures were recorded.
    """

    schema: int
    run: Written = msgspec.field(default_factory=Written)
    figures: tuple[str, ...] = USUAL
    tolerance: dict[str, Number] = {}
    runs: list[WrittenRun]
    inputs: dict[str, str] = {}


class Expected(NamedTuple):
    """One run and what is expected of it; None: a figure that is recorded by `--update`."""

    name: str
    point: Point
    figures: dict[str, float | None]
    tolerances: dict[str, Tolerance]


class Held(NamedTuple):
    """A baseline as it was read: its text is kept, since `--update` writes into it."""

    path: Path
    text: str
    runs: list[Expected]
    inputs: dict[str, str]


def read_baseline(path: Path) -> Held:
    """Read and check a file.

    Raises:
        BadInput: naming file and field.
    """
    text = read_text(path, MAX_YAML_BYTES)
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise BadInput(f"{path}, got {type(data).__name__}: a baseline is a mapping with `runs:`; see docs/check.md")
    if "run" in data:
        data["run"] = gathered(data["run"], f"{path}: run")
    if isinstance(data.get("runs"), list):
        own = ("name", "figures", "tolerance")
        data["runs"] = [gathered(one, f"{path}: runs[{at}]", own) for at, one in enumerate(data["runs"])]
    check_schema(
        data, path, "write schema: 2, give figures the names of docs/output.md, and run `moesim check FILE --update`"
    )
    found = to_struct(data, Baseline, str(path))
    if not found.runs:
        raise BadInput(f"{path}: runs: there are none; list at least one, e.g. {{policy: lru, hw: rtx3090}}")
    runs = [_expected(one, at, found, path) for at, one in enumerate(found.runs)]
    names = [run.name for run in runs]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise BadInput(f"{path}: runs[{at}] is called {name!r} as another is; give it a name of its own, name: ...")
    _of_a_figure(found.tolerance, [*dict.fromkeys(key for run in runs for key in run.figures)], str(path))
    return Held(path, text, runs, found.inputs)


def _expected(one: WrittenRun, at: int, found: Baseline, path: Path) -> Expected:
    where = f"{path}: runs[{at}]"
    own = one.block(where)
    block = found.run.block(f"{path}: run").over(own)
    block.check(where)
    if len(block) != 1:
        raise BadInput(f"{where}, got {len(block)} runs: each field has one value here; list them one by one")
    (point,) = block.points()
    values = {**own.axes, **own.set}
    said = [point.label, *(f"{key} {show(key, value)}" for key, (value,) in values.items())]
    said += [slo_text(own.slo)] if own.slo else []
    keys = found.figures if one.figures is None else one.figures
    if not keys:
        raise BadInput(f"{where}: figures: there are none; name at least one, e.g. hit_rate, or leave the field out")
    figures = {
        key: _number(key, None if one.figures is None else one.figures[key], f"{where}.figures.{key}") for key in keys
    }
    tolerances = {key: _tolerance(key, one, found, where) for key in figures}
    _of_a_figure(one.tolerance, [*figures], where)
    return Expected(one.name or ", ".join(said), point, figures, tolerances)


def _of_a_figure(tolerance: dict[str, Number], known: list[str], where: str) -> None:
    for key in tolerance:
        if key != ANY and key not in known:
            raise BadInput(f"{where}.tolerance, got {key!r}: of no figure here; {did_you_mean(key, [*known, ANY])}")


def _number(key: str, value: Number | None, where: str) -> float | None:
    found = None if value is None else parse_figure(key, str(value), where)
    return value if isinstance(value, int) else found


def _tolerance(key: str, one: WrittenRun, found: Baseline, where: str) -> Tolerance:
    for told in (one.tolerance, found.tolerance):
        for name in (key, ANY):
            if name in told:
                return _parsed(key, told[name], f"{where}.tolerance.{name}")
    return _parsed(key, LAST_BITS, where)


def _parsed(key: str, value: Number, where: str) -> Tolerance:
    """`2%` is a share of what is expected; `0.01`, `5ms` and `1GB` are amounts. Raises BadInput."""
    text = str(value).strip()
    relative = text.endswith("%")
    amount = parse_figure("", text[:-1], where) / 100.0 if relative else parse_figure(key, text, where)
    if amount < 0:
        raise BadInput(f"{where}, got {text!r}: a tolerance is not negative; write e.g. 1%, 0.01 or 5ms")
    return Tolerance(amount, relative, text)
