"""Misses by why, and the layers that GPU 0 waits for most: a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.units import show_frac, show_seconds
from sim.results.by_layer import MISSES, WAIT_DRIVE_S, WAITS_S

if TYPE_CHECKING:
    from sim.results.record import Result

MOST = 3
UNEVEN = 1.2
"""Times an even share: below that, which layer waits most says nothing."""
_WORDS = {
    "cold": "cold",
    "capacity": "capacity",
    "evicted_unused": "evicted in the same pass",
    "wrong_prediction": "wrong prediction",
    "too_late": "predicted too late",
}


def lines(result: Result) -> list[tuple[str, str]]:
    """What there is to say of decode (of prefill, when nothing decodes), as (title, text)."""
    phase = result.phases.main
    rows = [row for row in result.by_layer if row["phase"] == phase]
    found = (("misses", _misses(rows, phase)), ("waits", _waits(rows, phase)))
    return [(title, text) for title, text in found if text]


def _misses(rows: list[dict[str, Any]], phase: str) -> str:
    total = sum(row["miss_n"] for row in rows)
    whys = {why: sum(row[f"miss_{why}_n"] for row in rows) for why in MISSES}
    shares = [f"{_WORDS[why]} {show_frac(n / total)}" for why, n in sorted(whys.items(), key=_least) if n]
    return f"{total:,} in {phase}: {', '.join(shares)}" if total else ""


def _least(item: tuple[str, int]) -> int:
    return -item[1]


def _waits(rows: list[dict[str, Any]], phase: str) -> str:
    waits_s = {row["layer"]: sum(row.get(name, 0.0) for name in (*WAITS_S, WAIT_DRIVE_S)) for row in rows}
    total_s = sum(waits_s.values())
    if len(rows) <= MOST or not total_s or max(waits_s.values()) < UNEVEN * total_s / len(rows):
        return ""
    worst = sorted(waits_s, key=lambda layer: (-waits_s[layer], layer))[:MOST]
    told = ", ".join(f"{layer} ({show_frac(waits_s[layer] / total_s)})" for layer in worst)
    return f"{show_seconds(total_s)} of {phase}, most in layers {told}; an even share is {show_frac(1 / len(rows))}"
