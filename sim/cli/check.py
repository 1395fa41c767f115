"""`moesim check`: hold runs to a baseline file, and fail when a figure gets worse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.cli.output_place import OutputFile
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from sim.studies.check.check import Verdict

SUMMARY = "GITHUB_STEP_SUMMARY"


@click.command(
    cls=UniqueOptions,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim check baseline.yaml --markdown check.md, where baseline.yaml holds: schema: 1, "
    "runs: [{policy: lru, hw: rtx3090, requests: 2}]; --update records its figures. Exit status: 0 as expected, 1 not.",
)
@click.argument("baseline", metavar="BASELINE.yaml", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--update", is_flag=True, help="Write what is found into the file, and say what changed; exit 0.")
@click.option("--strict", is_flag=True, help="Fail where a figure became better, too: the file should say so.")
@click.option("--all", "every", is_flag=True, help="List every figure, those that are as expected included.")
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
    baseline: Path,
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
    run that does not run.
    """
    from sim.studies.check.baseline import read_baseline
    from sim.studies.check.check import check

    held = read_baseline(baseline)
    if update:
        from sim.studies.check.update import check_update
        from sim.studies.check.update import update as record

        check_update(held)
    with Bar("checking runs") as bar:
        found = check(held, workers, strict, bar.update)
    n_written = record(found) if update and not found.misspelt else None
    if junit is not None:
        from sim.studies.check.text import junit as junit_of

        _write(junit, junit_of(found))
    if markdown is not None:
        from sim.studies.check.text import markdown as markdown_of

        _write(markdown, markdown_of(found))
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
