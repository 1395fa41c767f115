"""Fit a profile to a trace: each observed overlap becomes the correlation that would produce it."""

from __future__ import annotations

import msgspec
import numpy as np

from sim.base.extras import need
from traces.format.header import REPEATING
from traces.format.layout import Floats, Ints
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.stats import observe
from traces.stats.figures import recorded_distances
from traces.stats.observe import LAGS, Sample, choose
from traces.synth.calibrate import calibrated
from traces.synth.draw import selections
from traces.synth.fit_routes import tables_of_routes, with_routes
from traces.synth.fit_text import split, vocabulary
from traces.synth.latent import GRID, gate_scores, halved, overlap_table, popularity_bias, to_correlation
from traces.synth.profile import ALONE, FADES, FIELDS, GRAMS, TAUGHT, Lengths, Profile, with_target
from traces.synth.routes import WIDTH
from traces.synth.text import CONTEXT_KINDS

_SEED = 20_509_834_2  # of the tables: fitting draws no luck
_SCORE_ROWS = 6_000
_FEW_PAIRS = 40  # of rows with the same ids say nothing
_FAR = 3  # layers a third of the model apart tell how much all layers have in common
_AFFINITY_GRID = GRID[[0, 2, 4, 6, 8, 10, 12, 15]]
MAX_REQUESTS = 1024  # request lengths kept in a profile
SPARSEMIXER = "the source's sparsemixer weights cannot be drawn from scores: weights here are the softmax scores"


def fit(trace: Trace, requests: list[Request] | None = None, routes: bool = True) -> Profile:
    """The profile of a trace, or of some of its requests. Levels that the trace lacks stay absent.

    routes: with whole routes, which take most of the time and which no other shape is drawn by.

    Raises:
        BadInput: selections that are not sound (`Trace.experts`); no scipy.
    """
    need(f"a fit of trace {trace.name}", "scipy")
    rows = observe.sample(trace, requests)
    rng = np.random.default_rng(_SEED)
    share = observe.popularity(rows)
    bias = [popularity_bias(layer, trace.top_k, rng) for layer in share]
    tables = [overlap_table(b, trace.top_k, rng) for b in bias]
    gate, tasks = trace.header.gate, list(trace.requests.tasks)
    assumptions = [SPARSEMIXER] if gate.score == "sparsemixer" else []
    assumptions += [ALONE] if trace.of_one_prompt else []
    assumptions += [TAUGHT] if REPEATING in trace.header.labels else []
    sharpness, offset = _gate(rows, bias, rng) if "scores" in trace.levels else (None, None)
    store = [
        Lengths(r.prompt_len, r.n_decode, tasks.index(r.task) if tasks else 0, r.split == "store")
        for r in rows.requests[:MAX_REQUESTS]
    ]
    shares = _shares(rows, tables, rng)
    near = _linked(rows, bias, shares, 1, rng)
    core = _core(rows, bias, shares, near, rng)
    depth = np.clip((near - core) / max(1e-6, 1 - core), 0.0, 1.0)
    depth[0] = 0.0
    found = Profile(
        source=trace.name,
        n_layers=trace.n_layers,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        score="sigmoid" if gate.score == "sigmoid" else "softmax",
        renormalised=gate.renormalised,
        scaling=gate.scaling,
        bias=[_rounded(b) for b in bias],
        shares={k: _rounded(v) for k, v in shares.items()},
        core=round(core, 5),
        depth=_rounded(depth),
        ahead={},
        shared=None,
        sharpness=None if sharpness is None else _rounded(sharpness),
        offset=None if offset is None else _rounded(offset),
        vocabulary=vocabulary(rows),
        embedding_width=WIDTH if rows.token_ids is not None else 0,
        tasks=tasks,
        requests=store,
        assumptions=assumptions,
    )
    # Where ids are known they bring most of what caches feel, and leave no share to lend to anything else.
    if rows.token_ids is None:
        found = calibrated(found, rows, selections)
    elif routes:
        found = with_routes(found, rows, tables)
        if found.routes is not None:
            tables = tables_of_routes(found, rows)
    ahead = {str(d): _ahead(rows, f"next_scores_{d}", d, tables) for d in recorded_distances(trace)}
    ahead = {d: known for d, known in ahead.items() if any(r is not None for r in known)}  # a level may have no rows
    shared = _ahead(rows, "shared_scores", 1, tables) if "shared_scores" in trace.levels else [None]
    return msgspec.structs.replace(found, ahead=ahead, shared=shared if any(r is not None for r in shared) else None)


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
    grams = _of_grams(rows, tables, task, rng)
    token = grams[0]
    pairs = {lag: observe.lag_pairs(rows, lag) for lag in LAGS}
    lags = [lag for lag in LAGS if len(pairs[lag][0])]
    seen = np.array([correlations(pairs[lag]) for lag in lags]).reshape(len(lags), len(tables))
    equal = np.array([_equal_ids(rows, *pairs[lag]) for lag in lags])
    n_lasting = 1 + len(FADES)
    basis = np.array([[1.0, *(np.exp(-lag / fade) for fade in FADES)] for lag in lags]).reshape(len(lags), n_lasting)
    if rows.token_ids is not None:
        basis[:, -1] = [lag == 1 for lag in lags]  # what a token carries on of the one before, not a field that fades
    shares = np.zeros((len(FIELDS), len(tables)))
    shares[0], shares[1 + n_lasting : -1] = task, grams
    if lags:
        shares[1 : 1 + n_lasting], _ = split(basis, np.maximum(seen - task - np.outer(equal, token), 0.0))
    if rows.token_ids is not None:  # seen at lag 1 is sqrt(token * carry)
        shares[-1] = np.clip(shares[n_lasting], 0.0, None) ** 2 / np.maximum(token, 0.05)
        shares[n_lasting] = 0.0
    # Measured apart, they may pass 1 by a little; tokens with equal ids also share what stands before them, so that
    # the shares of the ids are the ones that are too large, those of three of them first.
    for i in reversed(range(1 + n_lasting, len(FIELDS) - 1)):
        others = shares.sum(axis=0) - shares[i]
        shares[i] = np.clip(shares[i], 0.0, np.maximum(0.0, 1.0 - others))
    shares /= np.maximum(shares.sum(axis=0), 1.0)
    return dict(zip(FIELDS, shares, strict=True))


def _of_grams(rows: Sample, tables: list[Floats], task: Floats, rng: np.random.Generator) -> Floats:
    """(3, L) shares of the last id, the last two and the last three: what each more id adds to the correlation."""
    found = np.zeros((len(GRAMS), len(tables)))
    reached = np.zeros(len(tables))
    for i in range(len(GRAMS)):
        one, two = observe.gram_pairs(rows, i + 1, rng)
        if len(one) < _FEW_PAIRS:
            break
        seen = observe.overlap(rows, one, two)
        of_one_task = float((rows.task[one] == rows.task[two]).mean())
        whole = np.array([to_correlation(o, t) for o, t in zip(seen, tables, strict=True)]) - of_one_task * task
        whole = np.clip(whole, reached, np.maximum(reached, 1.0 - task))
        # Of two contexts that differ, one in so many is of the same kind all the same.
        found[i] = whole - reached
        if i:
            found[i] = np.minimum(found[i] * CONTEXT_KINDS / (CONTEXT_KINDS - 1), found[i] + found[0])
            found[0] -= found[i] - (whole - reached)
        reached = whole
    return found


def _equal_ids(rows: Sample, one: Ints, two: Ints) -> float:
    return 0.0 if rows.token_ids is None else float((rows.token_ids[one] == rows.token_ids[two]).mean())


def _linked(
    rows: Sample, bias: list[Floats], shares: dict[str, Floats], lag: int, rng: np.random.Generator, every: int = 1
) -> Floats:
    """(L,) correlation of a layer's fields with those `lag` layers before at which the affinity is the observed one.

    nan where it was not looked for: in the first layers, and where `every` passes over.

    Fields link the experts of equal rank in popularity (see `Profile`). Where two layers give a field different shares,
    less of it is common to both, so that the fields have to correlate more.
    """
    n_experts, top_k = rows.trace.n_experts, rows.trace.top_k
    n = min(len(rows.experts), observe.AFFINITY_ROWS)
    one, fresh = rng.standard_normal((2, n, n_experts))
    found = np.full(len(bias), np.nan)
    parts = np.array([*shares.values(), np.clip(1 - sum(shares.values(), np.zeros(len(bias))), 0, 1)])
    ranked = [np.sort(layer)[::-1] for layer in bias]
    for layer in range(lag, len(bias), every):
        before = choose(one + ranked[layer - lag], top_k)
        table = [
            observe.affinity(before, choose(r * one + np.sqrt(1 - r * r) * fresh + ranked[layer], top_k), n_experts)
            for r in _AFFINITY_GRID
        ]
        seen = observe.affinity(rows.experts[:, layer - lag], rows.experts[:, layer], n_experts)
        common = np.sqrt(parts[:, layer] * parts[:, layer - lag]).sum()
        found[layer] = min(1.0, np.interp(seen, np.maximum.accumulate(table), _AFFINITY_GRID) / max(common, 1e-3))
    return found


def _core(rows: Sample, bias: list[Floats], shares: dict[str, Floats], near: Floats, rng: np.random.Generator) -> float:
    """Share of the fields that all layers have in common, so that layers far apart tell as much of one another as seen.

    Layers l and m correlate with core + (1 - core) * (the product of depths between them).
    """
    lag = max(2, len(bias) // _FAR)
    if lag >= len(bias):
        return 0.0
    far = _linked(rows, bias, shares, lag, rng, every=max(1, (len(bias) - lag) // 6))
    at = np.flatnonzero(~np.isnan(far))

    def expected(core: float) -> float:
        depth = np.clip((near - core) / (1 - core), 0.0, 1.0)
        return float(np.mean([core + (1 - core) * np.prod(depth[layer - lag + 1 : layer + 1]) for layer in at]))

    wanted = far[at].mean()
    return 0.0 if expected(0.0) >= wanted else halved(lambda core: expected(core) < wanted, 0.0, 0.999, 30)[0]


def _read(rows: Sample, level: str) -> list[tuple[int, int]]:
    """Rows of every so-many-th request that hold a level.

    `observe.score_rows` takes more, and evenly over the tasks; to read those here would move every drawn trace a
    little, and all that was simulated on one.
    """
    runs = observe.level_rows(rows, level, _SCORE_ROWS)
    every = max(1, -(-sum(stop - start for start, stop, _ in runs) // _SCORE_ROWS))
    return [(start, stop) for start, stop, _ in runs[::every]]


def _ahead(rows: Sample, level: str, distance: int, tables: list[Floats]) -> list[float | None]:
    """Correlation of each layer's prediction with what its target layer then scores; None where there is no target.

    A target that no request shows (the next token's, where all are of one token) is predicted as the others are; where
    none is shown, nothing is.
    """
    n_layers = len(tables)
    n_targets = with_target(level, distance, n_layers)
    seen = observe.prediction_overlap(rows, level, distance, _read(rows, level))[:n_targets]
    known = {
        layer: round(to_correlation(o, tables[(layer + distance) % n_layers]), 5)
        for layer, o in enumerate(seen)
        if not np.isnan(o)
    }
    mean = round(sum(known.values()) / len(known), 5) if known else None
    return [known.get(layer, mean) if layer < n_targets else None for layer in range(n_layers)]


def _gate(rows: Sample, bias: list[Floats], rng: np.random.Generator) -> tuple[Floats, Floats]:
    """(L,) sharpness and offset at which the mean highest score and, for a sigmoid, the mean score are the observed."""
    trace = rows.trace
    top, mean, n = np.zeros(trace.n_layers), np.zeros(trace.n_layers), 0
    for start, stop in _read(rows, "scores"):
        scores = trace.scores(start, stop) / trace.score_scale
        top += scores.max(axis=-1).sum(axis=0)
        mean += scores.mean(axis=-1).sum(axis=0)
        n += len(scores)
    noise, score = rng.standard_normal((2048, trace.n_experts)), trace.header.gate.score
    sharpness, offset = np.ones(trace.n_layers), np.zeros(trace.n_layers)
    for layer, b in enumerate(bias):

        def too_flat(sharp: float, layer: int = layer, scores: Floats = noise + b) -> bool:
            sharpness[layer] = sharp
            if score == "sigmoid":
                offset[layer] = _sigmoid_offset(sharp * scores, mean[layer] / n)
            return bool(gate_scores(sharp * scores + offset[layer], score).max(axis=-1).mean() < top[layer] / n)

        halved(too_flat, 0.0, 64.0, 40)
    return sharpness, offset


def _sigmoid_offset(logits: Floats, mean: float) -> float:
    return sum(halved(lambda offset: gate_scores(logits + offset, "sigmoid").mean() < mean, -64.0, 64.0, 40)) / 2
