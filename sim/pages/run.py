"""The page of one run: how fast, where the time went, what was found, and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.quantities import show_figure
from sim.base.units import show_bytes, show_count, show_frac, show_joules, show_seconds
from sim.engine.counts import CLASSES
from sim.figures import values_of
from sim.pages.curves import BACK_TO_BACK, miss_ratio
from sim.pages.inputs import whose
from sim.pages.lanes import Window, lanes
from sim.pages.layers import by_layer
from sim.pages.memory import memory
from sim.pages.page import Cell, Column, Facts, Note, Page, Plot, Section, Table
from sim.pages.plots import axis, bars, distribution, said
from sim.pages.trace_kind import realism_of
from sim.results.text import decoding_per_s, show_lengths, verdict
from sim.setup.naming import show as show_value

if TYPE_CHECKING:
    from sim.pages.inputs import Run
    from sim.results.record import Result
    from sim.studies.curve import Curve

PARTS = {
    "gpu": "computing",
    "copy": "waiting for copies",
    "host": "waiting for the host",
    "cpu": "waiting for experts on the CPU",
    "predictor": "waiting for predictions",
    "drive": "waiting for the drive",
    "back": "waiting for copies back",
    "peer": "waiting for transfers between GPUs",
}
UNDER_LOAD = (("queue_s", "TTFT: before the prompt begins"), ("service_s", "TTFT: from there"))
RATES = ("hit_rate", "late_hit_rate", "miss_rate")
FATES = ("useful", "late", "wasted", "cancelled")
TIMES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end"))


def run_page(run: Run, window: Window, curves: list[Curve] | str) -> Page:
    """All of it.

    Args:
        window: which iterations the lanes show. curves: of caches on the same trace, or why there are none.
    """
    result = run.result
    sections = [
        Section("figures", "In short", "", [_facts(result)]),
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
    return Page("run", f"{result.policy} on {result.hw}", verdict(result), [*lines(result), *realism_of(run)], sections)


def lines(result: Result) -> list[str]:
    """What was asked for, and what a reader must know of it."""
    requests = show_count(result.n_requests, "request")
    said = [f"Trace {result.trace}, split {result.split}: {requests}; {show_lengths(result.lengths)}."]
    return [*said, *([f"Labels: {'; '.join(result.caveats)}."] if result.caveats else [])]


def _facts(result: Result) -> Facts:
    tpot, ttft, band = result.tpot_s, result.ttft_s, result.uncertainty
    n_outputs, memory = result.n_outputs, result.memory

    def ends(of: tuple[float, float] | None) -> str:
        return (
            "" if of is None else f"{show_seconds(of[0])} to {show_seconds(of[1])}: figures and requests at their ends"
        )

    return Facts(
        [
            ("TPOT, mean", tpot.mean, "s", ends(band.tpot_s)),
            ("TTFT, mean", ttft.mean, "s", ends(band.ttft_s)),
            *_decoding(result),
            ("throughput, tokens/s", result.throughput_tokens_per_s, "x", _throughput(result)),
            ("hits in decode", result.hit_rate, "frac", f"definition: {result.hit_definition}"),
            (
                "copied per token",
                result.h2d_bytes / n_outputs if n_outputs else None,
                "bytes",
                f"{show_bytes(result.h2d_bytes)} in all",
            ),
            ("peak VRAM", result.peak_vram_bytes, "bytes", f"of {show_bytes(memory.vram_bytes)}"),
            *_drafts(result),
            *_bound(result),
            *_slo(result),
            *_energy(result),
        ]
    )


def _decoding(result: Result) -> list[tuple[str, Any, str, str]]:
    """The rate of the first line, where that has one of decoding alone."""
    rate_per_s = decoding_per_s(result)
    return [] if rate_per_s is None else [("decoding, tokens/s", rate_per_s, "x", "1 / mean TPOT")]


def _throughput(result: Result) -> str:
    waits = " and waiting for arrivals" if result.load is not None else ""
    outputs = show_count(result.n_outputs, "output token")
    return f"{outputs} over the time of the whole run, prefill{waits} included"


def _drafts(result: Result) -> list[tuple[str, Any, str, str]]:
    draft = result.draft
    if draft is None or draft.tokens_per_step is None:
        return []
    taken = f"k={draft.k}; {draft.accepted:,} of {show_count(draft.drafted, 'draft')} taken"
    return [("tokens a step, with drafts", draft.tokens_per_step, "x", taken)]


def _bound(result: Result) -> list[tuple[str, Any, str, str]]:
    bound = result.lower_bound
    if bound is None or bound.above_frac is None or bound.tpot_s is None:
        return []
    note = f"{show_seconds(bound.tpot_s)}: no lossless policy is faster with these lanes and this room"
    return [("above the lower bound", bound.above_frac, "frac", note)]


def _slo(result: Result) -> list[tuple[str, Any, str, str]]:
    slo = result.slo
    if slo is None:
        return []
    kept = f"by {slo.met:,} of {show_count(slo.requests, 'request')} that had one"
    return [
        ("SLO kept", slo.attained_frac, "frac", kept),
        ("goodput, requests per second", slo.goodput_requests_per_s, "x", "of requests that kept theirs"),
    ]


def _energy(result: Result) -> list[tuple[str, Any, str, str]]:
    energy = result.energy
    if energy is None:
        return []
    low, high = energy.range_joules_per_token or (None, None)
    band = "" if low is None or high is None else f"{show_joules(low)} to {show_joules(high)}; "
    lacks = f"the profile has no {' and no '.join(energy.missing)}" if energy.missing else ""
    note = f"of the {energy.counted}; {band}{lacks or 'watts x seconds, derived'}"
    return [("joules per output token", energy.joules_per_token, "x", note)]


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
    who = whose(runs)
    rows = [
        (run.label if len(runs) > 1 else phase, phase, values_of(parts))
        for run in runs
        for phase, parts in run.result.bottleneck.by_phase().items()
        if parts.gpu is not None
    ]
    if len(runs) > 1:
        rows = [row for row in rows if row[1] == "decode"] or rows
    names = [name for name, _, _ in rows]
    parts = [part for part in PARTS if any(shares.get(part) for _, _, shares in rows)]
    traces = [
        bars(
            PARTS[part],
            names,
            [shares.get(part, 0.0) for _, _, shares in rows],
            at,
            across=True,
            **said("", "", "frac"),
        )
        for at, part in enumerate(PARTS)
        if part in parts
    ]
    layout = {
        "barmode": "stack",
        "xaxis": axis(f"share of the time of {who}", "frac", range=[0, 1]),
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    plot = Plot(
        "time", f"Shares of the time of {who}, by what was done or waited for.", traces, layout, 150 + 34 * len(rows)
    )
    shares = Table(
        f"Shares of the time of {who}.",
        [Column("run" if len(runs) > 1 else "phase"), *(Column(PARTS[part], "frac") for part in parts)],
        [[name, *(shares.get(part, 0.0) for part in parts)] for name, _, shares in rows],
        folded=True,
    )
    blocks: list[Plot | Table] = [plot, shares]
    if len(runs) == 1:
        busy = runs[0].result.lane_utilisation
        caption = "How busy each lane was, as a share of the simulated time."
        blocks.append(Table(caption, [Column("lane"), Column("busy", "frac")], [list(one) for one in busy.items()]))
        sentence = f"The time of {who}, cut into what was computed and waited for; the longest part binds the run."
    else:
        sentence = f"The time of {who} in decode, run by run, cut into what was computed and waited for."
    return Section("time", "Where the time goes", sentence, [*blocks])


def hits(runs: list[Run]) -> Section:
    """How the gate found experts, and what became of prefetches."""
    rates = [
        (run.label if len(runs) > 1 else phase, values_of(found))
        for run in runs
        for phase, found in run.result.hit_rates_by_phase.items()
        if len(runs) == 1 or phase == "decode"
    ]
    shown = [name for name in CLASSES if any(shares[name] for _, shares in rates)]
    names = [name for name, _ in rates]
    traces = [
        bars(name.replace("_", " "), names, [shares[name] for _, shares in rates], CLASSES.index(name), across=True)
        for name in shown
    ]
    layout = {
        "barmode": "stack",
        "xaxis": axis("share of the experts asked for", "frac", range=[0, 1]),
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    says = "How a gate found the experts it asked for."
    columns = [Column("run" if len(runs) > 1 else "phase"), *(Column(n.replace("_", " "), "frac") for n in shown)]
    table = Table("Shares of the experts asked for.", columns, [[n, *(s[c] for c in shown)] for n, s in rates], True)
    copies: list[list[Any]] = [
        [run.label, *_copies(run.result)] for run in runs if run.result.prefetch.issued.n or len(runs) > 1
    ]
    fates = Table(
        "Copies to the GPU: on demand, and what became of those ahead of time.",
        [Column("run"), Column("on demand", "n"), *(Column(fate, "n") for fate in FATES), Column("harmful", "n")],
        copies,
    )
    plot = Plot("hits", says, traces, layout, 150 + 34 * len(rates))
    sentence = "A hit is there when its gate has spoken; a late hit is still being copied; a miss has to be copied now."
    return Section("hits", "What was found", sentence, [plot, table, *([fates] if copies else [])])


def _copies(result: Result) -> list[Cell]:
    fates = values_of(result.prefetch)
    return [result.demand_copies.n, *(fates[fate].n for fate in (*FATES, "harmful"))]


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
