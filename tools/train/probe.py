"""Watch a Hugging Face MoE model route: gate inputs, router outputs and what the experts were really given.

All tensors are per MoE layer and flattened over batch and position, so row `b * S + s` is position s of sequence b.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from sim.base.errors import CheckFailed
from tools.train.model import moe_layers, router_of, shared_output


@dataclass(frozen=True)
class Routing:
    """What one forward did, N = rows: ids and weights [N,L,K], logits [N,L,E], gate inputs and residuals [N,L,h]."""

    ids: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    gate_input: torch.Tensor
    residual: torch.Tensor

    @staticmethod
    def joined(parts: list[Routing]) -> Routing:
        """Concatenate along the rows."""
        return Routing(*(torch.cat([getattr(p, name) for p in parts]) for name in Routing.__dataclass_fields__))


class RoutingProbe:
    """Context manager; after a forward of the model, `take()` returns its Routing.

    The ids and weights are those the experts module received. That they are the router's output, and that they are the
    top-k of the full softmax in descending order, is checked on every forward: a trace must hold what the model did.
    """

    def __init__(self, model: Any) -> None:
        self.layers = moe_layers(model)
        self.top_k = int(model.config.num_experts_per_tok)
        self._handles: list[Any] = []
        self._seen: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> RoutingProbe:
        self._seen = [{} for _ in self.layers]
        for layer, seen in zip(self.layers, self._seen, strict=True):
            self._handles += [
                layer.post_attention_layernorm.register_forward_hook(_store_norm(seen)),
                router_of(layer).register_forward_hook(_store_router(seen)),
                layer.mlp.experts.register_forward_pre_hook(_store_experts(seen), with_kwargs=True),
            ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> Routing:
        """The routing of the last forward. Raises CheckFailed if what was seen is not what the experts used."""
        stacked = {key: torch.stack([seen[key] for seen in self._seen], dim=1) for key in self._seen[0]}
        if not torch.equal(stacked["ids"], stacked["router_ids"]):
            raise CheckFailed("router and experts disagree on the chosen experts: the model class routes elsewhere")
        scores = stacked["logits"].softmax(dim=-1)
        top = scores.topk(self.top_k, dim=-1)
        own = scores.gather(-1, stacked["ids"])  # compared by value: scores that round to one may come in either order
        if not torch.equal(top.values, own):
            raise CheckFailed("the chosen experts are not the top-k of the router's scores in descending order")
        names = ("ids", "weights", "logits", "gate_input", "residual")
        return Routing(*(stacked[name] for name in names))


def _store_norm(seen: dict[str, torch.Tensor]) -> Any:
    def hook(_module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen["residual"] = args[0].reshape(-1, args[0].shape[-1])
        seen["gate_input"] = output.reshape(-1, output.shape[-1])

    return hook


def _store_router(seen: dict[str, torch.Tensor]) -> Any:
    def hook(_module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits, weights, ids = output
        seen["logits"], seen["router_ids"] = logits.float(), ids
        seen["weights"] = weights.float()

    return hook


def _store_experts(seen: dict[str, torch.Tensor]) -> Any:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["ids"] = args[1] if len(args) > 1 else kwargs["top_k_index"]

    return hook


def router_weights(model: Any) -> torch.Tensor:
    """Weights of all routers [L,E,h]."""
    return torch.stack([router_of(layer).weight.detach() for layer in moe_layers(model)])


def ahead_scores(weights: torch.Tensor, gate_input: torch.Tensor, distance: int) -> torch.Tensor:
    """softmax(router_{(l+distance) mod L}(gate input of layer l)), [N,L,E], for gate inputs [N,L,h].

    Past the last layer the router of the first ones is applied: it predicts the *next* token.
    """
    logits = torch.einsum("nlh,leh->nle", gate_input, weights.roll(-distance, dims=0))
    return logits.float().softmax(-1)


def skip_attention_scores(model: Any, gate_input: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Scores [N,L,E] of layer l+1 predicted at layer l by Importance-Driven Expert Scheduling; the last row is zero.

    x = gate input + shared expert's output + residual, as if no routed expert had contributed; then the next layer with
    its attention replaced by the identity: router(post_norm(x + input_norm(x))). The kept residual is what the public
    code does (goingshr/SMoE, utils/prefetch_norm.py at c014161); the card's wording leaves it open.
    """
    layers = moe_layers(model)
    rows, depth, _ = gate_input.shape
    out = torch.zeros(rows, depth, router_of(layers[0]).weight.shape[0], device=gate_input.device)
    for i, (layer, after) in enumerate(pairwise(layers)):
        here = gate_input[:, i]
        shared = shared_output(layer, here)
        x = here + residual[:, i] if shared is None else here + shared + residual[:, i]
        x = after.post_attention_layernorm(x + after.input_layernorm(x))
        out[:, i] = (x @ router_of(after).weight.T).float().softmax(-1)
    return out
