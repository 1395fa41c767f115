"""The conformance suite: what every policy must keep, and every scheduler, built-in or not. A function is a rule, its
docstring says it.

    from sim.conformance.suite import conform
    for verdict in conform(MyPolicy):
        print(verdict)

Rules look at traits, never at names. A rule takes a `World(MyPolicy)` (of a scheduler its `Loads`); it raises
CheckFailed, or Skip where it says nothing about a policy.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sim.base.errors import CheckFailed
from sim.conformance import behaviour, form, safety, scheduling
from sim.conformance.world import Advice, RuleCheck, Skip, World

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.workload.scheduler import Scheduler

CHECKS: tuple[RuleCheck, ...] = (*form.CHECKS, *behaviour.CHECKS, *safety.CHECKS)
ENGINE = ("sim.policy.api", "sim.workload.scheduler", "builtins")  # bases that are none of a plug-in's own code
PASS, FAIL, SKIP = "pass", "fail", "not applicable"
ADVICE, SAME = "advice", "not judged"  # neither fails: what describes it is missing; it ends as in a rule before


class Judged(Protocol):
    """A plug-in's class in its world, and the run under way there in words."""

    kind: Any
    scenario: str


W = TypeVar("W", bound=Judged)


@dataclass(frozen=True)
class Verdict:
    """What one rule says about one policy or scheduler.

    cause: of a run that ended with an exception, what was raised and where, "" otherwise: rules whose runs all end so
    say the same.
    """

    policy: str
    check: str
    verdict: str
    reason: str
    rule: str
    cause: str = ""


def name_of(check: Callable[[W], None]) -> str:
    """`check_is_deterministic` -> `is_deterministic`."""
    return check.__name__.removeprefix("check_")


def rule_of(check: Callable[[W], None]) -> str:
    """The rule in words."""
    return " ".join((check.__doc__ or "").split())


def judge(check: Callable[[W], None], world: W) -> Verdict:
    """Apply one rule to the world's plug-in. Any error on the way is a failure, with its text as the reason."""
    verdict, reason, cause = PASS, "", ""
    world.scenario = ""
    try:
        check(world)
    except Skip as skip:
        verdict, reason = SKIP, str(skip)
    except Advice as advice:
        verdict, reason = ADVICE, str(advice)
    except CheckFailed as failure:
        verdict, reason = FAIL, str(failure)
    except (Exception, SystemExit) as error:  # a third party's policy may fail in any way
        verdict, reason, cause = FAIL, f"{type(error).__name__}: {error}{where(error, world)}", cause_of(error, world)
    return Verdict(world.kind.name, name_of(check), verdict, reason, rule_of(check), cause)


def cause_of(error: BaseException, world: Judged) -> str:
    """An exception's type and the line that it comes from: the last of the plug-in's own, or else where it was raised.

    Layers, experts and rooms in its words differ from run to run.
    """
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    frames = own_frames(first, world) or traceback.extract_tb(first.__traceback__)
    return f"{type(first).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else repr(first)


def own_frames(error: BaseException, world: Judged) -> list[traceback.FrameSummary]:
    """Lines of the plug-in that an exception passed, the outermost first."""
    own = {inspect.getsourcefile(base) for base in world.kind.__mro__ if base.__module__ not in ENGINE}
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]


def where(error: BaseException, world: Judged) -> str:
    """Which hook raised it, on which line, and in which run: ` (victim, mine.py:17; 8 experts ...)`."""
    frames = own_frames(error, world)
    told = [f"{frames[0].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}"] if frames else []
    told += [world.scenario] if world.scenario else []
    return f" ({'; '.join(told)})" if told else ""


def conform(kind: type[Policy]) -> Iterator[Verdict]:
    """Every rule's verdict on a policy class, in order; equal runs are shared between rules."""
    with World(kind) as world:
        first = judge(CHECKS[0], world)
        yield first
        if first.verdict == FAIL:  # no run would take it
            why = f"no run takes it: see {first.check}"
            yield from (replace(first, check=name_of(c), verdict=SAME, reason=why, rule=rule_of(c)) for c in CHECKS[1:])
        else:
            yield from once_each(judge(check, world) for check in CHECKS[1:])


def once_each(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """The same, but a cause that ends the runs of several rules is said by the first: others are not judged."""
    said: dict[str, str] = {}
    for one in verdicts:
        if one.cause and said.setdefault(one.cause, one.check) != one.check:
            yield replace(one, verdict=SAME, reason=f"its run ends as that of {said[one.cause]}")
        else:
            yield one


def conform_scheduler(kind: type[Scheduler]) -> Iterator[Verdict]:
    """The same of a scheduler."""
    loads = scheduling.Loads(kind)
    yield from once_each(judge(check, loads) for check in scheduling.CHECKS)


__all__ = [
    "ADVICE",
    "CHECKS",
    "FAIL",
    "PASS",
    "SAME",
    "SKIP",
    "CheckFailed",
    "Skip",
    "Verdict",
    "World",
    "conform",
    "conform_scheduler",
    "judge",
    "name_of",
]
