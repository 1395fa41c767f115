"""Climb settings (a machine with a budget) from the cheapest up, and stop where a policy reaches the goals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.studies.plan.candidate import DEARER, MISSES, OPEN, REACHES, SCREENED, Candidate, Machine, budget_of
from sim.studies.plan.goal import FEWEST_FOR, Goal, Reading, growing, reading, readings, worst
from sim.studies.plan.headroom import serves_at_most, too_many

if TYPE_CHECKING:
    from sim.studies.plan.replays import Replays


class Rung(NamedTuple):
    """A replay of one in so many requests, after which candidates are dropped.

    Attributes:
        slack_frac: one that misses a goal by more is. best_frac: so is one whose margin is that much less than the
            best's in the same setting, as long as the best one reaches the goals.
    """

    one_in: int
    slack_frac: float
    best_frac: float


RUNGS = (Rung(10, 0.15, 0.1), Rung(3, 0.05, 0.03))
MOST_LIKELY = 3
"""Policies that are tried with one more replica: those that did best with as many as before."""


class Level(NamedTuple):
    """Candidates with one machine and one budget."""

    machine: Machine
    budget: tuple[float, ...]
    candidates: list[Candidate]

    @property
    def alike(self) -> tuple[str, int, tuple[float, ...]]:
        """What it has in common with settings of more or fewer replicas."""
        return self.machine.id, self.machine.n_gpus, self.budget

    @property
    def reaching(self) -> list[Candidate]:
        """Those that reach the goals, the largest margin first."""
        found = [one for one in self.candidates if one.state == REACHES]
        return sorted(found, key=lambda one: (-one.margin_frac, one.label))


def levels_of(candidates: Sequence[Candidate]) -> list[Level]:
    """Settings, the cheapest machine first, and on it the smallest budget."""
    found: dict[tuple[Machine, tuple[float, ...]], Level] = {}
    for one in candidates:
        at = one.machine, budget_of(one.spec)
        found.setdefault(at, Level(*at, [])).candidates.append(one)
    return sorted(found.values(), key=lambda level: (level.machine.cost, level.machine.id, level.budget))


def climb(goals: Sequence[Goal], levels: Sequence[Level], replays: Replays, every: bool) -> Level | None:
    """The first setting in which a policy reaches every goal; `every`: settle the dearer ones, too.

    Whether a setting reaches the goals is settled in each by itself: what is taken from another one's is which policies
    are tried with more replicas.
    """
    answer: Level | None = None
    likely: dict[object, list[str]] = {}  # policies, by machine and budget
    for level in levels:
        if answer is not None and not every:
            for one in level.candidates:
                one.state = DEARER if one.state == OPEN else one.state
            continue
        if level.machine.n_replicas > 1 and (names := likely.get(level.alike)) is not None:
            for one in level.candidates:
                if one.state == OPEN and one.label not in names:
                    one.state, one.reason = SCREENED, "others did better with fewer replicas"
        settle(goals, level, replays)
        ran = sorted((one for one in level.candidates if one.result is not None), key=_by_load)
        if ran:
            likely[level.alike] = [one.label for one in ran[:MOST_LIKELY]]
        if answer is None and level.reaching:
            answer = level
    return answer


def few_of(goals: Sequence[Goal], replays: Replays) -> int | None:
    """How many requests a search looks at while it is under way; None: all, as percentiles and queues need them."""
    means = all(goal.key.rpartition(".")[2] not in FEWEST_FOR for goal in goals)
    return replays.few(RUNGS[0].one_in) if means else None


def settle(goals: Sequence[Goal], level: Level, replays: Replays) -> None:
    """Replay what bounds leave: few requests first, then all for those that may be the best."""
    live = [one for one in level.candidates if one.state == OPEN]
    aside: list[Candidate] = []  # worse than the best by the first few requests, should that one reach the goals
    for rung in RUNGS:
        n = replays.few(rung.one_in)
        if not live or n is None or (rung is not RUNGS[0] and len(live) == 1):
            continue
        screen(goals, live, replays, n)
        for one in live:
            if one.state == OPEN and one.few and worst(one.few) < -rung.slack_frac:
                one.state = SCREENED
        live = _by_margin(live)
        worse = [one for one in live if one.few and one.margin_frac < live[0].margin_frac - rung.best_frac]
        aside += worse
        live = [one for one in live if one not in worse]
    for some in (live, aside):
        _replay(goals, [one for one in some if one.state == OPEN], replays)
        if level.reaching:
            break
    for one in aside:
        one.state = SCREENED if one.state == OPEN else one.state


def _by_load(one: Candidate) -> tuple[float, float, str]:
    """The nearest to the goals first; of those whose queues grow, the one that serves most."""
    load = None if one.result is None else one.result.load
    served = 0.0 if load is None or load.capacity_per_s is None else load.capacity_per_s
    return -one.margin_frac, -served, one.label


def _by_margin(some: Sequence[Candidate]) -> list[Candidate]:
    return sorted((one for one in some if one.state == OPEN), key=lambda one: (-one.margin_frac, one.label))


def screen(goals: Sequence[Goal], live: Sequence[Candidate], replays: Replays, n: int) -> None:
    """Replay the first n requests of each, for what these let expect of all."""
    answers = replays.of([one.spec for one in live], "few requests", n)
    for one, answer in zip(live, answers, strict=True):
        if isinstance(answer, str):
            one.failed(answer)
            continue
        told = [(goal, reading(goal, answer)) for goal in goals]
        one.few = [_of_all(one, goal, found, n) for goal, found in told if found is not None]


def _of_all(one: Candidate, goal: Goal, few: Reading, n: int) -> Reading:
    """What the first n requests let expect of all: as far above the bound as they are."""
    if one.limit is None:
        return few
    some, every = one.limit.value(goal, n), one.limit.value(goal)
    return few._replace(value=few.value * every / some) if some and every else few


def _replay(goals: Sequence[Goal], some: Sequence[Candidate], replays: Replays) -> None:
    if not some:
        return
    answers = replays.of([one.spec for one in some], "all requests")
    for one, answer in zip(some, answers, strict=True):
        if isinstance(answer, str):
            one.failed(answer)
            continue
        one.result = answer
        if why := growing(answer):
            one.state, one.reason = MISSES, why
            continue
        one.found = readings(goals, answer)
        one.state = REACHES if all(told.met for told in one.found) else MISSES
        if one.state == REACHES:
            most_per_s = serves_at_most(one.spec, replays)
            if why := too_many(answer, most_per_s):
                one.state, one.reason, one.found = MISSES, why, []
