"""Two batches of tokens with like paths out of all tokens of a step: ExpertFlow's token scheduler.

Two-means on the Hamming distance of predicted paths, with clusters of equal size. Where it starts and when it ends is
not in the notes: here from the first token and the one farthest from it, until nothing moves, ten rounds at most. All
distances are whole numbers; ties go to the earlier token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10


def as_bits(ids: NDArray[np.int64], n_experts: int) -> NDArray[np.int64]:
    """Paths [n, L, K] as rows of zeros and ones [n, L x E]: which expert of which layer a token passes."""
    n, n_layers, _ = ids.shape
    bits = np.zeros((n, n_layers, n_experts), dtype=np.int64)
    np.put_along_axis(bits, ids, 1, axis=2)
    return bits.reshape(n, -1)


def halves(bits: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Tokens of the two batches, ascending; of an odd number the first gets one more.

    Args:
        bits: paths of at least two tokens [n, F], zeros and ones.
    """
    n = len(bits)
    size = (n + 1) // 2
    farthest = int(np.argmax((bits != bits[0]).sum(axis=1)))
    means = [(bits[0], 1), (bits[farthest], 1)]  # of each cluster the sum, and of how many
    first: list[int] = []
    for _ in range(ROUNDS):
        # Distance to a mean s / m, times m: |m x - s| summed up, which is s where x is 0 and m - s where it is 1.
        (sum_a, m_a), (sum_b, m_b) = means
        to_a = sum_a.sum() + bits @ (m_a - 2 * sum_a)
        to_b = sum_b.sum() + bits @ (m_b - 2 * sum_b)
        nearest = sorted(np.argsort(to_a * m_b - to_b * m_a, kind="stable")[:size].tolist())
        if nearest == first:
            break
        first = nearest
        rest = [token for token in range(n) if token not in first]
        means = [(bits[first].sum(axis=0), len(first)), (bits[rest].sum(axis=0), len(rest))]
    return first, [token for token in range(n) if token not in first]
