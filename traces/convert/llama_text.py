"""moe-trace of a llama.cpp fork (solid.cpp): text, a line per layer and token of each forward pass.

    0 0 7:0.5 1:0.25
    0 1 3:0.5 7:0.125

Layer, token within the pass, then experts, best first, each with the router's score where `MOE_TRACE_SCORES` was set.
Built from the public code of `tools/moe-trace/moe-trace.cpp` of https://github.com/sangharshadhyeta/solid.cpp. How
many experts a line has is that tool's own `MOE_TOPK`, 6 unless set: where it is more than the model's k, `--top-k`
keeps the first ones; where it is less, the rest is lost.

Scores are the gate's, before the chosen ones are divided by their sum. Requests and phases are not told;
`traces.convert.forwards` says what is made of the passes.
"""

from __future__ import annotations

import re
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.fields import LARGEST_WEIGHT
from traces.convert.forwards import NOTE, Forwards
from traces.convert.options import Facts, Options
from traces.convert.spool import Spool
from traces.convert.text import finite, lines, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "llama_text", "moe-trace text (solid.cpp's llama.cpp)", "its public code"
_FIRST = re.compile(rb"\d{1,5} \d{1,10}( \d{1,5}(:\S{1,24})?)+\r?(\n|$)")


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return _FIRST.match(head) is not None


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    spool.at(path)
    passes = Forwards(spool, options.task)
    for number, text in lines(path):
        where = spool.place(number)
        values = text.split()
        if len(values) < 3:
            raise BadInput(
                f"{where}: line, got {len(values)} values: layer, token and the experts; the line was cut, drop it"
            )
        layer = whole(where, "layer", values[0], 0, 65_535)
        index = whole(where, "token", values[1])
        pairs = [value.partition(":") for value in values[2:]][: options.top_k]
        if options.top_k is not None and len(pairs) < options.top_k:
            raise BadInput(f"{where}: experts, got {len(pairs)}: --top-k asks for {options.top_k}; lower it")
        ids = [whole(where, "expert", name, 0, MAX_EXPERTS - 1) for name, _, _ in pairs]
        scores = [finite(where, "score", score, LARGEST_WEIGHT) for _, colon, score in pairs if colon]
        spool.cell(passes.token(layer, number, index), layer, ids, scores, number)
    passes.end()
    return Facts(expert_order="router", weights_kind="raw", notes=(NOTE,))
