"""Fit a profile to a trace: each observed overlap becomes the correlation that would produce it."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from traces.format.layout import Array, Floats, Ints
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.stats import observe
from traces.stats.observe import LAGS, Sample, choose
from traces.synth.latent import GRID, overlap_table, popularity_bias, to_correlation
from traces.synth.profile import FADES, FIELDS, Lengths, Profile, Vocabulary

_SEED = 20_509_834_2  # of the tables: fitting draws no luck
_AFFINITY_GRID = GRID[[0, 2, 4, 6, 8, 10, 12, 15]]
MAX_REQUESTS = 1024  # request lengths kept in a profile
VOCABULARY_POINTS = 32
WIDTH = 64  # of synthetic embeddings
SPARSEMIXER = "the source's sparsemixer weights cannot be drawn from scores: weights here are the softmax scores"


def fit(trace: Trace, requests: list[Request] | None = None) -> Profile:
    """The profile of a trace, or of some of its requests. Levels that the trace lacks stay absent.

    Raises:
        BadInput: selections that are not sound (`Trace.experts`).
    """
    rows = observe.sample(trace, requests)
    rng = np.random.default_rng(_SEED)
    share = observe.popularity(rows)
    bias = [popularity_bias(layer, trace.top_k, rng) for layer in share]
    tables = [overlap_table(b, trace.top_k, rng) for b in bias]
    gate, tasks = trace.header.gate, list(trace.requests.tasks)
    assumptions = [SPARSEMIXER] if gate.score == "sparsemixer" else []
    sharpness, offset = _gate(rows, bias, rng) if "scores" in trace.levels else (None, None)
    ahead = {str(d): _ahead(rows, f"next_scores_{d}", d, tables) for d in observe.distances(trace)}
    shared = _ahead(rows, "shared_scores", 1, tables) if "shared_scores" in trace.levels else None
    store = [Lengths(r.prompt_len, r.n_decode, tasks.index(r.task) if tasks else 0, r.split == "store")
             for r in rows.requests[:MAX_REQUESTS]]  # fmt: skip
    shares = _shares(rows, tables, rng)
    return Profile(
        source=trace.name, n_layers=trace.n_layers, n_experts=trace.n_experts, top_k=trace.top_k,
        score="sigmoid" if gate.score == "sigmoid" else "softmax", renormalised=gate.renormalised, scaling=gate.scaling,
        bias=[_rounded(b) for b in bias], shares={k: _rounded(v) for k, v in shares.items()},
        depth=_rounded(_depth(rows, bias, shares, rng)), ahead=ahead, shared=shared,
        sharpness=None if sharpness is None else _rounded(sharpness),
        offset=None if offset is None else _rounded(offset), vocabulary=_vocabulary(rows),
        embedding_width=WIDTH if rows.token_ids is not None else 0, tasks=tasks, requests=store,
        assumptions=assumptions,
    )  # fmt: skip


def _rounded(values: Floats) -> list[float]:
    return [round(float(v), 5) for v in values]


def _shares(rows: Sample, tables: list[Floats], rng: np.random.Generator) -> dict[str, Floats]:
    """(L,) shares of the variance by field, from overlaps at every distance between two tokens.

    Correlation at a lag = task + request + each fade * exp(-lag / fade) + token * (share of equal ids at the lag). Task
    and token are measured on pairs of different requests; the others are the non-negative least-squares solution.
    """

    def correlations(pairs: tuple[Ints, Ints]) -> Floats:
        seen = observe.overlap(rows, *pairs)
        return np.array([to_correlation(o, t) if o == o else 0.0 for o, t in zip(seen, tables, strict=True)])

    task = correlations(observe.far_pairs(rows, True, rng)) if rows.task.any() else np.zeros(len(tables))
    same = observe.token_pairs(rows, rng)
    of_one_task = float((rows.task[same[0]] == rows.task[same[1]]).mean()) if len(same[0]) else 0.0
    token = np.clip(correlations(same) - of_one_task * task, 0.0, 1.0 - task)
    pairs = {lag: observe.lag_pairs(rows, lag) for lag in LAGS}
    lags = [lag for lag in LAGS if len(pairs[lag][0])]
    seen = np.array([correlations(pairs[lag]) for lag in lags]).reshape(len(lags), len(tables))
    equal = np.array([_equal_ids(rows, *pairs[lag]) for lag in lags])
    basis = np.array([[1.0, *(np.exp(-lag / fade) for fade in FADES)] for lag in lags]).reshape(len(lags), -1)
    shares = np.zeros((len(FIELDS), len(tables)))
    shares[0], shares[-1] = task, token
    for layer in range(len(tables) if lags else 0):
        left = np.maximum(seen[:, layer] - task[layer] - token[layer] * equal, 0.0)
        shares[1:-1, layer], _ = nnls(basis, left)
    # Measured apart, they may pass 1 by a little; tokens with equal ids also share what stands before them, so that
    # the token's share is the one that is too large.
    shares[-1] = np.clip(shares[-1], 0.0, np.maximum(0.0, 1.0 - shares[:-1].sum(axis=0)))
    shares /= np.maximum(shares.sum(axis=0), 1.0)
    return dict(zip(FIELDS, shares, strict=True))


def _equal_ids(rows: Sample, one: Ints, two: Ints) -> float:
    return 0.0 if rows.token_ids is None else float((rows.token_ids[one] == rows.token_ids[two]).mean())


def _depth(rows: Sample, bias: list[Floats], shares: dict[str, Floats], rng: np.random.Generator) -> Floats:
    """(L,) correlation of fields with the layer before at which the affinity is the observed one.

    Fields link the experts of equal rank in popularity (see `Profile`). Where two layers give a field different shares,
    less of it is common to both, so that the fields have to correlate more.
    """
    n_experts, top_k = rows.trace.n_experts, rows.trace.top_k
    n = min(len(rows.experts), observe.AFFINITY_ROWS)
    one, fresh = rng.standard_normal((2, n, n_experts))
    found = np.zeros(len(bias))
    parts = np.array([*shares.values(), np.clip(1 - sum(shares.values(), np.zeros(len(bias))), 0, 1)])
    ranked = [np.sort(layer)[::-1] for layer in bias]
    for layer in range(1, len(bias)):
        before = choose(one + ranked[layer - 1], top_k)
        table = [
            observe.affinity(before, choose(r * one + np.sqrt(1 - r * r) * fresh + ranked[layer], top_k), n_experts)
            for r in _AFFINITY_GRID
        ]
        seen = observe.affinity(rows.experts[:, layer - 1], rows.experts[:, layer], n_experts)
        common = np.sqrt(parts[:, layer] * parts[:, layer - 1]).sum()
        found[layer] = min(1.0, np.interp(seen, np.maximum.accumulate(table), _AFFINITY_GRID) / max(common, 1e-3))
    return found


def _ahead(rows: Sample, level: str, distance: int, tables: list[Floats]) -> list[float | None]:
    """Correlation of each layer's prediction with what its target layer then scores; None where there is no target."""
    seen = observe.prediction_overlap(rows, level, distance)
    n_layers = len(tables)
    return [
        None if np.isnan(o) else round(to_correlation(o, tables[(layer + distance) % n_layers]), 5)
        for layer, o in enumerate(seen)
    ]


def _gate(rows: Sample, bias: list[Floats], rng: np.random.Generator) -> tuple[Floats, Floats]:
    """(L,) sharpness and offset at which the mean highest score and, for a sigmoid, the mean score are the observed."""
    trace = rows.trace
    top, mean, n = np.zeros(trace.n_layers), np.zeros(trace.n_layers), 0
    for start, stop in observe.score_rows(rows, "scores"):
        scores = trace.scores(start, stop) / trace.score_scale
        top += scores.max(axis=-1).sum(axis=0)
        mean += scores.mean(axis=-1).sum(axis=0)
        n += len(scores)
    noise = rng.standard_normal((2048, trace.n_experts))
    sharpness, offset = np.ones(trace.n_layers), np.zeros(trace.n_layers)
    for layer, b in enumerate(bias):
        low, high = 0.0, 64.0
        for _ in range(40):
            sharpness[layer] = (low + high) / 2
            if trace.header.gate.score == "sigmoid":
                offset[layer] = _sigmoid_offset(sharpness[layer] * (noise + b), mean[layer] / n)
            logits = sharpness[layer] * (noise + b) + offset[layer]
            got = gate_scores(logits, trace.header.gate.score).max(axis=-1).mean()
            low, high = (sharpness[layer], high) if got < top[layer] / n else (low, sharpness[layer])
    return sharpness, offset


def _sigmoid_offset(logits: Floats, mean: float) -> float:
    low, high = -64.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gate_scores(logits + middle, "sigmoid").mean() < mean else (low, middle)
    return (low + high) / 2


def gate_scores(logits: Array, score: str) -> Array:
    """Gate scores of router logits (..., E): softmax over the experts, or the sigmoid of each."""
    if score == "sigmoid":
        found: Array = 1.0 / (1.0 + np.exp(-logits))
        return found
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Array = raised / raised.sum(axis=-1, keepdims=True)
    return shares


def _vocabulary(rows: Sample) -> Vocabulary | None:
    """How often ids occur, by rank at some ranks, and how much more often within a request than across requests."""
    if rows.token_ids is None:
        return None
    counts = np.sort(np.unique(rows.token_ids, return_counts=True)[1])[::-1]
    ranks = np.unique(np.geomspace(1, len(counts), VOCABULARY_POINTS).astype(np.int64))
    p = counts / counts.sum()
    new = np.ones(len(rows.token_ids), bool)  # first occurrence of its id within the request
    keys = rows.request * (int(rows.token_ids.max()) + 1) + rows.token_ids
    new[:] = False
    new[np.unique(keys, return_index=True)[1]] = True
    reuse = _reuse(p, np.bincount(rows.request), float(new.sum()))
    return Vocabulary([int(r) for r in ranks], [round(float(np.log(p[r - 1])), 5) for r in ranks], round(reuse, 5))


def _reuse(p: Floats, lengths: Ints, distinct: float) -> float:
    """The reuse at which requests of these lengths are expected to hold so many distinct ids.

    Of n tokens about n * (1 - reuse) are drawn from the frequencies, and those are distinct as ids drawn alone are.
    """

    def expected(reuse: float) -> float:
        drawn = np.maximum(lengths * (1 - reuse), 1.0)
        return float(sum((1 - np.exp(n * np.log1p(-np.minimum(p, 1 - 1e-9)))).sum() for n in drawn))

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > distinct else (low, middle)
    return low
