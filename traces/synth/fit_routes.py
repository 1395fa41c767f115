"""Fit whole routes: what tokens that have an id, a task or a request in common share, as covariances of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from traces.format.layout import Array, Floats
from traces.stats import observe
from traces.stats.observe import LAGS, Sample, choose
from traces.synth.fit_text import least, repeats, split
from traces.synth.latent import overlap_table
from traces.synth.observed_routes import Covariances, covariances, missing, scores_of, shared_by_class, spread_of_ids
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
_KIND_ROWS, _USUAL_KIND, _MOST_KIND, _SEEDS = 4000, 0.8, 0.98, (11, 12)


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
    found: Floats = (axes[:, :kept] * np.maximum(values[:kept], 0.0)) @ axes[:, :kept].T
    return found


def _with_share(shape: Floats, share: Floats, n_experts: int) -> Floats:
    """The covariance with this mean variance (L,) in each layer."""
    mean = np.diag(shape).reshape(-1, n_experts).mean(axis=1)
    scale = np.sqrt(np.maximum(share, 0.0) / np.maximum(mean, 1e-6)).repeat(n_experts)
    found: Floats = shape * np.outer(scale, scale)
    return found


def _factor(covariance: Floats, rank: int, n_experts: int) -> Floats:
    """(L * E, n) weights in the largest directions, with all of each layer's variance."""
    values, axes = np.linalg.eigh(covariance)
    values, axes = values[::-1][:rank], axes[:, ::-1][:, :rank]
    counts = values > 1e-4 * max(values[0], 1e-9)
    factor = axes[:, counts] * np.sqrt(values[counts])
    had, has = (v.reshape(-1, n_experts).mean(axis=1) for v in (np.diag(covariance), (factor**2).sum(axis=1)))
    found: Floats = factor * np.sqrt(np.maximum(had, 0.0) / np.maximum(has, 1e-9)).repeat(n_experts)[:, None]
    return found


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
