"""`moesim saturate`: how many requests per second a policy serves, and up to which rate it keeps its SLO."""

from __future__ import annotations

from typing import Any

import click

from sim.base.errors import BadInput
from sim.cli.kept import Kept, keeps
from sim.cli.spec_options import require_names, run_options, stated, tell_drawing
from sim.cli.unique_options import Grouped, UniqueOptions
from sim.options import LIMITS, LOAD, OPTIONS

REQUESTS = 200
ATTAIN = 0.95


@click.command(
    cls=UniqueOptions,
    epilog="Example: moesim saturate --policy lru --policy fine_moe --hw rtx3090 --slo 'ttft_s <= 60s, tpot_s <= 1s'",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=VALUE ...'",
    help="A policy, with parameters of its own after its name; repeat it.",
)
@run_options(without=("policy", "arrivals", "slo"))  # the rate is what is looked for
@click.option(
    "--slo",
    "promised",
    cls=Grouped,
    group=LOAD,
    metavar="LIMITS|FILE",
    help=f"{OPTIONS.by_field['slo'].help}. 'ttft_s <= 2s:attain=99%': by so many of them; default: {ATTAIN:.0%}.",
)
@click.option(
    "--draws",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Draws of requests and gaps, over which least and most are given.",
)
@keeps
def command(
    kept: Kept,
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    promised: str | None,
    draws: int,
    **given: Any,
) -> None:
    """Find the highest rate of requests that a policy serves without its queue growing without end, and with --slo the
    highest at which enough of them keep to it; how they fare at lower rates stands below.

    Each replay has 200 requests unless --requests says otherwise.
    """
    from sim.studies.compare import points_of
    from sim.studies.runner.records import RATES
    from sim.studies.runner.runner import Runner
    from sim.studies.saturate import saturate

    given["slo"], kept_frac = (None, ATTAIN) if promised is None else limits_of(promised)
    if given["requests"] is None:
        given["requests"] = REQUESTS
    shared = stated(given, settings)
    require_names({"policy": policies, **shared})
    candidates = [point for point in points_of(policies, shared) if point.named]
    if not candidates:
        raise BadInput("--policy, got 'all' alone: every rate takes dozens of replays; name the policies")
    tell_drawing(candidates[0].spec)
    with kept.working(RATES, "looking for rates") as progress:
        runner = Runner(kept.records, kept.workers, progress, kept.pool)
        found = saturate([(one.label, one.spec) for one in candidates], draws, kept_frac, runner)
    kept.tell(found)


def limits_of(text: str) -> tuple[dict[str, dict[str, float]], float]:
    """`ttft_s <= 60s:attain=99%` as the limits and the share of requests that has to keep to them. Raises BadInput."""
    from sim.results.figure import parse_figure

    limits, attain, share = text.rpartition(":attain=")
    if attain and not limits.strip():
        raise BadInput(f"--slo, got {text!r}: nothing is promised; write e.g. 'ttft_s <= 60s:attain=95%'")
    kept_frac = parse_figure("slo.attained_frac", share, "--slo attain") if attain else ATTAIN
    if kept_frac <= 0:
        raise BadInput(f"--slo attain, got {share!r}: more than nobody, such as {ATTAIN:.0%}; raise it")
    return LIMITS.read(limits if attain else text, "--slo"), kept_frac
