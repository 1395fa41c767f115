"""The cheapest machine and policy that reach a goal, what the others lack, and how `moesim plan` says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count, show_rate
from sim.figures import SCHEMA
from sim.results.text import BOUND_IS_OF
from sim.studies.plan.candidate import (
    DEARER,
    EXCLUDED,
    MISSES,
    NOT_RUN,
    Candidate,
    Machine,
    Setting,
    by_machine,
    capacity_text,
    closest,
    spokesman,
)
from sim.studies.plan.cheapest import UpToRate, cheapest, up_to_rate
from sim.studies.plan.goal import Goal, Reading, shown
from sim.studies.plan.request import Candidates, PlanRequest, candidates_of, drive_lines, with_replicas
from sim.studies.plan.suggestions import Suggestion, suggestions, suggestions_table

if TYPE_CHECKING:
    from sim.studies.plan.memory import LeastMemory
    from sim.studies.plan.replays import Replays
    from sim.studies.plan.ways import ComparedWays

MOST_REASONS = 5
WORDS = ("CPU", "verdict", "policy", "precision", "budget", "bound by")
NO_GOAL = (
    "--goal, got none: say what is to be reached, e.g. --goal 'tpot_s.mean <= 100ms'; or name one --hw, to compare "
    "what streaming, caching and its CPU give there"
)


def ask(request: PlanRequest, least: bool) -> PlanResult | LeastMemory | ComparedWays:
    """The answer to what was asked: the least memory, the cheapest machine, or without a goal the ways of one machine.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    if not request.goals:
        from sim.studies.plan.ways import compare_ways

        if least or len(request.block.axes.get("hw", ())) != 1:
            raise BadInput(NO_GOAL)
        return compare_ways(request)
    if least:
        from sim.studies.plan.memory import least_memory

        return least_memory(request)
    return plan(request)


def plan(request: PlanRequest) -> PlanResult:
    """The cheapest machine that reaches the goals.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    asked = candidates_of(replace(request, block=with_replicas(request.block)))
    asked.rule_out()
    found = PlanResult(asked, asked.replays(), asked.replays())
    found.answered = cheapest(request.goals, asked.settings, found.replays, request.every)
    if request.suggest:
        if found.best is not None:
            found.up_to_rate = up_to_rate(request.goals, found.best, asked.replays())
        found.suggestions = suggestions(request, found.candidates, found.searched)
    return found


@dataclass
class PlanResult:
    """A plan that is made.

    Attributes:
        answered: the cheapest that reaches the goals. suggestions: by machine that fails,
            what would have to be true. searched: the replays that they took. up_to_rate: under load, up to which the
            answer would hold.
    """

    asked: Candidates
    replays: Replays
    searched: Replays
    answered: Setting | None = None
    suggestions: dict[str, list[Suggestion]] = field(default_factory=dict)
    up_to_rate: UpToRate | None = None

    @property
    def goals(self) -> list[Goal]:
        """All of them have to be reached."""
        return self.asked.request.goals

    @property
    def candidates(self) -> list[Candidate]:
        """All of them, the cheapest setting first."""
        return [one for setting in self.asked.settings for one in setting.candidates]

    @property
    def reached(self) -> bool:
        """Whether any candidate reaches the goals."""
        return self.answered is not None

    @property
    def best(self) -> Candidate | None:
        """The policy with the largest margin in the cheapest setting that reaches the goals."""
        return None if self.answered is None else self.answered.reaching[0]

    def rows(self) -> list[dict[str, Any]]:
        """One per candidate, for a frame: its plain figures, and each goal's."""
        rows = []
        for one in self.candidates:
            plain = {name: value for name, value in one.to_dict().items() if not isinstance(value, list)}
            for goal in self.goals:
                told, least = _of(goal, one.found), _of(goal, one.bounds)
                low, high = (None, None) if told is None or told.band is None else told.band
                plain |= {
                    goal.key: None if told is None else told.value,
                    f"{goal.key}.low": low,
                    f"{goal.key}.high": high,
                }
                plain |= {f"{goal.key}.margin_frac": None if told is None else told.margin_frac}
                plain |= {f"{goal.key}.bound": None if least is None else least.value}
            rows.append(plain)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        asked, replays, best = self.asked, self.replays, self.best
        prices = asked.prices
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "reached": self.reached,
            "goals": [goal.to_dict() for goal in self.goals],
            "prices": None if prices is None else {"file": str(prices.path), "unit": prices.unit},
            "trace": asked.trace,
            "hosts": asked.hosts or None,
            "best": None if best is None else best.to_dict(),
            **({} if self.up_to_rate is None else {"up_to_rate": self.up_to_rate._asdict()}),
            "work": {
                "candidates": len(asked.every),
                "can_be_set_up": len(asked.ready),
                "lower_bounds": asked.n_bounds,
                "replays": replays.n_runs,
                "replays_of_all_requests": replays.n_whole,
                "whole_replays": replays.share,
                "replays_for_suggestions": self.searched.n_runs,
            },
            "suggestions": {name: [one.to_dict() for one in some] for name, some in self.suggestions.items()},
            "candidates": [one.to_dict() for one in self.candidates],
        }

    def answer(self) -> str:
        """The first line."""
        return (self._nearest() if self.best is None else self._found(self.best)) + self.asked.routing

    def _found(self, best: Candidate) -> str:
        prices, machine = self.asked.prices, best.machine
        what = "smallest" if prices is None else "cheapest"
        cost = "" if machine.price is None or prices is None else f" ({prices.show(machine.price)})"
        where = f"{machine.name}{cost}{_and(best)} with {best.label}"
        where += f" on its {machine.cpu}" if best.asked.cpu else ""
        text = f"{what} machine for {self.asked.request.said} of {best.asked.meant['model']} in {best.spec.precision}: "
        text += f"{where}: {_said(best.found)}"
        text += f"; bound by the {best.bottleneck}" if best.bottleneck else ""
        text += _undecided(best)
        less = {one.machine for one in self.candidates if one.machine.cost < machine.cost}
        n = len(less - {one.machine for one in self.candidates if one.state != NOT_RUN})
        some = f"{what.replace('est', 'er')} {'one does' if n == 1 else 'ones do'}"
        return f"{text}; {n} {some} not run, see below" if n else text

    def _nearest(self) -> str:
        """Where nothing reaches the goals: what comes nearest."""
        ready, near = self.asked.ready, closest(self.asked.ready)
        several = len({one.machine for one in ready}) > 1
        text = "no machine reaches" if several else f"{ready[0].machine.name} does not reach"
        text += f" {self.asked.request.said}"
        if near is None:
            return text
        where = near.machine.name
        if near.state == MISSES and near.reason:
            return f"{text}: requests come faster than they are served, nearest {near.label} on {where}"
        where += f" in {near.spec.precision}" if len({one.spec.precision for one in ready}) > 1 else ""
        where += _and(near)
        if not self.replays.n_runs:
            told = ", ".join(
                f"{one.goal.key} no {'better' if one.goal.at_most else 'more'} than {shown(one.goal.key, one.value)}"
                for one in near.bounds
                if not one.met
            )
            return f"{text}: ruled out by lower bounds alone, without a replay; nearest: {where}, {told}"
        few = "" if near.found else " (from few requests)"
        return f"{text}; nearest: {near.label} on {where}: {_said(near.known)}{few}"

    def lines(self) -> list[str]:
        """How it was found."""
        rate = None if self.up_to_rate is None else self.up_to_rate.text
        found = (rate, self.asked.hosts, self._order(), self._counts(), *drive_lines(self.candidates), self.asked.trace)
        return [line for line in found if line]

    def _order(self) -> str:
        """By what machines are ordered."""
        several, prices = len({one.spec.precision for one in self.candidates}) > 1, self.asked.prices
        text = "no prices (--prices FILE): machines are ordered by nominal VRAM, then link, then GPU memory bandwidth"
        if prices is not None:
            text = f"prices from {prices.path}"
            if without := sorted({one.machine.name for one in self.candidates if one.machine.price is None}):
                text += f"; none for {', '.join(without)}: they come last"
        return text + ("; on each the finest precision first, whose quality is not looked at" if several else "")

    def _counts(self) -> str:
        """What was worked out, and what trying everything would have taken."""
        every, replays = self.asked.every, self.replays
        machines, ready = len({one.machine for one in every}), len(self.asked.ready)
        few = replays.n_runs - replays.n_whole
        text = f"{show_count(len(every), 'candidate')}: {show_count(machines, 'machine')}"
        text += f", {show_count(len(self.asked.settings), 'setting')}" if len(self.asked.settings) != machines else ""
        text += f", {show_count(len({one.label for one in every}), 'policy').replace('policys', 'policies')}"
        text += f"; {ready:,} can be set up" if ready != len(every) else ""
        ruled_out = sum(one.state == EXCLUDED for one in every)
        text += f"; {show_count(self.asked.n_bounds, 'lower bound')} ruled out {ruled_out:,}"
        if not replays.n_runs:
            return f"{text}; no replay"
        kinds = (replays.n_whole, f"of all {replays.n_requests} requests"), (few, "of the first few")
        parts = " and ".join(f"{show_count(n, 'replay')} {of}" for n, of in kinds if n)
        return f"{text}; {parts}, {replays.share:.3g} times all requests, where brute force takes {ready:,}"

    def table(self) -> str:
        """A row per machine, what those that fail lack, and what was not replayed or does not run."""
        lines = [line for line in (self._dearer(), *self._not_run()) if line]
        parts = (self._machines(), suggestions_table(self.suggestions), "".join(f"{line}\n" for line in lines))
        return "\n".join(part for part in parts if part)

    def _machines(self) -> str:
        """One row per machine: the setting that reaches the goals, or the policy that comes nearest."""
        from sim.base.tables import tabled

        priced, below = self.asked.prices is not None, False
        precisions = len({one.spec.precision for one in self.candidates}) > 1
        capacities = any(capacity_text(one.spec) for one in self.candidates)
        titles = ["machine", *(["price"] if priced else []), "VRAM", "link", "CPU", "verdict", "policy"]
        titles += [*(["precision"] if precisions else []), *(["budget"] if capacities else [])]
        titles += [title for goal in self.goals for title in (goal.key, "band", "bound")] + ["bound by"]
        rows = []
        for machine, own in by_machine(self.candidates):
            one = spokesman(own)
            if one.state == DEARER:
                continue  # `_dearer` names it
            cells = [machine.name, *([_price(machine)] if priced else [])]
            link = show_rate(machine.h2d_bytes_per_s) if machine.h2d_bytes_per_s else "-"  # one memory has none
            cells += [show_bytes(machine.n_cards * machine.vram_bytes), link, machine.cpu]
            cells += [one.verdict, one.label if one.known else "-"]
            cells += [one.spec.precision] if precisions else []
            cells += [capacity_text(one.spec) or "all"] if capacities else []
            for goal in self.goals:
                least = _least(own, goal)
                cells += _figures(one, goal, least)
                below = below or _begins_below(_of(goal, one.found), least)
            rows.append([*cells, one.bottleneck or "-"])
        words = [at for at, title in enumerate(titles) if title in WORDS]
        text = tabled(titles, rows, words, ("link", "VRAM", "band", "budget", "CPU", "bound by"))
        return text + (f"a band that begins below the bound: that {BOUND_IS_OF}\n" if below else "")

    def _dearer(self) -> str:
        """Machines that were not replayed, since a cheaper one reaches the goals."""
        left = [machine for machine, own in by_machine(self.candidates) if spokesman(own).state == DEARER]
        names = ", ".join(dict.fromkeys(_with_more(machine, left) for machine in left))
        which = "larger" if self.asked.prices is None else "dearer"
        return f"not replayed, since {which} than the answer (--all-machines settles them): {names}" if names else ""

    def _not_run(self) -> list[str]:
        """A line for each reason, with the machines it holds for."""
        by_reason: dict[str, list[Candidate]] = {}
        for one in self.candidates:
            if one.state == NOT_RUN:
                by_reason.setdefault(one.reason, []).append(one)
        lines: list[str] = []
        left = 0
        for reason, some in by_reason.items():
            who = f"{some[0].label} on {some[0].machine.name}" if len(some) == 1 else show_count(len(some), "candidate")
            if len(lines) < MOST_REASONS:
                lines.append(f"not run: {who}: {reason}")
            else:
                left += len(some)
        return [*lines, *([f"not run: {show_count(left, 'candidate')} more; --json says why"] if left else [])]


def _said(some: Iterable[Reading]) -> str:
    return ", ".join(one.said for one in some)


def _and(one: Candidate) -> str:
    text = capacity_text(one.spec)
    return f" and {text}" if text else ""


def _of(goal: Goal, some: Sequence[Reading]) -> Reading | None:
    return next((told for told in some if told.goal == goal), None)


def _undecided(best: Candidate) -> str:
    """What decides where a goal lies inside the band; nothing where it does not."""
    open_ = [one for one in best.found if not one.sure]
    for one in open_:
        if one.by_requests is not None and not all(one.goal.met(end) for end in one.by_requests[0]):
            n = one.by_requests[1]
            return f"; the goal lies inside what so few requests leave open (n = {n}): replay more"
    return "; the goal lies inside the band, so the figures behind it decide" if open_ else ""


def _least(own: Sequence[Candidate], goal: Goal) -> Reading | None:
    """The bound that holds for every lossless policy of a machine: the one that leaves most of the goal."""
    found = [told for one in own if (told := _of(goal, one.bounds)) is not None]
    return max(found, key=lambda told: told.margin_frac, default=None)


def _begins_below(told: Reading | None, least: Reading | None) -> bool:
    """Whether a band begins on the far side of what no lossless policy can beat."""
    if told is None or told.band is None or least is None:
        return False
    return told.band[0] < least.value if told.goal.at_most else told.band[1] > least.value


def _with_more(machine: Machine, some: Sequence[Machine]) -> str:
    """`3 to 8 replicas of rtx3090`, where there are several numbers of them."""
    counts = [one.n_replicas for one in some if (one.id, one.n_gpus) == (machine.id, machine.n_gpus)]
    if min(counts) == max(counts):
        return machine.name
    return f"{min(counts)} to {max(counts)} replicas of {machine._replace(n_replicas=1).name}"


def _price(machine: Machine) -> str:
    return "-" if machine.price is None else f"{machine.price:,.10g}"


def _figures(one: Candidate, goal: Goal, least: Reading | None) -> list[str]:
    told = _of(goal, one.known)
    value = "-" if told is None else ("" if one.found else "~") + shown(goal.key, told.value)
    ends = None if told is None or not one.found else told.band
    band = "-" if ends is None else " to ".join(shown(goal.key, end) for end in ends)
    return [value, band, "-" if least is None else shown(goal.key, least.value)]
