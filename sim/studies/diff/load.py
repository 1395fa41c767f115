"""What changed for requests over time: how they queued, which kept what was promised, and why others did not.

A run without arrivals has no load, and one without an SLO promises nothing: then there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from sim.base.tables import render, table
from sim.base.units import show_frac, show_number, show_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from sim.figures import SloAttainment, Statistic
    from sim.studies.diff.told import Told

Show = Callable[[float], str]
LEAST = 1e-12  # of a figure: smaller differences are rounding


def load(a: Told, b: Told) -> str:
    """The figures of both runs beside one another."""
    if a.load is None and b.load is None and a.slo is None and b.slo is None:
        return ""
    rows = table("requests over time", "A", "B", "B - A")
    if a.load is not None or b.load is not None:
        _loads(rows, a, b)
    if a.slo is not None or b.slo is not None:
        _promises(rows, a.slo, b.slo)
    return render(rows)


def in_short(a: Told, b: Told, same_slo: bool) -> list[str]:
    """The same in a few words: how long requests wait in the queue, and how many keep what both promise alike."""
    said = []
    own, other = (None if one.load is None else _of(one.queue_s, "mean") for one in (a, b))
    if own is not None and other is not None and abs(other - own) > LEAST * max(own, other):
        said.append(f"requests wait {show_seconds(other)} in the queue against {show_seconds(own)}")
    if a.slo is not None and b.slo is not None and same_slo and a.slo.attained_frac != b.slo.attained_frac:
        said.append(f"{show_frac(b.slo.attained_frac)} keep their SLO against {show_frac(a.slo.attained_frac)}")
    return said


def _loads(rows: Table, a: Told, b: Told) -> None:
    for name, key, show in (
        ("arrive per second", "arrivals_per_s", _plain),
        ("served per second while some wait", "capacity_per_s", _plain),
        ("requests there on average", "requests_in_system", _plain),
        ("of them waiting", "requests_waiting", _plain),
    ):
        own, other = (None if one.load is None else getattr(one.load, key) for one in (a, b))
        _add(rows, name, own, other, show)
    if not all(one.load is None or one.load.stable for one in (a, b)):
        rows.add_row("queue", *("-" if one.load is None else _grows(one.load.stable) for one in (a, b)), "")
    for name, times in (("queue", (a.queue_s, b.queue_s)), ("service to the first token", (a.service_s, b.service_s))):
        for which in ("mean", "p95"):
            own, other = (_of(time, which) for time in times)
            _add(rows, f"{name}, {which}", own, other, show_seconds)


def _promises(rows: Table, a: SloAttainment | None, b: SloAttainment | None) -> None:
    _add(rows, "keep their SLO", _frac(a), _frac(b), show_frac)
    for name, key in (("requests", "slo.goodput_requests_per_s"), ("tokens", "slo.goodput_tokens_per_s")):
        own, other = (None if one is None else getattr(one, key) for one in (a, b))
        _add(rows, f"goodput, {name} per second", own, other, _plain)
    causes = [{} if one is None else structs.asdict(one.violations) for one in (a, b)]
    for cause in dict.fromkeys([*causes[0], *causes[1]]):
        own, other = (one.get(cause) for one in causes)
        if own or other:
            _add(rows, f"broken for {cause}", own, other, _plain)
    tasks = [{} if one is None else one.tasks for one in (a, b)]
    every = list(dict.fromkeys([*tasks[0], *tasks[1]]))
    for task in every if len(every) > 1 else []:
        own, other = (one[task].attained_frac if task in one else None for one in tasks)
        if own != other:
            _add(rows, f"{task or 'no task'} keeps", own, other, show_frac)


def _add(rows: Table, name: str, a: float | None, b: float | None, show: Show) -> None:
    if a is None and b is None:
        return
    shown = ["-" if one is None else show(one) for one in (a, b)]
    rows.add_row(name, *shown, "" if a is None or b is None else _change(a, b, show))


def _change(a: float, b: float, show: Show) -> str:
    if abs(b - a) <= LEAST * max(abs(a), abs(b)):
        return "0"
    if show is show_frac:
        return f"{100 * (b - a):+.1f} points"
    return f"{'+' if b > a else ''}{show(b - a)}"


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else show_number(value)


def _grows(stable: bool) -> str:
    return "stable" if stable else "grows"


def _of(time: Statistic | None, which: str) -> float | None:
    found: float | None = None if time is None else getattr(time, which)
    return found


def _frac(one: SloAttainment | None) -> float | None:
    return None if one is None else one.attained_frac
