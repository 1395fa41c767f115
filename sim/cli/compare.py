"""`moesim compare`: several policies on the same trace, hardware and memory, ranked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sim.cli.progress import Bar
from sim.cli.say import note, say, say_answer
from sim.cli.spec_options import require_names, spec_options, stated, tell_drawing
from sim.cli.unique_options import UniqueOptions, json_option, out_option, policies_option, workers_option


@click.command(
    cls=UniqueOptions,
    epilog="Example: moesim compare --hw rtx3090 --policy lru --policy 'lfu scope=layer' --policy fine_moe",
)
@policies_option(
    "'NAME KEY=VALUE ...'",
    "A policy, with parameters of its own, engine= or predictor= after its name; repeat it, or `all`.",
)
@spec_options
@workers_option("Policies replayed at the same time; default: the cores. The output is the same.")
@click.option(
    "--against",
    metavar="NAME",
    help="Put this policy at 1.00x and say the others relative to it; it is compared if --policy does not name it.",
)
@out_option("Keep what --json prints in a new folder, for `moesim report`.")
@json_option
def command(
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    workers: int | None,
    against: str | None,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Rank policies by time per output token on one trace, GPU and expert budget; bounds are listed beside them.

    A policy that cannot run here is listed at the end with its reason; the others are ranked.
    """
    from sim.studies.answer_file import begin, keep
    from sim.studies.compare import compare, points_of

    shared = stated(given, settings)
    require_names({"policy": policies, **shared})
    points = points_of(policies, shared, against)
    if out is not None:
        begin(out)
    tell_drawing(points[0].spec)
    with Bar("comparing policies") as bar:
        found = compare(points, against, workers, note, bar.update)
    kept = None if out is None else keep(out, found.to_dict())
    say_answer(found, as_json)
    if kept is not None and not as_json:
        say()
        say(f"written: {kept} (moesim report {out} makes a page of it)")
    if found.broken is not None:
        sys.exit(1)  # a policy broke a rule: that is a fault of its own, not of what it was asked
