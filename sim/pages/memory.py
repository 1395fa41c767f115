"""What GPU 0's memory held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.units import show_bytes
from sim.pages.page import Column, Plot, Section, Table
from sim.pages.plots import axis, bars, said

if TYPE_CHECKING:
    from sim.pages.inputs import Run

ITEMS = {
    "dense_bytes": "dense weights",
    "peak_expert_bytes": "experts, at most",
    "kv_cache_bytes": "KV cache",
    "activation_bytes": "activations",
    "predictor_bytes": "predictor",
    "reserve_bytes": "reserve (assumed)",
}


def memory(run: Run) -> Section:
    """The parts of the peak, beside what the card has."""
    sizes = run.result.memory
    parts = [(title, int(getattr(sizes, key))) for key, title in ITEMS.items()]
    free = sizes.vram_bytes - sum(n_bytes for _, n_bytes in parts)
    shown = [*((title, n_bytes) for title, n_bytes in parts if n_bytes), *([("free", free)] if free > 0 else [])]
    traces = [
        bars(title, ["GPU 0"], [n_bytes], at, across=True, **said("", title, "bytes", name=False))
        for at, (title, n_bytes) in enumerate(shown)
    ]
    layout = {
        "barmode": "stack",
        "xaxis": axis("bytes at the peak", "bytes"),
        "yaxis": {"type": "category", "fixedrange": True},
    }
    rows: list[list[Any]] = [
        *([title, n_bytes] for title, n_bytes in shown),
        ["the card, or its cap", sizes.vram_bytes],
        ["expert budget", sizes.expert_budget_bytes],
        ["one expert", run.result.expert_bytes],
        ["experts in host memory", run.result.peak_host_bytes],
    ]
    table = Table("Bytes of GPU 0, and of the host.", [Column("what"), Column("size", "bytes")], rows)
    sentence = (
        f"{show_bytes(run.result.peak_vram_bytes)} of {show_bytes(sizes.vram_bytes)} in use at most; "
        "experts take what the rest leaves."
    )
    return Section(
        "memory", "Memory", sentence, [Plot("memory", "GPU 0's memory at the peak.", traces, layout, 170), table]
    )
