"""Weights of a geometry: experts in host memory, everything else on the device. Random, or a checkpoint's.

An expert lies as [3, intermediate, hidden]: `gate`, `up`, and `down` transposed. So a whole matrix, which a policy may
copy alone, is one contiguous run of bytes, and a slice of the expert's columns is three.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.device_faults import DeviceFault
from sim.base.errors import BadInput
from sim.base.interrupts import heard
from sim.real.weights.forms import Form, pack
from sim.real.weights.latent import LatentLayer, latent_layer

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.protocol import Device

TORCH_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TILE_VALUES = 1 << 21
SHIFT = 10_007  # prime: experts start at different places of the tile of random values


def check_supported(model: Model, precision: str) -> None:
    """Raises BadInput naming what a real run cannot carry out, and a model that it can."""
    out = "; try --model cpu-small"
    if precision not in TORCH_TYPES:
        raise BadInput(f"--real, got --precision {precision}: real kernels here take {', '.join(TORCH_TYPES)}{out}")
    if model.encoder is not None:
        raise BadInput(f"--real, got --model {model.id}: an encoder is not carried out, only decoders are{out}")
    if model.matrices_per_expert != 3:
        raise BadInput(f"--real, got --model {model.id}: experts of {model.matrices_per_expert} matrices are not "
                       f"carried out, only gated ones (3) are{out}")  # fmt: skip


@dataclass
class DenseLayer:
    """One decoder layer but for its routed experts; matrices as torch's linear wants them."""

    norm1: Any
    q: Any  # of latent attention q, k and v are in `latent`
    k: Any
    v: Any
    o: Any
    norm2: Any
    gate: Any = None  # router [experts, hidden]
    ffn: Any = None  # dense FFN or shared experts, matrices as of an expert
    shared_gate: Any = None
    latent: LatentLayer | None = None


@dataclass
class Weights:
    """Everything a decoder computes with.

    `experts[layer][expert]` is uint8 host memory; `distinct` tells how many host buffers there are for all of them.
    """

    dtype: Any
    element_bytes: int
    embedding: Any
    head: Any
    final_norm: Any
    layers: list[DenseLayer]
    experts: list[list[Any]]
    rows: int  # of an expert: its intermediate size
    distinct: int
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    precision: str = "fp32"  # the serving one
    forms: dict[str, Form] = field(default_factory=dict)  # by precision

    def form(self, precision: str, device: Device) -> Form:
        """All experts in a precision, packed when first asked for. Raises BadInput for a precision there is not."""
        found = self.forms.get(precision)
        if found is None:
            hidden, n_rows = self.embedding.shape[1], 3 * self.rows
            buffers = list({raw.data_ptr(): raw for row in self.experts for raw in row}.values())
            if precision == self.precision:
                row_bytes = hidden * self.element_bytes
                found = Form(precision, row_bytes, hidden, self.dtype, buffers, None, self.dtype)
            else:
                found = pack(precision, buffers, self.dtype, hidden, n_rows, device)
            self.forms[precision] = found
        return found

    @property
    def hidden_size(self) -> int:
        """Values of a hidden row."""
        return int(self.embedding.shape[1])

    def matrices(self, layer: int, expert: int) -> Any:
        """An expert's matrices [3, intermediate, hidden] as they lie in host memory."""
        values = self.experts[layer][expert].view(self.dtype)
        return values[: 3 * self.rows * self.hidden_size].view(3, self.rows, self.hidden_size)

    def index(self, layer: int, expert: int) -> int:
        """Which of the distinct buffers holds an expert."""
        return (layer * len(self.experts[0]) + expert) % self.distinct

    def checksum(self, layer: int, expert: int) -> int:
        """CRC-32 of an expert as it lies in host memory."""
        return zlib.crc32(self.experts[layer][expert].numpy())

    def perturb(self, layer: int, expert: int) -> None:
        """Change one number of one expert: what is computed with it must change."""
        values = self.experts[layer][expert].view(self.dtype)
        values[7] = values[7] + 1.0
        self.forms.clear()


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
    experts = [[buffers[(layer * model.n_experts + expert) % distinct] for expert in range(model.n_experts)]
               for layer in range(model.n_moe_layers)]  # fmt: skip
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
    return Weights(dtype, dtype.itemsize, embedding, head, ones(), layers, experts, model.expert_intermediate_size,
                   distinct, precision=precision)  # fmt: skip


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


def checkpoint_weights(folder: Path, model: Model, precision: str, device: Device) -> Weights:
    """A Mixtral-style checkpoint (safetensors) of this project's trainer. Raises BadInput for any other."""
    from traces.train.model import load

    torch = device.torch
    net = load(folder)
    config = net.config
    if config.model_type != "mixtral":
        raise BadInput(f"{folder}: a {config.model_type} checkpoint; real runs read mixtral ones")
    dtype = getattr(torch, TORCH_TYPES[precision])

    def place(tensor: Any) -> Any:
        return tensor.detach().to(dtype).contiguous().to(device.place)

    size = model.expert_bytes(precision)
    n_all = model.n_moe_layers * model.n_experts
    buffers, experts, layers = iter(device.host_buffers(n_all, size)), [], []
    for layer in net.model.layers:
        attention, mlp, row = layer.self_attn, layer.mlp, []
        layers.append(DenseLayer(
            place(layer.input_layernorm.weight), place(attention.q_proj.weight), place(attention.k_proj.weight),
            place(attention.v_proj.weight), place(attention.o_proj.weight),
            place(layer.post_attention_layernorm.weight), place(mlp.gate.weight),
        ))  # fmt: skip
        for expert in range(model.n_experts):
            gate, up = mlp.experts.gate_up_proj[expert].detach().chunk(2, 0)
            down = mlp.experts.down_proj[expert].detach()
            matrices = torch.stack((gate, up, down.T)).to(dtype).contiguous()
            row.append(next(buffers).copy_(matrices.view(torch.uint8).view(-1)))
        experts.append(row)
    theta = float(config.rope_parameters["rope_theta"])
    embedding = place(net.model.embed_tokens.weight)
    head = embedding if config.tie_word_embeddings else place(net.lm_head.weight)
    return Weights(dtype, dtype.itemsize, embedding, head, place(net.model.norm.weight), layers, experts,
                   model.expert_intermediate_size, n_all, float(config.rms_norm_eps), theta, precision)  # fmt: skip
