"""`moesim sweep`: any grid or list of runs, on all cores, as one table and a summary."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.base.extras import need
from sim.cli.progress import Bar
from sim.cli.say import note, say, say_answer
from sim.cli.spec_options import run_options
from sim.cli.unique_options import UniqueOptions, json_option, out_option, policies_option, workers_option

if TYPE_CHECKING:
    from sim.studies.runner.pool import Answers
axes = run_options(axis=True)


@click.command(
    cls=UniqueOptions,
    epilog="Example: moesim sweep --policy lru --policy 'lfu scope=global,layer' --hw rtx3090,rtx4090 --cache "
    "20%:80%:20% --requests 2 --out sweeps/caches",
)
@policies_option(
    "'NAME KEY=A,B ...'", "A policy, with values of its own parameters after its name; repeat it, or `all`."
)
@axes
@click.option(
    "--grid",
    "grid",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Axes as YAML: `grid:` is a product, `list:` holds blocks and single points. Options stand over it.",
)
@out_option("Keep a record of each point and the table, sweep.parquet.")
@click.option("--resume", is_flag=True, help="Go on where this very sweep ended: nothing is lost or done twice.")
@workers_option("Points replayed at the same time; default: the cores. The table is the same.")
@click.option("--cluster", metavar="tcp://HOST:PORT", help="Let the workers of a Dask cluster do it (extra `cluster`).")
@click.option("--group-by", metavar="A,B", help="What points that compete have in common; default: all but the policy.")
@click.option(
    "--max-points", type=click.IntRange(min=1), metavar="N", help="Refuse a grid of more points; default: 10,000."
)
@click.option(
    "--columns",
    metavar="A,B|all",
    help="With --json: keys of figures (tpot_s.p95,prefetch) that rows have, or all; default: some thirty. The table "
    "of --out has all.",
)
@click.option("--dry-run", is_flag=True, help="List the points and what cannot be set up; replay nothing.")
@json_option
def command(
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    grid: Path | None,
    out: Path | None,
    resume: bool,
    workers: int | None,
    cluster: str | None,
    group_by: str | None,
    max_points: int | None,
    columns: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a grid of runs: every combination of the values that the options list, or that a YAML file does.

    A value is single, a list (A,B), or a range (FROM:TO:STEP, both ends included). A point that cannot run, because
    it does not fit or for another reason, is a row of the table that says why.
    """
    from sim.studies.runner.records import TABLE
    from sim.studies.sweep.grid import MOST_POINTS, given
    from sim.studies.sweep.sweep import Asked, listed, sweep
    from sim.studies.sweep.table import ALL

    if resume and out is None:
        raise BadInput("--resume, got it without --out: the folder says what is done; add --out DIR")
    for name, said in (("--out", out), ("--json", as_json and not dry_run)):
        if said:
            need(f"sweep {name}", "pyarrow")
    if columns is not None and not as_json:
        raise BadInput("--columns, got it without --json: it says which figures its rows have; add --json")
    told = columns if columns in (None, ALL) else [name.strip() for name in columns.split(",")]
    asked = Asked(
        given(policies, options, settings),
        grid,
        out=out,
        resume=resume,
        workers=workers,
        by=None if group_by is None else [name.strip() for name in group_by.split(",")],
        most=max_points or MOST_POINTS,
        pool=pool_of(workers, cluster),
        columns=told,
    )
    with Bar("resolving points") as bar:
        if dry_run:
            click.echo(listed(asked, bar.update, as_json), nl=False)
            return
        swept = sweep(asked, note, bar.update)
    say_answer(swept, as_json)
    if out is not None and not as_json:
        say()
        say(f"table: {out / TABLE}")
    if any(row.broken for row in swept.rows):
        sys.exit(1)  # a policy broke a rule, or failed: that is a fault of its own, not of what it was asked
    if not swept.n_ran:
        sys.exit(BadInput.exit_code)  # every row says why


def pool_of(workers: int | None, cluster: str | None) -> Answers:
    """Who answers the calls. Raises BadInput."""
    if cluster is None:
        from sim.studies.runner.pool import answers

        return answers
    if workers is not None:
        raise BadInput("--workers, got it with --cluster: the cluster says how many there are; leave one of them out")
    from sim.studies.runner.cluster import answers_of

    return answers_of(cluster)
