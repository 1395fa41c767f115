"""What probes time: the shapes of models, filled memory on either side of the link, and the work as a plain serving
loop would call it. Weights rotate, so every call finds them cold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sim.real.devices.protocol import Device

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_ROTATION_BYTES = 3 << 30
TILE_VALUES = 4 * 1024 * 1024
Tensor = Any


def random_tensor(device: Device, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A device tensor filled with small random numbers (zeros would draw less power and clock higher)."""
    torch = device.torch
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind, device=device.place)
    if not kind.is_floating_point:
        return tensor.fill_(1)
    flat = tensor.view(-1)
    if not device.threaded:
        flat.normal_(0.0, 0.02)
        return tensor
    # The CPU draws slowly: a tile over and over.
    tile = torch.empty(min(flat.numel(), TILE_VALUES), dtype=kind).normal_(0.0, 0.02)
    return tiled(tensor, flat, tile)


def touched_buffer(device: Device, n_bytes: int, *, pinned: bool) -> Tensor:
    """A uint8 host tensor whose pages have been touched."""
    tensor = device.on_host(n_bytes, pinned)
    tile = device.torch.randint(0, 256, (min(n_bytes, TILE_VALUES),), dtype=device.torch.uint8)
    return tiled(tensor, tensor, tile)


def tiled(tensor: Tensor, flat: Tensor, tile: Tensor) -> Tensor:
    """A tensor, filled with a tile over and over; `flat`: the same values in a row."""
    for at in range(0, flat.numel(), tile.numel()):
        part = flat[at : at + tile.numel()]
        part.copy_(tile[: part.numel()])
    return tensor


@dataclass(frozen=True)
class ExpertShape:
    """A gated feed-forward block: three matrices of hidden x intermediate."""

    hidden: int
    intermediate: int

    @property
    def key(self) -> dict[str, str | int]:
        """Its part of a point's key."""
        return {"hidden": self.hidden, "intermediate": self.intermediate}

    def weight_bytes(self, bytes_per_weight: float) -> int:
        return int(3 * self.hidden * self.intermediate * bytes_per_weight)

    def flops(self, n_tokens: int) -> float:
        return 6.0 * self.hidden * self.intermediate * n_tokens


@dataclass(frozen=True)
class AttentionShape:
    """Grouped-query attention with its projections."""

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def weight_bytes(self, bytes_per_weight: int) -> int:
        return self.hidden * self.head_dim * 2 * (self.n_heads + self.n_kv_heads) * bytes_per_weight

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.n_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True)
class MeasuredGeometry:
    """What one model's layers look like; sizes in values, not bytes."""

    model: str
    expert: ExpertShape
    shared: ExpertShape | None
    attention: AttentionShape
    n_experts: int
    top_k: int
    vocab: int


def copy_sizes(geometries: Iterable[MeasuredGeometry], max_bytes: int) -> list[int]:
    """Powers of 4 from 64 KiB to `max_bytes`, plus every model's exact expert and single matrix in bf16 (bytes)."""
    sizes = {4**k for k in range(8, 16) if 4**k <= max_bytes}
    for geometry in geometries:
        whole = geometry.expert.weight_bytes(2)
        sizes |= {size for size in (whole, whole // 3) if size <= max_bytes}
    return sorted(sizes)


def rotations(set_bytes: int, cache_bytes: int) -> int:
    """How many copies of a working set exceed 2.5 times a cache, at least 2, at most 256 or 3 GiB."""
    n = max(2, min(256, math.ceil(2.5 * cache_bytes / max(set_bytes, 1)) + 1))
    return max(2, min(n, MAX_ROTATION_BYTES // max(set_bytes, 1)))


class Experts:
    """Rotating gated feed-forward weights; gate and up are halves of one tensor, so fused and plain read the same."""

    def __init__(self, shape: ExpertShape, dtype: str, n: int, make: Callable[[tuple[int, ...], str], Tensor]) -> None:
        self.shape, self.dtype, self.n = shape, dtype, n
        self._weights = []
        for _ in range(n):
            gate_up = make((2 * shape.intermediate, shape.hidden), dtype)
            down = make((shape.hidden, shape.intermediate), dtype)
            self._weights.append((gate_up, gate_up[: shape.intermediate], gate_up[shape.intermediate :], down))

    @property
    def weight_bytes(self) -> int:
        return self.shape.weight_bytes(BYTES[self.dtype])

    def call(self, torch: Any, x: Tensor, variant: str) -> Callable[[], Any]:
        """One expert on tokens `x`: `plain` (gate, up, silu*mul, down), `fused` (gate+up in one matmul) or `loop`
        (plain, with the gather before and the weighted scatter-add after that a per-expert loop makes).
        """
        functional = torch.nn.functional
        ring = itertools.cycle(self._weights)

        def plain(tokens: Tensor) -> Any:
            _, gate, up, down = next(ring)
            hidden = functional.silu(functional.linear(tokens, gate)) * functional.linear(tokens, up)
            return functional.linear(hidden, down)

        def fused() -> Any:
            gate_up, _, _, down = next(ring)
            gate, up = functional.linear(x, gate_up).chunk(2, -1)
            return functional.linear(functional.silu(gate) * up, down)

        rows = torch.arange(x.shape[0], device=x.device)
        share = torch.ones((x.shape[0], 1), dtype=x.dtype, device=x.device)
        out = torch.zeros_like(x)

        def loop() -> Any:
            return out.index_add_(0, rows, plain(x[rows]) * share)

        return {"plain": lambda: plain(x), "fused": fused, "loop": loop}[variant]


INT4_GROUPS = (128, 64, 32)  # weights that share a scale and a zero point, where they divide the width


class Int4Experts:
    """Rotating 4-bit experts for torch's own kernel (`_weight_int4pack_mm`: bf16 rows, 4-bit weights in groups)."""

    def __init__(self, torch: Any, shape: ExpertShape, n: int, device: str) -> None:
        self._torch = torch
        self._weights = []
        for _ in range(n):
            gate, up = (self._packed(shape.intermediate, shape.hidden, device) for _ in range(2))
            self._weights.append((gate, up, self._packed(shape.hidden, shape.intermediate, device)))

    def _packed(self, n: int, k: int, device: str) -> tuple[Any, int, Any]:
        """Weights [n, k] in the kernel's order, the size of a group, and scales and zeros [k / group, n, 2]."""
        torch = self._torch
        group = next((size for size in INT4_GROUPS if k % size == 0), 0)
        if not group or n % 8:
            raise ValueError(f"the 4-bit kernel takes widths of whole groups of {INT4_GROUPS[-1]}, not {n} x {k}")
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        scales = torch.full((k // group, n, 2), 0.01, dtype=torch.bfloat16, device=device)
        return torch.ops.aten._convert_weight_to_int4pack(codes, min(8, group // 16)), group, scales

    def call(self, x: Tensor) -> Callable[[], Any]:
        """One expert on bf16 tokens `x`, gate, up, silu * mul and down as of `Experts.call`'s `plain`."""
        product, functional = self._torch.ops.aten._weight_int4pack_mm, self._torch.nn.functional
        ring = itertools.cycle(self._weights)

        def int4() -> Any:
            gate, up, down = next(ring)
            return product(functional.silu(product(x, *gate)) * product(x, *up), *down)

        return int4


def gate_call(device: Device, hidden: int, n_experts: int, top_k: int, n_tokens: int, dtype: str) -> Callable[[], Any]:
    """Norm, router, softmax, top-k and renormalisation of one layer."""
    torch = device.torch
    functional = torch.nn.functional
    weights = [random_tensor(device, (n_experts, hidden), dtype) for _ in range(8)]
    scale = random_tensor(device, (hidden,), dtype)
    x = random_tensor(device, (n_tokens, hidden), dtype)
    ring = itertools.cycle(weights)

    def call() -> Any:
        logits = functional.linear(functional.rms_norm(x, (hidden,), scale), next(ring))
        share, ids = torch.topk(functional.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
        return share / share.sum(dim=-1, keepdim=True), ids

    return call


def head_call(device: Device, hidden: int, vocab: int, n_tokens: int, dtype: str) -> Callable[[], Any]:
    """Final norm, vocabulary projection and argmax."""
    functional = device.torch.nn.functional
    n = rotations(hidden * vocab * BYTES[dtype], device.facts.l2_bytes)
    ring = itertools.cycle([random_tensor(device, (vocab, hidden), dtype) for _ in range(n)])
    scale = random_tensor(device, (hidden,), dtype)
    x = random_tensor(device, (n_tokens, hidden), dtype)
    return lambda: functional.linear(functional.rms_norm(x, (hidden,), scale), next(ring)).argmax(dim=-1)


class Attention:
    """Norm, projections, rotary embedding, cache write, SDPA over a KV cache and output projection."""

    def __init__(self, device: Device, shape: AttentionShape, dtype: str) -> None:
        self._device, self._shape, self._dtype = device, shape, dtype
        q_width, kv_width = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        n = rotations(shape.weight_bytes(BYTES[dtype]), device.facts.l2_bytes)
        self._weights = [
            tuple(
                random_tensor(device, size, dtype)
                for size in (
                    (q_width, shape.hidden),
                    (kv_width, shape.hidden),
                    (kv_width, shape.hidden),
                    (shape.hidden, q_width),
                )
            )
            for _ in range(n)
        ]
        self._scale = random_tensor(device, (shape.hidden,), dtype)

    def kv_bytes(self, batch: int, context: int) -> int:
        """Bytes of one layer's cache."""
        return batch * context * self._shape.kv_bytes_per_token(BYTES[self._dtype])

    def call(self, batch: int, n_new: int, context: int) -> Callable[[], Any]:
        """`n_new` tokens per sequence attend to `context` positions, themselves included (decode: 1; prefill: all)."""
        device, shape, torch = self._device, self._shape, self._device.torch
        functional = torch.nn.functional
        n_caches = min(8, rotations(self.kv_bytes(batch, context), device.facts.l2_bytes))
        size = (batch, shape.n_kv_heads, context, shape.head_dim)
        caches = [tuple(random_tensor(device, size, self._dtype) for _ in range(2)) for _ in range(n_caches)]
        x = random_tensor(device, (batch, n_new, shape.hidden), self._dtype)
        cos = random_tensor(device, (n_new, shape.head_dim), self._dtype)
        sin = random_tensor(device, (n_new, shape.head_dim), self._dtype)
        weights, kv = itertools.cycle(self._weights), itertools.cycle(caches)
        grouped = {"enable_gqa": True} if shape.n_heads != shape.n_kv_heads else {}
        half = shape.head_dim // 2

        def heads(t: Tensor, n: int) -> Any:
            return t.view(batch, n_new, n, shape.head_dim).transpose(1, 2)

        def rope(t: Tensor) -> Any:
            return t * cos + torch.cat((-t[..., half:], t[..., :half]), dim=-1) * sin

        def call() -> Any:
            w_q, w_k, w_v, w_o = next(weights)
            keys, values = next(kv)
            y = functional.rms_norm(x, (shape.hidden,), self._scale)
            query = rope(heads(functional.linear(y, w_q), shape.n_heads))
            keys[:, :, context - n_new :] = rope(heads(functional.linear(y, w_k), shape.n_kv_heads))
            values[:, :, context - n_new :] = heads(functional.linear(y, w_v), shape.n_kv_heads)
            mixed = functional.scaled_dot_product_attention(query, keys, values, is_causal=n_new > 1, **grouped)
            return functional.linear(mixed.transpose(1, 2).reshape(batch, n_new, -1), w_o)

        return call
