"""`simulate`, which is `moesim run`: replay a routing trace under a policy on a described GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim import __version__
from sim.base.errors import one_line
from sim.cli.progress import Bar
from sim.cli.run_request import ANYWHERE, RunRequest
from sim.cli.say import say
from sim.cli.spec_options import run_options, specify, tell_drawing, warn_if_changed
from sim.cli.unique_options import Grouped, UniqueOptions
from sim.options import OUTPUT, OUTPUTS

if TYPE_CHECKING:
    from sim.results.expectations import Expectation, Judged
    from sim.run import Outcome

REAL = "Real runs"


@click.command(
    cls=UniqueOptions,
    epilog="Example: simulate --policy fine_moe --hw rtx3090 --cache 20%. Sizes take kB, MB, GB (powers of "
    "1000) or KiB, MiB, GiB. Names: moesim policies, moesim hw, moesim models, moesim traces.",
)
@click.version_option(__version__, prog_name="moesim")
@run_options(without=())
@click.option(
    "--config",
    cls=Grouped,
    group=OUTPUT,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Start from a saved configuration.",
)
@run_options(table=OUTPUTS)
@click.option("--overwrite", cls=Grouped, group=OUTPUT, is_flag=True, help="Replace what --out and --timeline hold.")
@click.option(
    "--expect",
    "expected",
    cls=Grouped,
    group=OUTPUT,
    multiple=True,
    metavar="'KEY >= N'",
    help="Exit 1 unless this figure of the result keeps to it: 'hit_rate >= 30%', 'tpot_s.mean < 650ms'; repeat it.",
)
@click.option(
    "--json", "as_json", cls=Grouped, group=OUTPUT, is_flag=True, help="Print one JSON object and nothing else."
)
@click.option(
    "--real",
    cls=Grouped,
    group=REAL,
    is_flag=False,
    flag_value=ANYWHERE,
    metavar="[=DEVICE]",
    help="Carry it out on this machine, with the prediction for --hw beside it: --real=cpu, --real=cuda:1; default: a "
    "GPU if there is one, else the CPU.",
)
@click.option(
    "--checkpoint",
    cls=Grouped,
    group=REAL,
    metavar="NAME|FOLDER",
    help="With --real: weights and geometry of this model in place of random ones.",
)
def command(**options: Any) -> int:
    """Replay a routing trace under a policy on a described GPU: time, hits, PCIe traffic, memory, what bounds it."""
    expectations: list[Expectation] = []
    if options["expected"]:
        from sim.results.expectations import judged, parsed

        expectations = parsed(options["expected"])
    request = RunRequest.of(options)
    try:
        if request.real:
            from sim.cli.run_real import run_real

            sys.exit(run_real(request))
        outcome = _run(request)
    except KeyboardInterrupt:
        raise click.Abort from None
    found: list[Judged] = []
    try:
        if expectations:
            found = judged(expectations, outcome.result.to_dict())
    finally:  # a result is shown whatever was asked of it
        _show(outcome, request, found)
    for one in found:
        click.echo(one.line, err=True)
    return 0 if all(one.held for one in found) else 1


def _show(outcome: Outcome, request: RunRequest, found: list[Judged]) -> None:
    result, keep = outcome.result, request.keep
    if request.as_json:
        from sim.base.json import to_json

        told = {"expectations": [one.to_dict() for one in found]} if found else {}
        click.echo(to_json(result.to_dict() | told))
        return
    from sim.results.text import render, verdict

    say(verdict(result), bold=True)
    say(result.trace_line)
    say()
    say(render(result), nl=False)
    if keep:
        say()
    if keep.out is not None:
        less = "" if keep.with_spans else "; --set out.spans=on adds what every lane did"
        say(f"written: {keep.out} (again: simulate --config {keep.out / 'config.yaml'}{less})")
    if keep.timeline is not None:
        say(f"written: {keep.timeline} (open it at ui.perfetto.dev)")


def _run(request: RunRequest) -> Outcome:
    if request.keep:
        from sim.results.sinks import check_places, recorded

        check_places(request.keep)
    spec, meant = specify(request.given, request.settings, request.config)
    tell_drawing(spec)
    from sim.run import execute, prepare

    setup = prepare(spec)
    try:
        warn_if_changed(setup, meant, request.config)
        for note in filter(None, (*setup.notes(), setup.idle)):
            click.echo(one_line(note), err=True)
        with Bar(f"{setup.policy.name} on {setup.hw.id}") as bar:
            if request.keep:
                outcome: Outcome = recorded(execute, setup, bar.progress, request.keep)
            else:
                outcome = execute(setup, progress=bar.progress)
    finally:
        setup.close()
    return outcome
