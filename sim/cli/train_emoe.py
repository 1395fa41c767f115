"""`moesim train emoe`: train eMoE's predictor, and measure how much each task minds wrong routing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.extras import need
from sim.cli.output_place import OutputFile
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from traces.format.reader import Trace


@click.command(
    cls=UniqueOptions,
    short_help="eMoE's XLNet in both forms, as in its Table 2.",
    epilog="Example: moesim train emoe --trace mixtral-8x7b-small --out mine.safetensors, then "
    "simulate --policy emoe --hw a6000 --predictor mine.safetensors",
)
@click.option("--trace", "name", metavar="NAME|FILE", required=True, help="Trace whose training split is learnt from.")
@click.option("--out", type=OutputFile(), required=True, help="File to write.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Trained model the trace was recorded from, to measure sensitivity on; without it every task is "
    "taken to be sensitive in every layer.",
)
@click.option(
    "--per-task",
    type=click.IntRange(1, 10_000),
    default=3,
    show_default=True,
    help="Requests read per task to measure sensitivity.",
)
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=2500, show_default=True, help="Per form, A and L.")
@click.option("--batch-size", type=click.IntRange(1, 1 << 16), default=32, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, 1, min_open=True), default=2e-3, show_default=True)
@click.option("--width", type=click.IntRange(16, 1024), default=48, show_default=True, help="A multiple of 16.")
@click.option("--layers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def emoe(
    name: str,
    out: Path,
    checkpoint: Path | None,
    per_task: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    width: int,
    layers: int,
    seed: int,
) -> None:
    """Train eMoE's XLNet in both forms and measure it on the test split as the paper's Table 2 does."""
    if width % 16:
        raise click.BadParameter(f"got {width}: heads are 16 wide; take a multiple of 16", param_hint="--width")
    need("train emoe", "torch", "transformers")
    from policies.emoe.train import TrainingPlan, train
    from sim.cli.progress import TrainingBar
    from traces.format.catalogue import open_trace

    plan = TrainingPlan(steps, batch_size, learning_rate, width, 2 * width, layers, seed)
    with open_trace(name) as trace, TrainingBar() as bar:
        measured, facts = sensitivity(trace, checkpoint, per_task, seed)
        found = train(trace, out, plan, bar.told, measured, facts)
    test = found["test"]
    say(f"written: {out}, trained on {found['store_requests']} requests of {trace.name}")
    say(
        "most used experts of a test prompt's layers that were foretold: "
        + ", ".join(f"{key} {value:.1%}" for key, value in test.items() if key != "n")
        + f" ({test['n']} prompts)"
    )


def sensitivity(
    trace: Trace, checkpoint: Path | None, per_task: int, seed: int
) -> tuple[NDArray[np.float64] | None, dict[str, Any]]:
    """Similarity by task and layer, and how it was measured; (None, {}) without a checkpoint."""
    if checkpoint is None:
        return None, {}
    from traces.record.checkpoint import load
    from traces.record.sensitivity import similarity

    cosine, same = similarity(load(checkpoint), trace, per_task, seed)
    facts = {
        "measure": "cosine of next-token distributions",
        "requests_per_task": per_task,
        "seed": seed,
        "same_likeliest_token": same.round(4).tolist(),
    }
    return cosine, facts
