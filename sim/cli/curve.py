"""`moesim curve`: hit rates of plain caches of every size, from one pass over a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import note, say
from sim.cli.spec_options import option_of, run_options
from sim.cli.unique_options import UniqueOptions
from sim.figures import SCHEMA
from sim.options import OPTIONS
from sim.studies.curve import AXES, NO_SAY, TABLE


@click.command(
    cls=UniqueOptions,
    no_say=NO_SAY,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim curve --policy lru --policy 'lfu scope=global,layer' --cache 10%:90%:10%",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=A,B ...'",
    help="lru, lfu, lcp, mrs, or one of yours that is such a cache; repeat it.",
)
@option_of(msgspec.structs.replace(OPTIONS.by_field["cache"], otherwise="every size"), axis=True)
@run_options(axis=True, without=(OPTIONS.by_field.keys() - set(AXES)) | {"cache"})
@click.option("--out", type=OutputFolder(), metavar="DIR", help=f"Keep the table, {TABLE}.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Curves at the same time; default: 1.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    out: Path | None,
    workers: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Hit rate over capacity: what a cache of every size finds, from one pass over the trace, without hardware.

    The figures are those of single runs at each size, to the last hit.
    """
    from sim.base.extras import need
    from sim.studies.curve import curves
    from sim.studies.sweep.grid import given

    if out is not None:
        need("curve --out", "pyarrow")
    with Bar("counting hits") as bar:
        found = curves(given(policies, options, settings), out, workers, bar.update)
    for text in found.notes():
        note(text)
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json({"schema": SCHEMA, "answer": found.answer(), "rows": found.rows()}))
        return
    say(found.answer())
    say()
    say(found.text(), nl=False)
    if out is not None:
        say()
        say(f"table: {out / TABLE}")
