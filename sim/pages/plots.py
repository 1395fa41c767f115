"""Traces for plots: colours that colour-blind readers tell apart, and a dash, symbol or hatching beside each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sim.pages.page import Plot

# Okabe and Ito, "Color Universal Design" (2008), without yellow and black, which vanish on white or on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon")
HATCHES = ("", "/", ".", "x", "\\", "-", "+", "|")
SCALE = "Cividis"  # made to be read alike with and without colour vision deficiency

Trace = dict[str, Any]
_TICKS: dict[str, dict[str, str]] = {
    "s": {"tickformat": "~s", "ticksuffix": "s"},
    "bytes": {"tickformat": "~s", "ticksuffix": "B"},
}
_HOVER = {"s": ".3~s", "bytes": ".3~s", "frac": ".1%", "n": ",", "x": ".4~g"}
_SUFFIX = {"s": "s", "bytes": "B"}


def axis(title: str, unit: str = "", **more: Any) -> dict[str, Any]:
    """An axis whose ticks are in the unit that people use."""
    ticks = _TICKS.get(unit, {"tickformat": ".0%"} if unit == "frac" else {})
    if more.get("type") == "log" and unit in _SUFFIX:  # plotly leaves the unit out between powers of ten
        ticks, title = {"tickformat": "~s"}, f"{title} [{_SUFFIX[unit]}]"
    return {"title": {"text": title}, **ticks, **more}


def _hover(x: str, y: str, x_unit: str, y_unit: str) -> str:
    def part(letter: str, title: str, unit: str) -> str:
        form = f":{_HOVER[unit]}" if unit in _HOVER else ""
        return f"{title} %{{{letter}{form}}}{_SUFFIX.get(unit, '')}"

    return f"{part('x', x, x_unit)}<br>{part('y', y, y_unit)}"


def line(name: str, xs: Sequence[Any], ys: Sequence[Any], hue: int, *, mode: str = "lines", **more: Any) -> Trace:
    """A line of its own colour and dash."""
    colour = COLOURS[hue % len(COLOURS)]
    own = more.pop("line", {})
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": list(xs),
        "y": list(ys),
        "line": {"color": colour, "width": 2, "dash": DASHES[hue % len(DASHES)], **own},
        **({"marker": {"color": colour, "symbol": SYMBOLS[hue % len(SYMBOLS)], "size": 7}} if "mark" in mode else {}),
        **more,
    }


def points(name: str, xs: Sequence[Any], ys: Sequence[Any], hue: int, **more: Any) -> Trace:
    """Points of their own colour and symbol."""
    own = more.pop("marker", {})
    marker = {"color": COLOURS[hue % len(COLOURS)], "symbol": SYMBOLS[hue % len(SYMBOLS)], "size": 9, **own}
    found: Trace = {"type": "scatter", "mode": "markers", "name": name, "x": list(xs), "y": list(ys), "marker": marker}
    return {**found, **more}


def bars(name: str, xs: Sequence[Any], ys: Sequence[Any], hue: int, *, across: bool = False, **more: Any) -> Trace:
    """Bars of their own colour and hatching; `across`: lying, with `xs` for names."""
    along, names = ("x", "y") if across else ("y", "x")
    marker = {
        "color": COLOURS[hue % len(COLOURS)],
        "pattern": {"shape": HATCHES[hue % len(HATCHES)], "fillmode": "overlay", "size": 7, "solidity": 0.18},
    }
    found: Trace = {"type": "bar", "name": name, names: list(xs), along: list(ys), "marker": marker}
    return {**found, **({"orientation": "h"} if across else {}), **more}


def said(x: str, y: str, x_unit: str = "", y_unit: str = "", name: bool = True) -> dict[str, str]:
    """What is shown of a point under the cursor; `name`: with its trace's."""
    return {"hovertemplate": _hover(x, y, x_unit, y_unit) + ("" if name else "<extra></extra>")}


def distribution(name: str, values: Iterable[float], hue: int, **more: Any) -> Trace:
    """The share of values up to each: every value is a step."""
    xs = sorted(values)
    return line(name, [*xs[:1], *xs], [at / len(xs) for at in range(len(xs) + 1)], hue, line={"shape": "hv"}, **more)


def against_memory(
    time: str, lines: Mapping[str, Sequence[tuple[float, float]]], best: Sequence[tuple[float, float]]
) -> Plot:
    """A time against peak VRAM.

    Args:
        time: its title. lines: name -> (memory, time) of runs that belong together. best: of those that none beats in
            both, least memory first.
    """
    style = {"shape": "hv", "color": "#7F7F7F", "width": 7, "dash": "solid"}
    front = line("Pareto front", [at for at, _ in best], [s for _, s in best], 6, line=style, opacity=0.35)
    traces = [{**front, "hoverinfo": "skip"}] if len(best) > 1 else []
    for hue, (name, found) in enumerate(lines.items()):
        found = sorted(found)
        traces.append(line(name, [at for at, _ in found], [s for _, s in found], hue, mode="lines+markers"))
    layout = {"xaxis": axis("peak VRAM", "bytes"), "yaxis": axis(time, "s", rangemode="tozero")}
    return Plot("pareto", f"{time} against peak VRAM; down and to the left is better.", traces, layout, 420)
