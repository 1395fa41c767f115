"""Draw requests as long as those of a public chat log, with prompts from held-out text, as a file for `moesim record`.

    python -m tools.train.chat --data .traindata/tokens --out chat.jsonl --tests 200 --store 40

Lengths are drawn from the quantiles in `traces/synth/chat_lengths.yaml` and divided by what the command line says,
which the notes of a trace must say too: a model with 32 layers keeps too many bytes per token for the whole. Tasks come
in random order, as users do; the two splits are apart in time, the store first; arrivals are a Poisson process, as the
log's nearly are (its gaps have a coefficient of variation of 1.1).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from sim.base.errors import BadInput
from sim.base.files import replacing
from tools.train.tokens import Tokens, load_split, split_documents
from traces.synth.chat_lengths import ChatLengths, load_lengths


@dataclass(frozen=True)
class Cut:
    """How the lengths of a log become those of a recording."""

    prompt_divisor: float
    output_divisor: float
    max_prompt: int
    max_tokens: int  # of prompt and output together


def draw_lengths(log: ChatLengths, cut: Cut, n: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(prompt, output) tokens of n requests: straight lines between the quantiles, divided and cut."""
    prompts = np.interp(rng.random(n), log.shares, log.prompt_tokens) / cut.prompt_divisor
    outputs = np.interp(rng.random(n), log.shares, log.output_tokens) / cut.output_divisor
    found = []
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        length = min(max(1, round(prompt)), cut.max_prompt)
        found.append((length, max(1, min(round(output), cut.max_tokens - length))))
    return found


def draw_prompt(documents: list[Tokens], length: int, rng: np.random.Generator) -> list[int]:
    """So many tokens in a row of one document that has them. Raises BadInput when none has."""
    enough = [document for document in documents if len(document) >= length]
    if not enough:
        longest = max(map(len, documents), default=0)
        raise BadInput(f"prompt of {length} tokens: the longest held-out document has {longest}; lower --max-prompt")
    document = enough[int(rng.integers(len(enough)))]
    at = int(rng.integers(len(document) - length, endpoint=True))
    return [int(token) for token in document[at : at + length]]


def draw_requests(
    heldout: dict[str, Tokens], log: ChatLengths, cut: Cut, n_store: int, n_tests: int, rate_per_s: float, seed: int
) -> list[dict[str, Any]]:
    """The requests in order of arrival, the store's first; every task has an equal share of both splits."""
    rng = np.random.default_rng(seed)
    documents = {task: split_documents(ids) for task, ids in heldout.items()}
    tasks = sorted(documents)
    lengths = draw_lengths(log, cut, n_store + n_tests, rng)
    order = [rng.permutation([tasks[i % len(tasks)] for i in range(n)]) for n in (n_store, n_tests)]
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, n_store + n_tests))
    found = []
    for i, task in enumerate(str(name) for part in order for name in part):
        prompt, outputs = lengths[i]
        told: dict[str, Any] = {"task": task, "split": "store" if i < n_store else "test", "output_tokens": outputs}
        told["arrival_s"] = round(float(at_s[i] - at_s[0]), 3)
        found.append({**told, "token_ids": draw_prompt(documents[task], prompt, rng)})
    return found


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="folder of tokens.py")
@click.option("--out", type=click.Path(path_type=Path), required=True, help=".jsonl file to write")
@click.option("--tests", default=200, show_default=True, help="requests that everything is scored on")
@click.option("--store", default=40, show_default=True, help="requests that policies may learn from")
@click.option("--prompt-divisor", default=4.0, show_default=True)
@click.option("--output-divisor", default=2.0, show_default=True)
@click.option("--max-prompt", default=1536, show_default=True)
@click.option("--max-tokens", default=2048, show_default=True, help="positions the model was trained on")
@click.option("--rate", default=0.02, show_default=True, help="arrivals per second")
@click.option("--seed", default=1, show_default=True)
def main(data: Path, out: Path, tests: int, store: int, rate: float, seed: int, **cut: Any) -> None:
    """Write chat-like requests whose prompts are held-out text."""
    found = draw_requests(load_split(data, "heldout"), load_lengths(), Cut(**cut), store, tests, rate, seed)
    with replacing(out) as part:
        part.write_text("".join(json.dumps(request) + "\n" for request in found), encoding="utf-8")
    prompts = np.array([len(request["token_ids"]) for request in found])
    outputs = np.array([request["output_tokens"] for request in found])
    for name, values in (("prompt", prompts), ("output", outputs)):
        half, most = np.quantile(values, (0.5, 0.95))
        click.echo(f"{name} tokens: mean {values.mean():.0f}, median {half:.0f}, 95 % {most:.0f}, most {values.max()}")
    click.echo(f"{len(found)} requests, {int(prompts.sum() + outputs.sum()) - len(found)} rows")


if __name__ == "__main__":
    main()
