"""Which experts live on which GPU, how room is dealt out among layers, and what is placed once, before the run.

Experts are dealt out layer by layer, whole layers each, or as a placement file says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.policy import Piece, StoreSplit, View, no_store

if TYPE_CHECKING:
    from sim.policy import View


def every(view: View) -> list[Piece]:
    """All experts, by `Piece.index`."""
    return [view.piece(layer, expert) for layer in range(view.n_layers) for expert in range(view.n_experts)]


def homes(view: View) -> NDArray[np.int64]:
    """The GPU that each expert lives on [layers, experts]."""
    if view.n_gpus == 1:
        return np.zeros((view.n_layers, view.n_experts), dtype=np.int64)
    experts = range(view.n_experts)
    return np.array([[view.piece(layer, expert).gpu for expert in experts] for layer in range(view.n_layers)])


def living(view: View) -> list[int]:
    """Experts that live on each GPU."""
    counts: list[int] = np.bincount(homes(view).ravel(), minlength=view.n_gpus).tolist()
    return counts


def layers_on(gpu: int, view: View) -> list[int]:
    """Layers of which a GPU has experts."""
    found: list[int] = np.flatnonzero((homes(view) == gpu).any(axis=1)).tolist()
    return found


def each_layer(n: int, gpu: int, view: View) -> int:
    """So many, divided by the layers that a GPU has experts of."""
    return n // max(1, len(layers_on(gpu, view)))


def most_layers(view: View) -> int:
    """Layers of which the GPU has experts that has most layers."""
    return max(len(layers_on(gpu, view)) for gpu in range(view.n_gpus))


def of_a_layer(gpu: int, view: View) -> int:
    """Experts of one layer that live on a GPU; of the layer that has most there."""
    return int((homes(view) == gpu).sum(axis=1).max())


def most_of_a_layer(view: View) -> int:
    """The same of the GPU that has most."""
    return max(of_a_layer(gpu, view) for gpu in range(view.n_gpus))


def most_sharing(view: View) -> int:
    """GPUs that have experts of the layer that most have."""
    return max(len(set(row)) for row in homes(view).tolist())


def most_on_a_gpu(view: View) -> int:
    """Experts that live on the GPU that has most."""
    return max(living(view))


def beside(spare: int, gpu: int, view: View) -> int:
    """Experts that fit beside so many; where all that live on a GPU fit, nothing has to be spared."""
    room = view.capacity_of(gpu)
    return room if room >= living(view)[gpu] else max(0, room - spare)


def dealt(n: int, owned: list[int]) -> list[int]:
    """So many experts by GPU, in proportion to those that live there; what is left over goes to whom most is due."""
    total = max(1, sum(owned))
    whole = [n * one // total for one in owned]
    for gpu in sorted(range(len(owned)), key=lambda gpu: -(n * owned[gpu] % total))[: n - sum(whole)]:
        whole[gpu] += 1
    return whole


def by_layer(n: int, gpu: int, view: View) -> list[int]:
    """So many dealt equally over the layers that a GPU has experts of; what does not divide goes to the first ones."""
    here = layers_on(gpu, view)
    each, more = divmod(n, max(1, len(here)))
    shares = [0] * view.n_layers
    for at, layer in enumerate(here):
        shares[layer] = each + (at < more)
    return shares


def asked_by_layer(n: int, gpu: int, view: View) -> list[int]:
    """A GPU's part of `n` experts of every layer: equal among those that have experts of it, the first ones more."""
    found = []
    for row in homes(view).tolist():
        sharing = sorted(set(row))
        each, more = divmod(min(n, view.n_experts), len(sharing))
        found.append(each + (gpu in sharing[:more]) if gpu in sharing else 0)
    return found


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
