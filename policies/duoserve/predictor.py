"""DuoServe-MoE's preprocessing (arXiv 2509.07379, section 4): popularity, affinity, the state vector, the predictor.

Trained predictors lie in `policies/data` under the name of the traced model; `moesim train duoserve` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.common.mlp import BLOCK, Floats, IntMlp, best, load, mlp_of
from sim.policy import MAKE_ONE, SURROGATE, BadInput, bundled

if TYPE_CHECKING:
    from sim.policy import Trace, TrainingTrace

Ids = NDArray[np.int64]

# Section 4.2: seven fully connected layers, hidden widths falling from 2048 to 64, then one output per expert.
WIDTHS = (2048, 1024, 512, 256, 128, 64)
UNIT = 4096  # inputs are multiples of 1 / 4096
SUFFIX = ".duoserve.safetensors"
OUTPUTS = "outputs"  # the tensor of what it names for the decode rows of the trace of facts["outputs_of"]
FORMAT = 1

# Section 6.4 has one figure for both models. Between DuoServe-MoE and ACC Table 2 has 0.28 GB (8x7B) and 0.38 GB
# (8x22B), which is not the predictor alone: rows DS-5 and DS-9 show it.
PUBLISHED_BYTES = 300_000_000
PUBLISHED_MODELS = ("mixtral-8x7b", "mixtral-8x22b")

# Table 3: shares of predictions that name both experts, and at least one, per data set and model.
TABLE_3 = {
    "orca": {"mixtral-8x7b": "0.6685/0.9545", "mixtral-8x22b": "0.5621/0.9045"},
    "squad": {"mixtral-8x7b": "0.6023/0.9231", "mixtral-8x22b": "0.5416/0.9031"},
}


def counts_of(blocks: Iterable[Ids], n_experts: int) -> tuple[Ids, Ids]:
    """Count selections over tokens, in blocks of ids [n, L, K].

    Returns:
        (L, E) how often each expert was selected, and (L-1, E, E) how often expert i of layer l together with j of l+1.
    """
    single: Ids | None = None
    joint: Ids | None = None
    for ids in blocks:
        chosen = np.zeros((*ids.shape[:2], n_experts), dtype=np.float64)
        np.put_along_axis(chosen, ids, 1.0, axis=-1)
        pairs = np.einsum("tli,tlj->lij", chosen[:, :-1], chosen[:, 1:]).astype(np.int64)  # whole: exact in any order
        once = chosen.sum(axis=0).astype(np.int64)
        single, joint = (once, pairs) if single is None or joint is None else (single + once, joint + pairs)
    if single is None or joint is None:
        raise BadInput(f"duoserve, got a store split without a token: there is nothing to count; {MAKE_ONE}")
    return single, joint


def popularity(single: Ids) -> Floats:
    """Equation 2: P_l(i), each layer's selections as shares that sum to 1; [L, E]."""
    return np.asarray(single / np.maximum(single.sum(axis=-1, keepdims=True), 1))


def affinity(joint: Ids) -> Floats:
    """Equation 3: A_{l,l+1}(i, j), the share of j among what follows i; rows sum to 1 (0 where i never occurred)."""
    return np.asarray(joint / np.maximum(joint.sum(axis=-1, keepdims=True), 1))


def width_of(n_layers: int, n_experts: int, top_k: int, rows: bool) -> int:
    """Length of the state vector."""
    return (n_layers - 1) * top_k + n_experts + n_experts * (top_k if rows else n_experts)


def parameters(n_layers: int, n_experts: int, top_k: int) -> int:
    """Weights, biases and normalisation (two per output) of one published network for a routing shape."""
    widths = [width_of(n_layers, n_experts, top_k, True), *WIDTHS, n_experts]
    return sum(n_in * n_out + n_out for n_in, n_out in pairwise(widths)) + 4 * sum(WIDTHS)


def net_prefix(layer: int | None) -> str:
    """Before the names of a network's tensors: none where it serves all layers; it predicts `layer` + 1 otherwise."""
    return "" if layer is None else f"net.{layer}."


class States:
    """Builds s_l = [h_l, p_l, a_{l-1,l}] (equations 4 and 5) for every layer l but the first, in integers.

    h_l: the experts of layers before l, ids counted from 1 so that 0 is padding, in units of 1 / E. a_{l-1,l}: with
    `rows`, the rows of the experts selected in layer l - 1 (section 5.3), else the whole matrix (section 4.2).
    """

    def __init__(self, single: Ids, joint: Ids, top_k: int, rows: bool) -> None:
        n_layers, n_experts = single.shape
        self.rows = rows
        self._popular = np.rint(popularity(single)[1:] * UNIT)
        self._affine = np.rint(affinity(joint) * UNIT)
        self._codes = np.rint(np.arange(1, n_experts + 1) * UNIT / n_experts)
        self._layers = np.arange(n_layers - 1)
        self._known = np.repeat(np.tri(n_layers - 1), top_k, axis=1)  # layer l of the row l - 1 and those before it

    def of(self, ids: Ids) -> Floats:
        """States [n, L-1, width] of tokens [n, L, K]; row l - 1 reads the selections of layers before l alone."""
        n, before = len(ids), ids[:, :-1]
        history = self._codes[before].reshape(n, 1, -1) * self._known
        popular = np.broadcast_to(self._popular, (n, *self._popular.shape))
        if self.rows:
            affine = self._affine[self._layers[None, :, None], before].reshape(n, len(self._layers), -1)
        else:
            flat = self._affine.reshape(len(self._layers), -1)
            affine = np.broadcast_to(flat, (n, *flat.shape))
        return np.concatenate([history, popular, affine], axis=2)


@dataclass(frozen=True)
class Predictor:
    """A trained ExpertMLP, one for all layers or one for each but the first, with the matrices it was trained on."""

    states: States
    nets: list[IntMlp]
    facts: dict[str, Any]

    def named(self, ids: Ids) -> Ids:
        """Experts named for layers 1 to L-1 of tokens [n, L, K], best first; [n, L-1, K]."""
        return best(self.scores(ids), ids.shape[2])

    def scores(self, ids: Ids) -> Floats:
        """Integer scores [n, L-1, E] of layers 1 to L-1 for tokens [n, L, K]."""
        states = self.states.of(ids)
        if len(self.nets) > 1:
            return np.stack([net.scores(states[:, at]) for at, net in enumerate(self.nets)], axis=1)
        flat = self.nets[0].scores(states.reshape(-1, states.shape[-1]))
        return flat.reshape(*states.shape[:2], -1)


def accuracy(named: Iterable[Ids], blocks: Iterable[Ids], top_k: int) -> dict[str, float]:
    """Table 3 over tokens [n, L, K] and what was named for them [n, L-1, K].

    `top_k_frac`: all selected experts were named; `any_frac`: at least one; `share_frac`: share of the selected named.
    """
    n = right = every = some = 0
    for guess, ids in zip(named, blocks, strict=True):
        found = (guess[..., :, None] == ids[:, 1:, None, :]).any(axis=-1).sum(axis=-1)
        n, right = n + found.size, right + int(found.sum())
        every, some = every + int((found == top_k).sum()), some + int((found > 0).sum())
    return {"top_k_frac": every / n, "any_frac": some / n, "share_frac": right / (n * top_k), "n": n} if n else {"n": 0}


def decode_positions(trace: Trace | TrainingTrace) -> Ids:
    """For every row its position among the decode rows; -1 for prompts."""
    found = np.full(trace.n_tokens, -1, dtype=np.int64)
    n_rows = trace.requests.n_decode_rows
    found[trace.requests.decode_rows(0, n_rows)] = np.arange(n_rows)
    return found


def rows_of(trace: Trace | TrainingTrace, split: str, prefill: bool) -> list[tuple[int, int]]:
    """Row ranges of one split's requests, with their prompts or without."""
    owned = [r for r in trace.requests if r.split == split]
    spans = [(r.first_row + (0 if prefill else r.prompt_len), r.end_row) for r in owned]
    return [(start, stop) for start, stop in spans if stop > start]


def blocks_of(trace: Trace | TrainingTrace, spans: Sequence[tuple[int, int]]) -> Iterable[Ids]:
    """Ids [n, L, K] of row ranges, at most 1024 rows at a time."""
    for start, stop in spans:
        for at in range(start, stop, BLOCK):
            yield trace.experts[at : min(at + BLOCK, stop)].astype(np.int64)


def find(model: str) -> Path | None:
    """The trained predictor of a traced model that this installation carries."""
    return bundled("policies.data", SUFFIX).get(model)


def predictor_bytes(predictor: str, model: str, n_layers: int, n_experts: int, top_k: int) -> int:
    """GPU memory of a predictor: what was published for the served model, else its networks' weights in fp32."""
    if model in PUBLISHED_MODELS:
        return PUBLISHED_BYTES
    of_file = predictor != "trained" and not predictor.startswith(SURROGATE)
    one_each = of_file and load(Path(predictor))[1].get("nets") == "per_layer"
    return 4 * (n_layers - 1 if one_each else 1) * parameters(n_layers, n_experts, top_k)


def stand_in(predictor: str, model: str) -> str:
    """What a surrogate is told: a data set of Table 3 is replaced by its figures for the served model.

    Raises:
        BadInput: Table 3 does not have the model.
    """
    by_model = TABLE_3.get(predictor.partition(":")[2])
    if by_model is None:
        return predictor
    if model not in by_model:
        raise BadInput(
            f"predictor, got {predictor!r} and model {model}: Table 3 has {' and '.join(by_model)}; write "
            f"{SURROGATE}:SHARE or {SURROGATE}:ALL/ANY"
        )
    return f"{SURROGATE}:{by_model[model]}"


def read(path: Path, n_layers: int, n_experts: int, top_k: int) -> Predictor:
    """A trained predictor for this routing shape.

    Raises:
        BadInput: not such a file, one of another shape, or one without its networks.
    """
    tensors, facts = load(path)
    _check(path, facts, (n_layers, n_experts, top_k))
    if tensors.keys() == {OUTPUTS}:
        raise BadInput(
            f"{path}: it holds what was named for one trace (of {facts.get('model')}), and no network to ask about "
            "another; train one with `moesim train duoserve` and name it with --predictor FILE"
        )
    single, joint = (tensors.get(name, np.zeros(0)) for name in ("popularity_counts", "affinity_counts"))
    if single.shape != (n_layers, n_experts) or joint.shape != (n_layers - 1, n_experts, n_experts):
        raise BadInput(f"{path}: popularity or affinity counts of another shape; train it again")
    rows = facts["affinity"] == "rows"
    states = States(single.astype(np.int64), joint.astype(np.int64), top_k, rows)
    one_each = facts.get("nets") == "per_layer"
    prefixes = [net_prefix(at) for at in range(n_layers - 1)] if one_each else [net_prefix(None)]
    width = width_of(n_layers, n_experts, top_k, rows)
    nets = [
        mlp_of(
            {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)},
            width,
            n_experts,
            path,
        )
        for prefix in prefixes
    ]
    return Predictor(states, nets, facts)


def outputs_for(path: Path, trace: Trace | TrainingTrace) -> NDArray[Any] | None:
    """What a predictor's file says that it names for the decode rows of this very trace [rows, L-1, K], in integers of
    any size; None where it does not say. Its networks are not read.

    Raises:
        BadInput: not such a file, one of another shape, or one that names what there is not.
    """
    tensors, facts = load(path, only=(OUTPUTS,))
    _check(path, facts, (trace.n_layers, trace.n_experts, trace.top_k))
    outputs = tensors.get(OUTPUTS)
    if outputs is None or facts.get("outputs_of") != trace.sha256:
        return None
    if outputs.dtype.kind not in "ui" or outputs.shape[1:] != (trace.n_layers - 1, trace.top_k):
        raise BadInput(f"{path}: outputs of another shape; train it again")
    if not 0 <= outputs.min(initial=0) <= outputs.max(initial=0) < trace.n_experts:
        raise BadInput(f"{path}: outputs that name experts there are not; train it again")
    n_rows = trace.requests.n_decode_rows
    if len(outputs) != n_rows:
        raise BadInput(
            f"{path}: outputs, got {len(outputs)} rows for a trace of {n_rows} decode rows: one each; train it again"
        )
    return outputs


def _check(path: Path, facts: dict[str, Any], asked: tuple[int, int, int]) -> None:
    """Raises BadInput where a file holds no predictor, or one of another routing shape."""
    shape = (facts.get("n_layers"), facts.get("n_experts"), facts.get("top_k"))
    if facts.get("format") != FORMAT or facts.get("affinity") not in ("rows", "full"):
        raise BadInput(f"{path}: not a predictor of duoserve in format {FORMAT}; train it with `moesim train duoserve`")
    if shape != asked:
        raise BadInput(
            f"{path}, got a predictor for {shape[0]}x{shape[1]}, k={shape[2]}: the trace is "
            f"{asked[0]}x{asked[1]}, k={asked[2]}; train one with `moesim train duoserve`"
        )
