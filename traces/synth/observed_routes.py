"""What a source shows of whole routes: covariances of all layers, and what rows share, by class of pairs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traces.format.layout import Array, Floats, Ints
from traces.stats import observe
from traces.stats.observe import LAGS, Sample
from traces.synth.latent import to_correlation

_SEED = 20_509_834_3  # pairs are the same in every fit
_FEW_ROWS, _FEW_PAIRS, _MOST_PAIRS, _MOST_SCORES = 2000, 40, 60_000, 2048
_FEW_SCORES = 0.8  # so many of a token's scores have to be known
_PAIRS_PER_ROW, _FEW_OF_ID = 6, 12
_FROM_LAG = 4  # from where on what tokens share is neither of the last id nor of the pair
_COVARIED = ("token", "token, task", "pair", "pair, task", "last")


class Covariances(NamedTuple):
    """Covariances (L * E, L * E) of pairs of rows by class, and of all rows.

    tasks: (tasks, L * E) mean scores. of_task: (tasks,) share of the rows.
    """

    together: dict[str, Floats]
    whole: Floats
    tasks: Floats
    of_task: Floats


def missing(rows: Sample) -> str:
    """What a source lacks for whole routes, in words; empty if nothing."""
    trace = rows.trace
    lacks = {
        "no token ids": rows.token_ids is None,
        "no gate scores": "scores" not in trace.levels,
        f"fewer than {_FEW_ROWS:,} tokens, or one request": len(rows.experts) < _FEW_ROWS or len(rows.requests) < 2,
        f"more than {_MOST_SCORES:,} scores per token": trace.n_layers * trace.n_experts > _MOST_SCORES,
    }
    return next((text for text, missing in lacks.items() if missing), "")


def scores_of(rows: Sample) -> Array | None:
    """(n, L, E) what the gate took its scores from: of mean 0 and, in each layer, variance 1. None if few are known."""
    trace = rows.trace
    found = np.concatenate([trace.scores(r.first_row, r.end_row) for r in rows.requests]).astype(np.float64)
    found /= trace.score_scale
    if (found > 0).mean() < _FEW_SCORES:
        return None
    found = np.clip(found, 0.5 * found[found > 0].min(), 1 - 1e-6)
    found = np.log(found / (1 - found) if trace.header.gate.score == "sigmoid" else found)
    found -= found.mean(axis=-1, keepdims=True)
    found -= found.mean(axis=0)
    found /= np.sqrt(np.maximum(found.var(axis=0).mean(axis=-1), 1e-9))[:, None]
    return found.astype(np.float32)


def covariances(rows: Sample, scores: Array) -> Covariances:
    """What pairs of every class have in common."""
    flat, tasks = scores.reshape(len(scores), -1), rows.task.any()
    pairs = _pairs(rows)
    far = [pairs[f"lag {lag}"] for lag in LAGS if lag >= _FROM_LAG]
    pairs["last"] = np.concatenate([one for one, _ in far]), np.concatenate([two for _, two in far])
    together = {}
    for name in _COVARIED:
        one, two = pairs[name]
        product = flat[one].T @ flat[two] / max(1, len(one))
        together[name] = np.zeros_like(product) if len(one) < _FEW_PAIRS else (product + product.T) / 2
    n_tasks = max(1, len(rows.trace.requests.tasks))
    together["task"] = together["none"] = np.zeros((flat.shape[1],) * 2)
    means = np.zeros((n_tasks, flat.shape[1]))
    if tasks:
        together["task"], together["none"], seen = _of_tasks(rows, flat)
        means[: len(seen)] = seen
    of_task = np.bincount(rows.task, minlength=n_tasks) / len(rows.task)
    return Covariances(together, flat.T @ flat / len(flat), means, of_task)


def _pairs(rows: Sample) -> dict[str, tuple[Ints, Ints]]:
    """Pairs of rows by class: of one task, with the same id, after the same id, and by lag in a request."""
    assert rows.token_ids is not None
    rng = np.random.default_rng(_SEED)
    ids, tasks, start = rows.token_ids, rows.task.any(), rows.position == 0
    one, two = observe.far_pairs(rows, True, rng)
    fits = (ids[one] != ids[two]) & tasks
    found = {"task": (one[fits], two[fits])}
    one, two = observe.id_pairs(rows, _PAIRS_PER_ROW, rng)
    before = np.where(start, -1, np.roll(ids, 1))
    alike = (before[one] == before[two]) & ~start[one]
    within = (rows.task[one] == rows.task[two]) & tasks
    for name, fits in {
        "id": ~alike,
        "token": ~within & ~alike,
        "token, task": within & ~alike,
        "pair": ~within & alike,
        "pair, task": within & alike,
    }.items():
        found[name] = one[fits], two[fits]
    for lag in LAGS:
        later, earlier = observe.lag_pairs(rows, lag)
        fits = ids[later] != ids[earlier]
        found[f"lag {lag}"] = later[fits], earlier[fits]
    return found


def shared_by_class(rows: Sample, tables: list[Floats]) -> dict[str, Floats]:
    """(L,) correlation of each class of pairs; nothing where there are few."""
    found = {}
    for name, (one, two) in _pairs(rows).items():
        seen = observe.overlap(rows, one[:_MOST_PAIRS], two[:_MOST_PAIRS])
        far = [to_correlation(o, t) for o, t in zip(seen, tables, strict=True)]
        found[name] = np.zeros(len(tables)) if len(one) < _FEW_PAIRS else np.array(far)
    return found


def _of_tasks(rows: Sample, flat: Array) -> tuple[Floats, Floats, Floats]:
    """Covariance of rows of different requests, of one task, and of two: of all such pairs, from sums; tasks' means."""
    sums = np.zeros((rows.request.max() + 1, flat.shape[1]))
    np.add.at(sums, rows.request, flat)
    counts = np.bincount(rows.request).astype(float)
    task = rows.task[np.unique(rows.request, return_index=True)[1]]
    of_task = np.array([sums[task == t].sum(axis=0) for t in range(task.max() + 1)])
    n_of_task = np.array([counts[task == t].sum() for t in range(task.max() + 1)])
    same, n_same = of_task.T @ of_task - sums.T @ sums, (n_of_task**2).sum() - (counts**2).sum()
    whole = of_task.sum(axis=0)
    other, n_other = np.outer(whole, whole) - of_task.T @ of_task, counts.sum() ** 2 - (n_of_task**2).sum()
    means = of_task / np.maximum(n_of_task, 1.0)[:, None]
    return same / max(n_same, 1.0), other / max(n_other, 1.0), means


def spread_of_ids(rows: Sample, scores: Array) -> float:
    """How much ids differ in what they heed: the deviation of the logarithm of how far an id's rows scatter."""
    assert rows.token_ids is not None
    order = np.argsort(rows.token_ids, kind="stable")
    flat, seen = scores.reshape(len(scores), -1), []
    for same in np.split(order, np.flatnonzero(np.diff(rows.token_ids[order])) + 1):
        if len(same) >= _FEW_OF_ID:
            squares = ((flat[same] - flat[same].mean(axis=0)) ** 2).sum(axis=1)
            # The mean of so few scatters by itself; what is left is the id's.
            seen.append((np.log(squares.mean()), (squares.std() / squares.mean()) ** 2 / len(same)))
    if len(seen) < 2:
        return 0.0
    values, luck = np.array(seen).T
    return 0.5 * float(np.sqrt(max(0.0, values.var() - luck.mean())))
