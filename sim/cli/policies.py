"""`moesim policies`: what can be replayed, and every parameter of one policy."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import one_line
from sim.base.tables import columns, fold
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from sim.policy.api import Param, Policy

SETTING = "Set one with --set NAME=VALUE. `derived`: worked out from model, trace or budget unless it is set.\n"
NOTES = "Known from third parties' notes, not from the paper or its code"
MOST_OF_A_SEED = 2.0**62


@click.command(cls=UniqueOptions)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list without NAME).")
@click.option("--api", is_flag=True, help="Print all that a policy can implement, see and decide (to write one).")
def command(name: str | None, as_json: bool, api: bool) -> None:
    """List policies, or show one with its parameters: a name, an alias, or a file (./mine.py[:Class])."""
    from sim.policy.contract import check_declared
    from sim.policy.registry import find, policies, unusable

    if api:
        from sim.cli.policy_api import helpers, reference

        if name is not None or as_json:
            raise click.UsageError("--api is about all policies: leave NAME and --json out; see docs/policy_api.md")
        say(reference() + "\n" + helpers(), nl=False)
        return
    if name is None:
        for why in unusable().values():
            click.echo(one_line(f"left out: {why}"), err=True)
        found = list(policies().values())
        facts = json.dumps([_facts(kind) for kind in found], indent=2) if as_json else fold(_list(found))
        click.echo(facts, nl=as_json)
        return
    kind = find(name)
    check_declared(kind)
    click.echo(json.dumps(_facts(kind), indent=2) if as_json else fold(_page(kind)), nl=as_json)


def _facts(kind: type[Policy]) -> dict[str, Any]:
    """Everything a policy declares, as plain data."""
    return {
        "name": kind.name,
        "title": kind.title,
        "aliases": list(kind.aliases),
        "source": kind.source,
        "from_notes": kind.from_notes,
        "description": _description(kind),
        "traits": sorted(kind.traits),
        "needs": sorted(kind.needs),
        "module": kind.__module__,
        "params": [_param(param) for param in kind.params],
    }


def _param(param: Param) -> dict[str, Any]:
    return {
        "name": param.name,
        "default": param.default,
        "choices": list(param.choices) or None,
        "low": param.low if math.isfinite(param.low) else None,
        "high": param.high if math.isfinite(param.high) else None,
        "doc": param.doc,
    }


def _description(kind: type[Policy]) -> str:
    """The docstrings of class and module: what it does, then where that is published and what differs."""
    texts = (inspect.getdoc(kind), inspect.getdoc(sys.modules[kind.__module__]))
    return "\n\n".join(text for text in texts if text)


def _list(found: list[type[Policy]]) -> str:
    """Policies by name; those known from third parties' notes alone under a heading of their own."""
    read = [kind for kind in found if not kind.from_notes]
    told = f"{len(found)} policies. `moesim policies NAME` shows source, aliases and parameters.\n"
    if len(read) == len(found):
        return _rows(found) + told
    return _rows(read) + f"\n{NOTES}\n\n" + _rows([kind for kind in found if kind.from_notes]) + told


def _rows(kinds: list[type[Policy]]) -> str:
    from sim.base.tables import render, table

    rows = table("name", "title", "traits", "needs of the trace", numbers=False)
    for kind in kinds:
        cells = (sorted(kind.traits), sorted(kind.needs - {"experts"}))
        rows.add_row(kind.name, kind.title, *(", ".join(cell) or "-" for cell in cells))
    return render(rows)


def _page(kind: type[Policy]) -> str:
    from sim.base.tables import render, table
    from sim.policy.api import TRAITS

    lines = [f"{kind.name}: {kind.title}", f"source: {kind.source}"]
    if kind.aliases:
        lines.append(f"aliases: {', '.join(kind.aliases)}")
    traits = "; ".join(f"{trait} ({TRAITS[trait]})" for trait in sorted(kind.traits)) or "none"
    lines.append(f"traits: {traits}")
    lines += [f"needs of the trace: {', '.join(sorted(kind.needs))}", ""]
    for paragraph in _description(kind).split("\n\n"):
        lines += [*wrapped(paragraph), ""]
    if not kind.params:
        return "\n".join([*lines, "It has no parameters."]) + "\n"
    rows = table("parameter", "default", "values", "meaning", numbers=False)
    for param in kind.params:
        rows.add_row(param.name, _plain(param.default), _range(param), param.doc)
    return "\n".join(lines) + "\n" + render(rows) + SETTING


def wrapped(paragraph: str) -> list[str]:
    """A paragraph of a docstring at this page's width; each item of a list on lines of its own, a formula as it is."""
    if paragraph.startswith("    "):
        return paragraph.splitlines()
    lines, width = [], columns()
    for item in re.split(r"\n(?=- )", paragraph):
        indent = "  " if item.startswith("- ") else ""
        lines += textwrap.wrap(" ".join(item.split()), width, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def _range(param: Param) -> str:
    if param.choices:
        return " | ".join(param.choices)
    if isinstance(param.default, bool):
        return "true | false"
    low, high = (_bound(bound) if math.isfinite(bound) else None for bound in (param.low, param.high))
    if low is None and high is None:
        return "text" if isinstance(param.default, str) else "number"
    return f"from {low}" if high is None else f"to {high}" if low is None else f"{low} to {high}"


def _bound(value: float) -> str | None:
    """A bound in full where it is a whole number; None for 2 to the 63, which only says that the number is a seed."""
    if value >= MOST_OF_A_SEED:
        return None
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "derived" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
