"""The least memory: with how few experts of room a policy still reaches the goals, machine by machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count, show_frac
from sim.figures import SCHEMA
from sim.options import OPTIONS
from sim.results.figure import show_figure
from sim.studies.plan.axes import Axis, Tried, by_bound, by_replay, cache_axis, few_of, search
from sim.studies.plan.candidate import MISSES, OPEN, Candidate, Machine
from sim.studies.plan.cheapest import LOOKS, screen
from sim.studies.plan.request import Candidates, PlanRequest, candidates_of, drive_lines
from sim.studies.plan.suggestions import BOUND, Suggestion, suggestions, suggestions_table

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.studies.plan.replays import Replays


class Least(NamedTuple):
    """The least room on one machine.

    Attributes:
        tried: the run with that room. below: the one with an expert less. floor: experts below which the bound misses
            the goals, whatever the policy; None where no bound is known.
    """

    machine: Machine
    policy: str
    tried: Tried
    below: Tried | None
    floor: int | None

    @property
    def result(self) -> Result:
        """Its run."""
        assert self.tried.result is not None
        return self.tried.result

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        return {
            "hw": self.machine.id,
            "policy": self.policy,
            "experts": int(self.tried.value),
            "expert_bytes": int(self.tried.value) * self.result.expert_bytes,
            "vram_bytes": self.result.memory.needed_bytes,
            "peak_vram_bytes": self.result.peak_vram_bytes,
            "hit_rate": self.result.hit_rate,
            "figures": [one.to_dict() for one in self.tried.readings],
            "figures_with_one_expert_less": None
            if self.below is None
            else [one.to_dict() for one in self.below.readings],
            "experts_by_the_bound": self.floor,
        }


@dataclass
class LeastMemory:
    """Machines by how much memory they need; those that cannot reach the goals with all of theirs.

    Attributes:
        suggestions: by machine that cannot, what would have to be true.
    """

    asked: Candidates
    replays: Replays
    found: list[Least] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    suggestions: dict[str, list[Suggestion]] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether any machine reaches the goals."""
        return bool(self.found)

    def answer(self) -> str:
        """The first line."""
        goals = self.asked.request.said
        if not self.found:
            return self._no_answer(goals) + self.asked.routing
        least = self.found[0]
        told = ", ".join(one.said for one in least.tried.readings)
        experts = show_count(int(least.tried.value), "expert")
        room = f"{show_bytes(least.result.memory.needed_bytes)} of VRAM ({experts} of room)"
        text = f"least memory for {goals}: {room}, with {least.policy} on {least.machine.name}: {told}"
        return text + self.asked.routing

    def _no_answer(self, goals: str) -> str:
        """What would do on the first machine with more bandwidth or memory, or fewer bits."""
        several = len(self.failing) > 1
        who = f"none of {', '.join(self.failing)} reaches" if several else f"{self.failing[0]} does not reach"
        text = f"{who} {goals} with all its memory"
        for name, found in self.suggestions.items():
            if some := [one for one in found if one.need is not None]:
                where = f" on {name}" if several else ""
                least = " at the least" if any(one.how == BOUND for one in some) else ""
                ways = [f"{one.said[0]} {one.said[2]}" for one in some if one.what != "hit_rate"]
                return f"{text}; alone it would take{where}{least}: {', or '.join(ways)}"
        return text

    def lines(self) -> list[str]:
        """How it was found."""
        text = (
            f"found by bisection over whole experts: {self.replays.said}; it takes for granted that more room is better"
        )
        hosts = [self.asked.hosts] if self.asked.hosts else []
        return [*hosts, text, *drive_lines(self.asked.ready), self.asked.trace]

    def table(self) -> str:
        """One row per machine."""
        from sim.base.tables import tabled

        keys = [title for goal in self.asked.request.goals for title in (goal.key, "one expert less")]
        rows = []
        for one in self.found:
            cells = []
            below = [] if one.below is None else one.below.readings
            for told, less in zip_longest(one.tried.readings, below):
                cells.append(show_figure(told.goal.key, told.value))
                cells.append("-" if less is None else show_figure(told.goal.key, less.value))
            floor = "-" if one.floor is None else f"{one.floor:,}"
            vram, experts = show_bytes(one.result.memory.needed_bytes), f"{one.tried.value:,.0f}"
            rows.append([one.machine.name, one.policy, vram, experts, floor, *cells, show_frac(one.result.hit_rate)])
        titles = ("machine", "policy", "VRAM", "experts", "by the bound", *keys, "hit")
        parts = [tabled(titles, rows, (1,))] if rows else []
        if parts and self.failing:
            parts[0] += f"not with all their memory: {', '.join(self.failing)}\n"
        return "\n".join([*parts, *([suggestions_table(self.suggestions)] if self.suggestions else [])])

    def rows(self) -> list[dict[str, Any]]:
        """One per machine, for a frame."""
        return [one.to_dict() for one in self.found]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "reached": self.reached,
            "goals": [goal.to_dict() for goal in self.asked.request.goals],
            "trace": self.asked.trace,
            "hosts": self.asked.hosts or None,
            "machines": self.rows(),
            "failing": self.failing,
            "suggestions": {name: [one.to_dict() for one in some] for name, some in self.suggestions.items()},
            "work": {"replays": self.replays.n_runs, "whole_replays": self.replays.share},
        }


def least_memory(request: PlanRequest) -> LeastMemory:
    """Find it.

    Raises:
        BadInput: whatever has to be changed, in one line; also a cap, or several GPUs.
    """
    for name, values in request.block.axes.items():
        said = f"--least-memory, got {OPTIONS.by_field[name].said}"
        if name in ("cache", "vram"):
            raise BadInput(f"{said}: it looks for the cap itself; leave one of them out")
        if name == "gpus" and values != [1]:
            raise BadInput(f"{said}: it knows one GPU; leave one of them out")
        if name in ("ram", "drive", "precision") and (n := len(values)) > 1:
            raise BadInput(f"{said.replace('got', f'got {n} values of')}: it is asked of one; give one of them")
    asked = candidates_of(request)
    asked.rule_out()
    answer, lost = LeastMemory(asked, asked.replays()), []
    for setting in asked.settings:
        least = _on(setting.candidates, request, answer.replays)
        if least is None:
            answer.failing.append(setting.machine.name)
            lost += setting.candidates
        else:
            answer.found.append(least)
    answer.found.sort(key=lambda one: (one.result.memory.needed_bytes, one.machine.cost))
    if request.suggest:
        answer.suggestions = suggestions(request, lost, answer.replays)
    return answer


def _on(own: list[Candidate], request: PlanRequest, replays: Replays) -> Least | None:
    """On one machine, policy after policy, fastest first; each has to get by with less than the best so far."""
    goals = request.goals
    left = [one for one in own if one.state == OPEN]
    if left:
        left = screen(goals, left, replays, few_of(goals, replays) or replays.n_requests, LOOKS[-1].slack_frac)
    if not left:
        return None
    probe, floor = by_replay(goals, replays), _floor(request, left)
    best: tuple[Candidate, Axis, Tried] | None = None
    for one in left:
        axis = _axis(one)
        low, high = (floor or 1) - 1, axis.now if best is None else best[2].value - 1
        if high <= low or (best is not None and not probe(axis, high, False).met):
            continue
        tried = search(axis, probe, low, high)
        if tried.met:
            best = one, axis, tried
        else:
            one.settle(MISSES)
    if best is None:
        return None
    one, axis, tried = best
    below = probe(axis, tried.value - 1, True) if tried.value > 1 else None
    return Least(one.machine, one.label, tried, below, floor)


def _floor(request: PlanRequest, left: list[Candidate]) -> int | None:
    """Experts of room with which the bound of the widest lanes reaches the goals; None where it knows none of them."""
    if not all(one.bounds and not one.lossy for one in left):
        return None
    axis = _axis(left[0])
    tried = search(axis, by_bound(request.goals, any(one.asked.cpu for one in left)), 0, axis.now)
    return int(tried.value) if tried.met else None


def _axis(one: Candidate) -> Axis:
    from sim.run import prepare

    setup = prepare(one.spec)
    try:
        return cache_axis(setup, one.spec)
    finally:
        setup.close()
