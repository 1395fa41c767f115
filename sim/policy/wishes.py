"""Prefetches wished for, as numbers: a policy that works out a whole iteration's at once names slices of them later."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class Wishes:
    """Whole experts and priorities, in order of asking.

    Args:
        indices: `Piece.index` of each. priorities: of each; larger ones first, ties in order of asking.
    """

    def __init__(self, indices: Iterable[int], priorities: Iterable[float]) -> None:
        self.indices = array("q", indices)
        self.priorities = array("d", priorities)

    def __len__(self) -> int:
        return len(self.indices)
