"""Keywords of the functions of Python: one for every option of the table, whose values are plain data."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sim.options import OPTIONS, Table

F = TypeVar("F", bound=Callable[..., Any])


def signature_of(function: Callable[..., Any], table: Table = OPTIONS) -> inspect.Signature:
    """That of a function, with the options of the table in place of its keywords."""
    plain = inspect.signature(function, follow_wrapped=False)
    own = [one for one in plain.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    named = {one.name for one in own}
    options = [
        inspect.Parameter(row.field, inspect.Parameter.KEYWORD_ONLY, default=row.default)
        for row in table.rows
        if row.field not in named
    ]
    return plain.replace(parameters=[*own, *options])


def with_options(function: F) -> F:
    """Show a function's options to `help`, and to editors that ask a running Python."""
    said = [f"    {row.field}: {row.help}" for row in OPTIONS.rows if row.field not in ("policy", "hw")]
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    Options:\n    " + "\n    ".join(said) + "\n"
    function.__signature__ = signature_of(function)  # type: ignore[attr-defined]
    return function


def plain(value: Any) -> Any:
    """Paths as text, numbers of numpy as Python's, also inside mappings."""
    if isinstance(value, Mapping):
        return {name: plain(child) for name, child in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
