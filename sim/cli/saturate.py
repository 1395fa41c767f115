"""`moesim saturate`: how many requests per second a policy serves, and up to which rate it keeps its SLO."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFile
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.spec_options import require_names, run_options, stated, tell_drawing
from sim.cli.unique_options import Grouped, UniqueOptions
from sim.figures import SCHEMA
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
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at the same time; default: the cores.")
@click.option(
    "--out",
    type=OutputFile(),
    metavar="FILE.json",
    help="Keep the JSON object; `moesim report FILE.json` makes a page of it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    promised: str | None,
    draws: int,
    workers: int | None,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the highest rate of requests that a policy serves without its queue growing without end, and with --slo the
    highest at which enough of them keep to it; how they fare at lower rates stands below.

    Each replay has 200 requests unless --requests says otherwise.
    """
    import msgspec

    from sim.base.files import replacing
    from sim.base.json import to_json
    from sim.studies.compare import points_of
    from sim.studies.saturate.search import saturate
    from sim.studies.saturate.text import answer, curve_table, rates_table
    from sim.workload.slo import slo_text

    given["slo"], kept_frac = (None, ATTAIN) if promised is None else limits_of(promised)
    if given["requests"] is None:
        given["requests"] = REQUESTS
    shared = stated(given, settings)
    require_names({"policy": policies, **shared})
    candidates = [point for point in points_of(policies, shared) if point.named]
    if not candidates:
        raise BadInput("--policy, got 'all' alone: every rate takes dozens of replays; name the policies")
    tell_drawing(candidates[0].spec)
    # A place that cannot be written to is refused before dozens of replays, not after.
    with nullcontext() if out is None else replacing(out) as part:
        with Bar("looking for rates") as bar:
            found = saturate([(one.label, one.spec) for one in candidates], draws, kept_frac, workers, bar.update)
        spec = candidates[0].spec
        said = answer(found, slo_text(spec.slo), kept_frac)
        asked = {"slo": spec.slo, "attain_frac": kept_frac, "draws": draws, "requests": given["requests"]}
        where = {"hw": spec.hw, "trace": spec.trace}
        rows = [msgspec.to_builtins(one) for one in found]
        text = to_json({"schema": SCHEMA, "answer": said, **where, **asked, "policies": rows})
        if part is not None:
            part.write_text(text + "\n", encoding="utf-8", newline="\n")
    if as_json:
        click.echo(text)
        return
    say(said, bold=True)
    if found[0].caveats:
        say(f"caveats: {'; '.join(found[0].caveats)}")
    say()
    say(rates_table(found, kept_frac), nl=False)
    say()
    say(curve_table(found), nl=False)
    if out is not None:
        say()
        say(f"written: {out}")


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
