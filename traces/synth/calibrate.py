"""The last step of a fit: plain caches over what is drawn, brought to those over what was fitted.

Overlaps at every distance are means; how they scatter from token to token, which caches feel as well, is not fitted.
One factor on what lasts and fades makes up for it: the one of the least squared differences, over all caches.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from traces.format.layout import Array, Floats, Ints
from traces.stats.curves import CURVES, capacities
from traces.stats.observe import Sample, spread
from traces.synth.profile import FADES, GRAMS, Profile

PASSING = ("request", *(f"fade{n}" for n in FADES), "carry")
FACTORS = (0.7, 0.9, 1.1, 1.3)
POLICIES, FRACS = ("lru", "lfu", "lcp", "belady"), (0.25, 0.5, 0.75)
_LAYERS, _ROWS, _SEEDS = 6, 3000, (11, 12)
_FEW_ROWS = 800  # less says too little of the source itself

Draw = Callable[[Profile, int, int], Array]


def calibrated(profile: Profile, rows: Sample, draw: Draw) -> Profile:
    """The profile times the best factor between the ends of `FACTORS`; itself where the source is short.

    draw(profile, seed, n): (n, L, K) selections of a profile.
    """
    keep = spread(profile.n_layers, _LAYERS)
    order = tasks_in_turn(profile)
    seen = rows.experts[np.concatenate([np.flatnonzero(rows.request == i) for i in order])][:_ROWS, keep]
    thin, n = some_layers(profile, keep), len(seen)
    thin = msgspec.structs.replace(thin, requests=[profile.requests[i] for i in order])
    sizes = capacities(profile.n_experts, profile.top_k, FRACS)
    if not sizes or n < _FEW_ROWS:
        return profile
    wanted = _rates(seen, profile.n_experts, sizes)
    apart = []
    for factor in FACTORS:
        drawn = [_rates(draw(times(thin, factor), seed, n), profile.n_experts, sizes) for seed in _SEEDS]
        apart.append((np.mean(drawn, axis=0) - wanted).ravel())
    # Every hit rate is close to a line in the factor, through which the luck of a draw counts less.
    slope, start = np.polyfit(FACTORS, np.array(apart), 1)
    best = -float(slope @ start) / max(float(slope @ slope), 1e-12)
    return times(profile, float(np.clip(best, FACTORS[0], FACTORS[-1])))


def tasks_in_turn(profile: Profile) -> list[int]:
    """The profile's requests in such an order that tasks take turns: the first few are then no single task's.

    A source that lies task after task would else be judged by its first kind of text alone.
    """
    seen: dict[int, int] = {}
    turns = []
    for i, request in enumerate(profile.requests):
        turns.append((seen.get(request.task, 0), request.task, i))
        seen[request.task] = turns[-1][0] + 1
    return [i for *_, i in sorted(turns)]


def times(profile: Profile, factor: float) -> Profile:
    """Everything that lasts or fades times a factor; where shares would pass 1, those of token ids make room."""
    shares = {name: profile.share(name) * (factor if name in PASSING else 1.0) for name in profile.shares}
    ids: Floats = sum((shares[name] for name in GRAMS if name in shares), np.zeros(profile.n_layers))
    over = np.maximum(sum(shares.values(), np.zeros(profile.n_layers)) - 1.0, 0.0)
    left = np.clip(1.0 - over / np.maximum(ids, 1e-9), 0.0, 1.0)
    lasts = {name: values.tolist() for name, values in shares.items()}
    return msgspec.structs.replace(profile, shares=lasts).times(dict.fromkeys(GRAMS, left))


def some_layers(profile: Profile, keep: Ints) -> Profile:
    """A few layers of a profile, selections only: enough to judge caches, which every layer has for itself."""
    return msgspec.structs.replace(
        profile,
        n_layers=len(keep),
        bias=[profile.bias[i] for i in keep],
        depth=[0.0] * len(keep),
        ahead={},
        shares={name: [values[i] for i in keep] for name, values in profile.shares.items()},
        shared=None,
        sharpness=None,
        offset=None,
        routes=None,
    )


def _rates(experts: Array, n_experts: int, sizes: list[int]) -> Floats:
    return np.asarray(np.array([CURVES[name](experts, n_experts, sizes, None).mean(axis=1) for name in POLICIES]))
