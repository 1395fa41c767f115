"""All experts resident: no offloading (vLLM, DeepSpeed-FastGen, "GPU only" in the papers). A floor on time.

Runs in hypothetical memory when the model does not fit; the result then says how much it would need.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.common.placement import every
from sim.policy import Piece, Policy, View


class GpuOnly(Policy):
    """Every expert is placed before the first request; nothing is ever copied."""

    name = "gpu_only"
    title = "All experts on the GPU (no offloading)"
    source = "DuoServe-MoE Table 2 (GPU only); eMoE section 5.1 (DeepSpeed-FastGen)"
    aliases = ("vllm", "deepspeed_fastgen")
    traits = frozenset({"bound"})
    keeps_all = True

    def initial(self, view: View) -> Iterable[Piece]:
        return every(view)
