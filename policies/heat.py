"""A heat map over all experts: counts that fade, and swaps only where a newcomer is clearly hotter than a resident.

Source: ggml-org/llama.cpp pull requests 26563 and 26824 (miltos22): `-ehs N` slots, filled with the hottest experts;
heat fades by 0.999 per update; a resident makes room for a candidate when the candidate's heat is more than 1.3 times
its own; a dwell can be asked for. The map is brought up to date after every token. What is not on the GPU is computed
on the CPU.

Assumed: an update adds the tokens routed to each expert, prompts included, after the fading; slots are one pool over
all layers; the hottest candidate is held against the coldest resident, again and again while the rule allows; uploads
run beside the next token; GPU and CPU share a layer at the same time. Not modelled: several devices by speed; experts
that are moved rather than copied, which frees host memory; the side file that keeps the heat across launches: slots
begin empty and fill with whatever is used.
"""

from __future__ import annotations

import numpy as np

from policies.common.hot_cold import HotCold, overlap_param
from policies.common.placement import every
from sim.policy import Evict, Iteration, Piece, Prefetch, Steps, View, param


class Heat(HotCold):
    """The hottest experts on the GPU, with hysteresis; all others on the CPU."""

    name = "heat"
    title = "Heat map: counts that fade, swaps with hysteresis"
    source = "ggml-org/llama.cpp pull requests 26563, 26824"
    traits = frozenset({"cpu", "evicts_eagerly"})
    slots: int | None = param(None, "experts on the GPUs in all (-ehs); without it as many as fit", within=(0, 10**7))
    decay: float = param(0.999, "what is left of an expert's heat after an update", within=(0.0, 1.0))
    hysteresis: float = param(1.3, "a candidate this much hotter than a resident takes its place", within=(1.0, 1e9))
    dwell: int = param(
        0, "updates for which a newcomer stays (optional there; no value is published)", within=(0, 10**9)
    )
    sync_every: int = param(1, "forward passes from one update to the next", within=(1, 10**9))
    overlap: bool = overlap_param("assumed")

    def bind(self, view: View) -> None:
        self._rooms = self.pool_by_gpu("slots", self.slots, view)
        self._pieces = every(view)
        self._gpus = np.array([piece.gpu for piece in self._pieces])
        self._heat = np.zeros(len(self._pieces))
        self._routed = np.zeros(len(self._pieces), dtype=np.int64)  # tokens since the last update
        self._first = np.arange(view.n_layers)[None, :, None] * view.n_experts
        self._inside = np.zeros(len(self._pieces), dtype=bool)
        self._since = np.zeros(len(self._pieces), dtype=np.int64)  # the update each came in
        self._n_passes = self._n_updates = 0

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        np.add.at(self._routed, (iteration.all_ids() + self._first).ravel(), 1)
        self._n_passes += 1
        if self._n_passes % self.sync_every:
            return
        self._n_updates += 1
        self._heat *= self.decay
        self._heat += self._routed
        self._routed[:] = 0
        for gpu, room in enumerate(self._rooms):
            for left, newcomer in self._swaps(gpu, room):
                if left is not None:
                    yield Evict(left)
                yield Prefetch(newcomer)

    def _swaps(self, gpu: int, room: int) -> list[tuple[Piece | None, Piece]]:
        """Who leaves for whom, hottest newcomer first; None: there is room. Ties go to the lowest layer and id."""
        heat, inside = self._heat, self._inside
        own = self._gpus == gpu
        free = room - int(np.count_nonzero(inside & own))
        may_leave = np.nonzero(inside & own & (self._n_updates - self._since >= self.dwell))[0]
        may_leave = may_leave[np.argsort(heat[may_leave], kind="stable")]
        bar = 0.0 if free else heat[may_leave[0]] * self.hysteresis if len(may_leave) else np.inf
        waiting = np.nonzero(~inside & own & (heat > bar))[0]
        waiting = waiting[np.argsort(-heat[waiting], kind="stable")]
        swaps: list[tuple[Piece | None, Piece]] = [(None, self._pieces[at]) for at in waiting[:free].tolist()]
        for at, out in zip(waiting[free:].tolist(), may_leave.tolist(), strict=False):
            if heat[at] <= self.hysteresis * heat[out]:
                break
            inside[out] = False
            swaps.append((self._pieces[out], self._pieces[at]))
        for _, newcomer in swaps:
            inside[newcomer.index] = True
            self._since[newcomer.index] = self._n_updates
        return swaps
