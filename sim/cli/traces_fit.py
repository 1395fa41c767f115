"""`moesim traces fit`: the statistics of a trace as a file, from which traces of any length are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.base.errors import BadInput
from sim.base.extras import need
from sim.base.units import show_frac
from sim.cli.output_place import OutputFile
from sim.cli.progress import bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from traces.format.reader import Trace
    from traces.synth.fitted import Check


@click.command(
    "fit",
    cls=UniqueOptions,
    short_help="Reduce TRACE to statistics in a file, checked against the half not fitted.",
    epilog="Example: moesim traces fit mine.safetensors -o mine.yaml; moesim traces synth mine.yaml -o x.safetensors",
)
@click.argument("source", metavar="TRACE")
@click.option("-o", "--out", required=True, metavar="FILE", type=OutputFile(), help="The YAML to write.")
@click.option("--id", "name", metavar="NAME", help="What to call it; default: the file's name.")
@click.option("--model", metavar="NAME", help="Draw for this model's shape, where TRACE lacks layers or experts of it.")
@click.option("--lend", metavar="TRACE", help="Take what TRACE lacks (predictions, scores, lengths) from this one.")
@click.option("--origin", metavar="TEXT", default="", help="Where TRACE comes from.")
@click.option("--licence", metavar="TEXT", default="", help="TRACE's licence.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(
    source: str,
    out: Path,
    name: str | None,
    model: str | None,
    lend: str | None,
    origin: str,
    licence: str,
    overwrite: bool,
) -> None:
    """Fit TRACE, a bundled name or a file, and write the statistics alone: no routing, no text.

    One half of the requests (of a single long one, of its tokens) is fitted, as much is drawn and held against the
    other half: hit rates of LRU, LFU, LCP and Belady, and their order. What is written is fitted to all of it.
    """
    need("traces fit", "scipy")
    from traces.format.catalogue import open_trace
    from traces.synth.fit import fit
    from traces.synth.fitted import Fitted, completed, save

    if out.exists() and not overwrite:
        raise BadInput(f"--out, got {str(out)!r}: the file exists; --overwrite replaces it")
    with open_trace(source) as trace:
        check = _checked(trace)
        profile = fit(trace)
        shape = [trace.n_layers, trace.n_experts, trace.top_k]
        origin = origin or trace.header.model_source
        licence = licence or trace.header.text_licence or "not told"
    if model is not None:
        from sim.profiles.models import load_model

        found = load_model(model)
        shape = [found.n_moe_layers, found.n_experts, found.top_k]
    if lend is not None:
        with open_trace(lend) as lender:
            profile = completed(profile, fit(lender))
    name = name or out.stem
    save(
        out,
        Fitted(
            schema="moesim.routing-profile/1",
            id=name,
            source=origin,
            licence=licence,
            shape=shape,
            check=check,
            profile=profile,
        ),
    )
    for text in profile.assumptions:
        say(f"assumed: {text}")
    say(f"{out}: fitted to {source}; draw with moesim traces synth {out} -o FILE")


def _checked(trace: Trace) -> Check | None:
    from traces.stats.summary import title
    from traces.synth.compare import PERCENT, POLICIES, compare
    from traces.synth.fitted import Check

    try:
        with bar(f"checking against {trace.name}") as progress:
            found = compare(trace, 0, progress)
    except BadInput:
        say(f"{trace.name}: too short to be halved, so nothing is checked")
        return None
    from sim.base.tables import plain, render

    table = plain("hits", "held-out half", "drawn", "difference", "halves differ by")
    apart, halves = found.differences(), found.halves()
    for percent in PERCENT:
        for policy in POLICIES:
            if (key := f"{policy}_{percent}") in apart:
                table.add_row(
                    title(key),
                    show_frac(found.heldout.figures[key]),
                    show_frac(found.drawn.figures[key]),
                    f"{100 * apart[key]:+.1f}",
                    f"{100 * halves[key]:+.1f}",
                )
    say(render(table), nl=False)
    figure, worst = found.worst_curve()
    turned = found.out_of_order()
    say(
        f"largest difference {100 * worst:+.1f} points; order "
        f"{'as in the held-out half' if not turned else 'turned for ' + ', '.join(turned)}"
    )
    say(found.reachable())
    _, halves_worst = found.worst_half()
    return Check(round(100 * worst, 2), figure, not turned, found.heldout.rows, round(100 * halves_worst, 2))
