"""Progress bars on stderr; none where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

    from sim.run import Progress

SHOW_BAR_AFTER_S = 1.0


class Bar:
    """A progress bar on stderr once `after_s` seconds have gone by; nothing where stderr is not a terminal."""

    def __init__(self, title: str, after_s: float = SHOW_BAR_AFTER_S) -> None:
        self._title = title
        self.shown = sys.stderr.isatty()
        self._show_s = time.monotonic() + after_s
        self._bar: RichBar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def progress(self) -> Progress | None:
        """`update`, or None where nobody would see it: a long run then spares the calls."""
        return self.update if self.shown else None

    def update(self, done: float, total: float | None, title: str | None = None) -> None:
        """So much is done of what is to do (None: not known yet), under another title from now on if there is one."""
        self._title = title or self._title
        if self._bar is None:
            if not self.shown or time.monotonic() < self._show_s:
                return
            from rich.console import Console
            from rich.progress import Progress as RichBar

            self._bar = RichBar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=self._title)


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """The same as something to call, whether a bar is shown or not."""
    with Bar(title) as shown:
        yield shown.update


class TrainingBar(Bar):
    """Progress on stderr: a bar on a terminal, otherwise a line every tenth of the way."""

    def __init__(self) -> None:
        super().__init__("training", after_s=0.0)
        self._said = 0

    def __enter__(self) -> Self:
        self.update(0, None)
        return self

    def told(self, done: int, total: int, loss: float) -> None:
        if self.shown:
            self.update(done, total, f"training, loss {loss:.4f}")
        elif done * 10 // total > self._said:
            self._said = done * 10 // total
            click.echo(f"{done:,} of {total:,} steps, loss {loss:.4f}", err=True)
