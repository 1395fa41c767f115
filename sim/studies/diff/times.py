"""TTFT and TPOT of two runs: their difference cut into parts that sum to it, and request by request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.lanes import WAITED_FOR
from sim.results.blocks import block_length
from sim.results.sampling import NO_DIFFERENCE, Interval, Sample
from sim.studies.diff.layers import layers_of, seconds_of
from sim.studies.diff.spent import COPY, DEMAND, DRIVE, OTHERS, PARTS, PREFETCH, QUEUE
from sim.workload.load import DRAWN

if TYPE_CHECKING:
    from sim.figures import Phased, Timed
    from sim.studies.diff.request import OneRequest
    from sim.studies.diff.side import Side
    from sim.studies.diff.spent import Shares

BY_REQUEST, BY_PHASE = "requests", "phase"


class Part(NamedTuple):
    """What a mean time goes to in each run."""

    part: str
    a_s: float
    b_s: float

    @property
    def difference_s(self) -> float:
        """B less A."""
        return self.b_s - self.a_s


@dataclass(frozen=True)
class Difference:
    """A mean time of both runs.

    Attributes:
        n_a, n_b: requests behind the means. paired: they are the same requests.
        parts: what the means go to, which sums to them; empty where it is not known, and `reason` says why.
        basis: `requests`, where parts were told iteration by iteration; `phase`: they are the shares of the phase.
        interval: where the mean of paired differences B - A lies (95 %); None where it cannot be said.
        significant: whether these requests show which one is faster, beyond what others might change.
    """

    time: Timed
    a_s: float | None
    b_s: float | None
    n_a: int
    n_b: int
    paired: bool
    parts: tuple[Part, ...] = ()
    basis: str | None = None
    reason: str = ""
    interval: Interval | None = None
    significant: bool = False

    @property
    def difference_s(self) -> float | None:
        """B less A."""
        return None if self.a_s is None or self.b_s is None else self.b_s - self.a_s

    @property
    def equal(self) -> bool:
        """Whether the means differ by no more than rounding."""
        found = self.difference_s
        return found is not None and abs(found) <= NO_DIFFERENCE * abs(self.a_s or 0.0)


def pairs(a: Side, b: Side) -> list[int]:
    """Requests that both served; none where their numbers do not mean the same ones."""
    if a.requests is None or b.requests is None or numbering(a) != numbering(b):
        return []
    return sorted(set(a.requests) & set(b.requests))


def numbering(side: Side) -> tuple[Any, ...]:
    """What the number of a request means: its place in the trace, or in a draw of so many from it."""
    told = side.told
    drawn = any(label.startswith(DRAWN) for label in told.caveats)
    return (told.trace_sha256, *((told.split, told.seed, told.n_requests) if drawn else ()))


def difference(a: Side, b: Side, time: Timed) -> Difference:
    """One of the times, over the requests that both served where there are any."""
    common = [request for request in pairs(a, b) if _time(a, request, time) is not None]
    common = [request for request in common if _time(b, request, time) is not None]
    if not common:
        return _unpaired(a, b, time)
    own = {request: _time(a, request, time) or 0.0 for request in common}
    other = {request: _time(b, request, time) or 0.0 for request in common}
    batch = math.lcm(a.told.batch, b.told.batch)
    if a.told.load is not None or b.told.load is not None:  # neighbours in a queue wait alike
        batch = max(batch, block_length([other[request] - own[request] for request in common]))
    first, second = Sample(own, batch), Sample(other, batch)
    mean_a, mean_b = first.mean, second.mean
    shares = [(_shares(a, request, time), _shares(b, request, time)) for request in common]
    known = [(one, two) for one, two in shares if one is not None and two is not None]
    parts: tuple[Part, ...] = ()
    basis, reason = None, ""
    if len(known) == len(common):
        parts, basis = _mean([one for one, _ in known], [two for _, two in known]), BY_REQUEST
    elif len(common) == a.told.n_requests == b.told.n_requests:
        parts, basis, reason = _of_phase(a, b, time, mean_a, mean_b)
    else:
        reason = "the runs served different requests, and one of them is known as it was recorded only"
    interval = second.minus(first)
    n = len(common)
    return Difference(time, mean_a, mean_b, n, n, True, parts, basis, reason, interval, second.significant(first))


def _time(side: Side, request: int, time: Timed) -> float | None:
    assert side.requests is not None
    return side.requests[request].tpot_s if time == "tpot_s" else side.requests[request].ttft_s


def _shares(side: Side, request: int, time: Timed) -> Shares | None:
    assert side.requests is not None
    return side.requests[request].tpot if time == "tpot_s" else side.requests[request].ttft


def _unpaired(a: Side, b: Side, time: Timed) -> Difference:
    """The means of all requests that each of them served."""
    own = a.told.tpot_s if time == "tpot_s" else a.told.ttft_s
    other = b.told.tpot_s if time == "tpot_s" else b.told.ttft_s
    if own.mean is None or other.mean is None:
        return Difference(time, own.mean, other.mean, own.n, other.n, False, reason="no request has such a time")
    every = [[_of(one, time) for one in (side.requests or {}).values()] for side in (a, b)]
    known = [[shares for shares in one if shares is not None] for one in every]
    if len(known[0]) == own.n and len(known[1]) == other.n:
        return Difference(time, own.mean, other.mean, own.n, other.n, False, _mean(known[0], known[1]), BY_REQUEST)
    parts, basis, reason = _of_phase(a, b, time, own.mean, other.mean)
    return Difference(time, own.mean, other.mean, own.n, other.n, False, parts, basis, reason)


def _of(one: OneRequest, time: Timed) -> Shares | None:
    return one.tpot if time == "tpot_s" else one.ttft


def _mean(own: list[Shares], other: list[Shares]) -> tuple[Part, ...]:
    parts = (Part(part, _mean_of(own, at), _mean_of(other, at)) for at, part in enumerate(PARTS))
    return tuple(one for one in parts if one.part != DRIVE or one.a_s or one.b_s)


def _mean_of(shares: list[Shares], at: int) -> float:
    return math.fsum(one.parts_s[at] for one in shares) / len(shares)


def _of_phase(a: Side, b: Side, time: Timed, mean_a: float, mean_b: float) -> tuple[tuple[Part, ...], str | None, str]:
    """Parts by the composition of the phase, which is that of the time where every iteration has one request and none
    waits for another."""
    if any(side.told.batch > 1 or side.told.arrivals != "back to back" for side in (a, b)):
        return (), None, "requests ran beside one another or waited, and one of the runs is known as recorded only"
    phase: Phased = "decode" if time == "tpot_s" else "prefill"
    own, other = _shares_of(a, phase), _shares_of(b, phase)
    if COPY in own or COPY in other:  # of one of them nobody knows what copies those were
        own, other = _together(own), _together(other)
    of = (Part(part, mean_a * own.get(part, 0.0), mean_b * other.get(part, 0.0)) for part in {**own, **other})
    return tuple(of), BY_PHASE, ""


def _shares_of(side: Side, phase: Phased) -> dict[str, float]:
    """What a phase of a recorded run went to; its copies told apart where its layers are recorded."""
    shares = {part: share or 0.0 for part, share in side.told.bottleneck.of(phase).by_part().items()}
    waits = [seconds_of(row) for (where, _), row in layers_of(side).items() if where == phase]
    demand_s, late_s = (math.fsum(one.get(kind, 0.0) for one in waits) for kind in (DEMAND, PREFETCH))
    if demand_s + late_s <= 0 and shares[COPY] > 0:
        return {**shares, QUEUE: 0.0, OTHERS: 0.0}
    late = shares[COPY] * late_s / (demand_s + late_s) if late_s else 0.0
    known = {**shares, DEMAND: shares[COPY] - late, PREFETCH: late, QUEUE: 0.0, OTHERS: 0.0}
    return {part: known[part] for part in PARTS if part in known}


def _together(shares: dict[str, float]) -> dict[str, float]:
    if COPY in shares:
        return shares
    copies = {COPY: shares[DEMAND] + shares[PREFETCH]}
    every = {**shares, **copies}
    return {part: every[part] for part in (*WAITED_FOR, QUEUE, OTHERS) if part in every}


class Paired(NamedTuple):
    """A request beside itself."""

    request: int
    task: str
    prompt_tokens: int | None
    output_tokens: int | None
    tpot_a_s: float | None
    tpot_b_s: float | None
    ttft_a_s: float
    ttft_b_s: float
    largest_part: str | None
    largest_part_s: float | None

    @property
    def difference_s(self) -> float:
        """Of its time per token; of its first, where it has no other."""
        if self.tpot_a_s is not None and self.tpot_b_s is not None:
            return self.tpot_b_s - self.tpot_a_s
        return self.ttft_b_s - self.ttft_a_s


def paired(a: Side, b: Side) -> list[Paired]:
    """Every request that both served, the largest difference of its time per token first."""
    found = []
    for request in pairs(a, b):
        assert a.requests is not None
        assert b.requests is not None
        own, other = a.requests[request], b.requests[request]
        part, part_s = _largest(own.tpot or own.ttft, other.tpot or other.ttft)
        found.append(
            Paired(
                request,
                own.task or other.task,
                own.prompt_tokens if own.prompt_tokens is not None else other.prompt_tokens,
                own.output_tokens if own.output_tokens is not None else other.output_tokens,
                own.tpot_s,
                other.tpot_s,
                own.ttft_s,
                other.ttft_s,
                part,
                part_s,
            )
        )
    return sorted(found, key=lambda one: (-abs(one.difference_s), one.request))


def _largest(own: Shares | None, other: Shares | None) -> tuple[str | None, float | None]:
    if own is None or other is None:
        return None, None
    parts_s = {part: other.parts_s[at] - own.parts_s[at] for at, part in enumerate(PARTS)}
    part = max(parts_s, key=lambda name: abs(parts_s[name]))
    return part, parts_s[part]
