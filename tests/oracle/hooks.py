"""What the oracle asks of a policy's class, whatever hooks the base class has by now."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from sim.policy.api import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from oracle.pieces import Piece
    from oracle.view import View


def overrides(policy: Policy, hook: str) -> bool:
    """True when the policy's class implements a hook of its own."""
    return getattr(type(policy), hook, None) is not getattr(Policy, hook, None)


def seconds(value: Any) -> bool:
    """Whether something is a time that can pass."""
    return type(value) is not bool and isinstance(value, Real) and 0.0 <= float(value) < math.inf


def victim_of(policy: Policy) -> Callable[[Piece, bool, View], Piece | None]:
    """Who makes room: the policy's own answer."""
    return policy.victim
