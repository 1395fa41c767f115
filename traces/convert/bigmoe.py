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

from traces.convert.csv_long import rows
from traces.convert.options import Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import DECODE, LARGEST_WEIGHT, PREFILL, bad, finite, layer_of, lines, whole
from traces.format.layout import MAX_EXPERTS

NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_FACT = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    facts = _preamble(path)
    spool.at(path)
    tokens: dict[tuple[int, int, int], int] = {}  # of the current turn
    request, turn = -1, -1
    unknown_weights = False
    for number, row in rows(path, NEEDED, comments=True):
        where = spool.place(number)
        here = whole(where, "turn", row["turn"])
        phase = DECODE if whole(where, "phase", row["phase"], 0, 1) else PREFILL
        if here != turn:
            if here < turn:
                raise bad(where, "turn", f"{here} after {turn}", "turns follow each other", "record it again")
            turn, request, tokens = here, spool.request(here, options.task), {}
        key = (turn, phase, whole(where, "step", row["step"]))
        token = tokens.get(key)
        if token is None:
            token = tokens[key] = spool.token(request, phase)
        unknown_weights |= row.get("weight", "nan").strip().lower() in ("nan", "-nan")
        weight = None if unknown_weights else finite(where, "weight", row["weight"], LARGEST_WEIGHT)
        spool.entry(where, (token, layer_of(where, row["layer"])), number, row["expert"], weight, ("slot", row["slot"]))
    spool.end_cell()
    return facts


def _preamble(path: Path) -> Facts:
    """Model and experts out of the `#` lines in front of the first row. Raises BadInput."""
    for number, text in lines(path):
        if not text.startswith("#"):
            break
        found = dict(_FACT.findall(text.removeprefix("# ")))
        if "n_expert" in found:
            name = re.split(r"[/\\]", found.get("model", ""))[-1]
            n_experts = whole(f"{path}:{number}", "n_expert", found["n_expert"], 1, MAX_EXPERTS)
            return Facts(model=name, n_experts=n_experts, expert_order="router")
    return Facts(expert_order="router")


SOURCE = Source(
    "bigmoe",
    "BigMoeOnEdge route CSV (llama.cpp)",
    "real files",
    lambda _path, head: head.startswith(b"# route_trace"),
    read,
    phased=True,
)
