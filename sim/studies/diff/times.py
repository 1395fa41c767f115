"""TTFT and TPOT of two runs: their difference cut into parts that sum to it, by request and along the layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from sim.base.errors import BadInput
from sim.base.lanes import WAITED_FOR
from sim.figures import values_of
from sim.results.blocks import block_length
from sim.results.by_layer import MISSES, WAITS
from sim.results.sampling import NO_DIFFERENCE, Interval, Sample
from sim.studies.diff.side import COPY, DEMAND, DRIVE, OTHERS, PARTS, PREFETCH, QUEUE
from sim.studies.diff.tables import AGAIN
from sim.workload.iterations import DECODE, PHASES
from sim.workload.load import DRAWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.figures import Phased, Timed
    from sim.studies.diff.side import Side
    from sim.studies.diff.tables import OneRequest

BY_REQUEST, BY_PHASE = "requests", "phase"


class Part(Struct, frozen=True):
    """What a mean time goes to in each run, and B less A."""

    part: str
    a_s: float
    b_s: float
    difference_s: float

    @classmethod
    def of(cls, part: str, a_s: float, b_s: float) -> Part:
        return cls(part, a_s, b_s, b_s - a_s)


class Difference(Struct, frozen=True):
    """A mean time of both runs, B less A.

    Attributes:
        n_a, n_b: requests behind the means. paired: they are the same requests.
        interval: where the mean of paired differences B - A lies (95 %); None where it cannot be said.
        significant: whether these requests show which one is faster, beyond what others might change.
        basis: `requests`, where parts were told iteration by iteration; `phase`: they are the shares of the phase.
        parts: what the means go to, which sums to them; empty where it is not known, and `reason` says why.
    """

    a_s: float | None = field(name="a")
    b_s: float | None = field(name="b")
    difference_s: float | None = field(name="difference")
    n_a: int = field(name="requests_a")
    n_b: int = field(name="requests_b")
    paired: bool = False
    interval: Interval | None = None
    significant: bool = False
    basis: str | None = None
    reason: str | None = None
    parts: list[Part] = []

    @property
    def equal(self) -> bool:
        """Whether the means differ by no more than rounding."""
        found = self.difference_s
        return found is not None and abs(found) <= NO_DIFFERENCE * abs(self.a_s or 0.0)


def pairs(a: Side, b: Side) -> list[tuple[OneRequest, OneRequest]]:
    """Requests that both served; none where their numbers do not mean the same ones."""
    if a.requests is None or b.requests is None or numbering(a) != numbering(b):
        return []
    return [(a.requests[one], b.requests[one]) for one in sorted(set(a.requests) & set(b.requests))]


def numbering(side: Side) -> tuple[Any, ...]:
    """What the number of a request means: its place in the trace, or in a draw of so many from it."""
    result = side.result
    drawn = any(label.startswith(DRAWN) for label in result.caveats)
    return (result.trace_sha256, *((result.split, result.seed, result.n_requests) if drawn else ()))


def difference(a: Side, b: Side, time: Timed) -> Difference:
    """One of the times, over the requests that both served where there are any; else over all that each served."""
    common = [(own, other) for own, other in pairs(a, b) if None not in (getattr(own, time), getattr(other, time))]
    if not common:
        own, other = a.result.time_s(time), b.result.time_s(time)
        if own.mean is None or other.mean is None:
            return Difference(own.mean, other.mean, None, own.n, other.n, reason="no request has such a time")
        every = [list((side.requests or {}).values()) for side in (a, b)]
        cut = _cut(a, b, time, every, (own.n, other.n), (own.mean, other.mean))
        return Difference(own.mean, other.mean, other.mean - own.mean, own.n, other.n, **cut)
    times_s = [{pair[side].request: getattr(pair[side], time) for pair in common} for side in (0, 1)]
    batch = math.lcm(a.result.batch, b.result.batch)
    if a.result.load is not None or b.result.load is not None:  # neighbours in a queue wait alike
        batch = max(batch, block_length([times_s[1][request] - times_s[0][request] for request in times_s[0]]))
    first, second = (Sample(one, batch) for one in times_s)
    n, served = len(common), [[pair[side] for pair in common] for side in (0, 1)]
    cut = _cut(a, b, time, served, (n, n), (first.mean, second.mean))
    apart = second.minus(first), second.significant(first)
    return Difference(first.mean, second.mean, second.mean - first.mean, n, n, True, *apart, **cut)


def _cut(
    a: Side,
    b: Side,
    time: Timed,
    served: Sequence[Sequence[OneRequest]],
    n: tuple[int, int],
    means_s: tuple[float, float],
) -> dict[str, Any]:
    """What the means of `n` requests of each run go to, on which basis; or the reason why that is not known."""
    shares = [[one.parts_s[time] for one in requests if time in one.parts_s] for requests in served]
    if (len(shares[0]), len(shares[1])) == n:
        sums = [[math.fsum(column) / len(every) for column in zip(*every, strict=True)] for every in shares]
        parts = [Part.of(*row) for row in zip(PARTS, *sums, strict=True)]
        return {"parts": [one for one in parts if one.part != DRIVE or one.a_s or one.b_s], "basis": BY_REQUEST}
    if pairs(a, b) and n != (a.result.n_requests, b.result.n_requests):
        return {"reason": "the runs served different requests, and one of them is known as it was recorded only"}
    if any(side.result.batch > 1 or side.result.arrivals != "back to back" for side in (a, b)):
        return {"reason": "requests ran beside one another or waited, and one of the runs is known as recorded only"}
    phase: Phased = "decode" if time == "tpot_s" else "prefill"
    own, other = _shares_of(a, phase), _shares_of(b, phase)
    if COPY in own or COPY in other:  # of one of them nobody knows what copies those were
        own, other = _together(own), _together(other)
    both = [Part.of(part, means_s[0] * own.get(part, 0.0), means_s[1] * other.get(part, 0.0)) for part in own | other]
    return {"parts": both, "basis": BY_PHASE}


def _shares_of(side: Side, phase: Phased) -> dict[str, float]:
    """What a phase of a recorded run went to; its copies told apart where its layers are recorded."""
    shares = {part: share or 0.0 for part, share in values_of(side.result.bottleneck.of(phase)).items()}
    waits = [_seconds(row) for (where, _), row in _layers(side).items() if where == phase]
    demand_s, late_s = (math.fsum(one.get(kind, 0.0) for one in waits) for kind in (DEMAND, PREFETCH))
    if demand_s + late_s <= 0 and shares[COPY] > 0:
        return {**shares, QUEUE: 0.0, OTHERS: 0.0}
    late = shares[COPY] * late_s / (demand_s + late_s) if late_s else 0.0
    known = {**shares, DEMAND: shares[COPY] - late, PREFETCH: late, QUEUE: 0.0, OTHERS: 0.0}
    return {part: known[part] for part in PARTS if part in known}


def _together(shares: dict[str, float]) -> dict[str, float]:
    if COPY in shares:
        return shares
    every = {**shares, COPY: shares[DEMAND] + shares[PREFETCH]}
    return {part: every[part] for part in (*WAITED_FOR, QUEUE, OTHERS) if part in every}


class Paired(Struct, frozen=True):
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
    for own, other in pairs(a, b):
        known = own if own.prompt_tokens is not None else other
        times = own.tpot_s, other.tpot_s, own.ttft_s, other.ttft_s
        who = own.request, own.task or other.task, known.prompt_tokens, known.output_tokens
        found.append(Paired(*who, *times, *_largest(own, other)))
    return sorted(found, key=lambda one: (-abs(one.difference_s), one.request))


def _largest(own: OneRequest, other: OneRequest) -> tuple[str | None, float | None]:
    """The part of its time that changed most, and by how much."""
    a_s, b_s = (one.parts_s.get("tpot_s", one.parts_s.get("ttft_s")) for one in (own, other))
    if a_s is None or b_s is None:
        return None, None
    changes_s = dict(zip(PARTS, (there - here for here, there in zip(a_s, b_s, strict=True)), strict=True))
    part = max(changes_s, key=lambda name: abs(changes_s[name]))
    return part, changes_s[part]


class LayerRow(Struct, frozen=True):
    """One figure of one layer and phase in both runs."""

    phase: str
    layer: int
    key: str
    a: float
    b: float


def by_layer(a: Side, b: Side) -> list[LayerRow]:
    """Every figure of every layer that differs; empty where the layers are not alike, or nothing is known."""
    own, other, found = _layers(a), _layers(b), []
    for (phase, layer), row in own.items():
        beside = other.get((phase, layer), {})
        alike = [key for key in row if _is_number(row[key]) and _is_number(beside.get(key))]
        found += [LayerRow(phase, layer, key, row[key], beside[key]) for key in alike if row[key] != beside[key]]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _layers(side: Side) -> Mapping[tuple[str, int], dict[str, Any]]:
    """Figures by phase and layer. Raises BadInput for rows that are of no layer."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for at, row in enumerate(side.result.by_layer):
        phase, layer = row.get("phase"), row.get("layer")
        if phase not in PHASES or not isinstance(layer, int) or (phase, layer) in found:
            raise BadInput(f"{side.label}: by_layer[{at}]: of no phase and layer of its own; {AGAIN}")
        found[phase, layer] = {key: value for key, value in row.items() if key not in ("phase", "layer")}
    return found


def _seconds(row: dict[str, Any]) -> dict[str, float]:
    """What GPU 0 waited for, by kind; empty where that is not recorded."""
    return {kind: float(row[f"wait_{kind}_s"]) for kind in WAITS if _is_number(row.get(f"wait_{kind}_s"))}


class LayerWait(Struct, frozen=True):
    """What GPU 0 waited for in a layer, in seconds per iteration of decode, and the kind of wait that changed most."""

    layer: int
    a_s: float
    b_s: float
    difference_s: float
    largest: str
    largest_s: float
    misses_a: int | None
    misses_b: int | None


def waits(a: Side, b: Side) -> list[LayerWait]:
    """Layers whose waiting in decode differs, the largest difference first; empty where it is not recorded."""
    n_a, n_b = (side.result.phases.decode.iterations for side in (a, b))
    other, found = _layers(b), []
    for (phase, layer), row in _layers(a).items():
        beside = other.get((phase, layer))
        if phase != DECODE or beside is None or not n_a or not n_b:
            continue
        mine, also = _seconds(row), _seconds(beside)
        changes = {kind: also.get(kind, 0.0) / n_b - mine.get(kind, 0.0) / n_a for kind in WAITS}
        kind = max(changes, key=lambda name: abs(changes[name]))
        if mine and also and changes[kind]:
            a_s, b_s = math.fsum(mine.values()) / n_a, math.fsum(also.values()) / n_b
            misses = row.get("miss_n"), beside.get("miss_n")
            found.append(LayerWait(layer, a_s, b_s, b_s - a_s, kind, changes[kind], *misses))
    return sorted(found, key=lambda one: (-abs(one.difference_s), one.layer))


class Reason(Struct, frozen=True):
    """Why experts were missed in decode, as shares of what gates asked for."""

    reason: str
    a: float
    b: float


def misses(a: Side, b: Side) -> list[Reason]:
    """Every reason that there is in either run; empty where it is not recorded."""
    own, other = _reasons(a), _reasons(b)
    return [Reason(name, own[name], other[name]) for name in MISSES if own and other and (own[name] or other[name])]


def _reasons(side: Side) -> dict[str, float]:
    decoded = [row for (phase, _), row in _layers(side).items() if phase == DECODE]
    keys = ["asked_n", *(f"miss_{name}_n" for name in MISSES)]
    if not decoded or not all(isinstance(row.get(key), int) for row in decoded for key in keys):
        return {}
    asked = sum(row["asked_n"] for row in decoded)
    return {name: sum(row[f"miss_{name}_n"] for row in decoded) / asked for name in MISSES} if asked else {}
