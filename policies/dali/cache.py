"""DALI's workload-aware cache (WARC): every few steps the busiest experts elsewhere replace the idlest here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Warc:
    """The experts of one layer on one GPU that stay, as many as at first.

    Args:
        residents: those that stay at first. others: the rest of the layer's on that GPU.
        w_size: steps from one exchange to the next. u_size: experts exchanged at once, at most.
    """

    def __init__(self, residents: Iterable[int], others: Iterable[int], w_size: int, u_size: int) -> None:
        self.residents = set(residents)
        self._others = set(others)
        self._w_size, self._u_size = w_size, u_size
        self._scores: dict[int, int] = {}
        self._steps = 0

    def forget(self) -> None:
        """A sequence begins: workloads and steps count anew."""
        self._scores.clear()
        self._steps = 0

    def step(self, needs: Mapping[int, int]) -> list[tuple[int, int]]:
        """Count a step's tokens by expert; every `w_size` steps (who leaves, who comes) of an exchange.

        The k <= u_size others of the highest positive score come, for the k residents of the lowest; ties to the lower
        id, and all scores begin at 0 again.
        """
        scores = self._scores
        for expert, n_tokens in needs.items():
            scores[expert] = scores.get(expert, 0) + n_tokens
        self._steps += 1
        if self._steps < self._w_size:
            return []
        busiest = sorted((e for e in self._others if scores.get(e)), key=lambda e: (-scores[e], e))
        idlest = sorted(self.residents, key=lambda e: (scores.get(e, 0), e))
        exchanged = list(zip(idlest, busiest[: self._u_size], strict=False))
        for leaves, comes in exchanged:
            self.residents.remove(leaves)
            self._others.remove(comes)
            self.residents.add(comes)
            self._others.add(leaves)
        self.forget()
        return exchanged
