"""Begin a model where another stopped: grown to twice the width, cut into finer experts, or both.

Growing is Net2Net (Chen et al., arXiv 1511.05641), and keeps the function: every channel of the residual stream is
there twice. What writes into it writes both; what reads from it splits its weight between the two at random, so that
the halves get different gradients and part. RMS norms see the same mean square. The last norm is halved, because the
head, tied to the embedding, reads both.

Cutting is upcycling (Komatsuzaki et al., arXiv 2212.05055) with experts cut finer (DeepSeekMoE, arXiv 2401.06066):
embedding, attention and norms are the old model's, of layers taken evenly; every new expert is a slice of an old
expert's columns, and its gate row that expert's plus noise, so that slices of one expert part. The shared expert has
some columns of every expert, and so has a layer without experts. What is added up is scaled to the size of what it
stands for: the new function is near the old one, and equal to it only where nothing is left out.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from sim.base.errors import BadInput
from tools.train.model import moe_layers, renormalises, router_of
from traces.record.checkpoint import of_config

SPLIT_SPREAD = 0.25  # standard deviation of the share that goes to the first of two channels
SHARPER = 2.0  # a softmax over several slices of every expert is flatter than one over the experts
NOISE = 0.5  # standard deviation of what a gate row gets, in those of the old gate's entries
SHARED_FRAC = 0.4  # of a layer's output that comes from the shared expert at first
_PROBES = 512  # random gate inputs that tell how much of the scores the chosen experts have


def grown(small: Any, seed: int) -> Any:
    """A model of twice the hidden size and heads of `small` with its function."""
    config = copy.deepcopy(small.config)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, 2 * getattr(config, name))
    wide = of_config(config)
    grow(small, wide, seed)
    return wide


@torch.no_grad()
def grow(small: Any, wide: Any, seed: int) -> None:
    """Give `wide` (twice as wide, else alike) the function of `small`. Raises BadInput when sizes do not fit."""
    rng = torch.Generator().manual_seed(seed)
    source = dict(small.named_parameters())
    for name, target in wide.named_parameters():
        values = source[name].detach().float()
        for axis in range(values.ndim):
            if target.shape[axis] == values.shape[axis]:
                continue
            if target.shape[axis] != 2 * values.shape[axis]:
                sizes = f"{tuple(values.shape)} to {tuple(target.shape)}"
                raise BadInput(f"{name}: from {sizes}: a model grows to twice its hidden size, or not at all")
            read = values.ndim > 1 and axis == values.ndim - 1 and "embed_tokens" not in name
            if read:
                share = 0.5 + SPLIT_SPREAD * torch.randn(values.shape, generator=rng)
                values = torch.cat([values * share, values * (1 - share)], dim=axis)
            else:
                values = torch.cat([values, values], dim=axis)
        if name.startswith("model.norm.") and target.shape != source[name].shape:
            values = values / 2
        target.copy_(values)


def fits(old: Any, new: Any) -> bool:
    """Whether `new` is of another shape than `old`, so that `upcycle` is what begins it."""
    names = ("model_type", "num_hidden_layers", "num_experts_per_tok")
    differ = any(getattr(old.config, name) != getattr(new.config, name) for name in names)
    return differ or _sizes(old.model.layers[-1])[0] != _sizes(new.model.layers[-1])[0]


def begin(old: Any, new: Any, seed: int) -> None:
    """Begin `new` from `old`: grown to twice the size, cut into finer experts, or both. Raises BadInput."""
    if not fits(old, new):
        grow(old, new, seed)
        return
    if new.config.hidden_size == 2 * old.config.hidden_size:
        old = grown(old, seed)
    upcycle(old, new, seed)


@torch.no_grad()
def upcycle(old: Any, new: Any, seed: int) -> None:
    """Give `new` about the function of `old`. Raises BadInput when it cannot begin from such a model."""
    if any(getattr(old.config, name) != getattr(new.config, name) for name in ("hidden_size", "num_attention_heads")):
        sizes = f"{old.config.hidden_size} to {new.config.hidden_size}"
        raise BadInput(f"hidden size, from {sizes}: a model of another shape begins at the same size; see --hidden")
    old_layers, new_layers = list(old.model.layers), list(new.model.layers)
    plain = len(moe_layers(old)) == len(old_layers) and _shared(old_layers[0]) is None
    if len(old_layers) < len(new_layers) or not plain:
        raise BadInput(
            f"{len(old_layers)} layers of {old.config.model_type} to {len(new_layers)}: a model of another shape "
            "begins from one of at least as many layers, experts in each and none of them shared (Mixtral's)"
        )
    rng = torch.Generator().manual_seed(seed)
    for name in ("embed_tokens", "norm"):
        getattr(new.model, name).load_state_dict(getattr(old.model, name).state_dict())
    for index, layer in enumerate(new_layers):
        before = old_layers[index * len(old_layers) // len(new_layers)]
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).load_state_dict(getattr(before, name).state_dict())
        for name, parameter in layer.self_attn.named_parameters():
            known = dict(before.self_attn.named_parameters()).get(name)
            parameter.zero_() if known is None else parameter.copy_(known)  # a bias where there was none
        if hasattr(layer.mlp, "experts"):
            _begin_experts(before, layer, rng)
        else:
            _begin_dense(_matrices(before), layer.mlp, 1.0)


def _begin_experts(before: Any, layer: Any, rng: torch.Generator) -> None:
    """Gate, experts and shared expert of one layer."""
    old_n, old_width = _sizes(before)
    new_n, width = _sizes(layer)
    parent = torch.arange(new_n) % old_n
    columns = ((torch.arange(new_n) // old_n)[:, None] * width + torch.arange(width)) % old_width
    rows = router_of(before).weight
    noise = NOISE * rows.std() * torch.randn(new_n, rows.shape[1], generator=rng)
    router_of(layer).weight.copy_(SHARPER * rows[parent] + noise)

    gate, up, down = _matrices(before)  # each [experts, columns, hidden]
    experts, shared = layer.mlp.experts, _shared(layer)
    at = (parent[:, None], columns)
    experts.gate_up_proj.copy_(torch.cat([gate[at], up[at]], dim=1))
    routed_frac = 1.0 if shared is None else 1 - SHARED_FRAC
    probes = torch.randn(_PROBES, rows.shape[1], generator=rng) * layer.post_attention_layernorm.weight
    size = routed_frac * old_width / width * _chosen_mass(before, probes) / _chosen_mass(layer, probes)
    experts.down_proj.copy_((size * down[at]).transpose(1, 2))
    if shared is None:
        return
    layer.mlp.shared_expert_gate.weight.zero_()  # half open
    _begin_dense((gate, up, down), shared, 2 * SHARED_FRAC * _chosen_mass(before, probes))


def _begin_dense(experts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mlp: Any, size: float) -> None:
    """Columns of every expert in turn, spread over each, for `size` times what all of them say in the mean."""
    gate, up, down = experts
    old_n, old_width, _ = gate.shape
    wide = mlp.down_proj.weight.shape[1]
    at = (torch.arange(wide) % old_n, torch.arange(wide) * old_width // wide % old_width)
    mlp.gate_proj.weight.copy_(gate[at])
    mlp.up_proj.weight.copy_(up[at])
    mlp.down_proj.weight.copy_((size * old_width / wide * down[at]).T)


def _chosen_mass(layer: Any, gate_inputs: torch.Tensor) -> float:
    """Sum of the weights of the chosen experts, in the mean: 1 where they are renormalised."""
    if renormalises(layer):
        return 1.0
    _, weights, _ = router_of(layer)(gate_inputs)
    return float(weights.sum(dim=-1).mean())


def _sizes(layer: Any) -> tuple[int, int]:
    """(experts, columns of each)."""
    experts, _, width = layer.mlp.experts.down_proj.shape
    return int(experts), int(width)


def _matrices(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = layer.mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    return gate, up, experts.down_proj.transpose(1, 2)


def _shared(layer: Any) -> Any:
    return getattr(layer.mlp, "shared_expert", None)
