"""Judge a checkpoint: does it model language, does every expert work, does routing look like that of a trained MoE?

    python -m tools.train.evaluate --checkpoint RUN --data .traindata/tokens --out RUN/evaluation.json

Held-out loss against interpolated bigram and trigram models on the same predicted tokens (the n-gram models may
look across the window edges, the network may not), expert load, and how well a gate predicts the next one: router
l+1 applied to layer l's gate input against always guessing the most popular experts.

The n-gram models are Jelinek-Mercer's: p(w|u,v) = l3 c(u,v,w)/c(u,v) + l2 c(v,w)/c(v) + l1 (c(w)+1)/(N+V); the weights
l depend on how often the context was seen (buckets of powers of two) and are fitted by expectation-maximisation on text
that was not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from sim.base.files import write_json
from tools.train.tokens import Tokens, heldout_windows, load_split
from traces.format.layout import DISTANCES, Array, Floats, Ints
from traces.record.checkpoint import load
from traces.record.families import FAMILIES, gate_of, moe_layers
from traces.record.probe import RoutingProbe, Rows

LENGTH = 256
FIT_SHARE = 0.02  # of the training text: n-gram weights are fitted on it and it is not counted
ROWS_PER_FORWARD = 16
BUCKETS = 12  # contexts seen 0, 1, 2-3, 4-7, ... times; the last bucket is open
EM_ROUNDS = 15


@dataclass(frozen=True)
class _Table:
    """Counts of n-grams coded as integers, sorted by code."""

    codes: Ints
    counts: Ints

    @staticmethod
    def of(codes: Ints) -> _Table:
        return _Table(*np.unique(codes, return_counts=True))

    def look_up(self, codes: Ints) -> Ints:
        at = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[at] == codes, self.counts[at], 0)


def _bucket(context_counts: Ints) -> Ints:
    return np.minimum(np.ceil(np.log2(context_counts + 1)), BUCKETS - 1).astype(np.int64)


class NGram:
    """Counts of orders 1 to `order` (2 or 3) with interpolation weights [bucket, order]; a stream is a 1-D id array."""

    def __init__(
        self, order: int, vocab: int, counted: list[npt.NDArray[np.uint16]], fitted: list[npt.NDArray[np.uint16]]
    ):
        self.order, self.vocab = order, vocab
        streams = [ids.astype(np.int64) for ids in counted]
        unigram = np.bincount(np.concatenate(streams), minlength=vocab)
        self.unigram = (unigram + 1) / (unigram.sum() + vocab)
        # tables[n]: n-grams; contexts[n]: how often the first n-1 words were followed by anything
        self.tables = {
            n: _Table.of(np.concatenate([self._codes(ids, n) for ids in streams])) for n in range(2, order + 1)
        }
        self.contexts = {}
        for n, table in self.tables.items():
            heads = table.codes // vocab
            codes, first = np.unique(heads, return_index=True)
            self.contexts[n] = _Table(codes, np.add.reduceat(table.counts, first))
        self.weights = np.full((BUCKETS, order), 1 / order)
        self._fit([ids.astype(np.int64) for ids in fitted])

    def _codes(self, ids: Ints, n: int) -> Ints:
        code = ids[: len(ids) - n + 1].copy()
        for i in range(1, n):
            code = code * self.vocab + ids[i : len(ids) - n + 1 + i]
        return code

    def _components(self, ids: Ints) -> tuple[Floats, Ints]:
        """(probability of each order [P, order], bucket [P]) for positions order-1.. of a stream."""
        size = len(ids) - self.order + 1
        parts = [self.unigram[ids[self.order - 1 :]]]
        seen = np.zeros(size, np.int64)
        for n in range(2, self.order + 1):
            codes = self._codes(ids[self.order - n :], n)
            seen = self.contexts[n].look_up(codes // self.vocab)
            parts.append(self.tables[n].look_up(codes) / np.maximum(seen, 1))
        return np.stack(parts, axis=1), _bucket(seen)

    def _fit(self, streams: list[Ints]) -> None:
        pieces = [self._components(ids) for ids in streams]
        parts = np.concatenate([p for p, _ in pieces])
        bucket = np.concatenate([b for _, b in pieces])
        for b in range(BUCKETS):
            rows = parts[bucket == b]
            if len(rows) < 10:
                continue
            mix = np.full(self.order, 1 / self.order)
            for _ in range(EM_ROUNDS):
                share = rows * mix
                mix = (share / share.sum(axis=1, keepdims=True)).mean(axis=0)
            self.weights[b] = mix

    def log_probabilities(self, ids: npt.NDArray[np.uint16]) -> Floats:
        """Natural-log probability of ids[order-1:] given what precedes each."""
        parts, bucket = self._components(ids.astype(np.int64))
        mixed: Floats = np.log((parts * self.weights[bucket]).sum(axis=1))
        return mixed


def ngram_losses(
    data: Path, vocab: int, heldout: dict[str, Tokens], limit: int, length: int = LENGTH
) -> dict[str, dict[str, float]]:
    """Held-out loss in nats per token of the bigram and trigram model, by task, on the tokens the network predicts."""
    train = load_split(data, "train")
    cut = {task: int(len(ids) * (1 - FIT_SHARE)) for task, ids in train.items()}
    counted = [ids[: cut[task]] for task, ids in train.items()]
    fitted = [ids[cut[task] :] for task, ids in train.items()]
    result: dict[str, dict[str, float]] = {}
    for name, order in (("bigram", 2), ("trigram", 3)):
        model = NGram(order, vocab, counted, fitted)
        result[name] = {}
        for task, ids in heldout.items():
            windows = len(heldout_windows(ids, length, limit))
            padded = np.concatenate([np.zeros(order - 2, ids.dtype), ids[: windows * length + 1]])
            result[name][task] = float(-model.log_probabilities(padded).mean())
    return result


class _RoutingTally:
    """Sums over held-out rows: expert counts per layer and how often predictions of the next layers were right."""

    def __init__(self, n_layers: int, n_experts: int, top_k: int) -> None:
        self.top_k, self.rows = top_k, 0
        self.counts = np.zeros((n_layers, n_experts))
        self.reuse = {d: np.zeros(n_layers - d) for d in DISTANCES if d < n_layers}

    def add(self, rows: Rows) -> None:
        """Count rows that a probe saw."""
        chosen = np.zeros((len(rows["experts"]), *self.counts.shape))
        np.put_along_axis(chosen, rows["experts"], 1.0, -1)
        for d, reuse in self.reuse.items():
            scores = rows[f"next_scores_{d}"][:, : len(reuse)]  # the last of the nearest is of the next token
            guess = np.argsort(-scores, axis=-1, kind="stable")[..., : self.top_k]
            reuse += np.take_along_axis(chosen[:, d:], guess, -1).mean(axis=-1).sum(axis=0)
        self.counts += chosen.sum(axis=0)
        self.rows += len(chosen)

    def summary(self) -> dict[str, Any]:
        """Loads and accuracies, rounded."""
        load = self.counts / self.counts.sum(axis=1, keepdims=True)
        relative = load * load.shape[1]  # 1 = an equal share
        entropy = -(load * np.log(np.maximum(load, 1e-12))).sum(axis=1) / np.log(load.shape[1])
        popular = np.sort(load, axis=1)[:, -self.top_k :].sum(axis=1)  # of choices, those of the most popular experts
        reuse = {d: hits / self.rows for d, hits in self.reuse.items()}
        return {
            "rows": self.rows,
            "dead_experts": int((self.counts == 0).sum()),
            "experts_below_a_tenth_of_an_equal_share": int((relative < 0.1).sum()),
            "least_load_by_layer": _rounded(relative.min(axis=1), 3),
            "most_load_by_layer": _rounded(relative.max(axis=1), 3),
            "load_entropy_by_layer": _rounded(entropy),
            "gate_reuse_accuracy": round(float(reuse[1].mean()), 4),
            "gate_reuse_accuracy_by_distance": {str(d): round(float(share.mean()), 4) for d, share in reuse.items()},
            "gate_reuse_accuracy_by_target_layer": _rounded(reuse[1]),
            "popularity_accuracy": round(float(popular[1:].mean()), 4),
            "popularity_accuracy_by_target_layer": _rounded(popular[1:]),
            "chance_accuracy": round(self.top_k / load.shape[1], 4),
        }


def _rounded(values: Array, digits: int = 4) -> list[float]:
    return [round(float(value), digits) for value in values]


@torch.no_grad()
def evaluate(model: Any, heldout: dict[str, Tokens], limit: int, length: int = LENGTH) -> dict[str, Any]:
    """Loss by task (nats per token) and routing statistics of a float32 model in evaluation mode."""
    layers = moe_layers(model, "checkpoint")
    tally = _RoutingTally(len(layers), len(layers[0].router.weight), int(model.config.num_experts_per_tok))
    load_by_task: dict[str, Array] = {}
    losses: dict[str, float] = {}
    predicted: dict[str, int] = {}
    with RoutingProbe(layers, gate_of(model, layers), FAMILIES[model.config.model_type].ranked) as probe:
        for task, ids in heldout.items():
            before = tally.counts.copy()
            total = 0.0
            windows = heldout_windows(ids, length, limit)
            for block in torch.split(windows, ROWS_PER_FORWARD):
                logits = model(input_ids=block[:, :-1], use_cache=False).logits
                total += float(F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten(), reduction="sum"))
                tally.add(probe.take())
            predicted[task] = windows.shape[0] * length
            losses[task] = total / predicted[task]
            counts = tally.counts - before
            load_by_task[task] = counts / counts.sum(axis=1, keepdims=True)
    overall = sum(load_by_task.values()) / len(load_by_task)
    apart = {t: round(float(np.abs(v - overall).sum(axis=1).mean() / 2), 4) for t, v in load_by_task.items()}
    return {
        "loss": losses,
        "predicted_tokens": predicted,
        "routing": tally.summary(),
        "task_load_distance": apart,  # total variation to the mean load, layer average: 0 = task-blind
    }


def mean_over(losses: dict[str, float], weights: dict[str, int]) -> float:
    """Token-weighted mean over tasks."""
    return sum(losses[t] * weights[t] for t in losses) / sum(weights.values())


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="folder of tokens.py")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
@click.option("--tokens", default=65_536, show_default=True, help="held-out tokens per task, at most")
@click.option(
    "--length", default=LENGTH, show_default=True, help="tokens per window: what the network may look back on"
)
def main(checkpoint: Path, data: Path, out: Path, tokens: int, length: int) -> None:
    """Write held-out losses, baselines and routing statistics of a checkpoint."""
    model = load(checkpoint)
    heldout = load_split(data, "heldout")
    result = evaluate(model, heldout, tokens, length)
    weights = result["predicted_tokens"]
    table = {"model": result["loss"], **ngram_losses(data, model.config.vocab_size, heldout, tokens, length)}
    result["loss"] = {}
    for name, by_task in table.items():
        result["loss"][name] = {t: round(v, 4) for t, v in by_task.items()}
        result["loss"][name]["all"] = round(mean_over(by_task, weights), 4)
    write_json(out, {"schema": "moe-train-evaluation/1", "window_tokens": length, **result})
    routing = result["routing"]
    click.echo("held-out nats per token: " + ", ".join(f"{n} {by['all']:.3f}" for n, by in result["loss"].items()))
    click.echo(
        f"dead experts {routing['dead_experts']}, least load {min(routing['least_load_by_layer']):.2f} of an equal "
        f"share; next layer known by gate reuse {routing['gate_reuse_accuracy']:.3f}, by popularity "
        f"{routing['popularity_accuracy']:.3f}"
    )


if __name__ == "__main__":
    main()
