"""The lanes of a run over some iterations: every piece of work as a bar, copies joined to the experts they delayed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.lanes import LANES
from sim.base.units import show_bytes, show_count, show_seconds
from sim.pages.page import Plot, Section
from sim.pages.plots import COLOURS, Trace, axis

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.pages.inputs import Run

MOST_SPANS = 3_000  # a browser moves and zooms that many without delay
COLUMNS = ["lane", "op", "layer", "expert", "n_tokens", "n_bytes", "start_s", "end_s"]
KINDS = (
    ("copy on demand", 1),
    ("prefetch", 4),
    ("other copy", 5),
    ("expert", 0),
    ("attention, gate and the like", 2),
    ("launch or wait of the host", 6),
    ("prediction", 3),
)


@dataclass(frozen=True)
class Window:
    """Which iterations are shown: from one on, so many; None: from the first of decode."""

    first: int | None = None
    n: int = 2


def lanes(run: Run, window: Window) -> Section:
    """The section; without kept spans it says how to have them."""
    title, name = "What each lane did", "lanes"
    if not run.has("spans") or not run.has("iterations"):
        return Section(
            name, title, "The run kept no spans: simulate with `--out DIR --set out.spans=on` to see its lanes here."
        )
    if run.result.replicas is not None:
        return Section(name, title, "Of several replicas, `--timeline FILE` draws the lanes: one process for each.")
    steps = run.table("iterations", ["iteration", "phase", "start_s", "end_s"])
    first = _first(steps, window)
    left_s = float(steps["start_s"][first])
    last = min(first + window.n, len(steps)) - 1
    spans = _between(run, left_s, float(steps["end_s"][last]))
    while len(spans) > MOST_SPANS and last > first:
        last = first + (last - first) // 2
        spans = spans[spans["start_s"] < float(steps["end_s"][last])]
    shown = spans.iloc[:MOST_SPANS]
    right_s = float(steps["end_s"][last])
    phases = ", ".join(dict.fromkeys(steps["phase"][first : last + 1]))
    which = f"Iteration {first:,}" if last == first else f"Iterations {first:,} to {last:,}"
    sentence = (
        f"{which} of {len(steps):,} ({phases}), {show_seconds(right_s - left_s)} from {show_seconds(left_s)} on: "
        f"{show_count(len(shown), 'piece')} of work."
    )
    plot = _plot(shown, left_s, right_s)
    if any(trace["type"] == "scatter" for trace in plot.traces):
        sentence += " A thin line joins a copy to the expert that began the moment it ended."
    left_out = []
    if last - first + 1 < min(window.n, len(steps) - first):
        left_out.append(f"iterations {last + 1:,} to {min(first + window.n, len(steps)) - 1:,}")
    if len(shown) < len(spans):
        left_out.append(f"{len(spans) - len(shown):,} pieces of the last one")
    if left_out:
        sentence += f" Left out, so that the plot stays quick: {' and '.join(left_out)}."
    sentence += " `--from N --iterations N` shows others; drag to zoom, double-click to see all."
    return Section(name, title, sentence, [plot])


def _first(steps: DataFrame, window: Window) -> int:
    if window.first is not None:
        if window.first >= len(steps):
            raise BadInput(
                f"--from, got {window.first}: the run has iterations 0 to {len(steps) - 1}; name one of them"
            )
        return window.first
    decode = steps.index[steps["phase"] == "decode"]
    # Some tokens in, so that the cache is not empty any more.
    return int(decode[min(len(decode) - 1, 16)]) if len(decode) else 0


def _between(run: Run, left_s: float, right_s: float) -> DataFrame:
    found = run.table("spans", COLUMNS, [("start_s", "<", right_s), ("end_s", ">", left_s)])
    return found.sort_values(["start_s", "end_s", "lane"], kind="stable").reset_index(drop=True)


def _plot(spans: DataFrame, left_s: float, right_s: float) -> Plot:
    order = [lane.name for lane in LANES]
    names = sorted(set(spans["lane"]), key=lambda name: (_place(order, name), name))
    rows = {name: len(names) - 1 - at for at, name in enumerate(names)}
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind, _ in KINDS}
    every: list[dict[Any, Any]] = spans.to_dict("records")
    for span in every:
        by_kind[_kind(span)].append(span)
    traces = [_bars(kind, hue, by_kind[kind], rows, left_s) for kind, hue in KINDS if by_kind[kind]]
    traces += _joins(spans, rows, left_s)
    layout = {
        "xaxis": axis("time since the first of these iterations began", "s", range=[0, right_s - left_s]),
        "yaxis": {
            "tickvals": list(rows.values()),
            "ticktext": list(rows),
            "range": [-0.6, len(names) - 0.4],
            "fixedrange": True,
            "zeroline": False,
        },
        "barmode": "overlay",
        "dragmode": "zoom",
    }
    says = "Work on every lane over time; a bar is one piece of it."
    return Plot("lanes", says, traces, layout, 150 + 54 * len(names))


def _place(order: list[str], name: str) -> int:
    base = name.rstrip("0123456789")
    return order.index(base) if base in order else len(order)


def _kind(span: dict[str, Any]) -> str:
    lane, op = str(span["lane"]).rstrip("0123456789"), str(span["op"])
    if lane in ("h2d", "d2h", "p2p_out", "p2p_in"):
        return {"prefetch": "prefetch", "demand": "copy on demand"}.get(op, "other copy")
    if lane == "host":
        return "launch or wait of the host"
    if lane == "predictor":
        return "prediction"
    return "expert" if op == "expert" else "attention, gate and the like"


def _bars(kind: str, hue: int, spans: list[dict[str, Any]], rows: dict[str, int], left_s: float) -> Trace:
    colour = COLOURS[hue]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "base": [round(span["start_s"] - left_s, 9) for span in spans],
        "x": [round(span["end_s"] - span["start_s"], 9) for span in spans],
        "y": [rows[span["lane"]] for span in spans],
        "width": 0.42 if kind == "prefetch" else 0.66,
        "marker": {"color": colour, "line": {"color": colour, "width": 1}},  # a kernel is seen, too
        "hovertext": [_told(span) for span in spans],
        "hoverinfo": "text",
    }


def _told(span: dict[str, Any]) -> str:
    where = [f"{key} {int(span[key])}" for key in ("layer", "expert") if not math.isnan(span[key])]
    size = [show_bytes(span["n_bytes"])] * (span["n_bytes"] > 0)
    return ", ".join([str(span["op"]), *where, *size, show_seconds(span["end_s"] - span["start_s"])])


def _joins(spans: DataFrame, rows: dict[str, int], left_s: float) -> list[Trace]:
    """From the end of a copy to the expert that started then, and so had waited for it."""
    copies = spans[spans["lane"].str.startswith("h2d") & spans["expert"].notna()]
    ended = {(one["layer"], one["expert"], one["end_s"]): one["lane"] for one in copies.to_dict("records")}
    xs: list[float | None] = []
    ys: list[float | None] = []
    for run in spans[spans["lane"].str.startswith("gpu") & (spans["op"] == "expert")].to_dict("records"):
        lane = ended.get((run["layer"], run["expert"], run["start_s"]))
        if lane is not None:
            at_s = round(run["start_s"] - left_s, 9)
            xs += [at_s, at_s, None]
            ys += [rows[lane], rows[run["lane"]], None]
    if not xs:
        return []
    name = f"copy that an expert waited for ({len(xs) // 3:,})"
    line = {"color": "#7F7F7F", "width": 1.5}
    return [{"type": "scatter", "mode": "lines", "name": name, "x": xs, "y": ys, "line": line, "hoverinfo": "skip"}]
