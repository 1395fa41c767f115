"""The line of a run's scheduler: what it is, what it went by, what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.units import show_seconds

if TYPE_CHECKING:
    from sim.figures import Scheduling


def scheduler_line(scheduling: Scheduling) -> str:
    """`emoe_slo: token 22.1 ms; loading chat 1.2 s, code 900 ms; held back 12`."""
    file = scheduling.file
    who = scheduling.name + (f" of {file.name}, sha256 {file.sha256[:12]}" if file else "")
    told = "; ".join(_said(name, value) for name, value in scheduling.stats.items() if value is not None)
    return f"{who}: {told}" if told else who


def _said(name: str, value: Any) -> str:
    """A figure under its name, whose ending is its unit: seconds, or a number."""
    words = name.removesuffix("_s").removesuffix("_n").replace("_", " ")
    if isinstance(value, dict):
        return f"{words} " + ", ".join(f"{key} {_figure(name, one)}" for key, one in value.items())
    return f"{words} {_figure(name, value)}"


def _figure(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return show_seconds(value) if name.endswith("_s") else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
