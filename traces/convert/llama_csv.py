"""llama-moe-trace of thecodacus' llama.cpp: CSV without a header, a row per token and layer.

    -2,0,7,1
    -1,0,3,7
    0,0,7,2

Columns: position, layer, then the experts, best first. Prompt rows have negative positions, decode rows 0, 1, ...
Built from the public code, `tools/moe-trace/moe-trace.cpp` and `simulate.py` of
https://github.com/thecodacus/llama.cpp; its users join several runs into one file (`cat a.csv b.csv`), which become
requests.

- Prompt positions repeat where a batch is computed in pieces, so prompt rows are taken in the order of the file.
- That tool reads the experts of a whole batch as if they lay side by side, which they do not: its prompt rows are then
  slices of the first token's ranking, K experts each, none twice. Such rows are told by that (`_sliced`) and left out.
- The last layer runs for the last prompt token only, and is left out where prompt rows are kept (docs/convert.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.options import SHAPE, Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import DECODE, PREFILL, bad, expert_of, layer_of, lines, whole
from traces.stats.counts import SCHEMA, ExpertCounts

NAME = "llama_csv"
_FIRST = re.compile(rb"-?\d{1,10},\d{1,5}(,\d{1,5})+\r?(\n|$)")
_BY_CHANCE = math.log(1e-6)  # experts that never repeat mean slices when chance makes them so less often


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    spool.at(path)
    assert options.n_experts is not None  # asked for before
    sliced = _sliced(path, options.n_experts)
    run, n_left_out = _Run(spool, options.task), 0
    for number, position, layer, ids in _rows(path):
        if position < 0 and sliced:
            n_left_out += run.skip()
            continue
        spool.cell(run.token(number, position, layer), layer, ids, [], number)
    why = "because the tool read the experts of a batch as if they lay side by side; decode rows are sound."
    told = f"{n_left_out} prompt rows are left out: they are slices of one token's ranking, {why}"
    return Facts(expert_order="router", notes=(told,) if sliced else ())


def counts(path: Path, n_experts: int) -> ExpertCounts:
    """Tokens by layer and expert, as a profile of static placement takes them; prompt rows that are slices left out.

    Raises:
        BadInput: a row that is none, an expert that the model has not, or no rows.
    """
    sliced = _sliced(path, n_experts)
    found: dict[int, list[int]] = {}
    for number, position, layer, ids in _rows(path):
        if position < 0 and sliced:
            continue
        row = found.setdefault(layer, [0] * n_experts)
        for expert in ids:
            if expert >= n_experts:
                rule = f"the model has {n_experts}, 0 to {n_experts - 1}"
                raise bad(f"{path}:{number}", "expert", expert, rule, "is the log of this model?")
            row[expert] += 1
    if not found:
        raise BadInput(f"{path}, got no rows to count: position, layer and the experts in each; record it again")
    layers = sorted(found)
    rows = [found[layer] for layer in layers]
    return ExpertCounts(schema=SCHEMA, model="", source=f"{NAME}: {path.name}", tokens=None, layers=layers, counts=rows)


def _rows(path: Path) -> Iterator[tuple[int, int, int, list[int]]]:
    """(line, position, layer, experts). Raises BadInput."""
    for number, text in lines(path):
        where = f"{path}:{number}"
        values = text.split(",")
        if len(values) < 3:
            rule = "position, layer and the experts; the line was cut, drop it"
            raise BadInput(f"{where}: row, got {len(values)} columns: {rule}")
        position = whole(where, "position", values[0], -(2**31) + 1)
        yield number, position, layer_of(where, values[1]), [expert_of(where, value) for value in values[2:]]


def _sliced(path: Path, n_experts: int) -> bool:
    """Whether prompt rows are slices of one ranking: in no run of them does an expert come twice, until all came."""
    layer_before, seen, log_chance = -1, set[int](), 0.0
    whole_ranking = False
    for _, position, layer, ids in _rows(path):
        if position >= 0 or layer != layer_before:
            layer_before, seen, whole_ranking = layer if position < 0 else -1, set(), False
        if position >= 0 or whole_ranking:
            continue
        if len(seen) + len(ids) > n_experts:
            whole_ranking = True
            continue
        if seen:
            if not seen.isdisjoint(ids):
                return False
            log_chance += _log_disjoint(n_experts, len(seen), len(ids))
        seen.update(ids)
    return log_chance < _BY_CHANCE


def _log_disjoint(n: int, taken: int, k: int) -> float:
    """Log of the chance that k of n experts, evenly drawn, are none of those taken."""
    return sum(math.log((n - taken - i) / (n - i)) for i in range(k) if n - taken - i > 0)


@dataclass(slots=True)
class _Run:
    """Requests of one file: prompt rows in the order of the file, layer by layer; decode rows by position."""

    spool: Spool
    task: str
    _request: int = -1
    _n_requests: int = 0
    _prompt: list[int] = field(default_factory=list)  # tokens of this request's prompt
    _seen: dict[int, int] = field(default_factory=dict)  # layer -> its prompt rows so far
    _first_layer: int = -1
    _position: int | None = None  # of the decode token that is being read
    _token: int = -1

    def _begin(self) -> None:
        self._request = self.spool.request(self._n_requests, self.task)
        self._n_requests += 1
        self._prompt, self._seen, self._first_layer, self._position = [], {}, -1, None

    def skip(self) -> int:
        """A prompt row that is left out: what follows is another request's. Returns 1."""
        self._request, self._position = -1, None
        return 1

    def token(self, number: int, position: int, layer: int) -> int:
        """The token of a row. Raises BadInput where a row is missing or out of turn."""
        where = self.spool.place(number)
        if position < 0:
            if self._request < 0 or self._position is not None:
                self._begin()
                self._first_layer = layer
            at = self._seen.get(layer, 0)
            self._seen[layer] = at + 1
            if at == len(self._prompt):
                if layer != self._first_layer:
                    got = f"one prompt row more than in layer {self._first_layer}"
                    rule, way = "a prompt has its tokens in its first layer", "the log was cut or sorted"
                    raise bad(where, f"layer {layer}", got, rule, f"{way}, record it again")
                self._prompt.append(self.spool.token(self._request, PREFILL))
            return self._prompt[at]
        if self._request < 0:
            self._begin()
        if position != self._position:
            due = 0 if self._position is None else self._position + 1
            if position == 0 and self._position is not None:  # another run, whose prompt rows are not there
                self._begin()
            elif position != due:
                way = "the log was cut, sorted or filtered, record it again"
                raise bad(where, "position", position, f"{due} is next", way)
            self._position, self._token = position, self.spool.token(self._request, DECODE)
        return self._token


SOURCE = Source(
    NAME,
    "llama-moe-trace CSV (thecodacus' llama.cpp)",
    "its public code",
    lambda _path, head: _FIRST.match(head) is not None,
    read,
    silent=SHAPE,
    phased=True,
)
