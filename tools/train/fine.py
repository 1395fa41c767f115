"""Train the small model of many fine experts that docs/importance.md shows, and record a trace of it: one command.

    python -m tools.train.fine --out .traindata

Its experts begin as slices of the bundled model's, whose tokenizer it keeps. Debian's package tools fetch the corpus;
a folder that has the corpus or the tokens already keeps them, and training that was stopped goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

import traces
from tools.train import corpus, evaluate, record, to_trace, tokens, train

NAME = "mixtral-fine"
BEGUN_FROM = Path(traces.__file__).parent / "models" / "mixtral-8x7b-small"
CAP = 3_000_000  # training tokens per task: several times what is read


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder for all that is made")
@click.option("--steps", default=420, show_default=True, help="of 4096 tokens; the rate falls over the last third")
@click.option("--requests", default=18, show_default=True, help="of the trace; a third of them to score")
def main(out: Path, steps: int, requests: int) -> None:
    """Fetch the corpus, train, evaluate and record."""
    text, data, run = out / "corpus", out / "tokens", out / NAME
    if not (text / "corpus_built.json").exists():
        corpus.main([f"--out={text}"], standalone_mode=False)
    if not (data / "tokens.json").exists():
        own = BEGUN_FROM / "tokenizer.json"
        tokens.main([f"--corpus={text}", f"--out={data}", f"--cap={CAP}", f"--tokenizer={own}"], standalone_mode=False)
    schedule = [f"--steps={steps}", f"--decay-steps={steps // 3}", "--batch-tokens=4096", "--lr=0.003"]
    place = [f"--data={data}", f"--out={run}", "--device=cpu"]
    start = [f"--shape={NAME}", f"--begin-from={BEGUN_FROM}", "--threads=1", "--save-every=60", "--resume"]
    train.main([*start, *schedule, *place], standalone_mode=False)
    made = [f"--checkpoint={run}", "--device=cpu"]
    evaluate.main([*made, f"--data={data}", f"--out={run / 'evaluation.json'}"], standalone_mode=False)
    record.main([*made, f"--data={data}", f"--out={run}", f"--requests={requests}"], standalone_mode=False)
    trace = out / f"{NAME}.safetensors"  # not among the weights, which are every such file of the checkpoint
    to_trace.main([f"--checkpoint={run}", f"--recording={run}", f"--out={trace}"], standalone_mode=False)


if __name__ == "__main__":
    main()
