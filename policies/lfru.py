"""Least frequently and recently used: few uses since it came, and long ago, make an expert leave.

Source: tinyserve (e1n00r/tinyserve@9277e68, tinyserve/cache_policy.py, LFRUPolicy): the least score leaves, which is
uses / (clock - last use + 1); an expert that comes has one use, a hit adds one, and the clock counts look-ups. Of
equals the one that came first leaves. One cache over all layers there; vLLM's pull request 37190 has one per layer, and
so have the replays of arXiv 2608.07911. Every layer then has a clock of its own here; GPUs have none of their own.
"""

from __future__ import annotations

import math

import numpy as np

from policies.common.cache import ScopedCache
from policies.common.placement import every
from sim.policy import Piece, View


class Lfru(ScopedCache):
    """Evict the expert with the fewest uses per look-up since its last; what the running layer needs is safe."""

    name = "lfru"
    title = "Least frequently and recently used"
    source = "e1n00r/tinyserve@9277e68; vllm-project/vllm pull request 37190; arXiv 2608.07911"
    one_size = "it counts uses since an expert came, and in each size it came at another time"

    def bind(self, view: View) -> None:
        super().bind(view)
        self._gpus = np.array([piece.gpu for piece in every(view)])
        self._clock = [0] * view.n_layers  # by layer; one cache over all has the first
        # By piece: uses since it came (endless: not there, so that it never has the least score), the last, its coming.
        self._uses = np.full(len(self._gpus), math.inf)
        self._last = np.zeros(len(self._gpus))
        self._came = np.zeros(len(self._gpus))

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        clock, index = piece.layer if self.per_layer else 0, piece.index
        self._clock[clock] = now = self._clock[clock] + 1
        self._last[index] = now
        if hit:
            self._uses[index] += 1.0
        else:
            self._uses[index] = 1.0
            self._came[index] = now

    def placed(self, piece: Piece, view: View) -> None:
        """In host memory above a drive: it is there, and nobody has used it."""
        index = piece.index
        self._uses[index] = 0.0
        self._last[index] = self._came[index] = self._clock[piece.layer if self.per_layer else 0]

    def evicted(self, piece: Piece, view: View) -> None:
        self._uses[piece.index] = math.inf

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        n_experts = view.n_experts
        first, stop = (piece.layer, piece.layer + 1) if self.per_layer else (0, view.n_layers)
        cache = slice(first * n_experts, stop * n_experts)
        scores = self._uses[cache] / (self._clock[first] + 1.0 - self._last[cache])
        if view.n_gpus > 1:
            scores[self._gpus[cache] != piece.gpu] = math.inf
        if first <= view.layer < stop:
            scores[(view.layer - first) * n_experts :][view.pending_experts()] = math.inf
        least = scores.min()
        if least == math.inf:
            return None
        (equal,) = np.nonzero(scores == least)
        at = int(equal[0] if len(equal) == 1 else equal[self._came[cache][equal].argmin()])
        return view.piece(first + at // n_experts, at % n_experts)
