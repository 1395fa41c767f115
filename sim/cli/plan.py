"""`moesim plan`: which machine and policy reach a goal, and what would have to change where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sim.cli.kept import Kept, keeps
from sim.cli.say import note
from sim.cli.sweep import axes
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
@keeps
def command(
    kept: Kept,
    goals: tuple[str, ...],
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    prices: Path | None,
    every: bool,
    quick: bool,
    least: bool,
    **options: Any,
) -> int:
    """Plan capacity: goals in, the cheapest machine and policy that reach them out.

    Lower bounds rule out what no lossless policy can reach; the rest is replayed, few requests first, then all.
    Without a goal, and with one --hw: compare streaming, caching and the CPU there.
    """
    from sim.studies.plan.goal import goals_of
    from sim.studies.plan.plan import ask
    from sim.studies.plan.request import PlanRequest
    from sim.studies.runner.records import PLAN
    from sim.studies.sweep.grid import given

    block = given(policies, options, settings)
    with kept.working(PLAN, "planning") as progress:
        asked = goals_of(goals), block, prices, every, not quick, kept.workers, kept.pool, kept.records, progress, note
        found = ask(PlanRequest(*asked), least)
    kept.tell(found)
    return 0 if getattr(found, "reached", True) else 1
