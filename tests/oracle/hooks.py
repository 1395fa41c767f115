"""What the oracle asks of a policy's class, whatever hooks the base class has by now."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from sim.policy.api import Policy


def overrides(policy: Policy, hook: str) -> bool:
    """True when the policy's class implements a hook of its own."""
    return getattr(type(policy), hook, None) is not getattr(Policy, hook, None)


def seconds(value: Any) -> bool:
    """Whether something is a time that can pass."""
    return type(value) is not bool and isinstance(value, Real) and 0.0 <= float(value) < math.inf
