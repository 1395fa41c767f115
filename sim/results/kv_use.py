"""What a run's pool of pages came to: how much of it was held, and what making room cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.figures import KvUse

if TYPE_CHECKING:
    from sim.engine.report import Report


def kv_use(report: Report, preempt: str) -> KvUse | None:
    """Of a run that is over; None where it had no pool."""
    memory = report.kv
    if memory is None:
        return None
    pool = memory.pool
    return KvUse(
        page_tokens=pool.page_tokens,
        page_bytes=pool.page_bytes,
        pages=pool.n_pages,
        peak_pages=memory.peak_pages,
        mean_pages=memory.mean_pages,
        preempt=preempt,
        preemptions=sum(memory.n_preemptions.values()),
        preempted_requests=len(memory.n_preemptions),
        preempted_s=math.fsum(times.away_s for times in report.requests),
        recomputed_tokens=memory.recomputed_tokens,
        kv_swap_out_bytes=memory.n_out_pages * pool.page_bytes,
        kv_swap_in_bytes=memory.n_in_pages * pool.page_bytes,
        peak_swapped_bytes=memory.peak_swapped_pages * pool.page_bytes,
    )
