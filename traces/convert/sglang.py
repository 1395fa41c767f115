"""SGLang's expert-distribution records of mode `per_token`, as JSONL: one forward pass per line.

    {"forward_pass_id": 7, "forward_mode": 1, "input_ids": [...], "positions": [...], "extend_seq_lens": [3],
     "topk_ids_of_layer": [[[k ids] x tokens] x layers]}

Built from the public code (`python/sglang/srt/eplb/expert_distribution.py` of https://github.com/sgl-project/sglang);
no real file was at hand. SGLang writes a pickle (`expert_distribution_recorder_*.pt`), which is never opened here:
docs/convert.md has the lines that turn it into this JSONL. A line `{"last_physical_to_logical_map": [[...]]}`
translates physical experts. Modes `stat` and `per_pass` keep counts, not routes.

Layers in which every id is -1 are dense and left out; so are unused columns (-1). Records name no requests, so they
follow from positions: an extend pass lists its sequences' lengths, a decode pass goes through the running requests in
their order, and each row continues a request at its position. Where that is ambiguous or rows are missing (prefix
cache), it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.base.errors import BadInput
from traces.convert.options import Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import DECODE, PREFILL, a_list, bad, field, has_keys, records, shown, starts_object, whole
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, Array

IDS, MAP = "topk_ids_of_layer", "last_physical_to_logical_map"
DROP = "drop the record"
EXTEND, DECODE_PASS = 1, 2  # ForwardMode of sglang.srt.model_executor.forward_batch_info
_COUNTS = ("logical_count", "global_physical_count")


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return starts_object(head) and any(has_keys(head, name) for name in (IDS, MAP, *_COUNTS))


@dataclass(slots=True)
class _Running:
    request: int
    position: int  # of its next row
    decoding: bool = False


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every token into the spool. Raises BadInput with file, line and field."""
    spool.at(path)
    logical: Array | None = None
    layers: Array | None = None
    running: list[_Running] = []
    n_passes = 0
    for number, data in records(path):
        where = spool.place(number)
        if MAP in data:
            logical = _ids(where, MAP, data[MAP], 2)
            if IDS not in data:
                continue
        if IDS not in data and any(name in data for name in _COUNTS):
            way = "record with --expert-distribution-recorder-mode per_token"
            raise bad(where, IDS, "counts only", "a route per token is needed", way)
        positions = [whole(where, "positions", p) for p in _plain_list(where, data, "positions")]
        tokens = [whole(where, "input_ids", t) for t in _plain_list(where, data, "input_ids")]
        if len(tokens) != len(positions):
            raise bad(where, "input_ids", len(tokens), f"{len(positions)} positions")
        if not positions:
            continue
        ids = _ids(where, IDS, field(where, data, IDS), 3)
        if ids.shape[1] != len(positions):
            raise bad(where, IDS, f"{ids.shape[1]} tokens", f"{len(positions)} positions")
        routed, ids = _routed(where, ids, logical)
        if layers is None:
            layers = routed
            spool.layer_names = [int(layer) for layer in routed]
        if not np.array_equal(layers, routed):
            raise bad(where, IDS, "other MoE layers than before", "all passes have the same", DROP)
        owners = _owners(where, data, positions, running, spool, options)
        for run, token in zip(owners, tokens, strict=True):
            spool.token(run.request, DECODE if run.decoding else PREFILL, token, n_passes)
        n_passes += 1
        spool.block(ids.transpose(1, 0, 2), None, np.full(len(tokens), number))
    return Facts(n_experts=None if logical is None else int(logical.max()) + 1)


def _plain_list(where: str, data: dict[str, Any], name: str) -> list[Any]:
    value = field(where, data, name)
    if not isinstance(value, list):
        raise bad(where, name, shown(value), "a list")
    return value


def _ids(where: str, name: str, value: Any, n_dims: int) -> Array:
    """A nested list as an array of ids, -1 where there is none. Raises BadInput."""
    try:
        ids = np.array(a_list(where, name, value))
    except ValueError:
        raise bad(where, name, "lists of different lengths", "a rectangular array") from None
    if ids.ndim != n_dims or ids.dtype.kind != "i" or not ids.size or ids.min() < -1 or ids.max() >= 65_536:
        raise bad(where, name, f"{ids.dtype} of shape {ids.shape}", f"ids in {n_dims} dimensions, -1 for none")
    if ids.shape[0] > MAX_LAYERS:
        raise bad(where, name, f"{ids.shape[0]} layers", f"at most {MAX_LAYERS}", "is it the right file?")
    return ids


def _routed(where: str, ids: Array, logical: Array | None) -> tuple[Array, Array]:
    """The layers that have experts, and their ids without unused columns, logical ones where a map is known."""
    routed = np.flatnonzero((ids >= 0).any(axis=(1, 2)))
    ids = ids[routed]
    used = (ids >= 0).any(axis=(0, 1)) if len(routed) else np.zeros(0, bool)
    ids = ids[:, :, used]
    if not ids.size or (ids < 0).any():
        raise bad(where, IDS, "-1 for some tokens only", "a token has k experts in every MoE layer", DROP)
    if logical is not None:
        if routed[-1] >= len(logical) or ids.max() >= logical.shape[1] or logical.min() < 0:
            raise BadInput(f"{where}: {IDS}, got an expert or layer outside {MAP}; mend the file")
        ids = logical[routed[:, None, None], ids]
    if ids.max() >= MAX_EXPERTS:
        raise bad(where, IDS, ids.max(), f"from 0 to {MAX_EXPERTS - 1}")
    return routed, ids


def _owners(
    where: str, data: dict[str, Any], positions: list[int], running: list[_Running], spool: Spool, options: Options
) -> list[_Running]:
    """Whose row each row is. Updates `running`: new requests join at the end, those passed over have finished."""
    mode = whole(where, "forward_mode", field(where, data, "forward_mode"), 0, 100)
    if mode not in (EXTEND, DECODE_PASS):
        way = "record without mixed chunks and without speculation"
        raise bad(where, "forward_mode", mode, "1 (extend) or 2 (decode) can be told apart", way)
    if mode == DECODE_PASS:
        return _continued(where, positions, running)
    lengths = [
        whole(where, "extend_seq_lens", n, 1) for n in a_list(where, "extend_seq_lens", data.get("extend_seq_lens"))
    ]
    if sum(lengths) != len(positions):
        raise bad(where, "extend_seq_lens", f"a sum of {sum(lengths)}", f"{len(positions)} rows")
    owners: list[_Running] = []
    for length in lengths:
        own = positions[len(owners) : len(owners) + length]
        if own != list(range(own[0], own[0] + length)):
            raise bad(where, "positions", "gaps within a sequence", "they count up by one")
        run = None
        if own[0]:  # a chunk of a prompt that is not complete yet
            chunked = [one for one in running if one.position == own[0] and not one.decoding]
            if len(chunked) != 1:
                rule, way = f"{len(chunked)} requests could go on there", "record with --disable-radix-cache"
                raise bad(where, "positions", f"a sequence from {own[0]} on", rule, f"{way}, one request at a time")
            run = chunked[0]
        if run is None:
            run = _Running(spool.request((len(spool.owner), len(owners)), options.task), 0)
            running.append(run)
        run.position = own[-1] + 1
        owners += [run] * length
    return owners


def _continued(where: str, positions: list[int], running: list[_Running]) -> list[_Running]:
    """Match decode rows with running requests in order; the first and the last way to do it must be the same."""

    def match(wanted: list[int], runs: list[_Running]) -> list[_Running] | None:
        found, rest = [], iter(runs)
        for position in wanted:
            run = next((one for one in rest if one.position == position), None)
            if run is None:
                return None
            found.append(run)
        return found

    first = match(positions, running)
    last = match(positions[::-1], running[::-1])
    if first is None or last is None:
        rule = "the start of the recording is missing, or requests were reordered"
        got = "a decode row that continues no running request"
        raise bad(where, "positions", got, rule, "record from the first request on")
    if [id(one) for one in first] != [id(one) for one in last[::-1]]:
        got = "rows that could belong to different requests of one length"
        raise bad(where, "positions", got, "records name no requests", "record with --max-running-requests 1")
    for run in first:
        run.position += 1
        run.decoding = True
    running[:] = first
    return first


SOURCE = Source(
    "sglang",
    "SGLang expert-distribution records (per_token, JSONL)",
    "its public code",
    sniff,
    read,
    silent=("model",),
    phased=True,
)
