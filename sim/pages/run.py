"""The page of one run: how fast, where the time went, what was found, and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.lanes import CHARGED
from sim.base.quantities import show_figure
from sim.base.units import show_bytes, show_count, show_frac, show_joules, show_seconds
from sim.engine.counts import CLASSES
from sim.figures import values_of
from sim.pages.curves import BACK_TO_BACK, miss_ratio
from sim.pages.inputs import whose
from sim.pages.lanes import Window, lanes
from sim.pages.layers import by_layer
from sim.pages.memory import memory
from sim.pages.page import Block, Cell, Column, Facts, Note, Page, Plot, Section, Table
from sim.pages.plots import axis, bars, distribution, said
from sim.results.text import decoding_per_s, show_lengths, verdict
from sim.setup.naming import show as show_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.pages.inputs import Run
    from sim.results.record import Result
    from sim.studies.curve import Curve

PARTS = {share: lane.doing for share, (_, lane) in CHARGED.items()}
UNDER_LOAD = (("queue_s", "TTFT: before the prompt begins"), ("service_s", "TTFT: from there"))
RATES = ("hit_rate", "late_hit_rate", "miss_rate")
FATES = ("useful", "late", "wasted", "cancelled", "harmful")
TIMES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end"))


def run_page(run: Run, window: Window, curves: list[Curve] | str) -> Page:
    """All of it.

    Args:
        window: which iterations the lanes show. curves: of caches on the same trace, or why there are none.
    """
    result = run.result
    sections = [
        Section("figures", "In short", "", [Facts([*_facts(result)])]),
        *_predicted(result),
        where_the_time_goes([run]),
        hits([run]),
        *by_layer([run]),
        lanes(run, window),
        latencies([run]),
        memory(run),
        miss_ratio(run, curves),
        grounds(result),
    ]
    return Page("run", f"{result.policy} on {result.hw}", verdict(result), [*lines(result), *run.realism()], sections)


def lines(result: Result) -> list[str]:
    """What was asked for, and what a reader must know of it."""
    requests = show_count(result.n_requests, "request")
    said = [f"Trace {result.trace}, split {result.split}: {requests}; {show_lengths(result.lengths)}."]
    return [*said, *([f"Labels: {'; '.join(result.caveats)}."] if result.caveats else [])]


def _facts(result: Result) -> Iterator[tuple[str, Cell, str, str]]:
    """Title, value, unit, and what it is."""
    outputs, n_outputs, band = show_count(result.n_outputs, "output token"), result.n_outputs, result.uncertainty
    for title, stat, ends in (("TPOT, mean", result.tpot_s, band.tpot_s), ("TTFT, mean", result.ttft_s, band.ttft_s)):
        low, high = (show_seconds(end) for end in ends or (0.0, 0.0))
        yield title, stat.mean, "s", f"{low} to {high}: figures and requests at their ends" if ends else ""
    if (rate_per_s := decoding_per_s(result)) is not None:  # of the first line
        yield "decoding, tokens/s", rate_per_s, "x", "1 / mean TPOT"
    waits = " and waiting for arrivals" if result.load is not None else ""
    whole = f"{outputs} over the time of the whole run, prefill{waits} included"
    yield "throughput, tokens/s", result.throughput_tokens_per_s, "x", whole
    yield "hits in decode", result.hit_rate, "frac", f"definition: {result.hit_definition}"
    each_bytes = result.h2d_bytes / n_outputs if n_outputs else None
    yield "copied per token", each_bytes, "bytes", f"{show_bytes(result.h2d_bytes)} in all"
    yield "peak VRAM", result.peak_vram_bytes, "bytes", f"of {show_bytes(result.memory.vram_bytes)}"
    if (draft := result.draft) is not None and draft.tokens_per_step is not None:
        taken = f"k={draft.k}; {draft.accepted:,} of {show_count(draft.drafted, 'draft')} taken"
        yield "tokens a step, with drafts", draft.tokens_per_step, "x", taken
    if (bound := result.lower_bound) is not None and bound.above_frac is not None and bound.tpot_s is not None:
        note = f"{show_seconds(bound.tpot_s)}: no lossless policy is faster with these lanes and this room"
        yield "above the lower bound", bound.above_frac, "frac", note
    if (slo := result.slo) is not None:
        kept = f"by {slo.met:,} of {show_count(slo.requests, 'request')} that had one"
        yield "SLO kept", slo.attained_frac, "frac", kept
        good = "of requests that kept theirs"
        yield "goodput, requests per second", slo.goodput_requests_per_s, "x", good
    if (energy := result.energy) is not None:
        ends = energy.range_joules_per_token
        low, high = (show_joules(end) for end in ends or (0.0, 0.0))
        lacks = f"the profile has no {' and no '.join(energy.missing)}" if energy.missing else ""
        note = f"of the {energy.counted}; {f'{low} to {high}; ' if ends else ''}{lacks or 'watts x seconds, derived'}"
        yield "joules per output token", energy.joules_per_token, "x", note


def _predicted(result: Result) -> list[Section]:
    """Of a real run: what the simulation of the very same run says."""
    said = result.prediction
    if said is None:
        return []
    blocks: list[Table | Note] = []
    for caption, unit, pairs in (
        ("Means of times.", "s", [(title, getattr(said, key).mean, getattr(result, key).mean) for key, title in TIMES]),
        ("Classes of decode.", "frac", [(n.replace("_", " "), getattr(said, n), getattr(result, n)) for n in RATES]),
        ("Copies.", "bytes", [("to the device", said.h2d_bytes, result.h2d_bytes)]),
    ):
        columns = [Column("figure"), Column("predicted", unit), Column("measured", unit)]
        blocks.append(Table(caption, columns, pairs))
    if said.label:
        blocks.append(Note([f"Note: {said.label}."]))
    sentence = f"This run was carried out on {result.device}; beside it the simulation of the same run on {said.hw}."
    return [Section("prediction", "Predicted beside measured", sentence, [*blocks])]


def where_the_time_goes(runs: list[Run]) -> Section:
    """What the GPU did or waited for, by phase."""
    who, several = whose(runs), len(runs) > 1
    head = "run" if several else "phase"
    rows = [
        (run.label if several else phase, phase, values_of(parts))
        for run in runs
        for phase, parts in run.result.bottleneck.by_phase().items()
        if parts.gpu is not None
    ]
    if several:
        rows = [row for row in rows if row[1] == "decode"] or rows
    shares = [(name, parts) for name, _, parts in rows]
    says = f"Shares of the time of {who}, by what was done or waited for."
    blocks: list[Block] = [*_stacked("time", says, f"time of {who}", head, shares, PARTS, **said("", "", "frac"))]
    sentence = f"The time of {who} in decode, run by run, cut into what was computed and waited for."
    if not several:
        busy = runs[0].result.lane_utilisation
        caption = "How busy each lane was, as a share of the simulated time."
        blocks.append(Table(caption, [Column("lane"), Column("busy", "frac")], [list(one) for one in busy.items()]))
        sentence = f"The time of {who}, cut into what was computed and waited for; the longest part binds the run."
    return Section("time", "Where the time goes", sentence, blocks)


def hits(runs: list[Run]) -> Section:
    """How the gate found experts, and what became of prefetches."""
    several = len(runs) > 1
    head = "run" if several else "phase"
    rates = [
        (run.label if several else phase, values_of(found))
        for run in runs
        for phase, found in run.result.hit_rates_by_phase.items()
        if not several or phase == "decode"
    ]
    names = {name: name.replace("_", " ") for name in CLASSES}
    says = "How a gate found the experts it asked for."
    blocks: list[Block] = [*_stacked("hits", says, "experts asked for", head, rates, names)]
    copies = [
        [run.label, run.result.demand_copies.n, *(getattr(run.result.prefetch, fate).n for fate in FATES)]
        for run in runs
        if run.result.prefetch.issued.n or several
    ]
    if copies:
        columns = [Column("run"), Column("on demand", "n"), *(Column(fate, "n") for fate in FATES)]
        caption = "Copies to the GPU: on demand, and what became of those ahead of time."
        blocks.append(Table(caption, columns, copies))
    sentence = "A hit is there when its gate has spoken; a late hit is still being copied; a miss has to be copied now."
    return Section("hits", "What was found", sentence, blocks)


def _stacked(
    name: str,
    says: str,
    caption: str,
    head: str,
    rows: list[tuple[str, dict[str, Any]]],
    titles: dict[str, str],
    **hover: str,
) -> tuple[Plot, Table]:
    """Shares of a whole, a bar for each run or phase, and the same in figures. caption: what they are shares of."""
    names, shown = [row for row, _ in rows], [key for key in titles if any(shares.get(key) for _, shares in rows)]
    hues = {key: at for at, key in enumerate(titles)}
    values = {key: [shares.get(key, 0.0) for _, shares in rows] for key in shown}
    traces = [bars(titles[key], names, values[key], hues[key], across=True, **hover) for key in shown]
    layout = {
        "barmode": "stack",
        "xaxis": axis(f"share of the {caption}", "frac", range=[0, 1]),
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    columns = [Column(head), *(Column(titles[key], "frac") for key in shown)]
    cells = [[row, *(shares.get(key, 0.0) for key in shown)] for row, shares in rows]
    plot = Plot(name, says, traces, layout, 150 + 34 * len(rows))
    return plot, Table(f"Shares of the {caption}.", columns, cells, folded=True)


def latencies(runs: list[Run]) -> Section:
    """Distributions of TTFT and TPOT over requests, where they were kept; else their statistics."""
    rows: list[list[Any]] = [
        [*([run.label] if len(runs) > 1 else []), title, stat.mean, stat.p50, stat.p95, stat.p99, stat.n]
        for run in runs
        for key, title in (*TIMES, *(UNDER_LOAD if run.result.arrivals != BACK_TO_BACK else ()))
        for stat in [getattr(run.result, key)]
    ]
    head = [*([Column("run")] if len(runs) > 1 else []), Column("time")]
    columns = [*head, *(Column(name, "s") for name in ("mean", "p50", "p95", "p99")), Column("requests", "n")]
    statistics = Table("Times over requests; a percentile needs enough of them.", columns, rows)
    kept = [(run, run.table("requests", ["request", "ttft_s", "tpot_s"])) for run in runs if run.has("requests")]
    plots = []
    for key, title in TIMES[:2]:
        traces = [
            distribution(run.label, [float(value) for value in values], at, showlegend=len(runs) > 1)
            for at, (run, frame) in enumerate(kept)
            if len(values := frame[key].dropna())
        ]
        if traces:
            layout = {"xaxis": axis(title, "s"), "yaxis": axis("share of requests up to it", "frac", range=[0, 1.02])}
            plots.append(Plot(key[:4], f"{title} of requests: the share that took no longer.", traces, layout, 320))
    sentence = (
        "Each step is a request: the further left a line, the faster; where it is steep, requests are alike."
        if plots
        else "Means and percentiles; a run kept with `--out` shows every request."
    )
    return Section("latency", "Time to first token and per token", sentence, [*plots, statistics])


def grounds(result: Result) -> Section:
    """Provenance: what the times rest on, how far they may be off, and what would repeat the run."""
    origin, band = result.provenance, result.uncertainty
    figures: list[list[Any]] = [
        [one.figure, one.share, None if one.value is None else show_figure(one.figure, one.value), one.source, one.ref]
        for one in origin.figures
    ]
    columns = [Column("figure"), Column("share of time", "frac"), Column("value"), Column("source"), Column("from")]
    shares = ", ".join(f"{show_frac(share)} {source}" for source, share in origin.by_source().items())
    blocks: list[Table] = []
    if figures:
        blocks.append(Table("Figures that the simulated time rests on, largest share first.", columns, figures))
    rows: list[list[Any]] = [
        [title, *(ends or (None, None)), *(sampled or (None, None))]
        for title, ends, sampled in (
            ("TPOT, mean", band.tpot_s, band.sampling.tpot_s),
            ("TTFT, mean", band.ttft_s, band.sampling.ttft_s),
        )
    ]
    heads = [Column("time"), Column("from", "s"), Column("to", "s")]
    heads += [Column("of it for the choice of requests, from", "s"), Column("to", "s")]
    blocks.append(Table("How far the means may be off, were every figure at the end of its range.", heads, rows))
    if result.contention is not None:
        added: list[list[Any]] = [
            [name, one.added_s, one.of_busy_frac, one.by]
            for name, one in values_of(result.contention).items()
            if one is not None
        ]
        heads = [Column("lane"), Column("added", "s"), Column("of its busy time", "frac"), Column("by")]
        blocks.append(Table("What memory that is shared by what runs at once added.", heads, added))
    settings: list[list[Any]] = [
        ["run", result.run_id],
        ["name", result.name],
        ["version", result.version],
        ["simulator", result.simulator],
        ["trace", f"{result.trace}, sha256 {result.trace_sha256}"],
        *(
            [["policy's file", f"{result.policy_file.name}, sha256 {result.policy_file.sha256}"]]
            if result.policy_file
            else []
        ),
        *([f"policy: {key}", show_value(key, value)] for key, value in result.params.items()),
        *([f"set: {key}", show_value(key, value)] for key, value in result.overrides.items()),
    ]
    caption = "What would repeat the run."
    blocks.append(Table(caption, [Column("what"), Column("value")], settings, folded=True))
    sentence = f"By share of simulated time: {shares}." if figures else "The times were measured."
    return Section("provenance", "What this rests on", sentence, [*blocks])
