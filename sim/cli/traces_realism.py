"""`moesim traces realism`: what may be concluded from a trace, held against published ones of its shape."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sim.base.units import show_frac
from sim.cli.progress import bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from traces.format.reader import Trace
    from traces.stats.public import Printed
    from traces.stats.realism import Realism, Row

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
    "realism",
    cls=UniqueOptions,
    short_help="TRACE beside published ones of its shape, and what may be concluded.",
    epilog="Example: moesim traces realism qwen1.5-moe-chat. docs/traces.md says how both are cut alike.",
)
@click.argument("sources", metavar="TRACE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(sources: tuple[str, ...], as_json: bool) -> None:
    """Hold a trace against published routing of its shape: plain caches, skew, repetition, predictions; with a verdict.

    Both stretches of one task and of one request are compared. Of a trace that was drawn from a bundled fit, the page
    shows what every other fit would have given in its place.

    Of one trace a page, of several one row each beside the published ones. `all` stands for the bundled traces, `fits`
    for those drawn from the bundled fits.
    """
    from traces.format.bundled import bundled_traces
    from traces.stats.realism import judge
    from traces.synth.fitted import fitted

    groups = {"all": bundled_traces, "fits": fitted}
    names = [name for source in sources for name in (groups[source]() if source in groups else (source,))]
    found: list[Realism] = []
    fits: list[Fits | None] = []
    with nullcontext() if as_json else bar("reading") as progress:
        for i, name in enumerate(names):
            with _opened(name) as trace:
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


def _opened(name: str) -> Trace:
    from traces.format.catalogue import open_trace

    return open_trace(name)


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
    from traces.synth.over_fits import PLAIN, ROWS, drawn_from, over_fits

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
        "findings": [{"about": f.about, "holds": f.holds, "says": f.says} for f in told.findings],
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
    if told.rows_of_one:
        rows = [row for row in told.rows_of_one if row.what.split("_")[0] in OF_ONE]
        _beside_published(told, f"of one request, {told.request.rows:,} tokens", rows)
    if fits:
        _put_fits(told.shape, fits)
    for printed in _beside(told):
        say(printed)


def _put_fits(shape: str, fits: Fits) -> None:
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
    _put((f"fit as {shape}", *titles), rows)


def _beside_published(told: Realism, window: str, rows: list[Row]) -> None:
    shown = [(_title(row.what, told), *(_shown(row, v) for v in (row.here, *row.published))) for row in rows]
    _put((window, "here", *(reference.name for reference in told.references)), shown)


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
            if row.batch is not None:
                value = f"{low:g} of {row.n_experts} by {row.batch}"
            else:
                value = show_frac(low) if low == high else f"{show_frac(low)} to {show_frac(high)}"
            apart = beside_printed(told.accuracy, row)
            layers = (
                f"; by layer here {100 * apart[0]:+.1f} points, {100 * apart[1]:+.0f} in layer {apart[2]}"
                if apart
                else ""
            )
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
    _put(("one task, a quarter cached", "tokens", *SHORT, "order as there"), rows)
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


def _put(titles: tuple[str, ...], rows: list[Any]) -> None:
    from sim.base.tables import plain, render

    content = plain(*titles)
    for row in rows:
        content.add_row(*row)
    say(render(content), nl=False)
