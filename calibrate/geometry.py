"""The shapes that probes time, taken from models; models that share a shape are measured once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """A gated feed-forward block: three matrices of hidden x intermediate."""

    hidden: int
    intermediate: int

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
