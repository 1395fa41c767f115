"""Train the small model of many fine experts that docs/importance.md shows, and record a trace of it: one command.

    python -m tools.train.fine --out .traindata

Its experts begin as slices of the bundled model's, whose tokenizer it keeps. Debian's package tools fetch the corpus;
a folder that has the corpus or the tokens already keeps them, and what was stopped goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

import traces
from sim.cli import record
from tools.train import chat, corpus, evaluate, pack, tokens, train

NAME = "mixtral-fine"
BEGUN_FROM = Path(traces.__file__).parent / "models" / "mixtral-8x7b-small"
CAP = 3_000_000  # training tokens per task: several times what is read


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder for all that is made")
@click.option("--steps", default=420, show_default=True, help="of 4096 tokens; the rate falls over the last third")
@click.option("--requests", default=18, show_default=True, help="of the trace; a third of them to score")
def main(out: Path, steps: int, requests: int) -> None:
    """Fetch the corpus, train, evaluate, record and pack."""
    text, data, run, prompts = out / "corpus", out / "tokens", out / NAME, out / "prompts.jsonl"
    full, trace = out / f"{NAME}.full.safetensors", out / f"{NAME}.safetensors"

    def step(command: click.Command, *words: str) -> None:
        command.main(list(words), standalone_mode=False)

    if not (text / "corpus_built.json").exists():
        step(corpus.main, f"--out={text}")
    if not (data / "tokens.json").exists():
        own = BEGUN_FROM / "tokenizer.json"
        step(tokens.main, f"--corpus={text}", f"--out={data}", f"--cap={CAP}", f"--tokenizer={own}")
    schedule = [f"--steps={steps}", f"--decay-steps={steps // 3}", "--batch-tokens=4096", "--lr=0.003"]
    start = [f"--shape={NAME}", f"--begin-from={BEGUN_FROM}", "--threads=1", "--save-every=60", "--resume"]
    step(train.main, f"--data={data}", f"--out={run}", *start, *schedule)
    step(evaluate.main, f"--checkpoint={run}", f"--data={data}", f"--out={run / 'evaluation.json'}")
    n_tests = -(-requests // 3)
    cut = ["--prompt-divisor=20", "--max-prompt=54"]
    step(chat.main, f"--data={data}", f"--out={prompts}", f"--tests={n_tests}", f"--store={requests - n_tests}", *cut)
    how = ["--output-tokens=102-152", "--temperature=0.8", "--dtype=float32", "--device=cpu", "--batch=8", "--resume"]
    step(record.command, str(run), f"--out={full}", f"--prompts={prompts}", "--embeddings=none", *how)
    step(pack.main, f"--checkpoint={run}", f"--recording={full}", f"--out={trace}")


if __name__ == "__main__":
    main()
