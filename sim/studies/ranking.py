"""One row of a comparison, and what ranks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.base.units import show_seconds
from sim.figures import Bound, Timed
from sim.results.record import Result
from sim.results.sampling import Sample, ranks
from sim.studies.common_bound import above_frac

AS_FAST = 1.0 + 1e-9  # a ratio of times below this is rounding


class Row(NamedTuple):
    """A run of the comparison: what the user called it, its result, and what is ranked of every request."""

    label: str
    result: Result
    sample: Sample


class Rank(NamedTuple):
    """Best and worst place among the systems that the requests leave open, and whom they do not tell it apart from."""

    best: int
    worst: int
    tied: list[str]


def speed(result: Result) -> float:
    """What is ranked, in seconds: time per output token, or to the first where there is but one."""
    return result.time_s(ranked(result)).mean or 0.0


def ranked(result: Result) -> Timed:
    """The key of what is ranked."""
    return "ttft_s" if result.tpot_s.mean is None else "tpot_s"


def show_tpot(result: Result) -> str:
    """As a table has it: `-` where there was but one output token."""
    return "-" if result.tpot_s.mean is None else show_seconds(result.tpot_s.mean)


def is_bound(result: Result) -> bool:
    """Whether the run is a bound rather than a system: it knows the future, or has memory the card has not."""
    return "oracle" in result.caveats or any(
        label.startswith("does not fit") or "not applied" in label for label in result.caveats
    )


def ranks_of(rows: Sequence[Row]) -> dict[str, Rank]:
    """Label -> rank of every system, by paired differences over the same requests; empty where one request (or one
    batch) was all there is, from which no sampling error can be had, and bounds have none."""
    systems = [row for row in rows if not is_bound(row.result)]
    found = ranks([row.sample for row in systems]) or ()
    return {
        row.label: Rank(*places, [systems[i].label for i in tied])
        for row, (places, tied) in zip(systems, found, strict=False)
    }


def times(row: Row, base: Row, time: Timed | None = None) -> float | None:
    """How many times as fast as the baseline, in what is ranked or another of the times."""
    own_s, base_s = (one.result.time_s(time or ranked(one.result)).mean for one in (row, base))
    return base_s / own_s if own_s and base_s else None


def row_facts(row: Row, rank: Rank | None, common: Bound | None = None, base: Row | None = None) -> dict[str, Any]:
    """A row as data: the label, the result's keys, where it stands (bounds, and single requests, nowhere), how far
    above the lower bound that holds for every row, and how many times as fast as the baseline where there is one."""
    return {
        "applied_as": row.label,
        **row.result.to_dict(),
        "rank": None if rank is None else [rank.best, rank.worst],
        "tied_with": None if rank is None else rank.tied,
        "above_common_bound_frac": above_frac(row.result, common),
        **(
            {}
            if base is None
            else {"times_as_fast": times(row, base), "times_as_fast_ttft": times(row, base, "ttft_s")}
        ),
    }
