"""The lower bound that holds for every run of a table: the least of the bounds that its runs have of their own.

Runs differ in lanes (experts on the CPU or not), figures and memory, so each has a bound of its own; two of them in one
column would say nothing of the rows beside one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sim.base.units import show_seconds
from sim.figures import Bound

if TYPE_CHECKING:
    from sim.results.record import Result


LANES = {"copy": "with this link and room", "copy + cpu": "with experts on the CPU too"}


def is_elsewhere(result: Result) -> bool:
    """Whether the run has memory that the card has not: nobody else's time is bounded by what it reaches there."""
    return any(label.startswith("does not fit") for label in result.caveats)


def common_bound(results: Iterable[Result]) -> tuple[Bound, Result] | None:
    """The bound of all, and the run whose own it is; None where one of them has none."""
    here = [result for result in results if not is_elsewhere(result)]
    found = [(result.lower_bound, result) for result in here if result.lower_bound is not None]
    known = [(bound.tpot_s, bound, result) for bound, result in found if bound.tpot_s is not None]
    if not known or len(found) < len(here):
        return None
    _, least, whose = min(known, key=lambda one: one[0])
    ttft = [bound.ttft_s for bound, _ in found if bound.ttft_s is not None]
    return Bound(least.tpot_s, min(ttft, default=None), least.resource, None), whose


def above_frac(result: Result, common: Bound | None) -> float | None:
    """How far a run lies above the bound of all; None of one in memory that the card has not."""
    return None if common is None or is_elsewhere(result) else result.above_frac(common.tpot_s)


def facts_of(common: Bound | None) -> dict[str, float | str | None] | None:
    """The bound of all as data."""
    return None if common is None else {"tpot_s": common.tpot_s, "ttft_s": common.ttft_s, "resource": common.resource}


def show_above(result: Result, common: Bound | None) -> str:
    """The cell of a table."""
    above = above_frac(result, common)
    return "-" if above is None else f"{100 * above:.0f} %"


def bound_line(common: Bound | None, where: str = "") -> str:
    """What stands below a table; nothing without a bound. `where`: settings of the run whose own it is."""
    if common is None or common.tpot_s is None:
        return ""
    at = f", {where}" if where else ""
    least = show_seconds(common.tpot_s)
    return f"lower bound: TPOT {least}, which no lossless policy in this table beats ({LANES[common.resource]}{at})\n"
