"""Runs beside one another: which are systems, who is fastest, whom the requests do not tell apart, the bound of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sim.figures import Bound, Timed
from sim.options import RunSpec
from sim.results.record import of_bound
from sim.results.sampling import ranks
from sim.studies.runner.work import BROKE_A_RULE, FAILED, OK, Resolved

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.results.sampling import Sample

Kind = Literal["system", "lossy", "bound"]
MOST_JUDGED = 8
"""Traces whose realism is told, one line each."""
NO_RUN = RunSpec(policy="", hw="")
NOTHING = Resolved("", NO_RUN)


@dataclass(eq=False)
class Row:
    """A run of a study, and what became of it.

    Attributes:
        label: what the user called it. sample: of what is ranked of every request. status, reason: `ok`, or why it has
            no result. spec: as it was asked for. asked: what that means here.
    """

    label: str
    result: Result | None = None
    sample: Sample | None = None
    status: str = OK
    reason: str = ""
    spec: RunSpec = NO_RUN
    asked: Resolved = NOTHING

    @property
    def ran(self) -> Result:
        """The result of a row that has one."""
        assert self.result is not None
        return self.result

    @property
    def broken(self) -> bool:
        """Whether its policy broke a rule or failed, which is a fault of its own."""
        return self.status in (BROKE_A_RULE, FAILED)

    @property
    def time(self) -> Timed:
        """The key of what is ranked: time per output token, or to the first where there is but one."""
        return "ttft_s" if self.ran.tpot_s.mean is None else "tpot_s"

    @property
    def speed_s(self) -> float:
        """What is ranked, in seconds."""
        return self.ran.time_s(self.time).mean or 0.0

    @property
    def kind(self) -> Kind:
        """What it is beside others."""
        return kind_of(self.ran.caveats)

    @property
    def lossy(self) -> bool:
        """Whether its tokens are not those of the model as it is."""
        return "lossy" in self.ran.caveats

    @property
    def elsewhere(self) -> bool:
        """Whether it has memory that the card has not: nobody else's time is bounded by what it reaches there."""
        return any(label.startswith("does not fit") for label in self.ran.caveats)

    def times(self, base: Row, time: Timed | None = None) -> float | None:
        """How many times as fast as the baseline, in what is ranked or another of the times."""
        own_s, base_s = (one.ran.time_s(time or one.time).mean for one in (self, base))
        return base_s / own_s if own_s and base_s else None


def kind_of(caveats: Sequence[str]) -> Kind:
    """A bound knows the future, or has memory that the card has not."""
    return "bound" if any(map(of_bound, caveats)) else "lossy" if "lossy" in caveats else "system"


class Rank(NamedTuple):
    """Best and worst place among the systems that the requests leave open, and whom they do not tell it apart from."""

    best: int
    worst: int
    tied: list[Row]

    @property
    def places(self) -> str:
        """As a table has them."""
        return str(self.best) if self.best == self.worst else f"{self.best}-{self.worst}"


class Group:
    """Runs that compete.

    Args:
        rows: with a result. by: settings that they have in common. each: hold every system against every other, else
            against the fastest alone.

    Attributes:
        rows: all, fastest first. systems, bounds: of these. ranks: of systems, by paired differences over the same
            requests; empty where no sampling error is to be had.
    """

    def __init__(self, rows: Iterable[Row], by: dict[str, Any] | None = None, each: bool = True) -> None:
        self.by = by or {}
        self.rows = sorted(rows, key=lambda row: row.speed_s)
        self.systems = [row for row in self.rows if row.kind != "bound"]
        self.bounds = [row for row in self.rows if row.kind == "bound"]
        self.ranks = dict(zip(self.systems, _ranks(self.systems, each), strict=False))

    @property
    def faithful(self) -> list[Row]:
        """Lossless systems; where all are lossy, all of them."""
        return [row for row in self.systems if not row.lossy] or self.systems

    @property
    def best(self) -> Row | None:
        """The fastest of the faithful."""
        return next(iter(self.faithful), None)

    @property
    def second(self) -> Row | None:
        """The next of them."""
        return next(iter(self.faithful[1:]), None)

    def tied(self, row: Row) -> list[Row]:
        """Systems that the requests do not tell apart from it."""
        return self.ranks[row].tied if row in self.ranks else []

    @property
    def keeps(self) -> Row | None:
        """Of the faithful the one with most requests that kept their SLO, of equals with more of them per second."""
        slos = [(row, row.ran.slo) for row in self.faithful]
        known = [
            (slo.attained_frac, slo.goodput_requests_per_s or 0.0, row)
            for row, slo in slos
            if slo is not None and slo.attained_frac is not None
        ]
        return max(known, key=lambda one: one[:2])[2] if known else None

    @cached_property
    def common(self) -> Common | None:
        """The lower bound of all."""
        return common_bound(self.rows)


def _ranks(systems: Sequence[Row], each: bool) -> list[Rank]:
    """Rank of each; where not `each` is held against all, only who is tied with the fastest is told."""
    samples = [row.sample for row in systems if row.sample is not None]
    if each or not samples:
        return [Rank(*places, [systems[at] for at in tied]) for places, tied in ranks(samples) or ()]
    first, *others = samples
    if first.n < 2:
        return []
    tied = [row for row, other in zip(systems[1:], others, strict=True) if not first.significant(other)]
    further = [Rank(1, len(samples), [systems[0]]) if row in tied else Rank(2, len(samples), []) for row in systems[1:]]
    return [Rank(1, 1 + len(tied), tied), *further]


def draws_least(rows: Iterable[Row]) -> tuple[Row, float] | None:
    """The one with the fewest joules per token, and these; None where nobody counts them, or not all the same parts."""
    found = [(row, energy) for row in rows if (energy := row.ran.energy) is not None]
    known = [(energy.joules_per_token, row) for row, energy in found if energy.joules_per_token is not None]
    if not known or len({energy.counted for _, energy in found}) > 1:
        return None
    each_j, row = min(known, key=lambda one: one[0])
    return row, each_j


def pareto(rows: Iterable[Row]) -> list[Row]:
    """Lossless systems that no other beats in time and peak memory at once, least memory first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.ran.peak_vram_bytes, row.speed_s)):
        if row.kind == "system" and (not front or row.speed_s < front[-1].speed_s):
            front.append(row)
    return front


class Common(NamedTuple):
    """The least of the lower bounds that runs have of their own, and the run whose own it is.

    Runs differ in lanes (experts on the CPU or not), figures and memory, so each has a bound of its own; two of them in
    one column would say nothing of the rows beside one another.
    """

    bound: Bound
    whose: Row

    def above_frac(self, row: Row) -> float | None:
        """How far a run lies above it; None of one in memory that the card has not."""
        return None if row.elsewhere else row.ran.above_frac(self.bound.tpot_s)

    def to_dict(self) -> dict[str, Any]:
        """As data."""
        return {name: getattr(self.bound, name) for name in ("tpot_s", "ttft_s", "resource")}


def common_bound(rows: Iterable[Row]) -> Common | None:
    """The bound of all; None where one of them has none."""
    here = [row for row in rows if not row.elsewhere]
    found = [(bound, row) for row in here if (bound := row.ran.lower_bound) is not None]
    known = [(bound.tpot_s, bound, row) for bound, row in found if bound.tpot_s is not None]
    if not known or len(found) < len(here):
        return None
    _, least, whose = min(known, key=lambda one: one[0])
    ttft = [bound.ttft_s for bound, _ in found if bound.ttft_s is not None]
    return Common(Bound(least.tpot_s, min(ttft, default=None), least.resource, None), whose)


def realism_of(rows: Iterable[Row]) -> list[str]:
    """What is known of each trace, a line each."""
    from traces.format.catalogue import open_trace
    from traces.stats.realism import judge

    lines = []
    for name in list(dict.fromkeys(row.asked.spec.trace or "" for row in rows))[:MOST_JUDGED]:
        with open_trace(name) as trace:
            lines.append(judge(trace, quick=True).line)
    return lines
