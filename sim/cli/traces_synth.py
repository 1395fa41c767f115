"""`moesim traces synth` and `fit`: a generator fitted to a trace, kept as a file, and other traces drawn from it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.base.errors import BadInput, CheckFailed
from sim.base.extras import need
from sim.base.units import show_bytes, show_frac
from sim.cli.output_place import OutputFile
from sim.cli.progress import bar
from sim.cli.say import say, say_table
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from traces.format.reader import Trace
    from traces.stats.summary import Summary
    from traces.synth.compare import Comparison
    from traces.synth.fitted import Check
    from traces.synth.profile import Profile
    from traces.synth.published import PublishedFigures

Wanted = tuple[str, int, int, int]
"""A model's name, layers, experts and k."""
_SHAPE = re.compile(r"^([0-9]{1,4})x([0-9]{1,4})(?:,k=|,|k)([0-9]{1,4})$")
_COUNT = click.IntRange(min=1)
_MEAN = click.IntRange(1, 10**6)
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")


def _may_be_new(out: Path | None, overwrite: bool) -> None:
    if out is not None and out.exists() and not overwrite:
        raise BadInput(f"--out, got {str(out)!r}: the file exists; --overwrite replaces it")


@click.command(
    "synth",
    cls=UniqueOptions,
    short_help="Draw a synthetic trace like SOURCE, of any shape.",
    epilog="Example: moesim traces synth qwen3-30b-a3b --model deepseek-v3-r1 --requests 20 -o big.safetensors. "
    "Without --out, only what was fitted is shown. docs/synthetic_traces.md explains the model.",
)
@click.argument("source")
@click.option("-o", "--out", metavar="FILE", type=OutputFile(), help="The trace to write.")
@click.option("--model", metavar="NAME", help="Draw for this model's routing shape; how it scales is an assumption.")
@click.option("--shape", metavar="LxE,k=K", help="The same for a shape, e.g. 58x256,k=8.")
@click.option("--targets", metavar="NAME|FILE", help="Bend the fit to figures that a paper prints; `list` lists them.")
@click.option("--requests", "n_requests", type=_COUNT, metavar="N", help="Default: the source's.")
@click.option("--prompt-tokens", type=_MEAN, metavar="N", help="Mean length of prompts, about.")
@click.option("--output-tokens", type=_MEAN, metavar="N", help="Mean length of answers, about.")
@click.option("--tokens", "n_tokens", type=_COUNT, metavar="N", help="Requests that hold N tokens.")
@click.option(
    "--levels",
    type=click.Choice(["all", "scores", "experts"]),
    default="all",
    show_default=True,
    help="What to write: all levels, without predictions and embeddings, or selections only.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of all draws.")
@click.option("--check", is_flag=True, help="Fit one half and compare with the other; exit 1 beyond 2 points.")
@OVERWRITE
def synth(
    source: str,
    out: Path | None,
    model: str | None,
    shape: str | None,
    targets: str | None,
    n_requests: int | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    n_tokens: int | None,
    levels: str,
    seed: int,
    check: bool,
    overwrite: bool,
) -> None:
    """Draw a synthetic trace that behaves like SOURCE, a bundled name or a file.

    Popularity, repetition over tokens, requests and tasks, affinity between layers and the accuracy of predictions are
    fitted; choices, weights, gate scores, predictions, token ids and embeddings are drawn. Every result on such a trace
    carries the label `synthetic`. Lengths that are asked for are the source's, longer or shorter by one factor.
    """
    from traces.format.catalogue import open_trace
    from traces.synth import published, scale
    from traces.synth.fit import fit as fitted_to
    from traces.synth.write import write

    if targets == "list":
        for name in published.published():
            say(f"{name}: {published.load(name).source}")
        return
    if n_requests is not None and n_tokens is not None:
        raise BadInput("--requests and --tokens, got both: give one of them")
    _may_be_new(out, overwrite)
    figures = None if targets is None else published.load(targets)
    wanted = _wanted(model, shape, figures)
    profile, kept_for = kept(source)
    if profile is None:
        with open_trace(source) as trace:
            if check:
                _check(trace, seed)
            own = wanted is None or wanted[1:] == (trace.n_layers, trace.n_experts, trace.top_k)
            profile = fitted_to(trace, routes=own and figures is None)
    elif check:
        raise BadInput(f"--check, got it with the fit {source}: its file says how it was checked; check a trace")
    wanted = wanted or kept_for
    if figures is not None:
        with bar(f"fitting to {figures.id}") as progress:
            profile = published.fit_to(profile, figures, seed, progress)
    elif wanted is not None:
        profile = scale.scaled(profile, *wanted[1:])
    profile = scale.with_lengths(profile, prompt_tokens or 0, output_tokens or 0)
    _describe(profile)
    if out is None and figures is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "drawn.safetensors" if out is None else out
        if out is None:
            n_requests, n_tokens, levels = None, 12_000, "all"
        with bar(f"drawing {drawn.name}") as progress:
            write(
                drawn,
                profile,
                seed=seed,
                n_requests=n_requests,
                n_tokens=n_tokens,
                model=wanted[0] if wanted else profile.source,
                levels=levels,
                progress=progress,
            )
        _say_drawn(drawn, figures, out is not None)


def kept(source: str) -> tuple[Profile | None, Wanted | None]:
    """The profile of a fit, by its name or file, with the model and shape it is for; nothing for a trace."""
    from traces.format.bundled import bundled_traces
    from traces.synth import fitted

    if source in bundled_traces() or not (source in fitted.fitted() or source.endswith((".yaml", ".yml"))):
        return None, None
    found = fitted.load(source)
    n_layers, n_experts, top_k = found.shape
    return found.profile, (found.id, n_layers, n_experts, top_k)


def _wanted(model: str | None, shape: str | None, figures: PublishedFigures | None) -> Wanted | None:
    """Name and shape asked for, by model, shape or figures; None for the source's own."""
    if sum(value is not None for value in (model, shape, figures)) > 1:
        raise BadInput("--model, --shape and --targets each say a shape: give one of them")
    if figures is not None:
        return figures.model, figures.n_layers, figures.n_experts, figures.top_k
    if model is not None:
        from sim.profiles.models import load_model

        found = load_model(model, {})
        return found.id, found.n_moe_layers, found.n_experts, found.top_k
    if shape is None:
        return None
    match = _SHAPE.match(shape.replace(" ", ""))
    if match is None:
        raise BadInput(f"--shape, got {shape!r}: layers x experts and k, such as 58x256,k=8")
    n_layers, n_experts, top_k = (int(part) for part in match.groups())
    if not (1 <= n_layers <= 1024 and 1 <= top_k <= n_experts <= 4096):
        raise BadInput(f"--shape, got {shape!r}: 1 to 1024 layers, 1 to 4096 experts, k from 1 to the experts")
    return "synthetic", n_layers, n_experts, top_k


def _describe(profile: Profile) -> None:
    """What was fitted, in a few lines; assumptions are always among them."""
    say(
        f"fitted to {profile.source}: {profile.n_layers}x{profile.n_experts}, k={profile.top_k}, "
        f"{len(profile.requests)} requests, {max(1, len(profile.tasks))} tasks"
    )
    parts = {name: show_frac(share) for name, share in profile.varies_with().items()}
    fresh = parts.pop("new")
    shares = ", ".join(f"{name} {share}" for name, share in parts.items())
    say(f"what a token's scores vary with: {shares}, new each time {fresh}")
    for text in profile.assumptions:
        say(f"assumed: {text}")


def _say_drawn(path: Path, figures: PublishedFigures | None, is_kept: bool) -> None:
    """The trace in a line, where it is kept, and how near it came to published figures."""
    from traces.format.reader import Trace
    from traces.synth.published import reached

    with Trace(path) as trace:
        if is_kept:
            say(
                f"{path}: {trace.header.shape}, {trace.n_requests:,} requests, {trace.n_tokens:,} tokens, "
                f"{show_bytes(path.stat().st_size)}; labels {', '.join(trace.header.labels)}"
            )
        if figures is not None:
            rows = [
                (row.what, show_frac(row.target), show_frac(row.reached), _points(row.reached - row.target))
                for row in reached(figures, trace)
            ]
            say_table(("published figure", "target", "reached", "difference"), rows)


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
@OVERWRITE
def fit(
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
    from traces.synth.fit import fit as fitted_to
    from traces.synth.fitted import SCHEMA, Fitted, completed, save

    _may_be_new(out, overwrite)
    with open_trace(source) as trace:
        check = _checked(trace)
        profile = fitted_to(trace)
        shape = [trace.n_layers, trace.n_experts, trace.top_k]
        origin = origin or trace.header.model_source
        licence = licence or trace.header.text_licence or "not told"
    if model is not None:
        from sim.profiles.models import load_model

        found = load_model(model)
        shape = [found.n_moe_layers, found.n_experts, found.top_k]
    if lend is not None:
        with open_trace(lend) as lender:
            profile = completed(profile, fitted_to(lender))
    told = {"source": origin, "licence": licence, "shape": shape, "check": check, "profile": profile}
    save(out, Fitted(schema=SCHEMA, id=name or out.stem, **told))  # type: ignore[arg-type]
    for text in profile.assumptions:
        say(f"assumed: {text}")
    say(f"{out}: fitted to {source}; draw with moesim traces synth {out} -o FILE")


def _checked(trace: Trace) -> Check | None:
    """Say how a fit to one half does on the other half, for the file; None where there are no halves."""
    from traces.synth.compare import CURVES, compare
    from traces.synth.fitted import Check

    try:
        with bar(f"checking against {trace.name}") as progress:
            found = compare(trace, 0, progress)
    except BadInput:
        say(f"{trace.name}: too short to be halved, so nothing is checked")
        return None
    known = [name for name in CURVES if name in found.differences()]
    _say_compared(found, "hits", {"held-out half": found.heldout, "drawn": found.drawn}, known)
    figure, worst = found.worst_curve()
    turned = found.out_of_order()
    say(f"largest difference {_points(worst)} points; order {_order(turned)}")
    say(found.reachable())
    _, halves_worst = found.worst_half()
    return Check(round(100 * worst, 2), figure, not turned, found.heldout.rows, round(100 * halves_worst, 2))


def _check(trace: Trace, seed: int) -> None:
    """Print the comparison with the held-out half; fail when a cache curve is further off than the bound."""
    from traces.stats.summary import title
    from traces.synth.compare import TOLERANCE, compare

    with bar(f"checking against {trace.name}") as progress:
        found = compare(trace, seed, progress)
    sides = {"fitted half": found.fitted, "held-out half": found.heldout, "synthetic": found.drawn}
    _say_compared(found, "mean over layers", sides, found.heldout.figures)
    name, worst = found.worst_curve()
    turned = found.out_of_order()
    largest = f"the largest difference is {_points(worst)} points ({title(name)})" if name else "none"
    say(f"plain caches: {largest}; the bound is {100 * TOLERANCE:.0f}")
    say(found.reachable())
    say(f"order of LRU, LFU and LCP: {_order(turned)}")
    bound = f"at most {100 * TOLERANCE:.0f} are allowed; more requests in the source make a better fit"
    if turned:
        raise CheckFailed(f"{trace.path}: plain caches rank otherwise in what was drawn ({', '.join(turned)})")
    if abs(worst) > TOLERANCE:
        raise CheckFailed(f"{trace.path}: synthetic and held-out hit rates differ by {_points(worst)} points: {bound}")


def _say_compared(found: Comparison, what: str, sides: dict[str, Summary], names: Iterable[str]) -> None:
    """Figures of halves and of what was drawn, how far the last two are apart, and the halves themselves."""
    from traces.stats.summary import title

    apart = found.differences(), found.halves()
    rows = [
        (
            title(name),
            *(show_frac(side.figures.get(name)) for side in sides.values()),
            *(_points(points[name]) if name in points else "-" for points in apart),
        )
        for name in names
    ]
    say_table((what, *sides, "difference", "halves differ by"), rows)


def _order(turned: list[str]) -> str:
    return f"turned for {', '.join(turned)}" if turned else "as in the held-out half"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


COMMANDS = (fit, synth)
