"""What a draft says of the routing of the tokens that it drafts: a labelled stand-in, right as often as told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sim.policy import DECODE, Iteration, Surrogate, Ticket, View


class DraftRouting:
    """Names experts that verification will ask for, from passes of a draft over the same tokens.

    The i-th pass reads the i-th of a step's tokens and puts out the next, so nothing foretells the last one's experts.

    Args:
        text: as `Surrogate` takes it. best: experts named for each token and layer, the surest first.
    """

    def __init__(self, text: str, view: View, seed: int, best: int) -> None:
        self._surrogate = Surrogate(text, view.top_k, view.n_experts, seed)
        self._best = min(best, view.top_k)
        self.n_named = 0
        self.n_right = 0

    def passes(
        self, iteration: Iteration, tickets: Sequence[Ticket], layers: range
    ) -> Iterator[tuple[tuple[Ticket, ...], list[list[int]]]]:
        """Of each pass: what its answer waits for, and the experts that it names, by layer."""
        chosen = iteration.all_ids()[:, layers.start : layers.stop].tolist()
        rows: dict[int, list[tuple[int, int, int]]] = {}  # of each request: (place, row, number in the iteration)
        at = 0
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            if r.phase == DECODE:
                rows.setdefault(r.request.index, []).extend((r.context + i, r.start_row + i, at + i) for i in range(n))
            at += n
        drafted = [sorted(own)[:-1] for own in rows.values()]
        for number in range(max((len(own) for own in drafted), default=0)):
            here = [own[number] for own in drafted if number < len(own)]
            named = [
                self._named(layer, [(row, chosen[i][layer - layers.start]) for _, row, i in here]) for layer in layers
            ]
            yield tuple(tickets[number : number + 1]), named

    def _named(self, layer: int, tokens: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        found: dict[int, None] = {}
        for row, truth in tokens:
            said = self._surrogate.name(row, layer, truth)[: self._best]
            self.n_named += len(said)
            self.n_right += sum(expert in truth for expert in said)
            found.update(dict.fromkeys(said))
        return list(found)

    def stats(self) -> dict[str, float]:
        """Share of the experts named that verification asked for."""
        return {"predicted_right_frac": self.n_right / self.n_named if self.n_named else 0.0}
