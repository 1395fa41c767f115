"""Rates as people read them: the answer first, a line for each policy, and how requests fare at lower rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.units import show_frac, show_number, show_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from sim.studies.saturate.search import Range, Saturation


def answer(found: Sequence[Saturation], promised: str, kept_frac: float) -> str:
    """One sentence: who serves most, how much that is, and whether routing rests on little."""
    return _most(found, promised, kept_frac) + found[0].routing


def _most(found: Sequence[Saturation], promised: str, kept_frac: float) -> str:
    best = found[0]
    most = best.capacity_per_s
    tokens = show_number(best.capacity_tokens_per_s.mean)
    serves = f"{best.name} serves up to {_rate(most)} requests/s ({tokens} output tokens/s)"
    if best.kept_per_s is None:
        return serves
    if not best.kept_per_s.most:
        at = best.lowest
        least = (
            "" if at is None else f" (at {show_number(at.arrivals_per_s)} requests/s {show_frac(at.attained_frac)} do)"
        )
        return f"no rate at which {show_frac(kept_frac)} keep to {promised}{least}; {serves}"
    return f"{best.name}: {show_frac(kept_frac)} keep to {promised} up to {_rate(best.kept_per_s)} requests/s; {serves}"


def _rate(rate: Range) -> str:
    spread = "" if rate.least == rate.most else f" ({show_number(rate.least)} to {show_number(rate.most)})"
    return f"{show_number(rate.mean)}{spread}"


def rates_table(found: Sequence[Saturation], kept_frac: float) -> Table:
    """One row per policy."""
    from sim.base.tables import table

    kept = any(one.kept_per_s is not None for one in found)
    columns = ["policy", "requests/s", "output tokens/s", *([f"{show_frac(kept_frac)} keep their SLO"] if kept else [])]
    rows = table(*columns)
    for one in found:
        cells = [one.name, _rate(one.capacity_per_s), _rate(one.capacity_tokens_per_s)]
        if kept:
            cells.append("-" if one.kept_per_s is None else _rate(one.kept_per_s))
        rows.add_row(*cells)
    return rows


def curve_table(found: Sequence[Saturation]) -> Table:
    """Latency and goodput against rate."""
    from sim.base.tables import table

    slo = any(point.attained_frac is not None for one in found for point in one.curve)
    more = ["keep their SLO", "goodput tokens/s"] if slo else []
    rows = table("policy", "requests/s", "of most", "queue", "TTFT", "p95", "TPOT", *more)
    for one in found:
        for i, point in enumerate(one.curve):
            p95, tpot = point.ttft_p95_s, point.tpot_mean_s
            cells = [
                "" if i else one.name,
                show_number(point.arrivals_per_s),
                show_frac(point.arrivals_per_s / one.capacity_per_s.mean),
                show_seconds(point.queue_mean_s),
                show_seconds(point.ttft_mean_s),
                "-" if p95 is None else show_seconds(p95),
                "-" if tpot is None else show_seconds(tpot),
            ]
            if slo:
                good = point.goodput_tokens_per_s
                cells += [show_frac(point.attained_frac), "-" if good is None else show_number(good)]
            rows.add_row(*cells)
    return rows
