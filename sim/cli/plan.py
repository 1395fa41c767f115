"""`moesim plan`: which machine and policy reach a goal, and what would have to change where none does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.base.errors import BadInput
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.sweep import axes
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from sim.studies.plan.plan import Planned


@click.command(
    cls=UniqueOptions,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim plan --model mixtral-8x7b --goal 'tpot_s.mean <= 350ms'. Exit status: 0 a candidate "
    "reaches the goals, 1 none does, 2 mend the input.",
)
@click.option(
    "--goal",
    "goals",
    multiple=True,
    metavar="'KEY <= NUMBER'",
    help="A figure of a result and its limit: 'tpot_s.mean <= 100ms', 'throughput_tokens_per_s >= 10'; repeat it.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=A,B ...'",
    help="Policies to choose from; default: every installed one that leaves what the model computes as it is.",
)
@axes
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A figure, hw.*, model.* or stack.*.")
@click.option(
    "--prices",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What each GPU costs, as YAML; without it machines are ordered by memory and bandwidth.",
)
@click.option("--every", is_flag=True, help="Settle machines that are dearer than the answer, too.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Replays at the same time; default: the cores."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    goals: tuple[str, ...],
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    prices: Path | None,
    every: bool,
    workers: int | None,
    as_json: bool,
    **axes: tuple[str, ...],
) -> int:
    """Plan capacity: goals in, the cheapest machine and policy that reach them out.

    Lower bounds rule out what no lossless policy can reach; the rest is replayed, few requests first, then all.
    """
    from sim.studies.plan.goal import goals_of
    from sim.studies.plan.plan import Asked, plan
    from sim.studies.sweep.grid import given

    if not goals:
        raise BadInput("--goal, got none: say what is to be reached, e.g. --goal 'tpot_s.mean <= 100ms'")
    asked = Asked(goals_of(goals), given(policies, axes, settings), prices, every, workers)
    with Bar("planning") as bar:
        found = plan(asked, bar.update, _note)
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(found.to_dict()))
    else:
        _print(found)
    return 0 if found.reached else 1


def _print(found: Planned) -> None:
    from sim.studies.plan.text import answer, counts_line, dearer_line, machines_table, not_run, order_line

    say(answer(found), bold=True)
    for line in (order_line(found), counts_line(found), found.trace):
        say(line)
    say()
    say(machines_table(found), nl=False)
    if lines := [line for line in (dearer_line(found), *not_run(found)) if line]:
        say()
    for line in lines:
        say(line)


def _note(text: str) -> None:
    click.echo(text, err=True)
