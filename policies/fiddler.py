"""Fiddler (arXiv 2402.07033): popular experts stay on the GPU; of the others, the CPU computes or the GPU is sent one.

Source: Kamahori, Gu, Zhu and Kasikci, "Fiddler: CPU-GPU Orchestration for Fast Inference of Mixture-of-Experts Models";
code efeslab/fiddler@227715b, src/fiddler/mixtral.py (`set_expert_loc`, `mixtral_forward`), cited at each step.
`variant=paper` compares latencies of this machine (the paper measures them when it starts), `variant=code` the two
constants of the code. Popularity is learnt from the store split, where the code has a list from ShareGPT. The code
fills 95 % of the GPU's memory; here the run's expert budget takes the place of that.

Several GPUs (not published): each keeps its own popular experts and a placeholder. Batches: their tokens are counted
together, as the paper does for beams.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import fill, fits_whole, most_used, uses
from sim.policy import (
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    Prices,
    RunCpu,
    RunGpu,
    Steps,
    StoreSplit,
    Ticket,
    View,
    Wait,
    param,
)


class Constants(NamedTuple):
    """The published codes' costs, in one unit of time: a token of an expert on the CPU; copying the expert."""

    cpu_per_token: float
    copy: float


def cpu_is_better(n_tokens: int, prices: Prices, constants: Constants | None = None) -> bool:
    """True when the CPU computes the expert for `n_tokens`.

    The codes score all 2^E ways of sharing a layer out by the sum of their costs, so each expert is decided on its own;
    a tie goes to the GPU, as the ways are tried from all-GPU upwards. Without constants, latencies of this machine are
    compared, and the weights are sent only when the CPU is slower (Fiddler's paper).
    """
    if constants is not None:
        return constants.cpu_per_token * n_tokens < constants.copy
    return prices.cpu_s(n_tokens) <= prices.copy_s() + prices.gpu_s(n_tokens)


class Fiddler(Policy):
    """A fixed set of popular experts; per missing expert, the CPU unless copying the weights would be faster."""

    name = "fiddler"
    title = "Fiddler: popular experts stay, CPU or copy by token count"
    source = "arXiv 2402.07033; efeslab/fiddler@227715b src/fiddler/mixtral.py"
    traits = frozenset({"cpu"})
    variant: str = param(
        "paper", "compare this machine's latencies (paper), or the code's constants (code)", ("paper", "code")
    )
    cpu_cost_per_token: float = param(
        7.0, "variant code: an expert on the CPU, per token (`latency_cpu`)", within=(0.0, 1e6)
    )
    copy_cost: float = param(
        70.0, "variant code: copying an expert and running it on the GPU (`latency_gpu`)", within=(0.0, 1e6)
    )
    overlap: bool = param(
        False, "CPU and GPU experts of a layer at the same time; the code runs the GPU's, then the CPU's one by one"
    )

    def learn(self, store: StoreSplit) -> None:
        self._uses: NDArray[np.int64] = uses(store, self.name)

    def initial(self, view: View) -> Iterable[Piece]:
        """`set_expert_loc`: in order of popularity over all layers, but for one placeholder (`expert_placeholder`)."""
        self._resident = fill(most_used(self._uses), view, spare=0 if fits_whole(view) else 1)
        return self._resident

    def bind(self, view: View) -> None:
        code = self.variant == "code"
        self._constants = Constants(self.cpu_cost_per_token, self.copy_cost) if code else None

    def gate_done(self, gate: Gate, view: View) -> Steps:
        missing = [expert for expert in sorted(gate.needs) if not view.resident(gate.layer, expert)]
        on_cpu = [expert for expert in missing if cpu_is_better(gate.needs[expert], view.prices, self._constants)]
        if self.overlap:
            yield [RunCpu(expert) for expert in on_cpu]
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
            yield [RunCpu(expert) for expert in on_cpu]

    def stats(self) -> dict[str, float]:
        return {"experts_on_gpu": float(len(self._resident))}
