"""Hidden states of one layer on their way from GPU 0 to experts on other GPUs, and back: one transfer each way per GPU.

Either simulated machine notes here what is under way; the transfers themselves are copies on its own lanes.
"""

from __future__ import annotations

from sim.policy.tickets import Ticket


class Exchange:
    """What crosses in the running layer, by GPU; GPU 0, where hidden states live, sends itself nothing.

    `sent`: the transfer there. `last`: the expert launched last, which ends last, as streams serve in order.
    `n_tokens`: pairs of token and expert, whose hidden states cross there and whose results come back.
    """

    def __init__(self, n_gpus: int) -> None:
        self.layer = -1
        self.sent: list[Ticket | None] = [None] * n_gpus
        self.last: list[Ticket | None] = [None] * n_gpus
        self.n_tokens = [0] * n_gpus

    def begin(self, layer: int) -> None:
        """Nothing has been sent yet."""
        self.layer = layer
        for gpu in range(len(self.sent)):
            self.sent[gpu] = self.last[gpu] = None
            self.n_tokens[gpu] = 0

    def away(self) -> list[int]:
        """GPUs whose results are still to be brought back."""
        return [gpu for gpu, last in enumerate(self.last) if last is not None]
