"""`moesim schedulers`: who may say whose prompt runs next, and what each goes by."""

from __future__ import annotations

import inspect
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from sim.cli.policies import wrapped
from sim.cli.say import say

if TYPE_CHECKING:
    from sim.workload.scheduler import Scheduler


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list without NAME).")
def command(name: str | None, as_json: bool) -> None:
    """List schedulers, or show one: a name, or a file (./mine.py[:Class])."""
    from sim.base.tables import fold, render, table
    from sim.workload.schedulers import find, schedulers

    if name is not None:
        kind = find(name)
        if as_json:
            click.echo(json.dumps(_facts(kind), indent=2))
        else:
            say(fold(_page(kind)), nl=False)
        return
    kinds = [find(one) for one in schedulers()]
    if as_json:
        click.echo(json.dumps([_facts(kind) for kind in kinds], indent=2))
        return
    rows = table("name", "who goes next", "needs", numbers=False)
    for kind in kinds:
        rows.add_row(kind.name, _title(kind), ", ".join(kind.needs) or "-")
    told = (
        f"{len(kinds)} schedulers. `moesim schedulers NAME` shows source and rules; `--scheduler` takes a file, too.\n"
    )
    say(render(rows) + fold(told), nl=False)


def _title(kind: type[Scheduler]) -> str:
    """The first sentence of its file."""
    text = inspect.getdoc(sys.modules[kind.__module__]) or inspect.getdoc(kind) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _facts(kind: type[Scheduler]) -> dict[str, Any]:
    return {
        "name": kind.name,
        "title": _title(kind),
        "needs": list(kind.needs),
        "in_order": kind.in_order,
        "sharing_out_s": kind.sharing_out_s,
        "description": "\n\n".join(_told(kind)),
        "module": kind.__module__,
    }


def _told(kind: type[Scheduler]) -> list[str]:
    """The docstrings of its file and its class."""
    texts = (inspect.getdoc(sys.modules[kind.__module__]), inspect.getdoc(kind))
    return [text for text in texts if text]


def _page(kind: type[Scheduler]) -> str:
    from sim.workload.profiled import NEEDS

    needs = [f"{need} ({NEEDS[need]})" for need in kind.needs]
    lines = [f"{kind.name}: {_title(kind)}", f"needs: {'; '.join(needs) or 'nothing'}"]
    for paragraph in "\n\n".join(_told(kind)).split("\n\n"):
        lines += ["", *wrapped(paragraph)]
    return "\n".join(lines) + "\n"
