"""`moesim traces stats` and `realism`: figures of traces side by side, and what may be concluded from them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sim.base.errors import BadInput
from sim.base.units import show_frac
from sim.cli.progress import bar
from sim.cli.say import say, say_table
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from traces.format.reader import Trace
    from traces.stats.public import Printed
    from traces.stats.realism import Realism, Row
    from traces.stats.summary import Summary

TABLE = ("lru_25", "lfu_25", "lcp_25", "random_25", "belady_25", "top_quarter", "overlap_1")
REUSE = {
    "share": "all tokens: shared with the token before",
    "jaccard": "  over what either chose (Jaccard)",
    "first": "  heaviest expert again the heaviest",
    "popularity": "  shared by popularity alone",
    "even": "  shared by even choices (k / experts)",
}
OF_ONE = ("lru", "lfu", "lcp", "belady", "top")  # what differs between one request and several of a task
SHORT = ("LRU", "LFU", "LCP", "random", "Belady", "top quarter", "shared")


@click.command(
    "stats",
    short_help="Skew, repetition, accuracy, cache curves of TRACE...",
    epilog="Example: moesim traces stats mixtral-8x7b-small. docs/traces.md says what each means.",
)
@click.argument("sources", metavar="TRACE...", nargs=-1)
@click.option(
    *("--requests", "n_requests"),
    type=click.IntRange(min=1),
    metavar="N",
    help="Judge the first N requests only, to compare with traces of a single prompt.",
)
@click.option("--public", metavar="NAME,...", help="Add figures of published traces of large models; `all`, or names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def stats(sources: tuple[str, ...], n_requests: int | None, public: str | None, as_json: bool) -> None:
    """Skew, repetition, affinity, accuracy and cache curves of traces, side by side."""
    from traces.format.catalogue import open_trace
    from traces.stats import counts
    from traces.stats.summary import summarise, title

    found = _public(public)
    if not sources and not found:
        raise BadInput("no trace is named: give bundled names or files, or --public all")
    with nullcontext() if as_json else bar("reading") as progress:
        for i, source in enumerate(sources):
            if counts.is_one(Path(source)):
                found.insert(i, counts.load(Path(source)).summary(Path(source).stem))
            else:
                with open_trace(source) as trace:
                    found.insert(i, summarise(trace, list(trace.requests)[:n_requests]))
            if progress is not None:
                progress(i + 1, len(sources))
    if as_json:
        runs = [asdict(summary) for summary in found]
        click.echo(json.dumps({"schema": "moesim.trace-stats/1", "traces": runs}, allow_nan=False))
        return
    names = dict.fromkeys(name for summary in found for name in summary.figures)
    rows = [
        ("shape", *(s.shape for s in found)),
        ("requests", *(f"{s.requests:,}" for s in found)),
        ("tokens judged", *(f"{s.rows:,}" for s in found)),
        ("tokens through caches", *(f"{s.curve_rows:,} {s.curve_phase}" for s in found)),
    ]
    rows += [(title(name), *(show_frac(s.figures.get(name)) for s in found)) for name in names]
    say_table(("mean over layers", *(s.name for s in found)), rows)


def _public(names: str | None) -> list[Summary]:
    """Figures of published traces by name; `all` for every one, None for none."""
    if names is None:
        return []
    from sim.base.errors import did_you_mean
    from traces.stats.public import public_traces

    known = {trace.name: trace for trace in public_traces()}
    wanted = list(known) if names == "all" else names.split(",")
    for name in wanted:
        if name not in known:
            raise BadInput(f"--public, got {name!r}: no such figures; {did_you_mean(name, known)}")
    return [known[name].summary() for name in wanted]


@click.command(
    "realism",
    cls=UniqueOptions,
    short_help="TRACE beside published ones of its shape, and what may be concluded.",
    epilog="Example: moesim traces realism qwen1.5-moe-chat. docs/traces.md says how both are cut alike.",
)
@click.argument("sources", metavar="TRACE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def realism(sources: tuple[str, ...], as_json: bool) -> None:
    """Hold a trace against published routing of its shape: plain caches, skew, repetition, predictions; with a verdict.

    Both stretches of one task and of one request are compared. Of a trace that was drawn from a bundled fit, the page
    shows what every other fit would have given in its place.

    Of one trace a page, of several one row each beside the published ones. `all` stands for the bundled traces, `fits`
    for those drawn from the bundled fits.
    """
    from traces.format.bundled import bundled_traces
    from traces.format.catalogue import open_trace
    from traces.stats.realism import judge
    from traces.synth.fitted import fitted

    groups = {"all": bundled_traces, "fits": fitted}
    names = [name for source in sources for name in (groups[source]() if source in groups else (source,))]
    found: list[Realism] = []
    fits: list[Fits | None] = []
    with nullcontext() if as_json else bar("reading") as progress:
        for i, name in enumerate(names):
            with open_trace(name) as trace:
                found.append(judge(trace))
                fits.append(_over_fits(trace) if as_json or len(names) == 1 else None)
            if progress is not None:
                progress(i + 1, len(names))
    if as_json:
        facts = {"schema": "moesim.trace-realism/1", "traces": list(map(_facts, found, fits))}
        click.echo(json.dumps(facts, allow_nan=False))
    elif len(found) == 1:
        _page(found[0], fits[0])
    else:
        _side_by_side(found)


class Fits(NamedTuple):
    """Figures of one request by every bundled fit in the shape of a trace that was drawn from the one `taken`.

    here: those of the trace; None where its requests are shorter.
    """

    taken: str
    rows: int
    here: dict[str, float] | None
    by_fit: dict[str, dict[str, float]]


def _over_fits(trace: Trace) -> Fits | None:
    from traces.stats.cuts import of_one_request
    from traces.synth.compare import PLAIN, ROWS, drawn_from, over_fits

    taken = drawn_from(trace)
    if taken is None:
        return None
    by_fit = dict(over_fits((trace.n_layers, trace.n_experts, trace.top_k)))
    return Fits(taken, ROWS, of_one_request(trace, ROWS, PLAIN), by_fit)


def _facts(told: Realism, fits: Fits | None) -> dict[str, Any]:
    names = [reference.name for reference in told.references]
    return {
        "name": told.name,
        "shape": told.shape,
        "kind": told.kind,
        "cut_rows": told.task.rows,
        "figures": told.task.here,
        "unions": told.unions,
        "reuse": told.reuse,
        "gate_mass": told.gate_mass,
        "published": dict(zip(names, told.task.published, strict=True)),
        "of_one_request": {
            "cut_rows": told.request.rows,
            "figures": told.request.here,
            "published": dict(zip(names, told.request.published, strict=False)),
        },
        "over_fits": fits and fits._asdict(),
        "findings": list(map(asdict, told.findings)),
        "line": told.line,
    }


def _page(told: Realism, fits: Fits | None) -> None:
    say(told.line, bold=True)
    say()
    for finding in told.findings:
        mark = {True: "yes", False: "no ", None: "-  "}[finding.holds]
        say(f"{mark}  {finding.about}: {finding.says}")
    say()
    window = f"of one task, {told.task.rows:,} tokens" if told.task.rows else "mean over layers"
    _beside_published(told, window, told.rows)
    if told.request.rows:
        rows = [row for row in told.request.beside_all() if row.what.split("_")[0] in OF_ONE]
        _beside_published(told, f"of one request, {told.request.rows:,} tokens", rows)
    if fits:
        _say_fits(told.shape, fits)
    for printed in _beside(told):
        say(printed)


def _say_fits(shape: str, fits: Fits) -> None:
    """What any fit would have given in place of the one that was taken."""

    def row(name: str, figures: dict[str, float]) -> tuple[str, ...]:
        return (name, *(show_frac(figures.get(key)) for key in keys))

    keys = [f"{policy}_{frac}" for policy in ("lru", "lfu") for frac in (25, 50, 75)]
    rows = [row("here", fits.here)] if fits.here else []
    rows += [row(f"{name} (taken)" if name == fits.taken else name, known) for name, known in fits.by_fit.items()]
    known = {key: [figures[key] for figures in fits.by_fit.values() if key in figures] for key in keys}
    for name, end in (("lowest", min), ("highest", max)):
        rows.append(row(name, {key: end(values) for key, values in known.items() if values}))
    titles = [key.upper().replace("_", " ") + " %" for key in keys]
    say(f"drawn from {fits.taken}; hits of one request of {fits.rows} tokens, had another fit been scaled to it:")
    say_table((f"fit as {shape}", *titles), rows)


def _beside_published(told: Realism, window: str, rows: list[Row]) -> None:
    shown = [(_title(row.what, told), *(_shown(row, v) for v in (row.here, *row.published))) for row in rows]
    say_table((window, "here", *(reference.name for reference in told.references)), shown)


def _beside(told: Realism) -> list[str]:
    """What papers and logs print of models of this shape."""
    from traces.stats.public import public
    from traces.stats.realism import beside_printed, printed

    n_experts, top_k = told.n_experts, told.top_k
    known = public()
    lists: tuple[tuple[str, list[Printed]], ...] = (
        ("predicted one layer ahead", known.accuracies),
        ("another predictor's", known.predictors),
        ("asked for by a batch", known.unions),
        ("shared with the token before", known.reuse),
    )
    found = []
    for what, rows in lists:
        for row in printed(rows, n_experts, top_k):
            low, high = row.span
            value = show_frac(low) if low == high else f"{show_frac(low)} to {show_frac(high)}"
            if row.batch is not None:
                value = f"{low:g} of {row.n_experts} by {row.batch}"
            layers = ""
            if apart := beside_printed(told.accuracy, row):
                layers = f"; by layer here {100 * apart[0]:+.1f} points, {100 * apart[1]:+.0f} in layer {apart[2]}"
            found.append(f"printed, {what}: {value} ({row.model}, {row.what}; {row.source}){layers}")
    return found


def _side_by_side(found: list[Realism]) -> None:
    from traces.stats.public import public_traces

    rows: list[tuple[str, ...]] = []
    shown: set[tuple[str, int]] = set()
    for told in found:
        values = (show_frac(told.task.here.get(name)) for name in TABLE)
        rows.append((told.name, f"{told.task.rows:,}", *values, _verdict(told)))
        shown |= {(reference.name, told.task.rows) for reference in told.references}
    for reference in public_traces():
        for cut, figures in reference.cuts.items():
            if (reference.name, cut) in shown:
                values = (show_frac(figures.get(name)) for name in TABLE)
                rows.append((f"{reference.name} (published)", f"{cut:,}", *values, ""))
    say_table(("one task, a quarter cached", "tokens", *SHORT, "order as there"), rows)
    for told in found:
        say(told.line)


def _verdict(told: Realism) -> str:
    order = next((f.holds for f in told.findings if f.about == "order of plain caches"), None)
    return {True: "yes", False: "no", None: "-"}[order]


def _title(name: str, told: Realism) -> str:
    from traces.stats.cuts import union_by_chance
    from traces.stats.summary import title

    kind, _, batch = name.rpartition("_")
    if kind == "union":
        chance = union_by_chance(int(batch), told.n_experts, told.top_k)
        return f"experts of a layer for {batch} requests ({chance:.1f} by chance)"
    if kind == "mass":
        return f"gate mass of rank {batch}"
    return REUSE[batch] if kind == "reuse" else title(name)


def _shown(row: Row, value: float | None) -> str:
    if value is None:
        return "-"
    return show_frac(value) if row.share else f"{value:.1f}"


COMMANDS = (stats, realism)
