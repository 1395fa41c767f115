"""What MoEpic holds of one layer on one GPU: which experts' tops are cached, and how experts are split there."""

from __future__ import annotations

from collections.abc import Callable, Collection

from sim.pieces import Piece
from sim.view import View


class Tops:
    """The cached tops of one layer's experts on one GPU.

    Attributes:
        experts: those of the layer that live on this GPU. cached: those whose top is resident.
        n_cached: C. split_frac: theta, the share of an expert that its top takes. n_segments: that an expert is split
            into: 2, or 1 where theta is 0 or 1.
    """

    def __init__(self, layer: int, gpu: int, view: View) -> None:
        self.layer = layer
        self.gpu = gpu
        self.experts = [e for e in range(view.n_experts) if view.piece(layer, e).gpu == gpu]
        self.cached: dict[int, None] = {}
        self.n_cached = 0
        self.split_frac = 0.0
        self.n_segments = 1
        self.top_bytes = 0
        self._pieces: dict[int, tuple[Piece | None, Piece | None]] = {}

    def lay_out(self, budget: float, n_cached: float, view: View) -> None:
        """Divide `budget` (V, whole experts) among C tops; fractions of a byte are left."""
        size = view.expert_bytes
        room = int(min(budget, float(len(self.experts))) * size)
        count = min(len(self.experts), max(1, int(n_cached))) if n_cached > 0 else 0
        top_bytes = min(size, room // count) if count else 0
        count = count if top_bytes else 0
        split_frac = top_bytes / size if count else 0.0
        if self._pieces and (count, split_frac) == (self.n_cached, self.split_frac):
            return
        self.n_cached, self.split_frac, self.top_bytes = count, split_frac, top_bytes
        self.n_segments = 1 if split_frac in (0.0, 1.0) else 2
        for e in self.experts:
            if split_frac in (0.0, 1.0):
                whole = view.piece(self.layer, e)
                self._pieces[e] = (whole, None) if count else (None, whole)
            else:
                self._pieces[e] = (view.part(self.layer, e, 0.0, split_frac), view.part(self.layer, e, split_frac, 1.0))

    def top(self, expert: int) -> Piece | None:
        """The top segment; None where nothing is cached (theta 0)."""
        return self._pieces[expert][0]

    def bottom(self, expert: int) -> Piece | None:
        """The bottom segment; None where the top is everything (theta 1)."""
        return self._pieces[expert][1]

    def missing(self, expert: int, view: View) -> list[Piece]:
        """Segments that have no room yet, top first."""
        return [piece for piece in self._pieces[expert] if piece is not None and not view.holds(piece)]

    def held(self, expert: int, view: View) -> list[Piece]:
        """Segments that have their room, top first."""
        return [piece for piece in self._pieces[expert] if piece is not None and view.holds(piece)]

    def best(self, key: Callable[[int], int]) -> list[int]:
        """The C experts of largest key, ties to the lowest id."""
        return sorted(self.experts, key=lambda e: (-key(e), e))[: self.n_cached]

    def replaceable(self, owed: Collection[int]) -> list[int]:
        """Cached experts that may leave."""
        return [e for e in self.cached if e not in owed]
