"""Train eMoE's predictor on the store split of a trace (torch, transformers); `moesim train emoe` calls it.

A pair of requests (a, b) of the store split is an example: the experts most used by a stretch of a, and b's task,
foretell how often b asks for each expert. All ordered pairs are taken, which the few dozen prompts of a bundled trace
make necessary; the paper trains on consecutive prompts. The test split is measured on consecutive prompts, in trace
order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from policies.common.mlp import save
from policies.emoe.predict import (
    EPSILON,
    FORMAT,
    FORMS,
    ONE,
    Counts,
    Transformer,
    counts_of_request,
    digits,
    frequencies,
)
from sim.policy import BadInput, no_store, requests_of

if TYPE_CHECKING:
    from sim.policy import RequestInfo, Trace

Told = Callable[[int, int, float], None]
MIN_STRETCH = 16  # rows of a request whose most used experts are worth calling so


@dataclass(frozen=True)
class TrainingPlan:
    """How large, how long. Heads are 16 wide."""

    steps: int = 3000
    batch_size: int = 32
    learning_rate: float = 2e-3
    width: int = 48
    inner: int = 96
    layers: int = 2
    seed: int = 0

    @property
    def n_heads(self) -> int:
        return self.width // 16


class Net(nn.Module):
    """XLNet's encoder from scratch, with the experts' embeddings as output layer."""

    def __init__(self, plan: TrainingPlan, vocabulary: int, n_words: int) -> None:
        super().__init__()
        from transformers import XLNetConfig, XLNetModel

        config = XLNetConfig(
            vocab_size=vocabulary,
            d_model=plan.width,
            n_layer=plan.layers,
            n_head=plan.n_heads,
            d_inner=plan.inner,
            ff_activation="relu",
            dropout=0.1,
            layer_norm_eps=EPSILON,
            initializer_range=0.1,
        )
        self.encoder = XLNetModel(config)
        self.bias = nn.Parameter(torch.zeros(n_words))

    def logits(self, ids: torch.Tensor, layers: torch.Tensor, top_k: int, n_experts: int) -> torch.Tensor:
        """ids [B, 1 + n k] -> [B, n, E]: for each of the n series, the experts of the layer it foretells [B, n]."""
        hidden = self.encoder(ids, use_mems=False).last_hidden_state[:, 1:]
        mean = hidden.reshape(len(ids), -1, top_k, hidden.shape[-1]).mean(dim=2)
        words = layers[..., None] * n_experts + torch.arange(n_experts)
        embedded = self.encoder.word_embedding.weight[words]
        return torch.einsum("bnd,bned->bne", mean, embedded) + self.bias[words]


class Examples:
    """Draws batches of pairs from the store split."""

    def __init__(self, trace: Trace, requests: list[RequestInfo], tasks: tuple[str, ...], seed: int) -> None:
        self._trace, self._requests = trace, requests
        self._rng = np.random.default_rng(seed)
        self._tasks = np.array([tasks.index(r.task) for r in requests])
        self._passed = [self._so_far(trace, r) for r in requests]  # counts before each row, so that stretches are cheap
        self._whole = np.stack([passed[-1] for passed in self._passed])
        self._n_words = trace.n_layers * trace.n_experts

    @staticmethod
    def _so_far(trace: Trace, request: RequestInfo) -> Counts:
        rows = np.array(trace.experts[request.first_row : request.first_row + request.prompt_len + request.outputs - 1])
        one_hot = (rows[..., None] == np.arange(trace.n_experts)).sum(axis=2)
        return np.concatenate([np.zeros_like(one_hot[:1]), one_hot.cumsum(axis=0)])

    def _stretch(self, index: int) -> Counts:
        """Counts over a random stretch of a request: what was seen of a prompt that is still running, or all of it."""
        passed = self._passed[index]
        n = len(passed) - 1
        length = int(self._rng.integers(min(MIN_STRETCH, n), n + 1))
        start = int(self._rng.integers(0, n - length + 1))
        return np.asarray(passed[start + length] - passed[start])

    def batch(self, form: str, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Word ids, layers foretold, and the shares that came true."""
        trace, rng = self._trace, self._rng
        after = rng.integers(0, len(self._requests), size)
        tasks = self._n_words + self._tasks[after][:, None]
        if form == "A":
            before = rng.integers(0, len(self._requests), size)
            series = np.stack([digits(self._stretch(i), trace.top_k) for i in before])
            words = np.arange(trace.n_layers)[None, :, None] * trace.n_experts + series
            layers = np.broadcast_to(np.arange(trace.n_layers), (size, trace.n_layers))
            truth = self._whole[after]
        else:
            layer = rng.integers(1, trace.n_layers, size)
            stretches = np.stack([self._stretch(i) for i in after])
            at = np.arange(size)
            words = (layer - 1)[:, None] * trace.n_experts + digits(stretches[at, layer - 1], trace.top_k)
            layers = layer[:, None]
            truth = self._whole[after, layer][:, None]
        ids = np.concatenate([tasks, words.reshape(size, -1)], axis=1)
        return ids, layers.copy(), truth / truth.sum(axis=-1, keepdims=True)


def fit(form: str, examples: Examples, trace: Trace, n_tasks: int, plan: TrainingPlan, told: Told | None) -> Net:
    """Train one form by cross-entropy with the shares that came true."""
    torch.manual_seed(plan.seed)
    n_words = trace.n_layers * trace.n_experts
    net = Net(plan, n_words + n_tasks, n_words)
    optimiser = torch.optim.AdamW(net.parameters(), lr=plan.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, plan.learning_rate, total_steps=plan.steps)
    size = plan.batch_size if form == "A" else plan.batch_size * 8  # sequences of eMoE-L are n times shorter
    net.train()
    for step in range(plan.steps):
        ids, layers, truth = (torch.from_numpy(part) for part in examples.batch(form, size))
        logits = net.logits(ids, layers, trace.top_k, trace.n_experts)
        loss = -(truth.float() * logits.log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if told is not None and (step + 1) % 50 == 0:
            told(step + 1, plan.steps, loss.item())
    return net.eval()


@torch.no_grad()
def in_whole_numbers(net: Net, length: int) -> dict[str, NDArray[np.int16]]:
    """Tensors that `_emoe_xlnet.Xlnet` reads. Raises BadInput for a weight beyond what int16 holds (8 in size)."""
    model: Any = net.encoder
    width = model.d_model
    places = model.relative_positional_encoding(length, length)[:, 0]
    found = {"words": model.word_embedding.weight, "bias": net.bias}
    for at, layer in enumerate(model.layer):
        attention, feed = layer.rel_attn, layer.ff
        own = {name: getattr(attention, name).reshape(width, width) for name in ("q", "k", "v")}
        own["o"] = attention.o.reshape(width, width).T
        own["positions"] = places @ attention.r.reshape(width, width)
        own |= {name: getattr(attention, name).reshape(width) for name in ("r_w_bias", "r_r_bias")}
        for name, module in (("norm_1", attention.layer_norm), ("norm_2", feed.layer_norm)):
            own |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
        for name in ("layer_1", "layer_2"):
            own |= {name: getattr(feed, name).weight, f"{name}.bias": getattr(feed, name).bias}
        found |= {f"{at}.{name}": tensor for name, tensor in own.items()}
    whole = {}
    for name, tensor in found.items():
        values = np.rint(tensor.detach().double().numpy() * ONE)
        if np.abs(values).max(initial=0) > 32767:
            raise BadInput(
                f"trained weight {name}, got {np.abs(values).max() / ONE:.1f}: int16 holds up to 8; train "
                "with a lower learning rate"
            )
        whole[name] = values.astype(np.int16)
    return whole


def train(
    trace: Trace,
    out: Path,
    plan: TrainingPlan,
    told: Told | None = None,
    similarity: NDArray[np.float64] | None = None,
    similarity_facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train both forms, write the file, and return its facts with the accuracy on the test split.

    Args:
        similarity: of outputs with random routing in the first 1, 2 ... layers, [tasks, L] (by `sensitivity`).

    Raises:
        BadInput: the trace has no store split, or no task labels.
    """
    trace.require("tasks", "training eMoE")
    store = requests_of(trace, "store")
    if not store:
        raise no_store(trace, "eMoE's predictor is trained there")
    tasks = tuple(trace.header.tasks)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "model": trace.header.model,
        "trace_sha256": trace.sha256,
        "n_layers": trace.n_layers,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "tasks": list(tasks),
        "n_heads": plan.n_heads,
        "plan": asdict(plan),
        "store_requests": len(store),
        "torch": torch.__version__,
        "similarity": similarity_facts or {},
    }
    tensors: dict[str, NDArray[Any]] = {}
    for form in FORMS:
        net = fit(form, Examples(trace, store, tasks, plan.seed), trace, len(tasks), plan, told)
        length = 1 + (trace.n_layers if form == "A" else 1) * trace.top_k
        tensors |= {f"{form}.{name}": tensor for name, tensor in in_whole_numbers(net, length).items()}
    if similarity is not None:
        tensors["similarity"] = np.rint(similarity * 10_000).astype(np.int16)
    facts["test"] = accuracy(Transformer(tensors, facts, out), trace)
    save(out, tensors, json.loads(json.dumps(facts)))
    return facts


def accuracy(predictor: Transformer, trace: Trace) -> dict[str, Any]:
    """Share of a test prompt's k most used experts, by layer, that are the k foretold from the prompt before it.

    Beside both forms: the store split's frequencies for the task (what `predictor=frequency` starts from), the previous
    prompt's own, and chance.
    """
    store, test = requests_of(trace, "store"), requests_of(trace, "test")
    known = np.zeros((len(predictor.tasks), trace.n_layers, trace.n_experts), dtype=np.int64)
    for r in store:
        known[predictor.tasks.index(r.task)] += counts_of_request(trace, r)
    right: dict[str, list[float]] = {}
    for before, after in zip([store[-1], *test], test, strict=False):
        task = predictor.tasks.index(after.task)
        past, truth = counts_of_request(trace, before), digits(counts_of_request(trace, after), trace.top_k)
        said = {form: predictor.predict(form, past, task) for form in FORMS}
        said |= {"frequency": frequencies(known[task]), "previous": past}
        for name, table in said.items():
            hit = (digits(table, trace.top_k)[:, :, None] == truth[:, None, :]).any(axis=2)
            right.setdefault(name, []).append(float(hit.mean()))
    rows = {name: round(float(np.mean(values)), 4) for name, values in right.items()}
    return {"n": len(test), **rows, "chance": round(trace.top_k / trace.n_experts, 4)}
