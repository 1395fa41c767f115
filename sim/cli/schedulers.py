"""`moesim schedulers`: who may say whose prompt runs next, and what each goes by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.workload.scheduler import Scheduler


@click.command(cls=UniqueOptions)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list without NAME).")
def command(name: str | None, as_json: bool) -> None:
    """List schedulers, or show one: a name, or a file (./mine.py[:Class])."""
    from sim.cli.plug_ins import show
    from sim.workload.schedulers import find, schedulers

    kinds = [find(one) for one in (schedulers() if name is None else (name,))]
    show(kinds, as_json, name is not None, _list, _facts, _needs)


def _list(kinds: Sequence[type[Scheduler]]) -> str:
    from sim.base.tables import fold, render, table
    from sim.cli.plug_ins import title

    rows = table("name", "who goes next", "needs", numbers=False)
    for kind in kinds:
        rows.add_row(kind.name, title(kind), ", ".join(kind.needs) or "-")
    told = (
        f"{len(kinds)} schedulers. `moesim schedulers NAME` shows source and rules; `--scheduler` takes a file, too.\n"
    )
    return render(rows) + fold(told)


def _facts(kind: type[Scheduler]) -> dict[str, Any]:
    return {"needs": list(kind.needs), "in_order": kind.in_order, "sharing_out_s": kind.sharing_out_s}


def _needs(kind: type[Scheduler]) -> list[str]:
    from sim.workload.known_requests import NEEDS

    needs = [f"{need} ({NEEDS[need]})" for need in kind.needs]
    return [f"needs: {'; '.join(needs) or 'nothing'}"]
