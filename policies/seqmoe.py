"""SeqMoE (arXiv 2609.12978), as a surrogate: the next tokens' experts are forecast, and kept and copied by that.

Known from third parties' notes. There a Mamba-2 network reads the activations of the whole stack of layers, token after
token, names k + 3 experts of each layer for the next token, and is rolled out over eight; whoever is wanted farthest
away by this forecast leaves (Belady), and what is named for the next token is prefetched. The network is not public,
and what it reads is in no trace. Here an oracle stands in: it reads what the next tokens will choose, and forgets a
share of it by seeded chance. Results are labelled `oracle` and `surrogate`.

Of the experts that a token will choose, each is named with probability `recall` for the next token and `recall_drop`
less for every token further (published: 0.909 for Qwen3-30B, 0.884 Qwen3.6-35B, 0.908 gpt-oss-120b, 0.858 DeepSeek-V4;
over eight tokens 3.58 points less on average, a drop of 1.02 points per token if it is even). Wrong ones fill up to
k + 3; of a batch's tokens, up to three more than they will choose. A prompt to come is never forecast.

The network runs twice per token, after half of the layers and after all. Assumed: each run forecasts half of the
layers, the first run the first half, so that they can be copied while the token's later layers compute; prefetching
goes on layer by layer while somebody leaves who is wanted later than who comes. Of those whom no forecast names the
least recently used leaves first. The published overhead of 3.46 % is taken as a share of a token's computation, on the
GPU's stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.policy import Gate, Iteration, Param, Piece, Policy, Predict, Prefetch, Rank, Serve, Steps, Ticket, View

Ids = NDArray[np.int64]
Shares = NDArray[np.float64]
UNNAMED = -1e15  # ranks of experts in no forecast begin here: they leave before all that are in one


def chance(seed: int, layer: int, n_experts: int, target: int, ahead: int) -> Shares:
    """A number in [0, 1) for each expert of a layer [E], the same for the same question (splitmix64)."""
    key = ((seed * 1_000_003 + target) * 4099 + layer) * 17 + ahead
    x = np.arange(1, n_experts + 1, dtype=np.uint64) + np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53)


def named(chosen: Ids, drawn: Shares, recall: float, n: int) -> Ids:
    """Experts that a forecast names, ascending: of the chosen those drawn below `recall`, and others up to n."""
    right = np.zeros(len(drawn), dtype=bool)
    right[chosen] = drawn[chosen] < recall
    others = drawn.copy()
    others[chosen] = 2.0  # the others with the lowest draws are the wrong ones
    n_wrong = min(n - int(right.sum()), len(drawn) - len(chosen))
    if n_wrong > 0:
        right[np.argsort(others, kind="stable")[:n_wrong]] = True
    return np.flatnonzero(right)


class SeqMoe(Policy):
    """An oracle of the next tokens with noise: Belady's order on what it names, and prefetching for the next token."""

    name = "seqmoe"
    title = "SeqMoE, by a noisy oracle: Belady on a forecast of 8 tokens"
    source = "arXiv 2609.12978, known from third parties' notes"
    from_notes = True
    traits = frozenset({"oracle"})
    labels = ("surrogate",)
    params = (
        Param(
            "recall",
            0.909,
            "share of the next token's experts that are named (published by model: 0.858 to 0.909)",
            low=0.0,
            high=1.0,
        ),
        Param(
            "recall_drop",
            0.0102,
            "how much less of each further token's (published: 3.58 points on average over 8, here spread evenly)",
            low=0.0,
            high=1.0,
        ),
        Param("horizon", 8, "tokens forecast (published: 8)", low=1, high=64),
        Param("extra", 3, "experts named beyond those a token takes (published: k + 3)", low=0, high=4096),
        Param("prefetch", True, "copy what is named for the next token ahead; false keeps by the forecast alone"),
        Param(
            "overhead_frac",
            0.0346,
            "share of a token's computation that forecasting adds (published: 3.46 % overhead)",
            low=0.0,
            high=10.0,
        ),
        Param("seed", 0, "for the oracle's mistakes", low=0, high=2**31 - 1),
    )
    recall: float
    recall_drop: float
    horizon: int
    extra: int
    prefetch: bool
    overhead_frac: float
    seed: int

    def bind(self, view: View) -> None:
        self._n_layers, self._n_experts, self._top_k = view.n_layers, view.n_experts, view.top_k
        self.order = order = Rank(view.n_layers * view.n_experts, ties="index", guarded=True)
        self._rank = order.rank.reshape(view.n_layers, view.n_experts)
        self._last_use = np.full((view.n_layers, view.n_experts), UNNAMED)
        self._rank[:] = UNNAMED
        self._n_uses = 0
        self._chosen = self._future(view)
        self._named: dict[int, list[Ids]] = {}  # iteration to come -> by layer who is named
        self._iteration = -1
        self._n_tokens = 1
        self._until = self._asked = 0  # steps named for the next token end here; those prefetched for
        self._after: tuple[Ticket, ...] = ()
        self._n = self._right = 0
        prices = view.prices
        token_s = view.n_layers * (prices.attention_s(0) + prices.shared_s() + view.top_k * prices.expert_s())
        self._predict_s = self.overhead_frac * (token_s + prices.head_s()) / 2.0

    def _future(self, view: View) -> list[list[Ids]]:
        """By iteration and layer the experts that will be asked for, ascending."""
        n = -(-view.future.n_steps // view.n_layers)
        asked: list[list[list[int]]] = [[[] for _ in range(view.n_layers)] for _ in range(n)]
        for layer in range(view.n_layers):
            for expert in range(view.n_experts):
                for iteration in view.future.uses(layer, expert)[0]:
                    asked[iteration][layer].append(expert)
        return [[np.array(ids, dtype=np.int64) for ids in row] for row in asked]

    # -- the forecast -----------------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        self._named.pop(self._iteration, None)
        self._iteration = iteration.index
        self._n_tokens = sum(r.puts_out for r in iteration.ranges)

    def _forecast(self, layers: range) -> None:
        """Name the experts of these layers for the next tokens, and rank them by when they are wanted."""
        for ahead in range(1, self.horizon + 1):
            target = self._iteration + ahead
            if target >= len(self._chosen):
                break
            rows = self._named.setdefault(target, [np.zeros(0, dtype=np.int64)] * self._n_layers)
            for layer in layers:
                rows[layer] = self._of(target, layer, ahead)
        for layer in layers:
            self._place(layer, self._iteration + 1)

    def _of(self, target: int, layer: int, ahead: int) -> Ids:
        chosen = self._chosen[target][layer]
        if len(chosen) > self._n_tokens * self._top_k:  # a prompt's: nobody can know
            return np.zeros(0, dtype=np.int64)
        drawn = chance(self.seed, layer, self._n_experts, target, ahead)
        recall = max(0.0, self.recall - (ahead - 1) * self.recall_drop)
        return named(chosen, drawn, recall, len(chosen) + self.extra)

    def _place(self, layer: int, first: int) -> None:
        """Rank a layer's experts by the first iteration from `first` on that they are named for."""
        rank = self._rank[layer]
        rank[:] = self._last_use[layer]
        for target in range(min(self._iteration + self.horizon, len(self._chosen) - 1), first - 1, -1):
            if target in self._named:
                rank[self._named[target][layer]] = -(target * self._n_layers + layer)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer = gate.layer
        foretold = self._named.get(self._iteration)
        if foretold is not None and len(foretold[layer]):
            self._n += len(gate.needs)
            self._right += int(np.isin(np.array(list(gate.needs)), foretold[layer]).sum())
        self._n_uses += 1
        self._last_use[layer, list(gate.needs)] = UNNAMED + self._n_uses
        self._place(layer, self._iteration + 1)
        yield Serve()

    def layer_done(self, layer: int, view: View) -> Steps:
        half = self._n_layers // 2
        if layer + 1 in (half, self._n_layers):
            if self._predict_s > 0.0:
                self._after = ((yield Predict(self._predict_s, "gpu")),)
            self._forecast(range(half) if layer + 1 == half else range(half, self._n_layers))
            self._until = (self._iteration + 1) * self._n_layers + (half if layer + 1 == half else self._n_layers)
        if self.prefetch:
            yield from self._ask(self._iteration * self._n_layers + layer + 1, view)

    def _ask(self, first: int, view: View) -> Steps:
        """Prefetch what is named, layer by layer from a step on, while there is room or who leaves is wanted later."""
        self._asked = max(self._asked, first)
        while self._asked < self._until:
            iteration, layer = divmod(self._asked, self._n_layers)
            for expert in self._named[iteration][layer].tolist() if iteration in self._named else ():
                piece: Piece = view.piece(layer, expert)
                if not view.holds(piece):
                    yield Prefetch(piece, after=self._after)
                    if not view.holds(piece):
                        return
            self._asked += 1

    def stats(self) -> dict[str, float]:
        """Share of the experts chosen by the gates that were named for them by the last forecast."""
        return {"foretold_frac": self._right / self._n if self._n else 0.0}
