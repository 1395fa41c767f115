"""Miss-ratio curves: what share of the experts is not there, for every size of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.errors import MoesimError
from sim.base.files import to_struct
from sim.base.units import show_bytes, show_frac
from sim.options import RunSpec
from sim.pages.page import Plot, Section
from sim.pages.plots import axis, line, points
from sim.setup.config_file import read_spec
from sim.studies.curve import ANY_HW, curve_of

if TYPE_CHECKING:
    from sim.pages.inputs import Run
    from sim.studies.curve import Curve

MOST_TOKENS = 20_000  # of output, up to which they are passed through once more
BACK_TO_BACK = "back to back"
LAYOUT = {
    "xaxis": axis("room, as a share of all experts", "frac", range=[0, 1.02]),
    "yaxis": axis("experts not there when asked for", "frac", range=[0, 1.02]),
}


def caches_of(run: Run, policies: Sequence[str]) -> list[Curve] | str:
    """Curves of plain caches (`NAME KEY=VALUE`) on a run's requests, or why there are none."""
    if run.config is None:
        return "A run kept with `--out DIR` is held against plain caches of every size here."
    tokens = run.result.n_outputs
    if tokens > MOST_TOKENS:
        return (
            f"Left out: {tokens:,} output tokens are more than the {MOST_TOKENS:,} up to which they are passed through "
            "once more here; `moesim curve` counts them."
        )
    if run.result.arrivals != BACK_TO_BACK:
        return (
            "Left out: requests arrive over time, and what runs together, which decides hits, depends on the machine."
        )
    found = []
    try:
        asked = to_struct(read_spec(run.config)[0], RunSpec, str(run.config))
        workload = {
            name: getattr(asked, name) for name in ("model", "trace", "precision", "batch", "split", "requests")
        }
        shape = {key: value for key, value in asked.set.items() if key.startswith("model.")}
        for label in policies:
            name, *own = label.split()
            params = dict(pair.split("=", 1) for pair in own)
            curve = curve_of(label, RunSpec(policy=name, hw=ANY_HW, set={**shape, **params}, **workload))
            if curve.meant["trace_sha256"] != run.result.trace_sha256:
                return f"Left out: the trace {run.result.trace} is another by now than the run's."
            found.append(curve)
    except MoesimError as error:
        return f"Left out: {error}."
    return found


def plot_of(curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], name: str = "misses") -> Plot:
    """(title, shares of room, hit rates) as misses by room."""
    traces = [
        line(title, list(room), [1 - hit for hit in hits], at, hoverinfo="x+y+name")
        for at, (title, room, hits) in enumerate(curves)
    ]
    return Plot(name, "Share of experts asked for that were not there, by room.", traces, LAYOUT, 380)


def miss_ratio(run: Run, curves: list[Curve] | str) -> Section:
    """Caches on the same requests, and where this run lies."""
    result = run.result
    title, name = "Misses by room", "misses"
    if isinstance(curves, str):
        return Section(name, title, curves)
    shown = []
    for curve in curves:
        every = range(curve.least, curve.n_experts + 1)
        rated = [(n / curve.n_experts, rate) for n in every if (rate := curve.rate(n)) is not None]
        shown.append((curve.label, [room for room, _ in rated], [rate for _, rate in rated]))
    plot = plot_of(shown)
    n_all, budget = result.shape.layers * result.shape.experts, sum(result.cache_capacity_bytes)
    room = budget / result.expert_bytes / n_all
    sentence = "Of a plain cache on the same requests in decode, for every size, counted in one pass over the trace."
    if result.hit_definition == "gate" and result.hit_rate is not None:
        mark = {"size": 13, "line": {"width": 2}}
        plot.traces = [*plot.traces, points(f"this run, {run.label}", [room], [1 - result.hit_rate], 1, marker=mark)]
        sentence += (
            f" This run has room for {show_frac(room)} of all experts ({show_bytes(budget)}) and misses "
            f"{show_frac(1 - result.hit_rate)}, late hits among them."
        )
    return Section(name, title, sentence, [plot])
