"""`moesim train`: train a policy's predictor on the training split of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.base.extras import need
from sim.cli.output_place import OutputFile
from sim.cli.progress import TrainingBar
from sim.cli.say import say
from sim.cli.train_emoe import emoe
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    pass


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def command() -> None:
    """Train a policy's predictor on the requests of a trace that are set aside for learning (needs torch)."""


@command.command(
    cls=UniqueOptions,
    short_help="DuoServe-MoE's ExpertMLP, as in its Table 3.",
    epilog="Example: moesim train duoserve --trace mixtral-8x7b-small --out mine.safetensors, then "
    "simulate --policy duoserve --hw rtx3090 --predictor mine.safetensors",
)
@click.option("--trace", "name", metavar="NAME|FILE", required=True, help="Trace whose training split is learnt from.")
@click.option("--out", type=OutputFile(), required=True, help="File to write.")
@click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    default=15,
    show_default=True,
    help="Passes over the training split (published: 15 to 20 for Mixtral-8x7B).",
)
@click.option(
    "--affinity",
    type=click.Choice(["rows", "full"]),
    default="rows",
    show_default=True,
    help="Affinities of the selected experts, or of all.",
)
@click.option(
    "--nets",
    type=click.Choice(["one", "per_layer"]),
    default="one",
    show_default=True,
    help="One network for all layers, or one for each (the text does not say).",
)
@click.option("--batch-size", type=click.IntRange(2, 1 << 20), default=1024, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, 1, min_open=True), default=2e-3, show_default=True)
@click.option("--widths", metavar="N,N,...", help="Hidden widths; default: 2048,1024,512,256,128,64 as published.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--outputs-only", is_flag=True, help="Leave the networks out: a small file that serves this trace alone.")
def duoserve(
    name: str,
    out: Path,
    epochs: int,
    affinity: str,
    nets: str,
    batch_size: int,
    learning_rate: float,
    widths: str | None,
    seed: int,
    outputs_only: bool,
) -> None:
    """Train DuoServe-MoE's ExpertMLP and measure it on the test split as the paper's Table 3 does."""
    need("train duoserve", "torch")
    from policies.duoserve.predictor import WIDTHS
    from policies.duoserve.train import TrainingPlan, train
    from traces.format.catalogue import open_trace

    plan = TrainingPlan(
        epochs,
        batch_size,
        learning_rate,
        affinity=affinity,
        nets=nets,
        seed=seed,
        widths=WIDTHS if widths is None else _widths(widths),
    )
    with open_trace(name) as trace, TrainingBar() as bar:
        facts = train(trace, out, plan, bar.told, outputs_only)
    test = facts["test"]
    say(f"written: {out}, trained on {facts['tokens']:,} tokens of {trace.name}")
    if test["n"]:
        say(
            f"test split: all {facts['top_k']} experts of a layer predicted {test['top_k_frac']:.2%}, at least "
            f"one {test['any_frac']:.2%}, of {test['n']:,} predictions"
        )


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(word) for word in text.split(","))
    except ValueError:
        widths = ()
    if not widths or not all(1 <= width <= 8192 for width in widths) or len(widths) > 32:
        raise click.BadParameter(
            f"got {text!r}: whole numbers from 1 to 8192 with commas between them, at most 32", param_hint="--widths"
        )
    return widths


command.add_command(emoe)
