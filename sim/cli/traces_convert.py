"""`moesim traces convert`: routing that another program recorded, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFile
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions


@click.command(
    "convert",
    cls=UniqueOptions,
    short_help="Convert routing logs of one format to a trace.",
    epilog="docs/convert.md describes every format, what it lacks and how to get rid of a .pt file.",
)
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, metavar="FILE", type=OutputFile(), help="The trace to write.")
@click.option("--from", "source", metavar="FORMAT", help="Format of the inputs; default: told from their content.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@click.option("--n-experts", type=int, metavar="N", help="Routed experts per layer, where the file does not tell.")
@click.option("--top-k", type=int, metavar="K", help="Experts per token, where the file does not tell.")
@click.option("--model", metavar="NAME", help="The model's name, where the file does not tell.")
@click.option("--model-source", metavar="TEXT", help="Where the model comes from; default: format and file name.")
@click.option("--task", default="", metavar="NAME", help="Task of all requests that the file gives none.")
@click.option(
    "--train-frac",
    "store_frac",
    type=float,
    default=0.0,
    show_default=True,
    metavar="F",
    help="Share of the requests that policies may learn from.",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Draws those requests.")
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
    "--weights",
    "weights_kind",
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
def command(inputs: tuple[Path, ...], out: Path, source: str | None, overwrite: bool, **given: Any) -> None:
    """Convert routing logs of one format to a trace; several files become its requests one after the other."""
    from sim.cli.progress import bar
    from traces.convert import Options, convert

    if out.exists() and not overwrite:
        raise BadInput(f"{out}: exists; replace it with --overwrite, or name another file")
    if any(out.exists() and path.exists() and out.samefile(path) for path in inputs):
        raise BadInput(f"{out}: is one of the inputs; name another file")
    if _is_imatrix(inputs[0], source):
        _counts(inputs, out, given)
        return
    with bar(f"converting to {out.name}") as progress:
        done = convert(inputs, out, source, Options(**given), progress)
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
    from traces.convert import imatrix
    from traces.stats import counts

    if len(inputs) > 1:
        raise BadInput(f"{inputs[1]}: a second importance matrix: llama-imatrix itself adds several up (--in-file)")
    defaults = {"model": None, "model_source": None, "task": "", "store_frac": 0.0, "seed": 0, "one_stream": False}
    if odd := [name for name, value in given.items() if value != defaults.get(name) and name != "model"]:
        raise BadInput(f"--{odd[0].replace('_', '-')}: an importance matrix has no routes for it; leave it out")
    if out.suffix not in (".yaml", ".yml"):
        raise BadInput(
            f"--out, got {str(out)!r}: an importance matrix becomes counts by expert, no trace; name it .yaml"
        )
    found = imatrix.read(inputs[0], given["model"] or "")
    counts.save(out, found)
    told = found.summary(out.stem)
    read = f", {found.tokens:,} tokens read" if found.tokens else ""
    say(f"{out}: {told.shape}{read}, counts by expert (from {imatrix.NAME})")
    say(f"note: {counts.WHAT_FOR}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
