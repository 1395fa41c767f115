"""Stream, CPU or both? The best policy of each way to serve experts on one machine, and where their order changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count, show_frac, show_seconds
from sim.figures import SCHEMA
from sim.results.routing_words import of_results
from sim.studies.plan.candidate import Candidate, budget_of
from sim.studies.plan.ladder import few_of
from sim.studies.plan.lever import NEAR_FRAC, Lever, levers_of
from sim.studies.plan.plan import Asked, candidates_of, facts_of
from sim.studies.plan.replays import Replays
from sim.studies.plan.text import drive_lines
from sim.workload.iterations import DECODE, MIXED

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.results.sampling import Sample
    from sim.studies.runner import Progress

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
    def tpot_s(self) -> float:
        """Its mean time per token."""
        return self.result.tpot_s.mean or 0.0


class Crossover(NamedTuple):
    """Where two policies change places as one figure changes; `value` None: they do not at `ends`, the values that were
    tried: on either side the farthest at which both run, and some between.
    """

    lever: Lever
    first: str
    second: str
    value: float | None
    ends: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        key, now = self.lever.key, self.lever.now
        return {
            "figure": key,
            "now": now,
            "faster_now": self.first,
            "against": self.second,
            "equal_at": self.value,
            "looked_at": sorted(self.ends),
        }

    @property
    def at(self) -> str:
        """Where the order changes, in words."""
        if self.value is not None:
            return self.lever.show(self.value)
        if len(self.ends) < 2:
            return f"not at {self.lever.show(self.ends[0])}"
        low, high = (self.lever.show(end) for end in (min(self.ends), max(self.ends)))
        return f"at none of {len(self.ends)} values from {low} to {high}"


@dataclass
class Compared:
    """The ways of one machine, fastest first."""

    ways: list[Way]
    crossovers: list[Crossover]
    replays: Replays
    trace: str
    reached: bool = True

    def answer(self) -> str:
        """The first line."""
        first, *others = self.ways
        one = first.candidate
        text = f"{self._name(first)} on {one.machine.name} with its {one.machine.cpu}: {one.label}"
        text += f" takes {show_seconds(first.tpot_s)} per token"
        if others:
            text += f"; others take longer: {', '.join(self._beside_first(way) for way in others)}"
            if first.sample.n < 2:
                text += "; of n = 1 no sampling error can be given, so this is no ranking"
        return text + of_results([first.result])

    def _name(self, way: Way) -> str:
        """What it does, in words; where it holds every expert on the GPU, that."""
        copies = ("demand_copies_bytes", "prefetch_issued_bytes")
        nothing = way.result.hit_rate == 1.0 and not any(row[key] for row in way.result.by_layer for key in copies)
        return "every expert on the GPU" if way.way == CACHE and nothing else NAMES[way.way]

    def _beside_first(self, way: Way) -> str:
        first = self.ways[0]
        tied = first.sample.n > 1 and not first.sample.significant(way.sample)
        label = way.candidate.label + (", not told apart" if tied else "")
        return f"{self._name(way)} {way.tpot_s / first.tpot_s:.2f} times ({label})"

    def lines(self) -> list[str]:
        """How it was found."""
        text = f"{show_count(self.replays.n_runs, 'replay')}, as much as {self.replays.share:.3g} of all requests"
        drives = drive_lines([way.candidate for way in self.ways])
        return [f"each way by its fastest policy over the first few requests: {text}", *drives, self.trace]

    def table(self) -> str:
        """The ways, and where the order changes."""
        from sim.base.tables import prose, render, table

        shown = table("way", "policy", "TPOT", "band", "hit", "CPU", "peak VRAM", "bound by")
        prose(shown, 0, 1, 7)
        for way in self.ways:
            result, ends = way.result, way.result.uncertainty.tpot_s
            shown.add_row(
                WAYS[way.way],
                way.candidate.label,
                show_seconds(way.tpot_s),
                "-" if ends is None or way.sample.n < FEWEST_TOLD else " to ".join(map(show_seconds, ends)),
                show_frac(result.hit_rate),
                show_frac(result.cpu_rate),
                show_bytes(result.peak_vram_bytes),
                result.bottleneck.resource or "-",
            )
        text = render(shown)
        if self.crossovers:
            lines = table("changed alone", "is", "order changes at", "what is faster now", "against")
            prose(lines, 2, 3, 4)
            for one in self.crossovers:
                lines.add_row(one.lever.name, one.lever.show(one.lever.now), one.at, one.first, one.second)
            text += f"\n{render(lines)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        ways = [
            {
                "way": way.way,
                "policy": way.candidate.label,
                "tpot_s": way.tpot_s,
                "significant": None if way is self.ways[0] else self.ways[0].sample.significant(way.sample),
                "band_s": way.result.uncertainty.tpot_s,
                "hit_rate": way.result.hit_rate,
                "cpu_rate": way.result.cpu_rate,
                "peak_vram_bytes": way.result.peak_vram_bytes,
                "run_id": way.result.run_id,
            }
            for way in self.ways
        ]
        found = [one.to_dict() for one in self.crossovers]
        return {"schema": SCHEMA, "answer": self.answer(), "ways": ways, "crossovers": found, "trace": self.trace}


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


def compare_ways(asked: Asked, progress: Progress, note: Callable[[str], None] = lambda _: None) -> Compared:
    """Compare them.

    Raises:
        BadInput: whatever has to be changed, in one line; also another number than one of machines.
    """
    candidates = candidates_of(asked, None, progress)
    ready = [one for one in candidates if one.ready]
    if not ready:
        raise BadInput(candidates[0].reason)
    if len({(one.machine, budget_of(one.spec)) for one in ready}) > 1:
        raise BadInput(
            "plan without --goal: it compares ways on one machine, precision and budget; give one of each, or a goal"
        )
    for text in dict.fromkeys(text for one in ready for text in one.asked.notes):
        note(text)
    n_requests, trace, loaded = facts_of(ready[0])
    replays = asked.replays(n_requests, progress, loaded, by_layer=True)
    n = few_of([], replays)
    few = replays.of([one.spec for one in ready], "few requests", n)
    by_way: dict[str, list[tuple[float, Candidate]]] = {}
    for one, answer in zip(ready, few, strict=True):
        if isinstance(answer, str):
            continue
        if answer.tpot_s.mean is None:
            raise BadInput(
                "plan without --goal, got requests of one output token: ways are compared by the time of further ones; "
                "give a trace that decodes, or --goal 'ttft_s.mean <= 1s'"
            )
        by_way.setdefault(way_of(answer), []).append((answer.tpot_s.mean, one))
    best = [one for some in by_way.values() for _, one in sorted(some, key=lambda told: told[0])[:BEST]]
    answers = replays.of([one.spec for one in best], "all requests")
    ways: dict[str, Way] = {}
    for one, answer in zip(best, answers, strict=True):
        if isinstance(answer, str):
            continue
        way = Way(way_of(answer), one, answer, replays.sample(one.spec))
        if way.way not in ways or way.tpot_s < ways[way.way].tpot_s:
            ways[way.way] = way
    found = sorted(ways.values(), key=lambda way: way.tpot_s)
    if not found:
        reasons = list(dict.fromkeys(answer for answer in (*few, *answers) if isinstance(answer, str)))
        raise BadInput(reasons[0] + (f" (and {len(reasons) - 1} reasons more)" if len(reasons) > 1 else ""))
    return Compared(found, list(_crossovers(found, replays, n)), replays, trace)


def _crossovers(ways: list[Way], replays: Replays, n: int | None) -> Iterator[Crossover]:
    """Between the best way with the CPU and the best one without."""
    from sim.run import prepare

    with_cpu = next((way for way in ways if way.way in (CPU, BOTH)), None)
    without = next((way for way in ways if way.way in (STREAM, CACHE)), None)
    if with_cpu is None or without is None:
        return
    first, second = sorted((with_cpu, without), key=lambda way: way.tpot_s)
    setup = prepare(first.candidate.spec)
    other = prepare(second.candidate.spec)
    try:
        pairs = zip(
            levers_of(setup, first.candidate.spec, True), levers_of(other, second.candidate.spec, True), strict=True
        )
        for one, two in pairs:
            ends = [end for end in (one.most, max(1.0, one.least)) if end != one.now]
            yield _between(first, second, (one, two), ends, replays, n)
    finally:
        setup.close()
        other.close()


def _on_the_way(lever: Lever, end: float, shares: Iterable[float]) -> Iterator[float]:
    """Values at these shares of the way from what there is now to an end, by equal factors."""
    for share in shares:
        value = lever.now * (end / lever.now) ** share
        yield float(round(value)) if lever.whole else value


def _between(
    first: Way, second: Way, levers: tuple[Lever, Lever], ends: list[float], replays: Replays, n: int | None
) -> Crossover:
    one, two = levers

    def swapped(value: float) -> bool | None:
        """Whether the one that is faster now is the slower one there; None where one of them does not run."""
        told = replays.of([one.at(value), two.at(value)], "crossover", n)
        times = [None if isinstance(result, str) else result.tpot_s.mean for result in told]
        return None if times[0] is None or times[1] is None else times[0] > times[1]

    looked = []
    for end in ends:
        back = (1 - step / STEPS_BACK for step in range(1, STEPS_BACK))
        for far in (end, *_on_the_way(one, end, back)):  # as far as both run
            if (found := swapped(far)) is not None:
                break
        else:
            continue
        looked.append(far)
        near = one.now
        if not found:  # there and back again, perhaps
            between = _on_the_way(one, far, (step / BETWEEN for step in range(1, BETWEEN)))
            for tried in dict.fromkeys(value for value in between if value not in (one.now, far)):
                if (there := swapped(tried)) is None:
                    continue
                looked.append(tried)
                if there:
                    far, found = tried, True
                    break
                near = tried
        if not found:
            continue
        while abs(far - near) > 1 if one.whole else max(far, near) / min(far, near) > 1 + NEAR_FRAC:
            middle = float((near + far) // 2) if one.whole else (near * far) ** 0.5
            if swapped(middle):
                far = middle
            else:
                near = middle
        return Crossover(one, first.candidate.label, second.candidate.label, far, tuple(looked))
    return Crossover(one, first.candidate.label, second.candidate.label, None, tuple(looked) or (one.now,))
