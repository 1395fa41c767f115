"""`moesim routers`: who may say which replica a request goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.workload.router import Router


@click.command(cls=UniqueOptions)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list without NAME).")
def command(name: str | None, as_json: bool) -> None:
    """List routers of --replicas, or show one: a name, or a file (./mine.py[:Class])."""
    from sim.cli.plug_ins import show
    from sim.workload.routers import find, routers

    kinds = [find(one) for one in (routers() if name is None else (name,))]
    show(kinds, as_json, name is not None, _list)


def _list(kinds: Sequence[type[Router]]) -> str:
    from sim.base.tables import fold, render, table
    from sim.cli.plug_ins import title

    rows = table("name", "where a request goes", numbers=False)
    for kind in kinds:
        rows.add_row(kind.name, title(kind))
    told = f"{len(kinds)} routers. `moesim routers NAME` shows source and rule; `--router` takes a file, too.\n"
    return render(rows) + fold(told)
