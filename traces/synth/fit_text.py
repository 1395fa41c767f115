"""Fit how token ids recur, without their words."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from traces.format.layout import Floats, Ints
from traces.stats import observe
from traces.stats.observe import Sample
from traces.synth.latent import halved
from traces.synth.profile import Vocabulary
from traces.synth.text import Text

_SEED = 20_509_834_2  # fitting draws no luck
VOCABULARY_POINTS = 32
_POOL = 0.7  # how much all layers weigh in the shares of one


def vocabulary(rows: Sample) -> Vocabulary | None:
    """How often ids occur, by rank at some ranks, and how much more often within a request than across requests."""
    if rows.token_ids is None:
        return None
    counts = np.sort(np.unique(rows.token_ids, return_counts=True)[1])[::-1]
    ranks = np.unique(np.geomspace(1, len(counts), VOCABULARY_POINTS).astype(np.int64))
    p = counts / counts.sum()
    keys = rows.request * (int(rows.token_ids.max()) + 1) + rows.token_ids  # of an id within its request
    reuse = _reuse(p, np.bincount(rows.request), float(len(np.unique(keys))))
    plain = Vocabulary([int(r) for r in ranks], [round(float(np.log(p[r - 1])), 5) for r in ranks], round(reuse, 5))
    return _followed(plain, rows)


def _followed(plain: Vocabulary, rows: Sample) -> Vocabulary:
    """The vocabulary with as many pairs and triples of ids that come again in another request as the source has."""
    assert rows.token_ids is not None
    wanted = [observe.recurring(rows.token_ids, rows.request, rows.position, depth) for depth in (2, 3)]

    def seen(follow: float, follow2: float, depth: int) -> float:
        ids = _drawn(Text(msgspec.structs.replace(plain, follow=follow, follow2=follow2), 0), rows)
        return observe.recurring(ids, rows.request, rows.position, depth)

    follow = follow2 = 0.0
    for _ in range(2):  # either adds to what the other is measured by
        follow = least(lambda x: seen(x, follow2, 2) >= wanted[0], 1.0 - follow2)  # noqa: B023 - called at once
        follow2 = least(lambda x: seen(follow, x, 3) >= wanted[1], 1.0 - follow)  # noqa: B023
    return msgspec.structs.replace(plain, follow=round(follow, 4), follow2=round(follow2, 4))


def repeats(words: Vocabulary, rows: Sample) -> float:
    """How often a stretch that comes again goes on, so that as many pairs of ids come again in their request."""
    assert rows.token_ids is not None
    wanted = observe.repeated(rows.token_ids, rows.request, rows.position)

    def enough(repeat: float) -> bool:
        return observe.repeated(_drawn(Text(words, 0, repeat), rows), rows.request, rows.position) >= wanted

    return least(enough, 0.95)


def _drawn(text: Text, rows: Sample) -> Ints:
    """(n,) ids drawn for requests as long as the sample's."""
    lengths = enumerate(np.bincount(rows.request))
    return np.concatenate([text.ids(int(n), np.random.default_rng((_SEED, i))) for i, n in lengths])


def split(basis: Floats, left: Floats) -> tuple[Floats, Floats]:
    """(parts, L) shares, none negative, whose sums by `basis` (lags, parts) are nearest to what is left (lags, L); and
    those of the mean layer.

    Fading fields are hard to tell apart, and layers that split them differently would have little in common: each layer
    is drawn towards what all of them together say.
    """
    from scipy.optimize import nnls

    pooled, _ = nnls(basis, left.mean(axis=1))
    both = np.vstack([basis, _POOL * np.eye(len(pooled))])
    return np.array([nnls(both, np.concatenate([layer, _POOL * pooled]))[0] for layer in left.T]).T, pooled


def least(enough: Callable[[float], bool], most: float) -> float:
    """The least number up to `most` that is enough, to about a hundredth; 0 where that is."""
    return 0.0 if enough(0.0) else halved(lambda x: not enough(x), 0.0, most, 7)[1]


def _reuse(p: Floats, lengths: Ints, distinct: float) -> float:
    """The reuse at which requests of these lengths are expected to hold so many distinct ids.

    Of n tokens about n * (1 - reuse) are drawn from the frequencies, and those are distinct as ids drawn alone are.
    """

    def expected(reuse: float) -> float:
        drawn = np.maximum(lengths * (1 - reuse), 1.0)
        return float(sum((1 - np.exp(n * np.log1p(-np.minimum(p, 1 - 1e-9)))).sum() for n in drawn))

    return halved(lambda reuse: expected(reuse) > distinct, 0.0, 1.0, 20)[0]
