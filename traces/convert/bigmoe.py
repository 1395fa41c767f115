"""BigMoeOnEdge's route trace (llama.cpp): CSV after `#` lines with the model's facts, one row per chosen expert.

Built from real files (`bench-data` of https://github.com/Helldez/BigMoeOnEdge) and the description of the columns in
its `docs/telemetry.md`: columns go by name, some may be missing; `step` is the absolute position, `slot` the router's
rank, `weight` what the model applies, `nan` when unknown. `(turn, phase, step, layer, slot)` is unique.

Each turn is a request: its own prefill rows, then its decode rows. In a continued conversation a turn's prefill is the
new text only, whose context is longer than the rows show. llama.cpp runs the last layer for the last prompt token
only, so that layer lacks prefill rows and is left out (see docs/convert.md).
"""

from __future__ import annotations

import re
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.csv_long import rows
from traces.convert.fields import LARGEST_WEIGHT
from traces.convert.options import Facts, Options
from traces.convert.spool import DECODE, PREFILL, Spool
from traces.convert.text import finite, lines, shown, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "bigmoe", "BigMoeOnEdge route CSV (llama.cpp)", "real files"
NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_FACT = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return head.startswith(b"# route_trace")


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    facts = _preamble(path)
    spool.at(path)
    tokens: dict[tuple[int, int, int], int] = {}  # of the current turn
    request, turn = -1, -1
    unknown_weights = False
    cell: tuple[int, int, int] | None = None
    ids: list[int] = []
    weights: list[float] = []
    for number, row in rows(path, NEEDED, comments=True):
        where = spool.place(number)
        here = whole(where, "turn", row["turn"])
        phase = DECODE if whole(where, "phase", row["phase"], 0, 1) else PREFILL
        if here != turn:
            if here < turn:
                raise BadInput(f"{where}: turn, got {here} after {turn}: turns follow each other; record it again")
            turn, request = here, spool.request(here, options.task)
            tokens = {}
        key = (turn, phase, whole(where, "step", row["step"]))
        token = tokens.get(key)
        if token is None:
            token = tokens[key] = spool.token(request, phase)
        layer = whole(where, "layer", row["layer"])
        if cell is None or (token, layer) != cell[:2]:
            if cell is not None:
                spool.cell(cell[0], cell[1], ids, weights, cell[2])
            cell, ids, weights = (token, layer, number), [], []
        if whole(where, "slot", row["slot"]) != len(ids):
            raise BadInput(
                f"{where}: slot, got {shown(row['slot'])}: {len(ids)} is next; the log was filtered or cut, record it "
                f"again"
            )
        ids.append(whole(where, "expert", row["expert"], 0, MAX_EXPERTS - 1))
        if row.get("weight", "nan").strip().lower() in ("nan", "-nan"):
            unknown_weights = True
        elif not unknown_weights:
            weights.append(finite(where, "weight", row["weight"], LARGEST_WEIGHT))
    if cell is not None:
        spool.cell(cell[0], cell[1], ids, weights, cell[2])
    return facts


def _preamble(path: Path) -> Facts:
    """Model and experts out of the `#` lines in front of the first row. Raises BadInput."""
    for number, text in lines(path):
        if not text.startswith("#"):
            break
        found = dict(_FACT.findall(text.removeprefix("# ")))
        if "n_expert" not in found:
            continue
        where = f"{path}:{number}"
        name = re.split(r"[/\\]", found.get("model", ""))[-1]
        n_experts = whole(where, "n_expert", found["n_expert"], 1, MAX_EXPERTS)
        return Facts(model=name, n_experts=n_experts, expert_order="router")
    return Facts(expert_order="router")
