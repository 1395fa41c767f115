"""A gate that may choose among some experts only: the others' scores count as zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def masked_top_k(
    scores: NDArray[np.float64], ids: NDArray[np.int64], allowed: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k best allowed experts per token and their renormalised weights.

    What the router chose and is allowed stays and comes first, in its order (also where a biased router does not follow
    the scores); the next best take the other places, ties to the lowest id.

    Args:
        scores: [n, E]. ids: [n, k], the router's choice. allowed: [E].

    Returns:
        ids [n, k], -1 where fewer than k are allowed, and weights [n, k] that sum to 1 (0: nothing has a score).
    """
    k = ids.shape[1]
    rank = np.where(allowed, scores, -1.0)
    chosen = scores.max(initial=0.0) + np.arange(k, 0, -1.0)  # above every score, the heaviest highest
    np.put_along_axis(rank, ids, np.where(allowed[ids], chosen, -1.0), 1)
    best = np.argsort(-rank, axis=1, kind="stable")[:, :k]
    there = allowed[best]
    mass = np.where(there, np.take_along_axis(scores, best, 1), 0.0)
    total = mass.sum(axis=1, keepdims=True)
    return np.where(there, best, -1), np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
