"""`moesim timeline`: several kept runs in one file for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from sim.cli.output_place import OutputFile
from sim.cli.progress import bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions
from sim.results.keep import TIMELINE_ITERATIONS, Keep, TimelineStart, timeline_start


@click.command(
    cls=UniqueOptions,
    epilog="Example: moesim timeline runs/lru runs/lfu -o both.json --from 100 --iterations 5",
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--out", "file", metavar="FILE", required=True, type=OutputFile(), help="Where it goes.")
@click.option(
    "--from",
    "start",
    metavar="N|TIME",
    default="0",
    callback=lambda _ctx, _param, text: timeline_start(text, "--from"),
    help="The first iteration, or when that is under way: 120, or 2.5s; default: 0.",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=TIMELINE_ITERATIONS,
    show_default=True,
    metavar="N",
    help="How many iterations of each run it covers.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
def command(runs: tuple[Path, ...], file: Path, start: TimelineStart, iterations: int, overwrite: bool) -> None:
    """Draw runs that `simulate --out` has kept below one another, each from time 0 on: lanes, counters, arrows.

    RUN is such a folder, or a configuration. Runs are replayed, so that their folders need no spans.
    """
    from sim.studies.timelines import draw

    keep = Keep(timeline=file, timeline_iterations=iterations, timeline_from=start, overwrite=overwrite)
    with bar("drawing") as told:
        draw(runs, keep, told)
    say(f"written: {file} (open it at ui.perfetto.dev)")
