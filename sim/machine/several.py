"""How several GPUs work together: who computes what is dense, how hidden states cross, what their links share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.profiles.models import Model

PER_EXPERT, ALL_TO_ALL = "per-expert", "all-to-all"
PEER_WAYS = (PER_EXPERT, ALL_TO_ALL)  # the default first

APART, SHARED, SPLIT = "apart", "shared", "split"
HOST_LINKS_WAYS = (APART, SHARED, SPLIT)

GPU0, TENSOR, DATA, LAYERS = "gpu0", "tensor", "data", "layers"
DENSE_WAYS = (GPU0, TENSOR, DATA, LAYERS)


def stages(n_layers: int, n_gpus: int) -> list[int]:
    """The GPU of each layer and, at the end, of the output head where GPUs have whole layers.

    llama.cpp's rule for equal GPUs (`--split-mode layer`): in order, as many on each, the head counted as one.
    """
    return [layer * n_gpus // (n_layers + 1) for layer in range(n_layers + 1)]


def homes_by_layer(model: Model, n_gpus: int) -> tuple[int, ...]:
    """The GPU of each expert, layer by layer, where each lies with its layer."""
    of_layer = stages(model.n_layers, n_gpus)
    return tuple(of_layer[layer] for layer in model.moe_layer_ids for _ in range(model.n_experts))


@dataclass(frozen=True)
class Several:
    """The choices of one run. `n_gpus`: with one, none of the others has a meaning."""

    n_gpus: int = 1
    peer: str = PER_EXPERT
    host_links: str = APART
    dense: str = GPU0
    homes: tuple[int, ...] | None = None  # the GPU of each expert, layer by layer; None: dealt round-robin

    @property
    def together(self) -> bool:
        """Whether dense parts run on all GPUs."""
        return self.n_gpus > 1 and self.dense in (TENSOR, DATA)

    @property
    def in_turn(self) -> bool:
        """Whether each GPU has whole layers, so that one computes at a time."""
        return self.n_gpus > 1 and self.dense == LAYERS

    def homes_of(self, n_experts: int) -> list[int]:
        """The GPU of each of all experts, layer by layer."""
        return [index % self.n_gpus for index in range(n_experts)] if self.homes is None else list(self.homes)

    @property
    def n_at_once(self) -> int:
        """GPUs that share the experts of a layer."""
        return 1 if self.in_turn else self.n_gpus

    @property
    def gathers(self) -> bool:
        """Whether what crosses to a GPU in a layer crosses together."""
        return self.n_gpus > 1 and self.peer == ALL_TO_ALL and self.dense == GPU0

    @property
    def chosen(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """(option, way, ways there are, the default first)."""
        return (
            ("--peer", self.peer, PEER_WAYS),
            ("--host-links", self.host_links, HOST_LINKS_WAYS),
            ("--dense", self.dense, DENSE_WAYS),
        )

    @property
    def unusual(self) -> str:
        """The options by which it differs from the default, as they are written; none with one GPU."""
        if self.n_gpus == 1:
            return ""
        return ", ".join(f"{option} {way}" for option, way, ways in self.chosen if way != ways[0])


ALONE = Several()
