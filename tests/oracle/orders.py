"""Who leaves, where a policy names a native order (`sim.policy.order`) instead of answering `victim`: it looks at all.

An order is known by the name of its class and its attributes, so that the oracle shares no code with the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oracle.engine import Engine
    from oracle.pieces import Piece
    from oracle.residency import Entry

FREE, NOT_FOR_PREFETCH, LAST = 0, 1, 2


class Stamps:
    """When each piece was placed or computed with last, by a clock that ticks at each."""

    def __init__(self) -> None:
        self.clock = 0
        self.at: dict[Piece, int] = {}

    def stamp(self, piece: Piece) -> None:
        self.clock += 1
        self.at[piece] = self.clock


def victim(engine: Engine, piece: Piece, speculative: bool) -> Any:
    """Which resident piece makes room for `piece`, by the policy's order if it has one; None refuses."""
    order: Any = getattr(engine.policy, "order", None)
    kind = type(order).__name__
    if kind not in ("Recency", "Insertion", "Rank"):
        return engine.policy.victim(piece, speculative, engine.view)
    able = [
        entry
        for one, entry in engine.cache.entries.items()
        if one.gpu == piece.gpu and engine.view.evictable(one) and (one.layer == piece.layer or not order.per_layer)
    ]
    if kind == "Rank":
        return least(order, able, piece, speculative)
    if not able:
        return None
    if kind == "Insertion":
        return able[0].piece  # entries stand in the order in which they took their room
    return min((entry.piece for entry in able), key=engine.stamps.at.__getitem__)


def least(order: Any, able: list[Entry], piece: Piece, speculative: bool) -> Any:
    """The whole expert of the smallest rank, as far as its bar lets it go."""
    bars = {entry.piece: bar_of(order, entry) for entry in able if entry.piece.index < len(order.rank)}
    for allowed in ((FREE,),) if speculative else ((FREE, NOT_FOR_PREFETCH), (LAST,)):
        among = [one for one, bar in bars.items() if bar in allowed]
        if not among:
            continue
        if order.ties == "expert":
            found = min(among, key=lambda one: (order.rank[one.index], one.expert, one.layer))
        else:
            found = min(among, key=lambda one: (order.rank[one.index], one.index))
        guarded = speculative and order.guarded and piece.index < len(order.rank)  # a part has no rank of its own
        if guarded and not order.rank[found.index] < order.rank[piece.index]:
            return None
        return found
    return None


def bar_of(order: Any, entry: Entry) -> int:
    unused = order.spares_unused and entry.origin == "prefetch" and not entry.used
    return max(int(order.bar[entry.piece.index]), NOT_FOR_PREFETCH if unused else FREE)
