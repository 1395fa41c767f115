"""Least recently used: the classic cache, over all experts or one per layer.

Source: Mixtral-Offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.1) keeps an LRU cache per layer;
FineMoE (arXiv 2502.05370, section 6.6, Figure 14b) compares with LRU over its whole expert cache.
"""

from __future__ import annotations

from policies.common.cache import ScopedCache
from sim.policy import Recency, View


class Lru(ScopedCache):
    """Evict the expert whose last use is oldest. Experts the running layer still needs are safe."""

    name = "lru"
    title = "Least recently used"
    source = "arXiv 2312.17238 section 3.1; arXiv 2502.05370 section 6.6"

    def bind(self, view: View) -> None:
        super().bind(view)
        self.order = Recency(self.per_layer)
