"""`moesim plan`: which machine and policy reach a goal, and what would have to change where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import note, say_answer
from sim.cli.sweep import axes, pool_of
from sim.cli.unique_options import UniqueOptions


@click.command(
    cls=UniqueOptions,
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
@click.option(
    "--prices",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What each GPU costs, as YAML; without it machines are ordered by memory and bandwidth.",
)
@click.option("--all-machines", "every", is_flag=True, help="Settle machines that are dearer than the answer, too.")
@click.option(
    "--least-memory",
    "least",
    is_flag=True,
    help="Find the least memory with which each machine reaches the goals, instead of the cheapest machine.",
)
@click.option(
    "--no-suggestions", "quick", is_flag=True, help="Leave out what would have to be true of the machines that fail."
)
@click.option(
    "--out",
    type=OutputFolder(),
    metavar="DIR",
    help="Keep the answer, for `moesim report`, and a record of each replay and bound, for --resume.",
)
@click.option(
    "--resume", is_flag=True, help="Go on with the records of --out: the same plan after a kill, or another goal."
)
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Replays at the same time; default: the cores."
)
@click.option("--cluster", metavar="tcp://HOST:PORT", help="Let the workers of a Dask cluster do it (extra `cluster`).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    goals: tuple[str, ...],
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    prices: Path | None,
    every: bool,
    quick: bool,
    least: bool,
    out: Path | None,
    resume: bool,
    workers: int | None,
    cluster: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Plan capacity: goals in, the cheapest machine and policy that reach them out.

    Lower bounds rule out what no lossless policy can reach; the rest is replayed, few requests first, then all.
    Without a goal, and with one --hw: compare streaming, caching and the CPU there.
    """
    from sim.studies.plan.goal import goals_of
    from sim.studies.plan.plan import ask
    from sim.studies.plan.request import PlanRequest
    from sim.studies.runner.records import PLAN, Records
    from sim.studies.runner.work import closing_ready
    from sim.studies.sweep.grid import given

    if resume and out is None:
        raise BadInput("--resume, got it without --out: the folder says what is done; add --out DIR")
    block, pool, records = given(policies, options, settings), pool_of(workers, cluster), Records(out)
    records.begin(PLAN, resume)
    with Bar("planning") as bar, closing_ready():
        request = PlanRequest(
            goals_of(goals), block, prices, every, not quick, workers, pool, records, bar.update, note
        )
        found = ask(request, least)
    if out is not None:
        from sim.studies.answer_file import keep

        keep(out, found.to_dict())
    say_answer(found, as_json)
    return 0 if found.reached else 1
