"""vLLM route loggers in the wild: JSONL, a line per token and logged layer, forward pass after forward pass.

    {"type": "meta", "model_id": "...", "top_k": 8, "num_experts": 64, "layers_logged": [0]}
    {"type": "route", "req_id": "r0", "token_idx": 0, "layer": 0, "topk_ids": [7, 6], "topk_weights": [0.5, 0.5]}

vLLM itself has no such log; patches share this form. Built from two of them:
https://github.com/weiran0129/vLLM-MoE-Logger (`token_idx` restarts in each forward) and
https://github.com/KaxitPandya/cerebras-assesment2 (one counter over the run), and tried on the log that the
latter publishes, which may not be copied here.

What the log does not say, and what is made of it:

- Forwards: a new one begins where the layer goes back, or `token_idx` does within a layer. A log of one layer with
  one counter shows none.
- The engine's profiling passes come first and are dropped: a first forward of 64 tokens or more that all have the
  same experts (dummy tokens are alike) or of 8,192 tokens or more; behind it, all others like it, of any size, down
  to single tokens.
- Layers in files of their own: files whose first records are of different layers hold the same tokens in the same
  order, and are read as one run.
- Requests: by `req_id` where it differs. Where it is constant, requests must have run one at a time: a forward of
  several tokens begins one, forwards of one token continue it. Three forwards of the same several tokens in a row
  look like batched decoding, whose rows belong to nobody known: refused, unless the log is taken as one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from traces.convert.options import Facts, Options, Source
from traces.convert.spool import DROPPED, Spool
from traces.convert.text import (
    DECODE,
    PREFILL,
    UNKNOWN,
    bad,
    expert_ids,
    expert_weights,
    has_keys,
    layer_of,
    records,
    request_key,
    shown,
    starts_object,
    text_of,
    whole,
)
from traces.convert.text import field as needed
from traces.format.layout import MAX_EXPERTS

PROFILE_TOKENS = 8192  # what vLLM's default token budget makes of its dummy pass, or more
_DUMMY_TOKENS = 64  # fewer tokens of equal routing may be a prompt
AGAIN = "record it again"
_ALIKE = 3  # forwards of equal size in a row that look like batched decoding


@dataclass(slots=True)
class _Forward:
    """One forward pass: its tokens [first, stop), whose routing is all alike or not."""

    first: int
    stop: int = 0
    line: int = 0
    alike: bool = True
    leading_alike: int = 0  # tokens from the first on with the first one's experts, in the first layer
    seen: dict[int, list[int]] = field(default_factory=dict)  # layer -> the first token's experts

    @property
    def n_tokens(self) -> int:
        return self.stop - self.first


def runs_of(paths: Sequence[Path]) -> list[list[Path]]:
    """Files of one run stand together: those whose first records are of different layers hold the layers of the same
    tokens; files that begin with the same layer are runs of their own."""
    layers = [next((data.get("layer") for _, data in records(path) if "layer" in data), None) for path in paths]
    apart = len({*map(str, layers)}) == len(paths) and None not in layers
    return [list(paths)] if apart else [[path] for path in paths]


def read(path: Path, spool: Spool, options: Options, others: Sequence[Path] = ()) -> Facts:
    """Put every cell into the spool, then give tokens their requests.

    Args:
        others: files of the same run with the same tokens in further layers.

    Raises:
        BadInput: with file and line.
    """
    log = _Log(spool, len(spool.owner))
    facts = log.add(path)
    for other in others:
        facts = log.add(other, path).over(facts, str(other))
    log.assign(path, options)
    return facts


@dataclass(slots=True)
class _Log:
    """Tokens of one run, from its first file on, and the forward passes they came in."""

    spool: Spool
    base: int
    forwards: list[_Forward] = field(default_factory=list)
    asked: list[str | int] = field(default_factory=list)  # req_id by token

    def add(self, path: Path, first: Path | None = None) -> Facts:
        """Put a file's cells into the spool; those of a further file go to the tokens of the `first`."""
        spool, forwards = self.spool, self.forwards
        spool.at(path)
        facts = Facts(expert_order="router")
        layer_before, index_before, at, n_forwards = -1, -1, 0, 0
        for number, data in records(path):
            where = spool.place(number)
            if data.get("type") == "meta":
                facts = _facts(where, data)
                continue
            if data.get("type", "route") != "route":
                continue
            layer = layer_of(where, needed(where, data, "layer"))
            index = whole(where, "token_idx", needed(where, data, "token_idx"), 0, 2**62)
            if layer != layer_before or index != index_before + 1:
                if layer <= layer_before or not n_forwards:
                    n_forwards += 1
                    if first is None:
                        forwards.append(_Forward(len(spool.owner), len(spool.owner), number))
                at = forwards[min(n_forwards, len(forwards)) - 1].first
            layer_before, index_before = layer, index
            forward = forwards[min(n_forwards, len(forwards)) - 1]
            if first is not None and (n_forwards > len(forwards) or at == forward.stop):
                rule = "files that each hold some of the layers hold the same tokens in the same order"
                way = "give those of one run, or convert them one by one"
                raise bad(where, "token_idx", f"one token more than in {first}", rule, way)
            ids = expert_ids(where, "topk_ids", needed(where, data, "topk_ids"))
            weights = data.get("topk_weights")
            self._token(forward, at, layer, request_key(where, data.get("req_id")), where)
            same = forward.seen.setdefault(layer, ids) == ids
            forward.leading_alike += same and forward.leading_alike == at - forward.first and len(forward.seen) == 1
            forward.alike &= same
            given = [] if weights is None else expert_weights(where, "topk_weights", weights, len(ids))
            spool.cell(at, layer, ids, given, number)
            at += 1
        return facts

    def _token(self, forward: _Forward, at: int, layer: int, asked: str | int, where: str) -> None:
        """Add the token when it is new; in a further layer it is of the same request."""
        if at == forward.stop:
            if len(forward.seen) > 1 or (forward.seen and layer not in forward.seen):
                got = f"one token more than in layer {next(iter(forward.seen))}"
                raise bad(where, "token_idx", got, "a forward pass has the same tokens in every layer", AGAIN)
            self.spool.token(DROPPED, UNKNOWN, iteration=len(self.forwards) - 1)
            self.asked.append(asked)
            forward.stop += 1
        elif self.asked[at - self.base] != asked:
            raise bad(where, "req_id", shown(asked), "another one in an earlier layer of the same token", AGAIN)

    def assign(self, path: Path, options: Options) -> None:
        """Drop the profiling passes and give every other token its request and phase."""
        spool, asked, base = self.spool, self.asked, self.base
        real = _without_profiling(self.forwards, spool)
        if not real:
            return
        named = len(set(asked[real[0].first - base :])) > 1
        if options.one_stream:
            request = spool.request(("stream",), options.task)
            for token in range(real[0].first, real[-1].stop):
                spool.owner[token], spool.phase[token], spool.iteration[token] = request, PREFILL, -1
            return
        if not named:
            _refuse_batches(path, real)
        started: set[int] = set()
        request = -1
        for forward in real:
            tokens = range(forward.first, forward.stop)
            if not named and (len(tokens) > 1 or request < 0):
                request = spool.request(forward.first, options.task)
            owners = [request] * len(tokens)
            if named:
                owners = [spool.request((asked[t - base],), options.task) for t in tokens]
            counts = {owner: owners.count(owner) for owner in set(owners)} if named else {request: len(tokens)}
            for token, owner in zip(tokens, owners, strict=True):
                spool.owner[token] = owner
                spool.phase[token] = DECODE if counts[owner] == 1 and owner in started else PREFILL
            started.update(counts)


def _facts(where: str, meta: dict[str, object]) -> Facts:
    told = meta.get("num_experts")
    n_experts = None if told is None else whole(where, "num_experts", told, 1, MAX_EXPERTS)
    return Facts(model=text_of(where, "model_id", meta.get("model_id")), n_experts=n_experts, expert_order="router")


def _without_profiling(forwards: list[_Forward], spool: Spool) -> list[_Forward]:
    """The forwards behind the engine's dummy passes."""
    at = 0
    while at < len(forwards):
        forward = forwards[at]
        alike = forward.alike and forward.n_tokens >= (1 if at else _DUMMY_TOKENS)
        if not alike and forward.n_tokens < PROFILE_TOKENS:
            break
        at += 1
    n_dropped = sum(forward.n_tokens for forward in forwards[:at])
    if len(forwards) == 1 and forwards[0].leading_alike >= _DUMMY_TOKENS:  # one counter, one layer: no forwards to see
        only = forwards[0]
        n_dropped = only.leading_alike if not only.alike else only.n_tokens
        forwards, at = [_Forward(only.first + n_dropped, only.stop, only.line)], int(only.alike)
    if n_dropped:
        spool.notes.append(f"{n_dropped} rows of the engine's profiling passes were dropped.")
    return forwards[at:]


def _refuse_batches(path: Path, real: list[_Forward]) -> None:
    """Requests without names must have run one at a time."""
    where = f"{path}:{real[0].line}"
    way = "log with max_num_seqs=1, or take it as one request of prefill rows with --one-stream"
    if len(real) == 1 and real[0].n_tokens > 1 and real[0].leading_alike == 0 and not real[0].seen:
        got = "one counter over all rows and one layer"
        raise bad(where, "token_idx", got, "forward passes cannot be told apart", way)
    alike = 1
    for before, forward in pairwise(real):
        alike = alike + 1 if forward.n_tokens == before.n_tokens > 1 else 1
        if alike == _ALIKE:
            got = f"one for all rows, and {_ALIKE} forward passes of {forward.n_tokens} tokens in a row"
            raise bad(f"{path}:{forward.line}", "req_id", got, "a batch, whose rows belong to no known request", way)


SOURCE = Source(
    "vllm",
    "vLLM route log (JSONL)",
    "public code of two loggers; one published log tried",
    lambda _path, head: starts_object(head) and (has_keys(head, "topk_ids") or has_keys(head, "layers_logged")),
    read,
    first_line={"model": "model_id", "n_experts": "num_experts"},
    phased=True,
    runs=runs_of,
)
