"""What a policy can see: logical state, geometry and prices; no clock, no tensors, no future (but for oracles)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import IllegalDecision

if TYPE_CHECKING:
    from oracle.cost import Cost
    from oracle.engine import Engine
    from oracle.future import Future
    from oracle.pieces import Piece


class Prices:
    """Seconds of single operations, for policies that compare them (Fiddler, Importance, MoEpic ...)."""

    def __init__(self, cost: Cost, expert_bytes: int) -> None:
        self._cost = cost
        self._expert_bytes = expert_bytes

    def copy_s(self, n_bytes: int | None = None) -> float:
        """Host-to-device seconds of `n_bytes` (default: one whole expert)."""
        return self._cost.copy_s(self._expert_bytes if n_bytes is None else n_bytes)

    def another_cpu_s(self, n_tokens: int) -> float:
        """Seconds of one more expert on the CPU; stacks that run a layer's in one region are younger than this."""
        return self.cpu_s(n_tokens)

    def slower_together(self) -> tuple[float, float]:
        """How many times as long an expert on the CPU takes beside copies to the GPU, and a copy beside it."""
        contention = self._cost.hw.contention
        return 1.0 + contention.cpu_slowdown_by_h2d.value, 1.0 + contention.h2d_slowdown_by_cpu.value

    def load_s(self, n_bytes: int | None = None) -> float:
        """The same with what the host spends on launching it: a copy from being asked for to its end."""
        frac = 1.0 if n_bytes is None else n_bytes / self._expert_bytes
        return self._cost.part_launch_s(frac) + self.copy_s(n_bytes)

    def back_s(self, n_bytes: int | None = None) -> float:
        """Device-to-host seconds of `n_bytes` (default: one whole expert)."""
        return self._cost.back_s(self._expert_bytes if n_bytes is None else n_bytes)

    def gpu_s(self, n_tokens: int) -> float:
        """Seconds of one expert on the GPU."""
        return self._cost.expert_gpu_s(n_tokens)

    def cpu_s(self, n_tokens: int) -> float:
        """Seconds of one expert on the CPU."""
        return self._cost.expert_cpu_s(n_tokens)

    def expert_s(self) -> float:
        """Seconds of one expert for one token: on the GPU, or launching it where that takes longer."""
        return max(self._cost.expert_gpu_s(1), self._cost.launch_expert.all_s)

    def attention_s(self, context: int) -> float:
        """Seconds of one layer's attention for one token: on the GPU, or launching it where that takes longer."""
        cost = self._cost
        return max(cost.attention_one_s(context), cost.launch_attention.all_s)

    def shared_s(self) -> float:
        """Seconds of one layer's shared experts for one token; 0 where the model has none."""
        cost = self._cost
        return max(cost.shared(1).duration_s, cost.launch_shared.all_s) if cost.has_shared else 0.0

    def hybrid_layer_s(self) -> float:
        """Nothing: stacks with such a figure are younger than this."""
        return 0.0

    def overlap_layer_s(self) -> float:
        """Nothing, likewise."""
        return 0.0

    def head_s(self) -> float:
        """Seconds of the output head for one token."""
        return max(self._cost.head(1).duration_s, self._cost.launch_head.all_s)

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

    def __init__(self, engine: Engine, model_name: str, top_k: int, hidden_size: int) -> None:
        self._engine = engine
        pieces = engine.pieces
        self.model_name = model_name
        self.n_layers = pieces.n_layers
        self.n_experts = pieces.n_experts
        self.n_gpus = pieces.n_gpus
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.expert_bytes = pieces.whole[0][0].n_bytes
        self.prices = Prices(engine.cost, self.expert_bytes)
        self.layer = 0
        self.phase = ""
        self._entries = engine.cache.entries
        self._whole = pieces.whole

    # -- pieces and residency ---------------------------------------------------------------------------------------

    def piece(self, layer: int, expert: int) -> Piece:
        """The whole expert as a piece."""
        return self._whole[layer][expert]

    def part(self, layer: int, expert: int, start_frac: float, stop_frac: float, precision: str | None = None) -> Piece:
        """A slice of an expert as a piece."""
        return self._engine.pieces.part(layer, expert, start_frac, stop_frac, precision)

    def matrices(self, layer: int, expert: int, n: int, precision: str | None = None) -> list[Piece]:
        """An expert in `n` pieces of whole matrices: together they launch what it does, and a kernel each at least."""
        part = self._engine.pieces.part
        return [part(layer, expert, i / n, (i + 1) / n, precision, matrices=True) for i in range(n)]

    def resident(self, layer: int, expert: int) -> bool:
        """True when the whole expert has its room: it is there or on its way (which one, only `timing` may ask)."""
        return self._whole[layer][expert] in self._entries

    def holds(self, piece: Piece) -> bool:
        """True when this very piece has its room."""
        return piece in self._entries

    @property
    def held(self) -> np.ndarray:
        """Which whole experts have their room, by index; always up to date."""
        return self._engine.cache.flags

    @property
    def unused_prefetches(self) -> int:
        """Prefetched pieces that have not been used."""
        return len(self._engine.tally.prefetch._open)

    @property
    def waiting(self) -> bool:
        """Whether anything waits in the policy's own queue."""
        return bool(self._engine.queue.waiting)

    def held_of(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those of these pieces that have their room."""
        return [piece for piece in pieces if self.holds(piece)]

    def residents(self) -> Iterator[Piece]:
        """Every piece that has its room, oldest first."""
        return iter(self._entries)

    def evictable(self, piece: Piece) -> bool:
        """False while the layer being served still needs the piece's expert."""
        return not (piece.layer == self._engine.layer and piece.expert in self._engine.unrun)

    def first_evictable(self, pieces: Iterable[Piece]) -> Piece | None:
        """The first of these that `evictable` is True for, None where there is none."""
        return next((piece for piece in pieces if self.evictable(piece)), None)

    def pending_experts(self) -> list[int]:
        """Experts the layer being served still needs: the only ones `evictable` is False for."""
        return list(self._engine.unrun)

    def pending_tokens(self, piece: Piece) -> int:
        """Tokens that the layer being served still owes the piece's expert; 0 where it owes none."""
        return self._engine.unrun.get(piece.expert, 0) if piece.layer == self._engine.layer else 0

    @property
    def capacity(self) -> int:
        """Whole experts that fit the budget, over all GPUs."""
        return sum(budget // self.expert_bytes for budget in self._engine.cache.budget_bytes)

    def capacity_of(self, gpu: int) -> int:
        """Whole experts that fit one GPU's budget."""
        return self._engine.cache.budget_bytes[gpu] // self.expert_bytes

    def free_bytes(self, gpu: int = 0) -> int:
        """Expert budget of a GPU not taken."""
        return self._engine.cache.budget_bytes[gpu] - self._engine.cache.used_bytes[gpu]

    def follow(self, entries: dict[Piece, Any]) -> None:
        """Look at this mapping for residency (the flat loop keeps a plainer one)."""
        self._entries = entries

    # -- the pass ---------------------------------------------------------------------------------------------------

    def embeddings(self) -> np.ndarray:
        """Embedding-layer outputs of the iteration's tokens [n, h] (needs `embeddings`)."""
        return self._engine.arrays.embeddings()

    # -- with a trait -----------------------------------------------------------------------------------------------

    def arrived(self, piece: Piece) -> bool:
        """True when the piece's copy has completed by now. Trait `timing`."""
        self._require("timing", "arrived")
        entry = self._entries.get(piece)
        return entry is not None and (entry.arrival is None or self._engine.machine.ended(entry.arrival))

    def n_arrived(self, pieces: Iterable[Piece]) -> int:
        """Of how many of these pieces the copy has completed by now. Trait `timing`."""
        return sum(self.arrived(piece) for piece in pieces)

    def queued(self) -> list[Piece]:
        """Pieces waiting in the policy's own prefetch queue, best first. Trait `timing`."""
        self._require("timing", "queued")
        return self._engine.queue.pieces()

    @property
    def future(self) -> Future:
        """What will be asked for. Trait `oracle`."""
        self._require("oracle", "future")
        assert self._engine.future is not None
        return self._engine.future

    def _require(self, trait: str, what: str) -> None:
        policy = self._engine.policy
        if trait not in policy.traits:
            raise IllegalDecision(f"view.{what} of {policy.name}: needs the trait {trait!r}; declare it in `traits`")
