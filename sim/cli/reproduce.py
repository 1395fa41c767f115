"""`moesim reproduce`: published figures beside simulated ones, misses included."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.base.tables import fold
from sim.cli.output_place import OutputFolder
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from reports.reproduce.answer import Reproduction

KINDS = ("a", "b", "c")


@click.command(
    "reproduce",
    cls=UniqueOptions,
    epilog="Example: moesim reproduce --rows geometry. docs/reproduce.md has the rules, the misses and their causes.",
)
@click.option(
    "--rows",
    "wanted",
    multiple=True,
    metavar="ID,...",
    help="Rows by id (ME-12), system (ME), flag (G), or a group: geometry, experiments, engines. Default: all.",
)
@click.option(
    "--trace",
    "kinds",
    multiple=True,
    type=click.Choice([*KINDS, "scored", "all"]),
    default=("all",),
    show_default=True,
    help="a: bundled, b: synthetic, c: public, where MOESIM_EXTRA_TRACES is set; scored: the one of "
    "these that an experiment is judged on, in half the time.",
)
@click.option(
    "--engine",
    "stack",
    default="bare",
    show_default=True,
    metavar="NAME|FILE",
    help="Serving engine of experiments without a fitted constant.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that run experiments.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=OutputFolder(),
    help="Keep traces, single runs and the result here; what is there is not run again.",
)
@click.option("--last", is_flag=True, help="Print the last full run that comes with this installation; run nothing.")
@click.option("--misses", is_flag=True, help="Print the totals and the rows that do not come out as published.")
@click.option("--totals", is_flag=True, help="Print the totals alone, and which rows do not come out as published.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    wanted: tuple[str, ...],
    kinds: tuple[str, ...],
    stack: str,
    workers: int,
    out: Path | None,
    last: bool,
    misses: bool,
    totals: bool,
    as_json: bool,
) -> None:
    """Work out what papers print, and print totals and then row by row published, simulated and ratio, misses first.

    Geometry takes a second; experiments replay traces under every system of a row and take minutes (all of them: an
    hour of one core), so --out lets an interrupted run go on. docs/reproduce.md says how rows are judged.
    """
    from reports.reproduce.rows import load_rows, pick
    from reports.reproduce.show import as_text, totals_of

    rows = pick(wanted, load_rows())
    result = _last({row.id for row in rows}) if last else _run(rows, kinds, stack, workers, out, as_json)
    text = totals_of(result) if totals else as_text(result, misses)
    click.echo(json.dumps(result, allow_nan=False) if as_json else fold(text))


def _run(
    rows: list[Any], kinds: tuple[str, ...], stack: str, workers: int, out: Path | None, quiet: bool
) -> Reproduction:
    from datetime import UTC, datetime

    from reports.reproduce.table import reproduce
    from sim.base.files import write_json
    from sim.cli.progress import bar
    from sim.profiles.stack import load_stack

    load_stack(stack)  # refuses an unknown name before any work

    steps = (lambda _title: nullcontext(lambda _done, _total: None)) if quiet else bar
    if "scored" in kinds and len(kinds) > 1:
        raise BadInput("--trace, got scored and others: scored is one of them for each row; drop one")
    chosen: Any = KINDS if "all" in kinds else () if "scored" in kinds else tuple(dict.fromkeys(kinds))
    result = reproduce(rows, chosen, out, workers, steps, stack)
    if out is not None:
        write_json(out / "result.json", {"date": datetime.now(UTC).date().isoformat(), **result})
    return result


def _last(ids: set[str]) -> Reproduction:
    """The committed result, cut down to some rows, its counts with it."""
    from reports.reproduce.rows import HERE
    from reports.reproduce.table import totals

    result: Reproduction = json.loads((HERE / "last.json").read_text(encoding="utf-8"))
    result["rows"] = [row for row in result["rows"] if row["id"] in ids]
    result["totals"] = totals(result["rows"])
    return result
