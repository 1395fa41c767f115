"""llama.cpp's logs as text: a line per token and layer of each forward pass, which name neither request nor phase.

    0 0 7:0.5 1:0.25
    0 1 3:0.5 7:0.125

moe-trace of a llama.cpp fork (solid.cpp): layer, token within the pass, then experts, best first, each with the
router's score where `MOE_TRACE_SCORES` was set. Built from the public code of `tools/moe-trace/moe-trace.cpp` of
https://github.com/sangharshadhyeta/solid.cpp. How many experts a line has is that tool's own `MOE_TOPK`, 6 unless set:
where it is more than the model's k, `--top-k` keeps the first ones; where it is less, the rest is lost. Scores are the
gate's, before the chosen ones are divided by their sum.

    blk.0.ffn_gate_exps.weight 7 1
    blk.1.ffn_gate_exps.weight 3 7

GGML_MOE_LOG of llama.cpp's expert-cache branch: the tensor's name, then the experts, written by each `ffn_gate_exps`
operation that the CPU computed. Built from two public readers of such logs, `bench/moe_hit_sim.py` of
https://github.com/thejustinwalsh/yamadori and the `cache_sim.py` of llama.cpp forks that carry the switch; no real file
was at hand. Prompts of 32 tokens or more run on a GPU where there is one and leave no line, and neither do layers whose
experts are there. So two requests may look like one: give each a file of its own. -1 stands for an expert that a cache
served.

What is made of the passes: one of several tokens is (a part of) a prompt, one of a single token is a decoded token, and
a prompt after decoded tokens begins the next request. llama.cpp runs the last layer for the tokens only whose logits
are wanted, so a pass may have fewer rows in a later layer than in its first, never more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.options import SHAPE, Facts, Options, Source
from traces.convert.spool import DROPPED, Spool
from traces.convert.text import (
    DECODE,
    LARGEST_WEIGHT,
    PREFILL,
    UNKNOWN,
    bad,
    expert_of,
    finite,
    layer_of,
    lines,
    shown,
    whole,
)

ALIKE = 3  # passes of equal size in a row that look like a batch of requests, or like drafted tokens
NOTE = "Forward passes of several tokens are taken for prompts, those of one token for decoding."
SMALL = 32  # tokens; equal passes from this size on are pieces of one long prompt (llama.cpp's ubatches)
CUT = "the log was cut or filtered, record it again"
_LOST = "The log holds what the CPU computed: prompts that a GPU computed are not in it, nor where a request ends."
_TENSOR = re.compile(r"blk\.(\d{1,5})\.ffn_gate_exps(\.weight)?")
_FIRST_TENSOR = re.compile(rb"blk\.\d{1,5}\.ffn_gate_exps(\.weight)?[ \t]")
_FIRST_LINE = re.compile(rb"\d{1,5} \d{1,10}( \d{1,5}(:\S{1,24})?)+\r?(\n|$)")


@dataclass(slots=True)
class Forwards:
    """Gives every row of a file its token, and every token its request once its forward pass is over.

    several_layers: whether more than one layer came up; else passes cannot be told apart where rows have no index.
    """

    spool: Spool
    task: str
    several_layers: bool = False
    _first: int = -1  # token the pass begins with
    _stop: int = -1
    _number: int = 0  # record the pass begins with
    _first_layer: int = -1
    _layer: int = -1
    _at: int = 0  # rows of this layer so far
    _request: int = -1
    _n_requests: int = 0
    _decoding: bool = False
    _sizes: list[int] = field(default_factory=list)  # of the passes that just went by, all of one size

    def token(self, layer: int, number: int, index: int | None = None) -> int:
        """The token of the next row.

        Args:
            index: the row's number within its pass and layer, where the log has it.

        Raises:
            BadInput: an index out of turn, a token that the pass's first layer does not have, or a batch.
        """
        where = self.spool.place(number)
        if layer == self._layer and index != 0:
            self._at += 1
        else:
            if self._first < 0 or layer <= self._layer:
                self.end()
                self._first = self._stop = len(self.spool.owner)
                self._number, self._first_layer = number, layer
            self.several_layers |= layer not in (self._layer, -1) and self._layer >= 0
            self._layer, self._at = layer, 0
        if index is not None and index != self._at:
            way = "the log was cut, sorted or filtered, record it again"
            raise bad(where, "token", index, f"{self._at} is next in layer {layer}", way)
        at = self._first + self._at
        if at == self._stop:
            if layer != self._first_layer:
                got = f"one token more than in layer {self._first_layer}"
                raise bad(where, f"layer {layer}", got, "a forward pass has its tokens in its first layer", CUT)
            self.spool.token(DROPPED, UNKNOWN)
            self._stop += 1
        return at

    def end(self) -> None:
        """The pass is over: its tokens get their request. Raises BadInput where it is one of a batch."""
        n = self._stop - self._first
        if n <= 0:
            return
        self._sizes = [*self._sizes, n] if n in self._sizes else [n]
        if len(self._sizes) == ALIKE and 1 < n < SMALL:
            rule = "a batch of requests or drafted tokens, whose rows belong to no known request"
            way = "record one request at a time, without drafting"
            raise bad(self.spool.place(self._number), "forward pass", f"{ALIKE} of {n} tokens in a row", rule, way)
        if self._request < 0 or (n > 1 and self._decoding):
            self._request = self.spool.request(("forwards", self._n_requests), self.task)
            self._n_requests += 1
        self._decoding = n == 1
        for token in range(self._first, self._stop):
            self.spool.owner[token], self.spool.phase[token] = self._request, DECODE if n == 1 else PREFILL


def _read(path: Path, spool: Spool, options: Options) -> Facts:
    spool.at(path)
    passes = Forwards(spool, options.task)
    for number, text in lines(path):
        where = spool.place(number)
        values = text.split()
        if len(values) < 3:
            rule = "layer, token and the experts; the line was cut, drop it"
            raise BadInput(f"{where}: line, got {len(values)} values: {rule}")
        layer, index = layer_of(where, values[0]), whole(where, "token", values[1])
        pairs = [value.partition(":") for value in values[2:]][: options.top_k]
        if options.top_k is not None and len(pairs) < options.top_k:
            raise bad(where, "experts", len(pairs), f"--top-k asks for {options.top_k}", "lower it")
        ids = [expert_of(where, name) for name, _, _ in pairs]
        scores = [finite(where, "score", score, LARGEST_WEIGHT) for _, colon, score in pairs if colon]
        spool.cell(passes.token(layer, number, index), layer, ids, scores, number)
    passes.end()
    return Facts(expert_order="router", weights_kind="raw", notes=(NOTE,))


def _read_ggml(path: Path, spool: Spool, options: Options) -> Facts:
    spool.at(path)
    passes = Forwards(spool, options.task)
    for number, text in lines(path):
        where = spool.place(number)
        name, *values = text.split()
        tensor = _TENSOR.fullmatch(name)
        if tensor is None or not values:
            rule, way = "a tensor blk.N.ffn_gate_exps and the experts", "drop or mend the line"
            raise bad(where, "line", shown(text), rule, way)
        if "-1" in values:
            way = "record with the expert cache off and all experts on the CPU"
            raise bad(where, "expert", -1, "a cache served it and the log lost its number", way)
        layer = layer_of(where, int(tensor[1]))
        ids = [expert_of(where, value) for value in values]
        spool.cell(passes.token(layer, number), layer, ids, [], number)
    passes.end()
    if len(spool.owner) > 1 and not passes.several_layers:
        way = "record with the experts of all layers on the CPU"
        raise bad(str(path), "layers", "one", "forward passes cannot be told apart", way)
    return Facts(notes=(NOTE, _LOST))


SOURCE = Source(
    "llama_text",
    "moe-trace text (solid.cpp's llama.cpp)",
    "its public code",
    lambda _path, head: _FIRST_LINE.match(head) is not None,
    _read,
    silent=SHAPE,
    phased=True,
)
GGML_LOG = Source(
    "ggml_log",
    "GGML_MOE_LOG (llama.cpp's expert cache)",
    "public readers of it",
    lambda _path, head: _FIRST_TENSOR.match(head) is not None,
    _read_ggml,
    silent=SHAPE,
    phased=True,
)
