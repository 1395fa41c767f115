"""Tokens that are expected to need the same experts run together: a decode step in two passes of like tokens.

The rule is ExpertFlow's token scheduler (He, Zhang et al., "ExpertFlow: Efficient Mixture-of-Experts Inference via
Predictive Expert Caching and Token Scheduling", arXiv 2410.17954, DAC 2026), known here from third-party notes: the
tokens of two batches are regrouped into two of equal size by K-means on the Hamming distance of their predicted paths,
which takes the CPU less than 10 ms; `--batch` is both batches together. Assumed: where K-means starts and when it ends
(here from the first token and the one farthest from it, until nothing moves, ten rounds at most), and that the 10 ms
are waited for before each step. All distances are whole numbers; ties go to the earlier token.

Predicted is a token's path from its id, which is known when its step begins: where tokens of that id were routed on the
store split (`sim.workload.token_paths`). Requests start in order of arrival, so nobody starves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.workload.iterations import Range, RequestInfo
from sim.workload.scheduler import Scheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS = 10


class BatchAffinity(Scheduler):
    """As `fcfs`, and each decode step of several requests runs as two passes, tokens with like paths together."""

    name = "batch_affinity"
    in_order = True
    needs = ("paths",)
    sharing_out_s = 0.01

    def pick(self, now_s: float) -> RequestInfo | None:
        return next(self.arrived_by(now_s), None)

    def passes(self, ranges: list[Range]) -> list[list[Range]]:
        foretold = self.profiled.paths
        assert foretold is not None
        bits = as_bits(foretold.paths([r.start_row for r in ranges]), foretold.n_experts)
        return [[ranges[at] for at in half] for half in halves(bits)]


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
