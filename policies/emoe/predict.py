"""eMoE's predictors (arXiv 2503.06823, section 3.2.2): how often each expert will be asked for, by layer and task.

A prompt's past is a table of counts [L, E]: how many of its tokens each expert served. A prediction is a table of whole
numbers [L, E] too, shares of 1 / 65536 per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.common.mlp import load
from sim.policy import BadInput, bundled

if TYPE_CHECKING:
    from sim.policy import RequestInfo, Trace, TrainingTrace


Floats = NDArray[np.float64]

ONE = 4096.0  # fixed point of activations and weights
SHARE = 65536  # fixed point of predicted frequencies
EPSILON = 1e-5  # of layer normalisation, as trained
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
# 1/n!, highest first: e**x for 0 <= x < ln 2 to 1e-9
TAYLOR = [1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0]
MATRICES = ("q", "k", "v", "o", "layer_1", "layer_2")
VECTORS = (
    "r_w_bias",
    "r_r_bias",
    "norm_1.weight",
    "norm_1.bias",
    "layer_1.bias",
    "layer_2.bias",
    "norm_2.weight",
    "norm_2.bias",
)
MAX_WIDTH = 4096  # products of two int16 summed over so many stay far below 2**53


def exponential(x: Floats) -> Floats:
    """e**x for x <= 0 by range reduction and Horner's rule."""
    n = np.floor(x * LOG2_E)
    rest = x - n * LN_2
    value = np.full_like(rest, TAYLOR[0])
    for factor in TAYLOR[1:]:
        value = value * rest + factor
    return np.asarray(np.ldexp(value, np.maximum(n, -60).astype(np.int32)))


def shares(logits: Floats, unit: float) -> Floats:
    """Softmax along the last axis of logits in 1 / 4096, as whole numbers of 1 / `unit`."""
    powers = np.rint(exponential((logits - logits.max(axis=-1, keepdims=True)) / ONE) * 2.0**24)
    return np.asarray(np.rint(powers * unit / powers.sum(axis=-1, keepdims=True)))


def normalised(x: Floats, weight: Floats, bias: Floats) -> Floats:
    """Layer normalisation of [n, d] in 1 / 4096."""
    centred = x - np.rint(x.mean(axis=-1, keepdims=True))
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return np.asarray(np.rint(centred / np.sqrt(variance + EPSILON * ONE * ONE) * weight) + bias)


class Xlnet:
    """A small XLNet (Yang et al., arXiv 1906.08237) in whole numbers: encoder layers over one sequence of fixed length.

    The same ranking of experts on every machine: activations and weights are integers that stand for multiples of
    1 / 4096, held in float64, so that a matrix product is exact in whatever order it is summed. What lies between
    products (division, square root, a polynomial for the exponential, rounding) is done element by element with
    operations that IEEE 754 rounds in one way only. ReLU stands for GELU.

    Args:
        tensors: int16 weights of layer i under `i.q` ... and the table `i.positions` [2 n, d] of keys for relative
            positions n, n-1 ... -n+1, which depend on nothing; `words` [vocabulary, d] are the embeddings.
        n_heads: heads; their width is a power of 4, so that scaling by its root is exact.

    Raises:
        BadInput: a tensor is missing or of another shape or type.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], n_heads: int, length: int, vocabulary: int, path: Path):
        self._heads, self.length = n_heads, length
        self.words = _whole(tensors, "words", path)
        width = self.words.shape[1] if self.words.ndim == 2 else 0
        head = width // n_heads if n_heads > 0 else 0
        if self.words.shape != (vocabulary, width) or head not in (4, 16, 64) or head * n_heads != width:
            raise BadInput(
                f"{path}: words, got {self.words.shape} and {n_heads} heads: [{vocabulary}, heads x 4, 16 "
                "or 64] is needed; train it again with `moesim train emoe`"
            )
        self._root = float(np.sqrt(head))
        self._layers: list[dict[str, Floats]] = []
        while f"{len(self._layers)}.q" in tensors:
            at = len(self._layers)
            layer = {name: _whole(tensors, f"{at}.{name}", path) for name in (*MATRICES, *VECTORS, "positions")}
            inner = layer["layer_1"].shape[0]
            need = dict.fromkeys(("q", "k", "v", "o"), (width, width)) | dict.fromkeys(VECTORS, (width,))
            need |= {
                "layer_1": (inner, width),
                "layer_2": (width, inner),
                "layer_1.bias": (inner,),
                "positions": (2 * length, width),
            }
            for name, shape in need.items():
                if layer[name].shape != shape or max(shape) > MAX_WIDTH:
                    raise BadInput(f"{path}: {at}.{name}, got {layer[name].shape}: {shape} is needed; train it again")
            self._layers.append(layer)

    def hidden(self, ids: Sequence[int]) -> Floats:
        """Last hidden state [n, d] of a sequence of word ids, in 1 / 4096."""
        h: Floats = self.words[np.asarray(ids)]
        for layer in self._layers:
            h = self._feed_forward(layer, self._attend(layer, h))
        return h

    def _attend(self, layer: dict[str, Floats], h: Floats) -> Floats:
        """Attention with relative positions: content (q + r_w_bias) k, position (q + r_r_bias) r at distance i - j."""
        n, heads = len(h), self._heads
        q, k, v = (_split(_product(h, layer[name]), heads) for name in ("q", "k", "v"))
        content = (q + _split(layer["r_w_bias"][None], heads)) @ k.transpose(0, 2, 1)
        by_place = (q + _split(layer["r_r_bias"][None], heads)) @ _split(layer["positions"], heads).transpose(0, 2, 1)
        at = n - np.arange(n)[:, None] + np.arange(n)[None]  # row of `positions` that stands for distance i - j
        position = np.take_along_axis(by_place, np.broadcast_to(at, (heads, n, n)), axis=2)
        weights = shares(np.rint((content + position) / (ONE * self._root)), ONE)
        mixed = np.rint(weights @ v / ONE).transpose(1, 0, 2).reshape(n, -1)
        return normalised(_product(mixed, layer["o"]) + h, layer["norm_1.weight"], layer["norm_1.bias"])

    @staticmethod
    def _feed_forward(layer: dict[str, Floats], h: Floats) -> Floats:
        inner = np.maximum(_product(h, layer["layer_1"].T) + layer["layer_1.bias"], 0.0)
        out = _product(inner, layer["layer_2"].T) + layer["layer_2.bias"]
        return normalised(out + h, layer["norm_2.weight"], layer["norm_2.bias"])


def _product(x: Floats, weight: Floats) -> Floats:
    """x [n, in] @ weight [in, out], back in 1 / 4096; every sum is exact."""
    return np.asarray(np.rint(x @ weight / ONE))


def _split(x: Floats, heads: int) -> Floats:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _whole(tensors: Mapping[str, NDArray[Any]], name: str, path: Path) -> Floats:
    found = tensors.get(name)
    if found is None or found.dtype != np.int16:
        raise BadInput(f"{path}: {name}: int16 numbers are needed; train it again with `moesim train emoe`")
    return found.astype(np.float64)


Counts = NDArray[np.int64]

FORMAT = "emoe/1"
SUFFIX = ".emoe.safetensors"
FORMS = ("A", "L")
# Section 5.7, seconds per invocation, moving of experts included, by model: eMoE-A, eMoE-L.
PUBLISHED_S = {"mixtral-8x7b": (0.334, 4.211), "openmoe-8b": (0.381, 1.387)}
PUBLISHED_LAYERS = 32  # of Mixtral: eMoE-L takes one step per layer


def published_s(form: str, model: str, n_layers: int) -> float:
    """Seconds of an invocation; for models that the paper does not time Mixtral's, of eMoE-L by layer."""
    a_s, l_s = PUBLISHED_S.get(model, PUBLISHED_S["mixtral-8x7b"])
    if form == "A":
        return a_s
    return l_s if model in PUBLISHED_S else l_s * n_layers / PUBLISHED_LAYERS


def counts_of_request(trace: Trace | TrainingTrace, request: RequestInfo) -> Counts:
    """Tokens per (layer, expert) over the rows of a request, [L, E]."""
    counts = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
    rows = trace.experts[request.first_row : request.first_row + request.prompt_len + request.outputs - 1]
    np.add.at(counts, (np.arange(trace.n_layers)[None, :, None], rows), 1)
    return counts


def digits(table: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The "series of k indices" of section 3.2.2: per layer the k experts with most tokens, ties to the lowest id."""
    return np.argsort(-table, axis=-1, kind="stable")[..., :k]


def frequencies(counts: NDArray[Any]) -> Counts:
    """Counts [..., E] as shares of 1 / 65536; a layer without any says nothing (zeros)."""
    total = counts.sum(axis=-1, keepdims=True)
    return np.asarray(np.rint(counts * SHARE / np.maximum(total, 1)), dtype=np.int64)


class Transformer:
    """The trained predictor of one trace, forms A and L of the paper.

    The words of its sequences are the experts' numbers, one for each (layer, expert), and the task types. eMoE-A reads
    the task and the k most used experts of every layer of the previous prompt, and says all layers at once. eMoE-L
    reads the task and those of one layer, and says the next; its first layer is the previous prompt's.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], facts: Mapping[str, Any], path: Path) -> None:
        self.n_layers, self.n_experts, self.top_k = (int(facts[name]) for name in ("n_layers", "n_experts", "top_k"))
        self.tasks = tuple(str(task) for task in facts["tasks"])
        n_words = self.n_layers * self.n_experts
        vocabulary = n_words + len(self.tasks)
        lengths = {"A": 1 + self.n_layers * self.top_k, "L": 1 + self.top_k}
        self._nets, self._bias = {}, {}
        for form in FORMS:
            own = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith(f"{form}.")}
            self._nets[form] = Xlnet(own, int(facts["n_heads"]), lengths[form], vocabulary, path)
            bias = own.get("bias", np.zeros(0))
            if bias.shape != (n_words,) or bias.dtype != np.int16:
                raise BadInput(f"{path}: {form}.bias, got {bias.dtype} {bias.shape}: int16 of {n_words}; train again")
            self._bias[form] = bias.astype(np.float64)
        similarity = tensors.get("similarity", np.zeros((0, 0)))
        if similarity.shape not in ((0, 0), (len(self.tasks), self.n_layers)):
            raise BadInput(f"{path}: similarity, got {similarity.shape}: one per task and layer, or none; train again")
        self.similarity: Floats | None = similarity.astype(np.float64) if similarity.size else None

    def predict(self, form: str, past: Counts, task: int) -> Counts:
        """Shares [L, E] for a task type, from the previous prompt's counts [L, E]."""
        return self._all_layers(past, task) if form == "A" else self._layer_by_layer(past, task)

    def _all_layers(self, past: Counts, task: int) -> Counts:
        series = self._word(np.arange(self.n_layers)[:, None], digits(past, self.top_k))
        hidden = self._nets["A"].hidden([self._task_word(task), *series.ravel().tolist()])
        by_layer = hidden[1:].reshape(self.n_layers, self.top_k, -1).sum(axis=1)
        return np.stack([self._said("A", layer, by_layer[layer]) for layer in range(self.n_layers)])

    def _layer_by_layer(self, past: Counts, task: int) -> Counts:
        found = [frequencies(past[0])]
        for layer in range(1, self.n_layers):
            series = self._word(layer - 1, digits(found[-1], self.top_k))
            hidden = self._nets["L"].hidden([self._task_word(task), *series.tolist()])
            found.append(self._said("L", layer, hidden[1:].sum(axis=0)))
        return np.stack(found)

    def _said(self, form: str, layer: int, summed: Floats) -> Counts:
        """Softmax over a layer's experts of (mean hidden state x their embedding) + bias."""
        words = slice(layer * self.n_experts, (layer + 1) * self.n_experts)
        logits = np.rint(self._nets[form].words[words] @ summed / (ONE * self.top_k)) + self._bias[form][words]
        return shares(logits, float(SHARE)).astype(np.int64)

    def _word(self, layer: Any, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(layer * self.n_experts + experts)

    def _task_word(self, task: int) -> int:
        return self.n_layers * self.n_experts + task


def find(model: str) -> Path | None:
    """The trained predictor of a traced model that this installation carries."""
    return bundled("policies.data", SUFFIX).get(model)


def read(path: Path, n_layers: int, n_experts: int, top_k: int, tasks: Sequence[str]) -> Transformer:
    """A trained predictor for this routing shape and these tasks.

    Raises:
        BadInput: not such a file, or one of another shape or for other tasks.
    """
    tensors, facts = load(path)
    shape = (facts.get("n_layers"), facts.get("n_experts"), facts.get("top_k"))
    known, n_heads = facts.get("tasks"), facts.get("n_heads")
    told = isinstance(known, list) and type(n_heads) is int and n_heads >= 1
    if facts.get("format") != FORMAT or not told:
        raise BadInput(f"{path}: not a predictor of emoe in format {FORMAT}; train it with `moesim train emoe`")
    if shape != (n_layers, n_experts, top_k):
        raise BadInput(
            f"{path}, got a predictor for {shape[0]}x{shape[1]}, k={shape[2]}: the trace is "
            f"{n_layers}x{n_experts}, k={top_k}; train one with `moesim train emoe`"
        )
    unknown = sorted(set(tasks) - set(map(str, known or ())))
    if unknown:
        raise BadInput(f"{path}: it knows no task {unknown[0]!r} of this trace; train one with `moesim train emoe`")
    return Transformer(tensors, facts, path)
