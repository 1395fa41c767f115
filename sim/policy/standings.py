"""Where experts stand when tokens ask for them, counted for many tokens at once: a compiled loop, or numpy alike.

An expert stands by its key among those of its layer, 0 the largest, of equals the lowest id. A token that activates it
gives it the key `of_uses[u] + t * unit`, where u is how often it has been activated with that and t the token's number
in its layer: keys only grow. Tables of uses that are all 0 are recency alone, those that grow count frequency, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.flat import COMPILED

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Keys(NamedTuple):
    """The state that tokens change, in place: int64, or objects where keys outgrow that.

    by_expert, uses: [L, E]. n_tokens: that each layer has seen [L]. of_uses: what 0, 1 ... uses are worth. unit: what
    a token is.
    """

    by_expert: NDArray[Any]
    uses: Ints
    n_tokens: Ints
    of_uses: NDArray[Any]
    unit: int


class Counts(NamedTuple):
    """What is counted, in place.

    by_place: activations by the place where the token found the expert [L, E]. by_forecast: by the place that it was
    foretold [L, E]. by_both: all experts by place foretold and place found [L, E, E].
    """

    by_place: Ints
    by_forecast: Ints
    by_both: Ints


def follow(keys: Keys, ids: Ints) -> None:
    """Tokens pass all layers, one after the other: experts activated, [n, L, K], each once."""
    if COMPILED and _plain(keys):
        none = np.zeros((0, 0), dtype=np.int64)
        _loop(keys, ids, np.zeros((0, 0, 0)), np.zeros((0, 0), dtype=np.uint8), Counts(none, none, none[None]))
        return
    chosen, last = _activations(ids, keys.by_expert.shape[1])
    keys.uses[:] += chosen.sum(axis=0)
    latest = last.max(axis=0, initial=0)
    new = keys.of_uses[keys.uses] + (keys.n_tokens[:, None] + latest) * keys.unit
    keys.by_expert[:] = np.where(latest > 0, new, keys.by_expert)
    keys.n_tokens[:] += len(ids)


def follow_and_count(keys: Keys, ids: Ints, foretold: Floats | None, known: Flags, counts: Counts) -> None:
    """Tokens pass all layers, one after the other, and change the keys; what each token finds there is counted.

    Args:
        ids: experts activated [n, L, K], each once.
        foretold: scores by which each layer's experts were foretold [n, L, E], the largest first; read where `known`
            [n, L].
    """
    told = np.zeros((0, 0, 0)) if foretold is None or not known.any() else foretold
    if COMPILED and _plain(keys):
        _loop(keys, ids, np.ascontiguousarray(told), np.ascontiguousarray(known).view(np.uint8), counts)
        return
    place = places_before(keys, ids)
    n_layers, n_experts = keys.by_expert.shape
    first = np.arange(n_layers)[None, :, None] * n_experts
    counts.by_place[:] += _counted(first + np.take_along_axis(place, ids, 2), counts.by_place)
    if len(told):
        chosen = np.zeros(told.shape, dtype=bool)
        np.put_along_axis(chosen, ids, True, axis=2)
        y = first + places(told)
        counts.by_forecast[:] += _counted(y[chosen & known[:, :, None]], counts.by_forecast)
        counts.by_both[:] += _counted((y * n_experts + place)[known], counts.by_both)
    follow(keys, ids)


def _plain(keys: Keys) -> bool:
    """Whether machine numbers hold them."""
    return bool(keys.by_expert.dtype == np.int64 and keys.of_uses.dtype == np.int64)


def _loop(keys: Keys, ids: Ints, foretold: Floats, known: NDArray[np.uint8], counts: Counts) -> None:
    _follow(
        keys.by_expert,
        keys.uses,
        keys.n_tokens,
        keys.of_uses,
        keys.unit,
        np.ascontiguousarray(ids),
        foretold,
        known,
        counts.by_place,
        counts.by_forecast,
        counts.by_both,
        np.zeros((3, keys.by_expert.shape[1]), dtype=np.int64),
    )


def _follow(
    by_expert: Ints,
    uses: Ints,
    n_tokens: Ints,
    of_uses: Ints,
    unit: int,
    ids: Ints,
    foretold: Floats,
    known: NDArray[np.uint8],
    by_place: Ints,
    by_forecast: Ints,
    by_both: Ints,
    room: Ints,
) -> None:
    """One layer after the other, and there one token after the other.

    Args:
        foretold: none where nothing is known. by_place: [0, 0] where nothing is counted. room: [3, E], for a layer's
            experts from the largest key down, where each stands among them, and where by what is foretold.
    """
    order, place, rank = room[0], room[1], room[2]
    counts, told = by_place.shape[0] > 0, foretold.shape[0] > 0
    n, n_layers, top_k = ids.shape[0], ids.shape[1], ids.shape[2]
    n_experts = by_expert.shape[1]
    for layer in range(n_layers):
        for expert in range(n_experts):
            at = expert
            while at > 0 and by_expert[layer, order[at - 1]] < by_expert[layer, expert]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = expert
        for at in range(n_experts):
            place[order[at]] = at
        for token in range(n):
            if told and known[token, layer]:
                for expert in range(n_experts):
                    rank[expert] = 0
                for expert in range(n_experts):  # every pair once, without a branch
                    score = foretold[token, layer, expert]
                    n_later = 0
                    for other in range(expert + 1, n_experts):
                        later = foretold[token, layer, other] <= score
                        rank[other] += later
                        n_later += later
                    rank[expert] += n_experts - 1 - expert - n_later
                for expert in range(n_experts):
                    by_both[layer, rank[expert], place[expert]] += 1
                for k in range(top_k):
                    by_forecast[layer, rank[ids[token, layer, k]]] += 1
            if counts:
                for k in range(top_k):
                    by_place[layer, place[ids[token, layer, k]]] += 1
            for k in range(top_k):
                expert = ids[token, layer, k]
                uses[layer, expert] += 1
                key = of_uses[uses[layer, expert]] + (n_tokens[layer] + token + 1) * unit
                by_expert[layer, expert] = key
                at = place[expert]
                while at > 0:
                    other = order[at - 1]
                    if by_expert[layer, other] > key or (by_expert[layer, other] == key and other < expert):
                        break
                    order[at] = other
                    place[other] = at
                    at -= 1
                order[at] = expert
                place[expert] = at
        n_tokens[layer] += n


def places_before(keys: Keys, ids: Ints) -> Ints:
    """Where each expert stands in its layer before each of several tokens [n, L, E]; nothing is changed."""
    chosen, last = _activations(ids, keys.by_expert.shape[1])
    uses = keys.uses + np.cumsum(chosen, axis=0) - chosen  # of earlier tokens
    last = np.maximum.accumulate(last, axis=0)
    last = np.concatenate([np.zeros_like(last[:1]), last[: max(0, len(last) - 1)]])
    new = keys.of_uses[uses] + (keys.n_tokens[None, :, None] + last) * keys.unit
    return places(np.where(last > 0, new, keys.by_expert))


def _activations(ids: Ints, n_experts: int) -> tuple[Flags, Ints]:
    """Which experts each token activates, and its number, from 1, where it does; [n, L, E] both."""
    chosen = np.zeros((*ids.shape[:2], n_experts), dtype=bool)
    np.put_along_axis(chosen, ids, True, axis=2)
    return chosen, np.where(chosen, np.arange(1, len(ids) + 1)[:, None, None], 0)


def places(keys: NDArray[Any]) -> Ints:
    """Where each of the last axis stands among all of it: 0 the largest; of equals the first.

    Every pair is compared once, for all rows at a time: quicker than sorting as long as rows are short.
    """
    columns = np.ascontiguousarray(np.moveaxis(keys, -1, 0))
    small = np.uint8 if len(columns) <= 256 else np.uint16
    found = np.zeros(columns.shape, dtype=small)
    for at, one in enumerate(columns):
        before = np.asarray(one >= columns[at + 1 :], dtype=bool).view(np.uint8)
        found[at + 1 :] += before
        found[at] += len(before) - before.sum(axis=0, dtype=small)
    return np.ascontiguousarray(np.moveaxis(found, 0, -1)).astype(np.int64)


def _counted(at: Ints, like: Ints) -> Ints:
    """How often each place of an array is named, by its number from the first."""
    return np.bincount(at.ravel(), minlength=like.size).reshape(like.shape)
