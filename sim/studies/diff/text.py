"""A comparison of two runs for people: inputs, where the time went, what was found and copied, requests,
layers, and where decisions part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sim.base.errors import one_line
from sim.base.tables import fold, lines, tabled
from sim.base.units import show_change, show_count, show_frac, show_seconds, show_value
from sim.engine.counts import CLASSES
from sim.results.figure import unit_of
from sim.results.grounds import show_figure as show_hardware
from sim.setup.naming import show
from sim.studies.diff.answer import DOING, MISSED, NAMED
from sim.studies.diff.times import BY_PHASE
from sim.studies.hosts import Machine, unlike_hosts
from sim.workload.slo import slo_text

if TYPE_CHECKING:
    from sim.studies.diff.decisions import Made
    from sim.studies.diff.diff import Diff
    from sim.studies.diff.side import Side
    from sim.studies.diff.tables import Decision
    from sim.studies.diff.times import Difference

TOP = 5
LEAST_SHARE = 0.005  # of a run's time: figures on which less rests are counted, not listed
_SHORT = 12  # of a digest
_WAITING = {
    "load.arrivals_per_s": "arrive per second",
    "load.capacity_per_s": "served per second while some wait",
    "load.requests_in_system": "requests there on average",
    "load.requests_waiting": "of them waiting",
    "load.stable": "queue",
    "queue_s.mean": "queue, mean",
    "queue_s.p95": "queue, p95",
    "service_s.mean": "service to the first token, mean",
    "service_s.p95": "service to the first token, p95",
}
_PROMISED = {
    "slo.attained_frac": "keep their SLO",
    "slo.goodput_requests_per_s": "goodput, requests per second",
    "slo.goodput_tokens_per_s": "goodput, tokens per second",
}
_KINDS = {
    "demand": "copies on demand",
    "prefetch": "late prefetches",
    "host": "the host",
    "cpu": "experts on the CPU",
    "predictor": "predictions",
    "gpu": "other GPUs",
}
_VERBS = {
    "fetch": "fetches",
    "prefetch": "prefetches",
    "evict": "evicts",
    "cancel": "cancels",
    "gpu": "runs on the GPU",
    "part": "runs a part of",
    "cpu": "runs on the CPU",
    "cpu_ahead": "runs ahead on the CPU",
    "write_back": "writes back",
}


def hosts_line(found: Diff) -> str:
    """Where the two cards come with unlike hosts, what says so."""
    return unlike_hosts(Machine(side.result.hw, side.result.overrides) for side in (found.a, found.b))


def render(found: Diff, top: int = TOP) -> str:
    """All of it but the first line."""
    blocks = [_sides(found), _inputs(found)]
    if not found.equal:
        blocks += [_times(found), _load(found), _figures(found), _alone(found), _requests(found, top)]
        blocks += [_layers(found, top), _first(found)]
    return "\n".join(block for block in blocks if block)


def _sides(found: Diff) -> str:
    sides = (("A", found.a), ("B", found.b))
    return lines([row for name, one in sides for row in ((name, one.result.name), *(("", note) for note in one.notes))])


def _inputs(found: Diff) -> str:
    shown = [one for one in found.input_rows if not _said_otherwise(one.key, found)]
    if not shown and not found.machine_rows:
        if found.equal:
            return ""
        return fold("no input differs: what decides the figures has changed in the code, or in what replays it") + "\n"
    shares = {one.key: max(_rests_on(side, one.key) for side in (found.a, found.b)) for one in found.machine_rows}
    weighty = sorted(found.machine_rows, key=lambda one: -shares[one.key])
    weighty = [one for one in weighty if shares[one.key] >= LEAST_SHARE]
    rows = [(one.key, _value(one.key, one.a), _value(one.key, one.b)) for one in shown]
    rows += [(one.key, _figure(one.key, one.a), _figure(one.key, one.b)) for one in weighty]
    less = len(shares) - len(weighty)
    more = f"and {show_count(less, 'figure')} of machine, model or engine on which little time rests\n" if less else ""
    return tabled(("input", "A", "B"), rows, words=(1, 2)) + fold(more)


def _rests_on(side: Side, key: str) -> float:
    """The share of a run's time that rests on a figure."""
    names = key.removeprefix("hw."), key
    return sum(one.share for one in side.result.provenance.figures if one.figure in names)


def _said_otherwise(key: str, found: Diff) -> bool:
    """Parameters of two policies are not the same ones; a digest says no more than names or figures that differ."""
    if key.startswith("params."):
        return found.a.result.policy != found.b.result.policy
    named, _, digest = key.partition("_")
    if digest != "sha256" or named == "policy":
        return False
    keys = [one.key for one in (*found.input_rows, *found.machine_rows)]
    return any(one == named or one.startswith(f"{named}.") for one in keys)


def _value(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "slo":
        return slo_text(value) or "-"
    text = one_line(show(key, value))
    return text[:_SHORT] if key.endswith("sha256") else text


def _figure(key: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return show_hardware(key, value) if number else _value(key, value)


def _times(found: Diff) -> str:
    """Both means with their parts."""
    times = [time for time in (found.tpot, found.ttft) if time.difference_s is not None]
    if not times:
        return ""
    titles = [title for time in times for title in (f"{NAMED[time.time]} A", "B", "B - A")]
    parts = [{one.part: _beside(one.a_s, one.b_s, "s") for one in time.parts} for time in times]
    rows = [
        (DOING[name], *(cell for one in parts for cell in one.get(name, ("", "", ""))))
        for name in dict.fromkeys(name for one in parts for name in one)
    ]
    rows = [row for row in rows if set(row[1:]) - {"0 ns", "0", ""}]
    rows.append(("mean", *(cell for time in times for cell in _beside(time.a_s, time.b_s, "s"))))
    return tabled(("where the time went", *titles), rows) + "".join(_basis(time) for time in times)


def _basis(time: Difference) -> str:
    if time.reason:
        return fold(f"{NAMED[time.time]} is not cut into parts: {time.reason}") + "\n"
    by_phase = f"{NAMED[time.time]}: its parts are the shares of the whole phase, as recorded"
    return fold(by_phase) + "\n" if time.basis == BY_PHASE else ""


def _beside(a: float | None, b: float | None, unit: str) -> tuple[str, str, str]:
    """A figure of A, of B, and B less A."""
    return show_value(a, unit), show_value(b, unit), show_change(a, b, unit)


def _load(found: Diff) -> str:
    """How requests fare over time, which keep what was promised, and why others do not; nothing without arrivals and
    SLO."""
    a, b, loads = found.a.facts, found.b.facts, [side.result.load for side in (found.a, found.b)]
    keys = [key for key in dict.fromkeys([*a, *b]) if key.startswith("slo.")]
    broken = [key for key in keys if key.startswith("slo.violations.") and (a.get(key) or b.get(key))]
    tasks = [key for key in keys if key.startswith("slo.tasks.") and key.endswith(".attained_frac")]
    named = (_WAITING if any(loads) else {}) | _PROMISED
    named |= {key: f"broken for {key.removeprefix('slo.violations.')}" for key in broken}
    named |= {
        key: f"{key.removeprefix('slo.tasks.').removesuffix('.attained_frac') or 'no task'} keeps"
        for key in tasks
        if len(tasks) > 1 and a.get(key) != b.get(key)
    }
    rows: list[tuple[str, ...]] = []
    for key, name in named.items():
        if key == "load.stable" and not all(one is None or one.stable for one in loads):
            rows.append((name, *("-" if one is None else "stable" if one.stable else "grows" for one in loads), ""))
        elif a.get(key) is not None or b.get(key) is not None:
            rows.append((name, *_beside(a.get(key), b.get(key), unit_of(key))))
    return tabled(("requests over time", "A", "B", "B - A"), rows) if rows else ""


def _figures(found: Diff) -> str:
    a, b = found.a, found.b
    rows: list[tuple[str, ...]] = []

    def add(name: str, own: float | None, other: float | None, unit: str = "", always: bool = True) -> None:
        if own or other or always:
            rows.append((name, *_beside(own, other, unit)))

    for name in CLASSES:
        add(name.replace("_", " "), a.facts[f"{name}_rate"], b.facts[f"{name}_rate"], "frac", always=False)
    for one in found.misses:
        add(MISSED[one.reason], one.a, one.b, "frac")
    n_a, n_b = max(1, a.result.n_outputs), max(1, b.result.n_outputs)
    per, of_a, of_b = ("", 1, 1) if n_a == n_b else (" per token", n_a, n_b)
    counts = [("copies on demand", "demand_copies.n")]
    counts += [(f"prefetches {fate}", f"prefetch.{fate}.n") for fate in a.result.prefetch.by_fate()]
    for name, key in counts:
        own, other = a.facts[key] or 0, b.facts[key] or 0
        own, other = (own / of_a, other / of_b) if per else (own, other)
        add(name + per, own, other, always=key == "demand_copies.n")
    add("to the GPU per token", a.result.h2d_bytes / n_a, b.result.h2d_bytes / n_b, "bytes")
    add("room for experts", sum(a.result.cache_capacity_bytes), sum(b.result.cache_capacity_bytes), "bytes")
    add("peak VRAM", a.result.peak_vram_bytes, b.result.peak_vram_bytes, "bytes")
    return tabled(("experts and copies", "A", "B", "B - A"), rows)


def _alone(found: Diff) -> str:
    if not found.alone_rows:
        return ""
    base_s, told = found.a.result.tpot_s.mean, found.b.result
    rows = []
    for one in found.alone_rows:
        value = f"{one.value}: {one.reason}" if one.reason else one.value
        change = show_change(base_s, one.tpot_s, "s") or "-"
        rows.append((one.input, one_line(value), show_value(one.tpot_s, "s"), change, show_frac(one.hit_rate)))
    if told.tpot_s.mean is not None and base_s is not None:
        change = show_change(base_s, told.tpot_s.mean, "s")
        rows.append(("all of them", "B", show_seconds(told.tpot_s.mean), change, show_frac(told.hit_rate)))
    return tabled(("A with this of B alone", "value", "TPOT", "change", "hit rate"), rows, words=(1,))


def _requests(found: Diff, top: int) -> str:
    if not found.request_rows:
        return ""
    time, n, rows = found.tpot, len(found.request_rows), []
    for one in found.request_rows[:top]:
        a, b = (one.ttft_a_s, one.ttft_b_s) if one.tpot_a_s is None else (one.tpot_a_s, one.tpot_b_s or 0.0)
        times = show_seconds(a), show_seconds(b), show_change(0.0, one.difference_s, "s")
        lengths = show_value(one.prompt_tokens), show_value(one.output_tokens)
        mostly = "-" if one.largest_part is None else _mostly(one.largest_part_s or 0.0, DOING[one.largest_part])
        rows.append((str(one.request), one_line(one.task) or "-", *lengths, *times, mostly))
    said = f"{show_count(n, 'request')} paired" + (f", the {top} that differ most" if n > top else "")
    if time.interval is not None:
        mean, low, high = (show_change(0.0, end, "s") for end in (time.difference_s, *time.interval))
        said += f"; mean B - A {mean}, {low} to {high} for the choice of requests (95 %)"
    titles = ("request", "task", "prompt", "outputs", "TPOT A", "B", "B - A", "mostly")
    return f"{tabled(titles, rows, words=(1, 7))}{fold(said)}\n"


def _mostly(difference_s: float, what: str) -> str:
    return f"{show_change(0.0, difference_s, 's')} {what}"


def _layers(found: Diff, top: int) -> str:
    """Layers by what GPU 0 waited for in them."""
    every = found.layer_waits
    if not every:
        return ""
    rows = [
        (str(one.layer), *_beside(one.a_s, one.b_s, "s"), show_value(one.misses_a), show_value(one.misses_b),
         _mostly(one.largest_s, _KINDS.get(one.largest, one.largest)))
        for one in every[:top]
    ]  # fmt: skip
    less_s = math.fsum(one.difference_s for one in every[top:])
    said = "waits are per iteration"
    if len(every) > top:
        said += f"; {show_count(len(every) - top, 'further layer')} together: {show_change(0.0, less_s, 's')}"
    titles = ("layer", "waits of decode A", "B", "B - A", "misses A", "B", "mostly")
    return tabled(titles, rows, words=(6,)) + fold(said) + "\n"


def _first(found: Diff) -> str:
    if found.not_compared:
        return fold(f"decisions are not compared: {found.not_compared}") + "\n"
    first = found.first
    if first is None:
        return fold("every decision is the same; what differs is what they cost") + "\n"
    made = first.a or first.b
    assert made is not None
    whose = "" if first.request is None else f" of request {first.request}"
    phase = "" if first.phase is None else f" ({first.phase}{whose})"
    head = f"first decision that differs: number {first.at:,}, in iteration {made.iteration}{phase}"
    rows = [("both", _said(one)) for one in first.before]
    for which, made, then in (("A", first.a, first.then_a), ("B", first.b, first.then_b)):
        rows.append((which, "decides nothing more" if made is None else _said(made) + _uses(made)))
        rows += [("", _said(one)) for one in then]
    return fold(head) + "\n" + lines(rows)


def _said(one: Decision | Made) -> str:
    return f"{_VERBS.get(one.kind, one_line(str(one.kind)))} layer {one.layer} expert {one.expert}"


def _uses(made: Made) -> str:
    before = "not used before" if made.used_before is None else f"last used in iteration {made.used_before}"
    after = "not used again" if made.used_next is None else f"next in iteration {made.used_next}"
    return f" ({before}, {after})"
