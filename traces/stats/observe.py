"""What a trace shows of itself: overlaps between tokens near and far, between layers, and of its predictions.

Everything is counted on the rows of some requests, so that one half of a trace can be held against the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import BadInput
from traces.format.layout import Array, Floats, Ints
from traces.format.reader import Trace
from traces.format.requests import Request

LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
MAX_ROWS = 60_000  # selections held in memory at once
MIN_HALF = 48  # rows that half of a single request has to have
MAX_SCORE_ROWS = 20_000
AFFINITY_ROWS = 4_096
_PAIRS = 40_000


def choose(scores: Array, k: int) -> Ints:
    """(..., K) positions of the k highest scores, highest first; equal scores go to the lowest position."""
    part = np.argpartition(-scores, k - 1, axis=-1)[..., :k] if k < scores.shape[-1] else np.argsort(-scores, axis=-1)
    edge = np.take_along_axis(scores, part, -1).min(axis=-1, keepdims=True)
    if ((scores >= edge).sum(axis=-1) > k).any():  # rare: which of the equal ones comes in is not argpartition's to say
        return np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    part.sort(axis=-1)  # so that the stable sort below leaves equal scores in order of position
    order = np.argsort(-np.take_along_axis(scores, part, -1), axis=-1, kind="stable")
    return np.asarray(np.take_along_axis(part, order, -1))


def among(scores: Array, k: int, asked: Ints) -> NDArray[np.bool_]:
    """(..., K) whether each position that is asked for is one of `choose(scores, k)`, which orders them, too."""
    n = scores.shape[-1]
    edge = np.partition(scores, n - k, axis=-1)[..., n - k, None]
    found: NDArray[np.bool_] = np.take_along_axis(scores, asked, -1) >= edge
    tied = np.count_nonzero(scores >= edge, axis=-1) > k  # which of the equal ones comes in is for `choose` to say
    if tied.any():
        found[tied] = (choose(scores[tied], k)[..., :, None] == asked[tied][..., None, :]).any(axis=-2)
    return found


@dataclass(frozen=True)
class Sample:
    """Rows of some requests of a trace, in order.

    experts (n, L, K); request, task, position: (n,) index of the request in `requests`, its task, row within it.
    token_ids (n,) or None.
    """

    trace: Trace
    requests: list[Request]
    experts: Ints
    request: Ints
    task: Ints
    position: Ints
    token_ids: Array | None

    @property
    def scored(self) -> Ints:
        """Positions of decode rows where there are any, else of all."""
        decode = self.position >= np.array([request.prompt_len for request in self.requests])[self.request]
        return np.flatnonzero(decode if decode.any() else ~decode)


def spread(n: int, most: int) -> Ints:
    """At most so many of n positions, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, n - 1, most).round().astype(int))


def sample(trace: Trace, requests: Sequence[Request] | None = None, max_rows: int = MAX_ROWS) -> Sample:
    """All rows of the given requests (default: all of them), or of as many, evenly spread, as `max_rows` allows."""
    wanted = list(trace.requests) if requests is None else list(requests)
    total = sum(r.n_rows for r in wanted)
    if total > max_rows:
        every = -(-total // max_rows)
        wanted = wanted[::every]
    names = list(trace.requests.tasks) or [""]
    rows = [slice(request.first_row, request.end_row) for request in wanted]
    sizes = [request.n_rows for request in wanted]
    return Sample(
        trace,
        wanted,
        np.concatenate([trace.experts[own].astype(np.int64) for own in rows]),
        np.repeat(np.arange(len(wanted)), sizes),
        np.repeat([names.index(request.task) for request in wanted], sizes),
        np.concatenate([np.arange(n) for n in sizes]),
        np.concatenate([trace.token_ids[own] for own in rows]) if "token_ids" in trace.levels else None,
    )


def halves(trace: Trace) -> tuple[list[Request], list[Request]]:
    """Requests in two halves, task by task in turn, so that both hold the same kinds of text; a long one is cut."""
    if trace.n_requests == 1 and trace.n_tokens >= 2 * MIN_HALF:
        (whole,) = trace.requests
        half = whole.n_rows // 2
        later = replace(whole, first_row=whole.first_row + half, n_rows=whole.n_rows - half, prompt_len=1)
        return [replace(whole, n_rows=half, prompt_len=1)], [later]
    seen: dict[str, int] = {}
    parts: tuple[list[Request], list[Request]] = ([], [])
    for request in trace.requests:
        turn = seen.get(request.task, 0)
        seen[request.task] = turn + 1
        parts[turn % 2].append(request)
    return parts


def too_few(trace: Trace) -> BadInput:
    """What to say of a trace that cannot be halved."""
    rule = "two halves need two of one task; leave out --check"
    return BadInput(f"{trace.path}, got {trace.n_requests} requests: {rule}")


def popularity(rows: Sample) -> Floats:
    """(L, E) share of tokens that choose each expert; a layer sums to K."""
    return np.asarray(_counts(rows.experts, rows.trace.n_experts) / len(rows.experts))


def _counts(experts: Ints, n_experts: int) -> Ints:
    """(L, E) how often each expert is chosen in (n, L, K)."""
    n_layers = experts.shape[1]
    flat = experts + np.arange(n_layers)[:, None] * n_experts
    return np.bincount(flat.ravel(), minlength=n_layers * n_experts).reshape(n_layers, n_experts)


def overlap(rows: Sample, one: Ints, two: Ints) -> Floats:
    """(L,) mean share of the experts of rows `one` that rows `two` chose, too; nan without rows."""
    if not len(one):
        return np.full(rows.experts.shape[1], np.nan)
    same = np.zeros(rows.experts.shape[1])
    for at in range(0, len(one), 4096):
        a, b = rows.experts[one[at : at + 4096]], rows.experts[two[at : at + 4096]]
        same += (a[..., :, None] == b[..., None, :]).sum(axis=(0, 2, 3))
    return np.asarray(same / (len(one) * rows.experts.shape[2]))


def lag_pairs(rows: Sample, lag: int) -> tuple[Ints, Ints]:
    """(later, earlier) rows of the same request, `lag` apart."""
    later = np.flatnonzero(rows.position >= lag)
    return later, later - lag


def far_pairs(rows: Sample, same_task: bool, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Random pairs of rows of different requests, of one task or of two."""
    one, two = rng.integers(0, len(rows.request), (2, _PAIRS))
    fits = (rows.request[one] != rows.request[two]) & ((rows.task[one] == rows.task[two]) == same_task)
    return one[fits], two[fits]


def overlap_between(rows: Sample) -> tuple[Floats, Floats]:
    """(L,) mean share of a row's experts that a row of another request chose, of its task and of another.

    Over all pairs of such rows; nan without any.
    """
    _, n_layers, top_k = rows.experts.shape
    n_experts, n_tasks = rows.trace.n_experts, int(rows.task.max()) + 1
    by_task, n_by_task = np.zeros((n_tasks, n_layers, n_experts), np.int64), np.zeros(n_tasks, np.int64)
    alone, n_alone = np.zeros(n_layers, np.int64), 0  # pairs of rows of one request
    ends = np.flatnonzero(np.diff(rows.request, append=-1)) + 1
    for start, stop in pairwise([0, *ends.tolist()]):
        counts, task, n = _counts(rows.experts[start:stop], n_experts), rows.task[start], stop - start
        alone, n_alone = alone + _squares(counts), n_alone + n * n
        by_task[task] += counts
        n_by_task[task] += n
    together, n_together = _squares(by_task).sum(axis=0), int((n_by_task * n_by_task).sum())
    every, n_every = _squares(by_task.sum(axis=0)), len(rows.experts) ** 2
    with np.errstate(invalid="ignore"):
        same: Floats = (together - alone) / np.float64((n_together - n_alone) * top_k)
        other: Floats = (every - together) / np.float64((n_every - n_together) * top_k)
    return same, other


def _squares(counts: Ints) -> Ints:
    return np.asarray((counts * counts).sum(axis=-1))


def id_pairs(rows: Sample, times: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Every row with `times` random rows of the same token id, where these are of another request."""
    if rows.token_ids is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(rows.token_ids, kind="stable")
    ids = rows.token_ids[order]
    first, end = np.searchsorted(ids, ids), np.searchsorted(ids, ids, side="right")
    one = np.tile(order, times)
    two = order[np.tile(first, times) + (rng.random(len(one)) * np.tile(end - first, times)).astype(np.int64)]
    fits = rows.request[one] != rows.request[two]
    return one[fits], two[fits]


def gram_pairs(rows: Sample, depth: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Random pairs of rows of different requests whose last `depth` token ids are the same, and not one more."""
    if rows.token_ids is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = grams(rows.token_ids, rows.position, depth + 1)
    shuffled = rng.permutation(np.flatnonzero(rows.position >= depth - 1))
    order = shuffled[np.argsort(keys[depth - 1][shuffled], kind="stable")]
    one, two = order[:-1], order[1:]
    fits = (keys[depth - 1][one] == keys[depth - 1][two]) & (rows.request[one] != rows.request[two])
    fits &= keys[depth][one] != keys[depth][two]
    return one[fits], two[fits]


def grams(token_ids: Array, position: Ints, depth: int) -> list[Ints]:
    """[d] -> (n,) a number for the last d + 1 token ids of each row; what stands before a request counts as one id."""
    _, ids = np.unique(token_ids, return_inverse=True)
    found = [ids.astype(np.int64)]
    for back in range(1, depth):
        earlier = np.where(position >= back, np.roll(ids, back), -1)
        _, longer = np.unique(found[-1] * (len(ids) + 1) + earlier + 1, return_inverse=True)
        found.append(longer.astype(np.int64))
    return found


def recurring(token_ids: Array, request: Ints, position: Ints, depth: int) -> float:
    """Share of rows whose last `depth` token ids stand in another request, too."""
    key = grams(token_ids, position, depth)[-1]
    whole = position >= depth - 1
    held = np.unique(np.stack([key, request])[:, whole], axis=1)
    kinds, requests = np.unique(held[0], return_counts=True)
    return float((requests[np.searchsorted(kinds, key[whole])] > 1).mean()) if whole.any() else 0.0


def repeated(token_ids: Array, request: Ints, position: Ints) -> float:
    """Share of rows whose last two token ids stood in their request before."""
    key = np.stack([grams(token_ids, position, 2)[-1], request])[:, position >= 1]
    kinds = np.unique(key, axis=1).shape[1]
    return float(1.0 - kinds / key.shape[1]) if key.shape[1] else 0.0


def foretold(rows: Sample, n_asked: int = 500) -> float:
    """Share of a row's experts in odd layers that the row has, too, which is most like it in the even layers.

    Looked for among rows of other requests with other token ids, for some rows: what a search for alike routes finds
    where it does not find the same text.
    """
    assert rows.token_ids is not None
    n, n_layers, top_k = rows.experts.shape
    chosen = np.zeros((n, n_layers, rows.trace.n_experts), np.float32)
    np.put_along_axis(chosen, rows.experts, 1.0, axis=-1)
    even, odd = (chosen[:, first::2].reshape(n, -1) for first in (0, 1))
    asked = np.unique(np.linspace(0, n - 1, n_asked).astype(np.int64))
    alike = even[asked] @ even.T
    near = (rows.request[asked, None] == rows.request) | (rows.token_ids[asked, None] == rows.token_ids)
    alike[near] = -1.0
    found = (odd[asked] * odd[alike.argmax(axis=1)]).sum(axis=1)
    return float(found.mean() / (top_k * max(1, n_layers // 2)))


def affinity(before: Ints, after: Ints, n_experts: int) -> float:
    """How much of a layer's choices (n, K) the choices of the layer before tell: the share that is guessed right.

    On even rows it is counted which experts follow which; on odd rows the K experts that follow most, summed over the
    K chosen before, are the guess.
    """
    before, after = before[:AFFINITY_ROWS], after[:AFFINITY_ROWS]
    if len(after) < 2:
        return float(after.shape[1] / n_experts)  # nothing to judge by: as by chance
    top_k, judge = after.shape[1], after[1::2]
    pairs = before[::2, :, None] * n_experts + after[::2, None, :]
    follows = np.bincount(pairs.ravel(), minlength=n_experts**2).reshape(n_experts, n_experts).astype(np.float64)
    follows += follows.sum(axis=0) / follows.sum()  # an expert never seen before guesses by popularity
    follows /= follows.sum(axis=1, keepdims=True)
    guess = choose(follows[before[1::2]].sum(axis=1), top_k)
    return float((guess[:, :, None] == judge[:, None, :]).mean(axis=0).sum() / top_k)


def prediction_overlap(
    rows: Sample, level: str, distance: int, judged: Sequence[tuple[int, int]] | None = None
) -> Floats:
    """(L,) share of layer l + distance's choice among the K highest scores predicted at layer l; nan without target.

    Args:
        judged: runs of rows [start, stop), each within one request; default: `score_rows`.
    """
    trace = rows.trace
    n_layers, top_k = trace.n_layers, trace.top_k
    hits, n = np.zeros(n_layers), np.zeros(n_layers)
    wrap = level == "next_scores_1"
    for first, end in score_rows(rows, level) if judged is None else judged:
        shared = level == "shared_scores"
        scores = trace.shared_scores(first, end) if shared else trace.next_scores(distance, first, end)
        actual = trace.experts[first:end].astype(np.int64)
        here = n_layers - distance
        hits[:here] += among(scores[:, :here], top_k, actual[:, distance:]).sum(axis=(0, 2))
        n[:here] += len(scores) * top_k
        if wrap:
            hits[here:] += among(scores[:-1, here:], top_k, actual[1:, :distance]).sum(axis=(0, 2))
            n[here:] += (len(scores) - 1) * top_k
    with np.errstate(invalid="ignore"):
        found: Floats = hits / n
    return found


def level_rows(rows: Sample, level: str, most: int) -> list[tuple[int, int, str]]:
    """Runs of rows [start, stop) that hold a level, each within one request and at most so long, and its task."""
    whole = level in rows.trace.levels_prefill
    runs = [(r.first_row if whole else r.first_decode_row, r.end_row, r.task) for r in rows.requests]
    return [(start, min(stop, start + most), task) for start, stop, task in runs if stop > start]


def score_rows(rows: Sample, level: str) -> list[tuple[int, int]]:
    """Those of them that are judged: of more than `MAX_SCORE_ROWS` rows about so many, evenly over the tasks."""
    runs = level_rows(rows, level, MAX_SCORE_ROWS)
    n_rows = sum(stop - start for start, stop, _ in runs)
    if n_rows > MAX_SCORE_ROWS:
        runs.sort(key=lambda run: run[2])
        n_kept = max(1, len(runs) * MAX_SCORE_ROWS // n_rows)
        runs = [runs[i] for i in spread(len(runs), n_kept)]
    return sorted((start, stop) for start, stop, _ in runs)
