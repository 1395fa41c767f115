"""Judge a checkpoint: does it model language, does every expert work, does routing look like that of a trained MoE?

    python -m tools.train.evaluate --checkpoint RUN --data .traindata/tokens --out RUN/evaluation.json

Held-out loss against interpolated bigram and trigram models on the same predicted tokens (the n-gram models may
look across the window edges, the network may not), expert load, and how well a gate predicts the next one: router
l+1 applied to layer l's gate input against always guessing the most popular experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from sim.base.files import write_json
from tools.train.batches import heldout_windows
from tools.train.ngram import NGram
from tools.train.probe import RoutingProbe, ahead_scores, router_weights
from tools.train.tokens import Tokens, load_split
from traces.format.layout import DISTANCES
from traces.record.checkpoint import load

LENGTH = 256
FIT_SHARE = 0.02  # of the training text: n-gram weights are fitted on it and it is not counted
ROWS_PER_FORWARD = 16


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
    """Sums over held-out rows: expert counts per layer and how often predictions of the next layer were right."""

    def __init__(self, weights: torch.Tensor, top_k: int) -> None:
        layers, experts, _ = weights.shape
        self.weights, self.top_k = weights, top_k
        self.counts = torch.zeros(layers, experts, dtype=torch.float64)
        self.reuse = {d: torch.zeros(layers - d, dtype=torch.float64) for d in DISTANCES if d < layers}
        self.rows = 0

    def add(self, ids: torch.Tensor, gate_input: torch.Tensor) -> None:
        chosen = torch.zeros(*ids.shape[:2], self.counts.shape[1], device=ids.device).scatter(-1, ids, 1.0)
        for d, reuse in self.reuse.items():
            guess = ahead_scores(self.weights, gate_input, d)[:, :-d].topk(self.top_k, dim=-1).indices
            reuse += chosen[:, d:].gather(-1, guess).mean(dim=-1).sum(dim=0).double().cpu()
        self.counts += chosen.sum(dim=0).double().cpu()
        self.rows += len(ids)

    def summary(self) -> dict[str, Any]:
        load = self.counts / self.counts.sum(dim=1, keepdim=True)
        relative = load * load.shape[1]  # 1 = an equal share
        entropy = -(load * load.clamp_min(1e-12).log()).sum(dim=1) / np.log(load.shape[1])
        popular = load.topk(self.top_k, dim=1).values.sum(dim=1)  # share of choices the most popular experts hold
        reuse = self.reuse[1] / self.rows
        return {
            "rows": self.rows,
            "dead_experts": int((self.counts == 0).sum()),
            "experts_below_a_tenth_of_an_equal_share": int((relative < 0.1).sum()),
            "least_load_by_layer": [round(float(v), 3) for v in relative.min(dim=1).values],
            "most_load_by_layer": [round(float(v), 3) for v in relative.max(dim=1).values],
            "load_entropy_by_layer": [round(float(v), 4) for v in entropy],
            "gate_reuse_accuracy": round(float(reuse.mean()), 4),
            "gate_reuse_accuracy_by_distance": {
                str(d): round(float((hits / self.rows).mean()), 4) for d, hits in self.reuse.items()
            },
            "gate_reuse_accuracy_by_target_layer": [round(float(v), 4) for v in reuse],
            "popularity_accuracy": round(float(popular[1:].mean()), 4),
            "popularity_accuracy_by_target_layer": [round(float(v), 4) for v in popular[1:]],
            "chance_accuracy": round(self.top_k / load.shape[1], 4),
        }


@torch.no_grad()
def evaluate(model: Any, heldout: dict[str, Tokens], limit: int, length: int = LENGTH) -> dict[str, Any]:
    """Loss by task (nats per token) and routing statistics of a float32 model in evaluation mode."""
    device = next(model.parameters()).device
    tally = _RoutingTally(router_weights(model), int(model.config.num_experts_per_tok))
    load_by_task: dict[str, Any] = {}
    losses: dict[str, float] = {}
    predicted: dict[str, int] = {}
    with RoutingProbe(model) as probe:
        for task, ids in heldout.items():
            before = tally.counts.clone()
            total = 0.0
            windows = heldout_windows(ids, length, limit)
            for block in torch.split(windows, ROWS_PER_FORWARD):
                block = block.to(device)
                logits = model(input_ids=block[:, :-1], use_cache=False).logits
                total += float(F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten(), reduction="sum"))
                routing = probe.take()
                tally.add(routing.ids, routing.gate_input)
            predicted[task] = windows.shape[0] * length
            losses[task] = total / predicted[task]
            counts = tally.counts - before
            load_by_task[task] = counts / counts.sum(dim=1, keepdim=True)
    overall = sum(load_by_task.values()) / len(load_by_task)
    apart = {t: round(float((v - overall).abs().sum(dim=1).mean() / 2), 4) for t, v in load_by_task.items()}
    return {
        "loss": losses,
        "predicted_tokens": predicted,
        "routing": tally.summary(),
        "task_load_distance": apart,
    }  # total variation to the mean load, layer average: 0 = task-blind


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
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def main(checkpoint: Path, data: Path, out: Path, tokens: int, length: int, device: str) -> None:
    """Write held-out losses, baselines and routing statistics of a checkpoint."""
    model = load(checkpoint).to(device)
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
