"""A comparison of two runs for people: inputs, where the time went, what was found and copied, requests, layers, and
where decisions part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sim.base.errors import one_line
from sim.base.tables import fold, plain, prose, table
from sim.base.tables import render as drawn
from sim.base.units import show_bytes, show_count, show_frac, show_seconds
from sim.engine.counts import CLASSES
from sim.results.grounds import show_figure as show_hardware
from sim.setup.naming import show
from sim.studies.diff.answer import doing, miss, named_time
from sim.studies.diff.inputs import rests_on
from sim.studies.diff.load import load
from sim.studies.diff.times import BY_PHASE
from sim.studies.hosts import Machine, unlike_hosts
from sim.workload.slo import slo_text

if TYPE_CHECKING:
    from rich.table import Table

    from sim.studies.diff.decisions import Made
    from sim.studies.diff.diff import Diff
    from sim.studies.diff.side import Side
    from sim.studies.diff.tables import Decision
    from sim.studies.diff.times import Difference

TOP = 5
LEAST_S = 0.5e-9  # what is told apart: a nanosecond
LEAST_SHARE = 0.005  # of a run's time: figures on which less rests are counted, not listed
_SHORT = 12  # of a digest


def hosts_line(found: Diff) -> str:
    """Where the two cards come with unlike hosts, what says so."""
    return unlike_hosts(Machine(side.told.hw, side.told.overrides) for side in (found.a, found.b))


def render(found: Diff, top: int = TOP) -> str:
    """All of it but the first line."""
    blocks = [_sides(found), _inputs(found)]
    if not found.equal:
        blocks += [
            _times(found),
            load(found.a.told, found.b.told),
            _figures(found),
            _alone(found),
            _requests(found, top),
            _layers(found, top),
        ]
        blocks.append(_first(found))
    return "\n".join(block for block in blocks if block)


def _sides(found: Diff) -> str:
    rows = plain("", "", numbers=False)
    for which, side in (("A", found.a), ("B", found.b)):
        rows.add_row(which, one_line(side.told.name))
        for note in side.notes:
            rows.add_row("", one_line(note))
    return drawn(rows)


def _inputs(found: Diff) -> str:
    shown = [one for one in found.input_rows if not _said_otherwise(one.key, found)]
    if not shown and not found.machine_rows:
        if found.equal:
            return ""
        return fold("no input differs: what decides the figures has changed in the code, or in what replays it") + "\n"
    rows = table("input", "A", "B", numbers=False)
    for one in shown:
        rows.add_row(one.key, _value(one.key, one.a), _value(one.key, one.b))
    figures = sorted(found.machine_rows, key=lambda one: -max(rests_on(found.a, one.key), rests_on(found.b, one.key)))
    weighty = [one for one in figures if max(rests_on(found.a, one.key), rests_on(found.b, one.key)) >= LEAST_SHARE]
    for one in weighty:
        rows.add_row(one.key, _figure(one.key, one.a), _figure(one.key, one.b))
    less = len(figures) - len(weighty)
    more = f"and {show_count(less, 'figure')} of machine, model or stack on which little time rests\n" if less else ""
    return drawn(rows) + fold(more)


def _said_otherwise(key: str, found: Diff) -> bool:
    """Parameters of two policies are not the same ones; a digest says no more than names or figures that differ."""
    if key.startswith("params."):
        return found.a.told.policy != found.b.told.policy
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
    if isinstance(value, int | float) and not isinstance(value, bool):
        return show_hardware(key, value)
    return _value(key, value)


def _times(found: Diff) -> str:
    """Both means with their parts."""
    times = [time for time in (found.tpot, found.ttft) if time.a_s is not None and time.b_s is not None]
    if not times:
        return ""
    titles = [title for time in times for title in (f"{named_time(time.time)} A", "B", "B - A")]
    rows = table("where the time went", *titles)
    for name in dict.fromkeys(part.part for time in times for part in time.parts):
        cells = [cell for time in times for cell in _cells(time, name)]
        if any(cell not in ("0 ns", "0", "") for cell in cells):
            rows.add_row(doing(name), *cells)
    sums = [(show_seconds(t.a_s or 0.0), show_seconds(t.b_s or 0.0), _signed(t.difference_s or 0.0)) for t in times]
    rows.add_row("mean", *(cell for one in sums for cell in one))
    return drawn(rows) + "".join(_basis(time) for time in times)


def _cells(time: Difference, name: str) -> tuple[str, str, str]:
    part = next((one for one in time.parts if one.part == name), None)
    if part is None:
        return "", "", ""
    return show_seconds(part.a_s), show_seconds(part.b_s), _signed(part.difference_s)


def _basis(time: Difference) -> str:
    if time.reason:
        return fold(f"{named_time(time.time)} is not cut into parts: {time.reason}") + "\n"
    if time.basis == BY_PHASE:
        return fold(f"{named_time(time.time)}: its parts are the shares of the whole phase, as recorded") + "\n"
    return ""


def _signed(duration_s: float) -> str:
    return "0" if abs(duration_s) < LEAST_S else f"{'+' if duration_s > 0 else ''}{show_seconds(duration_s)}"


def _figures(found: Diff) -> str:
    a, b = found.a.told, found.b.told
    rows = table("experts and copies", "A", "B", "B - A")
    rates = a.hit_rates.by_class(), b.hit_rates.by_class()
    for name in CLASSES:
        own, other = rates[0][name], rates[1][name]
        if own or other:
            change = "" if own is None or other is None else _points(other - own)
            rows.add_row(name.replace("_", " "), show_frac(own), show_frac(other), change)
    for one in found.misses:
        rows.add_row(miss(one.reason), show_frac(one.a), show_frac(one.b), _points(one.b - one.a))
    per = (1, 1) if a.n_outputs == b.n_outputs else (a.n_outputs, b.n_outputs)
    _add(rows, "copies on demand", a.demand_copies.n, b.demand_copies.n, per)
    fates = a.prefetch.by_fate(), b.prefetch.by_fate()
    for fate in fates[0]:
        if fates[0][fate].n or fates[1][fate].n:
            _add(rows, f"prefetches {fate}", fates[0][fate].n, fates[1][fate].n, per)
    _add_bytes(rows, "to the GPU per token", _per_token(found.a), _per_token(found.b))
    _add_bytes(rows, "room for experts", sum(a.cache_capacity_bytes), sum(b.cache_capacity_bytes))
    _add_bytes(rows, "peak VRAM", a.peak_vram_bytes, b.peak_vram_bytes)
    return drawn(rows)


def _points(difference: float) -> str:
    points = 100 * difference
    return "0" if not points else f"{points:+.1f} points" if abs(points) >= 0.05 else f"{points:+.1g} points"


def _per_token(side: Side) -> float:
    return side.told.h2d_bytes / side.told.n_outputs if side.told.n_outputs else 0.0


def _add(rows: Table, name: str, a: float, b: float, per: tuple[int, int]) -> None:
    """A row of counts; per output token, where the runs put out different numbers of them."""
    if per == (1, 1):
        rows.add_row(name, f"{a:,}", f"{b:,}", f"{b - a:+,}" if b != a else "0")
        return
    own, other = (n / tokens if tokens else 0.0 for n, tokens in zip((a, b), per, strict=True))
    rows.add_row(f"{name} per token", f"{own:.2f}", f"{other:.2f}", f"{other - own:+.2f}" if own != other else "0")


def _add_bytes(rows: Table, name: str, a: float, b: float) -> None:
    rows.add_row(name, show_bytes(a), show_bytes(b), f"{'+' if b > a else ''}{show_bytes(b - a)}" if a != b else "0")


def _alone(found: Diff) -> str:
    if not found.alone_rows:
        return ""
    rows = table("A with this of B alone", "value", "TPOT", "change", "hit rate", numbers=True)
    prose(rows, 1)
    base_s = found.a.told.tpot_s.mean
    for one in found.alone_rows:
        if one.reason:
            rows.add_row(one.input, f"{one_line(one.value)}: {one_line(one.reason)}", "-", "-", "-")
            continue
        change = "-" if one.tpot_s is None or base_s is None else _signed(one.tpot_s - base_s)
        tpot = "-" if one.tpot_s is None else show_seconds(one.tpot_s)
        rows.add_row(one.input, one_line(one.value), tpot, change, show_frac(one.hit_rate))
    told = found.b.told
    if told.tpot_s.mean is not None and base_s is not None:
        whole = (show_seconds(told.tpot_s.mean), _signed(told.tpot_s.mean - base_s), show_frac(told.hit_rate))
        rows.add_row("all of them", "B", *whole)
    return drawn(rows)


def _requests(found: Diff, top: int) -> str:
    if not found.request_rows:
        return ""
    time, n = found.tpot, len(found.request_rows)
    rows = table("request", "task", "prompt", "outputs", "TPOT A", "B", "B - A", "mostly")
    prose(rows, 1, 7)
    for one in found.request_rows[:top]:
        a, b = (one.ttft_a_s, one.ttft_b_s) if one.tpot_a_s is None else (one.tpot_a_s, one.tpot_b_s or 0.0)
        mostly = "-" if one.largest_part is None else f"{_signed(one.largest_part_s or 0.0)} {doing(one.largest_part)}"
        lengths = ["-" if n is None else f"{n:,}" for n in (one.prompt_tokens, one.output_tokens)]
        cells = (show_seconds(a), show_seconds(b), _signed(one.difference_s), mostly)
        rows.add_row(str(one.request), one_line(one.task) or "-", *lengths, *cells)
    said = f"{show_count(n, 'request')} paired" + (f", the {top} that differ most" if n > top else "")
    if time.interval is not None:
        low, high = (_signed(end) for end in time.interval)
        said += f"; mean B - A {_signed(time.difference_s or 0.0)}, {low} to {high} for the choice of requests (95 %)"
    return f"{drawn(rows)}{fold(said)}\n"


def _layers(found: Diff, top: int) -> str:
    """Layers by what GPU 0 waited for in them; by copies on demand, where that is not recorded."""
    every = found.layer_waits
    if not every:
        return _layers_by_copies(found, top)
    rows = table("layer", "waits of decode A", "B", "B - A", "misses A", "B", "mostly")
    prose(rows, 6)
    for one in every[:top]:
        counts = ["-" if n is None else f"{n:,}" for n in (one.misses_a, one.misses_b)]
        mostly = f"{_signed(one.largest_s)} {_KINDS.get(one.largest, one.largest)}"
        waits = (show_seconds(one.a_s), show_seconds(one.b_s), _signed(one.difference_s))
        rows.add_row(str(one.layer), *waits, *counts, mostly)
    less_s = math.fsum(one.difference_s for one in every[top:])
    said = "waits are per iteration"
    if len(every) > top:
        said += f"; {show_count(len(every) - top, 'further layer')} together: {_signed(less_s)}"
    return drawn(rows) + fold(said) + "\n"


def _layers_by_copies(found: Diff, top: int) -> str:
    chosen = [one for one in found.layer_rows if one.key == "demand_copies_n" and one.phase == "decode"]
    if not chosen:
        return ""
    tokens = found.a.told.decode_tokens, found.b.told.decode_tokens
    per = (1, 1) if tokens[0] == tokens[1] else tokens
    ordered = sorted(chosen, key=lambda one: (-abs(one.b / per[1] - one.a / per[0]), one.layer))
    rows = table("layer", "copies on demand A", "B", "B - A")
    for one in ordered[:top]:
        _add(rows, str(one.layer), one.a, one.b, per)
    return drawn(rows) + "as decisions tell, in decode\n"


def _first(found: Diff) -> str:
    if found.not_compared:
        return fold(f"decisions are not compared: {found.not_compared}") + "\n"
    first = found.first
    if first is None:
        return fold("every decision is the same; what differs is what they cost") + "\n"
    whose = "" if first.request is None else f" of request {first.request}"
    made = first.a or first.b
    assert made is not None
    phase = "" if first.phase is None else f" ({first.phase}{whose})"
    head = f"first decision that differs: number {first.at:,}, in iteration {made.decision.iteration}{phase}"
    rows = plain("", "", numbers=False)
    for one in first.before:
        rows.add_row("both", _said(one))
    for which, made, then in (("A", first.a, first.then_a), ("B", first.b, first.then_b)):
        rows.add_row(which, "decides nothing more" if made is None else _said(made.decision) + _uses(made))
        for one in then:
            rows.add_row("", _said(one))
    return fold(head) + "\n" + drawn(rows)


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


def _said(one: Decision) -> str:
    return f"{_VERBS.get(one.kind, one_line(str(one.kind)))} layer {one.layer} expert {one.expert}"


def _uses(made: Made) -> str:
    before = "not used before" if made.used_before is None else f"last used in iteration {made.used_before}"
    after = "not used again" if made.used_next is None else f"next in iteration {made.used_next}"
    return f" ({before}, {after})"
