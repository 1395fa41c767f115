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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sim.base.errors import CheckFailed, MoesimError
from sim.conformance import behaviour, form, safety, scheduling
from sim.conformance.world import RuleCheck, Skip, World

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.workload.scheduler import Scheduler

CHECKS: tuple[RuleCheck, ...] = (*form.CHECKS, *behaviour.CHECKS, *safety.CHECKS)
ENGINE = ("sim.policy.api", "sim.workload.scheduler", "builtins")  # bases that are none of a plug-in's own code
PASS, FAIL, SKIP = "pass", "fail", "not applicable"


class Judged(Protocol):
    """A plug-in's class in its world, and the run under way there in words."""

    kind: Any
    scenario: str


W = TypeVar("W", bound=Judged)


@dataclass(frozen=True)
class Verdict:
    """What one rule says about one policy or scheduler."""

    policy: str
    check: str
    verdict: str
    reason: str
    rule: str


def name_of(check: Callable[[W], None]) -> str:
    """`check_is_deterministic` -> `is_deterministic`."""
    return check.__name__.removeprefix("check_")


def rule_of(check: Callable[[W], None]) -> str:
    """The rule in words."""
    return " ".join((check.__doc__ or "").split())


def judge(check: Callable[[W], None], world: W) -> Verdict:
    """Apply one rule to the world's plug-in. Any error on the way is a failure, with its text as the reason."""
    verdict, reason = PASS, ""
    world.scenario = ""
    try:
        check(world)
    except Skip as skip:
        verdict, reason = SKIP, str(skip)
    except CheckFailed as failure:
        verdict, reason = FAIL, str(failure)
    except MoesimError as error:
        verdict, reason = FAIL, f"{type(error).__name__}: {error}{where(error, world)}"
    except (Exception, SystemExit) as error:  # a third party's policy may fail in any way
        verdict, reason = FAIL, f"{type(error).__name__}: {error}{where(error, world)}"
    return Verdict(world.kind.name, name_of(check), verdict, reason, rule_of(check))


def where(error: BaseException, world: Judged) -> str:
    """Which hook raised it, on which line, and in which run: ` (victim, mine.py:17; 8 experts ...)`."""
    own = {inspect.getsourcefile(base) for base in world.kind.__mro__ if base.__module__ not in ENGINE}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in own]
    told = [f"{frames[0].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}"] if frames else []
    told += [world.scenario] if world.scenario else []
    return f" ({'; '.join(told)})" if told else ""


def conform(kind: type[Policy]) -> Iterator[Verdict]:
    """Every rule's verdict on a policy class, in order; equal runs are shared between rules."""
    with World(kind) as world:
        for check in CHECKS:
            yield judge(check, world)


def conform_scheduler(kind: type[Scheduler]) -> Iterator[Verdict]:
    """The same of a scheduler."""
    loads = scheduling.Loads(kind)
    for check in scheduling.CHECKS:
        yield judge(check, loads)


__all__ = [
    "CHECKS",
    "FAIL",
    "PASS",
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
