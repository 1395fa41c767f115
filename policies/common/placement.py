"""Placing experts once, before the run: how often each was used on the store split, and what then goes where."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.common.homes import beside, living
from sim.policy import Piece, StoreSplit, View, no_store


def uses(store: StoreSplit, policy: str, prompts: bool = True) -> NDArray[np.int64]:
    """Tokens routed to each expert over the store split, [layers, experts]; with `prompts` False, of decode alone.

    Raises:
        BadInput: the split is empty: there is no popularity to learn.
    """
    trace = store.trace
    if not store:
        raise no_store(
            trace, f"{policy} places experts by how often they were used there", ", or a policy that learns nothing"
        )
    counts = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
    layers = np.arange(trace.n_layers)[None, :, None]
    for request in store.requests:
        first = request.first_row + (0 if prompts else request.prompt_len)
        stop = request.first_row + request.prompt_len + request.outputs - 1
        np.add.at(counts, (layers, trace.experts[first:stop]), 1)
    return counts


def most_used(counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Every (layer, expert), most used first over all layers; ties to the lowest layer, then the lowest id."""
    order = np.argsort(-counts, axis=None, kind="stable").tolist()
    return [divmod(at, counts.shape[1]) for at in order]


def fill(order: Iterable[tuple[int, int]], view: View, spare: int = 0, most: int | None = None) -> list[Piece]:
    """Whole experts in this order while they fit.

    Args:
        spare: whole experts to leave free on each GPU. most: experts over all GPUs, at most.
    """
    room = [beside(spare, gpu, view) for gpu in range(view.n_gpus)]
    placed: list[Piece] = []
    for layer, expert in order:
        piece = view.piece(layer, expert)
        if (most is None or len(placed) < most) and room[piece.gpu] > 0:
            room[piece.gpu] -= 1
            placed.append(piece)
    return placed


def fits_whole(view: View) -> bool:
    """True when every GPU has room for all of its experts, so that nothing has to be spared."""
    return all(view.capacity_of(gpu) >= n for gpu, n in enumerate(living(view)))
