"""Hits, misses and waits layer by layer, and expert by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.errors import BadInput
from sim.engine.counts import CLASSES
from sim.pages.inputs import whose
from sim.pages.page import Block, Column, Note, Plot, Section, Table
from sim.pages.plots import SCALE, Trace, axis, bars, line

if TYPE_CHECKING:
    from sim.pages.inputs import Run

MISSES = {
    "miss_cold_n": "cold: not on a GPU before",
    "miss_capacity_n": "capacity: evicted in an earlier pass",
    "miss_evicted_unused_n": "evicted before its use in this pass",
    "miss_wrong_prediction_n": "others of the layer were predicted",
    "miss_too_late_n": "predicted, its copy not begun",
}
WAITS = {
    "wait_demand_s": "copies on demand",
    "wait_prefetch_s": "prefetches that came late",
    "wait_host_s": "the host",
    "wait_cpu_s": "experts on the CPU",
    "wait_predictor_s": "the predictor",
    "wait_gpu_s": "other GPUs",
}
COPIES = ("demand_copies_n", "prefetch_issued_n", "evict_n")
MOST_CELLS = 40_000  # of a heat map

Row = dict[str, Any]


def by_layer(runs: Sequence[Run]) -> list[Section]:
    """Sections; none where no run tells its layers apart, as those of older versions do not."""
    found = [(run, rows) for run in runs if (rows := _rows(run))]
    if not found:
        return []
    if len(runs) > 1:
        return [_compared(found)]
    run, rows = found[0]
    return [_found(rows), _experts(run), _waits(run, rows)]


def _rows(run: Run) -> list[Row]:
    """Raises BadInput for rows that are no such table."""
    kind = list[dict[str, str | int | float | None]]
    try:
        rows: list[Row] = msgspec.convert(run.result.by_layer, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"{run.label}: by_layer: {error}; simulate again with this version") from None
    need = ("layer", "asked_n", *(f"{name}_n" for name in CLASSES), *MISSES, *WAITS, *COPIES)
    for row in rows:
        for name in need:
            if not isinstance(row.get(name), int | float):
                raise BadInput(f"{run.label}: by_layer, got a row without {name}: simulate again with this version")
    return rows


def _phase(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Decode where there is one: it is what most of a run is. Else tokens decoded beside prompts, else prompts."""
    for phase in ("decode", "mixed"):
        found = [row for row in rows if row.get("phase") == phase]
        if found:
            return phase, found
    return "prefill", list(rows)


def _share(n: float, of: float) -> float | None:
    return n / of if of else None


def _stacked(rows: Sequence[Row], names: dict[str, str], of: str = "") -> list[Trace]:
    layers = [row["layer"] for row in rows]
    hues = {name: at for at, name in enumerate(names)}
    return [
        bars(title, layers, [_share(row[name], row[of]) if of else row[name] for row in rows], hues[name])
        for name, title in names.items()
        if any(row[name] for row in rows)
    ]


def _found(rows: Sequence[Row]) -> Section:
    """How experts were found, and why not."""
    phase, shown = _phase(rows)
    classes = {f"{name}_n": name.replace("_", " ") for name in CLASSES}
    layer = axis("MoE layer")
    layout = {"barmode": "stack", "bargap": 0.08, "xaxis": layer}
    shares = {**layout, "yaxis": axis(f"share of experts asked for, {phase}", "frac", range=[0, 1])}
    blocks: list[Block] = [
        Plot(
            "layers",
            f"How experts of each layer were found, {phase}.",
            _stacked(shown, classes, "asked_n"),
            shares,
            340,
        )
    ]
    if any(row[name] for row in shown for name in MISSES):
        counts = {**layout, "yaxis": axis(f"misses, {phase}")}
        says = f"Misses of each layer by their reason, {phase}."
        blocks.append(Plot("reasons", says, _stacked(shown, MISSES), counts, 340))
    names = {one: one.removesuffix("_n").replace("_", " ") for one in ("asked_n", *classes, *MISSES, *COPIES)}
    blocks.append(_in_figures(rows, names, "n"))
    sentence = "Layer by layer; a miss has one reason, the first of these that holds when its gate asks."
    return Section("layers", "Hits by layer", sentence, blocks)


def _experts(run: Run) -> Section:
    """Layer x expert: how often each was asked for, and how often it was there."""
    name, title = "experts", "Layer by expert"
    if not run.has("experts"):
        return Section(name, title, "A run kept with `--out DIR` shows a map of all its experts here.")
    table = run.table("experts", ["phase", "layer", "expert", "asked_n", "hit_n", "miss_n"])
    phases = set(table["phase"])
    phase = next((name for name in ("decode", "mixed") if name in phases), "prefill")
    table = table[table["phase"] == phase]
    n_layers, n_experts = int(table["layer"].max()) + 1, int(table["expert"].max()) + 1
    if len(table) > MOST_CELLS or n_layers * n_experts > MOST_CELLS or not len(table):
        return Section(name, title, f"Left out: {len(table):,} experts are more than a page shows.")
    asked: list[list[int | None]] = [[None] * n_experts for _ in range(n_layers)]
    hit: list[list[float | None]] = [[None] * n_experts for _ in range(n_layers)]
    for row in table.to_dict("records"):
        asked[row["layer"]][row["expert"]] = row["asked_n"]
        hit[row["layer"]][row["expert"]] = _share(row["hit_n"], row["asked_n"])
    layout = {"xaxis": axis("expert"), "yaxis": axis("MoE layer", autorange="reversed")}
    height = max(300, min(900, 120 + 11 * n_layers))
    blocks: list[Block] = []
    for own, says, values, words, bar, form in (
        ("asked", "How often each expert was asked for", asked, "asked for", {"title": {"text": "times"}}, ",d"),
        (
            *("found", "How often each was there", hit, "found on the GPU"),
            *({"title": {"text": "share"}, "tickformat": ".0%"}, ".1%"),
        ),
    ):
        trace = {
            "type": "heatmap",
            "z": values,
            "colorscale": SCALE,
            "colorbar": {**bar, "thickness": 12},
            "hovertemplate": f"layer %{{y}}, expert %{{x}}: {words} %{{z:{form}}}<extra></extra>",
        }
        blocks.append(Plot(f"experts-{own}", f"{says}, {phase}.", [trace], layout, height))
    hottest = sorted(table.to_dict("records"), key=lambda row: (-row["miss_n"], row["layer"], row["expert"]))[:12]
    cells = [[row["layer"], row["expert"], row["asked_n"], row["hit_n"], row["miss_n"]] for row in hottest]
    columns = [Column(one, "n") for one in ("layer", "expert", "asked for", "hits", "misses")]
    blocks.append(Table("The experts that were missed most.", columns, cells, folded=True))
    sentence = (
        "Brighter is more: first how often gates asked for each expert, then how often it was there when they did."
    )
    return Section(name, title, sentence, blocks)


def _waits(run: Run, rows: Sequence[Row]) -> Section:
    phase, shown = _phase(rows)
    traces = _stacked(shown, WAITS)
    title, name = "Waiting by layer", "waits"
    if not traces:
        return Section(name, title, "Nothing was waited for.", [Note([f"Phase: {phase}."])])
    layout = {"barmode": "stack", "bargap": 0.08, "xaxis": axis("MoE layer"), "yaxis": axis(f"waiting, {phase}", "s")}
    plot = Plot("waits", f"What {whose([run])} waited for in each layer, {phase}.", traces, layout, 340)
    sentence = "A wait counts for the layer of the operation that waited; the highest layers are where to look first."
    return Section(name, title, sentence, [plot, _in_figures(rows, WAITS, "s")])


def _in_figures(rows: Sequence[Row], titles: dict[str, str], unit: str) -> Table:
    """What is not 0 in all of them."""
    shown = [name for name in titles if any(row[name] for row in rows)]
    columns = [Column("layer", "n"), Column("phase"), *(Column(titles[name], unit) for name in shown)]
    cells = [[row["layer"], str(row.get("phase")), *(row[name] for name in shown)] for row in rows]
    return Table("Every layer, in figures.", columns, cells, folded=True)


def _compared(found: Sequence[tuple[Run, list[Row]]]) -> Section:
    """Hit rates and waits of every run by layer."""
    who = whose([run for run, _ in found])
    hits, waits = [], []
    for at, (run, rows) in enumerate(found):
        _, shown = _phase(rows)
        layers = [row["layer"] for row in shown]
        hits.append(line(run.label, layers, [_share(row["hit_n"], row["asked_n"]) for row in shown], at))
        waits.append(line(run.label, layers, [sum(row[name] for name in WAITS) for row in shown], at))
    phase, _ = _phase(found[0][1])
    layer = axis("MoE layer")
    shares = {"xaxis": layer, "yaxis": axis("hits, share of asked", "frac", rangemode="tozero")}
    seconds = {"xaxis": layer, "yaxis": axis("waiting", "s", rangemode="tozero")}
    sentence = f"Where in the model the runs part ({phase}): hits of each layer, and what {who} waited in it."
    return Section(
        "layers",
        "Hits and waits by layer",
        sentence,
        [
            Plot("layers", "Hits of each layer, run by run.", hits, shares, 360),
            Plot("waits", f"Waiting of {who} in each layer, run by run.", waits, seconds, 360),
        ],
    )
