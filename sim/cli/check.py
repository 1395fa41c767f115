"""`moesim check`: hold runs to a baseline file, and fail when a figure gets worse; or hold an engine's log to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFile
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from sim.studies.check.check import Verdict

SUMMARY = "GITHUB_STEP_SUMMARY"


@click.command(
    cls=UniqueOptions,
    epilog="Example: moesim check baseline.yaml --markdown check.md, where baseline.yaml holds: schema: 2, "
    "runs: [{policy: lru, hw: rtx3090, requests: 2}]; --update records its figures. moesim check 'lru hw=a6000' "
    "--log engine.csv holds an engine's own log to that run. Exit status: 0 as expected, 1 not.",
)
@click.argument("baseline", metavar="BASELINE.yaml|RUN")
@click.option(
    "--log",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="An engine's log of hits, misses and evictions (docs/check.md), to be held against RUN: a folder of --out, "
    "its config.yaml, or words.",
)
@click.option("--log-events", metavar="A,B", help="Events that the log has; default: hit,miss,evict.")
@click.option("--update", is_flag=True, help="Write what is found into the file, and say what changed; exit 0.")
@click.option("--strict", is_flag=True, help="Fail where a figure became better, too: the file should say so.")
@click.option("--verbose", "every", is_flag=True, help="List every figure, those that are as expected included.")
@click.option("--junit", metavar="FILE", type=OutputFile(), help="Write JUnit XML.")
@click.option(
    "--markdown",
    metavar="FILE",
    type=OutputFile(),
    help=f"Write Markdown, for a pull request; ${SUMMARY} is added to.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Runs at the same time; default: the cores.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    baseline: str,
    log: Path | None,
    log_events: str | None,
    update: bool,
    strict: bool,
    every: bool,
    junit: Path | None,
    markdown: Path | None,
    workers: int | None,
    as_json: bool,
) -> int:
    """Replay the runs of a baseline file and compare their figures with those it holds.

    A figure that is worse than its tolerance allows fails; so does one that changed where neither way is better, and a
    run that does not run. With --log: replay RUN, and say where the engine first did something else.
    """
    if log is not None:
        given = {"--update": update, "--strict": strict, "--verbose": every, "--junit": junit, "--markdown": markdown}
        for option, value in {**given, "--workers": workers}.items():
            if value:
                raise BadInput(f"{option}, got it with --log: it is for baselines; leave it out")
        return _check_log(baseline, log, log_events, as_json)
    if log_events is not None:
        raise BadInput("--log-events, got it without --log: it says what an engine's log has; add --log FILE")
    from sim.studies.check.baseline import read_baseline
    from sim.studies.check.check import check

    held = read_baseline(Path(baseline))
    if update:
        from sim.studies.check.update import check_update
        from sim.studies.check.update import update as record

        check_update(held)
    with Bar("checking runs") as bar:
        found = check(held, workers, strict, bar.update)
    n_written = record(found) if update and not found.misspelt else None
    from sim.studies.check import text

    for path, form in ((junit, text.junit), (markdown, text.markdown)):
        if path is not None:
            _write(path, form(found))
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(found.to_dict()))
    else:
        _print(found, every, n_written)
    if found.misspelt:
        if update:
            click.echo("note: nothing is recorded in a file that has to be mended first", err=True)
        return BadInput.exit_code
    return 1 if found.failed and not update else 0


def _check_log(run: str, log: Path, log_events: str | None, as_json: bool) -> int:
    import msgspec

    from sim.base.errors import did_you_mean
    from sim.cli.spec_options import tell_drawing, warn_if_changed
    from sim.studies.check.against_log import answer, check_log, table_of
    from sim.studies.check.engine_log import EVENTS
    from sim.studies.diff.named import named

    events = tuple(dict.fromkeys(word.strip() for word in (log_events or ",".join(EVENTS)).split(",")))
    for event in events:
        if event not in EVENTS:
            raise BadInput(f"--log-events, got {event!r}: {did_you_mean(event, EVENTS)}")
    side = named(run, {})
    if side.spec is None:
        raise BadInput(f"{run}: only its result is kept, which nothing replays; name its folder or its config.yaml")
    tell_drawing(side.spec)
    with Bar("replaying the run") as bar:
        found = check_log(
            log,
            side.spec,
            events,
            lambda done, total: bar.update(done, total, ""),
            lambda setup: warn_if_changed(setup, side.meant, Path(run)),
        )
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(msgspec.to_builtins(found)))
    else:
        say(answer(found), bold=True)
        say()
        say(table_of(found), nl=False)
    return 0 if found.equal else 1


def _print(found: Verdict, every: bool, n_written: int | None) -> None:
    from sim.base.units import show_count
    from sim.studies.check.text import answer, inputs_line, table_of

    if n_written is None:
        say(answer(found), bold=True)
    else:
        say(f"recorded: {show_count(n_written, 'figure')} changed in {found.held.path}", bold=True)
    line, rows = inputs_line(found), table_of(found, every)
    if line:
        say(line)
    if rows:
        say()
        say(rows, nl=False)


def _write(path: Path, text: str) -> None:
    """Whole or not at all; the summary of a job is shared with its other steps, and added to."""
    from sim.base.files import replacing

    if os.environ.get(SUMMARY) and Path(os.environ[SUMMARY]) == path:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
