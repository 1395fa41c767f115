"""Expert activation matrices of MoE-Infinity: counts [layer, expert] of past requests, and which is like the present.

Source: MoE-Infinity (arXiv 2401.14361 v3, sections 4 and 5) and its code up to EfficientMoE/MoE-Infinity@350f0dd.
Counts are whole numbers in float64, so sums are exact in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def activations(ids: NDArray[np.int64], n_experts: int) -> FloatArray:
    """Counts [L, E] of the experts chosen by some tokens, [n, L, K]."""
    n_layers = ids.shape[1]
    at = ids + np.arange(0, n_layers * n_experts, n_experts)[:, None]
    counts: FloatArray = np.bincount(at.ravel(), minlength=n_layers * n_experts).astype(np.float64)
    return counts.reshape(n_layers, n_experts)


def rows_normalised(counts: FloatArray) -> FloatArray:
    """Each layer's counts as shares; rows without any stay zero."""
    total = counts.sum(axis=-1, keepdims=True)
    shares: FloatArray = counts / np.where(total > 0, total, 1.0)
    return shares


class Collection:
    """EAMC: matrices of past requests, at most `capacity`; a newcomer then takes the place of its likest."""

    def __init__(self, capacity: int, n_layers: int, n_experts: int) -> None:
        self._capacity = capacity
        self._all = np.zeros((0, n_layers, n_experts))
        self._norms = np.zeros(0)  # of whole matrices
        self._row_norms = np.zeros((0, n_layers))
        self._shares: dict[int, FloatArray] = {}
        self.n_replaced = 0  # what was said of a matrix by its number holds until then

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> FloatArray:
        entry: FloatArray = self._all[index]
        return entry

    def shares(self, index: int) -> FloatArray:
        """A matrix with its rows normalised."""
        if index not in self._shares:
            self._shares[index] = rows_normalised(self._all[index])
        return self._shares[index]

    def add(self, counts: FloatArray) -> None:
        """Keep a request's matrix (one without activations is no matrix)."""
        norm = float(np.sqrt((counts * counts).sum()))
        if norm == 0.0:
            return
        row_norms = np.sqrt((counts * counts).sum(axis=1))
        if len(self) < self._capacity:
            self._all = np.concatenate([self._all, counts[None]])
            self._norms = np.append(self._norms, norm)
            self._row_norms = np.concatenate([self._row_norms, row_norms[None]])
            return
        at = int(np.argmax((self._all * counts).sum(axis=(1, 2)) / self._norms))
        self._all[at], self._norms[at], self._row_norms[at] = counts, norm, row_norms
        self._shares.pop(at, None)
        self.n_replaced += 1

    def products(self, layer: int, counts: FloatArray) -> FloatArray:
        """Per matrix, the product of its row of a layer with `counts` [E]."""
        found: FloatArray = self._all[:, layer] @ counts
        return found

    def likest(self, products: FloatArray) -> int:
        """The matrix of largest cosine, given its products with the (partial) present; ties to the first."""
        return int((products / self._norms).argmax())

    def likest_so_far(self, present: FloatArray) -> list[int]:
        """`likest` after each layer of the present matrix [L, E], as its rows become known."""
        products = np.matmul(np.moveaxis(self._all, 0, 1), present[:, :, None])[:, :, 0]
        found: list[int] = (products.cumsum(axis=0) / self._norms).argmax(axis=1).tolist()
        return found

    def likest_ahead(self, live: FloatArray) -> list[int]:
        """2024's code, per current layer l: the matrix of least mean distance to `live`, ties to the first.

        It overwrites rows up to l of the stored matrices with a constant, so only rows after l tell them apart. A
        row without counts has distance 1 to everything.
        """
        norms = np.sqrt((live * live).sum(axis=1)) * self._row_norms
        cosines = (self._all * live).sum(axis=2) / np.where(norms > 0, norms, 1.0)
        after = np.cumsum(cosines[:, ::-1], axis=1)[:, ::-1]  # sums over rows l, l + 1, ...
        after = np.concatenate([after[:, 1:], np.zeros((len(self), 1))], axis=1)
        return [int(at) for at in np.argmax(after, axis=0)]
