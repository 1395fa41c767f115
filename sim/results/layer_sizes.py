"""What is left out where a file holds experts of unlike size and every layer's is taken to be as large as their mean.

What a lane moves in decode is counted again by the sizes of the layers that it is of. Times follow to first order: more
bytes at the lane's rate, nothing beside them, the same decisions. docs/formats.md holds that against replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.figures import SizesByLayer

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.results.by_layer import Row


def sizes_by_layer(
    sizes: Sequence[int], mean_bytes: int, rows: Sequence[Row], decode_s: float, cost: Cost
) -> SizesByLayer:
    """Of a run that is over.

    Args:
        sizes: bytes of an expert, by MoE layer; mean_bytes: what each was taken for.
        rows: what was counted by phase and layer. decode_s: simulated seconds of decode; 0 where several links, GPUs or
            a drive work side by side, so that their seconds do not add up.
    """
    decode = {row["layer"]: row for row in rows if row["phase"] == "decode"}
    more_s = 0.0
    fracs: list[float | None] = []
    for lane, bytes_per_s in (
        (_copied_bytes, cost.copies.h2d_bytes_per_s),
        (lambda row: mean_bytes * _on_cpu(row), cost.hw.cpu.memory_bandwidth_bytes_per_s.value),
        (lambda row: mean_bytes * row["gpu_n"], cost.of_experts.bandwidth),
    ):
        moved = {layer: lane(row) for layer, row in decode.items()}
        more_bytes = sum(n_bytes * (sizes[layer] / mean_bytes - 1) for layer, n_bytes in moved.items())
        fracs.append(more_bytes / sum(moved.values()) if any(moved.values()) else None)
        more_s += more_bytes / bytes_per_s
    h2d_frac, cpu_frac, gpu_frac = fracs
    tpot_frac = more_s / decode_s if decode_s else None
    return SizesByLayer(min(sizes), max(sizes), h2d_frac, cpu_frac, gpu_frac, tpot_frac)


def _copied_bytes(row: Row) -> int:
    copied: int = row["demand_copies_bytes"] + row["prefetch_issued_bytes"] - row["prefetch_cancelled_bytes"]
    return copied


def _on_cpu(row: Row) -> int:
    n: int = row["experts_n"] - row["gpu_n"] + row["cpu_ahead_n"]
    return n
