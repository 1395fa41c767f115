"""Machines whose CPU and GPU have one memory: what cannot run there, and what lies in it beside a model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput, DoesNotFit
from sim.base.units import show_bytes

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.profiles.hardware import Hardware
    from sim.setup.setup import Setup


def check_copies(hw: Hardware, policy: Policy) -> None:
    """Raises BadInput where a policy would copy experts within one memory."""
    if hw.one_memory:
        raise BadInput(
            f"policy {policy.name} on {hw.id}: CPU and GPU have one memory there, so that no expert is copied or left "
            "to the CPU; take gpu_only or llama_cpp with room for every expert (a lower --precision, no --vram, no cap)"
        )


def check_beside(setup: Setup) -> None:
    """Raises where what lies in host memory finds no room beside the rest, or would only move within one memory."""
    spec, hw, host_bytes = setup.spec, setup.hw, setup.model.host_bytes(setup.spec.precision)
    needs_bytes = setup.memory.needs_bytes + host_bytes
    if host_bytes and needs_bytes > setup.memory.vram_bytes and not setup.memory.hypothetical:
        raise DoesNotFit(
            f"{setup.model.id} in {spec.precision} on {hw.id}: with {show_bytes(host_bytes)} of tables beside it needs "
            f"{show_bytes(needs_bytes)} of {show_bytes(setup.memory.vram_bytes)}, which is all of its memory; take a "
            "lower precision or a smaller model",
            {**setup.memory.sizes(), "host_tables_bytes": host_bytes, "vram_bytes": setup.memory.vram_bytes},
        )
    if setup.kv is not None and setup.kv.swaps:
        raise BadInput(f"--set kv.preempt, got 'swap' on {hw.id}: within one memory it frees nothing; leave it out")
