"""The time of policy code, as spans of the host: every hook a policy implements is timed, generators step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

from sim.policy.api import overrides

if TYPE_CHECKING:
    from sim.policy.api import Policy

HOOKS = (
    "request_start",
    "iteration_start",
    "layer_enter",
    "gate_input",
    "assign",
    "gate_done",
    "copy_done",
    "layer_done",
    "iteration_end",
    "request_end",
    "idle",
    "accessed",
    "placed",
    "evicted",
    "victim",
)


class Payer(Protocol):
    """Who is told how long policy code took."""

    def policy(self, hook: str, layer: int, began_s: float, end_s: float) -> None:
        """Hook `hook` ran from `began_s` to `end_s`."""


def watch(policy: Policy, payer: Payer, now_s: Callable[[], float] = time.perf_counter) -> None:
    """Time the hooks that this policy implements. A question asked inside a hook (`victim`) is not counted twice."""
    watcher = _Watcher(payer, now_s)
    for hook in HOOKS:
        if overrides(policy, hook):
            object.__setattr__(policy, hook, watcher.timed(hook, getattr(policy, hook)))


class _Watcher:
    def __init__(self, payer: Payer, now_s: Callable[[], float]) -> None:
        self._payer, self._now_s = payer, now_s
        self._inside = False

    def timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            answer = self._run(hook, call, *args)
            return self._stepwise(hook, answer) if isinstance(answer, Generator) else answer

        return watched

    def _run(self, hook: str, call: Callable[..., Any], *args: Any) -> Any:
        if self._inside:
            return call(*args)
        self._inside, began_s = True, self._now_s()
        try:
            return call(*args)
        finally:
            self._inside = False
            self._payer.policy(hook, -1, began_s, self._now_s())

    def _stepwise(self, hook: str, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        answer: Any = None
        while True:
            try:
                decision = self._run(hook, steps.send, answer)
            except StopIteration:
                return
            answer = yield decision
