"""Who is most like whom by two cosines at once, one after the other: compiled loops, or numpy with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.flat import COMPILED

if TYPE_CHECKING:  # C, and only where this is compiled
    from cython.cimports.sim.policy.wide import moesim_is_wide, most_of_both

Floats = NDArray[np.float64]


def largest(values: Floats) -> int:
    """Where the largest of some numbers stands first."""
    if not COMPILED:
        return int(values.argmax())
    n = values.shape[0]
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = values[0]
    for i in range(0, n - 7, 8):  # eight at a time: one after the other, each would wait for the one before
        m0 = values[i] if values[i] > m0 else m0
        m1 = values[i + 1] if values[i + 1] > m1 else m1
        m2 = values[i + 2] if values[i + 2] > m2 else m2
        m3 = values[i + 3] if values[i + 3] > m3 else m3
        m4 = values[i + 4] if values[i + 4] > m4 else m4
        m5 = values[i + 5] if values[i + 5] > m5 else m5
        m6 = values[i + 6] if values[i + 6] > m6 else m6
        m7 = values[i + 7] if values[i + 7] > m7 else m7
    most = max(max(max(m0, m1), max(m2, m3)), max(max(m4, m5), max(m6, m7)))
    for i in range(n // 8 * 8, n):
        most = values[i] if values[i] > most else most
    at = 0
    while at < n - 1 and values[at] != most:
        at += 1
    return at


def most_alike(one: Floats, other: Floats, share: float) -> int:
    """Where share x `one` + (1 - share) x `other` is largest first."""
    if len(one) != len(other) or not len(one):
        raise ValueError(f"most_alike, got {len(one)} and {len(other)} numbers: as many of both, and one at least")
    if not COMPILED:
        return int((share * np.asarray(one) + (1.0 - share) * np.asarray(other)).argmax())
    if moesim_is_wide():
        slot: int = most_of_both(one, other, share)
        return slot
    return _most_alike(one, other, share, np.empty(len(one)))


def _most_alike(one: Floats, other: Floats, share: float, score: Floats) -> int:
    rest = 1.0 - share
    for at in range(len(one)):
        score[at] = share * one[at] + rest * other[at]
    return largest(score)


class Likeness(NamedTuple):
    """Cosines of m newcomers with n stored vectors, and among themselves, as products and 1 / lengths.

    Products lie in [m, n] and [m, m], norms in [n] and [m].
    """

    products: Floats
    norms: Floats
    among: Floats
    own: Floats


def replaced_in_turn(one: Likeness, other: Likeness, share: float) -> NDArray[np.int64]:
    """Newcomers take slots in turn, each that of the stored vector most like it; which ones, [m].

    Alike is share x the cosine by `one` + (1 - share) x that by `other`; ties go to the lowest slot. Whoever has taken
    a slot is compared with by those that follow. Products and norms are written over.
    """
    m, n = one.products.shape
    for like in (one, other):
        shapes = [array.shape for array in like]
        if shapes != [(m, n), (n,), (m, m), (m,)]:
            raise ValueError(f"replaced_in_turn, got arrays of shapes {shapes}: {m} newcomers, {n} stored vectors")
    slots = np.zeros(m, dtype=np.int64)
    if COMPILED and n:
        _in_turn(
            one.products,
            one.norms,
            one.among,
            one.own,
            other.products,
            other.norms,
            other.among,
            other.own,
            share,
            slots,
            np.zeros(n),
            np.zeros(m, dtype=np.int64),
            np.full(n, -1),
        )
        return slots
    scores = share * _cosines(one.products, one.norms, one.own)
    scores += (1.0 - share) * _cosines(other.products, other.norms, other.own)
    among = share * _cosines(one.among, one.own, one.own) + (1.0 - share) * _cosines(other.among, other.own, other.own)
    for i in range(m):
        slot = slots[i] = int(scores[i].argmax())
        scores[i + 1 :, slot] = among[i + 1 :, i]
    return slots


def _cosines(products: Floats, norms: Floats, own: Floats) -> Floats:
    return products * norms[None] * own[:, None]


def _in_turn(
    products: Floats,
    norms: Floats,
    among: Floats,
    own: Floats,
    products2: Floats,
    norms2: Floats,
    among2: Floats,
    own2: Floats,
    share: float,
    slots: NDArray[np.int64],
    score: Floats,
    taken: NDArray[np.int64],
    holder: NDArray[np.int64],
) -> None:
    """One newcomer after the other.

    Args:
        score: room for numbers [n]. taken: room for the slots that newcomers have taken, each named once [m]. holder:
            by slot the newcomer that has it; -1 everywhere [n].
    """
    n = len(norms)
    rest = 1.0 - share
    n_taken = 0
    for i in range(len(own)):
        for at in range(n_taken):
            slot = taken[at]
            products[i, slot] = among[i, holder[slot]]
            products2[i, slot] = among2[i, holder[slot]]
        length = own[i]
        length2 = own2[i]
        for slot in range(n):
            score[slot] = share * (products[i, slot] * norms[slot] * length) + rest * (
                products2[i, slot] * norms2[slot] * length2
            )
        best = largest(score)
        slots[i] = best
        norms[best] = length
        norms2[best] = length2
        if holder[best] < 0:
            taken[n_taken] = best
            n_taken += 1
        holder[best] = i


def inverse_norm(squares: Floats) -> Floats:
    """1 / sqrt, and 0 for a vector of zeros, so that its similarity is 0."""
    return np.where(squares > 0, 1.0 / np.sqrt(np.maximum(squares, 1.0)), 0.0)
