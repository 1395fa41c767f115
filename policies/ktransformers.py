"""KTransformers (SOSP'25): a mask of experts on the GPU, all others on the CPU, both at once; results may be late.

Source: Chen et al., "KTransformers: Unleashing the Full Potential of CPU/GPU Hybrid Inference for MoE Models"; code
kvcache-ai/ktransformers@95009ea (kt-kernel/python/experts_base.py `select_deferred_experts`, `submit_forward`) and its
SGLang fork (`generate_*_masks`, layer-wise prefill); doc/en/kt-kernel/experts-sched-Tutorial.md for the options.

Not modelled: one launch for a whole decode step (a stack with `graphs` has two per layer), kernels of NUMA nodes and
AMX (the hardware profile's CPU stands for them), and splitting an expert over several GPUs (tensor parallelism):
experts are dealt out whole instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random as Draws

import numpy as np

from policies.common.placement import fill, fits_whole, most_of_a_layer, most_used, uses
from sim.policy import (
    PREFILL,
    DoesNotFit,
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    RunCpu,
    RunGpu,
    Steps,
    StoreSplit,
    View,
    param,
)


class KTransformers(Policy):
    """CPU and GPU share each layer's experts by a mask; long prompts go through the GPU layer by layer."""

    name = "ktransformers"
    title = "KTransformers: GPU mask, CPU experts, deferral"
    source = "SOSP'25 (KTransformers); kvcache-ai/ktransformers@95009ea kt-kernel/python/experts_base.py"
    traits = frozenset({"cpu"})
    gpu_experts_per_layer: int | None = param(
        None,
        "experts on the GPU per layer, times the layers (--kt-num-gpu-experts); without it as many as fit (as a "
        "--kt-gpu-experts-ratio would)",
        within=(0, 4096),
    )
    strategy: str = param(
        "uniform",
        "which experts (--kt-expert-placement-strategy): equally many of every layer, the most used of all layers, "
        "whole layers from the first on, or drawn",
        ("uniform", "frequency", "front_loading", "random"),
    )
    mask_seed: int = param(42, "seed of strategy random (the code's is 42)", within=(0, 2**63 - 1))
    max_deferred: int = param(
        0,
        "experts per token whose CPU results may arrive a layer late (--kt-max-deferred-experts-per-token; 1 to 4 "
        "recommended); above 0 the model computes something else",
        within=(0, 4096),
    )
    gpu_prefill_threshold: int = param(
        4096,
        "tokens from which a prompt goes through the GPU layer by layer (--kt-gpu-prefill-token-threshold; the kt "
        "command's default), where one layer fits; 0: never",
        within=(0, 10**9),
    )
    threshold_rule: str = param(
        "at_least", "whether a prompt of just so many tokens does (code) or not (docs: `>`)", ("at_least", "more_than")
    )
    dynamic_update: bool = param(
        False,
        "after such a prompt, each layer keeps its most used experts on the GPU (--kt-enable-dynamic-expert-update)",
    )

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.max_deferred:
            self.traits = frozenset({"cpu", "lossy"})  # type: ignore[misc]  # of this instance alone

    def _workspace(self, view: View) -> int:
        """Experts per GPU kept free for the layer that a long prompt is going through ("one MoE layer extra")."""
        return most_of_a_layer(view) if self._layer_fits and not fits_whole(view) else 0

    def min_experts(self, view: View) -> int:
        return 1  # the least there is; the CPU can do everything

    def bind(self, view: View) -> None:
        self._activations = self._deferred = 0
        # With less room than a layer takes, no prompt goes through the GPU, and the mask has all the room there is.
        rooms = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]
        self._layer_fits = self.gpu_prefill_threshold > 0 and min(rooms) >= most_of_a_layer(view)
        self._order: list[tuple[int, int]] = []
        shape = (view.n_layers, view.n_experts)
        if self.strategy == "uniform":  # the first ids of every layer; what is left over goes to the first layers
            self._order = [(layer, expert) for expert in range(shape[1]) for layer in range(shape[0])]
        elif self.strategy == "front_loading":
            self._order = [(layer, expert) for layer in range(shape[0]) for expert in range(shape[1])]
        elif self.strategy == "random":
            draw = Draws(self.mask_seed).random  # noqa: S311 - a simulation, not a secret
            drawn = [(draw(), layer, expert) for layer in range(shape[0]) for expert in range(shape[1])]
            self._order = [(layer, expert) for _, layer, expert in sorted(drawn)]

    def learn(self, store: StoreSplit) -> None:
        if self.strategy == "frequency":  # the activation table of --init-expert-location
            self._order = most_used(uses(store, f"{self.name} strategy=frequency"))

    def initial(self, view: View) -> Iterable[Piece]:
        per_layer = self.gpu_experts_per_layer
        most = None if per_layer is None else min(per_layer, view.n_experts) * view.n_layers
        placed = fill(self._order, view, self._workspace(view), most)
        if most is not None and len(placed) < most:
            raise DoesNotFit(
                f"parameter {self.name}.gpu_experts_per_layer, got {per_layer}: {most} experts on the GPU, room for "
                f"{len(placed)} beside the layer that long prompts go through; lower it, or leave it out"
            )
        self._mask: list[list[Piece]] = [[] for _ in range(view.n_layers)]
        for piece in placed:
            self._mask[piece.layer].append(piece)
        return placed

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if self._layerwise(gate):
            yield from self._through_gpu(gate, view)
            return
        on_cpu = [expert for expert in gate.needs if not view.resident(gate.layer, expert)]
        late = self._late(gate, on_cpu, view)
        yield [RunCpu(expert) for expert in on_cpu if expert not in late]
        # Behind those of this layer; layer l + 1 adds the result to its own (`submit_forward`).
        yield [RunCpu(expert, join_layer=gate.layer + 1) for expert in late]
        yield [RunGpu(expert) for expert in gate.needs if expert not in on_cpu]
        self._activations += sum(gate.needs.values())
        self._deferred += sum(gate.needs[expert] for expert in late)

    def _late(self, gate: Gate, on_cpu: list[int], view: View) -> list[int]:
        """`select_deferred_experts`: CPU experts that are among no token's k - d heaviest; the last layer has none."""
        if not self.max_deferred or gate.layer + 1 == view.n_layers:
            return []
        ids = gate.ids
        protected = set(np.unique(ids[:, : max(0, ids.shape[1] - self.max_deferred)]).tolist())
        return [expert for expert in on_cpu if expert not in protected]

    # -- long prompts -----------------------------------------------------------------------------------------------

    def _layerwise(self, gate: Gate) -> bool:
        n_tokens, threshold = gate.iteration.n_tokens, self.gpu_prefill_threshold
        long = n_tokens >= threshold if self.threshold_rule == "at_least" else n_tokens > threshold
        return gate.phase == PREFILL and self._layer_fits and long

    def _through_gpu(self, gate: Gate, view: View) -> Steps:
        """Load the complete layer, compute it on the GPU, then keep the mask's experts or this prompt's favourites."""
        pieces = [view.piece(gate.layer, expert) for expert in range(view.n_experts)]
        came = yield [Fetch(piece) for piece in pieces if not view.holds(piece)]
        copies = tuple(ticket for ticket in came if ticket is not None)
        yield [RunGpu(expert, after=copies) for expert in sorted(gate.needs)]
        self._activations += sum(gate.needs.values())
        if self.dynamic_update:
            self._mask[gate.layer] = self._favourites(gate, view)
        for piece in pieces:
            if piece not in self._mask[gate.layer] and view.holds(piece):
                yield Evict(piece)

    def _favourites(self, gate: Gate, view: View) -> list[Piece]:
        """As many as the layer had, the most selected by this prompt; ties, and who fills up, by the lowest id."""
        left = [sum(piece.gpu == gpu for piece in self._mask[gate.layer]) for gpu in range(view.n_gpus)]
        chosen: list[Piece] = []
        for expert in sorted(range(view.n_experts), key=lambda e: (-gate.needs.get(e, 0), e)):
            piece = view.piece(gate.layer, expert)
            if left[piece.gpu]:
                left[piece.gpu] -= 1
                chosen.append(piece)
        return chosen

    def stats(self) -> dict[str, float]:
        """Share of (token, expert) activations whose result arrived one layer late."""
        return {"deferred_frac": self._deferred / self._activations if self._activations else 0.0}
