"""`moesim explain`: a measurement beside prediction and bound, and what would explain the difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from sim.base.errors import BadInput
from sim.base.units import parse_seconds, show_frac, show_seconds
from sim.options import LOAD, OPTIONS, SIMULATION
from sim.results.record import Result
from sim.results.routing_words import of_results
from sim.studies.answer import Answer, Column, Shown
from sim.studies.plan.axes import CACHE, CPU, DRIVE, GPU, LINK, RAM, Change, axes_of, precision_axis, probe_of
from sim.studies.plan.candidate import Candidate
from sim.studies.plan.goal import Goal, Reading, readings
from sim.studies.plan.request import PlanRequest, candidates_of
from sim.studies.runner.searches import Replays, Search

if TYPE_CHECKING:
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
    RAM: ("another process that holds RAM",),
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


class Explanation(Change, frozen=True, kw_only=True):
    """One figure with which, changed alone, the prediction is what was measured, or nearer to it.

    Attributes:
        tpot_s: the prediction then. times: of what it is now. causes: what may have moved it, in the words of a
            machine's owner.
    """

    tpot_s: float
    times: float | None = None
    causes: tuple[str, ...] = ()


EXPLAINS = (
    Column("would explain it", lambda one: one.name),
    Column("in the profile", lambda one: one.now_text),
    Column("on your machine", lambda one: one.text),
    Column("predicted then", lambda one: one.tpot_s, "s"),
)


class Explained(Answer, kw_only=True, eq=False):
    """A measurement beside what the simulator says. A key `lower_bound.tpot_s` is None where no bound is known."""

    ROWS: ClassVar = "explanations"
    measured_tpot_s: float
    predicted: Reading
    inside_the_band: bool
    bound_tpot_s: float | None = msgspec.field(name="lower_bound.tpot_s")
    times_predicted: float
    times_bound: float | None
    policy: str
    hw: str
    run_id: str
    bottleneck: str | None
    hit_rate: float | None
    explanations: list[Explanation]

    def tables(self) -> list[Shown]:
        """What, changed alone, would explain the difference."""
        sentence = "What would have to be so for the simulation to give the time."
        return [Shown("explanations", "What the difference could be", sentence, EXPLAINS, self.explanations)]


def _answer(measured_s: float, predicted: Reading, bound_s: float | None, who: str, inside: bool) -> str:
    """The first line."""
    times = measured_s / predicted.value
    band = f" ({predicted.band})" if predicted.band else ""
    how = f"{times:.2f} times" if times > 1 else f"{1 / times:.2f} times faster than"
    text = f"measured {show_seconds(measured_s)} per token ({1 / measured_s:.3g} tokens/s decoding): {how} the "
    text += f"{show_seconds(predicted.value)}{band} predicted for {who}, {'inside' if inside else 'outside'} that band"
    if bound_s is None:
        return text
    if measured_s < bound_s:
        return f"{text}; faster than any lossless policy can be there ({show_seconds(bound_s)})"
    left = f"{measured_s / bound_s:.2f} times as fast"
    return f"{text}; no lossless policy can be faster there than {show_seconds(bound_s)}, {left}"


def _lines(result: Result, faster_than_bound: bool, inside: bool, found: Sequence[Explanation]) -> list[str]:
    """What it rests on, and in one sentence what follows."""
    lines = [f"as predicted it is bound by the {result.bottleneck.resource}, with {show_frac(result.hit_rate)} hits"]
    if faster_than_bound:
        lines.append("so model, precision, machine or prompts are others than those that were named")
    elif inside:
        lines.append(
            "so the machine may do what its profile says: the ranges of its figures and the choice of requests cover "
            "the difference"
        )
    if slowed := [one for one in found if one.causes]:
        lines.append("what may slow a machine, by the one input of its profile that it would have to move:")
        lines += [
            f"- {one.name} at {one.times:.0%} ({one.text} for {one.now_text}): {', '.join(one.causes)}"
            for one in slowed
        ]
    return lines


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
        raise BadInput("explain: a measurement is held to one capacity; give one")
    (one,) = asked.every
    asked.rule_out()
    result, predicted, found = asked.replays.one(_explained(one, goal, asked.replays), "what would explain it")
    bound_s = one.bounds[0].value if one.bounds else None
    low, high = (end if end is not None else predicted.value for end in (predicted.low, predicted.high))
    inside = low <= measured_s <= high
    who = f"{one.policy} on {one.machine}"
    lines = _lines(result, bound_s is not None and measured_s < bound_s, inside, found)
    return Explained(
        first_line=_answer(measured_s, predicted, bound_s, who, inside) + of_results([result]),
        trace=asked.trace,
        measured_tpot_s=measured_s,
        predicted=predicted,
        inside_the_band=inside,
        bound_tpot_s=bound_s,
        times_predicted=measured_s / predicted.value,
        times_bound=None if bound_s is None else measured_s / bound_s,
        policy=one.policy,
        hw=one.hw,
        run_id=result.run_id,
        bottleneck=result.bottleneck.resource,
        hit_rate=result.hit_rate,
        explanations=found,
        _lines=[*lines, asked.replays.said, *asked.sources],
    )


def _explained(one: Candidate, goal: Goal, replays: Replays) -> Search[tuple[Result, Reading, list[Explanation]]]:
    """The prediction, and how little, or how much, of what the profile promises gives the time that was measured."""
    (result,) = yield [one.spec]
    if isinstance(result, str):
        raise BadInput(result)
    (predicted,) = readings([goal], result)
    slower, found, probe = predicted.met, list[Explanation](), probe_of([goal], replays)
    for axis in axes_of(one.spec, one.asked.cpu):
        low, high = (max(1.0, axis.least), axis.now) if slower else (axis.now, axis.most)
        if low >= high or (slower and (yield from probe.tried(axis, low, False)).met):
            continue
        value, told, there = tried = yield from probe.first(axis, low, high)
        if not told or there is None:
            continue
        text = axis.told(tried) + (f", {show_frac(there.hit_rate)} hits" if axis.key == CACHE else "")
        causes = CAUSES[axis.key] if slower else ()
        if slower and axis.key == CPU and (half := (yield from probe.tried(axis, axis.now / 2))).readings:
            filled = f" (half of them filled: {axis.show(axis.now / 2)}, {show_seconds(half.readings[0].value)})"
            causes = (causes[0] + filled, *causes[1:])
        more = {"tpot_s": told[0].value, "times": value / axis.now, "causes": causes}
        found.append(axis.change(Explanation, value, text, **more))
    if not slower:
        found += yield from _precision(one, goal.bound)
    near_s = abs(predicted.value - goal.bound) - LITTLE_FRAC * min(predicted.value, goal.bound)
    order = [*CAUSES]
    found = [told for told in found if abs(told.tpot_s - goal.bound) < near_s]
    found.sort(key=lambda told: order.index(told.what) if told.what in order else len(order))
    return result, predicted, found


def _precision(one: Candidate, measured_s: float) -> Search[list[Explanation]]:
    """That of fewer bits which is predicted nearest to what was measured."""
    tried: list[tuple[float, int]] = []
    axis = precision_axis(one.spec)
    for place in range(int(axis.most) + 1):
        (answer,) = yield [axis.at(place)]
        if isinstance(answer, str) or answer.tpot_s.mean is None:
            continue
        tried.append((answer.tpot_s.mean, place))
        if answer.tpot_s.mean <= measured_s:
            break  # fewer bits are faster still
    if not tried:
        return []
    at_s, place = min(tried, key=lambda told: abs(told[0] - measured_s))
    return [axis.change(Explanation, place, axis.show(place), tpot_s=at_s)]
