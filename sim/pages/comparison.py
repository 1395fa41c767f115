"""The page of several runs: who is fastest, at what memory, and where each spends its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.pages.layers import by_layer
from sim.pages.page import Cell, Column, Page, Plot, Section, Table
from sim.pages.plots import axis, bars, line, points
from sim.pages.run import hits, latencies, where_the_time_goes
from sim.pages.trace_kind import realism_of
from sim.results.sampling import samples
from sim.results.text import show_lengths
from sim.setup.naming import policy_of, words
from sim.studies.common_bound import above_frac, bound_line, common_bound
from sim.studies.compare_text import verdict
from sim.studies.hosts import Machine, unlike_hosts
from sim.studies.ranking import Row, kind_of, ranks_of, speed

if TYPE_CHECKING:
    from sim.figures import Bound
    from sim.pages.inputs import Comparison, Run
    from sim.results.record import Result

WORKLOAD = ("model", "precision", "trace_sha256", "split", "n_requests", "arrivals", "batch", "gpus")
"""Between these nothing is ranked: another model or other requests are another question (`sim.studies.sweep`)."""
TOLD = ("hw", "model", "precision", "engine", "trace", "split", "batch", "gpus", "seed", "hit_definition", "version")
MOST_RUNS = 60

Places = tuple[int, int] | None


def of_comparison(data: Comparison) -> Page:
    """Of what `moesim compare --json` printed."""
    said = data.answer or f"{show_count(len(data.runs), 'run')} on one trace, machine and memory, fastest first"
    page = _page(said, [data.realism, *_common(data.runs)], data.runs, data.ranks, data.against)
    if data.not_run:
        table = Table("Policies that could not run.", [Column("policy"), Column("why")], data.not_run)
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
        return _page(said, under, runs, [None] * len(runs))
    runs.sort(key=lambda run: speed(run.result))
    if not all(run.has("requests") for run in runs):
        said = (
            f"{runs[0].label} is the fastest of {show_count(len(runs), 'run')}; without their requests none is ranked"
        )
        return _page(said, under, runs, [None] * len(runs))
    rows = [_row(run) for run in runs]
    found = ranks_of(rows)
    ranks = [None if (rank := found.get(run.label)) is None else (rank.best, rank.worst) for run in runs]
    return _page(verdict(rows, found), under, runs, ranks)


def _hosts(runs: Sequence[Run]) -> list[str]:
    line = unlike_hosts(Machine(run.result.hw, run.result.overrides) for run in runs)
    return [line] if line else []


def _differ(runs: Sequence[Run]) -> list[str]:
    """Keys of the workload in which runs differ."""
    return [name for name in WORKLOAD if len({getattr(run.result, name) for run in runs}) > 1]


def _row(run: Run) -> Row:
    kept = run.table("requests", ["request", "ttft_s", "tpot_s"])
    times = [
        (int(one["request"]), float(one["ttft_s"]), None if one["tpot_s"] != one["tpot_s"] else float(one["tpot_s"]))
        for one in kept.to_dict("records")
    ]
    which = "ttft_s" if run.result.tpot_s.mean is None else "tpot_s"
    return Row(run.label, run.result, samples(times, run.result.batch)[which])


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
    return [said, *realism_of(runs[0])]


def _served(result: Result) -> tuple[str, str, int]:
    return result.trace_sha256, result.split, result.n_requests


def _page(said: str, under: list[str], runs: list[Run], ranks: Sequence[Places], against: str = "") -> Page:
    sections = [
        _ranking(runs, ranks, against),
        _memory(runs),
        where_the_time_goes(runs),
        hits(runs),
        *by_layer(runs),
        latencies(runs),
        _grounds(runs),
    ]
    return Page("comparison", f"{show_count(len(runs), 'run')} compared", said, under, sections)


def _time(result: Result) -> tuple[str, str]:
    return ("ttft_s", "TTFT") if result.tpot_s.mean is None else ("tpot_s", "TPOT")


def _ranking(runs: Sequence[Run], ranks: Sequence[Places], against: str) -> Section:
    """A bar for each run with the interval of its mean, and a row with the figures; times as fast as a baseline."""
    key, title = _time(runs[0].result)
    names = [run.label for run in runs]
    means = [speed(run.result) for run in runs]
    ends = [
        run.result.uncertainty.sampling.tpot_s if key == "tpot_s" else run.result.uncertainty.sampling.ttft_s
        for run in runs
    ]
    traces = []
    for at, kind in enumerate(("system", "lossy", "bound")):
        of = [i for i, run in enumerate(runs) if kind_of(run.result.caveats) == kind]
        if of:
            error = {
                "type": "data",
                "symmetric": False,
                "array": [max(0.0, ends[i][1] - means[i]) if ends[i] else 0 for i in of],  # type: ignore[index]
                "arrayminus": [max(0.0, means[i] - ends[i][0]) if ends[i] else 0 for i in of],  # type: ignore[index]
                "color": "#7F7F7F",
            }
            x, y = [names[i] for i in of], [means[i] for i in of]
            called = {"system": "lossless", "lossy": "lossy", "bound": "a bound, no system"}[kind]
            traces.append(bars(called, x, y, (0, 4, 6)[at], across=True, error_x=error))
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": axis(title, "s", rangemode="tozero"),
        "yaxis": {"autorange": "reversed", "type": "category", "categoryarray": names, "fixedrange": True},
    }
    says = f"{title} of each run; the thin bar is the 95 % interval of its mean for the choice of requests."
    least = None if _differ(runs) else common_bound(run.result for run in runs)
    bound = None if least is None else least[0]
    base_s = next((speed(run.result) for run in runs if run.label == against), 0.0)
    rows: list[list[Any]] = [
        [run.label, _place(rank), *([base_s / speed(run.result)] if base_s else []), *_figures(run.result, bound)]
        for run, rank in zip(runs, ranks, strict=True)
    ]
    columns = [
        Column("run"),
        Column("rank"),
        *([Column(f"times as fast as {against}", "x")] if base_s else []),
        Column("TPOT", "s"),
        *([Column("above bound", "frac")] if bound else []),
        Column("TTFT", "s"),
        Column("hit", "frac"),
        Column("late hit", "frac"),
        Column("to the GPU per token", "bytes"),
        Column("peak VRAM", "bytes"),
        Column("bound by"),
        Column("note"),
    ]
    sentence = "Shorter is faster; where two thin bars overlap much, these requests may not tell the two runs apart."
    plot = Plot("ranking", says, traces, layout, 140 + 30 * len(runs))
    caption = f"Every run, fastest first. {_bound(bound)}".strip()
    return Section("ranking", "Who is fastest", sentence, [plot, Table(caption, columns, rows)])


def _bound(common: Bound | None) -> str:
    line = bound_line(common).strip()
    return f"{line[0].upper()}{line[1:]}." if line else ""


def _place(rank: Places) -> str | None:
    return None if rank is None else str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}-{rank[1]}"


def _figures(result: Result, common: Bound | None) -> list[Cell]:
    return [
        result.tpot_s.mean,
        *([above_frac(result, common)] if common else []),
        result.ttft_s.mean,
        result.hit_rate,
        result.late_hit_rate,
        result.h2d_bytes / result.n_outputs if result.n_outputs else None,
        result.peak_vram_bytes,
        result.bottleneck.resource,
        ", ".join(result.caveats),
    ]


def _memory(runs: Sequence[Run]) -> Section:
    """Time against peak memory, and the runs that no other beats in both."""
    _, title = _time(runs[0].result)
    of = [(run.result.peak_vram_bytes, speed(run.result), run.label, kind_of(run.result.caveats)) for run in runs]
    best = front([(memory, time) for memory, time, _, kind in of if kind == "system"])
    traces = []
    if len(best) > 1:
        style = {"shape": "hv", "color": "#7F7F7F", "width": 6, "dash": "solid"}
        traces.append(
            line(
                "Pareto front", [m for m, _ in best], [t for _, t in best], 6, line=style, opacity=0.4, hoverinfo="skip"
            )
        )
    for at, (memory, time, label, kind) in enumerate(of):
        symbol = {"marker": {"symbol": "circle-open"}} if kind == "bound" else {}
        traces.append(points(label, [memory], [time], at, **symbol, hoverinfo="name+x+y"))
    layout = {"xaxis": axis("peak VRAM", "bytes", rangemode="tozero"), "yaxis": axis(title, "s", rangemode="tozero")}
    says = f"{title} against peak VRAM; down and to the left is better."
    sentence = "Down is faster, left takes less memory; along the grey line no lossless run is beaten in both."
    return Section("pareto", "Time against memory", sentence, [Plot("pareto", says, traces, layout, 420)])


def front(of: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both, least memory first."""
    found: list[tuple[float, float]] = []
    for memory, time in sorted(of):
        if not found or time < found[-1][1]:
            found.append((memory, time))
    return found


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
    return Section("provenance", "What this rests on", sentence, [Table(caption, columns, rows)])
