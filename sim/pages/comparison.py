"""The page of several runs: who is fastest, at what memory, and where each spends its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.pages.layers import by_layer
from sim.pages.page import Column, Page, Plot, Section
from sim.pages.page import Table as Figures
from sim.pages.plots import against_memory, axis, bars
from sim.pages.run import hits, latencies, where_the_time_goes
from sim.results.figure import label_of
from sim.results.sampling import Sample, samples
from sim.results.text import show_lengths
from sim.setup.naming import policy_of, words
from sim.studies.compare import Comparison as Compared
from sim.studies.hosts import Machine, unlike_hosts
from sim.studies.row_text import LOAD, Table, bound_line
from sim.studies.rows import Group, Rank, Row, common_bound, pareto

if TYPE_CHECKING:
    from sim.pages.inputs import Comparison, Run
    from sim.results.record import Result

WORKLOAD = ("model", "precision", "trace_sha256", "split", "n_requests", "arrivals", "batch", "gpus")
"""Between these nothing is ranked: another model or other requests are another question (`sim.studies.sweep`)."""
TOLD = ("hw", "model", "precision", "engine", "trace", "split", "batch", "gpus", "seed", "hit_definition", "version")
MOST_RUNS = 60


def of_comparison(data: Comparison) -> Page:
    """Of what `moesim compare --json` printed."""
    said = data.answer or f"{show_count(len(data.runs), 'run')} on one trace, machine and memory, fastest first"
    ranks: dict[Row, Rank] = {
        run: Rank(*places, []) for run, places in zip(data.runs, data.ranks, strict=True) if places is not None
    }
    base = next((run for run in data.runs if run.label == data.against), None)
    page = _page(said, [data.realism, *_common(data.runs)], data.runs, ranks, base)
    if data.not_run:
        table = Figures("Policies that could not run.", [Column("policy"), Column("why")], data.not_run)
        page.sections.append(Section("not-run", "Not run", "", [table]))
    return page


def of_runs(runs: list[Run]) -> Page:
    """Of the folders of several runs. Raises BadInput where one is named twice."""
    if len(runs) > MOST_RUNS:
        raise BadInput(f"PATH, got {len(runs)} runs: at most {MOST_RUNS} can be read on one page; name fewer")
    ids = [run.result.run_id for run in runs]
    for run in runs:
        if ids.count(run.result.run_id) > 1:
            raise BadInput(f"PATH, got run {run.result.run_id} twice: equal runs have equal results; name it once")
    for run, label in zip(runs, _labels(runs), strict=True):
        run.label = label
    under = [*_hosts(runs), *_common(runs)]
    differ = _differ(runs)
    if differ:
        what = ", ".join(name.removesuffix("_sha256").removeprefix("n_") for name in differ)
        said = f"{show_count(len(runs), 'run')} side by side, not ranked: they differ in {what}"
        return _page(said, under, runs, {})
    runs.sort(key=lambda run: run.speed_s)
    if not all(run.has("requests") for run in runs):
        said = (
            f"{runs[0].label} is the fastest of {show_count(len(runs), 'run')}; without their requests none is ranked"
        )
        return _page(said, under, runs, {})
    for run in runs:
        run.sample = _sample(run)
    group = Group(runs)
    return _page(Compared(group, [], "").answer(), under, runs, group.ranks)


def _hosts(runs: Sequence[Run]) -> list[str]:
    line = unlike_hosts(Machine(run.result.hw, run.result.overrides) for run in runs)
    return [line] if line else []


def _differ(runs: Sequence[Run]) -> list[str]:
    """Keys of the workload in which runs differ."""
    return [name for name in WORKLOAD if len({getattr(run.result, name) for run in runs}) > 1]


def _sample(run: Run) -> Sample:
    kept = run.table("requests", ["request", "ttft_s", "tpot_s"])
    times = [
        (int(one["request"]), float(one["ttft_s"]), None if one["tpot_s"] != one["tpot_s"] else float(one["tpot_s"]))
        for one in kept.to_dict("records")
    ]
    return samples(times, run.result.batch)[run.time]


def _labels(runs: Sequence[Run]) -> list[str]:
    """What tells each from the others: its policy, and what else differs."""
    differ = [name for name in TOLD if len({getattr(run.result, name) for run in runs}) > 1]
    first = runs[0].result.overrides
    alike = {key for key, value in first.items() if all(run.result.overrides.get(key, first) == value for run in runs)}
    found = []
    for run in runs:
        result, file = run.result, run.result.policy_file
        own_set = {key: value for key, value in result.overrides.items() if key not in alike}
        own = [f"{name} {getattr(result, name)}" for name in differ]
        own += [text for group in ("options", "hw", "model") if (text := words(own_set, group))]
        policy = policy_of(result.policy, None if file is None else file.name, result.overrides)
        found.append(", ".join([policy, *own]))
    return [
        label if found.count(label) == 1 else f"{label}, run {run.result.run_id}"
        for label, run in zip(found, runs, strict=True)
    ]


def _common(runs: Sequence[Run]) -> list[str]:
    """What holds for all."""
    first = runs[0].result
    alike = all((r.result.trace_sha256, r.result.split, r.result.n_requests) == _served(first) for r in runs)
    if not alike:
        return []
    requests = show_count(first.n_requests, "request")
    said = f"Trace {first.trace}, split {first.split}: {requests}; {show_lengths(first.lengths)}."
    return [said, *runs[0].realism()]


def _served(result: Result) -> tuple[str, str, int]:
    return result.trace_sha256, result.split, result.n_requests


def _page(said: str, under: list[str], runs: list[Run], ranks: dict[Row, Rank], base: Row | None = None) -> Page:
    sections = [
        _ranking(Table(runs, ranks, None if _differ(runs) else common_bound(runs), base)),
        _memory(runs),
        where_the_time_goes(runs),
        hits(runs),
        *by_layer(runs),
        latencies(runs),
        _grounds(runs),
    ]
    return Page("comparison", f"{show_count(len(runs), 'run')} compared", said, under, sections)


def _ranking(table: Table) -> Section:
    """A bar for each run with the interval of its mean, and a row with the figures; times as fast as a baseline."""
    rows = table.rows
    time = rows[0].time
    title, traces = label_of(f"{time}.mean"), []
    for kind, called, hue in (("system", "lossless", 0), ("lossy", "lossy", 4), ("bound", "a bound, no system", 6)):
        own = [row for row in rows if row.kind == kind]
        ends = [row.ran.uncertainty.sampling.of(time)[0] or (row.speed_s, row.speed_s) for row in own]
        error = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - row.speed_s) for row, (_, high) in zip(own, ends, strict=True)],
            "arrayminus": [max(0.0, row.speed_s - low) for row, (low, _) in zip(own, ends, strict=True)],
            "color": "#7F7F7F",
        }
        if own:
            x, y = [row.label for row in own], [row.speed_s for row in own]
            traces.append(bars(called, x, y, hue, across=True, error_x=error))
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": axis(title, "s", rangemode="tozero"),
        "yaxis": {
            "autorange": "reversed",
            "type": "category",
            "categoryarray": [row.label for row in rows],
            "fixedrange": True,
        },
    }
    says = f"{title} of each run; the thin bar is the 95 % interval of its mean for the choice of requests."
    names = f"rank times tpot_s.mean above ttft_s.mean {LOAD} hit_rate late_hit_rate copied peak_vram_bytes"
    columns = table.columns(f"{names} bottleneck.resource")
    cells = [[row.label, *(one.read(row) for one in columns), ", ".join(row.ran.caveats)] for row in rows]
    shown = [Column("run"), *(Column(one.title, one.unit) for one in columns), Column("note")]
    sentence = "Shorter is faster; where two thin bars overlap much, these requests may not tell the two runs apart."
    plot = Plot("ranking", says, traces, layout, 140 + 30 * len(rows))
    bound = "" if table.common is None else f" L{bound_line(table.common)[1:]}."
    caption = f"Every run, fastest first.{bound}"
    return Section("ranking", "Who is fastest", sentence, [plot, Figures(caption, shown, cells)])


def _memory(rows: Sequence[Row]) -> Section:
    """Time against peak memory, and the runs that no other beats in both."""
    own = [(row, (row.ran.peak_vram_bytes, row.speed_s)) for row in rows]
    lines = {row.label + (" (bound)" if row.kind == "bound" else ""): [at] for row, at in own}
    plot = against_memory(label_of(f"{rows[0].time}.mean"), lines, [dict(own)[row] for row in pareto(rows)])
    sentence = "Down is faster, left takes less memory; along the grey line no lossless run is beaten in both."
    return Section("pareto", "Time against memory", sentence, [plot])


def _grounds(runs: Sequence[Run]) -> Section:
    """What each run rests on."""
    rows: list[list[Any]] = []
    for run in runs:
        result = run.result
        shares = result.provenance.by_source()
        band = result.uncertainty.tpot_s or result.uncertainty.ttft_s or (None, None)
        rows.append([run.label, result.run_id, result.version, *shares.values(), *band])
    columns = [Column("run"), Column("id"), Column("version")]
    columns += [Column(f"{name} figures", "frac") for name in ("measured", "datasheet", "assumed")]
    columns += [Column("from", "s"), Column("to", "s")]
    caption = "Shares of simulated time by the source of its figures; the mean, were all figures at their ends."
    sentence = "`moesim report` of a single run lists every figure with its source."
    return Section("provenance", "What this rests on", sentence, [Figures(caption, columns, rows)])
