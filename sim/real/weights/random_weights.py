"""Random weights of a model's geometry, for real runs that ask only for times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.base.device_faults import DeviceFault
from sim.base.interrupts import heard
from sim.real.weights.latent import latent_layer
from sim.real.weights.weights import TORCH_TYPES, DenseLayer, Weights

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.protocol import Device

TILE_VALUES = 1 << 21
SHIFT = 10_007  # prime: experts start at different places of the tile of random values


def random_weights(model: Model, precision: str, device: Device, seed: int, host_bytes: int) -> Weights:
    """Random values of a model's geometry.

    Args:
        host_bytes: memory that expert buffers may take; when it is less than all experts need, several experts share a
            buffer, which changes no time and no byte count, and `Weights.distinct` says so.

    Raises:
        DeviceFault: not even one layer's experts fit.
    """
    torch = device.torch
    dtype = getattr(torch, TORCH_TYPES[precision])
    size = model.expert_bytes(precision)
    n_all = model.n_moe_layers * model.n_experts
    distinct = min(n_all, host_bytes // size)
    if distinct < min(n_all, model.n_experts):
        raise DeviceFault(
            f"host memory, got room for {distinct} experts of {size} bytes: a real run needs at least one layer's "
            f"{model.n_experts}; take --model cpu-small"
        )
    generator = torch.Generator().manual_seed(seed)
    tile = (torch.randn(TILE_VALUES, generator=generator) * 0.02).to(dtype)
    buffers = device.host_buffers(distinct, size)
    for index, buffer in enumerate(buffers):
        heard()
        _fill(buffer.view(dtype), tile, index * SHIFT)
    experts = [
        [buffers[(layer * model.n_experts + expert) % distinct] for expert in range(model.n_experts)]
        for layer in range(model.n_moe_layers)
    ]
    used = 0

    def make(*shape: int) -> Any:
        nonlocal used
        used += 1
        host = torch.empty(shape, dtype=dtype)
        _fill(host.view(-1), tile, used * SHIFT + 1)
        return host.to(device.place)

    def ones(n: int = model.hidden_size) -> Any:
        return torch.ones(n, dtype=dtype, device=device.place)

    moe = set(model.moe_layer_ids)
    hidden, layers = model.hidden_size, []
    for layer in range(model.n_layers):
        dense = _attention_of(model, make, ones)
        width = model.shared_intermediate_size if layer in moe else model.dense_intermediate_size
        if layer in moe:
            dense.gate = make(model.n_experts, hidden)
        if width:
            dense.ffn = make(3, width, hidden)
        if layer in moe and model.shared_gate:
            dense.shared_gate = make(1, hidden)
        layers.append(dense)
    embedding = make(model.vocab_size, hidden)
    head = embedding if model.tied_embeddings else make(model.vocab_size, hidden)
    return Weights(
        dtype,
        dtype.itemsize,
        embedding,
        head,
        ones(),
        layers,
        experts,
        model.expert_intermediate_size,
        distinct,
        precision=precision,
    )


def _attention_of(model: Model, make: Callable[..., Any], ones: Callable[..., Any]) -> DenseLayer:
    """Norms and attention of one layer."""
    hidden, heads = model.hidden_size, model.n_heads
    if model.mla is not None:
        mine = latent_layer(model.mla, hidden, heads, make, ones)
        return DenseLayer(ones(), None, None, None, make(hidden, heads * model.mla.v_head_dim), ones(), latent=mine)
    q, kv = heads * model.head_dim, model.n_kv_heads * model.head_dim
    return DenseLayer(ones(), make(q, hidden), make(kv, hidden), make(kv, hidden), make(hidden, q), ones())


def _fill(target: Any, tile: Any, start: int) -> None:
    """Write the tile over and over, from `start` on."""
    at, offset = 0, start % len(tile)
    while at < len(target):
        n = min(len(tile) - offset, len(target) - at)
        target[at : at + n] = tile[offset : offset + n]
        at, offset = at + n, 0
