"""`moesim traces synth`: fit a generator to a trace and draw another; `moesim traces stats`: compare traces."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput, CheckFailed
from sim.base.units import show_bytes, show_frac
from sim.cli.output_place import OutputFile
from sim.cli.progress import bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from traces.stats.summary import Summary
    from traces.synth.profile import Profile
    from traces.synth.published import PublishedFigures

_SHAPE = re.compile(r"^([0-9]{1,4})x([0-9]{1,4})(?:,k=|,|k)([0-9]{1,4})$")
_EPILOG = (
    "Example: moesim traces synth qwen3-30b-a3b --model deepseek-v3-r1 --requests 20 -o big.safetensors. "
    "Without --out, only what was fitted is shown. docs/synthetic_traces.md explains the model."
)


@click.command(
    "synth", cls=UniqueOptions, short_help="Draw a synthetic trace like SOURCE, of any shape.", epilog=_EPILOG
)
@click.argument("source")
@click.option("-o", "--out", metavar="FILE", type=OutputFile(), help="The trace to write.")
@click.option("--model", metavar="NAME", help="Draw for this model's routing shape; how it scales is an assumption.")
@click.option("--shape", metavar="LxE,k=K", help="The same for a shape, e.g. 58x256,k=8.")
@click.option("--targets", metavar="NAME|FILE", help="Bend the fit to figures that a paper prints; `list` lists them.")
@click.option("--requests", "n_requests", type=click.IntRange(min=1), metavar="N", help="Default: the source's.")
@click.option("--prompt-tokens", type=click.IntRange(1, 10**6), metavar="N", help="Mean length of prompts, about.")
@click.option("--output-tokens", type=click.IntRange(1, 10**6), metavar="N", help="Mean length of answers, about.")
@click.option("--tokens", "n_tokens", type=click.IntRange(min=1), metavar="N", help="Requests that hold N tokens.")
@click.option(
    "--levels",
    type=click.Choice(["all", "scores", "experts"]),
    default="all",
    show_default=True,
    help="What to write: all levels, without predictions and embeddings, or selections only.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of all draws.")
@click.option("--check", is_flag=True, help="Fit one half and compare with the other; exit 1 beyond 2 points.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(
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
    from traces.synth.fit import fit

    if targets == "list":
        for name in published.published():
            say(f"{name}: {published.load(name).source}")
        return
    if n_requests is not None and n_tokens is not None:
        raise BadInput("--requests and --tokens, got both: give one of them")
    if out is not None and out.exists() and not overwrite:
        raise BadInput(f"--out, got {str(out)!r}: the file exists; --overwrite replaces it")
    figures = None if targets is None else published.load(targets)
    wanted = _wanted(model, shape, figures)
    profile, kept_for = kept(source)
    if profile is None:
        with open_trace(source) as trace:
            if check:
                _check(trace, seed)
            own = wanted is None or wanted[1:] == (trace.n_layers, trace.n_experts, trace.top_k)
            profile = fit(trace, routes=own and figures is None)
    elif check:
        raise BadInput(f"--check, got it with the fit {source}: its file says how it was checked; check a trace")
    if wanted is None:
        wanted = kept_for
    if figures is not None:
        with bar(f"fitting to {figures.id}") as progress:
            profile = published.fit_to(profile, figures, seed, progress)
    elif wanted is not None:
        profile = scale.scaled(profile, *wanted[1:])
    profile = scale.with_lengths(profile, prompt_tokens or 0, output_tokens or 0)
    _describe(profile)
    if out is not None:
        _draw(out, profile, wanted[0] if wanted else profile.source, n_requests, n_tokens, levels, seed, figures)
    elif figures is not None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            drawn = Path(folder) / "drawn.safetensors"
            _draw(drawn, profile, figures.model, None, 12_000, "all", seed, figures, keep=False)


def kept(source: str) -> tuple[Profile | None, tuple[str, int, int, int] | None]:
    """The profile of a fit, by its name or file, with the model and shape it is for; nothing for a trace."""
    from traces.format.bundled import bundled_traces
    from traces.synth import fitted

    if source in bundled_traces() or not (source in fitted.fitted() or source.endswith((".yaml", ".yml"))):
        return None, None
    found = fitted.load(source)
    n_layers, n_experts, top_k = found.shape
    return found.profile, (found.id, n_layers, n_experts, top_k)


def _wanted(model: str | None, shape: str | None, figures: PublishedFigures | None) -> tuple[str, int, int, int] | None:
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


def _draw(
    out: Path,
    profile: Profile,
    model: str,
    n_requests: int | None,
    n_tokens: int | None,
    levels: str,
    seed: int,
    figures: PublishedFigures | None,
    keep: bool = True,
) -> None:
    from traces.format.reader import Trace
    from traces.synth.published import reached
    from traces.synth.write import write

    with bar(f"drawing {out.name}") as progress:
        write(
            out,
            profile,
            seed=seed,
            n_requests=n_requests,
            n_tokens=n_tokens,
            model=model,
            levels=levels,
            progress=progress,
        )
    with Trace(out) as trace:
        if keep:
            say(
                f"{out}: {trace.header.shape}, {trace.n_requests:,} requests, {trace.n_tokens:,} tokens, "
                f"{show_bytes(out.stat().st_size)}; labels {', '.join(trace.header.labels)}"
            )
        if figures is None:
            return
        rows = [
            (row.what, show_frac(row.target), show_frac(row.reached), _points(row.reached - row.target))
            for row in reached(figures, trace)
        ]
    _put(("published figure", "target", "reached", "difference"), rows)


def _check(trace: Any, seed: int) -> None:
    """Print the comparison with the held-out half; fail when a cache curve is further off than three points."""
    from traces.stats.summary import title
    from traces.synth.compare import TOLERANCE, compare

    with bar(f"checking against {trace.name}") as progress:
        found = compare(trace, seed, progress)
    apart, halves = found.differences(), found.halves()
    rows = [
        (
            title(name),
            *(show_frac(s.figures.get(name)) for s in (found.fitted, found.heldout, found.drawn)),
            *(_points(points[name]) if name in points else "-" for points in (apart, halves)),
        )
        for name in found.heldout.figures
    ]
    titles = ("mean over layers", "fitted half", "held-out half", "synthetic", "difference", "halves differ by")
    _put(titles, rows)
    name, worst = found.worst_curve()
    turned = found.out_of_order()
    largest = f"the largest difference is {_points(worst)} points ({title(name)})" if name else "none"
    say(f"plain caches: {largest}; the bound is {100 * TOLERANCE:.0f}")
    say(found.reachable())
    say(f"order of LRU, LFU and LCP: {'as in the held-out half' if not turned else 'turned for ' + ', '.join(turned)}")
    bound = f"at most {100 * TOLERANCE:.0f} are allowed; more requests in the source make a better fit"
    if turned:
        raise CheckFailed(f"{trace.path}: plain caches rank otherwise in what was drawn ({', '.join(turned)})")
    if abs(worst) > TOLERANCE:
        raise CheckFailed(f"{trace.path}: synthetic and held-out hit rates differ by {_points(worst)} points: {bound}")


@click.command(
    "stats",
    short_help="Skew, repetition, accuracy, cache curves of TRACE...",
    epilog="Example: moesim traces stats mixtral-8x7b-small. docs/traces.md says what each means.",
)
@click.argument("sources", metavar="TRACE...", nargs=-1)
@click.option(
    "--requests",
    "n_requests",
    type=click.IntRange(min=1),
    metavar="N",
    help="Judge the first N requests only, to compare with traces of a single prompt.",
)
@click.option("--public", metavar="NAME,...", help="Add figures of published traces of large models; `all`, or names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def stats_command(sources: tuple[str, ...], n_requests: int | None, public: str | None, as_json: bool) -> None:
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
        runs = [
            {
                "name": s.name,
                "shape": s.shape,
                "rows": s.rows,
                "requests": s.requests,
                "curve_rows": s.curve_rows,
                "curve_phase": s.curve_phase,
                "figures": s.figures,
            }
            for s in found
        ]
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
    _put(("mean over layers", *(s.name for s in found)), rows)


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


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _put(titles: tuple[str, ...], rows: list[Any]) -> None:
    from sim.base.tables import plain, render

    content = plain(*titles)
    for row in rows:
        content.add_row(*row)
    say(render(content), nl=False)
