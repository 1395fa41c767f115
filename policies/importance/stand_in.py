"""A stand-in for the published prefetcher, right as often as Figure 18 says. Used only on request, and labelled."""

from __future__ import annotations

from collections.abc import Iterable

from policies.importance.router import Token
from sim.policy import draws_of, shares_of, take

FORMS = (
    "recorded, or surrogate:0.82/0.95, of the experts it names the share with a top score and, of the others, the "
    "share that is active"
)


class StandIn:
    """Names as many experts for a token's next layer as have a top score there.

    Args:
        text: `surrogate:TOP/ACTIVE`. Each expert named has a top score with probability TOP; one that has none is
            active with probability ACTIVE ("even when a prefetched expert is not a top-score one, it has a 95 %
            probability of being an active expert", section 6.3). `surrogate:TOP`: the others are never active.
        seed: equal seeds draw equally for the same trace row and layer.

    Raises:
        BadInput: not of these forms.
    """

    def __init__(self, text: str, seed: int) -> None:
        self._top, self._active = [*shares_of(text, FORMS), 0.0][:2]
        self._seed = seed

    def name(self, rows: Iterable[tuple[int, Token]], layer: int) -> list[int]:
        """Experts foreseen for a layer by a batch of (trace row, token): all first ones, then all second ones."""
        at: dict[int, int] = {}
        for row, token in rows:
            for i, expert in enumerate(self._of_token(row, layer, token)):
                at[expert] = min(i, at.get(expert, i))
        return sorted(at, key=lambda expert: (at[expert], expert))

    def _of_token(self, row: int, layer: int, token: Token) -> list[int]:
        """Where no other active expert is left, since all have top scores, one is named that is not active."""
        chance = draws_of(self._seed, row, layer)
        kinds = [
            token.top.copy(),
            [e for e in token.chosen if e not in token.top],
            [e for e in range(len(token.scores)) if e not in token.chosen],
        ]
        named: list[int] = []
        for _ in token.top:
            kind = 0 if chance.random() < self._top else 1 if chance.random() < self._active else 2
            for pool in kinds[kind:]:
                if pool:
                    named += take(pool, 1, chance)
                    break
        return named
