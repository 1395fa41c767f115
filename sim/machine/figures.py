"""Figures that prices rest on: each quantity of a profile that a run uses, entered once with its source.

A price names its figure by the index that `enter` gave, so that a result can say what share of its time is measured,
datasheet or assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.quantities import Basis, Quantity, Source

if TYPE_CHECKING:
    from sim.profiles.hardware import Dtype, Hardware

# Arithmetic types: packed weights are multiplied in 16 bits after unpacking; fp8 uses fp8 units where they exist.
COMPUTE_TYPE: dict[str, Dtype] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
WIDER: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")

SOURCES: tuple[Source, ...] = ("measured", "datasheet", "assumed")


class Figures:
    """`entries`: (name, quantity) of each figure, in the order of their entry."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Quantity]] = []

    def enter(self, name: str, quantity: Quantity) -> int:
        """The index of a figure from now on."""
        self.entries.append((name, quantity))
        return len(self.entries) - 1

    def enter_predictors(self, hybrid_layer: int, overlap_layer: int) -> dict[Basis, int]:
        """Predictor time rests on whatever the policy says its figure rests on; the two others: on the stack's."""
        entered: dict[Basis, int] = {
            source: self.enter(f"predictor time ({source})", Quantity(value=1.0, source=source, ref="policy's file"))
            for source in SOURCES
        }
        return entered | {"stack": hybrid_layer, "overlap": overlap_layer}


def unpacked_type(flops_per_s: dict[Dtype, Quantity]) -> Dtype:
    """The 16-bit type that unpacked weights are multiplied in: bf16, or fp16 on a GPU that only emulates bf16, which
    then is slower than fp32 (Turing)."""
    rates = {kind: rate.value for kind, rate in flops_per_s.items()}
    emulated = rates.get("bf16", 0.0) < rates.get("fp32", 0.0)
    return "fp16" if emulated and "fp16" in rates else "bf16"


def multiplied_in(hw: Hardware, precision: str) -> Dtype | None:
    """The type that a GPU multiplies weights of a precision in: its own unit or, without one, the next wider type's.
    None where the profile has no rate for any of them."""
    types = (COMPUTE_TYPE.get(precision) or unpacked_type(hw.gpu.flops_per_s), *WIDER)
    return next((kind for kind in types if kind in hw.gpu.flops_per_s), None)
