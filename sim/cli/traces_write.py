"""`moesim traces convert`, `compose`, `squeeze` and `unsqueeze`: one trace out of a log, or out of another trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count
from sim.cli.output_place import OutputFile
from sim.cli.progress import bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

OUT = click.option("-o", "--out", required=True, metavar="FILE", type=OutputFile(), help="The trace to write.")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")


def _may_be_new(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise BadInput(f"{out}: exists; replace it with --overwrite, or name another file")


def _is_another(out: Path, source: Path, what: str) -> None:
    if out.exists() and source.exists() and out.samefile(source):
        raise BadInput(f"{out}: is {what}; name another file")


def _has_folder(out: Path) -> None:
    if not out.parent.is_dir():
        raise BadInput(f"{out}: there is no folder {out.parent}; create it, or name another file")


@click.command(
    "convert",
    cls=UniqueOptions,
    short_help="Convert routing logs of one format to a trace.",
    epilog="docs/convert.md describes every format, what it lacks and how to get rid of a .pt file.",
)
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@OUT
@click.option("--from", "source", metavar="FORMAT", help="Format of the inputs; default: told from their content.")
@OVERWRITE
@click.option("--n-experts", type=int, metavar="N", help="Routed experts per layer, where the file does not tell.")
@click.option("--top-k", type=int, metavar="K", help="Experts per token, where the file does not tell.")
@click.option("--model", metavar="NAME", help="The model's name, where the file does not tell.")
@click.option("--model-source", metavar="TEXT", help="Where the model comes from; default: format and file name.")
@click.option("--task", default="", metavar="NAME", help="Task of all requests that the file gives none.")
@click.option(
    *("--train-frac", "store_frac"),
    default=0.0,
    show_default=True,
    metavar="F",
    help="Share of the requests that policies may learn from.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Draws those requests.")
@click.option(
    "--prompt-len", type=int, metavar="N", help="Prefill rows of each request, where the file marks no phases."
)
@click.option("--gate", type=click.Choice(["softmax", "sigmoid"]), help="The gate's scores; default: softmax.")
@click.option(
    "--renormalised/--no-renormalised",
    default=None,
    help="Whether the model divides the chosen scores by their sum; default: as the weights show.",
)
@click.option(
    *("--weights", "weights_kind"),
    type=click.Choice(["applied", "raw"]),
    help="What the file's weights are: factors the model applies, or scores before renormalising.",
)
@click.option(
    "--selection",
    type=click.Choice(["topk", "other"]),
    help="Whether the k highest scores are chosen (default), or a bias or groups decide.",
)
@click.option("--scaling", type=float, metavar="X", help="Factor on the weights after renormalising; default: 1.")
@click.option("--ranked/--unranked", default=None, help="Whether ids without weights are in router order.")
@click.option("--one-stream", is_flag=True, help="Take a log without requests as one (label `unsegmented`).")
def convert(inputs: tuple[Path, ...], out: Path, source: str | None, overwrite: bool, **given: Any) -> None:
    """Convert routing logs of one format to a trace; several files become its requests one after the other."""
    from traces import convert as conversion

    _may_be_new(out, overwrite)
    for path in inputs:
        _is_another(out, path, "one of the inputs")
    if _is_imatrix(inputs[0], source):
        _counts(inputs, out, given)
        return
    with bar(f"converting to {out.name}") as progress:
        done = conversion.convert(inputs, out, source, conversion.Options(**given), progress)
    header = done.header
    splits = f", {done.n_store} of them store" if done.n_store else ""
    requests, tokens = _count(done.n_requests, "request"), _count(done.n_tokens, "token")
    counted = f"{requests}{splits}, {tokens}, {done.n_decode:,} of them decode"
    say(f"{out}: {header.shape}, {counted} (from {done.source})")
    say(f"levels: {', '.join(done.levels)}")
    if header.labels:
        say(f"labels: {', '.join(header.labels)}")
    for note in done.notes:
        say(f"note: {note}")


def _is_imatrix(path: Path, source: str | None) -> bool:
    from traces.convert import imatrix
    from traces.convert.text import head_of

    if source is not None or not path.is_file():
        return source == imatrix.NAME
    head = head_of(path, 512)
    if imatrix.looks_like_dat(head):
        raise BadInput(
            f"{path}: an importance matrix in the older .dat format, which keeps no counts by expert; write it as "
            "GGUF: llama-imatrix --output-format gguf"
        )
    return imatrix.sniff(head)


def _counts(inputs: tuple[Path, ...], out: Path, given: dict[str, Any]) -> None:
    """An importance matrix becomes a file of counts, not a trace."""
    from traces.convert import Options, imatrix
    from traces.stats import counts

    if len(inputs) > 1:
        raise BadInput(f"{inputs[1]}: a second importance matrix: llama-imatrix itself adds several up (--in-file)")
    plain = Options()
    if odd := [name for name, value in given.items() if value != getattr(plain, name) and name != "model"]:
        raise BadInput(f"--{odd[0].replace('_', '-')}: an importance matrix has no routes for it; leave it out")
    if out.suffix not in (".yaml", ".yml"):
        rule = "an importance matrix becomes counts by expert, no trace; name it .yaml"
        raise BadInput(f"--out, got {str(out)!r}: {rule}")
    found = imatrix.read(inputs[0], given["model"] or "")
    counts.save(out, found)
    told = found.summary(out.stem)
    read = f", {found.tokens:,} tokens read" if found.tokens else ""
    say(f"{out}: {told.shape}{read}, counts by expert (from {imatrix.NAME})")
    say(f"note: {counts.WHAT_FOR}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


@click.command(
    "compose",
    cls=UniqueOptions,
    short_help="Give the requests of TRACE arrival times.",
    epilog="Example: moesim traces compose mixtral-8x7b-small -o load.safetensors --arrivals poisson:0.01, and then "
    "simulate --trace load.safetensors. docs/convert.md goes on.",
)
@click.argument("trace")
@OUT
@click.option(
    *("--arrivals", "source"),
    required=True,
    metavar="SOURCE",
    help="poisson:RATE, gamma:RATE,CV (requests per second), or an Azure, Mooncake or BurstGPT log.",
)
@click.option("--rate-scale", default=1.0, show_default=True, metavar="X", help="Times the source's rate.")
@click.option(
    "--lengths",
    type=click.Choice(["recorded", "arrivals"]),
    default="recorded",
    show_default=True,
    help="Keep each request's recorded lengths, or splice requests of the log's lengths (label `spliced`).",
)
@click.option(
    *("--requests", "n_requests"),
    type=click.IntRange(min=1),
    metavar="N",
    help="How many requests arrive; default: all of the split.",
)
@click.option(
    "--split",
    type=click.Choice(["test", "all"]),
    default="test",
    show_default=True,
    help="Which requests arrive; those of the training split come before, at time 0.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of the process.")
@OVERWRITE
def compose(
    trace: str,
    out: Path,
    source: str,
    rate_scale: float,
    lengths: str,
    n_requests: int | None,
    split: str,
    seed: int,
    overwrite: bool,
) -> None:
    """Write TRACE, a bundled name or a file, with arrival times; `simulate` honours them."""
    from traces.format.catalogue import open_trace
    from traces.synth import compose as composing
    from traces.synth.arrivals import arrivals

    _may_be_new(out, overwrite)
    _has_folder(out)
    with open_trace(trace) as opened:
        _is_another(out, opened.path, "the trace itself")
        present = len(opened.requests.in_split("test")) if split == "test" else opened.n_requests
        wanted = n_requests or max(1, present)
        times = arrivals(source, wanted, seed, rate_scale)
        if len(times) < wanted:
            rule = f"{wanted} requests need one each; give --requests {len(times)}"
            raise BadInput(f"{source}, got {len(times)} arrivals: {rule}")
        kept = [one for one in times if lengths == "recorded" or (one.prompt_len != 0 and one.outputs != 0)]
        if not kept:
            raise BadInput(f"{source}: lengths, got only requests without prompt or output; use --lengths recorded")
        plans = composing.plan(opened, kept, lengths, split)
        origin = f"{Path(source).name if Path(source).exists() else source}, rate scale {rate_scale:g}, seed {seed}"
        with bar(f"writing {out.name}") as progress:
            composing.compose(opened, plans, out, origin, lengths == "arrivals", progress)
    span_s = kept[-1].at_s if kept else 0.0
    rate = f", {(len(kept) - 1) / span_s:.3g} per second" if span_s else ""
    arrive = "arrives" if len(kept) == 1 else "arrive"
    say(f"{out}: {show_count(len(kept), 'request')} {arrive} in {span_s:.6g} s{rate}; lengths {lengths}")
    if lengths == "arrivals":
        say("labels: spliced")
    if len(kept) < len(times):
        say(f"note: requests without prompt or output tokens, left out: {len(times) - len(kept)}")


@click.command("squeeze", cls=UniqueOptions, short_help="Write TRACE in fewer bytes.")
@click.argument("trace")
@click.argument("out", type=OutputFile())
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--plain", multiple=True, metavar="TENSOR", help="Leave it as it is, for runs that read all of it.")
def squeeze(trace: str, out: Path, overwrite: bool, plain: tuple[str, ...]) -> None:
    """Write TRACE, a bundled name or a file, to OUT in blocks that are unpacked as they are read.

    Nothing else changes, the checksum neither: a run on either is the same run.
    """
    from traces.format.squeeze import squeeze as way

    _stored_anew(trace, out, overwrite, partial(way, plain=plain))


@click.command("unsqueeze", cls=UniqueOptions, short_help="Write TRACE as a plain file again.")
@click.argument("trace")
@click.argument("out", type=OutputFile())
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def unsqueeze(trace: str, out: Path, overwrite: bool) -> None:
    """Write TRACE, squeezed or not, to OUT as a plain file, whose tensors any safetensors reader can read."""
    from traces.format.squeeze import unsqueeze as way

    _stored_anew(trace, out, overwrite, way)


def _stored_anew(trace: str, out: Path, overwrite: bool, way: Callable[..., Path]) -> None:
    from traces.format.catalogue import open_trace

    _may_be_new(out, overwrite)
    _has_folder(out)
    with open_trace(trace) as opened, bar(f"writing {out.name}") as progress:
        _is_another(out, opened.path, "the trace itself")
        n_bytes = opened.path.stat().st_size
        way(opened, out, progress)
    say(f"{out}: {show_bytes(out.stat().st_size)}, before {show_bytes(n_bytes)}")


COMMANDS = (convert, compose, squeeze, unsqueeze)
