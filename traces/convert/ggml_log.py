"""GGML_MOE_LOG of llama.cpp's expert-cache branch: text, a line per token and layer that the CPU computed.

    blk.0.ffn_gate_exps.weight 7 1
    blk.1.ffn_gate_exps.weight 3 7

The tensor's name, then the experts, written by each `ffn_gate_exps` operation. Built from two public readers of such
logs, `bench/moe_hit_sim.py` of https://github.com/thejustinwalsh/yamadori and the `cache_sim.py` of llama.cpp forks
that carry the switch; no real file was at hand.

The log holds what the CPU computed: prompts of 32 tokens or more run on a GPU where there is one and leave no line, and
neither do layers whose experts are there. So two requests may look like one: give each a file of its own. -1 stands for
an expert that a cache served. `traces.convert.forwards` says what is made of the forward passes.
"""

from __future__ import annotations

import re
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.forwards import NOTE, Forwards
from traces.convert.options import Facts, Options
from traces.convert.spool import Spool
from traces.convert.text import lines, shown, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "ggml_log", "GGML_MOE_LOG (llama.cpp's expert cache)", "public readers of it"
_TENSOR = re.compile(r"blk\.(\d{1,5})\.ffn_gate_exps(\.weight)?")
_FIRST = re.compile(rb"blk\.\d{1,5}\.ffn_gate_exps(\.weight)?[ \t]")
_LOST = "The log holds what the CPU computed: prompts that a GPU computed are not in it, nor where a request ends."


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return _FIRST.match(head) is not None


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    spool.at(path)
    passes = Forwards(spool, options.task)
    for number, text in lines(path):
        where = spool.place(number)
        name, *values = text.split()
        tensor = _TENSOR.fullmatch(name)
        if tensor is None or not values:
            raise BadInput(
                f"{where}: line, got {shown(text)}: a tensor blk.N.ffn_gate_exps and the experts; drop or mend the line"
            )
        if "-1" in values:
            raise BadInput(
                f"{where}: expert, got -1: a cache served it and the log lost its number; record with the expert cache "
                f"off and all experts on the CPU"
            )
        layer = int(tensor[1])
        ids = [whole(where, "expert", value, 0, MAX_EXPERTS - 1) for value in values]
        spool.cell(passes.token(layer, number), layer, ids, [], number)
    passes.end()
    if len(spool.owner) > 1 and not passes.several_layers:
        raise BadInput(
            f"{path}: layers, got one: forward passes cannot be told apart; record with the experts of all layers on "
            f"the CPU"
        )
    return Facts(notes=(NOTE, _LOST))
