"""First in, first out: the expert that has been on the GPU longest leaves first.

Source: SMoE (goingshr/SMoE@2de217b), the code of "Importance-Driven Expert Scheduling" (arXiv 2508.18983), evicts
in this order where its paper ranks by score; SiDA-MoE (MLSys 2024, arXiv 2310.18859) names FIFO for its expert memory.
"""

from __future__ import annotations

from policies.common.cache import ScopedCache
from sim.policy import Insertion, View


class Fifo(ScopedCache):
    """Evict the expert that arrived first; being used again does not save it. What the running layer needs is safe."""

    name = "fifo"
    title = "First in, first out"
    source = "goingshr/SMoE@2de217b (arXiv 2508.18983, code); arXiv 2310.18859"
    one_size = "a larger room of first in, first out may hit less (Belady's anomaly), so no size tells another's"

    def bind(self, view: View) -> None:
        super().bind(view)
        self.order = Insertion(self.per_layer)
