"""Stream, CPU or both? The best policy of each way to serve experts on one machine, and where their order changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_frac, show_seconds
from sim.figures import SCHEMA
from sim.results.routing_words import of_results
from sim.studies.plan.axes import Axis, axes_of, few_of, narrowed
from sim.studies.plan.candidate import Candidate, capacity_of
from sim.studies.plan.request import Candidates, PlanRequest, candidates_of, drive_lines
from sim.workload.iterations import DECODE, MIXED

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.results.sampling import Sample
    from sim.studies.plan.replays import Replays

STREAM, CACHE, CPU, BOTH = "stream", "cache", "cpu", "both"
WAYS = {
    STREAM: "copy each expert when it is used",
    CACHE: "keep experts on the GPU, copy the others",
    CPU: "keep experts on the GPU, compute the others on the CPU",
    BOTH: "keep, copy and compute on the CPU",
}
NAMES = {STREAM: "streaming", CACHE: "caching", CPU: "caching and the CPU", BOTH: "caching, copies and the CPU"}
NOTHING_FRAC = 0.01
"""Of the experts of decode: below, a way was not taken."""
BETWEEN = 4
"""Parts of the way to the end of a range, by equal factors, at whose ends it is looked for."""
STEPS_BACK = 8
"""Values tried from the end of a range, where policies may not run, towards what there is now."""
FEWEST_TOLD = 3
"""Requests from which a band is shown: of two, Student's t begins at nothing."""
BEST = 2
"""Policies of each way that are replayed on all requests."""


class Way(NamedTuple):
    """The best policy of one way, and what it took each request."""

    way: str
    candidate: Candidate
    result: Result
    sample: Sample

    @property
    def label(self) -> str:
        """Its policy."""
        return self.candidate.label

    @property
    def tpot_s(self) -> float:
        """Its mean time per token."""
        return self.result.tpot_s.mean or 0.0

    @property
    def name(self) -> str:
        """What it does, in words; where it holds every expert on the GPU, that."""
        copies = ("demand_copies_bytes", "prefetch_issued_bytes")
        nothing = self.result.hit_rate == 1.0 and not any(row[key] for row in self.result.by_layer for key in copies)
        return "every expert on the GPU" if self.way == CACHE and nothing else NAMES[self.way]


class Crossover(NamedTuple):
    """Where two policies change places as one figure changes; `value` None: they do not at `ends`, the values that were
    tried: on either side the farthest at which both run, and some between.
    """

    axis: Axis
    first: str
    second: str
    value: float | None
    ends: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        return {
            "figure": self.axis.key,
            "now": self.axis.now,
            "faster_now": self.first,
            "against": self.second,
            "equal_at": self.value,
            "looked_at": sorted(self.ends),
        }

    def cells(self) -> tuple[str, ...]:
        """Its row."""
        return self.axis.name, self.axis.show(self.axis.now), self.at, self.first, self.second

    @property
    def at(self) -> str:
        """Where the order changes, in words."""
        show = self.axis.show
        if self.value is not None:
            return show(self.value)
        if len(self.ends) < 2:
            return f"not at {show(self.ends[0])}"
        return f"at none of {len(self.ends)} values from {show(min(self.ends))} to {show(max(self.ends))}"


@dataclass
class ComparedWays:
    """The ways of one machine, fastest first."""

    asked: Candidates
    replays: Replays
    ways: list[Way]
    crossovers: list[Crossover]
    reached: bool = True

    def answer(self) -> str:
        """The first line."""
        first, *others = self.ways
        machine = first.candidate.machine
        text = f"{first.name} on {machine.name} with its {machine.cpu}: {first.label}"
        text += f" takes {show_seconds(first.tpot_s)} per token"
        if others:
            text += f"; others take longer: {', '.join(self._beside_first(way) for way in others)}"
            if first.sample.n < 2:
                text += "; of n = 1 no sampling error can be given, so this is no ranking"
        return text + of_results([first.result])

    def _beside_first(self, way: Way) -> str:
        first = self.ways[0]
        tied = first.sample.n > 1 and not first.sample.significant(way.sample)
        label = way.label + (", not told apart" if tied else "")
        return f"{way.name} {way.tpot_s / first.tpot_s:.2f} times ({label})"

    def lines(self) -> list[str]:
        """How it was found."""
        drives = drive_lines([way.candidate for way in self.ways])
        text = f"each way by its fastest policy over the first few requests: {self.replays.said}"
        return [text, *drives, self.asked.trace]

    def table(self) -> str:
        """The ways, and where the order changes."""
        from sim.base.tables import tabled

        rows = []
        for way in self.ways:
            result, ends = way.result, way.result.uncertainty.tpot_s
            rows.append(
                [
                    WAYS[way.way],
                    way.label,
                    show_seconds(way.tpot_s),
                    "-" if ends is None or way.sample.n < FEWEST_TOLD else " to ".join(map(show_seconds, ends)),
                    show_frac(result.hit_rate),
                    show_frac(result.cpu_rate),
                    show_bytes(result.peak_vram_bytes),
                    result.bottleneck.resource or "-",
                ]
            )
        text = tabled(("way", "policy", "TPOT", "band", "hit", "CPU", "peak VRAM", "bound by"), rows, (1, 7))
        if not self.crossovers:
            return text
        titles = ("changed alone", "is", "order changes at", "what is faster now", "against")
        return f"{text}\n{tabled(titles, (one.cells() for one in self.crossovers), (2, 3, 4))}"

    def rows(self) -> list[dict[str, Any]]:
        """One per way, for a frame."""
        first = self.ways[0]
        return [
            {
                "way": way.way,
                "policy": way.label,
                "tpot_s": way.tpot_s,
                "significant": None if way is first else first.sample.significant(way.sample),
                "band_s": way.result.uncertainty.tpot_s,
                **{name: getattr(way.result, name) for name in ("hit_rate", "cpu_rate", "peak_vram_bytes", "run_id")},
            }
            for way in self.ways
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        crossovers = [one.to_dict() for one in self.crossovers]
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "ways": self.rows(),
            "crossovers": crossovers,
            "trace": self.asked.trace,
        }


def way_of(result: Result) -> str:
    """What was done with experts that were not there: told by what happened in decode, not by a name."""
    phase = MIXED if result.phases.main == MIXED else DECODE
    rows = [row for row in result.by_layer if row["phase"] == phase]
    used = sum(row["experts_n"] for row in rows) * result.expert_bytes
    copied = sum(
        row["demand_copies_bytes"] + row["prefetch_issued_bytes"] - row["prefetch_cancelled_bytes"] for row in rows
    )
    if (result.cpu_rate or 0.0) > NOTHING_FRAC:
        return BOTH if copied > NOTHING_FRAC * used else CPU
    return STREAM if copied >= (1 - NOTHING_FRAC) * used else CACHE


def compare_ways(request: PlanRequest) -> ComparedWays:
    """Compare them.

    Raises:
        BadInput: whatever has to be changed, in one line; also another number than one of machines.
    """
    asked = candidates_of(request)
    if len({(one.machine, capacity_of(one.spec)) for one in asked.ready}) > 1:
        raise BadInput(
            "plan without --goal: it compares ways on one machine, precision and capacity; give one of each, or a goal"
        )
    replays = asked.replays(by_layer=True)
    few = few_of([], replays)
    by_way: dict[str, list[tuple[float, Candidate]]] = {}
    reasons: list[str] = []
    for one, answer in _replayed(asked.ready, replays, "few requests", few, reasons):
        if answer.tpot_s.mean is None:
            raise BadInput(
                "plan without --goal, got requests of one output token: ways are compared by the time of further ones; "
                "give a trace that decodes, or --goal 'ttft_s.mean <= 1s'"
            )
        by_way.setdefault(way_of(answer), []).append((answer.tpot_s.mean, one))
    best = [one for some in by_way.values() for _, one in sorted(some, key=lambda told: told[0])[:BEST]]
    ways: dict[str, Way] = {}
    for one, answer in _replayed(best, replays, "all requests", None, reasons):
        way = Way(way_of(answer), one, answer, replays.sample(one.spec))
        if way.way not in ways or way.tpot_s < ways[way.way].tpot_s:
            ways[way.way] = way
    found = sorted(ways.values(), key=lambda way: way.tpot_s)
    if not found:
        more = len(set(reasons)) - 1
        raise BadInput(reasons[0] + (f" (and {more} reasons more)" if more else ""))
    return ComparedWays(asked, replays, found, list(_crossovers(found, replays, few)))


def _replayed(
    some: list[Candidate], replays: Replays, title: str, n: int | None, reasons: list[str]
) -> Iterator[tuple[Candidate, Result]]:
    """Those that can be carried out, with their results; of others the reasons are added."""
    for one, answer in zip(some, replays.of([one.spec for one in some], title, n), strict=True):
        if isinstance(answer, str):
            reasons.append(answer)
        else:
            yield one, answer


def _crossovers(ways: list[Way], replays: Replays, n: int | None) -> Iterator[Crossover]:
    """Between the best way with the CPU and the best one without."""
    from sim.run import prepare

    with_cpu = next((way for way in ways if way.way in (CPU, BOTH)), None)
    without = next((way for way in ways if way.way in (STREAM, CACHE)), None)
    if with_cpu is None or without is None:
        return
    first, second = sorted((with_cpu, without), key=lambda way: way.tpot_s)
    axes: list[list[Axis]] = []
    for way in (first, second):
        setup = prepare(way.candidate.spec)
        try:
            axes.append(axes_of(setup, way.candidate.spec, True))
        finally:
            setup.close()
    for one, two in zip(*axes, strict=True):
        ends = [end for end in (one.most, max(1.0, one.least)) if end != one.now]
        yield _between(first, second, (one, two), ends, replays, n)


def _between(
    first: Way, second: Way, axes: tuple[Axis, Axis], ends: list[float], replays: Replays, n: int | None
) -> Crossover:
    one, two = axes
    looked: list[float] = []

    def swapped(value: float) -> bool | None:
        """Whether the one that is faster now is the slower one there; None where one of them does not run."""
        told = replays.of([one.at(value), two.at(value)], "crossover", n)
        times = [None if isinstance(result, str) else result.tpot_s.mean for result in told]
        return None if times[0] is None or times[1] is None else times[0] > times[1]

    def looked_at(values: Iterable[float]) -> Iterator[tuple[float, bool]]:
        """Those at which both run."""
        for value in values:
            if (there := swapped(value)) is not None:
                looked.append(value)
                yield value, there

    def on_the_way(end: float, shares: Iterable[float]) -> list[float]:
        """Values at these shares of the way from what there is now to an end, by equal factors."""
        values = (one.now * (end / one.now) ** share for share in shares)
        return [float(round(value)) if one.whole else value for value in values]

    value = None
    for end in ends:
        back = on_the_way(end, (1 - step / STEPS_BACK for step in range(1, STEPS_BACK)))
        far, there = next(looked_at((end, *back)), (one.now, False))  # as far as both run
        near, between = one.now, dict.fromkeys(on_the_way(far, (step / BETWEEN for step in range(1, BETWEEN))))
        if not there:  # there and back again, perhaps
            for tried, there in looked_at(tried for tried in between if tried not in (one.now, far)):
                if there:
                    far = tried
                    break
                near = tried
        if there:
            value = narrowed(swapped, near, far, one.whole)[1]
            break
    return Crossover(one, first.candidate.label, second.candidate.label, value, tuple(looked) or (one.now,))
