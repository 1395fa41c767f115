"""The plain policy that `moesim bench` times: what somebody writes in ten minutes, with one hook beside its cache."""

from __future__ import annotations

from sim.policy import Piece, Policy, View


class Plain(Policy):
    """Evict the least recently used expert, and count the layers that have been served."""

    name = "plain"

    def bind(self, view: View) -> None:
        self._order: dict[Piece, None] = {}
        self._layers = 0

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        self._order.pop(piece, None)
        self._order[piece] = None

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        return view.first_evictable(self._order)

    def evicted(self, piece: Piece, view: View) -> None:
        self._order.pop(piece, None)

    def layer_done(self, layer: int, view: View) -> None:
        self._layers += 1
