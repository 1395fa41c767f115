"""Least-Stale (SpecMD, arXiv 2602.03921): what this pass has not touched leaves first, oldest touch first.

Source: the paper's rule, as tinyserve has it (e1n00r/tinyserve@9277e68, tinyserve/cache_policy.py, LeastStalePolicy).
Two lists, first in, first out: `current`, touched in this forward pass, and `stale`, resident and not touched in it.
When a pass begins, current is appended to stale and emptied. A hit in stale moves the expert to current, a hit in
current changes nothing, whoever comes (by demand or prefetch) joins current. The head of stale leaves, else the head of
current. There is nothing to set.

Both lists together are one order: by the first touch of the last pass that touched an expert. A pass asks a layer's
gate once, so that without prefetching the first touch is the only one and the rule is LRU, for one cache as for one per
layer. It differs where an expert is touched twice in a pass: prefetched, then used. LRU moves it back at its use; here
it keeps its place. tinyserve looks a prompt's tokens up one by one, which is such a case too and is not modelled: here
a layer serves all tokens of a prompt at once.

The paper pairs the rule with speculative prefetching by score. How many experts it asks for is not known here:
`prefetch` is an assumption and off unless set.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from policies.common.cache import ScopedCache
from sim.policy import DECODE, Gate, Iteration, Piece, Prefetch, Rank, Serve, Steps, View, param


class LeastStale(ScopedCache):
    """Evict what this pass has not touched, first in, first out; what the running layer needs is safe."""

    name = "least_stale"
    title = "Least-Stale: untouched in this pass leaves first"
    source = "arXiv 2602.03921; e1n00r/tinyserve@9277e68 tinyserve/cache_policy.py"
    one_size = "experts of one layer are stamped in the order they are served, those that are there first"
    prefetch: int = param(
        0,
        "experts of the next layer asked for at each gate of a decode step, the best by the next layer's gate on "
        "this layer's input (next_scores_1); the paper prefetches by score, how many is assumed; 0: none",
        within=(0, 4096),
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.prefetch:
            self.needs = frozenset({"experts", "next_scores_1"})

    def bind(self, view: View) -> None:
        super().bind(view)
        self.order = order = Rank(view.n_layers * view.n_experts, self.per_layer)
        rank: Any = order.rank
        self._rank: Any = memoryview(rank)
        self._stamp = count(1)
        self._pass_began = 0  # every stamp from here on is of this pass

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        self._pass_began = next(self._stamp)

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if not hit or self._rank[piece.index] < self._pass_began:
            self._rank[piece.index] = next(self._stamp)

    def placed(self, piece: Piece, view: View) -> None:
        self._rank[piece.index] = next(self._stamp)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        yield Serve()
        if self.prefetch and gate.phase == DECODE and gate.layer + 1 < view.n_layers:
            scores = gate.next_scores(1).sum(axis=0)
            for expert in np.argsort(-scores, kind="stable")[: self.prefetch].tolist():
                yield Prefetch(view.piece(gate.layer + 1, expert))
