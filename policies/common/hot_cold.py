"""Caches beside CPU experts: what lies on the GPU runs there, what does not runs on the CPU; and slots for such caches.

llama.cpp and its forks compute a missing expert where its weights are, so that a miss costs what it costs without a
cache. What is then worth a slot is copied behind the layer's own results and may be hit from the next step on.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import Any

from policies.common.homes import asked_by_layer, beside, dealt, each_layer, living
from sim.policy import Decision, DoesNotFit, Gate, Param, Piece, Predict, RunCpu, RunGpu, Ticket, View, Wait

Served = Generator[Decision | Sequence[Decision], Any, tuple[Ticket, ...]]

OVERLAP = "the GPU computes hits while the CPU computes misses; false: first the GPU, then the CPU"
SLOTS = Param(
    "slots",
    None,
    "experts on the GPU per layer, dealt out where there are several GPUs; without it as many as fit beside "
    "what op offload needs",
    low=0,
    high=4096,
)


def hot_and_cold(gate: Gate, view: View, hot: Collection[int], overlap: bool = True) -> Served:
    """Run a layer's hot experts on the GPU, the others on the CPU; returns the tickets of the CPU's results.

    The graph of these engines is the same for every token, so that the CPU has its part in each layer: where nothing is
    cold it has nothing to compute, and the host still hands over, waits and merges (`hybrid_layer_s` of the stack).
    """
    warm: list[Decision] = [RunGpu(expert) for expert in gate.needs if expert in hot]
    cold: list[Decision] = [RunCpu(expert) for expert in gate.needs if expert not in hot]
    results: list[Ticket] = []
    if not cold and view.prices.hybrid_layer_s():
        yield Predict(view.prices.hybrid_layer_s(), "host", basis="stack")
    if overlap and cold:
        results = yield cold
    if warm:
        done = yield warm
        if cold and not overlap:
            yield Wait(tuple(done))
    if cold and not overlap:
        results = yield cold
    return tuple(results)


def slots_by_layer(policy: str, asked: int | None, spare: int, view: View) -> list[list[int]]:
    """Experts that each GPU keeps of every layer, by layer and GPU.

    Args:
        asked: of a layer over all GPUs; None: as many as fit. spare: experts to leave free on each GPU.

    Raises:
        DoesNotFit: the number asked for does not.
    """
    gpus = range(view.n_gpus)
    most = [each_layer(beside(spare, gpu, view), gpu, view) for gpu in gpus]
    if asked is None:
        return [most] * view.n_layers
    slots = [asked_by_layer(asked, gpu, view) for gpu in gpus]
    for gpu, (of_gpu, room) in enumerate(zip(slots, most, strict=True)):
        if max(of_gpu) > room:
            raise DoesNotFit(
                f"parameter {policy}.slots, got {asked}: GPU {gpu} has room for {room} experts of every layer beside "
                "what op offload needs; lower it, or leave it out"
            )
    return [list(row) for row in zip(*slots, strict=True)]


def pool_by_gpu(policy: str, param: str, asked: int | None, spare: int, view: View) -> list[int]:
    """Experts that each GPU keeps of all layers together: as many as fit, or its part of the number asked for.

    Raises:
        DoesNotFit: that part does not.
    """
    most = [beside(spare, gpu, view) for gpu in range(view.n_gpus)]
    if asked is None:
        return most
    owned = living(view)
    rooms = dealt(min(asked, sum(owned)), owned) if view.n_gpus > 1 else [asked]
    for gpu, (n, room) in enumerate(zip(rooms, most, strict=True)):
        if n > room:
            raise DoesNotFit(
                f"parameter {policy}.{param}, got {asked}: GPU {gpu} has room for {room} experts beside what op "
                "offload needs; lower it, or leave it out"
            )
    return rooms


class Slots:
    """A fixed number of whole experts, of which the least recently used one makes room."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._used: dict[Piece, None] = {}  # least recently first

    @property
    def full(self) -> bool:
        """Whether a newcomer needs somebody to leave."""
        return len(self._used) >= self.n

    def use(self, piece: Piece) -> None:
        """Somebody computed with it."""
        del self._used[piece]
        self._used[piece] = None

    def take(self, piece: Piece) -> Piece | None:
        """Give a newcomer a slot; returns who has to leave for it."""
        left = None
        if self.full:
            left = next(iter(self._used))
            del self._used[left]
        self._used[piece] = None
        return left
