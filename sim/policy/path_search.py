"""Among stored paths, those most like one's own so far.

Compiled these are plain loops; where no compiler was, numpy gives the same bits. Rows are of whole numbers, and so are
all sums of their products: exact, in whatever order they are added.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.base.flat import COMPILED
from sim.policy.likeness import Floats, inverse_norm

if TYPE_CHECKING:  # C, and only where this is compiled
    from cython.cimports.sim.policy.wide import add_pairs, fits_pairs, moesim_is_wide, put_pairs, root

# Whole numbers up to here are exact in single precision, and so is every sum of such that does not exceed it.
EXACT_IN_SINGLE = 2.0**24


class PathSearch:
    """Compares a path, one row of numbers per layer, with stored ones by the cosine of what has been seen so far.

    Args:
        paths: the stored ones, [L, E, capacity], float32 where that holds every sum of products exactly, else float64.
        inverse_norms: 1 / length of each stored path up to each layer, [L, capacity]; 0 where it is all zeros.
            Both are read at every search; `put` and `put_all` write them.

    Attributes:
        wide: whether a search takes several paths at a time in C (`wide.pxd`), from numbers of 16 bits, as long as what
            is stored and asked fits; may be set to False.
        slot_array, similarity_array, whole_array, own_array: the answers of the last `find`, as `along` fills them.
    """

    def __init__(self, paths: NDArray[Any], inverse_norms: Floats) -> None:
        self.n_layers, self.n_width, n = paths.shape
        self.n_stored = n
        if inverse_norms.shape != (self.n_layers, n):
            raise ValueError(f"PathSearch, got norms of shape {inverse_norms.shape}: must be {(self.n_layers, n)}")
        self.paths = paths
        self.inverse_norms = inverse_norms
        self.norm_array = inverse_norms  # the same memory
        self.is_single = paths.dtype == np.float32
        none = np.zeros((1, 1, 1))
        self.single = paths if self.is_single else none.astype(np.float32)
        self.double = none if self.is_single else paths
        self.products = np.zeros(n, dtype=np.float32)
        self.dots = np.zeros(n)
        self.alike_array = np.zeros((self.n_layers if COMPILED else 1, n))
        self.alike = self.alike_array  # the same memory
        self.slot_array = np.zeros(self.n_layers, dtype=np.int64)
        self.similarity_array, self.own_array = np.zeros((2, self.n_layers))
        self.whole_array = np.zeros(n)
        self.slots, self.similarities = self.slot_array, self.similarity_array  # the same memory
        self.whole, self.own = self.whole_array, self.own_array
        self.arrays: Arrays | None = None  # where whole arrays are worked with, those to write over
        self.wide = bool(COMPILED and self.n_width == 8 and moesim_is_wide())
        self.pair_array = np.zeros((self.n_layers if self.wide else 0, 4, n, 2), dtype=np.int16)
        self.pairs = self.pair_array  # the same memory
        if self.wide:
            self._pair(np.arange(n), paths)

    def find(self, rows: Floats, n: int) -> bool:
        """`along` with room of its own, whose answers hold until the next time."""
        if not 0 < n <= self.n_stored:
            raise ValueError(f"find, got {n} paths: there are 1 to {self.n_stored}")
        return self.along(rows, n, self.slots, self.similarities, self.whole[:n], self.own)

    def along(
        self, rows: Floats, n: int, slots: NDArray[np.int64], similarities: Floats, whole: Floats, own: Floats
    ) -> bool:
        """Search the first `n` stored paths with each beginning of `rows` [L, E].

        Fills for every layer the `slots` of the path most alike (ties go to the lowest) and the `similarities` of
        these, [L]; `whole`, the similarity of every stored path in the end, [n]; `own`, 1 / length of `rows` up to
        each layer, [L]. Nothing of it where a layer's squares add up to more than single precision holds exactly, and
        the paths are in that: then the answer is False.
        """
        n_layers, n_stored = self.n_layers, self.n_stored
        if not 0 < n <= n_stored or rows.shape[0] != n_layers or rows.shape[1] != self.n_width or len(whole) != n:
            raise ValueError(f"along, got {rows.shape[0]} rows, {n} paths: there are {n_layers}, and 1 to {n_stored}")
        if len(slots) != n_layers or len(similarities) != n_layers or len(own) != n_layers:
            raise ValueError(f"along, got room for {len(slots)} slots: one slot, similarity and length for each layer")
        if not COMPILED:
            if self.arrays is None or self.arrays.n != n:
                self.arrays = Arrays(self.paths, self.inverse_norms, n)
            return self.arrays.along(rows, slots, similarities, whole, own)
        if self.is_single and self._largest(rows) > EXACT_IN_SINGLE:
            return False
        dots = self.dots
        norms = self.inverse_norms
        alike = self.alike
        square = 0.0
        wide = self.wide and fits_pairs(rows)
        for i in range(n):
            dots[i] = 0.0
        for layer in range(self.n_layers):
            for at in range(self.n_width):
                square += rows[layer, at] * rows[layer, at]
            own[layer] = 1.0 / root(square if square > 1.0 else 1.0) if square > 0.0 else 0.0
            if wide:
                slot = add_pairs(self.pairs, layer, rows, dots, norms, n)
                slots[layer] = slot
                similarities[layer] = dots[slot] * norms[layer, slot] * own[layer]
                continue
            if not self.is_single:
                self._add_double(layer, rows, n)
            elif self.n_width == 8:
                self._add_eight(layer, rows, n)
            else:
                self._add_single(layer, rows, n)
            for i in range(n):
                alike[layer, i] = dots[i] * norms[layer, i]
        last = self.n_layers - 1
        if wide:
            for i in range(n):
                whole[i] = dots[i] * norms[last, i] * own[last]
            return True
        places = self.alike_array[:, :n].argmax(axis=1)  # several numbers at a time, as the processor can
        for layer in range(self.n_layers):
            slots[layer] = places[layer]
            similarities[layer] = alike[layer, slots[layer]] * own[layer]
        for i in range(n):
            whole[i] = alike[last, i] * own[last]
        return True

    def _largest(self, rows: Floats) -> float:
        """The largest sum of a layer's squares."""
        most = 0.0
        for layer in range(self.n_layers):
            square = 0.0
            for at in range(self.n_width):
                square += rows[layer, at] * rows[layer, at]
            most = max(most, square)
        return most

    def _add_eight(self, layer: int, rows: Floats, n: int) -> None:
        """Add a layer's products to those of the layers before, where a row has eight numbers."""
        paths = self.single
        dots = self.dots
        v0, v1, v2, v3 = rows[layer, 0], rows[layer, 1], rows[layer, 2], rows[layer, 3]
        v4, v5, v6, v7 = rows[layer, 4], rows[layer, 5], rows[layer, 6], rows[layer, 7]
        for i in range(n):
            low = v0 * paths[layer, 0, i] + v1 * paths[layer, 1, i] + v2 * paths[layer, 2, i] + v3 * paths[layer, 3, i]
            top = v4 * paths[layer, 4, i] + v5 * paths[layer, 5, i] + v6 * paths[layer, 6, i] + v7 * paths[layer, 7, i]
            dots[i] += low + top

    def _add_single(self, layer: int, rows: Floats, n: int) -> None:
        """The same for rows of any length, four numbers of it at a time."""
        paths = self.single
        products = self.products
        dots = self.dots
        for i in range(n):
            products[i] = 0.0
        for four in range(self.n_width // 4):
            at = 4 * four
            v0, v1, v2, v3 = rows[layer, at], rows[layer, at + 1], rows[layer, at + 2], rows[layer, at + 3]
            for i in range(n):
                low = v0 * paths[layer, at, i] + v1 * paths[layer, at + 1, i]
                products[i] += low + (v2 * paths[layer, at + 2, i] + v3 * paths[layer, at + 3, i])
        for at in range(self.n_width // 4 * 4, self.n_width):
            v0 = rows[layer, at]
            for i in range(n):
                products[i] += v0 * paths[layer, at, i]
        for i in range(n):
            dots[i] += products[i]

    def _add_double(self, layer: int, rows: Floats, n: int) -> None:
        """The same, four numbers of a row at a time too, where the sums outgrow single precision."""
        paths = self.double
        dots = self.dots
        for four in range(self.n_width // 4):
            at = 4 * four
            v0, v1, v2, v3 = rows[layer, at], rows[layer, at + 1], rows[layer, at + 2], rows[layer, at + 3]
            for i in range(n):
                low = v0 * paths[layer, at, i] + v1 * paths[layer, at + 1, i]
                dots[i] += low + (v2 * paths[layer, at + 2, i] + v3 * paths[layer, at + 3, i])
        for at in range(self.n_width // 4 * 4, self.n_width):
            value = rows[layer, at]
            for i in range(n):
                dots[i] += value * paths[layer, at, i]

    def rows(self, first: int, slots: NDArray[np.int64], out: Floats) -> None:
        """Rows of stored paths, `out` [m, E]: of layer `first + i` that of the path `slots[i]`."""
        n_layers, m = self.n_layers, len(out)
        if not 0 <= first <= n_layers - m or len(slots) < m or out.shape[1] != self.n_width:
            raise ValueError(f"rows, got {m} from layer {first} on: there are {n_layers} layers; a slot for each")
        for i in range(m):
            if not 0 <= slots[i] < self.n_stored:
                raise ValueError(f"rows, got slot {slots[i]}: there are {self.n_stored}")
        if not COMPILED:
            layers = np.arange(first, first + m)
            out[:] = self.paths[layers, :, slots[:m]]
        else:
            for i in range(m):
                self.read(first + i, slots[i], out[i])

    def read(self, layer: int, slot: int, row: Floats) -> None:
        """A row [E] of a stored path, both of which are known to be there."""
        for at in range(self.n_width):
            row[at] = self.single[layer, at, slot] if self.is_single else self.double[layer, at, slot]

    def put(self, slot: int, rows: Floats, inverse_norms: Floats) -> None:
        """Store a path [L, E], and 1 / its length up to each layer [L], in place of the one in this slot."""
        n_layers, n_width = self.n_layers, self.n_width
        if not 0 <= slot < self.n_stored or rows.shape[0] != n_layers or rows.shape[1] != n_width:
            raise ValueError(f"put, got a path for slot {slot}: of {n_layers} layers, into {self.n_stored} slots")
        if len(inverse_norms) != n_layers:
            raise ValueError(f"put, got {len(inverse_norms)} norms: one for each of {n_layers} layers")
        if not COMPILED:
            self.paths[:, :, slot] = rows
            self.inverse_norms[:, slot] = inverse_norms
            return
        if self.wide and fits_pairs(rows):
            put_pairs(self.pairs, slot, rows)
        else:
            self.wide = False
        for layer in range(n_layers):
            self.inverse_norms[layer, slot] = inverse_norms[layer]
            if self.is_single:
                for at in range(n_width):
                    self.single[layer, at, slot] = rows[layer, at]
            else:
                for at in range(n_width):
                    self.double[layer, at, slot] = rows[layer, at]

    def put_all(self, slots: NDArray[np.int64], paths: Floats, inverse_norms: Floats) -> None:
        """The same with paths [L, E, m] and norms [L, m] in these slots, each named once."""
        self.paths[:, :, slots] = paths
        self.norm_array[:, slots] = inverse_norms
        if self.wide:
            self._pair(slots, paths)

    def _pair(self, slots: NDArray[np.int64], paths: NDArray[Any]) -> None:
        """Keep paths [L, E, m] as pairs of 16-bit numbers too, if they fit."""
        exact = paths.astype(np.float64)
        whole = (exact >= 0.0).all() and (exact < 65535.0).all() and (np.rint(exact) == exact).all()
        self.wide = bool(whole and ((exact * exact).sum(axis=1) < 2.0**32).all())
        if self.wide:
            pairs = (exact - 32768.0).reshape(self.n_layers, 4, 2, -1)
            self.pair_array[:, :, slots] = pairs.transpose(0, 1, 3, 2)


class Arrays:
    """The search with whole arrays at a time; asking the system for new ones costs more than the sums."""

    def __init__(self, paths: NDArray[Any], inverse_norms: Floats, n: int) -> None:
        n_layers = len(paths)
        self.n = n
        self.paths, self.norms = paths[:, :, :n], inverse_norms[:, :n]
        self.products = np.empty((n_layers, 1, n), dtype=paths.dtype)
        self.dots, self.alike = np.empty((2, n_layers, n))
        self.steps = list(pairwise(list(self.dots)))
        self.layers = np.arange(n_layers)

    def along(self, rows: Floats, slots: NDArray[np.int64], similarities: Floats, whole: Floats, own: Floats) -> bool:
        """See `PathSearch.along`."""
        squares = (rows * rows).sum(axis=1)
        if self.paths.dtype == np.float32 and float(squares.max()) > EXACT_IN_SINGLE:
            return False
        np.matmul(rows.astype(self.paths.dtype)[:, None, :], self.paths, out=self.products)
        np.copyto(self.dots, self.products[:, 0])
        for before, here in self.steps:  # several times as fast as numpy's cumsum along this axis
            np.add(before, here, out=here)
        np.multiply(self.dots, self.norms, out=self.alike)
        self.alike.argmax(axis=1, out=slots)
        own[:] = inverse_norm(np.cumsum(squares))
        np.multiply(self.alike[self.layers, slots], own, out=similarities)
        last = len(own) - 1
        np.multiply(self.alike[last], own[last], out=whole)
        return True
