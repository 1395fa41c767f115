"""Among stored vectors of small whole numbers, the one most like one's own: loops in C, or numpy with the same bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.base.flat import COMPILED
from sim.policy.likeness import Floats, inverse_norm

if TYPE_CHECKING:  # C, and only where this is compiled
    from cython.cimports.sim.policy.wide import as_shorts, first_largest, moesim_is_wide, short_dots

MOST_VALUE = 2047
"""The largest magnitude of a number in a `VectorSearch`: 12 bits, so that 512 products add up in 32."""
TO_WHOLE = 1.5 * 2.0**52  # added to a number, leaves no room behind the point: the nearest whole one, of two the even


def scaled(values: Floats) -> Floats:
    """A vector as whole numbers of which the largest is `MOST_VALUE`; one of zeros as it is."""
    if not COMPILED:
        vector = np.asarray(values)
        most = float(np.abs(vector).max())
        return np.rint(vector * (MOST_VALUE / most)) if most > 0 else vector
    whole = np.empty(len(values))
    _scale(values, whole)
    return whole


def _scale(values: Floats, whole: Floats) -> None:
    most = 0.0
    for at in range(len(values)):
        value = values[at]
        most = max(most, -value if value < 0.0 else value)
    scale = MOST_VALUE / most if most > 0.0 else 0.0
    to_whole = TO_WHOLE  # a machine number where this is compiled
    for at in range(len(values)):
        whole[at] = (values[at] * scale + to_whole) - to_whole


class VectorSearch:
    """Compares a vector of small whole numbers, as `scaled` makes them, with stored ones by their cosine.

    Attributes:
        vectors: the stored ones [capacity, h]. inverse_norms: 1 / length of each, 0 of zeros [capacity]. Both are to be
            read; `put` and `put_all` write them.
    """

    def __init__(self, capacity: int, n_values: int) -> None:
        self.capacity, self.n_values = capacity, n_values
        self.vectors = np.zeros((capacity, n_values))
        self.inverse_norms = np.zeros(capacity)
        self.wide = bool(COMPILED and moesim_is_wide())
        padded = -(-n_values // 16) * 16 if self.wide else 0
        self.shorts = np.zeros((capacity, padded), dtype=np.int16)  # the same in a quarter of the room
        self.double, self.norms, self.short = self.vectors, self.inverse_norms, self.shorts  # the same memory
        self.asked = np.zeros(padded, dtype=np.int16)
        self.alike_array = np.zeros(capacity)  # cosines as `nearest` found them last
        self.alike = self.alike_array  # the same memory

    def put(self, slot: int, vector: Floats) -> None:
        """Store a vector in this slot."""
        if not 0 <= slot < self.capacity or len(vector) != self.n_values:
            raise ValueError(f"put, got {len(vector)} values for slot {slot}: must be {self.n_values}")
        if not COMPILED:
            self.put_all(np.array([slot]), np.asarray(vector)[None])
            return
        self.norms[slot] = self._inverse_norm(vector)
        for at in range(self.n_values):
            self.double[slot, at] = vector[at]
        if self.wide:
            as_shorts(vector, self.short[slot])

    def put_all(self, slots: NDArray[np.int64], vectors: Floats) -> None:
        """Store vectors [m, h] in these slots, each named once."""
        if len(vectors) and (np.abs(vectors).max() > MOST_VALUE or (np.rint(vectors) != vectors).any()):
            raise ValueError(f"VectorSearch, got vectors: must be of whole numbers, none beyond {MOST_VALUE}")
        self.vectors[slots] = vectors
        self.inverse_norms[slots] = inverse_norm((vectors * vectors).sum(axis=1))
        if self.wide:
            self.shorts[slots, : self.n_values] = vectors

    def cosines(self, vector: Floats, n: int) -> Floats:
        """Cosines with the first `n` stored vectors."""
        if not 0 <= n <= self.capacity or len(vector) != self.n_values:
            raise ValueError(f"cosines, got {len(vector)} values, {n} vectors: must be {self.n_values}")
        own = self._inverse_norm(vector)
        if not self.wide or n == 0:
            found: Floats = self.vectors[:n] @ vector
            found *= self.inverse_norms[:n]
            found *= own
            return found
        room = np.empty(n)
        self._fill(vector, n, own, room)
        return room

    def nearest(self, vector: Floats, n: int) -> int:
        """Which of the first `n` stored vectors, one at least, is most alike (ties go to the lowest).

        Their cosines are the first `n` of `alike_array` until the next time.
        """
        if not 0 < n <= self.capacity:
            raise ValueError(f"nearest, got {n} vectors: there are 1 to {self.capacity}")
        if not self.wide:
            self.alike_array[:n] = self.cosines(vector, n)
            return int(self.alike_array[:n].argmax())
        if len(vector) != self.n_values:
            raise ValueError(f"nearest, got {len(vector)} values: must be {self.n_values}")
        self._fill(vector, n, self._inverse_norm(vector), self.alike)
        slot: int = first_largest(self.alike, n)
        return slot

    def _fill(self, vector: Floats, n: int, own: float, room: Floats) -> None:
        as_shorts(vector, self.asked)
        short_dots(self.short, self.asked, room, n)
        for i in range(n):
            room[i] = room[i] * self.norms[i] * own

    def _inverse_norm(self, vector: Floats) -> float:
        """1 / length, and 0 for a vector of zeros. Raises ValueError for what `scaled` would not make."""
        square = 0.0
        most = 0.0 + MOST_VALUE
        to_whole = TO_WHOLE  # machine numbers where this is compiled
        wrong = False
        if not COMPILED:
            values = np.asarray(vector)
            square = float(values.dot(values))
            wrong = bool((np.abs(values) > most).any() or (np.rint(values) != values).any())
        else:
            for at in range(self.n_values):
                value = vector[at]
                square += value * value
                if value > most or value < -most or (value + to_whole) - to_whole != value:
                    wrong = True
        if wrong:
            raise ValueError(f"VectorSearch, got a vector: must be of whole numbers, none beyond {MOST_VALUE}")
        return 1.0 / math.sqrt(square if square > 1.0 else 1.0) if square > 0.0 else 0.0
