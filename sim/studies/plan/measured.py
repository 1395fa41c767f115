"""Is my machine at its limit? A measurement beside prediction and bound, and what would explain the difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.base.units import parse_seconds, show_count, show_frac, show_seconds
from sim.profiles.stack import PACKAGE as STACKS
from sim.results.expectations import Expectation
from sim.studies.plan.candidate import Candidate
from sim.studies.plan.goal import Goal, Reading, readings
from sim.studies.plan.ladder import few_of
from sim.studies.plan.lever import ROOM, ByReplay, levers_of, search
from sim.studies.plan.limits import rule_out
from sim.studies.plan.plan import Asked, candidates_of, facts_of
from sim.studies.plan.remedy import remedies_of
from sim.studies.plan.replays import Replays
from sim.studies.pool import n_cores

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.studies.sweep.run import Progress

_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(?:tok|tokens|t)\s*/\s*s\s*")
KEY = "tpot_s.mean"
LITTLE_FRAC = 0.02
"""A prediction that another stack moves by less explains nothing."""


def time_of(text: str) -> float:
    """Seconds per output token of `12.5tok/s` or `80ms`. Raises BadInput."""
    match = _RATE.fullmatch(text)
    rate = float(match[1]) if match is not None else None
    time_s = parse_seconds(text, "--measured") if rate is None else 1 / rate if rate else 0.0
    if not time_s:
        raise BadInput(f"--measured, got {text!r}: no token takes no time; write e.g. 12.5tok/s or 80ms")
    return time_s


class Explanation(NamedTuple):
    """One figure that, changed alone, gives the prediction that was measured, or comes nearer to it.

    Attributes:
        said: for people, the figure, its value, and what would explain the measurement. tpot_s: the prediction then.
    """

    what: str
    now: float | str | None
    value: float | str | None
    tpot_s: float | None
    said: tuple[str, str, str]

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        found = self._asdict()
        del found["said"]
        return found


@dataclass
class Judged:
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
    reached: bool = True

    @property
    def _inside(self) -> bool:
        low, high = self.predicted.band or (self.predicted.value, self.predicted.value)
        return low <= self.measured_s <= high

    def answer(self) -> str:
        """The first line."""
        one, at_s = self.candidate, self.predicted.value
        band = "" if self.predicted.band is None else " ({} to {})".format(*map(show_seconds, self.predicted.band))
        times = self.measured_s / at_s
        how = f"{times:.2f} times" if times > 1 else f"{1 / times:.2f} times faster than"
        where = "inside" if self._inside else "outside"
        text = f"measured {show_seconds(self.measured_s)} per token ({1 / self.measured_s:.3g} tokens/s): {how}"
        text += f" the {show_seconds(at_s)}{band} predicted for {one.label} on {one.machine.name}, {where} that band"
        if self.bound_s is None:
            return text
        if self.measured_s < self.bound_s:
            return f"{text}; faster than any lossless policy can be there ({show_seconds(self.bound_s)})"
        left = f"{self.measured_s / self.bound_s:.2f} times as fast"
        return f"{text}; no lossless policy can be faster there than {show_seconds(self.bound_s)}, {left}"

    def lines(self) -> list[str]:
        """What it rests on, and in one sentence what follows."""
        resource = self.result.bound_by.resource
        found = [f"as predicted it is bound by the {resource}, with {show_frac(self.result.hit_rate)} hits"]
        if self.bound_s is not None and self.measured_s < self.bound_s:
            found.append("so model, precision, machine or prompts are others than those that were named")
        elif self._inside:
            found.append("so the machine may do what its profile says: the ranges of its figures and the choice of")
            found[-1] += " requests cover the difference"
        found.append(
            f"{show_count(self.replays.n_runs, 'replay')}, as much as {self.replays.share:.3g} of all requests"
        )
        return [*found, self.trace]

    def table(self) -> str:
        """What, changed alone, would explain the difference."""
        from sim.base.tables import prose, render, table

        if not self.explanations:
            return ""
        shown = table("would explain it", "in the profile", "on your machine", "predicted then")
        prose(shown, 1, 2)
        for one in self.explanations:
            shown.add_row(*one.said, "-" if one.tpot_s is None else show_seconds(one.tpot_s))
        return render(shown)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": 1,
            "answer": self.answer(),
            "measured_tpot_s": self.measured_s,
            "predicted": self.predicted.to_dict() | {"met": None, "margin_frac": None},
            "inside_the_band": self._inside,
            "bound_tpot_s": self.bound_s,
            "times_predicted": self.measured_s / self.predicted.value,
            "times_bound": None if self.bound_s is None else self.measured_s / self.bound_s,
            "policy": self.candidate.label,
            "hw": self.candidate.machine.id,
            "run_id": self.result.run_id,
            "bound_by": self.result.bound_by.resource,
            "hit_rate": self.result.hit_rate,
            "explanations": [one.to_dict() for one in self.explanations],
            "trace": self.trace,
        }


def judge(asked: Asked, text: str, progress: Progress, note: Callable[[str], None] = lambda _: None) -> Judged:
    """Hold a measurement to prediction and bound.

    Raises:
        BadInput: whatever has to be changed, in one line; also another number than one of machines or policies.
    """
    measured_s = time_of(text)
    if len(asked.block.axes.get("hw", [])) != 1 or sum(map(len, asked.block.policies)) != 1:
        raise BadInput(
            "--measured: it is held to one machine and one policy; name the --hw that you measured, and the --policy "
            "that does what your engine does (`moesim policies` lists them)"
        )
    goal = Goal(Expectation(KEY, "<=", measured_s, text))
    candidates = candidates_of(_with_goal(asked, goal), None, progress)
    if len(candidates) != 1:
        raise BadInput("--measured: it is held to one budget; give one")
    (one,) = candidates
    if not one.ready:
        raise BadInput(one.reason)
    for line in one.asked.notes:
        note(line)
    n_requests, trace, loaded = facts_of(one)
    rule_out([goal], candidates, n_cores(), progress, asked.pool, asked.records)
    replays = asked.replays(n_requests, progress, loaded)
    (result,) = replays.of([one.spec], one.asked.n_layers, "prediction")
    if isinstance(result, str):
        raise BadInput(result)
    (predicted,) = readings([goal], result)
    bound_s = one.bounds[0].value if one.bounds else None
    found = list(_slower(one, goal, replays) if predicted.met else _faster(one, goal, replays))
    return Judged(measured_s, one, result, predicted, bound_s, trace, found, replays)


def _with_goal(asked: Asked, goal: Goal) -> Asked:
    """The same with the measurement for a goal."""
    return replace(asked, goals=[goal], prices=None, invert=False)


def _slower(one: Candidate, goal: Goal, replays: Replays) -> Iterator[Explanation]:
    """Less of what the profile promises: how little gives the time that was measured; and other stacks."""
    from sim.run import prepare

    probe = ByReplay([goal], replays, few_of([goal], replays), one.asked.n_layers)
    setup = prepare(one.spec)
    try:
        levers = levers_of(setup, one.spec, one.asked.cpu)
    finally:
        setup.close()
    for lever in levers:
        if lever.now <= 1 or probe.few(lever, max(1.0, lever.least)).met:
            continue
        found = search(lever, probe, max(1.0, lever.least), lever.now)
        if found.reached and found.tried.value < lever.now:
            value, result = found.tried.value, found.tried.result
            said = lever.show(value)
            if lever.key == ROOM and result is not None:
                said += f", {show_frac(result.hit_rate)} hits"
            said_ = (lever.name, lever.show(lever.now), said)
            yield Explanation(lever.key, lever.now, value, found.tried.readings[0].value, said_)
    before = replays.of([one.spec], one.asked.n_layers, "stacks")[0]
    for name in bundled(STACKS, ".yaml"):
        (answer,) = replays.of([msgspec.structs.replace(one.spec, stack=name)], one.asked.n_layers, "stacks")
        if isinstance(answer, str) or isinstance(before, str):
            continue
        at_s, was_s = answer.tpot_s.mean, before.tpot_s.mean
        if at_s is not None and was_s is not None and at_s > was_s * (1 + LITTLE_FRAC):
            yield Explanation("stack", one.spec.stack, name, at_s, ("stack", one.spec.stack, name))


def _faster(one: Candidate, goal: Goal, replays: Replays) -> Iterator[Explanation]:
    """More than the profile promises: what would have to be true, as of a goal."""
    found, runs, whole, requests = remedies_of(one.spec, one.label, (goal,), "replayed", one.asked.cpu)
    replays.add(runs, whole, requests)
    for told in found:
        if told.need is not None:
            yield Explanation(told.what, told.now, told.need, None, told.said)
