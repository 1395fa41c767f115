"""A small XLNet (Yang et al., arXiv 1906.08237) in whole numbers: the same ranking of experts on every machine.

Activations and weights are integers that stand for multiples of 1 / 4096, held in float64: a matrix product is then
exact, in whatever order it is summed. What lies between products (division, square root, a polynomial for the
exponential, rounding) is done element by element with operations that IEEE 754 rounds in one way only. ReLU stands
for GELU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.policy import BadInput

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
    """Encoder layers over one sequence of fixed length.

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
