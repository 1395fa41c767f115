"""Whose mistake it is when something goes wrong while a policy decides.

It is looked into where an exception surfaces, so that a run that goes well pays little. What a policy hands over and
what it answers is checked where the engine takes it; a mistake in the policy's own lines, or in the engine's, keeps its
traceback.
"""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from sim.base.errors import IllegalDecision, one_line
from sim.policy.decisions import Predict, Prefetch, Record
from sim.policy.outlook import Outlook
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket
from sim.policy.wishes import Wishes

if TYPE_CHECKING:
    from sim.policy.api import Policy

PUZZLED = (AttributeError, TypeError, LookupError, ValueError, ArithmeticError, AssertionError)
A_PIECE, TICKETS = "must be a Piece (view.piece, view.part)", "must be a tuple of tickets that `yield` gave back"
PIECES = "must be a sequence of pieces"
LONGEST_S = 1e9
"""Of one prediction, thirty years: times near the largest float would add up to infinity."""
SECONDS = f"seconds, not negative and at most {LONGEST_S:g}"


@contextmanager
def blamed(policy: Policy | type[Policy]) -> Iterator[None]:
    """Say of an illegal decision, and of code that ends the program, in which hook and layer.

    Raises:
        IllegalDecision: either of them.
    """
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        raise IllegalDecision(
            f"{_where(policy, error)}: it ended the program with {error!r}; a hook decides and returns, raise an "
            "exception instead"
        ) from error
    except IllegalDecision as error:
        if error.located or str(error).startswith("layer "):
            raise
        raise IllegalDecision(f"{_where(policy, error)}: {error}") from error


def located(error: IllegalDecision, policy: Policy, hook: str, layer: int) -> IllegalDecision:
    """The same error with the hook that it came out of."""
    if error.located or not hook:
        return error
    better = IllegalDecision(f"{_place(policy, hook, layer)}: {error}")
    better.located = True
    return better


def _place(policy: Policy | type[Policy], hook: str, layer: int) -> str:
    return f"{policy.name}{f'.{hook}' if hook else ''}{f' at layer {layer}' if layer >= 0 else ''}"


def _where(policy: Policy | type[Policy], error: BaseException) -> str:
    """`mine.layer_enter at layer 3`, as far as frames tell: the outermost hook on the way, and an engine's layer."""
    from sim.policy.api import HOOKS, Policy

    hook, layer = "", -1
    for frame, _ in walk_tb(error.__traceback__):  # outermost first
        told = frame.f_locals
        if not hook and frame.f_code.co_name in {*HOOKS, "__init__"} and isinstance(told.get("self"), Policy):
            hook = frame.f_code.co_name
        if layer < 0:
            layer = getattr(getattr(told.get("engine"), "pending", None), "layer", -1)
    return _place(policy, hook, layer)


def told(error: Exception, kind: type[Policy] | None) -> str:
    """What a policy's own mistake ended with: `FILE:LINE: ValueError: ...`, of its last line on the way; of another's
    where none of its lines is on the way, or nobody knows the policy."""
    kinds = () if kind is None else kind.__mro__
    own = {inspect.getsourcefile(one) for one in kinds if not one.__module__.startswith(("sim.", "builtins"))}
    frames = traceback.extract_tb(error.__traceback__)
    at = next((one for one in reversed(frames) if one.filename in own), frames[-1] if frames else None)
    said = one_line(f"{type(error).__name__}: {error}")
    return said if at is None else f"{_from_here(at.filename)}:{at.lineno}: {said}"


def _from_here(file: str) -> str:
    """A file by its path from the folder that the command runs in, where it lies below it."""
    path = Path(file).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def wrong(decision: Any, n_experts: int) -> str | None:
    """Which field of a decision does not hold what belongs there, or None."""
    if not isinstance(decision, Record):
        return None
    for field, value in zip(decision._fields, decision.values(), strict=True):
        rule = _rule(field, value, n_experts)
        if rule is not None:
            return f"{type(decision).__name__}, got {field} {value!r}: {rule}"
    return None


def _rule(field: str, value: Any, n_experts: int) -> str | None:
    """What the rule is that a field's value breaks."""
    if field == "piece":
        return None if isinstance(value, Piece) else A_PIECE
    if field in ("after", "tickets"):
        return None if isinstance(value, tuple) and all(isinstance(one, Ticket) for one in value) else TICKETS
    if field == "slices":
        return None if isinstance(value, Sequence) and all(isinstance(one, Piece) for one in value) else PIECES
    if field == "expert":
        whole = isinstance(value, Integral) and 0 <= int(value) < n_experts
        return None if whole else f"must be the number of an expert, 0 to {n_experts - 1}"
    if field == "outlook":
        return None if isinstance(value, Outlook) else "must be an Outlook"
    if field == "predict":
        return None if value is None or isinstance(value, Predict) else "must be a Predict or None"
    if field == "wishes":
        return None if isinstance(value, Wishes) else "must be Wishes"
    if field in ("layer", "n_tokens", "start", "stop", "fresh", "most"):
        return None if isinstance(value, Integral) else "must be a whole number"
    if field in ("join_layer", "up_to_layer"):
        return None if value is None or isinstance(value, Integral) else "must be a layer or None"
    if field == "priority":
        return None if isinstance(value, Real) else "must be a number"
    if field == "duration_s":
        return None if seconds(value) else f"must be {SECONDS}"
    if field == "wanted":
        return (
            None
            if isinstance(value, Sequence) and all(map(_wanted, value))
            else ("must be a sequence of (piece, priority, tickets)")
        )
    return None


def _wanted(one: Any) -> bool:
    if not (isinstance(one, Prefetch) or (isinstance(one, tuple) and len(one) == 3)):
        return False
    piece, priority, after = one
    return isinstance(piece, Piece) and isinstance(priority, Real) and _rule("after", after, 1) is None


def seconds(value: Any, most: float = LONGEST_S) -> bool:
    """Whether something is a time that a run can be told to wait for: sums of such times stay finite."""
    number = type(value) is not bool and issubclass(type(value), Real)
    return number and bool(0.0 <= value <= most)


def sound_number(policy: Policy, what: str, value: Any) -> Any:
    """Raises IllegalDecision for an answer to `what` that is no number from 0 on."""
    if not seconds(value, sys.float_info.max):
        raise IllegalDecision(f"{policy.name}.{what}, got {value!r}: a number that is finite and not negative")
    return value


def figures_of(policy: Policy) -> dict[str, float]:
    """What a policy says of itself. Raises IllegalDecision for what no result can hold."""
    found = policy.stats()
    if not isinstance(found, dict):
        raise IllegalDecision(f"{policy.name}.stats, got {found!r}: a dict of numbers by name")
    for key, value in found.items():
        if not isinstance(key, str) or not (value is None or (isinstance(value, int | float) and math.isfinite(value))):
            raise IllegalDecision(f"{policy.name}.stats, got {key!r}: {value!r}: finite Python numbers by name")
    return found
