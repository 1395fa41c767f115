"""On-demand loading: copy each selected expert after its gate, compute, forget it (Hugging Face Accelerate).

Source: huggingface/accelerate hooks.py (commit 16cb6eb): a pre-forward hook copies the executed module, a post-forward
hook frees it; no cache, no prefetch. DuoServe (arXiv 2509.07379, section 6.1) calls this baseline ACC; in a looped
MoE only experts that receive tokens run, so only they are copied.
"""

from __future__ import annotations

from sim.api import Param, Policy, Steps
from sim.decisions import Evict, Fetch, RunGpu
from sim.iterations import Gate
from sim.view import View


class OnDemand(Policy):
    """No cache: every needed expert is fetched, run and freed, in ascending id as the module loop does."""

    name = "on_demand"
    title = "On-demand loading (Hugging Face Accelerate)"
    source = "huggingface/accelerate@16cb6eb hooks.py; DuoServe-MoE section 6.1 (ACC)"
    aliases = ("accelerate",)
    traits = frozenset({"streams"})
    params = (
        Param("slots", 2, "experts whose weights may be on the GPU at once; 1 copies only after the last one ran "
              "(Accelerate), 2 overlaps a copy with the computation before it", low=1, high=64),
    )  # fmt: skip
    slots: int

    def min_experts(self, view: View) -> int:
        return self.slots

    def gate_done(self, gate: Gate, view: View) -> Steps:
        held: dict[int, list[int]] = {}  # GPU -> experts on it, oldest first
        for expert in sorted(gate.needs):
            piece = view.piece(gate.layer, expert)
            on_gpu = held.setdefault(piece.gpu, [])
            if len(on_gpu) == self.slots:
                yield Evict(view.piece(gate.layer, on_gpu.pop(0)))
            yield Fetch(piece)
            yield RunGpu(expert)
            on_gpu.append(expert)
        for experts in held.values():
            for expert in experts:
                yield Evict(view.piece(gate.layer, expert))
