"""MoE-SpeQ (arXiv 2511.14102): a quantised self-draft foretells all layers of k tokens; copies run ahead of the pass.

Known from third parties' notes on the paper, not from the paper or its code: the model drafts for itself in INT4, and
what its gates choose fills a look-ahead buffer of k tokens x L layers, by which experts are prefetched; 90.9 % of what
it names is right (teacher-forced). Of draft lengths it takes the one with the most accepted tokens per cycle,
T_cycle(k) = max(T_draft(k), T_pcie,init) + T_pcie,new(k) + T_verify(k + 1). Here `moesim sweep --draft k=0/1/2/...`
runs each k and ranks by time per token, which is the same ratio with all overlap in it.

A labelled surrogate names the experts. What the draft costs is `--draft draft_s=` (an INT4 pass over resident weights);
room for the INT4 copy is not taken off the expert budget unless a draft `model=` says so. Assumed: the buffer is used
layer by layer, `ahead` layers before the pass, as many as fit with all that was named for them; what was named stays
until it is used, and of the others whoever was used longest ago leaves first; what was not foretold comes on demand.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.common.foretold import DraftRouting
from sim.policy import Iteration, Piece, Policy, Prefetch, Steps, Ticket, View, param


class MoeSpeq(Policy):
    """A look-ahead buffer of what drafts have named, prefetched some layers before the pass; LRU for all else."""

    name = "moe_speq"
    title = "MoE-SpeQ: a look-ahead buffer of drafted tokens' experts"
    source = "arXiv 2511.14102, by third parties' notes"
    from_notes = True
    labels = ("surrogate",)
    predictor: str = param("surrogate:0.909", "how often what the draft names is right (published: 90.9 %)")
    ahead: int | None = param(
        None,
        "layers before the pass that prefetches run; null: as many as there is room for (assumed: not known)",
        within=(1, 4096),
    )
    seed: int = param(0, "for the surrogate's draws", within=(0, 2**63 - 1))

    def bind(self, view: View) -> None:
        self._used: list[dict[Piece, None]] = [{} for _ in range(view.n_gpus)]  # by GPU, longest ago first
        self._coming: list[dict[Piece, None]] = [{} for _ in range(view.n_gpus)]  # prefetched for this pass, not used
        self._routing = DraftRouting(self.predictor, view, self.seed, view.top_k)
        self._buffer: list[dict[int, tuple[Ticket, ...]]] = []  # by layer: expert -> what naming it waits for
        self._ahead = 0

    def drafting(self, iteration: Iteration, tickets: Sequence[Ticket], view: View) -> Steps:
        self._buffer = [{} for _ in range(view.n_layers)]
        for after, named in self._routing.passes(iteration, tickets, range(view.n_layers)):
            for layer, experts in enumerate(named):
                for expert in experts:
                    self._buffer[layer].setdefault(expert, after)
        self._ahead = self._window(view) if self.ahead is None else int(self.ahead)
        for layer in range(min(self._ahead, view.n_layers)):
            yield from self._prefetch(layer, view)

    def layer_done(self, layer: int, view: View) -> Steps:
        yield from self._prefetch(layer + self._ahead, view)

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        self._buffer = []
        for used, coming in zip(self._used, self._coming, strict=True):  # named in vain
            used.update(coming)
            coming.clear()

    # -- who leaves -------------------------------------------------------------------------------------------------

    def placed(self, piece: Piece, view: View) -> None:
        self._coming[piece.gpu][piece] = None

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        used = self._used[piece.gpu]
        self._coming[piece.gpu].pop(piece, None)
        used.pop(piece, None)
        used[piece] = None

    def evicted(self, piece: Piece, view: View) -> None:
        self._used[piece.gpu].pop(piece, None)
        self._coming[piece.gpu].pop(piece, None)

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """A demand may take the place of what is named for the layer furthest ahead; a prefetch may not."""
        found = view.first_evictable(self._used[piece.gpu])
        if found is None and not speculative:
            found = view.first_evictable(reversed(self._coming[piece.gpu]))
        return found

    # -- how far ahead ----------------------------------------------------------------------------------------------

    def _window(self, view: View) -> int:
        """Layers whose named experts fit, with one to spare for what was not foretold."""
        left = view.capacity - 1
        for layer, named in enumerate(self._buffer):
            left -= len(named)
            if left < 0:
                return max(1, layer)
        return view.n_layers

    def _prefetch(self, layer: int, view: View) -> Steps:
        if layer < len(self._buffer):
            for expert, after in self._buffer[layer].items():
                if not view.resident(layer, expert):
                    yield Prefetch(view.piece(layer, expert), 0.0, after)

    def stats(self) -> dict[str, float]:
        """predicted_right_frac: of the experts that drafts named, those that verification asked for."""
        return self._routing.stats()
