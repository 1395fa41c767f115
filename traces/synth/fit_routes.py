"""Fit whole routes: what tokens that have an id, a task or a request in common share, as covariances of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from traces.format.layout import Array, Floats, Ints
from traces.stats import observe
from traces.stats.observe import LAGS, Sample, choose
from traces.synth.fit_text import least, repeats, split
from traces.synth.latent import overlap_table, to_correlation
from traces.synth.profile import FADES, Profile, RouteShares
from traces.synth.routes import WIDTH, Routes, packed
from traces.synth.streams import RequestPlan

_SEED = 20_509_834_3  # fitting draws no luck
_MOST_ROWS = 12_000  # whose scores are looked at
_FADES = FADES[:-1]
_LASTING = ("request", *(f"fade{n}" for n in _FADES))
_RANKS = {"token": WIDTH, "last": 16, "pair": 16, "new": 16}  # directions kept at most
_PLAIN = 0.1  # of what is new, so much is not in directions
_CORRECTING, _CORRECTED = (11, 12, 13, 14), (0.5, 2.0)  # half the way by each draw, as draws have luck
_FEW_ROWS, _FEW_PAIRS, _MOST_PAIRS, _MOST_SCORES = 2000, 40, 60_000, 2048
_FEW_SCORES = 0.8  # so many of a token's scores have to be known
_PAIRS_PER_ROW, _FEW_OF_ID = 6, 12
_FROM_LAG = 4  # from where on what tokens share is neither of the last id nor of the pair
_COVARIED = ("token", "token, task", "pair", "pair, task", "last")
_KIND_ROWS, _USUAL_KIND, _MOST_KIND, _SEEDS = 4000, 0.8, 0.98, (11, 12)


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


def with_routes(profile: Profile, rows: Sample, tables: list[Floats]) -> Profile:
    """A profile with whole routes; without, and with the reason among its assumptions, where the source is not enough.

    rows: what it was fitted to. tables: `overlap_table` by layer.
    """
    why, every = missing(rows), rows
    if not why and len(rows.experts) > _MOST_ROWS:
        rows = observe.sample(rows.trace, rows.requests, _MOST_ROWS)
    scores = None if why else scores_of(rows)
    if scores is None:
        text = f"drawn layer by layer, not as whole routes: the source has {why or 'few of the scores'}"
        return msgspec.structs.replace(profile, assumptions=[*profile.assumptions, text])
    seen = covariances(rows, scores)
    wanted = shared_by_class(every, tables)
    shared = dict(wanted)
    spread = spread_of_ids(rows, scores)
    repeat = 0.0 if profile.vocabulary is None else round(repeats(profile.vocabulary, every), 4)

    def made(shared: dict[str, Floats], kind: float) -> Profile:
        shares, lasting = _shares(shared, float(np.exp(-(spread**2))))
        factors, left = _factors(seen, shares, profile.n_experts)
        plan = RouteShares(
            factors={name: packed(factor) for name, factor in factors.items()},
            lasting={name: round(share, 4) for name, share in lasting.items()},
            carry=(shares["carry"] / np.maximum(shares["token"], 1e-6)).round(5).tolist(),
            rest=left.round(5).tolist(),
            shares={name: part.round(5).tolist() for name, part in shares.items()},
            spread=round(spread, 4),
            kind=kind,
            repeat=repeat,
        )
        return msgspec.structs.replace(profile, routes=plan)

    # What is drawn shares other parts of its experts than normal scores of its correlations would: that is made up for.
    for seed in _CORRECTING:
        drawn = shared_by_class(_drawn(Routes(made(shared, _USUAL_KIND), seed), rows, len(rows.experts)), tables)
        for name in shared:
            of = "id" if name == "token" else name  # no part is of an id in a task
            ratio = wanted[of].mean() / max(1e-6, drawn[of].mean())
            shared[name] = shared[name] * np.sqrt(np.clip(ratio, *_CORRECTED))
    return made(shared, _kind(made(shared, 0.0), rows))


def tables_of_routes(profile: Profile, rows: Sample) -> list[Floats]:
    """`overlap_table` by layer of the scores that are drawn as whole routes, for requests as the sample's."""
    source, rng = Routes(profile, _SEEDS[0]), np.random.default_rng(_SEED)
    drawn = np.concatenate([g for _, g in _scores_drawn(source, rows, _KIND_ROWS)])
    return [overlap_table(source.bias[i], profile.top_k, rng, drawn=drawn[:, i]) for i in range(profile.n_layers)]


def _shares(shared: dict[str, Floats], heeded: float) -> tuple[dict[str, Floats], dict[str, float]]:
    """(L,) share of the variance of each part, and of what lasts how much lasts how long.

    heeded: how much less two tokens of different ids share of what is around them than two of one id.
    """
    task = np.clip(shared["task"], 0.0, 1.0)
    lags = np.array([shared[f"lag {lag}"] for lag in LAGS])
    basis = np.array([[1.0, *(np.exp(-lag / fade) for fade in _FADES), lag == 1] for lag in LAGS])
    parts, pooled = split(basis, np.maximum(lags - task, 0.0))
    token = np.clip(shared["token"], 0.0, 1.0)
    found = {"task": task / heeded, "last": parts[:-1].sum(axis=0) / heeded}
    found["carry"] = parts[-1] ** 2 / np.maximum(token, 0.05)
    whole = sum(found.values(), np.zeros(len(task)))
    found = {name: part / np.maximum(whole, 1.0) for name, part in found.items()}
    found["token"] = np.minimum(token, np.maximum(0.0, 0.99 - whole))
    room = np.maximum(0.0, 1.0 - sum(found.values(), np.zeros(len(task))))
    pair = (shared["pair"] - shared["token"] + shared["pair, task"] - shared["token, task"]) / 2
    found["pair"] = np.clip(pair, 0.0, 0.95 * room)
    found["new"] = room - found["pair"]
    lasting = dict(zip(_LASTING, pooled[:-1] / max(1e-9, pooled[:-1].sum()), strict=True))
    return found, {name: float(share) for name, share in lasting.items()}


def _factors(seen: Covariances, shares: dict[str, Floats], n_experts: int) -> tuple[dict[str, Floats], Floats]:
    """Weights (L * E, n) of each part, and the share (L,) of what is new outside of all directions."""
    c = seen.together
    shapes = {
        "token": _positive(c["token"] - c["none"]),
        "last": _positive(c["last"] - c["task"], _RANKS["last"]),
        "pair": _positive((c["pair"] - c["token"] + c["pair, task"] - c["token, task"]) / 2, _RANKS["pair"]),
    }
    scaled = {name: _with_share(shape, shares[name], n_experts) for name, shape in shapes.items()}
    task = seen.tasks.T * np.sqrt(seen.of_task)
    mean = (task**2).sum(axis=1).reshape(-1, n_experts).mean(axis=1)
    scale = np.sqrt(shares["task"] / np.maximum(mean, 1e-6)).repeat(n_experts)[:, None]
    left = seen.whole - sum(scaled.values(), (scale * task) @ (scale * task).T)
    plain = _PLAIN * shares["new"]
    scaled["new"] = _with_share(_positive(left, noisy=False), shares["new"] - plain, n_experts)
    factors = {name: _factor(shape, _RANKS[name], n_experts) for name, shape in scaled.items()}
    return factors | {"task": scale * seen.tasks.T / np.sqrt(len(seen.tasks))}, plain


def _positive(seen: Floats, rank: int | None = None, noisy: bool = True) -> Floats:
    """The nearest covariance; if noisy, of the largest directions alone, until they have all of the variance seen."""
    values, axes = np.linalg.eigh((seen + seen.T) / 2)
    values, axes = values[::-1], axes[:, ::-1]
    kept = len(values)
    if noisy:
        kept = int(np.searchsorted(np.cumsum(np.maximum(values, 0.0)), max(values.sum(), 0.0))) + 1
    kept = min(kept, rank or kept)
    return np.asarray((axes[:, :kept] * np.maximum(values[:kept], 0.0)) @ axes[:, :kept].T)


def _with_share(shape: Floats, share: Floats, n_experts: int) -> Floats:
    """The covariance with this mean variance (L,) in each layer."""
    mean = np.diag(shape).reshape(-1, n_experts).mean(axis=1)
    scale = np.sqrt(np.maximum(share, 0.0) / np.maximum(mean, 1e-6)).repeat(n_experts)
    return np.asarray(shape * np.outer(scale, scale))


def _factor(covariance: Floats, rank: int, n_experts: int) -> Floats:
    """(L * E, n) weights in the largest directions, with all of each layer's variance."""
    values, axes = np.linalg.eigh(covariance)
    values, axes = values[::-1][:rank], axes[:, ::-1][:, :rank]
    counts = values > 1e-4 * max(values[0], 1e-9)
    factor = axes[:, counts] * np.sqrt(values[counts])
    had, has = (v.reshape(-1, n_experts).mean(axis=1) for v in (np.diag(covariance), (factor**2).sum(axis=1)))
    return np.asarray(factor * np.sqrt(np.maximum(had, 0.0) / np.maximum(has, 1e-9)).repeat(n_experts)[:, None])


def _kind(profile: Profile, rows: Sample) -> float:
    """How much ids of a kind have in common, so that tokens of other ids foretell as much as in the source."""
    assert profile.routes is not None
    plan, some = profile.routes, slice(0, _KIND_ROWS)
    assert rows.token_ids is not None
    ids = rows.token_ids[some]
    wanted = observe.foretold(replace(rows, experts=rows.experts[some], request=rows.request[some], token_ids=ids))

    def drawn(kind: float) -> float:
        made = msgspec.structs.replace(profile, routes=msgspec.structs.replace(plan, kind=kind))
        return float(np.mean([observe.foretold(_drawn(Routes(made, seed), rows, _KIND_ROWS)) for seed in _SEEDS]))

    return round(least(lambda kind: drawn(kind) >= wanted, _MOST_KIND), 4)


def _drawn(source: Routes, rows: Sample, most: int) -> Sample:
    """Rows drawn, of requests as those of another sample, its first ones."""
    parts = [(choose(g + source.bias, source.profile.top_k), ids) for ids, g in _scores_drawn(source, rows, most)]
    experts, token_ids = (np.concatenate(part) for part in zip(*parts, strict=True))
    cut = {name: getattr(rows, name)[: len(experts)] for name in ("request", "task", "position")}
    return replace(rows, experts=experts, token_ids=token_ids, **cut)


def _scores_drawn(source: Routes, rows: Sample, most: int) -> Iterator[tuple[Array, Array]]:
    """Token ids (n,) and g (n, L, E), request by request, of as many rows as are wanted or the sample has."""
    at, n = 0, min(most, len(rows.experts))
    for index, like in enumerate(rows.requests):
        if at >= n:
            return
        plan = RequestPlan(index, like.prompt_len, like.n_decode, int(rows.task[at]), "")
        length, ids = min(like.n_rows, n - at), source.tokens(plan)
        yield ids[:length], source.scores(plan, ids).take(length)
        at += length
