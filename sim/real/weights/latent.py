"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in its absorbed form, which reads the cached
latent directly: the form that `sim.profiles.geometry` prices, in prompts as in decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.profiles.geometry import Mla


@dataclass
class LatentLayer:
    """Projections of one layer, as torch's linear wants them but for the two that are absorbed."""

    q: Any  # [heads x (nope + rope), hidden, or query rank where there is one]
    q_down: Any  # [query rank, hidden], or None
    q_norm: Any  # [query rank], or None
    kv_down: Any  # [latent + rope, hidden]
    kv_norm: Any  # [latent]
    key_up: Any  # [heads, nope, latent]
    value_up: Any  # [heads, value, latent]


def latent_layer(
    mla: Mla, hidden: int, heads: int, make: Callable[..., Any], ones: Callable[[int], Any]
) -> LatentLayer:
    """Weights of one layer: `make(*shape)` values, `ones(n)` for norms."""
    rank, width = mla.q_lora_rank, heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return LatentLayer(
        make(width, rank or hidden),
        make(rank, hidden) if rank else None,
        ones(rank) if rank else None,
        make(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        ones(mla.kv_lora_rank),
        make(heads, mla.qk_nope_head_dim, mla.kv_lora_rank),
        make(heads, mla.v_head_dim, mla.kv_lora_rank),
    )


def queries(y: Any, layer: LatentLayer, norm: Callable[[Any, Any], Any], torch: Any) -> Any:
    """Queries [tokens, heads x (nope + rope)] of normed rows, before any rotation."""
    linear = torch.nn.functional.linear
    if layer.q_down is None:
        return linear(y, layer.q)
    return linear(norm(linear(y, layer.q_down), layer.q_norm), layer.q)


def attend(query: Any, cache: Any, layer: LatentLayer, mla: Mla, causal: bool, torch: Any) -> Any:
    """What the heads read [tokens, heads x value].

    Args:
        query: [heads, tokens, nope + rope], its last part rotated. cache: [positions, latent + rope], latents normed
            and keys rotated, the tokens' own included. causal: the tokens are all there is in the cache.
    """
    nope, latent = mla.qk_nope_head_dim, mla.kv_lora_rank
    lifted = torch.cat((query[..., :nope] @ layer.key_up, query[..., nope:]), -1)  # [heads, tokens, latent + rope]
    keys = cache.expand(len(lifted), *cache.shape)
    seen = torch.nn.functional.scaled_dot_product_attention(
        lifted[None],
        keys[None],
        keys[None, ..., :latent],
        is_causal=causal,
        scale=(nope + mla.qk_rope_head_dim) ** -0.5,
    )[0]
    return (seen @ layer.value_up.transpose(1, 2)).transpose(0, 1).reshape(query.shape[1], -1)
