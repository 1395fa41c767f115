"""Token ids without words: how often each occurs, and how often a stretch of them comes again."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from traces.format.layout import Ints
from traces.synth.profile import Vocabulary

CONTEXT_KINDS = 4  # that ids before a token are of: what is routed alike needs not be the very same text
SUCCESSORS = 4  # that an id often has


class Text:
    """Draws the ids of requests. What often follows an id, or two, is the same in all of them: the seed decides.

    repeat: probability that a stretch which comes again in its request goes on.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int, repeat: float = 0.0) -> None:
        self.vocabulary, self.seed, self.repeat = vocabulary, seed, repeat
        self.frequencies = vocabulary.frequencies()
        self._cumulated = np.cumsum(self.frequencies)[:-1].tolist()
        self._known: dict[tuple[int, int, int], int] = {}

    def ids(self, n: int, rng: np.random.Generator) -> Ints:
        """(n,) ids: drawn from the frequencies, or what often follows, or one that the request already had."""
        ids = np.searchsorted(np.cumsum(self.frequencies), rng.random(n) * (1 - 1e-12), side="right")
        again, back = rng.random(n) < self.vocabulary.reuse, rng.random(n)
        drawn = np.minimum(ids, len(self.frequencies) - 1).tolist()
        follow, which = rng.random(n).tolist(), (SUCCESSORS * rng.random(n) ** 2).astype(int).tolist()
        goes_on = (rng.random(n) < self.repeat).tolist() if self.repeat else [False] * n
        one, two = self.vocabulary.follow, self.vocabulary.follow2
        copied = n  # what comes again, as far as it has come
        for i in range(1, n):  # in order: what is repeated may itself be a repetition
            if copied < n and goes_on[i]:
                copied += 1
                drawn[i] = drawn[copied]
                continue
            copied = n
            if i > 1 and follow[i] < two:
                drawn[i] = self._successor(drawn[i - 2], drawn[i - 1], 0)
            elif two <= follow[i] < two + one:
                drawn[i] = self._successor(-1, drawn[i - 1], 1 + which[i])
            elif again[i]:
                copied = int(back[i] * i)
                drawn[i] = drawn[copied]
        return np.array(drawn, np.int64)

    def _successor(self, before: int, last: int, which: int) -> int:
        """The id that often follows: over all contexts as frequent as ids are."""
        key = before, last, which
        if key not in self._known:
            if len(self._known) > 1 << 16:
                self._known.clear()
            mixed = int(hashed(np.array([before]), np.array([last]), 16 * self.seed + which)[0])
            self._known[key] = bisect_right(self._cumulated, (mixed % 2**40) / 2**40)
        return self._known[key]


def hashed(one: Ints, two: Ints, salt: int) -> Ints:
    """Whole numbers from pairs of whole numbers, spread over 0 to 2**62: the same on every machine."""
    x = one.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + two.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    x += np.uint64((salt * 0x165667B19E3779F9) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(((x ^ (x >> np.uint64(31))) >> np.uint64(2)).astype(np.int64))
