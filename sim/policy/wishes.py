"""Prefetches wished for, as numbers: a policy that works out a whole iteration's at once names slices of them later."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


class Wishes:
    """Whole experts and priorities, in order of asking.

    Args:
        indices: `Piece.index` of each. priorities: of each; larger ones first, ties in order of asking.
    """

    def __init__(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        self.indices = np.array(indices, dtype=np.int64).data
        self.priorities = np.array(priorities, dtype=np.float64).data
        if len(self.indices) != len(self.priorities):
            raise ValueError(f"Wishes, got {len(self.indices)} indices, {len(self.priorities)} priorities: one of each")

    def __len__(self) -> int:
        return len(self.indices)
