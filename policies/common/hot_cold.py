"""Caches beside CPU experts: what lies on the GPU runs there, what does not runs on the CPU; and slots for such caches.

llama.cpp and its forks compute a missing expert where its weights are, so that a miss costs what it costs without a
cache. What is then worth a slot is copied behind the layer's own results and may be hit from the next step on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from policies.common.op_offload import OpOffload
from policies.common.placement import asked_by_layer, beside, dealt, each_layer, living
from sim.policy import Decision, DoesNotFit, Gate, Piece, Predict, RunCpu, RunGpu, Steps, Ticket, View, Wait, param

SLOTS = param(
    None,
    "experts on the GPU per layer, dealt out where there are several GPUs; without it as many as fit beside what op "
    "offload needs",
    within=(0, 4096),
)


def overlap_param(source: str) -> bool:
    """The parameter that says whether both sides of a layer are computed at once."""
    doc = "the GPU computes hits while the CPU computes misses; false: first the GPU, then the CPU"
    return param(True, f"{doc} ({source})")


class HotCold(OpOffload):
    """Computes hot experts on the GPU and cold ones on the CPU; a policy says what is then worth a slot.

    Attributes:
        max_batch: tokens up to which the cache serves; above, all experts are cold, and nothing comes. None: any.
    """

    overlap: bool = True
    max_batch: int | None = None

    def serve(self, gate: Gate, view: View) -> Steps:
        """Run the layer's experts where they are, then `admit` what is worth it.

        The graph of these engines is the same for every token, so that the CPU has its part in each layer: where
        nothing is cold it has nothing to compute, and the host still hands over, waits and merges (`hybrid_layer_s` of
        the stack).
        """
        is_served = self.max_batch is None or gate.iteration.n_tokens <= self.max_batch
        hot = {expert for expert in gate.needs if is_served and view.resident(gate.layer, expert)}
        warm: list[Decision] = [RunGpu(expert) for expert in gate.needs if expert in hot]
        cold: list[Decision] = [RunCpu(expert) for expert in gate.needs if expert not in hot]
        results: list[Ticket] = []
        if not cold and view.prices.hybrid_layer_s():
            yield Predict(view.prices.hybrid_layer_s(), "host", basis="stack")
        if self.overlap and cold:
            results = yield cold
        if warm:
            done = yield warm
            if cold and not self.overlap:
                yield Wait(tuple(done))
        if cold and not self.overlap:
            results = yield cold
        if is_served:
            yield from self.admit(gate, hot, tuple(results), view)

    def admit(self, gate: Gate, hot: Collection[int], results: tuple[Ticket, ...], view: View) -> Iterable[Decision]:
        """A layer has run, of whose experts `hot` were hits; what changes in the cache, behind the CPU's results."""
        return ()

    def slots_by_layer(self, asked: int | None, view: View) -> list[list[int]]:
        """Experts that each GPU keeps of every layer, by layer and GPU.

        Args:
            asked: of a layer over all GPUs; None: as many as fit.

        Raises:
            DoesNotFit: the number asked for does not.
        """
        gpus, spare = range(view.n_gpus), self.spare(view)
        most = [each_layer(beside(spare, gpu, view), gpu, view) for gpu in gpus]
        if asked is None:
            return [most] * view.n_layers
        slots = [asked_by_layer(asked, gpu, view) for gpu in gpus]
        self._refuse(f"slots, got {asked}", [max(of_gpu) for of_gpu in slots], most, "experts of every layer")
        return [list(row) for row in zip(*slots, strict=True)]

    def pool_by_gpu(self, name: str, asked: int | None, view: View) -> list[int]:
        """Experts that each GPU keeps of all layers together: as many as fit, or its part of the number asked for.

        Raises:
            DoesNotFit: that part does not.
        """
        spare = self.spare(view)
        most = [beside(spare, gpu, view) for gpu in range(view.n_gpus)]
        if asked is None:
            return most
        owned = living(view)
        rooms = dealt(min(asked, sum(owned)), owned) if view.n_gpus > 1 else [asked]
        self._refuse(f"{name}, got {asked}", rooms, most, "experts")
        return rooms

    def _refuse(self, asked: str, slots: list[int], most: list[int], unit: str) -> None:
        for gpu, (n, room) in enumerate(zip(slots, most, strict=True)):
            if n > room:
                raise DoesNotFit(
                    f"parameter {self.name}.{asked}: GPU {gpu} has room for {room} {unit} beside what op offload "
                    "needs; lower it, or leave it out"
                )


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
