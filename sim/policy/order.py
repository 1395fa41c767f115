"""Native eviction orders: a policy names one instead of answering `victim`, and the engine finds who leaves.

Set `self.order` in `bind`. In every order a piece whose expert is pending in the running layer is passed over, and only
pieces on the newcomer's GPU can leave; with `per_layer` only those of its layer.
"""

from __future__ import annotations

import numpy as np

EXPERT, INDEX = "expert", "index"
FREE, NOT_FOR_PREFETCH, LAST, NEVER = range(4)


class Order:
    """Base of the native orders.

    Args:
        per_layer: the newcomer's layer is the only one that gives room.
    """

    def __init__(self, per_layer: bool = False) -> None:
        self.per_layer = per_layer


class Recency(Order):
    """The piece that was placed or computed with longest ago leaves (least recently used)."""


class Insertion(Order):
    """The piece that was placed longest ago leaves (first in, first out)."""


class Rank(Order):
    """The whole expert of the smallest rank leaves.

    Attributes:
        rank: float64, by `Piece.index`, [n]; the policy writes into it in any hook.
        bar: uint8, by `Piece.index`, [n]: `FREE`; `NOT_FOR_PREFETCH`: makes no room for a speculative copy; `LAST`:
            nor for a demanded one while another can; `NEVER`.
        guarded: a speculative copy is refused where the piece that would leave ranks no lower than the newcomer.

    Args:
        n: whole experts, `view.n_layers * view.n_experts`.
        ties: of equal ranks the lowest `expert`, then the lowest layer; or the lowest `index`, that is the lowest layer
            first.
        spares_unused: a prefetched expert that has not been used yet counts as `NOT_FOR_PREFETCH` at least.
    """

    def __init__(
        self,
        n: int,
        per_layer: bool = False,
        ties: str = EXPERT,
        guarded: bool = False,
        spares_unused: bool = False,
    ) -> None:
        super().__init__(per_layer)
        self.rank = np.zeros(n)
        self.bar = np.zeros(n, dtype=np.uint8)
        self.ties = ties
        self.guarded = guarded
        self.spares_unused = spares_unused
