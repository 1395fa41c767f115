"""The first line of a comparison: which run is faster, by how much, and what that is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.lanes import WAITED_FOR
from sim.base.tables import listed
from sim.base.units import show_change, show_count, show_frac, show_joules, show_seconds
from sim.results.routing_words import of_results
from sim.studies.diff.side import DEMAND, OTHERS, PREFETCH, QUEUE
from sim.studies.diff.times import numbering

if TYPE_CHECKING:
    from sim.studies.diff.diff import Diff
    from sim.studies.diff.times import Difference, Part

CLEAR = 1.01  # below, "1.00 times as fast" would be all there is to say
ASIDE = 0.05  # of all that changed: parts beyond the other way are named, too
LEAST_POINTS = 0.005  # of what gates asked for: a smaller change of a reason is not worth a word
PRACTICALLY = 0.02  # of the whole: what is left is not worth a number
MOST_PARTS = 3
_PER = {"tpot_s": "per token", "ttft_s": "to the first token"}
DOING = {
    **{share: lane.doing for share, lane in WAITED_FOR.items()},
    DEMAND: "waiting for copies on demand",
    PREFETCH: "waiting for late prefetches",
    QUEUE: "waiting in the queue",
    OTHERS: "waiting for other requests",
}


def missed(reason: str) -> str:
    """Misses by why, in words."""
    return f"misses ({reason.replace('_', ' ')})"


def answer(found: Diff) -> str:
    """The first line: which run is faster, by how much, what that is for, and what keeps it from being the truth."""
    if found.equal:
        same = "nothing that decides them differs" if not found.input_rows else "although their inputs differ"
        return f"A and B are equal, every figure to the last bit: {same}"
    time = found.times[found.leading]
    if time.difference_s is None:
        return f"A and B differ in {show_count(len(found.figure_rows), 'figure')}; neither has a time to compare"
    first = _speed(time, _PER[found.leading]) + _why(time)
    said = [first, *_beside(found), *_caveats(found, time)]
    return "; ".join(said) + of_results((found.a.result, found.b.result))


def _speed(time: Difference, per: str) -> str:
    a_s, b_s = time.a_s or 0.0, time.b_s or 0.0
    both = f"{show_seconds(b_s)} against {show_seconds(a_s)}"
    if time.equal:
        return f"A and B are equally fast {per} ({show_seconds(a_s)})"
    low, high = sorted((a_s, b_s))
    if low <= 0 or high / low < CLEAR:
        less = f"{100 * (high - low) / high:.2g} % {'faster' if b_s < a_s else 'slower'}"
        return f"B is {less} {per} than A ({both})"
    ratio = f"{high / low:.3g} times as"
    return f"B is {ratio} fast {per} as A ({both})" if b_s < a_s else f"B takes {ratio} long {per} as A ({both})"


def _why(time: Difference) -> str:
    """What the difference is for: one part, where nearly all goes its way, else the largest of both ways."""
    whole_s = time.difference_s or 0.0
    if time.equal or not time.parts:
        return ""
    changed_s = sum(abs(part.difference_s) for part in time.parts)
    ordered = sorted(time.parts, key=lambda part: -abs(part.difference_s))
    against_s = sum(abs(part.difference_s) for part in ordered if part.difference_s * whole_s < 0)
    if against_s > ASIDE * changed_s:
        most = [part for part in ordered if abs(part.difference_s) > ASIDE * changed_s][:MOST_PARTS]
        return ": " + listed([f"{show_seconds(abs(part.difference_s))} {_less(part)}" for part in most])
    first, whole = ordered[0], show_seconds(abs(whole_s))
    if abs(first.difference_s / whole_s - 1.0) < PRACTICALLY:
        return f": practically all of the {whole} are {_less(first)}"
    number, unit = show_seconds(abs(first.difference_s)).rsplit(" ", 1)
    return f": {number if whole.endswith(f' {unit}') else f'{number} {unit}'} of the {whole} are {_less(first)}"


def _less(part: Part) -> str:
    return f"{'less' if part.difference_s < 0 else 'more'} {DOING[part.part]}"


def _beside(found: Diff) -> list[str]:
    """Queues and what was promised to requests alike, joules where both count the same parts, hits and reasons."""
    a, b, said = found.a.result, found.b.result, []
    asked = {row.key for row in found.input_rows}
    if a.load is not None and b.load is not None and show_change(a.queue_s.mean, b.queue_s.mean, "s") not in ("", "0"):
        queues = show_seconds(b.queue_s.mean or 0.0), show_seconds(a.queue_s.mean or 0.0)
        said.append(f"requests wait {queues[0]} in the queue against {queues[1]}")
    if a.slo is not None and b.slo is not None and "slo" not in asked and a.slo.attained_frac != b.slo.attained_frac:
        said.append(f"{show_frac(b.slo.attained_frac)} keep their SLO against {show_frac(a.slo.attained_frac)}")
    energy = [row for row in found.figure_rows if row.key == "energy.joules_per_token" and row.a and row.b]
    if "sim_energy" not in asked:
        said += [f"{show_joules(row.b)} per token against {show_joules(row.a)}" for row in energy]
    alike = a.hit_definition == b.hit_definition and a.n_requests == b.n_requests
    if alike and None not in (a.hit_rate, b.hit_rate) and a.hit_rate != b.hit_rate:
        hits = f"hit rate {show_frac(b.hit_rate)} against {show_frac(a.hit_rate)}"
        most = max(found.misses, key=lambda one: abs(one.b - one.a), default=None)
        if most is not None and abs(most.b - most.a) >= LEAST_POINTS:
            hits += f", {missed(most.reason)} {show_frac(most.b)} against {show_frac(most.a)}"
        said.append(hits)
    return said


def _caveats(found: Diff, time: Difference) -> list[str]:
    """What keeps the answer from being the whole truth."""
    said, a, b = [], found.a, found.b
    lossy = ["lossy" in side.result.caveats for side in (a, b)]
    if lossy[0] != lossy[1]:
        said.append(f"{'A' if lossy[0] else 'B'} is lossy, the other one is not")
    if time.paired:
        if time.n_a < max(a.result.n_requests, b.result.n_requests):
            said.append(f"over the {show_count(time.n_a, 'request')} that both served")
        if time.interval is not None and not time.significant and not time.equal:
            said.append(f"these {time.n_a} requests do not show that it would be so with others")
        return said
    if a.result.trace_sha256 != b.result.trace_sha256:
        return [*said, "their traces differ, so requests cannot be paired"]
    if a.requests is None or b.requests is None:
        return [*said, "requests are not paired: the times of each are not recorded"]
    if numbering(a) != numbering(b):
        return [*said, "their requests are drawn otherwise, so they cannot be paired"]
    return [*said, "they served no request in common"]
