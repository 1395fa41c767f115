"""Rates as people read them: the answer first, a line for each policy, and how requests fare at lower rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.tables import tabled
from sim.base.units import show_frac, show_number, show_value

if TYPE_CHECKING:
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


def _rate(rate: Range | None) -> str:
    if rate is None:
        return "-"
    spread = "" if rate.least == rate.most else f" ({show_number(rate.least)} to {show_number(rate.most)})"
    return f"{show_number(rate.mean)}{spread}"


def rates_table(found: Sequence[Saturation], kept_frac: float) -> str:
    """One row per policy."""
    kept = any(one.kept_per_s is not None for one in found)
    titles = ["policy", "requests/s", "output tokens/s", *([f"{show_frac(kept_frac)} keep their SLO"] if kept else [])]
    return tabled(titles, [[one.name, *map(_rate, _rates(one)[: len(titles) - 1])] for one in found])


def _rates(one: Saturation) -> list[Range | None]:
    return [one.capacity_per_s, one.capacity_tokens_per_s, one.kept_per_s]


def curve_table(found: Sequence[Saturation]) -> str:
    """Latency and goodput against rate."""
    slo = any(point.attained_frac is not None for one in found for point in one.curve)
    more = ["keep their SLO", "goodput tokens/s"] if slo else []
    titles = ["policy", "requests/s", "of most", "queue", "TTFT", "p95", "TPOT", *more]
    rows = []
    for one in found:
        for i, at in enumerate(one.curve):
            rate = show_number(at.arrivals_per_s), show_frac(at.arrivals_per_s / one.capacity_per_s.mean)
            times = (at.queue_mean_s, at.ttft_mean_s, at.ttft_p95_s, at.tpot_mean_s)
            kept = [show_frac(at.attained_frac), show_value(at.goodput_tokens_per_s)] if slo else []
            rows.append(["" if i else one.name, *rate, *(show_value(time_s, "s") for time_s in times), *kept])
    return tabled(titles, rows)
