"""Begin a wider model where a narrower one stopped: twice the hidden size and heads, and the same function.

Net2Net (Chen et al., arXiv 1511.05641): every channel of the residual stream is there twice. What writes into it
writes both; what reads from it splits its weight between the two at random, so that the halves get different gradients
and part. RMS norms see the same mean square. The last norm is halved, because the head, tied to the embedding, reads
both.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from sim.base.errors import BadInput
from traces.record.checkpoint import of_config

SPLIT_SPREAD = 0.25  # standard deviation of the share that goes to the first of two channels


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
