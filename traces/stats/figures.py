"""What a trace is like: popularity, repetition from token to token, accuracy of its recorded predictions, lengths.

Pure functions of an open trace, over all requests or those given. They read in chunks and count in integers, so that
results do not depend on the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from traces.format.layout import DISTANCES, SPLITS, Array, Floats, Ints
from traces.format.reader import Trace
from traces.format.requests import Request

LAGS = (1, 2, 4, 8)
Requests = Sequence[Request] | None
_CHUNK_VALUES = 1 << 20


def evenly(trace: Trace, max_rows: int) -> list[Request] | None:
    """Requests, evenly spread, that hold about so many rows; None, which means all, when the trace has no more."""
    if trace.n_tokens <= max_rows:
        return None
    every = -(-trace.n_tokens // max_rows)
    return [trace.requests[i] for i in range(0, trace.n_requests, every)]


def popularity(trace: Trace, split: str | None = None, requests: Requests = None) -> Ints:
    """(L, E) how often each expert was chosen, over all rows or those of one split."""
    counts = np.zeros(trace.n_layers * trace.n_experts, np.int64)
    offset = np.arange(trace.n_layers)[:, None] * trace.n_experts
    for rows in _row_chunks(trace, trace.n_layers * trace.top_k, requests):
        experts = trace.experts[rows[0] : rows[-1] + 1]
        chosen = experts if split is None else experts[_in_split(trace, rows, split)]
        counts += np.bincount((chosen.astype(np.int64) + offset).ravel(), minlength=len(counts))
    return counts.reshape(trace.n_layers, trace.n_experts)


def normalised_entropy(counts: Ints) -> Floats:
    """(L,) entropy of each layer's popularity over that of an even one: 1 is even, 0 one expert, nan no choices."""
    n_experts = counts.shape[-1]
    if n_experts == 1:
        return np.ones(len(counts))
    total = counts.sum(axis=-1, keepdims=True)
    share = np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=~(share <= 0))
    return np.asarray(-(share * logs).sum(axis=-1) / math.log(n_experts))


def dead_experts(counts: Ints) -> list[tuple[int, int]]:
    """(layer, expert) never chosen in the whole trace, in order."""
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(counts == 0)]


def next_token_overlap(
    trace: Trace, lag: int = 1, decode: bool = False, requests: Requests = None
) -> tuple[Floats, int]:
    """Share of a token's experts that the token `lag` rows earlier in the same request used, too.

    decode: count decode rows only (the earlier token may still belong to the prompt).
    Returns (L,) shares by layer (nan without pairs) and the number of token pairs.
    """
    shared = np.zeros(trace.n_layers, np.int64)
    n_pairs = 0
    first_rows, offsets = trace.requests.first_row, trace.requests.offsets
    for rows in _row_chunks(trace, trace.n_layers * trace.top_k**2, requests):
        owner = np.searchsorted(offsets, rows, side="right") - 1
        wanted = rows - lag >= first_rows[owner]
        if decode:
            wanted &= rows >= first_rows[owner] + trace.requests.prompt_len[owner]
        rows = rows[wanted]
        now, before = trace.experts[rows], trace.experts[rows - lag]
        shared += (now[..., :, None] == before[..., None, :]).sum(axis=(0, 2, 3))
        n_pairs += len(rows)
    return shared / (n_pairs * trace.top_k) if n_pairs else np.full(trace.n_layers, np.nan), n_pairs


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Top-K overlap of predictions with what the target layer then chose.

    Position l of the arrays (L,) is the layer that predicts; nan where it predicts nothing. `popular` is the same for a
    predictor that always names the K experts most popular in the store split (in the whole trace when that is empty).
    """

    distance: int
    recorded: Floats
    popular: Floats
    n: Ints


def prediction_accuracy(trace: Trace, distance: int, requests: Requests = None) -> Accuracy:
    """Judge the recorded next-layer scores on the test split (on all rows when that is empty).

    Raises:
        BadInput: the trace has no scores of this distance.
    """
    trace.require(f"next_scores_{distance}", "prediction accuracy")
    asked = trace.requests.split if requests is None else [SPLITS.index(request.split) for request in requests]
    splits = {SPLITS[int(code)] for code in np.unique(asked)}
    counts = popularity(trace, "store" if "store" in splits else None, requests)
    top = top_k_of(counts.astype(np.float64), trace.top_k)
    hits = np.zeros((2, trace.n_layers), np.int64)
    n = np.zeros(trace.n_layers, np.int64)
    for rows in _level_chunks(trace, f"next_scores_{distance}", trace.n_layers * trace.n_experts, requests):
        predicted = top_k_of(trace.next_scores(distance, int(rows[0]), int(rows[-1]) + 1), trace.top_k)
        scored = np.ones(len(rows), bool) if "test" not in splits else _in_split(trace, rows, "test")
        for layer in range(trace.n_layers):
            ahead, target = divmod(layer + distance, trace.n_layers)
            if ahead > (distance == 1):
                continue  # only distance 1 wraps around to the next token
            usable = scored & _has_next(trace, rows) if ahead else scored
            chosen = trace.experts[rows[usable] + ahead, target].astype(np.int64)
            hits[0, layer] += np.take_along_axis(predicted[usable, layer], chosen, -1).sum()
            hits[1, layer] += top[target][chosen].sum()
            n[layer] += len(chosen)
    with np.errstate(invalid="ignore"):
        recorded, popular = hits / (n * trace.top_k)
    return Accuracy(distance, recorded, popular, n)


def top_k_of(scores: Floats, k: int) -> Array:
    """Mask of the k highest along the last axis, ties to the lowest id; scores are integers below 2**40."""
    n = scores.shape[-1]
    keys = scores.astype(np.int64) * n + np.arange(n)[::-1]  # distinct, so exactly k reach the k-th highest
    return np.asarray(keys >= np.partition(keys, n - k, axis=-1)[..., n - k, None])


@dataclass(frozen=True, slots=True)
class TaskLengths:
    """Requests of one task: how many, their rows, and mean and largest prompt and output lengths in tokens."""

    task: str
    n_requests: int
    n_rows: int
    prompt_mean: float
    prompt_max: int
    outputs_mean: float
    outputs_max: int


def lengths(trace: Trace) -> list[TaskLengths]:
    """One entry over all requests (task "") and, where tasks are recorded, one for each task that occurs."""
    table = trace.requests
    groups = [("", np.ones(len(table), bool))]
    if table.task is not None:
        groups += [(name, table.task == i) for i, name in enumerate(table.tasks)]
    found = []
    for name, mask in groups:
        if mask.any():
            lengths = table.prompt_len[mask], table.n_decode[mask] + 1
            told = (value for one in lengths for value in (float(one.mean()), int(one.max())))
            found.append(TaskLengths(name, int(mask.sum()), int(table.n_rows[mask].sum()), *told))  # type: ignore[arg-type]
    return found


def recorded_distances(trace: Trace) -> list[int]:
    """Distances for which the trace has next-layer scores."""
    return [d for d in DISTANCES if f"next_scores_{d}" in trace.levels]


def _row_chunks(trace: Trace, values_per_row: int, requests: Requests = None) -> Iterator[Ints]:
    runs = [(0, trace.n_tokens)] if requests is None else [(r.first_row, r.end_row) for r in requests]
    return _chunks(runs, values_per_row)


def _chunks(runs: Sequence[tuple[int, int]], values_per_row: int) -> Iterator[Ints]:
    step = max(1, _CHUNK_VALUES // values_per_row)
    return (np.arange(at, min(at + step, end)) for first, end in runs for at in range(first, end, step))


def _level_chunks(trace: Trace, level: str, values_per_row: int, requests: Requests = None) -> Iterator[Ints]:
    """Runs of rows that a level can be sliced by: anywhere, or within one request's decode rows."""
    if level in trace.levels_prefill:
        return _row_chunks(trace, values_per_row, requests)
    runs = [(r.first_decode_row, r.end_row) for r in (trace.requests if requests is None else requests)]
    return _chunks(runs, values_per_row)


def _in_split(trace: Trace, rows: Ints, split: str) -> Array:
    owner = np.searchsorted(trace.requests.offsets, rows, side="right") - 1
    return np.asarray(trace.requests.split[owner] == SPLITS.index(split))


def _has_next(trace: Trace, rows: Ints) -> Array:
    """Whether the row after belongs to the same request."""
    owner = np.searchsorted(trace.requests.offsets, rows, side="right") - 1
    return np.asarray(rows + 1 < trace.requests.offsets[owner + 1])
