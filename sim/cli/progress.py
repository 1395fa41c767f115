"""Progress bars on stderr; none where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

    from sim.run import Progress, Setup

SHOW_BAR_AFTER_S = 1.0


class Bar:
    """A progress bar on stderr once a second has gone by; nothing where stderr is not a terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._bar: RichBar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress | None:
        return self._update if self._shown else None

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() - self._began_s < SHOW_BAR_AFTER_S:
                return
            from rich.console import Console
            from rich.progress import Progress as RichBar

            self._bar = RichBar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)


class RunBar(Bar):
    """The bar of one run."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(f"{setup.policy.name} on {setup.hw.id}")


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """The same as something to call, whether a bar is shown or not."""
    with Bar(title) as update:
        yield update or _unseen


def _unseen(done: int, total: int) -> None:
    """Progress that nobody looks at."""


class TrainingBar:
    """Progress on stderr: a bar on a terminal, otherwise a line every tenth of the way."""

    def __init__(self) -> None:
        self._bar: RichBar | None = None
        self._said = 0

    def __enter__(self) -> TrainingBar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as RichBar

            self._bar = RichBar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("training", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, done: int, total: int, loss: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"training, loss {loss:.4f}")
        elif done * 10 // total > self._said:
            self._said = done * 10 // total
            click.echo(f"{done:,} of {total:,} steps, loss {loss:.4f}", err=True)
