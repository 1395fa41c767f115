"""Train DuoServe-MoE's ExpertMLP (arXiv 2509.07379, section 4.2) on a trace's store split. Needs torch.

Seven fully connected layers, batch normalisation, ReLU and dropout of 0.1 after each hidden one, binary cross-entropy
over all experts of the target layer (equation 6). The text does not say whether one network serves all layers or each
has its own (`nets`; docs/duoserve.md has what speaks for either). Optimiser, learning rate and batch size are not
published: AdamW with one cosine cycle is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.common.mlp import LIMITS, Floats, load, quantised, save, step_for
from policies.duoserve.predictor import (
    FORMAT,
    OUTPUTS,
    UNIT,
    WIDTHS,
    Ids,
    States,
    accuracy,
    blocks_of,
    counts_of,
    net_prefix,
    read,
    rows_of,
    width_of,
)
from sim.policy import BadInput, no_store

if TYPE_CHECKING:
    from sim.policy import Trace

MAX_STATE_BYTES = 8 * 1024**3
LARGE = 2**18  # weights of a layer that is stored as int8
SCORE_STEP = 2.0**-20  # of the last layer's outputs
CALIBRATION_STATES = 4096
MAX_OUTPUTS = 2**22  # experts named that a file carries along

Told = Callable[[int, int, float], None]  # (steps done, steps in all, loss of the last one)


@dataclass(frozen=True)
class TrainingPlan:
    """How to train. `epochs`: section 6.4 needs 15 to 20 for Mixtral-8x7B, 40 to 45 for 8x22B."""

    epochs: int = 15
    batch_size: int = 1024
    learning_rate: float = 2e-3
    dropout_frac: float = 0.1
    affinity: str = "rows"
    widths: tuple[int, ...] = WIDTHS
    nets: str = "one"
    seed: int = 0


def train(
    trace: Trace, out: Path, plan: TrainingPlan, told: Told | None = None, outputs_only: bool = False
) -> dict[str, Any]:
    """Train on the store split, write `out`, and measure it on the test split as Table 3 does.

    Args:
        outputs_only: leave the networks out of the file, which then serves this very trace alone.

    Returns:
        The facts stored in the file.

    Raises:
        BadInput: no torch, no store split, or states that would not fit in memory; none or too many outputs to carry.
    """
    spans = rows_of(trace, "store", prefill=True)
    if not spans:
        raise no_store(trace, "duoserve's predictor is trained there")
    if outputs_only and not 0 < (n_named := _n_named(trace)) <= MAX_OUTPUTS:
        raise BadInput(
            f"{trace.path}, got {n_named} experts to name for its decode rows: a file of these alone carries 1 to "
            f"{MAX_OUTPUTS}; leave out --outputs-only"
        )
    single, joint = counts_of(blocks_of(trace, spans), trace.n_experts)
    ids = np.concatenate(list(blocks_of(trace, spans)))
    shape = (trace.n_layers, trace.n_experts, trace.top_k)
    width = width_of(*shape, plan.affinity == "rows")
    need_bytes = len(ids) * (trace.n_layers - 1) * (width + trace.n_experts) * 4
    if trace.n_layers < 2 or need_bytes > MAX_STATE_BYTES:
        raise BadInput(
            f"{trace.path}: {len(ids)} tokens of {trace.n_layers} layers make {need_bytes} bytes of states: "
            f"two layers at least, {MAX_STATE_BYTES} bytes at most; take a shorter trace"
        )
    states = States(single, joint, trace.top_k, plan.affinity == "rows")
    inputs = np.concatenate([states.of(block).astype(np.float32) / UNIT for block in _split(ids)])
    targets = _targets(ids, trace.n_experts)
    tensors: dict[str, NDArray[Any]] = {"popularity_counts": single, "affinity_counts": joint}
    n_nets = trace.n_layers - 1 if plan.nets == "per_layer" else 1
    for at in range(n_nets):
        own = slice(at, at + 1) if n_nets > 1 else slice(None)
        x, y = inputs[:, own].reshape(-1, width), targets[:, own].reshape(-1, trace.n_experts)
        layers = _fit(x, y, plan, _part_of(told, at, n_nets))
        prefix = net_prefix(at if plan.nets == "per_layer" else None)
        tensors |= {prefix + name: array for name, array in in_integers(layers, _some(x, plan.seed)).items()}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "model": trace.header.model,
        "n_layers": shape[0],
        "n_experts": shape[1],
        "top_k": shape[2],
        "affinity": plan.affinity,
        "nets": plan.nets,
        "widths": list(plan.widths),
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "learning_rate": plan.learning_rate,
        "dropout_frac": plan.dropout_frac,
        "seed": plan.seed,
        "tokens": len(ids),
        "trained_on": f"store split of {trace.name}",
    }
    save(out, tensors, facts)  # first without a verdict, so that what is judged is what was written
    return judge(trace, out, outputs_only)


def judge(trace: Trace, out: Path, outputs_only: bool = False) -> dict[str, Any]:
    """Complete a predictor's file: what it names for the trace's decode rows, and how often that is right.

    A replay of the same trace then reads the outputs instead of running the network again, which a test holds equal.
    """
    tensors, facts = load(out)
    predictor = read(out, trace.n_layers, trace.n_experts, trace.top_k)
    blocks = list(blocks_of(trace, rows_of(trace, "test", prefill=False)))
    facts["test"] = accuracy((predictor.named(ids) for ids in blocks), blocks, trace.top_k)
    spans = [(r.first_row + r.prompt_len, r.end_row) for r in trace.requests]
    if 0 < _n_named(trace) <= MAX_OUTPUTS:
        named = np.concatenate([predictor.named(ids) for ids in blocks_of(trace, spans)])
        tensors[OUTPUTS] = named.astype(np.uint8 if trace.n_experts <= 256 else np.uint16)
        facts["outputs_of"] = trace.sha256
    save(out, {OUTPUTS: tensors[OUTPUTS]} if outputs_only else tensors, facts)
    return facts


def _n_named(trace: Trace) -> int:
    """Experts that a predictor names for a trace's decode rows."""
    return trace.requests.n_decode_rows * (trace.n_layers - 1) * trace.top_k


def _split(ids: Ids) -> list[Ids]:
    return [ids[at : at + 1024] for at in range(0, len(ids), 1024)]


def _part_of(told: Told | None, at: int, n_nets: int) -> Told | None:
    """Progress of one of several trainings, as progress of them all."""
    return None if told is None else lambda done, steps, loss: told(at * steps + done, n_nets * steps, loss)


def _targets(ids: Ids, n_experts: int) -> NDArray[np.float32]:
    """1 for every expert that layers 1 to L-1 selected; [n, L-1, E]."""
    chosen = np.zeros((len(ids), ids.shape[1] - 1, n_experts), dtype=np.float32)
    np.put_along_axis(chosen, ids[:, 1:], 1.0, axis=-1)
    return chosen


def _some(inputs: NDArray[np.float32], seed: int) -> Floats:
    """States on which the activations' ranges are measured."""
    take = np.random.default_rng(seed).permutation(len(inputs))[:CALIBRATION_STATES]
    return inputs[np.sort(take)].astype(np.float64)


def _fit(
    inputs: NDArray[np.float32], targets: NDArray[np.float32], plan: TrainingPlan, told: Told | None
) -> list[tuple[Floats, Floats]]:
    """Weights [out, in] and biases [out] of every layer, normalisation folded in."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    modules: list[Any] = []
    width = inputs.shape[1]
    for hidden in plan.widths:
        modules += [nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(plan.dropout_frac)]
        width = hidden
    net = nn.Sequential(*modules, nn.Linear(width, targets.shape[1]))
    x, y = torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.ascontiguousarray(targets))
    batch = min(plan.batch_size, len(x))
    per_epoch = len(x) // batch  # the rest of an epoch is left out: normalisation wants batches of one size
    steps = plan.epochs * per_epoch
    optimiser = torch.optim.AdamW(net.parameters(), lr=plan.learning_rate)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, plan.learning_rate, total_steps=max(steps, 2))
    done = 0
    for _ in range(plan.epochs):
        order = torch.randperm(len(x))
        for at in range(per_epoch):
            pick = order[at * batch : (at + 1) * batch]
            optimiser.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(net(x[pick]), y[pick])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            cycle.step()
            done += 1
            if told is not None:
                told(done, steps, float(loss.detach()))
    return _folded(net.eval())


def _folded(net: Any) -> list[tuple[Floats, Floats]]:
    """(weight, bias) per fully connected layer; batch normalisation becomes part of the layer before it."""
    layers: list[tuple[Floats, Floats]] = []
    for module in net:
        values = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in module.state_dict().items()}
        if "running_var" in values:
            weight, bias = layers[-1]
            gain = values["weight"] / np.sqrt(values["running_var"] + module.eps)
            layers[-1] = (weight * gain[:, None], (bias - values["running_mean"]) * gain + values["bias"])
        elif "weight" in values:
            layers.append((values["weight"], values["bias"]))
    return layers


def in_integers(layers: list[tuple[Floats, Floats]], states: Floats) -> dict[str, NDArray[Any]]:
    """The layers as `policies.common.mlp` stores them, activations scaled by what they reach on `states` [n, width]."""
    kinds = ["int8" if at and weight.size >= LARGE else "int16" for at, (weight, _) in enumerate(layers)]
    tensors: dict[str, NDArray[Any]] = {}
    x, in_step = states, 1.0 / UNIT
    for at, (weight, bias) in enumerate(layers):
        x = np.maximum(x @ weight.T + bias, 0.0)
        last = at == len(layers) - 1
        out_step = SCORE_STEP if last else step_for(x, LIMITS[kinds[at + 1]])
        for name, array in quantised(weight, bias, in_step, out_step, kinds[at]).items():
            tensors[f"{name}.{at}"] = array
        in_step = out_step
    return tensors
