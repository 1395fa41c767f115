"""Options of a study that keeps its answer and what it was worked out from: --out, --resume, --workers, --cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import say, say_answer

if TYPE_CHECKING:
    from sim.studies.answer import Answer
    from sim.studies.runner.records import Layout
    from sim.studies.runner.runner import Progress

KEEP = "Keep the answer, for `moesim report`, and a record of each replay and bound, for --resume."
RESUME = "Go on with the records of --out: the same question after a kill, or another one."
WORKERS = "Replays at the same time; default: the cores."
CLUSTER = "Let the workers of a Dask cluster do it (extra `cluster`)."


class Kept:
    """Where a study keeps what it finds, and who works it out."""

    def __init__(self, out: Path | None, resume: bool, workers: int | None, cluster: str | None, as_json: bool) -> None:
        from sim.cli.sweep import pool_of
        from sim.studies.runner.records import Records

        if resume and out is None:
            raise BadInput("--resume, got it without --out: the folder says what is done; add --out DIR")
        self.out, self.resume, self.workers, self.as_json = out, resume, workers, as_json
        self.records, self.pool = Records(out), pool_of(workers, cluster)

    @contextmanager
    def working(self, layout: Layout, title: str) -> Iterator[Progress]:
        """Take over the folder, and show how far the work is. Raises BadInput as `Records.begin`."""
        from sim.studies.runner.work import closing_ready

        self.records.begin(layout, self.resume)
        with Bar(title) as bar, closing_ready():
            yield bar.update

    def tell(self, found: Answer) -> None:
        """Keep the answer, and print it."""
        from sim.studies.answer_file import keep

        path = None if self.out is None else keep(self.out, found.to_dict())
        say_answer(found, self.as_json)
        if path is not None and not self.as_json:
            say(f"\nwritten: {path} (moesim report {self.out} makes a page of it)")


def keeps(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it is handed a `Kept`."""

    @click.option("--out", type=OutputFolder(), metavar="DIR", help=KEEP)
    @click.option("--resume", is_flag=True, help=RESUME)
    @click.option("--workers", type=click.IntRange(min=1), metavar="N", help=WORKERS)
    @click.option("--cluster", metavar="tcp://HOST:PORT", help=CLUSTER)
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    @functools.wraps(function)
    def command(
        *args: Any, out: Path | None, resume: bool, workers: int | None, cluster: str | None, as_json: bool, **own: Any
    ) -> Any:
        return function(*args, Kept(out, resume, workers, cluster, as_json), **own)

    return command
