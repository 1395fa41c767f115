"""Stream, CPU or both? The best policy of each way to serve experts on one machine, and where their order changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from sim.base.errors import BadInput
from sim.base.units import show_seconds
from sim.figures import Ends
from sim.results.record import Result
from sim.results.routing_words import of_results
from sim.results.sampling import Sample
from sim.studies.answer import Answer, Column, Shown
from sim.studies.plan.axes import GPU, Axis, Change, axes_of, probe_of
from sim.studies.plan.candidate import Candidate, order_of
from sim.studies.plan.request import PlanRequest, candidates_of, reasons_in_a_line
from sim.studies.runner.searches import Search, narrowed
from sim.workload.iterations import DECODE, MIXED

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


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """The best policy of one way. significant: whether it is slower than the fastest beyond what requests leave open;
    None of that one."""

    way: str
    policy: str
    tpot_s: float
    significant: bool | None
    band_s: Ends
    n_requests: int
    hit_rate: float | None
    cpu_rate: float | None
    peak_vram_bytes: int
    bottleneck: str | None
    run_id: str
    name: str

    def beside(self, first: Way) -> str:
        """`caching 2.48 times (lfu)`."""
        tied = first.n_requests > 1 and not self.significant
        return (
            f"{self.name} {self.tpot_s / first.tpot_s:.2f} times ({self.policy}{', not significant' if tied else ''})"
        )


class Crossover(Change, frozen=True, kw_only=True):
    """Where two policies change places; without a value they do not at those that were tried: on either side the
    farthest at which both run, and some between."""

    faster_now: str
    against: str
    looked_at: list[float | str | None]


TOLD = (
    Column("way", lambda way: WAYS.get(way.way, way.way)),
    Column("policy", lambda way: way.policy),
    Column("TPOT", lambda way: way.tpot_s, "s"),
    Column("band", lambda way: _band(way), "x"),
    Column("hit", lambda way: way.hit_rate, "frac"),
    Column("CPU", lambda way: way.cpu_rate, "frac"),
    Column("peak VRAM", lambda way: way.peak_vram_bytes, "bytes"),
    Column("bound by", lambda way: way.bottleneck),
)
CROSSED = (
    Column("changed alone", lambda one: one.name),
    Column("is", lambda one: one.now_text, "x"),
    Column("order changes at", lambda one: one.text),
    Column("what is faster now", lambda one: one.faster_now),
    Column("against", lambda one: one.against),
)


def _band(way: Way) -> str | None:
    return " to ".join(map(show_seconds, way.band_s)) if way.band_s and way.n_requests >= FEWEST_TOLD else None


class ComparedWays(Answer, kw_only=True, eq=False):
    """The ways of one machine, fastest first."""

    ROWS: ClassVar = "ways"
    ways: list[Way]
    crossovers: list[Crossover]

    def tables(self) -> list[Shown]:
        """The ways, and where the order changes."""
        can = "What one machine can do with experts that are not there, fastest first."
        cross = "At which figure of the machine one way overtakes the other."
        return [
            Shown("ways", "Ways", can, TOLD, self.ways),
            Shown("crossovers", "Where they cross", cross, CROSSED, self.crossovers),
        ]


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


def _name(way: str, result: Result) -> str:
    """What it does, in words; where it holds every expert on the GPU, that."""
    copies = ("demand_copies_bytes", "prefetch_issued_bytes")
    nothing = result.hit_rate == 1.0 and not any(row[key] for row in result.by_layer for key in copies)
    return "every expert on the GPU" if way == CACHE and nothing else NAMES[way]


def compare_ways(request: PlanRequest) -> ComparedWays:
    """Compare them.

    Raises:
        BadInput: whatever has to be changed, in one line; also another number than one of machines.
    """
    asked = candidates_of(request, by_layer=True)
    if len({(one.machine, order_of(one.spec)) for one in asked.ready}) > 1:
        raise BadInput(
            "plan without --goal: it compares ways on one machine, precision and capacity; give one of each, or a goal"
        )
    replays, few = asked.replays, probe_of([], asked.replays).few
    best = replays.one(_best(asked.ready, few), "ways of a machine")
    found = sorted(best.items(), key=lambda one: one[1][1].tpot_s.mean or 0.0)
    samples = [replays.sample(one.spec) for _, (one, _) in found]
    ways = [_told(way, *one, sample, samples[0]) for (way, one), sample in zip(found, samples, strict=True)]
    crossovers = replays.together(list(_crossovers({way: one for way, (one, _) in found}, few)), "crossovers")
    best_one, (first, *others) = found[0][1][0], ways
    text = f"{first.name} on {best_one.machine} with its {best_one.host_cpu}: {first.policy}"
    text += f" takes {show_seconds(first.tpot_s)} per token"
    if others:
        text += f"; others take longer: {', '.join(way.beside(first) for way in others)}"
        text += "; of n = 1 no sampling error can be given, so this is no ranking" if first.n_requests < 2 else ""
    return ComparedWays(
        first_line=text + of_results([found[0][1][1]]),
        trace=asked.trace,
        ways=ways,
        crossovers=crossovers,
        _lines=[f"each way by its fastest policy over the first few requests: {replays.said}", *asked.sources],
    )


def _told(way: str, one: Candidate, result: Result, sample: Sample, first: Sample) -> Way:
    return Way(
        way=way,
        policy=one.policy,
        tpot_s=result.tpot_s.mean or 0.0,
        significant=None if sample is first else first.significant(sample),
        band_s=result.uncertainty.tpot_s,
        n_requests=sample.n,
        hit_rate=result.hit_rate,
        cpu_rate=result.cpu_rate,
        peak_vram_bytes=result.peak_vram_bytes,
        bottleneck=result.bottleneck.resource,
        run_id=result.run_id,
        name=_name(way, result),
    )


def _best(ready: Sequence[Candidate], n: int | None) -> Search[dict[str, tuple[Candidate, Result]]]:
    """The fastest of each way, over all requests, of those that are the fastest over the first n."""
    told = yield [one.spec if n is None else replace(one.spec, requests=n) for one in ready]
    ran = [(one, answer) for one, answer in zip(ready, told, strict=True) if isinstance(answer, Result)]
    if any(answer.tpot_s.mean is None for _, answer in ran):
        raise BadInput(
            "plan without --goal, got requests of one output token: ways are compared by the time of further ones; "
            "give a trace that decodes, or --goal 'ttft_s.mean <= 1s'"
        )
    by_way: dict[str, list[Candidate]] = {}
    for one, answer in sorted(ran, key=lambda each: each[1].tpot_s.mean or 0.0):
        by_way.setdefault(way_of(answer), []).append(one)
    best = [one for some in by_way.values() for one in some[:BEST]]
    again = yield [one.spec for one in best]
    ran = [(one, answer) for one, answer in zip(best, again, strict=True) if isinstance(answer, Result)]
    if not ran:
        raise BadInput(reasons_in_a_line(answer for answer in (*told, *again) if isinstance(answer, str)))
    ran.sort(key=lambda each: -(each[1].tpot_s.mean or 0.0))  # the last of a way, which stays, is its fastest
    return {way_of(answer): (one, answer) for one, answer in ran}


def _crossovers(ways: dict[str, Candidate], n: int | None) -> Iterable[Search[Crossover]]:
    """Between the best way with the CPU and the best one without, axis by axis."""
    with_cpu = next((one for way, one in ways.items() if way in (CPU, BOTH)), None)
    without = next((one for way, one in ways.items() if way in (STREAM, CACHE)), None)
    if with_cpu is None or without is None:
        return
    pair = [one for one in ways.values() if one in (with_cpu, without)]  # the faster one first
    for axes in zip(*(axes_of(one.spec, True) for one in pair), strict=True):
        if axes[0].key != GPU:
            yield between((pair[0].policy, pair[1].policy), axes, n)


def between(who: tuple[str, str], axes: Sequence[Axis], n: int | None) -> Search[Crossover]:
    """Where two policies change places along the axes of their runs; looked for by the first n requests."""
    one = axes[0]
    looked: list[float] = []

    def swapped(value: float) -> Search[bool | None]:
        """Whether the one that is faster now is the slower one there; None where one of them does not run."""
        specs = [axis.at(value) for axis in axes]
        told = yield specs if n is None else [replace(spec, requests=n) for spec in specs]
        times = [None if isinstance(result, str) else result.tpot_s.mean for result in told]
        if times[0] is None or times[1] is None:
            return None
        return bool(times[0] > times[1])

    def look(value: float) -> Search[bool | None]:
        if (there := (yield from swapped(value))) is not None:
            looked.append(value)
        return there

    def on_the_way(end: float, shares: Iterable[float]) -> list[float]:
        """Values at these shares of the way from what there is now to an end, by equal factors."""
        values = (one.now * (end / one.now) ** share for share in shares)
        return [float(round(value)) if one.whole else value for value in values]

    equal_at = None
    for end in (end for end in (one.most, max(1.0, one.least)) if end != one.now):
        far, there = one.now, None
        for value in (end, *on_the_way(end, (1 - step / STEPS_BACK for step in range(1, STEPS_BACK)))):
            far, there = value, (yield from look(value))  # as far as both run
            if there is not None:
                break
        near = one.now
        if not there and there is not None:  # there and back again, perhaps
            for value in dict.fromkeys(on_the_way(far, (step / BETWEEN for step in range(1, BETWEEN)))):
                if value not in (one.now, far) and (back := (yield from look(value))) is not None:
                    if back:
                        far, there = value, True
                        break
                    near = value
        if there:
            _, equal_at = yield from narrowed(swapped, near, far, one.whole)
            break
    tried = sorted(looked or [one.now])
    at = f"at none of {len(tried)} values from {one.show(tried[0])} to {one.show(tried[-1])}"
    at = f"not at {one.show(tried[0])}" if len(tried) < 2 else at
    text = at if equal_at is None else one.show(equal_at)
    at_all = [one.form(value) for value in tried]
    return one.change(Crossover, equal_at, text, faster_now=who[0], against=who[1], looked_at=at_all)
