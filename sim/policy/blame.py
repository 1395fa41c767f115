"""Whose mistake it is when something goes wrong while a policy decides.

It is looked into where an exception surfaces, so that a run that goes well pays nothing.

Only what can be shown to be wrong (a decision, a victim, what a hook returned) becomes an IllegalDecision. A mistake in
the policy's own lines, or in the engine's, keeps its traceback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput, IllegalDecision, did_you_mean
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from sim.policy.api import Policy

HERE = str(Path(__file__).parents[1])
PUZZLED = (AttributeError, TypeError, LookupError, ValueError, ArithmeticError, AssertionError)
A_PIECE, TICKETS = "must be a Piece (view.piece, view.part)", "must be a tuple of tickets that `yield` gave back"
PIECES = "must be a sequence of pieces"


@contextmanager
def blamed(policy: Policy | type[Policy]) -> Iterator[None]:
    """Turn what a policy handed the engine, and the engine stumbled over, into an error that names hook and layer.

    Raises:
        IllegalDecision: a decision or an answer that is none, or code that ends the program.
    """
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        frames = _frames(error)
        raise IllegalDecision(f"{_where(policy, frames)}: it ended the program with {error!r}; a hook decides and "
                              "returns, raise an exception instead") from error  # fmt: skip
    except IllegalDecision as error:
        if error.located or str(error).startswith("layer "):
            raise
        raise IllegalDecision(f"{_where(policy, _frames(error))}: {error}") from error
    except PUZZLED as error:
        frames = _frames(error)
        found = _mistake(frames)
        if found is None:
            raise
        asked, _, rest = found.partition(", ")
        if asked in _hooks():  # `victim, got 5: ...`: what it answered, wherever the engine stumbled over it
            raise IllegalDecision(f"{_where(policy, frames, asked)}: {rest}") from error
        raise IllegalDecision(f"{_where(policy, frames)}: {found}") from error


def located(error: IllegalDecision, policy: Policy, hook: str, layer: int) -> IllegalDecision:
    """The same error with the hook that it came out of."""
    if error.located or not hook:
        return error
    better = IllegalDecision(f"{_place(policy, hook, layer)}: {error}")
    better.located = True
    return better


def _place(policy: Policy | type[Policy], hook: str, layer: int) -> str:
    return f"{policy.name}{f'.{hook}' if hook else ''}{f' at layer {layer}' if layer >= 0 else ''}"


def _frames(error: BaseException) -> list[FrameType]:
    """Innermost first."""
    return [frame for frame, _ in walk_tb(error.__traceback__)][::-1]


def _hooks() -> set[str]:
    from sim.policy.api import Policy

    return {name for name in vars(Policy) if not name.startswith("_")} | {"__init__"}


def _where(policy: Policy | type[Policy], frames: list[FrameType], asked: str = "") -> str:
    """`mine.layer_enter at layer 3`, as far as the frames tell; `asked`: the hook, where its answer tells."""
    from sim.policy.api import Policy

    hook, layer, hooks = "", -1, _hooks()
    for frame in frames:  # the last one found is the outermost hook
        told = frame.f_locals
        if frame.f_code.co_name == "obey" and told.get("hook"):
            hook = told["hook"]
        elif not hook and frame.f_code.co_name in hooks and isinstance(told.get("self"), Policy):
            hook = frame.f_code.co_name
        elif not hook and told.get("victim") is not None and frame.f_code.co_filename.startswith(HERE):
            hook = "victim"  # a piece that cannot go
        found = getattr(told.get("engine", told.get("self")), "layer", None)
        layer = found if isinstance(found, int) and layer < 0 else layer
    return _place(policy, asked or hook, layer)


def _mistake(frames: list[FrameType]) -> str | None:
    """What the policy handed over that is no decision and no answer; None where that is not to be seen."""
    if not frames[0].f_code.co_filename.startswith(HERE):
        return None  # the policy's own lines, or a library that they called
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(HERE)]
    for frame in ours:
        name, told = frame.f_code.co_name, frame.f_locals
        for victim in (told.get(key) for key in ("victim", "loser")):
            if victim is not None and not isinstance(victim, Piece):
                return f"victim, got {victim!r}: it answers with a resident Piece, or with None"
        if name in ("obey", "apply") and "decision" in told:
            found = wrong(told["decision"], told["self"].pieces.n_experts)
            if found:
                return found
        elif name == "obey" and frame is frames[0]:
            return f"got {told['decisions']!r}: a hook returns decisions, yields them, or returns None"
        if name == "reassign" and "answer" in told:
            return f"assign, got {told['answer']!r}: it answers with an Assignment of ids and weights [n, k], or None"
        if name == "next" and "passes" in told and frame is frames[0]:
            return f"split_step, got {told['passes']!r}: it answers with lists of the ranges it was given"
        if name == "place" and not isinstance(told.get("piece"), Piece):
            return f"initial, got {told.get('piece', told.get('pieces'))!r}: it answers with pieces"
        if name == "divide":
            return f"layer_budgets, got {told['layer_budget_bytes']!r}: it answers with bytes by GPU and layer"
        for piece in getattr(getattr(told.get("self"), "queue", None), "waiting", ()):
            if not isinstance(piece, Piece):
                return f"Prefetch or Requeue, got {piece!r}: {A_PIECE}"
    return None


def wrong(decision: Any, n_experts: int) -> str | None:
    """Which field of a decision does not hold what belongs there, or None."""
    for field, value in zip(getattr(decision, "_fields", ()), decision if isinstance(decision, tuple) else (),
                            strict=False):  # fmt: skip
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
    if field in ("layer", "n_tokens"):
        return None if isinstance(value, Integral) else "must be a whole number"
    if field in ("join_layer", "up_to_layer"):
        return None if value is None or isinstance(value, Integral) else "must be a layer or None"
    if field == "priority":
        return None if isinstance(value, Real) else "must be a number"
    if field == "duration_s":
        return None if seconds(value) else "must be seconds, finite and not negative"
    if field == "wanted":
        return None if isinstance(value, Sequence) and all(map(_wanted, value)) else (
            "must be a sequence of (piece, priority, tickets)")  # fmt: skip
    return None


def _wanted(one: Any) -> bool:
    return (isinstance(one, tuple) and len(one) == 3 and isinstance(one[0], Piece) and isinstance(one[1], Real)
            and _rule("after", one[2], 1) is None)  # fmt: skip


def seconds(value: Any) -> bool:
    """Whether something is a time that can pass."""
    if type(value) is float:  # as nearly always
        return 0.0 <= value < math.inf
    return type(value) is not bool and isinstance(value, Real) and 0.0 <= float(value) < math.inf


def check_traits(kind: type[Policy]) -> None:
    """Raises BadInput for a trait that is none: what it should allow would be refused in the middle of a run."""
    from sim.policy.api import TRAITS

    if not isinstance(kind.traits, set | frozenset):
        raise BadInput(f"policy {kind.name}, got traits {kind.traits!r}: a set of words; write frozenset({{'cpu'}})")
    for trait in kind.traits:
        if trait not in TRAITS:
            near = did_you_mean(str(trait), TRAITS)
            raise BadInput(f"policy {kind.name}, got trait {trait!r}: no such trait; {near}")


def sound_number(policy: Policy, what: str, value: Any) -> Any:
    """Raises IllegalDecision for an answer to `what` that is no number from 0 on."""
    if not seconds(value):
        raise IllegalDecision(f"{policy.name}.{what}, got {value!r}: a number that is finite and not negative")
    return value
