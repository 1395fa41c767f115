"""eMoE's task-aware request scheduling: a request joins where nobody who runs would miss its SLO for it.

eMoE (arXiv 2503.06823), section 3.5, equation 3 and Algorithm 1: whenever a request arrives or one that runs is done,
the waiting ones are gone through, most stringent SLO first; one is scheduled if the tokens of all then stay below
T_max and every S that is scheduled already is expected to keep its SLO, its expected latency being

    t = dE + (W + n x G) x c + r

- W: input tokens of whoever joins. Several that join at one instant count together, as "a new batch of requests" does.
- dE: "expert loading latency due to the scheduling of new requests"; of several, the longest.
- G: output tokens that are profiled for S's task, less those it has put out; at 0 it starts anew from 5 % of them.
- n: how many of those that run have more of theirs to go than S, and end after it.
- c: "average [...] latency for a single input token". S's own tokens to come are not in the equation, as printed.
- r: seconds since S was scheduled.

The paper leaves open, or prints otherwise, what is read here as follows:

- Line 1 starts T as the length of a queue and line 6 adds S, which is scheduled already; T counts tokens (line 7 adds
  tokens to it), and R is added.
- "SLO stringiness", "how quickly the first response token will be generated": by the time of the TTFT's deadline.
- "S.SLO" is a latency: the `e2e_s` of its task, or `ttft_s` and as many `tpot_s` as further tokens are profiled,
  whichever is less; with neither, nothing that joins can break it. r leaves out what S queued for, so that is taken
  off its SLO.
- "If it will not lead to SLO violations": who would miss its SLO although nobody joined has no say. As printed it
  would keep everybody out until it ended.
- Who waits and has missed the TTFT's deadline comes after all that can still keep theirs, in order of arrival; as
  printed it would go first, and make the next miss theirs. It may wait as long as others come; `stats` counts.
- Where nobody runs, who asks for T_max tokens or more runs alone; it would never run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sim.workload.iterations import Range, RequestInfo
from sim.workload.known_requests import Profiled
from sim.workload.scheduler import Scheduler

AGAIN_FRAC = 0.05  # section 3.5: G starts anew from 5 % of its initial value when it was too small


@dataclass
class Scheduled:
    """A request that runs.

    inputs: input tokens. profiled: output tokens of its task. limit_s: the latency it may take from when it was
    scheduled, at `since_s`. put_out: its output tokens so far.
    """

    inputs: int
    profiled: int
    limit_s: float
    since_s: float = 0.0
    put_out: int = 0

    @property
    def left(self) -> int:
        """G: tokens to go as far as anybody knows."""
        over = self.put_out - self.profiled
        if over < 0:
            return -over
        again = max(1, round(AGAIN_FRAC * self.profiled))
        return again - over % again


def expected_latency_s(
    one: Scheduled, running: Iterable[Scheduled], new_tokens: int, loading_s: float, token_s: float, now_s: float
) -> float:
    """Equation 3, for one that runs.

    Args:
        running: all that run or are to. new_tokens: W. loading_s: dE. token_s: c.
    """
    left = one.left
    later = sum(other.left > left for other in running)
    return loading_s + (new_tokens + later * left) * token_s + (now_s - one.since_s)


class TaskAware(Scheduler):
    """Whose first token is wanted soonest, unless a request that runs is expected to miss its SLO for it."""

    name = "emoe_slo"
    needs = ("deadlines", "outputs", "prices")

    def __init__(
        self,
        requests: Sequence[RequestInfo],
        open_loop: bool = False,
        clients: int = 0,
        profiled: Profiled | None = None,
    ) -> None:
        super().__init__(requests, open_loop, clients, profiled)
        self.running: dict[int, Scheduled] = {}
        self._now_s = -math.inf
        self._new_tokens, self._loading_s = 0, 0.0  # of those that join now
        self._due, self._next_s = True, -math.inf  # something has ended; when the next comes
        self._held: set[int] = set()
        self._n_late = 0

    def pick(self, now_s: float) -> RequestInfo | None:
        if math.isinf(now_s):  # asked without a clock, as for bounds: there is nothing to keep
            return next(self.arrived_by(now_s), None)
        if self.running and not self._due and now_s < self._next_s:
            return None
        if now_s != self._now_s:
            self._now_s, self._new_tokens, self._loading_s = now_s, 0, 0.0
        waiting = sorted(self.arrived_by(now_s), key=self._stringency)  # equals stay in order of arrival
        self._due = True
        for request in waiting:
            if self._joins(request):
                return request
            self._held.add(request.index)
        if waiting and not self.running:
            return waiting[0]
        next_s = self.next_arrival_s(now_s)
        self._due, self._next_s = False, math.inf if next_s is None else next_s
        return None

    def _stringency(self, request: RequestInfo) -> tuple[bool, float]:
        deadline_s = self.profiled.deadline_s(request)
        missed = deadline_s <= self._now_s
        return missed, (request.arrival_s or 0.0) if missed else deadline_s

    def _joins(self, request: RequestInfo) -> bool:
        """Lines 4 and 5."""
        known, running = self.profiled, self.running.values()
        if request.prompt_len + sum(one.inputs for one in running) >= known.max_tokens:
            return False
        new_tokens = self._new_tokens + request.prompt_len
        loading_s = max(self._loading_s, known.loading_s_of(request))

        def keeps(one: Scheduled, tokens: int, copies_s: float) -> bool:
            return expected_latency_s(one, running, tokens, copies_s, known.token_s, self._now_s) < one.limit_s

        return all(keeps(one, new_tokens, loading_s) or not keeps(one, 0, 0.0) for one in running)

    def started(self, request: RequestInfo) -> None:
        known = self.profiled
        self._n_late += known.deadline_s(request) <= self._now_s
        self._new_tokens += request.prompt_len
        self._loading_s = max(self._loading_s, known.loading_s_of(request))
        expected = known.outputs_of(request)
        profiled = max(1, round(expected)) if math.isfinite(expected) else 1
        limit_s = self._limit_s(request, profiled)
        self.running[request.index] = Scheduled(request.prompt_len, profiled, limit_s, self._now_s)

    def _limit_s(self, request: RequestInfo, profiled: int) -> float:
        """What is left of the latency that its SLO allows."""
        slo = self.profiled.slos.of(request.task)
        if slo is None:
            return math.inf
        whole_s = math.inf if slo.e2e_s is None else slo.e2e_s
        if slo.ttft_s is not None and slo.tpot_s is not None:
            whole_s = min(whole_s, slo.ttft_s + (profiled - 1) * slo.tpot_s)
        return whole_s - (0.0 if request.arrival_s is None else self._now_s - request.arrival_s)

    def ran(self, ranges: list[Range]) -> None:
        for r in ranges:
            request = r.request
            one = self.running.get(request.index)
            if one is not None:
                one.put_out = max(0, r.taken_row - request.first_row - request.prompt_len + 1)

    def finished(self, request: RequestInfo) -> None:
        self.running.pop(request.index, None)
        self._due = True

    def add(self, request: RequestInfo) -> None:
        super().add(request)
        self._due = True

    def stats(self) -> dict[str, Any]:
        known = self.profiled
        return {
            "token_s": known.token_s,
            "loading_s": dict(sorted(known.loading_s.items())),
            "outputs": dict(sorted(known.outputs.items())),
            "max_tokens": known.max_tokens if math.isfinite(known.max_tokens) else None,
            "held_back_n": len(self._held),
            "started_late_n": self._n_late,
        }
