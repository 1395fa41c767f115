"""Fit how token ids recur, without their words."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from traces.format.layout import Floats, Ints
from traces.stats import observe
from traces.stats.observe import Sample
from traces.synth.profile import Vocabulary
from traces.synth.text import Text

_SEED = 20_509_834_2  # fitting draws no luck
VOCABULARY_POINTS = 32


def vocabulary(rows: Sample) -> Vocabulary | None:
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
    plain = Vocabulary([int(r) for r in ranks], [round(float(np.log(p[r - 1])), 5) for r in ranks], round(reuse, 5))
    return _followed(plain, rows)


def _followed(plain: Vocabulary, rows: Sample) -> Vocabulary:
    """The vocabulary with as many pairs and triples of ids that come again in another request as the source has."""
    assert rows.token_ids is not None
    wanted = [observe.recurring(rows.token_ids, rows.request, rows.position, depth) for depth in (2, 3)]
    lengths = np.bincount(rows.request)

    def seen(follow: float, follow2: float, depth: int) -> float:
        text = Text(msgspec.structs.replace(plain, follow=follow, follow2=follow2), 0)
        ids = np.concatenate([text.ids(int(n), np.random.default_rng((_SEED, i))) for i, n in enumerate(lengths)])
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
    lengths = np.bincount(rows.request)

    def seen(repeat: float) -> float:
        text = Text(words, 0, repeat)
        ids = np.concatenate([text.ids(int(n), np.random.default_rng((_SEED, i))) for i, n in enumerate(lengths)])
        return observe.repeated(ids, rows.request, rows.position)

    return least(lambda repeat: seen(repeat) >= wanted, 0.95)


def least(enough: Callable[[float], bool], most: float) -> float:
    """The least number up to `most` that is enough, to about a hundredth; 0 where that is."""
    low, high = 0.0, most
    if enough(low):
        return 0.0
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


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
