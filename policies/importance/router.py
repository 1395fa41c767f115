"""The expert-cache router of Importance-Driven Expert Scheduling (arXiv 2508.18983, section 5.1, Algorithm 1).

Scores are the exact integers of a trace; alpha is compared as an integer number of millionths, so that no threshold
depends on rounding. All functions see the tokens of one layer in one decode iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.policy import draws_of, shares_of, take

Score = int | NDArray[np.int64]  # of one expert, or of many at once

UNNAMED = -1  # below every score
UNIT = 1_000_000  # alpha in millionths: (1 + alpha) x beta stays a whole number


class Thresholds:
    """T = (1 + alpha) beta, L = beta, R = (1 - alpha) beta of Algorithm 1, line 4.

    Args:
        rule: `text` (section 5.1), `alg1` (Algorithm 1) or `code` (goingshr/SMoE). They differ at the ends: a score
            equal to T belongs to no set in Algorithm 1 and is low here as in the text, top in the code; the (k+1)-th
            expert itself, whose score is beta, is an alternative in the text alone.
    """

    def __init__(self, alpha: float, rule: str) -> None:
        self._alpha = round(alpha * UNIT)
        self._rule = rule

    def is_top(self, score: Score, beta: Score) -> Any:
        """Top-score: must be computed as it is."""
        over: Any = score * UNIT - (UNIT + self._alpha) * beta
        return over >= 0 if self._rule == "code" else over > 0

    def is_alternative(self, score: Score, beta: Score) -> Any:
        """Close enough below beta to stand in for a low-score expert."""
        above: Any = score * UNIT - (UNIT - self._alpha) * beta
        if self._rule == "text":
            return (above >= 0) & (score <= beta)
        return (above > 0 if self._rule == "code" else above >= 0) & (score < beta)


class Token(NamedTuple):
    """A token of a batch at one layer, as Algorithm 1 sees it."""

    scores: list[int]
    chosen: list[int]  # in router order
    top: list[int]  # those of them that must be computed as they are
    near: list[int]  # alternatives to the others, by id

    @staticmethod
    def of(scores: Sequence[int], chosen: Sequence[int], thresholds: Thresholds) -> Token:
        """One token at one layer."""
        return tokens_of(np.array([[scores]], dtype=np.float64), np.array([[chosen]], dtype=np.int64), thresholds)[0][0]


def beta_of(row: NDArray[np.int64], top_k: int) -> NDArray[np.int64]:
    """The (k+1)-th highest of the last axis, [..., 1]; with no such expert 0: nothing can replace anybody."""
    if top_k >= row.shape[-1]:
        return np.zeros((*row.shape[:-1], 1), dtype=np.int64)
    return np.sort(row, axis=-1)[..., -top_k - 1, None]


def tokens_of(scores: NDArray[np.float64], ids: NDArray[np.int64], thresholds: Thresholds) -> list[list[Token]]:
    """By layer a batch's tokens, of gate scores [n, L, E] and the experts chosen [n, L, K]."""
    row = scores.astype(np.int64).swapaxes(0, 1)
    chosen = ids.swapaxes(0, 1)
    beta = beta_of(row, ids.shape[2])
    top = thresholds.is_top(np.take_along_axis(row, chosen, 2), beta)
    near = thresholds.is_alternative(row, beta)
    np.put_along_axis(near, chosen, False, axis=2)
    return [
        [
            Token(one, experts, [e for e, is_top in zip(experts, tops, strict=True) if is_top], others)
            for one, experts, tops, others in zip(*layer, strict=True)
        ]
        for layer in zip(row.tolist(), chosen.tolist(), top.tolist(), _places(near), strict=True)
    ]


def _places(chosen: NDArray[np.bool_]) -> list[list[list[int]]]:
    """Where each row [L, n, E] is true."""
    return [[[e for e, is_near in enumerate(row) if is_near] for row in layer] for layer in chosen.tolist()]


Roles = tuple[list[int], list[int], list[int]]
"""What Algorithm 1 makes of one layer's experts for a token that is alone: who must be computed as they are, in router
order; the other chosen ones, who score low; and the alternatives to these, those first that are taken first."""


class LoneToken:
    """The router for one token, all layers in one go: with nobody to share experts with, nothing is coupled or
    gathered, and who replaces whom rests on what is on the GPU alone."""

    def __init__(self, thresholds: Thresholds, rule: str, top_k: int) -> None:
        self._thresholds = thresholds
        self._first_found = rule == "code"
        self._all_low = rule == "alg1"
        self._top_k = top_k

    def roles(self, scores: NDArray[np.float64], ids: NDArray[np.int64]) -> list[Roles]:
        """By layer, of gate scores [1, L, E] and the experts chosen [1, L, K]."""
        row, chosen = scores[0].astype(np.int64), ids[0]
        beta = beta_of(row, self._top_k)
        top = self._thresholds.is_top(np.take_along_axis(row, chosen, 1), beta)
        near = self._thresholds.is_alternative(row, beta)
        np.put_along_axis(near, chosen, False, axis=1)
        top_first = np.take_along_axis(chosen, np.argsort(~top, axis=1, kind="stable"), 1)
        order = best_first(row)
        alternatives = order[np.take_along_axis(near, order, 1)].tolist()  # one layer after the other
        n_top = top.sum(axis=1).tolist()
        stops = near.sum(axis=1).cumsum().tolist()
        by_layer = [alternatives[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
        if self._first_found:
            by_layer = [as_set_yields(experts) for experts in by_layer]
        return [
            (experts[:n], experts[n:], near_ones)
            for experts, n, near_ones in zip(top_first.tolist(), n_top, by_layer, strict=True)
        ]

    def foreseen(self, scores: NDArray[np.float64], only_top: bool) -> list[list[int]]:
        """By layer, the top-score experts (or the top k) that predicted scores [n, L, E] name, best first.

        Of several tokens' an expert counts by the highest score among those that name it.
        """
        row, best, score = self._best(scores)
        if only_top:
            score[~self._thresholds.is_top(score, beta_of(row, self._top_k))] = UNNAMED
        highest, order = score[0], best[0]
        if len(row) > 1:
            named = np.full(row.shape, UNNAMED)
            np.put_along_axis(named, best, score, axis=2)
            highest = named.max(axis=0)
            order = best_first(highest)
        n_named = (highest > UNNAMED).sum(axis=1)
        return [experts[:n] for experts, n in zip(order.tolist(), n_named.tolist(), strict=True)]

    def foreseen_as_code(self, scores: NDArray[np.float64]) -> list[list[int]]:
        """By layer, the top-score experts that predicted scores [n, L, E] name, as the code's set yields them."""
        row, best, score = self._best(scores)
        top = self._thresholds.is_top(score, beta_of(row, self._top_k))
        return [as_set_yields(best[:, layer][top[:, layer]].tolist()) for layer in range(row.shape[1])]

    def _best(self, scores: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Whole scores [n, L, E], the K best experts by them [n, L, K], and their scores."""
        row = scores.astype(np.int64)
        best = best_first(row)[:, :, : self._top_k]
        return row, best, np.take_along_axis(row, best, 2)

    def swaps(self, low: list[int], near: list[int], on_gpu: Callable[[int], bool]) -> dict[int, int]:
        """Who replaces whom."""
        leaving = low if self._all_low else [e for e in low if not on_gpu(e)]
        if not leaving or not near:
            return {}
        alternatives = [e for e in near if on_gpu(e)]
        return (replace_first if self._first_found else replace_last)(leaving, alternatives)


def best_first(row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Experts by score along the last axis, ties to the lowest id."""
    return np.argsort(-row, axis=-1, kind="stable")


def as_set_yields(experts: list[int]) -> list[int]:
    """Experts in the order in which CPython walks a set that was filled in this one: by id modulo the size of its
    table, so not by id among 64. The public code takes the first it finds in such sets.
    """
    return list(set(experts))


def route(
    tokens: Sequence[Token],
    rule: str,
    on_gpu: Callable[[int], bool],
    couple: bool = True,
    by_batch: bool = True,
) -> list[list[int]]:
    """Algorithm 1 for the tokens of a batch: the experts each is served by, replaced ones in the place they had.

    Args:
        rule: `text` (section 5.1): who is on the GPU or in C stays. `alg1` (Algorithm 1, lines 18 to 23): every
            low-score expert goes, wherever it is; line 13 also puts the (k+1)-th expert into B, which would activate
            k + 1 experts, so that B holds chosen ones only here. `code` (`cache_router`): as the text, but one after
            the other takes the first alternative found, not the best one.
        on_gpu: whether an expert of this layer is in GPU memory.
        couple: C is the top-score set of the whole batch (section 5.1); otherwise each token knows its own alone.
        by_batch: prefer alternatives that more tokens of the batch use, those that are low-score there and not on the
            GPU among them (section 5.4; `merge`). The code has no such rule.
    """
    union = {e for token in tokens for e in token.top}
    used_by: dict[int, int] = {}
    for token in tokens:
        for e in token.chosen:
            used_by[e] = used_by.get(e, 0) + 1
    there = {e for e in used_by if on_gpu(e)}  # of those chosen; of alternatives it is asked as they come up
    lacking = False
    routed = []
    for scores, chosen, top, near in tokens:
        certain = union if couple else set(top)
        low = [e for e in chosen if e not in top]
        leaving = [e for e in low if e not in there and e not in certain] if rule != "alg1" else low
        routed.append(chosen.copy())
        lacking = lacking or len(leaving) > 0
        if not leaving or not near:
            continue  # nobody has to go, or nobody stands in
        if rule == "code":
            near = as_set_yields(sorted(near, key=lambda e: (-scores[e], e)))
        alternatives = [e for e in near if e in certain or e in there or (e not in used_by and on_gpu(e))]
        if rule == "code":
            swaps = replace_first(leaving, alternatives)
        else:
            if len(alternatives) > 1:
                alternatives.sort(key=lambda e: (-used_by.get(e, 0) if by_batch else 0, -scores[e], e))
            swaps = replace_last(leaving, alternatives)
        if swaps:
            routed[-1] = [swaps.get(e, e) for e in chosen]
    if by_batch and rule != "code" and lacking:
        merge(tokens, routed, lambda e: e in there or e in union or on_gpu(e))
    return routed


def merge(tokens: Sequence[Token], routed: list[list[int]], free: Callable[[int], bool]) -> None:
    """Section 5.4, "even if both experts are not in the GPU memory": gather what is left to load or compute, in place.

    A low-score expert that section 5.1 found no replacement for, neither on the GPU nor in C, makes way for an
    alternative that other tokens are already served by, if its batch then is the larger one. Such an alternative is not
    on the GPU either, or it would have been taken; being low for those tokens is enough. One token after the other,
    by what the results are then. No move adds an expert to the layer.

    Args:
        routed: experts per token, as section 5.1 leaves them. free: whether an expert is on the GPU, or in C and so
            computed in any case.
    """
    batch: dict[int, int] = {}
    for ids in routed:
        for e in ids:
            batch[e] = batch.get(e, 0) + 1
    lacking = {e for e in batch if not free(e)}
    for token, ids in zip(tokens, routed, strict=True) if lacking else ():
        for at in reversed(range(len(ids))):  # the lowest scores first, as in `replace_last`
            leaving = ids[at]
            if leaving not in lacking:
                continue
            near = [e for e in token.near if batch.get(e, 0) >= batch[leaving] and e not in ids]
            if near:
                e = ids[at] = min(near, key=lambda e: (-batch[e], -token.scores[e], e))
                batch[e] += 1
                batch[leaving] -= 1
                if not batch[leaving]:
                    del batch[leaving]


def replace_last(leaving: list[int], alternatives: list[int]) -> dict[int, int]:
    """The last of `leaving` (the lowest scores, in router order) make way for the first alternatives, best first.

    Both the text and Algorithm 1 (lines 21 and 22) keep the higher scores when A is too small.
    """
    n = min(len(leaving), len(alternatives))
    return dict(zip(leaving[len(leaving) - n :], alternatives[:n], strict=True))


def replace_first(leaving: list[int], alternatives: list[int]) -> dict[int, int]:
    """The first of `leaving` make way for the first alternatives found (public code)."""
    return dict(zip(leaving, alternatives, strict=False))


FORMS = (
    "recorded, or surrogate:0.82/0.95, of the experts it names the share with a top score and, of the others, the "
    "share that is active"
)


class StandIn:
    """Stands in for the published prefetcher, used only on request and labelled: names as many experts for a token's
    next layer as have a top score there.

    Args:
        text: `surrogate:TOP/ACTIVE`. Each expert named has a top score with probability TOP; one that has none is
            active with probability ACTIVE ("even when a prefetched expert is not a top-score one, it has a 95 %
            probability of being an active expert", section 6.3). `surrogate:TOP`: the others are never active.
        seed: equal seeds draw equally for the same trace row and layer.

    Raises:
        BadInput: not of these forms.
    """

    def __init__(self, text: str, seed: int) -> None:
        self._top, self._active = [*shares_of(text, FORMS), 0.0][:2]
        self._seed = seed

    def name(self, rows: Iterable[tuple[int, Token]], layer: int) -> list[int]:
        """Experts foreseen for a layer by a batch of (trace row, token): all first ones, then all second ones."""
        at: dict[int, int] = {}
        for row, token in rows:
            for i, expert in enumerate(self._of_token(row, layer, token)):
                at[expert] = min(i, at.get(expert, i))
        return sorted(at, key=lambda expert: (at[expert], expert))

    def _of_token(self, row: int, layer: int, token: Token) -> list[int]:
        """Where no other active expert is left, since all have top scores, one is named that is not active."""
        chance = draws_of(self._seed, row, layer)
        kinds = [
            token.top.copy(),
            [e for e in token.chosen if e not in token.top],
            [e for e in range(len(token.scores)) if e not in token.chosen],
        ]
        named: list[int] = []
        for _ in token.top:
            kind = 0 if chance.random() < self._top else 1 if chance.random() < self._active else 2
            for pool in kinds[kind:]:
                if pool:
                    named += take(pool, 1, chance)
                    break
        return named
