"""Put a run of some rows into a whole one: `python -m tools.merge_reproduced DIR/result.json ...` renews last.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from reports.reproduce.answer import Answer, Reproduction, ToldTraces
from reports.reproduce.rows import HERE, TraceKind, load_rows
from reports.reproduce.table import totals
from sim.base.errors import BadInput
from sim.base.files import write_json


def merged(whole: Reproduction, part: Reproduction, order: Iterable[str]) -> Reproduction:
    """`whole` with the rows, constants and traces of `part` in place of its own; date and version are the part's.

    A row that `part` ran on some kinds of traces only keeps what it has on the others, and its status where that is
    judged on one of them.

    Args:
        order: ids of all rows there are; what is not among them is dropped.

    Raises:
        BadInput: a row that neither run has.
    """
    before = {row["id"]: row for row in whole["rows"]}
    found = before | {row["id"]: _together(before.get(row["id"], row), row) for row in part["rows"]}
    missing = [name for name in order if name not in found]
    if missing:
        raise BadInput(f"last.json, got no row {', '.join(missing)}: every row is to be there; run them, too")
    rows = [found[name] for name in order]
    constants = {one["id"]: one for one in (*whole["constants"], *part["constants"])}
    traces: dict[TraceKind, ToldTraces] = dict(whole["traces"])
    for kind, told in part["traces"].items():
        traces[kind] = {"is": told["is"], "of": {**traces.get(kind, told)["of"], **told["of"]}}
    lost = {**whole.get("not_fitted", {}), **part.get("not_fitted", {})}
    return {
        **whole,
        **part,
        "traces": traces,
        "constants": list(constants.values()),
        "not_fitted": {name: why for name, why in lost.items() if name not in constants},
        "rows": rows,
        "totals": totals(rows),
    }


def _together(before: Answer, now: Answer) -> Answer:
    if "traces" not in now or "traces" not in before:
        return now
    ran: Answer = {
        **now,
        "traces": dict(sorted({**before["traces"], **now["traces"]}.items())),
        "left_out": {**before["left_out"], **now["left_out"]},
    }
    if now["scored"] not in now["traces"]:
        ran["status"] = before["status"]
    return ran


if __name__ == "__main__":
    last = HERE / "last.json"
    found, *parts = (json.loads(Path(name).read_text(encoding="utf-8")) for name in [str(last), *sys.argv[1:]])
    known = list(load_rows())
    for i, part in enumerate(parts):
        here = {row["id"] for row in (*found["rows"], *part["rows"])}
        found = merged(found, part, known if i == len(parts) - 1 else [name for name in known if name in here])
    write_json(last, found)
