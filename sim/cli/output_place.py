"""Options that name what a command writes: a place that cannot be written is refused before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutputFile(click.Path):
    """A file that a command writes."""

    folder = False

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        place = super().convert(value, param, ctx)
        return place if ctx is not None and ctx.resilient_parsing else self.checked(place, _name(param))

    def checked(self, place: Any, what: str) -> Path:
        """The place that `what` names. Raises BadInput where it cannot be written."""
        from sim.base.files import must_be_writable

        path = Path(os.fsdecode(place))
        try:
            must_be_writable(path, self.folder)
        except BadInput as error:
            raise BadInput(f"{what}, got {error}") from None
        return path


class OutputFolder(OutputFile):
    """A folder that a command writes files into."""

    folder = True


def outputs_of(command: click.Command) -> Iterable[click.Parameter]:
    """What a command writes by name."""
    return [param for param in command.params if isinstance(param.type, OutputFile)]


def _name(param: click.Parameter | None) -> str:
    return "output" if param is None else param.opts[-1] if isinstance(param, click.Option) else param.name or "output"
