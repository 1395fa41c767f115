"""`moesim record`: write a routing trace of a Hugging Face MoE model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sim.base.errors import BadInput
from sim.base.units import show_bytes
from sim.cli.output_place import OutputFile
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

DTYPES = ("auto", "bfloat16", "float16", "float32")
LENGTHS = "a number (37), a range (20-54) or lognormal:MEDIAN:SIGMA"


@click.command(cls=UniqueOptions)
@click.argument("model", metavar="FOLDER|OWNER/NAME|NAME")
@click.option("--out", type=OutputFile(), required=True, help="The trace to write.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="One prompt per line, or .jsonl: prompt (or token_ids), task, split, max_new_tokens.",
)
@click.option("--prompt-tokens", metavar="LENGTHS", help=f"Random prompts instead, of these lengths: {LENGTHS}.")
@click.option("--output-tokens", metavar="LENGTHS", help="Draw output lengths, too, and never end early.")
@click.option("--requests", "n_requests", type=click.IntRange(min=1), help="Record the first N prompts (random: 32).")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Outputs at most.")
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), help="Cut longer prompts.")
@click.option("--chat", is_flag=True, help="Put prompts into the tokenizer's chat template.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests side by side.")
@click.option("--device", help="cpu, cuda, cuda:1, or auto (all GPUs, needs accelerate). [default: a GPU, or cpu]")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Precision to run in; auto is the checkpoint's own on a GPU, float32 on a CPU.",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For every draw.")
@click.option(
    "--train-frac",
    "store_frac",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Share of requests that policies may learn from; the others are scored.",
)
@click.option("--hidden", is_flag=True, help="Record the gate inputs, too.")
@click.option(
    "--embeddings",
    "embedding_width",
    metavar="full|none|WIDTH",
    default="full",
    show_default=True,
    help="Embeddings whole, not at all, or projected to WIDTH values.",
)
@click.option("--compact", is_flag=True, help="Scores in one byte; predictions for decode rows only.")
@click.option("--name", default="", help="Model name in the trace. [default: the last part of the path]")
@click.option("--text-licence", default="", help="Licence of the prompts, for the header.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--offline", is_flag=True, help="Use files already downloaded only.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model. Off unless you say so.")
@click.option("--resume", is_flag=True, help="Continue where a recording was cut off.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
def command(model: str, resume: bool, overwrite: bool, embedding_width: str, **options: Any) -> None:
    """Run prompts through an MoE model and record how it routes.

    The model is a folder, a Hugging Face name, or a checkpoint that comes with this installation (mixtral-8x7b-small);
    weights must be safetensors. docs/record.md lists the classes.
    """
    if resume and overwrite:
        raise BadInput("--resume and --overwrite, got both: continue what was begun, or begin anew")
    width = _width(embedding_width)
    trust = {key: options.pop(key) for key in ("revision", "trust_remote_code", "offline")}
    from traces.record.load import Settings, Source, named
    from traces.record.recorder import record

    settings = Settings(source=Source(named(model), **trust), embedding_width=width, **options)
    try:
        with Bar("recording") as bar:

            def told(done: int, total: int, rows: int) -> None:
                bar.update(done, total, f"recorded {done:,} of {total:,} requests, {rows:,} rows")

            done = record(settings, resume, overwrite, told)
    except OSError as error:
        raise BadInput(f"{options['out']}: {error.strerror or error}; mend that and continue with --resume") from None
    if not done.fresh:
        say(f"{done.path}: already complete")
        return
    say(_said(done.path, done.config))


def _width(text: str) -> int | None:
    if text in ("full", "none"):
        return None if text == "full" else 0
    if not text.isdecimal() or int(text) < 1:
        raise BadInput(f"--embeddings, got {text!r}: full, none, or a number of values such as 256")
    return int(text)


def _said(path: Path, config: Path) -> str:
    from traces.format.reader import Trace

    with Trace(path) as trace:
        shape, n_requests, n_tokens = trace.header.shape, trace.n_requests, trace.n_tokens
        n_test = len(trace.requests.in_split("test"))
    return (
        f"{path}: {shape}, {n_requests:,} requests ({n_test:,} to score), {n_tokens:,} rows, "
        f"{show_bytes(path.stat().st_size)}; its model: {config}"
    )
