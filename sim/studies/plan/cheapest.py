"""The cheapest setting (a machine with a capacity) in which a policy reaches the goals, and the least memory of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from sim.studies.plan.axes import ONE_IN, RATE, Axis, Probe, Tried, cache_axis, changed
from sim.studies.plan.candidate import (
    DEARER,
    MISSES,
    NOT_RUN,
    OPEN,
    REACHES,
    SCREENED,
    Candidate,
    Setting,
    live,
    order_of,
)
from sim.studies.plan.goal import Goal, Reading, growing, readings
from sim.studies.runner.searches import Replays, Search, narrowed
from sim.studies.saturate import closed
from sim.workload.load import NONE

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.results.record import Result


LOOKS = ((ONE_IN, 0.15, 0.1), (3, 0.05, 0.03))
"""Replays of one in so many requests, after which candidates are dropped: one that misses a goal by more than the first
share, or whose margin is the second less than the best's in its setting, as long as the best one reaches the goals."""
MOST_LIKELY = 3
"""Policies that are tried with one more replica: those that did best with as many as before."""
MOST = 16.0
"""Times the rate that was asked for, up to which a plan says that it would hold."""
NEAR_FRAC = 0.05


def cheapest(
    goals: Sequence[Goal], settings: Sequence[Setting], replays: Replays, every: bool
) -> Search[Setting | None]:
    """The first setting in which a policy reaches every goal; `every`: settle the dearer ones, too.

    Whether a setting reaches the goals is settled in each by itself: what is taken from another one's is which policies
    are tried with more replicas.
    """
    answer: Setting | None = None
    likely: dict[object, list[str]] = {}  # policies, by machine and capacity
    for setting in settings:
        first, own = setting.first, setting.candidates
        if answer is not None and not every:
            for one in live(own):
                one.settle(DEARER)
            continue
        alike = first.hw, first.gpus, order_of(first.spec)  # whatever the number of replicas
        if first.replicas > 1 and alike in likely:
            for one in live(own):
                if one.policy not in likely[alike]:
                    one.settle(SCREENED, "others did better with fewer replicas")
        yield from _settle(goals, setting, replays)
        if ran := sorted((one for one in own if one.result is not None), key=_by_load):
            likely[alike] = [one.policy for one in ran[:MOST_LIKELY]]
        if answer is None and setting.reaching:
            answer = setting
    return answer


def _settle(goals: Sequence[Goal], setting: Setting, replays: Replays) -> Search[None]:
    """Replay what bounds leave: few requests first, then all for those that may be the best."""
    left = [one for one in setting.candidates if one.state == OPEN]
    aside: list[Candidate] = []  # worse than the best by the first few requests, should that one reach the goals
    for one_in, slack_frac, best_frac in LOOKS:
        n = replays.few(one_in)
        if not left or n is None or (one_in != ONE_IN and len(left) == 1):
            continue
        left = yield from screen(goals, left, n, slack_frac)
        worse = [one for one in left if one.known and one.margin < left[0].margin - best_frac]
        aside += worse
        left = [one for one in left if one not in worse]
    for some in (left, aside):
        yield from _replay(goals, [one for one in some if one.state == OPEN])
        if setting.reaching:
            break
    for one in live(aside):
        one.settle(SCREENED)


def _by_load(one: Candidate) -> tuple[float, float, str]:
    """The nearest to the goals first; of those whose queues grow, the one that serves most."""
    load = None if one.result is None else one.result.load
    served = 0.0 if load is None or load.capacity_per_s is None else load.capacity_per_s
    return -one.margin, -served, one.policy


def screen(goals: Sequence[Goal], some: Sequence[Candidate], n: int, slack_frac: float) -> Search[list[Candidate]]:
    """Replay the first n requests of each, and drop what misses a goal by more than the slack.

    Returns:
        Those that are left, the largest margin first.
    """
    answers = yield [replace(one.spec, requests=n) for one in some]
    for one, answer in zip(some, answers, strict=True):
        if isinstance(answer, str):
            one.settle(NOT_RUN, answer)
            continue
        few = readings(goals, answer, few=True)
        by_goal = {goal.said: goal for goal in goals}
        one.figures_of_few_requests = [_of_all(one, by_goal[told.goal], told, n) for told in few]
        if one.known and one.margin < -slack_frac:
            one.settle(SCREENED)
    return live(some)


def _of_all(one: Candidate, goal: Goal, few: Reading, n: int) -> Reading:
    """What the first n requests let expect of all: as far above the bound as they are."""
    if one.limit is None:
        return few
    some, every = one.limit.value(goal, n), one.limit.value(goal)
    if not some or not every:
        return few
    band = None if few.low is None or few.high is None else (few.low, few.high)
    return goal.reading(few.value * every / some, band)


def _replay(goals: Sequence[Goal], some: Sequence[Candidate]) -> Search[None]:
    answers = yield [one.spec for one in some]
    for one, answer in zip(some, answers, strict=True):
        if isinstance(answer, str):
            one.settle(NOT_RUN, answer)
            continue
        one.ran(answer, by_prefill(goals))
        found = [] if growing(answer) else readings(goals, answer)
        reaches = bool(found) and all(told.met for told in found)
        why = growing(answer) or (too_many(answer, (yield from serves_at_most(one.spec))) if reaches else "")
        one.settle(REACHES if reaches and not why else MISSES, why or None)
        one.figures = [] if why else found


def least_cache(setting: Setting, probe: Probe, replays: Replays) -> Search[None]:
    """With how small an expert cache a policy reaches the goals on one machine: policy after policy, fastest first.
    Each has to get by with less than the best so far."""
    left = [one for one in setting.candidates if one.state == OPEN]
    if left:
        left = yield from screen(probe.goals, left, probe.few or replays.n_requests, LOOKS[-1][1])
    if not left:
        return
    floor = yield from _floor(probe, left)
    best: tuple[Candidate, Axis, Tried] | None = None
    for one in left:
        axis = cache_axis(one.spec)
        low, high = (floor or 1) - 1, axis.now if best is None else best[2].value - 1
        if high <= low or (best is not None and not (yield from probe.tried(axis, high, False)).met):
            one.settle(SCREENED, "another gets by with less memory")
            continue
        tried = yield from probe.first(axis, low, high)
        one.settle(SCREENED if tried.met else MISSES)
        best = (one, axis, tried) if tried.met else best
    if best is None:
        return
    one, axis, tried = best
    assert tried.result is not None
    one.ran(tried.result, by_prefill(probe.goals))
    one.settle(REACHES)
    one.figures, one.cache, one.experts_by_the_bound = list(tried.readings), f"{int(tried.value)}experts", floor
    if tried.value > 1:
        one.figures_with_one_expert_less = list((yield from probe.tried(axis, tried.value - 1)).readings)


def _floor(probe: Probe, left: list[Candidate]) -> Search[int | None]:
    """Experts with which the bound of the widest lanes reaches the goals; None where it knows none of them."""
    if not all(one.bounds and one.lossless for one in left):
        return None
    axis = cache_axis(max(left, key=lambda one: one.asked.cpu).spec)
    tried = yield from probe._replace(by_bound=True).first(axis, 0, axis.now)
    return int(tried.value) if tried.met else None


def by_prefill(goals: Sequence[Goal]) -> bool:
    """Whether all of them are of the first token, so that what binds prefill binds them."""
    return all(goal.key.startswith("ttft_s") for goal in goals)


class UpToRate(msgspec.Struct, frozen=True):
    """Up to which rate an answer holds, found by bisection, which takes for granted that more requests make nothing
    better.

    Attributes:
        times: of the rate that was asked for; per_s: what came then. lost_at: times of it at which a goal is missed,
            None where none was found up to `MOST`.
    """

    times: float
    per_s: float
    lost_at: float | None

    @property
    def text(self) -> str:
        """In a sentence."""
        far = f"{self.times:.3g} times the rate asked for, when {self.per_s:.3g} requests/s came"
        end = ", and was not tried with more" if self.lost_at is None else f"; at {self.lost_at:.3g} times it does not"
        return f"the same reaches it up to {far}{end}"


def has_rate(spec: RunSpec) -> bool:
    """Whether its requests come at a rate of their own."""
    return spec.arrivals not in (None, NONE) and not str(spec.arrivals).startswith("closed:")


def serves_at_most(spec: RunSpec) -> Search[float | None]:
    """Requests per second where somebody always waits, as `moesim saturate` finds it; None where no run says so, or
    requests have no rate of their own. A short run at a higher rate may be over before its queue has grown beyond a
    goal.
    """
    if not has_rate(spec):
        return None
    (answer,) = yield [closed(spec)]
    return None if isinstance(answer, str) or answer.load is None else answer.load.capacity_per_s


def too_many(result: Result, most_per_s: float | None) -> str:
    """Why more come than are served at most; else nothing."""
    come_per_s = None if result.load is None else result.load.arrivals_per_s
    if come_per_s is None or most_per_s is None or come_per_s < most_per_s:
        return ""
    return f"unstable queue: arrives {come_per_s:.3g}/s, serves {most_per_s:.3g}/s at most"


def up_to_rate(goals: Sequence[Goal], best: Candidate) -> Search[UpToRate | None]:
    """Of the answer; None where its requests have no rate of their own."""
    spec, result = best.spec, best.result
    if not has_rate(spec) or result is None or result.load is None or result.load.arrivals_per_s is None:
        return None
    most_per_s = yield from serves_at_most(spec)
    came_per_s = {1.0: result.load.arrivals_per_s}

    def lost(times: float) -> Search[bool]:
        """Whether with so many times the rate a goal is missed, or the queue grows."""
        (answer,) = yield [changed(spec, RATE, spec.arrivals_scale * times)]
        if isinstance(answer, str) or growing(answer) or too_many(answer, most_per_s):
            return True
        came_per_s[times] = 0.0 if answer.load is None else answer.load.arrivals_per_s or 0.0
        return not all(one.met for one in readings(goals, answer))

    low, high = 1.0, 2.0
    while not (yield from lost(high)):
        low = high
        if high >= MOST:
            return UpToRate(low, came_per_s[low], None)
        high *= 2
    low, high = yield from narrowed(lost, low, high, near_frac=NEAR_FRAC)
    return UpToRate(low, came_per_s[low], high)
