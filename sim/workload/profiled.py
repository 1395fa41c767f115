"""What is known of a request before it runs: how long requests of its task are, and until when it is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.workload.slo import Slos

if TYPE_CHECKING:
    from sim.workload.iterations import RequestInfo


@dataclass(frozen=True)
class Profiled:
    """Of the tasks, from requests that were served before (the store split), and of what is promised (SLOs).

    outputs: task -> mean output tokens. any_outputs: over all tasks, for those that nobody has seen.
    """

    outputs: Mapping[str, float] = field(default_factory=dict)
    any_outputs: float | None = None
    slos: Slos = field(default_factory=Slos)

    @classmethod
    def of(cls, store: Iterable[RequestInfo], slos: Slos) -> Profiled:
        """Profile the requests that were served before."""
        by_task: dict[str, list[int]] = {}
        for request in store:
            by_task.setdefault(request.task, []).append(request.outputs)
        every = [n for ns in by_task.values() for n in ns]
        means = {task: sum(ns) / len(ns) for task, ns in by_task.items()}
        return cls(means, sum(every) / len(every) if every else None, slos)

    def outputs_of(self, request: RequestInfo) -> float:
        """Output tokens that are expected of it; infinitely many where nothing was ever profiled."""
        expected = self.outputs.get(request.task, self.any_outputs)
        return math.inf if expected is None else expected

    def deadline_s(self, request: RequestInfo) -> float:
        """Until when its first token is wanted; its whole answer, where its SLO knows no other; else never."""
        slo = self.slos.of(request.task)
        if slo is None or request.arrival_s is None:
            return math.inf
        limit_s = slo.ttft_s if slo.ttft_s is not None else slo.e2e_s
        return math.inf if limit_s is None else request.arrival_s + limit_s
