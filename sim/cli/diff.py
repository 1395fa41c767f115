"""`moesim diff A B`: two runs beside each other, and why one is faster."""

from __future__ import annotations

from typing import Any

import click

from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.spec_options import spec_options, stated, tell_drawing
from sim.cli.unique_options import UniqueOptions


@click.command(
    cls=UniqueOptions,
    no_say="name both policies without it: write moesim diff lru lfu --hw rtx3090",
    epilog="Examples: moesim diff runs/a runs/b; moesim diff 'lru hw=rtx3090' fine_moe; moesim diff runs/a hw=rtx4090. "
    "What a run in words does not say is as in the other one.",
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@spec_options
@click.option("--no-replay", is_flag=True, help="Take recorded runs as they are; parts of times are then of phases.")
@click.option("--one-at-a-time", is_flag=True, help="Replay A with each single input of B that differs.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="Rows of a list.")
@click.option("--exit-code", is_flag=True, help="Exit 1 when the runs differ.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    a: str,
    b: str,
    settings: tuple[str, ...],
    no_replay: bool,
    one_at_a_time: bool,
    top: int,
    exit_code: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Which inputs of two runs differ, where the time went in each, and the first decision that differs.

    A and B: a run's folder (simulate --out), its result.json or config.yaml, the record of a sweep's point, or a run in
    words, POLICY KEY=VALUE ...; options are for runs in words. Recorded runs are replayed where their inputs are still
    the same: only a replay tells what each request waited for.
    """
    from sim.studies.diff.diff import of_named
    from sim.studies.diff.named import both

    sides = both(a, b, stated(given, settings))
    for side in sides:
        if side.result is None and side.spec is not None:
            tell_drawing(side.spec)
    with Bar("comparing runs") as bar:
        found = of_named(sides, not no_replay, one_at_a_time, bar.update)
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(found.to_dict()))
    else:
        from sim.studies.diff.text import hosts_line, render

        say(found.answer, bold=True)
        if line := hosts_line(found):
            say(line)
        say()
        say(render(found, top), nl=False)
    return 1 if exit_code and not found.equal else 0
