"""One row of a comparison, and what ranks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.base.units import show_value
from sim.figures import Bound, Timed
from sim.results.record import Result, of_bound
from sim.results.sampling import Sample, ranks
from sim.studies.common_bound import above_frac

AS_FAST = 1.0 + 1e-9  # a ratio of times below this is rounding
MOST_NAMED = 3  # of those it is tied with; tables show all


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

    @property
    def places(self) -> str:
        """As a table has them."""
        return str(self.best) if self.best == self.worst else f"{self.best}-{self.worst}"


def speed(result: Result) -> float:
    """What is ranked, in seconds: time per output token, or to the first where there is but one."""
    return result.time_s(ranked(result)).mean or 0.0


def ranked(result: Result) -> Timed:
    """The key of what is ranked."""
    return "ttft_s" if result.tpot_s.mean is None else "tpot_s"


def ranked_by(result: Result) -> str:
    """What is ranked, in words."""
    return "per token" if ranked(result) == "tpot_s" else "to the first token"


def ahead(times: float, second: str, tied: Sequence[str] | None) -> str:
    """By how much the first is faster than the second, and whom the requests do not tell it apart from.

    Args:
        times: how many times as long the second takes. tied: None where no sampling error is to be had.
    """
    if times < AS_FAST:  # exactly: on each of the requests, none told them apart
        return f", {'exactly as' if times == 1.0 else 'as'} fast as {second}"
    text = f", {show_ratio(times)} faster than {second}"
    if tied is None:
        return f"{text} there; of n = 1 no sampling error can be given, so this is no ranking"
    if not tied:
        return text
    more = f" and {len(tied) - MOST_NAMED} more" if len(tied) > MOST_NAMED else ""
    return f"{text}; not told apart from {', '.join(tied[:MOST_NAMED])}{more}"


def show_ratio(times: float) -> str:
    """`1.25x`, or in percent where that would be all but 1."""
    return f"{times:.2f}x" if times >= 1.01 else f"{100 * (times - 1):.2g} %"


def show_tpot(result: Result) -> str:
    """As a table has it: `-` where there was but one output token."""
    return show_value(result.tpot_s.mean, "s")


def is_lossy(result: Result) -> bool:
    """Whether its tokens are not those of the model as it is."""
    return "lossy" in result.caveats


def is_bound(result: Result) -> bool:
    """Whether the run is a bound rather than a system: it knows the future, or has memory the card has not."""
    return kind_of(result.caveats) == "bound"


def kind_of(caveats: Sequence[str]) -> str:
    """`system`, `lossy`, or `bound`."""
    return "bound" if any(map(of_bound, caveats)) else "lossy" if "lossy" in caveats else "system"


def ranks_of(rows: Sequence[Row]) -> dict[str, Rank]:
    """Label -> rank of every system, by paired differences over the same requests; empty where one request (or one
    batch) was all there is, from which no sampling error can be had, and bounds have none."""
    systems = [row for row in rows if not is_bound(row.result)]
    labels = [row.label for row in systems]
    return dict(zip(labels, placed(labels, [row.sample for row in systems]), strict=False))


def placed(labels: Sequence[str], samples: list[Sample]) -> list[Rank]:
    """The rank of each; none where no sampling error is to be had."""
    return [Rank(*places, [labels[i] for i in tied]) for places, tied in ranks(samples) or ()]


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
