"""What is known of a request before it runs: how long requests of its task are, until when it is wanted, and what it
costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sim.workload.slo import Slos

if TYPE_CHECKING:
    from sim.workload.iterations import RequestInfo
    from sim.workload.token_paths import TokenPaths

NEEDS = {
    "outputs": "a training split, for how many tokens a task puts out",
    "deadlines": "--arrivals and --slo",
    "prices": "a training split, for how many experts a task's prompts go to",
    "paths": "a training split with token ids, for where tokens are routed",
}
"""What a scheduler may declare that it cannot do without, and what that takes."""


class Profiled(msgspec.Struct, frozen=True):
    """Of the tasks, from requests that were served before (the training split), and of what is promised (SLOs).

    outputs: task -> mean output tokens. any_outputs: over all tasks, for those that nobody has seen.
    token_s: what a prompt token takes on average, whose experts are all there. loading_s: task -> what copying the
    experts takes that a prompt of it finds missing; any_loading_s: over all tasks. max_tokens: tokens that there is
    memory for. These are worked out from this run's prices where its scheduler needs them. paths: where tokens go.
    """

    outputs: Mapping[str, float] = {}
    any_outputs: float | None = None
    slos: Slos = msgspec.field(default_factory=Slos)
    token_s: float = 0.0
    loading_s: Mapping[str, float] = {}
    any_loading_s: float = 0.0
    max_tokens: float = math.inf
    paths: TokenPaths | None = None

    @classmethod
    def of(cls, store: Iterable[RequestInfo], slos: Slos) -> Profiled:
        """Profile the requests that were served before."""
        means, every = by_task((request.task, request.outputs) for request in store)
        return cls(means, every, slos)

    def outputs_of(self, request: RequestInfo) -> float:
        """Output tokens that are expected of it; infinitely many where nothing was ever profiled."""
        expected = self.outputs.get(request.task, self.any_outputs)
        return math.inf if expected is None else expected

    def loading_s_of(self, request: RequestInfo) -> float:
        """What copying the experts takes that its prompt is expected to find missing."""
        return self.loading_s.get(request.task, self.any_loading_s)

    def deadline_s(self, request: RequestInfo) -> float:
        """Until when its first token is wanted; its whole answer, where its SLO knows no other; else never."""
        slo = self.slos.of(request.task)
        if slo is None or request.arrival_s is None:
            return math.inf
        limit_s = slo.ttft_s if slo.ttft_s is not None else slo.e2e_s
        return math.inf if limit_s is None else request.arrival_s + limit_s


def by_task(values: Iterable[tuple[str, float]]) -> tuple[dict[str, float], float | None]:
    """Means by task, and over all of them; None where there is nothing."""
    found: dict[str, list[float]] = {}
    for task, value in values:
        found.setdefault(task, []).append(value)
    every = [value for own in found.values() for value in own]
    means = {task: sum(own) / len(own) for task, own in found.items()}
    return means, sum(every) / len(every) if every else None
