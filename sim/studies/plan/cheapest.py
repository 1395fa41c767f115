"""Settings (a machine with a capacity) from the cheapest up: the first in which a policy reaches the goals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.studies.plan.axes import ONE_IN, changed, narrowed
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
)
from sim.studies.plan.goal import Goal, Reading, growing, readings
from sim.studies.saturate.search import n_clients
from sim.workload.load import NONE

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.results.record import Result
    from sim.studies.plan.replays import Replays


class Look(NamedTuple):
    """A replay of one in so many requests, after which candidates are dropped.

    Attributes:
        slack_frac: one that misses a goal by more is. best_frac: so is one whose margin is that much less than the
            best's in the same setting, as long as the best one reaches the goals.
    """

    one_in: int
    slack_frac: float
    best_frac: float


LOOKS = (Look(ONE_IN, 0.15, 0.1), Look(3, 0.05, 0.03))
MOST_LIKELY = 3
"""Policies that are tried with one more replica: those that did best with as many as before."""
MOST = 16.0
"""Times the rate that was asked for, up to which a plan says that it would hold."""
NEAR_FRAC = 0.05


def cheapest(goals: Sequence[Goal], settings: Sequence[Setting], replays: Replays, every: bool) -> Setting | None:
    """The first setting in which a policy reaches every goal; `every`: settle the dearer ones, too.

    Whether a setting reaches the goals is settled in each by itself: what is taken from another one's is which policies
    are tried with more replicas.
    """
    answer: Setting | None = None
    likely: dict[object, list[str]] = {}  # policies, by machine and capacity
    for setting in settings:
        machine, own = setting.machine, setting.candidates
        if answer is not None and not every:
            for one in live(own):
                one.settle(DEARER)
            continue
        alike = machine.id, machine.n_gpus, setting.capacity  # whatever the number of replicas
        if machine.n_replicas > 1 and alike in likely:
            for one in live(own):
                if one.label not in likely[alike]:
                    one.settle(SCREENED, "others did better with fewer replicas")
        _settle(goals, setting, replays)
        if ran := sorted((one for one in own if one.result is not None), key=_by_load):
            likely[alike] = [one.label for one in ran[:MOST_LIKELY]]
        if answer is None and setting.reaching:
            answer = setting
    return answer


def _settle(goals: Sequence[Goal], setting: Setting, replays: Replays) -> None:
    """Replay what bounds leave: few requests first, then all for those that may be the best."""
    left = [one for one in setting.candidates if one.state == OPEN]
    aside: list[Candidate] = []  # worse than the best by the first few requests, should that one reach the goals
    for look in LOOKS:
        n = replays.few(look.one_in)
        if not left or n is None or (look is not LOOKS[0] and len(left) == 1):
            continue
        left = screen(goals, left, replays, n, look.slack_frac)
        worse = [one for one in left if one.few and one.margin_frac < left[0].margin_frac - look.best_frac]
        aside += worse
        left = [one for one in left if one not in worse]
    for some in (left, aside):
        _replay(goals, [one for one in some if one.state == OPEN], replays)
        if setting.reaching:
            break
    for one in live(aside):
        one.settle(SCREENED)


def _by_load(one: Candidate) -> tuple[float, float, str]:
    """The nearest to the goals first; of those whose queues grow, the one that serves most."""
    load = None if one.result is None else one.result.load
    served = 0.0 if load is None or load.capacity_per_s is None else load.capacity_per_s
    return -one.margin_frac, -served, one.label


def screen(
    goals: Sequence[Goal], some: Sequence[Candidate], replays: Replays, n: int, slack_frac: float
) -> list[Candidate]:
    """Replay the first n requests of each, and drop what misses a goal by more than the slack.

    Returns:
        Those that are left, the largest margin first.
    """
    for one, answer in zip(some, replays.of([one.spec for one in some], "few requests", n), strict=True):
        if isinstance(answer, str):
            one.settle(NOT_RUN, answer)
            continue
        one.few = [_of_all(one, found, n) for found in readings(goals, answer, few=True)]
        if one.few and one.margin_frac < -slack_frac:
            one.settle(SCREENED)
    return live(some)


def _of_all(one: Candidate, few: Reading, n: int) -> Reading:
    """What the first n requests let expect of all: as far above the bound as they are."""
    if one.limit is None:
        return few
    some, every = one.limit.value(few.goal, n), one.limit.value(few.goal)
    return few._replace(value=few.value * every / some) if some and every else few


def _replay(goals: Sequence[Goal], some: Sequence[Candidate], replays: Replays) -> None:
    for one, answer in zip(some, replays.of([one.spec for one in some], "all requests"), strict=True):
        if isinstance(answer, str):
            one.settle(NOT_RUN, answer)
            continue
        one.result = answer
        if why := growing(answer):
            one.settle(MISSES, why)
            continue
        found = readings(goals, answer)
        one.settle(REACHES if all(told.met for told in found) else MISSES)
        if one.state == REACHES and (why := too_many(answer, serves_at_most(one.spec, replays))):
            one.settle(MISSES, why)
            continue
        one.found = found


class UpToRate(NamedTuple):
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
    return spec.arrivals is not None and spec.arrivals != NONE and not spec.arrivals.startswith("closed:")


def serves_at_most(spec: RunSpec, replays: Replays) -> float | None:
    """Requests per second where somebody always waits, as `moesim saturate` finds it; None where no run says so, or
    requests have no rate of their own. A short run at a higher rate may be over before its queue has grown beyond a
    goal.
    """
    if not has_rate(spec):
        return None
    closed = changed(changed(spec, "arrivals", f"closed:{n_clients(spec)}"), "arrivals.scale", 1.0)
    (answer,) = replays.of([closed], "how much it serves")
    return None if isinstance(answer, str) or answer.load is None else answer.load.capacity_per_s


def too_many(result: Result, most_per_s: float | None) -> str:
    """Why more come than are served at most; else nothing."""
    come_per_s = None if result.load is None else result.load.arrivals_per_s
    if come_per_s is None or most_per_s is None or come_per_s < most_per_s:
        return ""
    return f"unstable queue: arrives {come_per_s:.3g}/s, serves {most_per_s:.3g}/s at most"


def up_to_rate(goals: Sequence[Goal], best: Candidate, replays: Replays) -> UpToRate | None:
    """Of the answer; None where its requests have no rate of their own."""
    spec, result = best.spec, best.result
    if not has_rate(spec) or result is None or result.load is None or result.load.arrivals_per_s is None:
        return None
    most_per_s = serves_at_most(spec, replays)
    came_per_s = {1.0: result.load.arrivals_per_s}

    def lost(times: float) -> bool:
        """Whether with so many times the rate a goal is missed, or the queue grows."""
        (answer,) = replays.of([changed(spec, "arrivals.scale", spec.arrivals_scale * times)], "up to which rate")
        if isinstance(answer, str) or growing(answer) or too_many(answer, most_per_s):
            return True
        came_per_s[times] = 0.0 if answer.load is None else answer.load.arrivals_per_s or 0.0
        return not all(one.met for one in readings(goals, answer))

    low, high = 1.0, 2.0
    while not lost(high):
        low = high
        if high >= MOST:
            return UpToRate(low, came_per_s[low], None)
        high *= 2
    low, high = narrowed(lost, low, high, near_frac=NEAR_FRAC)
    return UpToRate(low, came_per_s[low], high)
