"""`moesim curve`: hit rates of plain caches of every size, from one pass over a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from sim.cli.progress import Bar
from sim.cli.say import note, say, say_answer
from sim.cli.spec_options import option_of, run_options
from sim.cli.unique_options import UniqueOptions, json_option, out_option, policies_option, workers_option
from sim.options import OPTIONS
from sim.studies.curve import AXES, NO_SAY, TABLE


@click.command(
    cls=UniqueOptions,
    no_say=NO_SAY,
    epilog="Example: moesim curve --policy lru --policy 'lfu scope=global,layer' --cache 10%:90%:10%",
)
@policies_option("'NAME KEY=A,B ...'", "lru, lfu, lcp, mrs, or one of yours that is such a cache; repeat it.")
@option_of(msgspec.structs.replace(OPTIONS.by_field["cache"], otherwise="every size"), axis=True)
@run_options(axis=True, without=(OPTIONS.by_field.keys() - set(AXES)) | {"cache"})
@out_option(f"Keep the table, {TABLE}.")
@workers_option("Curves at the same time; default: 1.")
@json_option
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
    say_answer(found, as_json)
    if out is not None and not as_json:
        say()
        say(f"table: {out / TABLE}")
