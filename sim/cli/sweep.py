"""`moesim sweep`: any grid or list of runs, on all cores, as one table and a summary."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from sim.studies.sweep.run import Answers
    from sim.studies.sweep.sweep import Asked, Swept

_SEVERAL = "A,B,..."
_NUMBERS = "A,B | FROM:TO:STEP"


def _axis(option: str, name: str, metavar: str, text: str) -> Any:
    return click.option(option, name, multiple=True, metavar=metavar, help=text)


AXES = (
    _axis("--hw", "hw", _SEVERAL, "GPUs and their machines: see `moesim hw`."),
    _axis("--model", "model", _SEVERAL, "Geometries; default: a model of the trace's routing shape."),
    _axis("--trace", "trace", _SEVERAL, "Routing traces; default: the bundled one."),
    _axis("--precision", "precision", _SEVERAL, "Types of the weights; default: bf16."),
    _axis("--link", "link", _SEVERAL, "Put the card on other links: pcie3x4 to pcie6x16."),
    _axis("--vram", "vram_bytes", _NUMBERS, "Cap the GPU's whole memory: 8GB:24GB:4GB."),
    _axis("--expert-cache", "expert_cache_bytes", _NUMBERS, "Cap the expert part, in bytes."),
    _axis("--experts", "experts", _NUMBERS, "Cap the expert part, in whole experts over all GPUs."),
    _axis("--cache-frac", "cache_frac", _NUMBERS, "Cap the expert part, as a share of all experts."),
    _axis("--stack", "stack", _SEVERAL, "Serving frameworks; default: bare."),
    _axis("--gpus", "gpus", _NUMBERS, "GPUs that hold experts; default: 1."),
    _axis("--peer", "peer", _SEVERAL, "Tokens to other GPUs: per-expert (default), all-to-all."),
    _axis(
        "--dense",
        "dense",
        _SEVERAL,
        "All that is no expert: gpu0, tensor, data, layers, layers:3/1; default: gpu0, or as the stack's engine.",
    ),
    _axis("--placement", "placement", "FILE,...", "Which GPU each expert lives on."),
    _axis("--host-links", "host_links", _SEVERAL, "Bandwidth for several links: apart (default), shared, split."),
    _axis("--host-memory", "host_memory_bytes", _NUMBERS, "RAM for experts, GB being GiB: 32GB:128GB:32GB."),
    _axis("--nvme", "nvme", _SEVERAL, "Drives for what it does not hold: gen4x4,gen5x4; see docs/nvme.md."),
    _axis("--ram-policy", "ram_policy", _SEVERAL, "Which experts stay in it; default: lru."),
    _axis("--replicas", "replicas", _NUMBERS, "Equal machines behind a router; default: 1."),
    _axis("--router", "router", _SEVERAL, "Which replica a request goes to; default: round_robin."),
    _axis("--batch", "batch", _NUMBERS, "Requests decoded together; default: 1."),
    _axis("--arrivals", "arrivals", _SEVERAL, "When requests come: poisson:2, closed:8, a log; see docs/load.md."),
    _axis("--rate-scale", "rate_scale", _NUMBERS, "Times the rate of --arrivals: 0.2:1:0.2."),
    _axis("--scheduler", "scheduler", _SEVERAL, "Who runs next; default: fcfs."),
    _axis("--batching", "batching", _SEVERAL, "continuous (default) or static."),
    _axis("--prefill-chunk", "prefill_chunk", _NUMBERS, "Tokens of an iteration at most, prompts in chunks."),
    _axis(
        "--draft",
        "draft",
        "k=A/B,...",
        "Speculative decoding, for each k and acceptance: k=0/2/4,acceptance=0.3:0.9:0.2.",
    ),
    _axis("--kv-memory", "kv_memory_bytes", _NUMBERS, "A pool for keys and values: 1GB:4GB:1GB; see docs/kv.md."),
    _axis("--kv-page", "kv_page", _NUMBERS, "Tokens of a page of it; default: 16."),
    _axis("--preempt", "preempt", _SEVERAL, "Where it is full: recompute (default) or swap."),
    _axis("--split", "split", _SEVERAL, "Requests to score: test (default), store or all."),
    _axis("--requests", "requests", _NUMBERS, "Only the first N requests of the split."),
    _axis("--predictor", "predictor", _SEVERAL, "What a policy predicts with: surrogate:0.85 (labelled) ..."),
    _axis("--engine", "engine", _SEVERAL, "arithmetic (default) or simpy."),
    _axis("--contention", "contention", "on,off", "What runs at once shares memory; default: on."),
    _axis("--energy", "energy", "gpu,machine", "Count joules, by the watts of the profiles; see docs/energy.md."),
    _axis("--hit-definition", "hit_definition", _SEVERAL, "What is a hit: gate (default), room, cached or token."),
    _axis("--seed", "seed", _NUMBERS, "For whatever is drawn: arrivals, requests, choices of policies; default: 0."),
)


SLO = click.option(
    "--slo",
    metavar="LIMITS|FILE",
    help="What requests of every run are promised, 'ttft_s <= 2s, tpot_s <= 200ms'; or a YAML with limits by task.",
)


def axes(command: Any) -> Any:
    """Give a command the options of `AXES`, in their order, and `--slo`, which has one value."""
    for option in reversed((*AXES, SLO)):
        command = option(command)
    return command


@click.command(
    cls=UniqueOptions,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim sweep --policy lru --policy 'lfu scope=global,layer' --hw rtx3090,rtx4090 --cache-frac "
    "0.2:0.8:0.2 --requests 2 --out sweeps/caches",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=A,B ...'",
    help="A policy, with values of its own parameters after its name; repeat it, or `all`.",
)
@axes
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=A,B",
    help="Values of a figure, hw.*, model.* or stack.*: a list, or FROM:TO:STEP; repeat it.",
)
@click.option(
    "--grid",
    "grid",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Axes as YAML: `grid:` is a product, `list:` holds blocks and single points. Options stand over it.",
)
@click.option(
    "--out",
    type=OutputFolder(),
    metavar="DIR",
    help="Keep a record of each point and the table, sweep.parquet.",
)
@click.option("--resume", is_flag=True, help="Go on where this very sweep ended: nothing is lost or done twice.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Points replayed at the same time; default: the cores. The table is the same.",
)
@click.option("--cluster", metavar="tcp://HOST:PORT", help="Let the workers of a Dask cluster do it (extra `cluster`).")
@click.option("--group-by", metavar="A,B", help="What points that compete have in common; default: all but the policy.")
@click.option(
    "--max-points", type=click.IntRange(min=1), metavar="N", help="Refuse a grid of more points; default: 10,000."
)
@click.option(
    "--hits-only",
    is_flag=True,
    help="Of lru, lfu, lcp, mrs: hit rates of every budget (or of --experts, --cache-frac) at once, without --hw.",
)
@click.option("--dry-run", is_flag=True, help="List the points and what cannot be set up; replay nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
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
    hits_only: bool,
    dry_run: bool,
    as_json: bool,
    slo: str | None,
    **axes: tuple[str, ...],
) -> None:
    """Replay a grid of runs: every combination of the values that the options list, or that a YAML file does.

    A value is single, a list (A,B), or a range (FROM:TO:STEP, both ends included). A point that cannot run, because
    it does not fit or for another reason, is a row of the table that says why.
    """
    from sim.studies.sweep.grid import MOST_POINTS, given
    from sim.studies.sweep.sweep import Asked, listed, sweep

    if resume and out is None:
        raise BadInput("--resume, got it without --out: the folder says what is done; add --out DIR")
    asked = Asked(
        given(policies, axes, settings, slo),
        grid,
        out=out,
        resume=resume,
        workers=workers,
        by=None if group_by is None else [name.strip() for name in group_by.split(",")],
        most=max_points or MOST_POINTS,
        pool=pool_of(workers, cluster),
    )
    if hits_only:
        _hits_only(asked, dry_run, as_json)
        return
    with Bar("resolving points") as bar:
        if dry_run:
            click.echo(listed(asked, bar.update, as_json), nl=False)
            return
        swept = sweep(asked, _note, bar.update)
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(swept.to_dict()))
    else:
        _print(swept, out)
    if swept.broken:
        sys.exit(1)  # a policy broke a rule, or failed: that is a fault of its own, not of what it was asked
    if not swept.n_ran:
        sys.exit(BadInput.exit_code)  # every row says why


def _hits_only(asked: Asked, dry_run: bool, as_json: bool) -> None:
    from sim.studies.sweep.hits import TABLE, hits_only
    from sim.studies.sweep.point_store import check_table
    from sim.studies.sweep.table import write

    if dry_run or asked.resume or asked.by is not None:
        raise BadInput("--hits-only, got it with --dry-run, --resume or --group-by: it takes one pass; leave them out")
    if asked.out is not None:
        check_table(asked.out / TABLE)
    with Bar("counting hits") as bar:
        found = hits_only(asked, bar.update)
    for text in dict.fromkeys(text for curve in found.curves for text in curve.notes):
        _note(text)
    if asked.out is not None:
        write(asked.out / TABLE, found.table(), {"answer": found.answer()})
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json({"schema": 1, "answer": found.answer(), "rows": found.table().to_pylist()}))
        return
    say(found.answer())
    say()
    say(found.text(), nl=False)
    if asked.out is not None:
        say()
        say(f"table: {asked.out / TABLE}")


def pool_of(workers: int | None, cluster: str | None) -> Answers:
    """Who answers the calls. Raises BadInput."""
    if cluster is None:
        from sim.studies.pool import answers

        return answers
    if workers is not None:
        raise BadInput("--workers, got it with --cluster: the cluster says how many there are; leave one of them out")
    from sim.studies.cluster import answers_of

    return answers_of(cluster)


def _print(swept: Swept, out: Path | None) -> None:
    from sim.profiles.drives import compared
    from sim.studies.sweep.break_even import said
    from sim.studies.sweep.text import answer, counts, front_table, groups_table, not_run, points_table

    found = swept.summary
    say(answer(swept.rows, found))
    if swept.hosts:
        say(swept.hosts)
    say(counts(swept.rows, found, swept.n_twice, swept.work))
    for line in (*said(swept.rows), *swept.realism):
        say(line)
    if drives := compared(row.asked.spec.nvme or "" for row in swept.rows):
        say(drives)
    for told in dict.fromkeys(row.asked.drive for row in swept.rows if row.asked.drive):
        say(f"drives: {told}")
    if any(group.systems or group.bounds for group in found.groups):
        say()
        say(points_table(found.groups[0], found) if len(found.groups) == 1 else groups_table(found), nl=False)
    if front := front_table(found):
        say()
        say(front, nl=False)
    if found.failed:
        say()
    for line in not_run(found):
        say(line)
    if out is not None:
        say()
        say(f"table: {swept.table_path}")


def _note(text: str) -> None:
    click.echo(text, err=True)
