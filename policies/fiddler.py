"""Fiddler (arXiv 2402.07033): popular experts stay on the GPU; of the others, the CPU computes or the GPU is sent one.

Source: Kamahori, Gu, Zhu and Kasikci, "Fiddler: CPU-GPU Orchestration for Fast Inference of Mixture-of-Experts Models";
code efeslab/fiddler@227715b, src/fiddler/mixtral.py (`set_expert_loc`, `mixtral_forward`), cited at each step.
`variant=paper` compares latencies of this machine (the paper measures them when it starts), `variant=code` the two
constants of the code. Popularity is learnt from the store split, where the code has a list from ShareGPT.

Several GPUs (not published): each keeps its own popular experts and a placeholder. Batches: their tokens are counted
together, as the paper does for beams.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies._placement import fill, fits_whole, most_used, uses
from sim.api import Param, Policy, Steps
from sim.decisions import Evict, Fetch, RunCpu, RunGpu, Wait
from sim.iterations import Gate
from sim.machine import Ticket
from sim.pieces import Piece
from sim.store import StoreSplit
from sim.view import View


class Fiddler(Policy):
    """A fixed set of popular experts; per missing expert, the CPU unless copying the weights would be faster."""

    name = "fiddler"
    title = "Fiddler: popular experts stay, CPU or copy by token count"
    source = "arXiv 2402.07033; efeslab/fiddler@227715b src/fiddler/mixtral.py"
    traits = frozenset({"cpu"})
    params = (
        Param("variant", "paper", "compare this machine's latencies (paper), or the code's constants (code)",
              ("paper", "code")),
        Param("cpu_cost_per_token", 7.0, "variant code: an expert on the CPU, per token (`latency_cpu`)",
              low=0.0, high=1e6),
        Param("copy_cost", 70.0, "variant code: copying an expert and running it on the GPU (`latency_gpu`)",
              low=0.0, high=1e6),
        Param("overlap", False, "CPU and GPU experts of a layer at the same time; the code runs the GPU's, then the "
              "CPU's one by one"),
    )  # fmt: skip
    variant: str
    cpu_cost_per_token: float
    copy_cost: float
    overlap: bool

    def learn(self, store: StoreSplit) -> None:
        self._uses: NDArray[np.int64] = uses(store, self.name)

    def initial(self, view: View) -> Iterable[Piece]:
        """`set_expert_loc`: in order of popularity over all layers, but for one placeholder (`expert_placeholder`)."""
        self._resident = fill(most_used(self._uses), view, spare=0 if fits_whole(view) else 1)
        return self._resident

    def on_cpu(self, n_tokens: int, view: View) -> bool:
        """True when a missing expert's tokens are computed on the CPU.

        The code scores all 2^E ways of sharing a layer out by the sum of their costs, so each expert is decided on its
        own; a tie goes to the GPU (10 tokens: 7 x 10 = 70), as the ways are tried from all-GPU upwards.
        """
        if self.variant == "code":
            return self.cpu_cost_per_token * n_tokens < self.copy_cost
        return view.prices.cpu_s(n_tokens) <= view.prices.copy_s() + view.prices.gpu_s(n_tokens)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        missing = [expert for expert in sorted(gate.needs) if not view.resident(gate.layer, expert)]
        on_cpu = [expert for expert in missing if self.on_cpu(gate.needs[expert], view)]
        if self.overlap:
            for expert in on_cpu:
                yield RunCpu(expert)
        last: tuple[Ticket, ...] = ()
        for expert in sorted(gate.needs):
            if expert in on_cpu:
                continue
            piece = view.piece(gate.layer, expert)
            if expert in missing:
                yield Fetch(piece, after=last)  # `load_state_dict` into the placeholder, on the stream that computes
            last = ((yield RunGpu(expert)),)
            if expert in missing:
                yield Evict(piece)
        if on_cpu and not self.overlap:
            yield Wait(last)  # `.to("cpu")` of the tokens waits for what the stream still has to do
            for expert in on_cpu:
                yield RunCpu(expert)

    def stats(self) -> dict[str, float]:
        return {"experts_on_gpu": float(len(self._resident))}
