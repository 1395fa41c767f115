"""eMoE's task-aware request scheduling (arXiv 2503.06823, section 3.5): equation 3 and Algorithm 1.

The policy does not schedule requests: the engine admits them in order of arrival. This is the rule on its own.

Algorithm 1 as printed starts T as the length of a queue and adds S, which is scheduled already, to it; T counts tokens
(line 7 adds tokens to it) and the request that passes is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGAIN_FRAC = 0.05  # section 3.5: G is reset to 5 % of its initial value when it was too small


@dataclass
class Asked:
    """A request as the scheduler knows it.

    inputs: input tokens. profiled: output tokens that its task takes on average. first_token_s: until when its first
    token is wanted, from now. slo_s: the latency it may take. elapsed_s: r, seconds since it was scheduled.
    """

    inputs: int
    profiled: int
    first_token_s: float
    slo_s: float
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.profiled

    def generated(self) -> None:
        """One token more: G falls by one, and starts anew from a small share where the request outlives it."""
        self.left -= 1
        if self.left <= 0:
            self.left = max(1, round(AGAIN_FRAC * self.profiled))


def expected_latency_s(
    request: Asked, scheduled: Sequence[Asked], new_tokens: int, loading_s: float, token_s: float
) -> float:
    """Equation 3: t = dE + (W + n x G) x c + r, what a scheduled request is to take once new ones join it.

    Args:
        scheduled: all that run or are to. Those with more tokens to go than `request` end after it: n. new_tokens: W,
            input tokens of the new ones. loading_s: dE, of loading experts for them. token_s: c, of one input token.
    """
    later = sum(other.left > request.left for other in scheduled)
    return loading_s + (new_tokens + later * request.left) * token_s + request.elapsed_s


def admitted(
    waiting: Sequence[Asked], scheduled: Sequence[Asked], max_tokens: int, loading_s: float, token_s: float
) -> list[Asked]:
    """Algorithm 1: which of the waiting requests are scheduled now, the most stringent first.

    One is left waiting when its input tokens would take the engine beyond `max_tokens`, or when a request that is
    scheduled already would then be expected to miss its SLO.
    """
    running, taken = list(scheduled), list[Asked]()
    n_tokens = sum(request.inputs for request in running)
    new_tokens = 0
    for request in sorted(waiting, key=lambda one: one.first_token_s):
        if request.inputs + n_tokens >= max_tokens:
            continue
        joining = new_tokens + request.inputs
        if all(expected_latency_s(one, running, joining, loading_s, token_s) < one.slo_s for one in running):
            running.append(request)
            taken.append(request)
            n_tokens, new_tokens = n_tokens + request.inputs, joining
    return taken
