"""The first line of a comparison: which run is faster, by how much, and what that is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.lanes import WAITED_FOR
from sim.base.units import show_count, show_frac, show_joules, show_seconds
from sim.results.routing_words import of_results
from sim.studies.diff.load import in_short
from sim.studies.diff.spent import DEMAND, OTHERS, PREFETCH, QUEUE
from sim.studies.diff.times import numbering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.figures import Timed
    from sim.studies.diff.diff import Diff
    from sim.studies.diff.times import Difference, Part

CLEAR = 1.01  # below, "1.00 times as fast" would be all there is to say
ASIDE = 0.05  # of all that changed: parts beyond the other way are named, too
LEAST_POINTS = 0.005  # of what gates asked for: a smaller change of a reason is not worth a word
PRACTICALLY = 0.02  # of the whole: what is left is not worth a number
MOST_PARTS = 3
_PER = {"tpot_s": "per token", "ttft_s": "to the first token"}
_MISSES = {
    "cold": "cold misses",
    "capacity": "capacity misses",
    "evicted_unused": "misses of what was evicted before use",
    "wrong_prediction": "misses by wrong prediction",
    "too_late": "misses of what was asked for too late",
}
_DOING = {
    **{share: lane.doing for share, lane in WAITED_FOR.items()},
    DEMAND: "waiting for copies on demand",
    PREFETCH: "waiting for late prefetches",
    QUEUE: "waiting in the queue",
    OTHERS: "waiting for other requests",
}


def doing(part: str) -> str:
    """A part in words."""
    return _DOING[part]


def leading(found: Diff) -> Difference:
    """The time that an answer is about: per token, or to the first where there is but one."""
    return found.tpot if found.tpot.difference_s is not None else found.ttft


def times_as_fast(found: Diff) -> float | None:
    """A's time over B's."""
    time = leading(found)
    return time.a_s / time.b_s if time.a_s and time.b_s else None


def answer(found: Diff) -> str:
    """One sentence."""
    if found.equal:
        same = "nothing that decides them differs" if not found.input_rows else "although their inputs differ"
        return f"A and B are equal, every figure to the last bit: {same}"
    time = leading(found)
    if time.difference_s is None:
        return f"A and B differ in {show_count(len(found.figure_rows), 'figure')}; neither has a time to compare"
    same_slo = all(row.key != "slo" for row in found.input_rows)
    load = in_short(found.a.told, found.b.told, same_slo)
    said = [_speed(time) + _why(time), *load, *_joules(found), *_hits(found), *_caveats(found, time)]
    return "; ".join(said) + of_results((found.a.told, found.b.told))


def _joules(found: Diff) -> list[str]:
    """Of a token, where both count those of the same parts."""
    if any(row.key == "sim_energy" for row in found.input_rows):
        return []
    each_j = [(a_j, b_j) for key, a_j, b_j in found.figure_rows if key == "energy.joules_per_token"]
    return [f"{show_joules(b_j)} per token against {show_joules(a_j)}" for a_j, b_j in each_j if a_j and b_j]


def _speed(time: Difference) -> str:
    assert time.a_s is not None
    assert time.b_s is not None
    per, both = _PER[time.time], f"{show_seconds(time.b_s)} against {show_seconds(time.a_s)}"
    if time.equal:
        return f"A and B are equally fast {per} ({show_seconds(time.a_s)})"
    faster = time.b_s < time.a_s
    low, high = sorted((time.a_s, time.b_s))
    if low <= 0 or high / low < CLEAR:
        less = abs(time.b_s - time.a_s) / high
        return f"B is {100 * less:.2g} % {'faster' if faster else 'slower'} {per} than A ({both})"
    ratio = f"{high / low:.3g}"
    return (
        f"B is {ratio} times as fast {per} as A ({both})"
        if faster
        else (f"B takes {ratio} times as long {per} as A ({both})")
    )


def _why(time: Difference) -> str:
    """What the difference is for."""
    whole_s = time.difference_s or 0.0
    if time.equal or not time.parts:
        return ""
    changed_s = sum(abs(part.difference_s) for part in time.parts)
    ordered = sorted(time.parts, key=lambda part: -abs(part.difference_s))
    against_s = sum(abs(part.difference_s) for part in ordered if part.difference_s * whole_s < 0)
    if against_s <= ASIDE * changed_s:
        return ": " + _along(ordered, whole_s)
    return ": " + _both_ways(ordered, changed_s)


def _along(ordered: Sequence[Part], whole_s: float) -> str:
    """`24 of the 27 ms are less waiting for copies`."""
    first = ordered[0]
    kind = "less" if whole_s < 0 else "more"
    part, whole = show_seconds(abs(first.difference_s)), show_seconds(abs(whole_s))
    if abs(first.difference_s / whole_s - 1.0) < PRACTICALLY:
        return f"practically all of the {whole} are {kind} {doing(first.part)}"
    number, unit = part.rsplit(" ", 1)
    if whole.endswith(f" {unit}"):
        part = number
    return f"{part} of the {whole} are {kind} {doing(first.part)}"


def _both_ways(ordered: Sequence[Part], changed_s: float) -> str:
    named = [part for part in ordered if abs(part.difference_s) > ASIDE * changed_s][:MOST_PARTS]
    said = [
        f"{show_seconds(abs(part.difference_s))} {'less' if part.difference_s < 0 else 'more'} {doing(part.part)}"
        for part in named
    ]
    return ", ".join(said[:-1]) + (" and " if len(said) > 1 else "") + said[-1]


def _hits(found: Diff) -> list[str]:
    a, b = found.a.told, found.b.told
    if (
        a.hit_definition != b.hit_definition
        or a.n_requests != b.n_requests
        or a.hit_rate == b.hit_rate
        or a.hit_rate is None
        or b.hit_rate is None
    ):
        return []
    said = f"hit rate {show_frac(b.hit_rate)} against {show_frac(a.hit_rate)}"
    most = max(found.misses, key=lambda one: abs(one.b - one.a), default=None)
    if most is not None and abs(most.b - most.a) >= LEAST_POINTS:
        said += f", {miss(most.reason)} {show_frac(most.b)} against {show_frac(most.a)}"
    return [said]


def miss(reason: str) -> str:
    """The misses of a reason."""
    return _MISSES.get(reason, reason)


def _caveats(found: Diff, time: Difference) -> list[str]:
    """What keeps the answer from being the whole truth."""
    said = []
    lossy = ["lossy" in side.told.caveats for side in (found.a, found.b)]
    if lossy[0] != lossy[1]:
        said.append(f"{'A' if lossy[0] else 'B'} is lossy, the other one is not")
    if not time.paired:
        said.append(_unpaired(found))
    elif time.n_a < max(found.a.told.n_requests, found.b.told.n_requests):
        said.append(f"over the {show_count(time.n_a, 'request')} that both served")
    if time.paired and time.interval is not None and not time.significant and not time.equal:
        said.append(f"these {time.n_a} requests do not show that it would be so with others")
    return said


def _unpaired(found: Diff) -> str:
    if found.a.told.trace_sha256 != found.b.told.trace_sha256:
        return "their traces differ, so requests cannot be paired"
    if found.a.requests is None or found.b.requests is None:
        return "requests are not paired: the times of each are not recorded"
    if numbering(found.a) != numbering(found.b):
        return "their requests are drawn otherwise, so they cannot be paired"
    return "they served no request in common"


def named_time(time: Timed) -> str:
    """TPOT or TTFT."""
    return "TPOT" if time == "tpot_s" else "TTFT"
