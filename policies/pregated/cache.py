"""The optional expert cache of Pre-gated MoE's artifact: which cached expert makes room for a fetched one."""

from __future__ import annotations

from collections.abc import Callable

from sim.policy import Piece


class ExpertCache:
    """Up to `capacity` experts of one GPU under LFU (a new entry counts 1), LRU or LIFO; ties to what came first."""

    def __init__(self, capacity: int, rule: str) -> None:
        self.capacity = capacity
        self._rule = rule
        self._uses: dict[Piece, int] = {}  # in order of insertion; under LRU, of last use

    def __contains__(self, piece: Piece) -> bool:
        return piece in self._uses

    def used(self, piece: Piece) -> None:
        """A cached expert was found."""
        if self._rule == "lru":
            self._uses[piece] = self._uses.pop(piece)
        else:
            self._uses[piece] += 1

    def insert(self, piece: Piece, may_leave: Callable[[Piece], bool]) -> Piece | None:
        """A fetched expert joins, in place of one that may leave; returns what left, itself when nothing could."""
        victim = None
        if len(self._uses) == self.capacity:
            victim = self._victim([cached for cached in self._uses if may_leave(cached)])
            if victim is None:
                return piece
            del self._uses[victim]
        self._uses[piece] = 1
        return victim

    def _victim(self, candidates: list[Piece]) -> Piece | None:
        if not candidates or self._rule == "lru":
            return candidates[0] if candidates else None
        return candidates[-1] if self._rule == "lifo" else min(candidates, key=self._uses.__getitem__)

    def forget_counts(self) -> None:
        """From the encoder to the decoder, frequencies start anew."""
        self._uses = dict.fromkeys(self._uses, 1)
