"""Fiddler's question, which DAOP asks of prompts too: compute a missing expert on the CPU, or send it to the GPU?"""

from __future__ import annotations

from typing import NamedTuple

from sim.policy import Prices


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
