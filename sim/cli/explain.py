"""`moesim explain`: a measurement beside prediction and bound, and which input would explain the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import note, say_answer
from sim.cli.spec_options import run_options
from sim.cli.unique_options import UniqueOptions
from sim.options import OPTIONS
from sim.studies.explain import AXES, NO_SAY


@click.command(
    cls=UniqueOptions,
    no_say=NO_SAY,
    epilog="Example: moesim explain --measured 12.5tok/s --hw rtx3090 --policy lru",
)
@click.option(
    "--measured",
    metavar="12.5tok/s|80ms",
    required=True,
    help="Tokens per second of decoding, or the time per token, that you measured.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=VALUE ...'",
    help="The policy that does what your engine does.",
)
@run_options(axis=True, without=OPTIONS.by_field.keys() - set(AXES))
@click.option("--out", type=OutputFolder(), metavar="DIR", help="Keep the answer, for `moesim report`.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Replays at the same time; default: the cores."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    measured: str,
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    out: Path | None,
    workers: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Is my machine at its limit? One machine, one policy, one measurement: which input is off.

    Beside the measurement stand prediction and lower bound, then each input that, changed alone, would explain it.
    """
    from sim.studies.answer_file import begin, keep
    from sim.studies.explain import explain
    from sim.studies.runner.work import closing_ready
    from sim.studies.sweep.grid import given

    if out is not None:
        begin(out)
    with Bar("explaining") as bar, closing_ready():
        found = explain(given(policies, options, settings), measured, workers, bar.update, note)
    if out is not None:
        keep(out, found.to_dict())
    say_answer(found, as_json)
