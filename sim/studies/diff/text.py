"""A comparison of two runs for people: inputs, where the time went, what was found and copied, requests,
layers, and where decisions part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sim.base.errors import one_line
from sim.base.quantities import show_figure as show_hardware
from sim.base.tables import fold, lines, tabled
from sim.base.units import show_change, show_count, show_frac, show_value
from sim.engine.counts import CLASSES
from sim.figures import values_of
from sim.results.figure import label_of, unit_of
from sim.setup.naming import show
from sim.studies.diff.answer import DOING, missed
from sim.studies.diff.times import BY_PHASE
from sim.studies.hosts import Machine, unlike_hosts
from sim.workload.slo import slo_text

if TYPE_CHECKING:
    from sim.studies.diff.decisions import Decision, Made
    from sim.studies.diff.diff import Diff
    from sim.studies.diff.side import Side

TOP = 5
LEAST_SHARE = 0.005  # of a run's time: figures on which less rests are counted, not listed
_SHORT = 12  # of a digest
BESIDE = ("A", "B", "B - A")
LOAD = (
    *("load.arrivals_per_s", "load.capacity_per_s", "load.requests_in_system", "load.requests_waiting"),
    *("queue_s.mean", "queue_s.p95", "service_s.mean", "service_s.p95"),
)
PROMISED = ("slo.attained_frac", "slo.goodput_requests_per_s", "slo.goodput_tokens_per_s")
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
    sides = (("A", found.a), ("B", found.b))
    told = [row for name, one in sides for row in ((name, one.result.name), *(("", note) for note in one.notes))]
    blocks = [lines(told), _inputs(found)]
    if not found.equal:
        blocks += [_times(found), _load(found), _figures(found), _alone(found), _requests(found, top)]
        blocks += [_layers(found, top), _first(found)]
    return "\n".join(block for block in blocks if block)


def _inputs(found: Diff) -> str:
    shown = [one for one in found.input_rows if not _said_otherwise(one.key, found)]
    if not shown and not found.machine_rows:
        if found.equal:
            return ""
        return fold("no input differs: what decides the figures has changed in the code, or in what replays it") + "\n"
    shares = {one.key: max(_rests_on(side, one.key) for side in (found.a, found.b)) for one in found.machine_rows}
    weighty = sorted(found.machine_rows, key=lambda one: -shares[one.key])
    weighty = [one for one in weighty if shares[one.key] >= LEAST_SHARE]
    rows = [(one.key, *(_value(one.key, value) for value in (one.a, one.b))) for one in (*shown, *weighty)]
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
    if key.startswith(("hw.", "model.", "engine.")) and isinstance(value, int | float) and not isinstance(value, bool):
        return show_hardware(key, value)
    text = one_line(show(key, value))
    return text[:_SHORT] if key.endswith("sha256") else text


def _times(found: Diff) -> str:
    """Both means with their parts."""
    times = {label_of(f"{key}.mean"): one for key, one in found.times.items() if one.difference_s is not None}
    if not times:
        return ""
    parts = [{one.part: _beside(one.a_s, one.b_s, "s") for one in time.parts} for time in times.values()]
    rows = [
        (DOING[name], *(cell for one in parts for cell in one.get(name, ("", "", ""))))
        for name in dict.fromkeys(name for one in parts for name in one)
    ]
    rows = [row for row in rows if set(row[1:]) - {"0 ns", "0", ""}]
    rows.append(("mean", *(cell for time in times.values() for cell in _beside(time.a_s, time.b_s, "s"))))
    said = [f"{name} is not cut into parts: {time.reason}\n" for name, time in times.items() if time.reason]
    said += [
        f"{name}: its parts are the shares of the whole phase, as recorded\n"
        for name, time in times.items()
        if time.basis == BY_PHASE
    ]
    titles = [title for name in times for title in (f"{name} A", *BESIDE[1:])]
    return tabled(("where the time went", *titles), rows) + fold("".join(said))


def _beside(a: float | None, b: float | None, unit: str) -> tuple[str, str, str]:
    """A figure of A, of B, and B less A."""
    return show_value(a, unit), show_value(b, unit), show_change(a, b, unit)


def _load(found: Diff) -> str:
    """How requests fare over time, which keep what was promised, and why others do not; nothing without arrivals and
    SLO."""
    a, b, loads = found.a.facts, found.b.facts, [side.result.load for side in (found.a, found.b)]
    promised = [key for key in dict.fromkeys([*a, *b]) if key.startswith("slo.")]
    broken = [key for key in promised if key.startswith("slo.violations.") and (a.get(key) or b.get(key))]
    tasks = [key for key in promised if key.startswith("slo.tasks.") and key.endswith(".attained_frac")]
    names = {key: label_of(key) for key in (*(LOAD if any(loads) else ()), *PROMISED, *broken)}
    names |= {key: f"{label_of(key)}, {key.split('.')[2] or 'no task'}" for key in tasks if len(tasks) > 1}
    rows = [
        (f"{name}, per second" if key.endswith("_per_s") else name, *_beside(a.get(key), b.get(key), unit_of(key)))
        for key, name in names.items()
        if not (a.get(key) is b.get(key) is None) and not (key in tasks and a.get(key) == b.get(key))
    ]
    grows = [which for which, one in zip("AB", loads, strict=True) if one is not None and not one.stable]
    notes = "".join(f"the queue of {which} grows\n" for which in grows)
    return tabled(("requests over time", *BESIDE), rows) + notes if rows else ""


def _figures(found: Diff) -> str:
    a, b = found.a, found.b
    n_a, n_b = max(1, a.result.n_outputs), max(1, b.result.n_outputs)
    alike = n_a == n_b
    prefetches = (f"prefetch.{fate}.n" for fate in values_of(a.result.prefetch))
    rows = [
        (label_of(key), *_beside(a.facts[key], b.facts[key], "frac"))
        for key in (f"{name}_rate" for name in CLASSES)
        if a.facts[key] or b.facts[key]
    ]
    rows += [(missed(one.reason), *_beside(one.a, one.b, "frac")) for one in found.misses]
    for key in ("demand_copies.n", *prefetches, "h2d_bytes"):
        own, other = a.facts[key] or 0, b.facts[key] or 0
        if own or other or key == "demand_copies.n":
            per = (own, other) if alike else (own / n_a, other / n_b)
            rows.append((label_of(key) + ("" if alike else " per token"), *_beside(*per, unit_of(key))))
    own, other = (sum(side.result.cache_capacity_bytes) for side in (a, b))
    rows.append(("cache capacity", *_beside(own, other, "bytes")))
    rows.append((label_of("peak_vram_bytes"), *_beside(a.result.peak_vram_bytes, b.result.peak_vram_bytes, "bytes")))
    return tabled(("experts and copies", *BESIDE), rows)


def _alone(found: Diff) -> str:
    if not found.alone_rows:
        return ""
    base_s, told = found.a.result.tpot_s.mean, found.b.result
    every = [
        (one.input, f"{one.value}: {one.reason}" if one.reason else one.value, one.tpot_s, one.hit_rate)
        for one in found.alone_rows
    ]
    every.append(("all of them", "B", told.tpot_s.mean, told.hit_rate))
    rows = [
        (name, one_line(value), show_value(tpot_s, "s"), show_change(base_s, tpot_s, "s") or "-", show_frac(hit_rate))
        for name, value, tpot_s, hit_rate in every
    ]
    return tabled(("A with this of B alone", "value", "TPOT", "change", "hit rate"), rows, words=(1,))


def _requests(found: Diff, top: int) -> str:
    if not found.request_rows:
        return ""
    time, n, rows = found.times["tpot_s"], len(found.request_rows), []
    for one in found.request_rows[:top]:
        a, b = (one.ttft_a_s, one.ttft_b_s) if one.tpot_a_s is None else (one.tpot_a_s, one.tpot_b_s or 0.0)
        lengths = show_value(one.prompt_tokens), show_value(one.output_tokens)
        mostly = "-" if one.largest_part is None else _mostly(one.largest_part_s or 0.0, DOING[one.largest_part])
        rows.append((str(one.request), one_line(one.task) or "-", *lengths, *_beside(a, b, "s"), mostly))
    said = f"{show_count(n, 'request')} paired" + (f", the {top} that differ most" if n > top else "")
    if time.interval is not None:
        mean, low, high = (show_change(0.0, end, "s") for end in (time.difference_s, *time.interval))
        said += f"; mean B - A {mean}, {low} to {high} for the choice of requests (95 %)"
    titles = ("request", "task", "prompt", "outputs", "TPOT A", *BESIDE[1:], "mostly")
    return f"{tabled(titles, rows, words=(1, 7))}{fold(said)}\n"


def _mostly(difference_s: float, what: str) -> str:
    return f"{show_change(0.0, difference_s, 's')} {what}"


def _layers(found: Diff, top: int) -> str:
    """Layers by what GPU 0 waited for in them."""
    every = found.layer_waits
    if not every:
        return ""
    rows = []
    for one in every[:top]:
        waited = "waiting for other GPUs" if one.largest == "gpu" else DOING[one.largest]
        misses = show_value(one.misses_a), show_value(one.misses_b)
        rows.append((str(one.layer), *_beside(one.a_s, one.b_s, "s"), *misses, _mostly(one.largest_s, waited)))
    said = "waits are per iteration"
    if len(every) > top:
        less_s = math.fsum(one.difference_s for one in every[top:])
        said += f"; {show_count(len(every) - top, 'further layer')} together: {show_change(0.0, less_s, 's')}"
    titles = ("layer", "waits of decode A", *BESIDE[1:], "misses A", "B", "mostly")
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


def _said(one: Decision) -> str:
    return f"{_VERBS.get(one.kind, one_line(str(one.kind)))} layer {one.layer} expert {one.expert}"


def _uses(made: Made) -> str:
    before = "not used before" if made.used_before is None else f"last used in iteration {made.used_before}"
    after = "not used again" if made.used_next is None else f"next in iteration {made.used_next}"
    return f" ({before}, {after})"
