"""Lynx (arXiv 2411.08982): a batch computes its confident choices, and the others go to experts it computes anyhow.

Source: Gupta, Ju, Sinha, Gavrilovska and Iyer, "Lynx" (versions 2 and 3: affinity binning), known here from third-party
notes. All experts are in GPU memory; what is saved is reading their weights. In each layer of a decode step:

- Confidence of a token's chosen expert: Delta = its router logit less that of the token's best one. Its bin is
  clamp(floor(alpha Delta), -beta, 0): 0 for the best one alone.
- Score of an expert: the sum of B^bin over the tokens that chose it, B the batch size, so that one choice outweighs as
  many as the whole batch can make a bin below.
- The best-scored experts are kept. A choice that is not kept goes to the kept expert that its token scores highest and
  does not have yet (lossy).

The notes do not say where the kept set ends. Here an expert is kept whose score reaches B^-`keep_bin`; at 0 that is
the smallest set with the best expert of every token. At least as many are kept as a token needs. Of alpha and beta the
notes know that they follow from the model's sparsity (Qwen2-57B: beta 5); alpha = 1 is assumed. Logits are not in a
trace: their differences come from the gate's scores, and a score that rounded to 0 is in the last bin. A batch of one
changes nothing.

Where the experts do not fit, those missing are fetched and the least recently used leave (not published). There
`cache_aware=true` makes Lynx a competitor of cache-aware routing (not published either): residents are kept as well,
and `base` may be set so that it works for a single token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.common.cache import scope_param
from policies.common.placement import every, fits_whole
from policies.lru import Lru
from sim.policy import DECODE, Assignment, Gate, Piece, View, param


def masked_top_k(
    scores: NDArray[np.float64], ids: NDArray[np.int64], allowed: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k best allowed experts per token and their renormalised weights.

    What the router chose and is allowed stays and comes first, in its order (also where a biased router does not follow
    the scores); the next best take the other places, ties to the lowest id.

    Args:
        scores: [n, E]. ids: [n, k], the router's choice. allowed: [E].

    Returns:
        ids [n, k], -1 where fewer than k are allowed, and weights [n, k] that sum to 1 (0: nothing has a score).
    """
    k = ids.shape[1]
    rank = np.where(allowed, scores, -1.0)
    chosen = scores.max(initial=0.0) + np.arange(k, 0, -1.0)  # above every score, the heaviest highest
    np.put_along_axis(rank, ids, np.where(allowed[ids], chosen, -1.0), 1)
    best = np.argsort(-rank, axis=1, kind="stable")[:, :k]
    there = allowed[best]
    mass = np.where(there, np.take_along_axis(scores, best, 1), 0.0)
    total = mass.sum(axis=1, keepdims=True)
    return np.where(there, best, -1), np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)


UNIT = 2**20  # bounds between bins are multiples of 1 / UNIT, so that comparing with them is exact


class Lynx(Lru):
    """Keeps what the batch is sure of, remaps the rest."""

    name = "lynx"
    title = "Lynx: unsure choices go to experts the batch runs anyhow"
    source = "arXiv 2411.08982 (versions 2 and 3), known from third-party notes"
    from_notes = True
    traits = frozenset({"lossy"})
    needs = frozenset({"experts", "scores"})
    alpha: float = param(
        1.0, "bins per unit of logit (assumed; published: from the model's sparsity)", within=(1e-3, 1e3)
    )
    beta: int = param(5, "the last bin (published for Qwen2-57B)", within=(1, 30))
    keep_bin: int = param(
        0, "an expert is kept whose score reaches B to the minus this (the notes do not say)", within=(0, 30)
    )
    base: int | None = param(None, "B; published: the batch size", within=(2, 4096))
    cache_aware: bool = param(False, "residents are kept as well (not published)")
    scope: str = scope_param("global")

    def bind(self, view: View) -> None:
        super().bind(view)
        # A choice is below bin -b when its score is less than exp(-b / alpha) of its token's best.
        self._bounds = np.array([round(math.exp(-b / self.alpha) * UNIT) for b in range(self.beta)], dtype=np.float64)
        self._asked = self._run = 0

    def initial(self, view: View) -> Iterable[Piece]:
        """All experts, where they fit."""
        return every(view) if fits_whole(view) else ()

    def bins(self, scores: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many bins below 0 each choice is, 0 to beta [n, k]; scores [n, E] of one scale."""
        own = np.take_along_axis(scores, ids, 1) * UNIT
        best = scores.max(axis=1)[:, None, None]
        return np.asarray((own[:, :, None] < self._bounds * best).sum(axis=2))

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        if gate.phase != DECODE:
            return None
        scores, ids = gate.scores, gate.ids
        there = {e for e in range(view.n_experts) if self.cache_aware and view.resident(gate.layer, e)}
        kept = self._kept(self.bins(scores, ids), ids, there)
        self._asked += len(gate.needs)
        if gate.needs.keys() <= kept:
            self._run += len(gate.needs)
            return None
        allowed = np.zeros(view.n_experts, dtype=bool)
        allowed[list(kept)] = True
        routed, weights = masked_top_k(scores, ids, allowed)
        self._run += len(np.unique(routed))
        return Assignment(routed, weights)

    def _kept(self, bins: NDArray[np.int64], ids: NDArray[np.int64], kept: set[int]) -> set[int]:
        """`kept` and the best-scored experts of a layer; scores in units of B^-beta, which makes them whole."""
        base = self.base or len(ids)
        total: dict[int, int] = {}
        for expert, below in zip(ids.ravel().tolist(), bins.ravel().tolist(), strict=True):
            total[expert] = total.get(expert, 0) + base ** (self.beta - below)
        enough = base ** max(0, self.beta - self.keep_bin)
        for expert in sorted(total, key=lambda e: (-total[e], e)):
            if total[expert] >= enough or len(kept) < ids.shape[1]:
                kept.add(expert)
        return kept

    def stats(self) -> dict[str, float]:
        """Experts run per expert asked for, over decode steps and layers."""
        return {"run_frac": self._run / self._asked if self._asked else 1.0}
