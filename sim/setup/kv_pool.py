"""The pool of pages that a run asks for: whether every request fits, what it means for the plan of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.base.errors import BadInput, DoesNotFit
from sim.base.units import show_bytes
from sim.options import OPTIONS, RunSpec
from sim.setup.memory import Demand, kv_token_bytes
from sim.workload.kv_memory import KvPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.workload.iterations import RequestInfo


def kv_pool(spec: RunSpec, model: Model, requests: Sequence[RequestInfo]) -> KvPool | None:
    """The pool that was asked for; None where none was.

    Raises:
        BadInput: options of a pool without one, or a request larger than all of it.
    """
    if spec.kv_memory is None:
        for row in (OPTIONS.by_field["kv_page"], OPTIONS.by_field["kv_preempt"]):
            if (value := getattr(spec, row.field)) != row.default:
                raise BadInput(f"{row.said}, got {value!r} without a pool, where nobody is refused; add --kv-memory")
        return None
    pool = KvPool.of(spec.kv_memory, spec.kv_page, kv_token_bytes(model, spec.precision), spec.kv_preempt)
    pool.check(requests, spec.kv_memory)
    return pool


def demand_of(pool: KvPool, spec: RunSpec, requests: Sequence[RequestInfo], without: Demand) -> Demand:
    """What the workload asks of memory with a pool, in place of `without` one."""
    widest = without.iteration_tokens
    if without.batch > 1 and not pool.swaps and spec.prefill_chunk is None:
        # Who made room is prefilled with all that it has put out.
        widest = max(widest, *(r.prompt_len + r.outputs - 1 for r in requests))
    n_tokens = pool.n_pages * pool.page_tokens
    return replace(without, contexts=(n_tokens,), iteration_tokens=widest, kv_bytes=spec.kv_memory)


def check_host_room(
    pool: KvPool, hw: Hardware, experts_bytes: int, requests: Sequence[RequestInfo], batch: int, above_drive: bool
) -> None:
    """Raises DoesNotFit where host memory, besides experts, cannot take all pages that may lie there at a time.

    Args:
        batch: requests that run together at most; one of them always stays. above_drive: experts may have less of it.
    """
    if not pool.swaps:
        return
    away = sorted((pool.most_pages(r) for r in requests), reverse=True)[: batch - 1]
    has_bytes, swapped_bytes = int(hw.cpu.memory_bytes.value), sum(away) * pool.page_bytes
    if experts_bytes + swapped_bytes > has_bytes:
        less = "less --ram for experts, " if above_drive else ""
        raise DoesNotFit(
            f"--set kv.preempt, got 'swap': up to {show_bytes(swapped_bytes)} of KV cache may go to host memory, "
            f"{hw.id}'s "
            f"host has {show_bytes(has_bytes)}, {show_bytes(experts_bytes)} of it for experts; take --set kv.preempt "
            f"recompute, a smaller --batch, {less}or --set hw.cpu.memory_bytes=...",
            {"host_experts_bytes": experts_bytes, "swapped_bytes": swapped_bytes, "host_memory_bytes": has_bytes},
        )
