"""Fit to figures that a paper prints: which they are, how a profile is bent to meet them, and how far it got."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from sim.base.errors import BadInput, did_you_mean
from sim.base.extras import need
from sim.base.files import read_yaml, to_struct
from traces.format.layout import Array, Floats
from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.curves import CURVES
from traces.synth.calibrate import some_layers
from traces.synth.draw import selections
from traces.synth.latent import overlap_table, to_correlation
from traces.synth.profile import Profile
from traces.synth.scale import scaled

SCHEMA = "moesim.published-routing/1"
LASTING, PASSING = ("task", "request", "fade64"), ("fade16", "fade4", "fade1", "token", "pair", "triple", "carry")
_ROWS, _WARM_ROWS, _LAYERS, _TRIES = 4000, 400, 3, 48
_COARSE = ((0.6, 1.0, 1.7), (0.05, 0.3, 1.5), (0.05, 1.0))
Rate = Annotated[float, Meta(ge=0, le=1)]


class HitCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hit rates of a per-layer cache at several sizes, in whole experts per layer."""

    experts: list[Annotated[int, Meta(ge=1)]]
    hits: list[Rate]


class PublishedFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of `published/`.

    curves: `lru`, `lfu` -> mean over layers, warm.
    accuracy: distance -> (L,) share of layer l's choice among the K highest predicted for it, null where unknown.
    readings: how the paper's words were understood.
    """

    schema: Literal["moesim.published-routing/1"]
    id: str
    source: str
    model: str
    n_layers: Annotated[int, Meta(ge=1, le=1024)]
    n_experts: Annotated[int, Meta(ge=1, le=4096)]
    top_k: Annotated[int, Meta(ge=1)]
    curves: dict[Literal["lru", "lfu"], HitCurve]
    accuracy: dict[Literal[1, 2, 3], list[Rate | None]]
    readings: list[str]


def published() -> dict[str, Path]:
    """Id -> path of the files that come with this installation."""
    folder = Path(str(resources.files("traces"))) / "synth" / "published"
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("*.yaml"))}


def load(name: str | Path) -> PublishedFigures:
    """A bundled set of figures by id, or a YAML file of the same form.

    Raises:
        BadInput: neither, or a field that does not fit.
    """
    known = published()
    path = known.get(str(name), Path(name))
    if not path.exists():
        hint = did_you_mean(str(name), known)
        raise BadInput(f"--targets, got {str(name)!r}: no such figures and no such file; {hint}")
    found = to_struct(read_yaml(path), PublishedFigures, str(path))
    for kind, curve in found.curves.items():
        sizes = curve.experts
        if len(sizes) != len(curve.hits) or min(sizes, default=0) < found.top_k or max(sizes) > found.n_experts:
            rule = "as many of one as of the other, sizes from top_k to n_experts; correct the file"
            raise BadInput(f"{path}: curves.{kind}, got {len(sizes)} sizes and {len(curve.hits)} hit rates: {rule}")
    for distance, values in found.accuracy.items():
        if len(values) != found.n_layers:
            rule = f"one per layer ({found.n_layers}); write null where it is unknown"
            raise BadInput(f"{path}: accuracy.{distance}, got {len(values)} values: {rule}")
    if found.top_k > found.n_experts:
        raise BadInput(f"{path}: top_k, got {found.top_k}: at most n_experts ({found.n_experts}); correct the file")
    return found


def fit_to(
    profile: Profile, figures: PublishedFigures, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Profile:
    """The profile, scaled to the figures' shape and bent to meet them.

    Hit rates: three factors, on the spread of popularity, on what lasts (task, request, the slowest fade) and on
    what passes (the faster fades and the token's), are searched for the least squared error (Nelder-Mead).
    Accuracies: each layer's correlation is the one that has the published overlap.
    """
    # Whole routes are the source's own: what is bent are the shares of each layer.
    own = msgspec.structs.replace(profile, routes=None)
    bent = scaled(own, figures.n_layers, figures.n_experts, figures.top_k)
    if figures.curves:
        bent = _fit_curves(bent, figures, seed, progress)
    before = bent.ahead.get("1")
    for distance, values in figures.accuracy.items():
        bent = fit_accuracy(bent, distance, values)
    if before and 1 in figures.accuracy:
        bent = carry_on(bent, before, [d for d in (2, 3) if d not in figures.accuracy])
    text = f"published targets ({figures.id}): {figures.source}; what they do not say is taken from {profile.source}"
    return msgspec.structs.replace(bent, assumptions=[*bent.assumptions, text, *figures.readings])


def bend(profile: Profile, spread: float, lasting: float, passing: float) -> Profile:
    """Biases and shares times three factors; shares that would pass 1 are brought back to it."""
    bent = profile.times(dict.fromkeys(LASTING, lasting) | dict.fromkeys(PASSING, passing))
    return msgspec.structs.replace(bent, bias=(np.array(profile.bias) * spread).round(5).tolist())


def _fit_curves(
    profile: Profile, figures: PublishedFigures, seed: int, progress: Callable[[int, int], None] | None
) -> Profile:
    need(f"a fit to the figures {figures.id}", "scipy")
    from scipy.optimize import minimize

    keep = observe.spread(profile.n_layers, _LAYERS)
    thin = some_layers(profile, keep)
    tried, total = 0, _TRIES + math.prod(len(steps) for steps in _COARSE)

    def error(logs: Floats) -> float:
        nonlocal tried
        tried += 1
        if progress:
            progress(min(tried, total), total)
        rates = cache_rates(bend(thin, *np.exp(np.clip(logs, -4, 4))), figures, seed)
        return float(sum(((np.array(rates[kind]) - curve.hits) ** 2).sum() for kind, curve in figures.curves.items()))

    # From the best corner of a coarse grid, because the simplex alone stays on the side it starts from.
    start = min(product(*(np.log(steps) for steps in _COARSE)), key=lambda corner: error(np.array(corner)))
    simplex = np.array(start) + np.vstack([np.zeros(3), np.eye(3) / 3])
    options: Any = {"maxfev": _TRIES, "initial_simplex": simplex}
    best = minimize(error, simplex[0], method="Nelder-Mead", options=options)
    return bend(profile, *np.exp(np.clip(best.x, -4, 4)))


def cache_rates(profile: Profile, figures: PublishedFigures, seed: int) -> dict[str, Floats]:
    experts = selections(profile, seed, _ROWS)
    return {kind: _warm(kind, experts, profile.n_experts, curve.experts) for kind, curve in figures.curves.items()}


def _warm(kind: str, experts: Array, n_experts: int, sizes: list[int]) -> Floats:
    """Mean hit rates over layers, without the first rows, in which caches fill."""
    n, skip = len(experts), min(_WARM_ROWS, len(experts) // 5)
    whole, cold = (CURVES[kind](rows, n_experts, sizes, None).mean(axis=1) for rows in (experts, experts[:skip]))
    return np.asarray((whole * n - cold * skip) / (n - skip))


def fit_accuracy(profile: Profile, distance: int, accuracy: list[float | None]) -> Profile:
    rng = np.random.default_rng(0)
    known = list(profile.ahead.get(str(distance)) or [None] * profile.n_layers)
    for target, wanted in enumerate(accuracy):
        source = target - distance if distance > 1 else (target - 1) % profile.n_layers
        if wanted is not None and source >= 0:
            table = overlap_table(np.array(profile.bias[target]), profile.top_k, rng)
            known[source] = round(to_correlation(wanted, table), 5)
    if distance == 1 and known[-1] is None:
        known[-1] = 0.0  # the wrap-around is part of the level: nobody measured it, so it knows nothing
    inner = known[: profile.n_layers - distance] if distance > 1 else known
    if any(value is None for value in inner):
        why = "unknown for some layers, and the source trace has no predictions to take them from"
        way = f"give every layer, or fit to a trace with next_scores_{distance}"
        raise BadInput(f"accuracy.{distance}: {why}; {way}")
    return msgspec.structs.replace(profile, ahead={**profile.ahead, str(distance): known})


def carry_on(profile: Profile, before: list[float | None], distances: list[int]) -> Profile:
    """Farther predictions of a layer gain or lose as its nearest did: none may know more from farther away."""
    nearest = profile.ahead["1"]
    ahead = dict(profile.ahead)
    for distance in distances:
        values = list(ahead.get(str(distance), ()))
        for source, value in enumerate(values):
            old, new = before[(source + distance - 1) % len(before)], nearest[(source + distance - 1) % len(before)]
            if value is not None and old and new is not None:
                values[source] = round(min(1.0, value * new / old), 5)
        if values:
            ahead[str(distance)] = values
    return msgspec.structs.replace(profile, ahead=ahead)


@dataclass(frozen=True)
class Reached:
    """One published figure beside what a drawn trace has."""

    what: str
    target: float
    reached: float


def reached(figures: PublishedFigures, trace: Trace) -> list[Reached]:
    """Every published figure beside the same of a trace, whose rows are all taken one at a time."""
    rows = observe.sample(trace, max_rows=12_000)
    found = []
    for kind, curve in figures.curves.items():
        rates = _warm(kind, rows.experts, trace.n_experts, curve.experts)
        found += [
            Reached(f"{kind.upper()} hits, {size} of {trace.n_experts} experts", target, float(rate))
            for size, target, rate in zip(curve.experts, curve.hits, rates, strict=True)
        ]
    for distance, accuracy in figures.accuracy.items():
        seen = observe.prediction_overlap(rows, f"next_scores_{distance}", distance)
        for target, wanted in enumerate(accuracy):
            if wanted is not None and target >= distance:
                what = f"predicted, distance {distance}, layer {target}"
                found.append(Reached(what, wanted, float(seen[target - distance])))
    return found
