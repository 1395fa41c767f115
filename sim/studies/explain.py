"""`moesim explain`: a measurement beside prediction and bound, and what would explain the difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import parse_seconds, show_frac, show_seconds
from sim.figures import SCHEMA
from sim.options import LOAD, OPTIONS, SIMULATION, RunSpec
from sim.results.routing_words import of_results
from sim.studies.plan.axes import (
    CACHE,
    CPU,
    DRIVE,
    HOST,
    LINK,
    Axis,
    axes_of,
    by_replay,
    precision_axis,
    rate_axis,
    search,
)
from sim.studies.plan.candidate import Candidate
from sim.studies.plan.goal import Goal, Reading, readings
from sim.studies.plan.replays import Replays
from sim.studies.plan.request import PlanRequest, candidates_of, drive_lines

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.setup.setup import Setup
    from sim.studies.runner.runner import Progress
    from sim.studies.sweep.grid import Block

_BARE = re.compile(r"\s*[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?\s*")
UNITS = "tok/s (or tokens/s, t/s, tps) for a rate; s, ms or us for a time per token"
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(?:(?:tok|tokens|t)\s*/\s*s|tps)\s*")
KEY = "tpot_s.mean"
AXES = (
    *(row.field for row in OPTIONS.axes if row.group not in (LOAD, SIMULATION)),
    *("batch", "draft", "prefill_chunk", "sim_contention"),
)
"""What may be said of the run that was measured, one value each."""
NO_SAY = "leave it out: what was measured is one machine at one batch size, without arrivals or replicas"
LITTLE_FRAC = 0.02
"""A prediction that comes nearer to the measurement by less explains nothing."""
GPU = "hw.gpu.memory_bandwidth_bytes_per_s"
SPILT = "VRAM that spills to system memory, which the GPU then reads across the link"
CAUSES = {
    CPU: (
        "a memory channel that is empty",
        "XMP or EXPO off",
        "threads on SMT siblings or efficiency cores",
        "another process that computes or reads memory",
    ),
    GPU: (SPILT, "another process on the GPU", "a power or temperature limit"),
    CACHE: ("another process or a desktop that holds VRAM", "a longer context than the trace has"),
    HOST: ("another process that holds RAM",),
    DRIVE: ("another process that reads the drive", "a drive that is hot or nearly full"),
    LINK: (
        "a slot of fewer lanes, or a riser",
        "host memory slower than the link (an empty channel, XMP or EXPO off)",
        "another process that copies",
    ),
}
"""What slows a machine, in the words of its owner, by the input of a profile that it moves; the likeliest first."""


def time_of(text: str) -> float:
    """Seconds per output token of `12.5tok/s` or `80ms`. Raises BadInput, also for a number without a unit: it may be
    either."""
    if _BARE.fullmatch(text):
        number = text.strip()
        raise BadInput(f"--measured, got {text!r} without a unit: add {UNITS}; e.g. {number}tok/s or {number}ms")
    match = _RATE.fullmatch(text)
    rate = float(match[1]) if match is not None else None
    try:
        time_s = parse_seconds(text, "--measured") if rate is None else 1 / rate if rate else 0.0
    except BadInput:
        raise BadInput(f"--measured, got {text!r}: neither a rate nor a time; add {UNITS}, e.g. 12.5tok/s") from None
    if not time_s:
        raise BadInput(f"--measured, got {text!r}: no token takes no time; write e.g. 12.5tok/s or 80ms")
    return time_s


class Explanation(NamedTuple):
    """One figure with which, changed alone, the prediction is what was measured, or nearer to it.

    Attributes:
        said: for people, the figure, its value, and what would explain the measurement. tpot_s: the prediction then.
        causes: what may have moved it, in the words of a machine's owner.
    """

    what: str
    now: float | str
    value: float | str
    tpot_s: float
    said: tuple[str, str, str]
    causes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        found = self._asdict()
        del found["said"]
        return found

    def line(self) -> str:
        """What may have moved it, and how far it would have to be moved."""
        figure, now, then = self.said
        assert not isinstance(self.now, str) and not isinstance(self.value, str)
        return f"{figure} at {self.value / self.now:.0%} ({then} for {now}): {', '.join(self.causes)}"


@dataclass
class Explained:
    """A measurement beside what the simulator says.

    Attributes:
        bound_s: the least time of any lossless policy; None where none is known.
    """

    measured_s: float
    candidate: Candidate
    result: Result
    predicted: Reading
    bound_s: float | None
    trace: str
    explanations: list[Explanation]
    replays: Replays

    @property
    def _inside(self) -> bool:
        low, high = self.predicted.band or (self.predicted.value, self.predicted.value)
        return low <= self.measured_s <= high

    def answer(self) -> str:
        """The first line."""
        return self._answer() + of_results([self.result])

    def _answer(self) -> str:
        one, at_s = self.candidate, self.predicted.value
        band = "" if self.predicted.band is None else " ({} to {})".format(*map(show_seconds, self.predicted.band))
        times = self.measured_s / at_s
        how = f"{times:.2f} times" if times > 1 else f"{1 / times:.2f} times faster than"
        where = "inside" if self._inside else "outside"
        text = (
            f"measured {show_seconds(self.measured_s)} per token ({1 / self.measured_s:.3g} tokens/s decoding): {how}"
        )
        text += f" the {show_seconds(at_s)}{band} predicted for {one.label} on {one.machine.name}, {where} that band"
        if self.bound_s is None:
            return text
        if self.measured_s < self.bound_s:
            return f"{text}; faster than any lossless policy can be there ({show_seconds(self.bound_s)})"
        left = f"{self.measured_s / self.bound_s:.2f} times as fast"
        return f"{text}; no lossless policy can be faster there than {show_seconds(self.bound_s)}, {left}"

    def lines(self) -> list[str]:
        """What it rests on, and in one sentence what follows."""
        resource = self.result.bottleneck.resource
        found = [f"as predicted it is bound by the {resource}, with {show_frac(self.result.hit_rate)} hits"]
        if self.bound_s is not None and self.measured_s < self.bound_s:
            found.append("so model, precision, machine or prompts are others than those that were named")
        elif self._inside:
            found.append("so the machine may do what its profile says: the ranges of its figures and the choice of")
            found[-1] += " requests cover the difference"
        slowed = [one for one in self.explanations if one.causes]
        if slowed:
            found.append("what may slow a machine, by the one input of its profile that it would have to move:")
            found += [f"- {one.line()}" for one in slowed]
        return [*found, self.replays.said, *drive_lines([self.candidate]), self.trace]

    def table(self) -> str:
        """What, changed alone, would explain the difference."""
        from sim.base.tables import prose, render, table

        if not self.explanations:
            return ""
        shown = table("would explain it", "in the profile", "on your machine", "predicted then")
        prose(shown, 1, 2)
        for one in self.explanations:
            shown.add_row(*one.said, show_seconds(one.tpot_s))
        return render(shown)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "measured_tpot_s": self.measured_s,
            "predicted": self.predicted.to_dict() | {"met": None, "margin_frac": None},
            "inside_the_band": self._inside,
            "lower_bound.tpot_s": self.bound_s,
            "times_predicted": self.measured_s / self.predicted.value,
            "times_bound": None if self.bound_s is None else self.measured_s / self.bound_s,
            "policy": self.candidate.label,
            "hw": self.candidate.machine.id,
            "run_id": self.result.run_id,
            "bottleneck": self.result.bottleneck.resource,
            "hit_rate": self.result.hit_rate,
            "explanations": [one.to_dict() for one in self.explanations],
            "trace": self.trace,
        }


def explain(
    block: Block,
    text: str,
    workers: int | None,
    progress: Progress,
    note: Callable[[str], None] = lambda _: None,
) -> Explained:
    """Hold a measurement to prediction and bound.

    Raises:
        BadInput: whatever has to be changed, in one line; also another number than one of machines or policies.
    """
    measured_s = time_of(text)
    if len(block.axes.get("hw", [])) != 1 or sum(map(len, block.policies)) != 1:
        raise BadInput(
            "explain: a measurement is held to one machine and one policy; name the --hw that you measured, and the "
            "--policy that does what your engine does (`moesim policies` lists them)"
        )
    for name in block.axes:
        if name not in AXES:
            raise BadInput(f"explain, got {OPTIONS.by_field[name].said}: {NO_SAY}")
    goal = Goal(KEY, "<=", measured_s, text)
    asked = candidates_of(PlanRequest([goal], block, workers=workers, progress=progress, note=note))
    if len(asked.every) != 1:
        raise BadInput("explain: a measurement is held to one budget; give one")
    (one,) = asked.every
    asked.rule_out()
    replays = asked.replays()
    (result,) = replays.of([one.spec], "prediction")
    if isinstance(result, str):
        raise BadInput(result)
    (predicted,) = readings([goal], result)
    bound_s = one.bounds[0].value if one.bounds else None
    slower, now_s = predicted.met, predicted.value
    found = list(_levers(one, goal, replays, slower))
    found += [] if slower else _precision(one, measured_s, replays)
    found = [told for told in found if _nearer(told.tpot_s, measured_s, now_s)]
    order = list(CAUSES)
    found.sort(key=lambda told: order.index(told.what) if told.what in order else len(order))
    return Explained(measured_s, one, result, predicted, bound_s, asked.trace, found, replays)


def _levers(one: Candidate, goal: Goal, replays: Replays, slower: bool) -> Iterator[Explanation]:
    """How little, or how much, of what the profile promises gives the time that was measured."""
    from sim.run import prepare

    probe = by_replay([goal], replays)
    setup = prepare(one.spec)
    try:
        axes = axes_of(setup, one.spec, one.asked.cpu)
        if slower:
            axes.append(_gpu_axis(setup, one.spec))
    finally:
        setup.close()
    for axis in axes:
        low, high = (max(1.0, axis.least), axis.now) if slower else (axis.now, axis.most)
        if low >= high or (slower and probe(axis, low, False).met):
            continue
        tried = search(axis, probe, low, high)
        value, told, result = tried
        if not told or result is None:
            continue
        said = axis.told(tried) + (f", {show_frac(result.hit_rate)} hits" if axis.key == CACHE else "")
        causes = CAUSES[axis.key] if slower else ()
        if slower and axis.key == CPU and (half := probe(axis, axis.now / 2, True)).readings:
            filled = f" (half of them filled: {axis.show(axis.now / 2)}, {show_seconds(half.readings[0].value)})"
            causes = (causes[0] + filled, *causes[1:])
        yield Explanation(axis.key, axis.now, value, told[0].value, (axis.name, axis.show(axis.now), said), causes)


def _gpu_axis(setup: Setup, spec: RunSpec) -> Axis:
    """The memory of the GPU, down to what it would read across the link."""
    now, link = setup.hw.gpu.memory_bandwidth_bytes_per_s.value, setup.hw.h2d.bandwidth_bytes_per_s.value
    axis = rate_axis("GPU memory bandwidth", spec, GPU, now, now)
    return axis._replace(least=min(now, max(axis.least, link)))


def _precision(one: Candidate, measured_s: float, replays: Replays) -> Iterator[Explanation]:
    """That of fewer bits which is predicted nearest to what was measured."""
    tried: list[tuple[float, str]] = []
    lower, axis = precision_axis(one.spec)
    for place, name in enumerate(lower):
        at_s = _time_s(axis.at(place), replays)
        if at_s is None:
            continue
        tried.append((at_s, name))
        if at_s <= measured_s:
            break  # fewer bits are faster still
    if tried:
        at_s, name = min(tried, key=lambda told: abs(told[0] - measured_s))
        yield Explanation("precision", one.spec.precision, name, at_s, ("precision", one.spec.precision, name))


def _time_s(spec: RunSpec, replays: Replays) -> float | None:
    """What is predicted; None where it does not run."""
    (answer,) = replays.of([spec], "what would explain it")
    return None if isinstance(answer, str) else answer.tpot_s.mean


def _nearer(at_s: float, measured_s: float, now_s: float) -> bool:
    """Whether that is nearer to what was measured than the prediction, by more than a little."""
    return abs(at_s - measured_s) < abs(now_s - measured_s) - LITTLE_FRAC * min(now_s, measured_s)
