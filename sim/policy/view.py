# cython: boundscheck=True, wraparound=True
"""What a policy can see: logical state, geometry and prices; no clock, no tensors, no future (but for oracles)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from sim.base.errors import IllegalDecision
from sim.policy.pieces import Piece
from sim.workload.levels import require_declared

if TYPE_CHECKING:
    from sim.engine.copies import Copies
    from sim.engine.pending_experts import PendingExperts
    from sim.engine.residency import Residency
    from sim.machine.cost import Cost
    from sim.machine.protocol import Machine
    from sim.policy.api import Policy
    from sim.workload.future import Future
    from sim.workload.gate import Arrays


class Prices:
    """Seconds of single operations, for policies that compare them (Fiddler, Importance, MoEpic ...)."""

    def __init__(self, cost: Cost, expert_bytes: int) -> None:
        self._cost = cost
        self._expert_bytes = expert_bytes

    def copy_s(self, n_bytes: int | None = None) -> float:
        """Host-to-device seconds of `n_bytes` (default: one whole expert)."""
        whole, copies = self._expert_bytes, self._cost.copies
        return copies.expert_s(whole) if n_bytes is None else copies.expert_s(n_bytes, n_bytes / whole)

    def load_s(self, n_bytes: int | None = None) -> float:
        """The same with what the host spends on launching it: a copy from being asked for to its end."""
        frac = 1.0 if n_bytes is None else n_bytes / self._expert_bytes
        return self._cost.launches.copy_part_s(frac) + self.copy_s(n_bytes)

    def back_s(self, n_bytes: int | None = None) -> float:
        """Device-to-host seconds of `n_bytes` (default: one whole expert)."""
        whole, copies = self._expert_bytes, self._cost.copies
        return copies.expert_back_s(whole) if n_bytes is None else copies.expert_back_s(n_bytes, n_bytes / whole)

    def gpu_s(self, n_tokens: int) -> float:
        """Seconds of one expert on the GPU."""
        return self._cost.expert_gpu_s(n_tokens)

    def cpu_s(self, n_tokens: int) -> float:
        """Seconds of one expert on the CPU."""
        return self._cost.expert_cpu_s(n_tokens)

    def another_cpu_s(self, n_tokens: int) -> float:
        """Seconds of one more expert on the CPU, where the same layer has had one there."""
        return self._cost.expert_cpu_joined(n_tokens).duration_s

    def slower_together(self) -> tuple[float, float]:
        """How many times as long an expert on the CPU takes beside copies to the GPU, and a copy beside it."""
        return self._cost.sharing.together(self._cost.expert_cpu(1).draws_per_s)

    def expert_s(self) -> float:
        """Seconds of one expert for one token: on the GPU, or launching it where that takes longer."""
        return max(self._cost.expert_gpu_s(1), self._cost.launches.expert.all_s)

    def attention_s(self, context: int) -> float:
        """Seconds of one layer's attention for one token: on the GPU, or launching it where that takes longer."""
        cost = self._cost
        return max(cost.attention_one_s(context), cost.launches.attention.all_s)

    def shared_s(self) -> float:
        """Seconds of one layer's shared experts for one token; 0 where the model has none."""
        cost = self._cost
        return max(cost.shared(1).duration_s, cost.launches.shared.all_s) if cost.has_shared else 0.0

    def hybrid_layer_s(self) -> float:
        """Host seconds of a layer of which the CPU computes a part: submit, synchronise, merge."""
        return self._cost.launches.hybrid_layer_s

    def overlap_layer_s(self) -> float:
        """Host seconds of a layer that GPU and CPU compute at once: hand the CPU's part to a thread, and join it."""
        return self._cost.launches.overlap_layer_s

    def head_s(self) -> float:
        """Seconds of the output head for one token."""
        return max(self._cost.head(1).duration_s, self._cost.launches.head.all_s)

    @property
    def gpu_bytes_per_s(self) -> float:
        """Effective GPU memory bandwidth."""
        return self._cost.hw.gpu.memory_bandwidth_bytes_per_s.value

    @property
    def cpu_bytes_per_s(self) -> float:
        """Effective host memory bandwidth."""
        return self._cost.hw.cpu.memory_bandwidth_bytes_per_s.value


class View:
    """The run as its policy may know it.

    Attributes:
        n_layers, n_experts, top_k, n_gpus: geometry. expert_bytes: bytes of one whole expert.
        layer, phase: where the pass is (`layer` is the MoE layer entered last).
        prices: seconds of single operations.
    """

    def __init__(
        self,
        policy: Policy,
        residency: Residency,
        pending: PendingExperts,
        copies: Copies,
        machine: Machine,
        cost: Cost,
        arrays: Arrays,
        top_k: int,
        hidden_size: int,
        future: Future | None,
    ) -> None:
        pieces = residency.pieces
        self._policy = policy
        self._pieces = pieces
        self._residency = residency
        self._pending = pending
        self._copies = copies
        self._machine = machine
        self._arrays = arrays
        self._future = future
        self.model_name = cost.model.id
        self.n_layers = pieces.n_layers
        self.n_experts = pieces.n_experts
        self.n_gpus = pieces.n_gpus
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.expert_bytes = pieces.all[0].n_bytes
        self.prices = Prices(cost, self.expert_bytes)
        self.layer = 0
        self.phase = ""
        self._timing = "timing" in policy.traits
        self._waiting = pending.tokens_by_expert()

    # -- pieces and residency ---------------------------------------------------------------------------------------

    def piece(self, layer: int, expert: int) -> Piece:
        """The whole expert as a piece."""
        found: Piece = self._pieces.whole[layer][expert]
        return found

    def part(self, layer: int, expert: int, start_frac: float, stop_frac: float, precision: str | None = None) -> Piece:
        """A slice of an expert as a piece."""
        return self._pieces.part(layer, expert, start_frac, stop_frac, precision)

    def matrices(self, layer: int, expert: int, n: int, precision: str | None = None) -> list[Piece]:
        """An expert in `n` pieces of whole matrices: together they launch what it does, and a kernel each at least."""
        part = self._pieces.part
        return [part(layer, expert, i / n, (i + 1) / n, precision, matrices=True) for i in range(n)]

    def resident(self, layer: int, expert: int) -> bool:
        """True when the whole expert has its room: it is there or on its way (which one, only `timing` may ask)."""
        return self._residency.holds(self._pieces.whole[layer][expert])

    def holds(self, piece: Piece) -> bool:
        """True when this very piece has its room."""
        return self._residency.holds(self._residency.known(piece))

    def held_of(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those of these pieces that have their room."""
        found: list[Piece] = []
        for piece in pieces:
            if self._residency.holds(self._residency.known(piece)):
                found.append(piece)  # noqa: PERF401 - a loop is what compiles well
        return found

    @property
    def held(self) -> np.ndarray:
        """Which pieces have their room, uint8 by `Piece.index`; read-only, current until a part is made anew."""
        held = np.frombuffer(self._residency.flags(), dtype=np.uint8)
        held.flags.writeable = False
        return held

    @property
    def unused_prefetches(self) -> int:
        """Prefetched pieces that have their room and have not been used."""
        return 0 if self._copies is None else int(self._copies.tally.prefetch.n_unused)

    def residents(self) -> Iterator[Piece]:
        """Every piece that has its room, oldest first."""
        return iter(self._residency.resident_pieces())

    def evictable(self, piece: Piece) -> bool:
        """False while the layer being served still needs the piece's expert."""
        if type(piece) is not Piece:
            raise TypeError(f"evictable, got {piece!r}: a Piece")
        one: Piece = piece
        return one.layer != self.layer or not self._waiting[one.expert]

    def first_evictable(self, pieces: Iterable[Piece]) -> Piece | None:
        """The first of these that `evictable` is True for, None where there is none: a victim, in one's own order."""
        for piece in pieces:
            if self.evictable(piece):
                return piece
        return None

    def pending_experts(self) -> list[int]:
        """Experts that the running layer has asked for and not computed yet: `evictable` is False for them alone."""
        return self._pending.experts()

    def pending_tokens(self, piece: Piece) -> int:
        """Tokens that the running layer has still to compute the piece's expert for; 0 where it is not pending."""
        return self._pending.tokens_of(piece.layer, piece.expert)

    @property
    def capacity(self) -> int:
        """Whole experts that fit the budget, over all GPUs."""
        return sum([self.capacity_of(gpu) for gpu in range(self.n_gpus)])

    def capacity_of(self, gpu: int) -> int:
        """Whole experts that fit one GPU's budget."""
        return self._residency.budget(self._gpu(gpu)) // self.expert_bytes

    def free_bytes(self, gpu: int = 0) -> int:
        """Expert budget of a GPU not taken."""
        return self._residency.free_bytes(self._gpu(gpu))

    def _gpu(self, gpu: int) -> int:
        if not 0 <= gpu < self.n_gpus:
            raise IndexError(f"GPU {gpu} of {self.n_gpus}")
        return gpu

    # -- the pass ---------------------------------------------------------------------------------------------------

    def embeddings(self) -> np.ndarray:
        """Embedding-layer outputs of the iteration's tokens [n, h] (needs `embeddings`)."""
        require_declared("embeddings", self._policy.needs)
        return self._arrays.embeddings()

    # -- with a trait -----------------------------------------------------------------------------------------------

    def arrived(self, piece: Piece) -> bool:
        """True when the piece's copy has completed by now. Trait `timing`."""
        if not self._timing:
            self._require("timing", "arrived")
        return self._copies.arrived(self._residency.known(piece))

    def n_arrived(self, pieces: Iterable[Piece]) -> int:
        """Of how many of these pieces the copy has completed by now. Trait `timing`."""
        if not self._timing:
            self._require("timing", "n_arrived")
        return int(self._copies.n_arrived(pieces))

    def queued(self) -> list[Piece]:
        """Pieces waiting in the policy's own prefetch queue, best first. Trait `timing`."""
        self._require("timing", "queued")
        return self._copies.queue.pieces()

    @property
    def waiting(self) -> bool:
        """Whether anything waits in the policy's own prefetch queue. Trait `timing`."""
        self._require("timing", "waiting")
        return bool(self._copies.queue.n_waiting)

    @property
    def future(self) -> Future:
        """What will be asked for. Trait `oracle`."""
        self._require("oracle", "future")
        assert self._future is not None
        return self._future

    def _require(self, trait: str, what: str) -> None:
        if trait not in self._policy.traits:
            name = self._policy.name
            raise IllegalDecision(f"view.{what} of {name}: needs the trait {trait!r}; declare it in `traits`")
