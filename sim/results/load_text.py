"""Times of requests under load as people read them: means and percentiles, each above the ends of its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.tables import plain
from sim.base.units import show_count, show_seconds, show_value
from sim.figures import Errors
from sim.results.figure import label_of

if TYPE_CHECKING:
    from sim.base.tables import Table
    from sim.figures import Ends, Statistic
    from sim.results.record import Result

PERCENTILES = ("p50", "p90", "p95", "p99")


def under_load(result: Result) -> Table:
    """TTFT, its queue, and end to end; no row where requests come back to back."""
    named = ((label_of(f"{key}.mean"), getattr(result, key)) for key in ("ttft_s", "queue_s", "e2e_s"))
    known = [(title, stat, stat.sampling) for title, stat in named if isinstance(stat.sampling, Errors)]
    rows = plain("under load", "mean", *PERCENTILES) if known else plain("")
    for title, stat, errors in known:
        rows.add_row(title, *(show_value(_value(stat, name), "s") for name in ("mean", *PERCENTILES)))
        ends: list[Ends] = [getattr(errors, name) for name in ("mean", *PERCENTILES)]
        shown = ("-" if one is None else f"{show_seconds(one[0])} - {show_seconds(one[1])}" for one in ends)
        blocks = f"{show_count(errors.blocks, 'block')} of {errors.block_requests:,}"
        rows.add_row(f"  95 %, {blocks}", *shown)
    return rows


def _value(stat: Statistic, name: str) -> float | None:
    value: float | None = getattr(stat, name)
    return value
