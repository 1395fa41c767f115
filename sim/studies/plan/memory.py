"""The least memory: with how few experts of room a policy still reaches the goals, machine by machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count, show_frac
from sim.figures import SCHEMA
from sim.options import OPTIONS
from sim.results.figure import show_figure
from sim.studies.hosts import of_specs
from sim.studies.plan.candidate import MISSES, OPEN, SCREENED, Candidate, Machine, routing_of
from sim.studies.plan.ladder import RUNGS, few_of, levels_of, screen
from sim.studies.plan.lever import ByBound, ByReplay, Lever, Tried, room_lever, search
from sim.studies.plan.limits import rule_out
from sim.studies.plan.plan import Asked, candidates_of, facts_of
from sim.studies.plan.remedy import BOUND, Remedy, remedies
from sim.studies.plan.replays import Replays
from sim.studies.plan.text import drive_lines, goals_text, reading_text, remedy_table
from sim.studies.pool import n_cores

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.studies.runner import Progress


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
        below = None if self.below is None else [one.to_dict() for one in self.below.readings]
        return {
            "hw": self.machine.id,
            "policy": self.policy,
            "experts": int(self.tried.value),
            "expert_bytes": int(self.tried.value) * self.result.expert_bytes,
            "vram_bytes": self.result.memory.needed_bytes,
            "peak_vram_bytes": self.result.peak_vram_bytes,
            "hit_rate": self.result.hit_rate,
            "figures": [one.to_dict() for one in self.tried.readings],
            "figures_with_one_expert_less": below,
            "experts_by_the_bound": self.floor,
        }


@dataclass
class Frugal:
    """The answer: machines by how much memory they need; those that cannot reach the goals with all of theirs.

    Attributes:
        remedies: by machine that cannot, what would have to be true. hosts: where they are unlike, what says so.
        routing: where that rests on little, what says so.
    """

    asked: Asked
    found: list[Least]
    replays: Replays
    trace: str
    failing: list[str] = field(default_factory=list)
    remedies: dict[str, list[Remedy]] = field(default_factory=dict)
    hosts: str = ""
    routing: str = ""

    @property
    def reached(self) -> bool:
        """Whether any machine reaches the goals."""
        return bool(self.found)

    def answer(self) -> str:
        """The first line."""
        return self._answer() + self.routing

    def _answer(self) -> str:
        goals = goals_text(self.asked.goals)
        if not self.found:
            return self._no_answer(goals)
        least = self.found[0]
        told = ", ".join(reading_text(one) for one in least.tried.readings)
        experts = show_count(int(least.tried.value), "expert")
        room = f"{show_bytes(least.result.memory.needed_bytes)} of VRAM ({experts} of room)"
        return f"least memory for {goals}: {room}, with {least.policy} on {least.machine.name}: {told}"

    def _no_answer(self, goals: str) -> str:
        """What would do on the first machine with more bandwidth or memory, or fewer bits."""
        several = f"none of {', '.join(self.failing)} reaches" if len(self.failing) > 1 else ""
        text = f"{several or f'{self.failing[0]} does not reach'} {goals} with all its memory"
        for name, found in self.remedies.items():
            if some := [one for one in found if one.need is not None]:
                where = f" on {name}" if several else ""
                least = " at the least" if any(one.how == BOUND for one in some) else ""
                return f"{text}; alone it would take{where}{least}: " + ", or ".join(
                    f"{figure} {need}" for figure, _, need in (one.said for one in some if one.what != "hit_rate")
                )
        return text

    def lines(self) -> list[str]:
        """How it was found."""
        text = f"{show_count(self.replays.n_runs, 'replay')}, as much as {self.replays.share:.3g} of all requests"
        text = f"found by bisection over whole experts: {text}; it takes for granted that more room is better"
        return [*([self.hosts] if self.hosts else []), text, self.trace]

    def table(self) -> str:
        """One row per machine."""
        from sim.base.tables import prose, render, table

        goals = self.asked.goals
        keys = [title for goal in goals for title in (goal.key, "one expert less")]
        shown = table("machine", "policy", "VRAM", "experts", "by the bound", *keys, "hit")
        prose(shown, 1)
        for one in self.found:
            cells = []
            for at, told in enumerate(one.tried.readings):
                less = None if one.below is None or not one.below.readings else one.below.readings[at]
                cells.append(show_figure(told.goal.key, told.value))
                cells.append("-" if less is None else show_figure(told.goal.key, less.value))
            floor = "-" if one.floor is None else f"{one.floor:,}"
            vram = show_bytes(one.result.memory.needed_bytes)
            experts = f"{one.tried.value:,.0f}"
            shown.add_row(one.machine.name, one.policy, vram, experts, floor, *cells, show_frac(one.result.hit_rate))
        parts = [render(shown)] if self.found else []
        if parts and self.failing:
            parts[0] += f"not with all their memory: {', '.join(self.failing)}\n"
        parts += [text] if (text := remedy_table(self.remedies)) else []
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "reached": self.reached,
            "goals": [goal.to_dict() for goal in self.asked.goals],
            "trace": self.trace,
            "hosts": self.hosts or None,
            "machines": [one.to_dict() for one in self.found],
            "failing": self.failing,
            "remedies": {name: [one.to_dict() for one in some] for name, some in self.remedies.items()},
            "work": {"replays": self.replays.n_runs, "whole_replays": self.replays.share},
        }


def least_memory(asked: Asked, progress: Progress, note: Callable[[str], None] = lambda _: None) -> Frugal:
    """Find it.

    Raises:
        BadInput: whatever has to be changed, in one line; also a cap, or several GPUs.
    """
    for name in ("cache", "vram"):
        if name in asked.block.axes:
            raise BadInput(
                f"--least-memory, got {OPTIONS.by_field[name].said}: it looks for the cap itself; leave one of them out"
            )
    for name in ("ram", "drive", "precision"):
        if (n := len(asked.block.axes.get(name, []))) > 1:
            raise BadInput(
                f"--least-memory, got {n} values of {OPTIONS.by_field[name].said}: it is asked of one; give one of them"
            )
    if any(value != 1 for value in asked.block.axes.get("gpus", [])):
        raise BadInput("--least-memory, got --gpus: it knows one GPU; leave one of them out")
    candidates = candidates_of(asked, None, progress)
    ready = [one for one in candidates if one.ready]
    if not ready:
        raise BadInput(candidates[0].reason)
    for text in (*dict.fromkeys(text for one in ready for text in one.asked.notes), *drive_lines(ready)):
        note(text)
    n_requests, trace, loaded = facts_of(ready[0])
    workers = asked.workers or n_cores()
    rule_out(asked.goals, candidates, workers, progress, asked.pool, asked.records)
    replays = asked.replays(n_requests, progress, loaded)
    found, failing, lost = [], [], []
    for level in levels_of(candidates):
        least = _on(asked, level.candidates, replays)
        if least is None:
            failing.append(level.machine.name)
            lost += level.candidates
        else:
            found.append(least)
    found.sort(key=lambda one: (one.result.memory.needed_bytes, one.machine.cost))
    told = remedies(asked, lost, replays, workers, progress) if asked.invert else {}
    hosts, routing = of_specs(one.spec for one in ready), routing_of(ready[0].spec)
    return Frugal(asked, found, replays, trace, failing, told, hosts, routing)


def _on(asked: Asked, own: list[Candidate], replays: Replays) -> Least | None:
    """Policy after policy, fastest first; each has to get by with less than the best so far."""
    live = [one for one in own if one.state == OPEN]
    n = few_of(asked.goals, replays)
    if not live:
        return None
    screen(asked.goals, live, replays, n or replays.n_requests)
    for one in live:
        if one.state == OPEN and one.few and one.margin_frac < -RUNGS[-1].slack_frac:
            one.state = SCREENED
    live = [one for one in live if one.state == OPEN]
    live.sort(key=lambda one: (-one.margin_frac, one.label))
    if not live:
        return None
    lever = _lever(live[0])
    floor = _floor(asked, live, lever)
    best: tuple[Candidate, Lever, Tried] | None = None
    for one in live:
        lever = _lever(one)
        probe = ByReplay(asked.goals, replays, n)
        high = lever.now if best is None else best[2].value - 1
        low = (floor or 1) - 1
        if high <= low or (best is not None and not probe.few(lever, high).met):
            continue
        found = search(lever, probe, low, high)
        if found.reached:
            best = one, lever, found.tried
        else:
            one.state = MISSES
    if best is None:
        return None
    one, lever, tried = best
    probe = ByReplay(asked.goals, replays, None)
    below = probe.whole(lever, tried.value - 1) if tried.value > 1 else None
    return Least(one.machine, one.label, tried, below, floor)


def _floor(asked: Asked, live: list[Candidate], lever: Lever) -> int | None:
    """Experts of room with which the bound of the widest lanes reaches the goals; None where it knows none of them."""
    if not all(one.bounds and not one.lossy for one in live):
        return None
    found = search(lever, ByBound(asked.goals, any(one.asked.cpu for one in live)), 0, lever.now)
    return int(found.tried.value) if found.reached else None


def _lever(one: Candidate) -> Lever:
    from sim.run import prepare

    setup = prepare(one.spec)
    try:
        return room_lever(setup, one.spec, setup.model.n_moe_layers * setup.model.n_experts)
    finally:
        setup.close()
