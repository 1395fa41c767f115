"""Schedulers and routers on a page: a list of them, or one in the words of its file."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from sim.cli.policies import wrapped
from sim.cli.say import say


def show(
    kinds: Sequence[Any],
    as_json: bool,
    one: bool,
    listed: Callable[[Sequence[Any]], str],
    facts: Callable[[Any], dict[str, Any]] | None = None,
    head: Callable[[Any], list[str]] | None = None,
) -> None:
    """Print what is known of them; of `one` all that its file says, below a `head`. `facts`: more keys of the JSON."""
    from sim.base.tables import fold

    if as_json:
        known = [_facts(kind, {} if facts is None else facts(kind)) for kind in kinds]
        click.echo(json.dumps(known[0] if one else known, indent=2))
    elif one:
        lines = [f"{kinds[0].name}: {title(kinds[0])}", *([] if head is None else head(kinds[0]))]
        for paragraph in "\n\n".join(_told(kinds[0])).split("\n\n"):
            lines += ["", *wrapped(paragraph)]
        say(fold("\n".join(lines) + "\n"), nl=False)
    else:
        say(listed(kinds), nl=False)


def title(kind: type) -> str:
    """The first sentence of its file."""
    text = inspect.getdoc(sys.modules[kind.__module__]) or inspect.getdoc(kind) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _facts(kind: Any, more: dict[str, Any]) -> dict[str, Any]:
    told = {"description": "\n\n".join(_told(kind)), "module": kind.__module__}
    return {"name": kind.name, "title": title(kind), **more, **told}


def _told(kind: type) -> list[str]:
    """The docstrings of its file and its class."""
    texts = (inspect.getdoc(sys.modules[kind.__module__]), inspect.getdoc(kind))
    return [text for text in texts if text]
