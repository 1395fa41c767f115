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

from itertools import product

import numpy as np
from numpy.typing import NDArray

from sim.policy import Gate, Iteration, Piece, Policy, Predict, Prefetch, Rank, Serve, Steps, Ticket, View, param

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Shares = NDArray[np.float64]
UNNAMED = -1e15  # ranks of experts in no forecast begin here: they leave before all that are in one


def chance(seed: int, targets: range, layers: range, n_experts: int) -> Shares:
    """A number in [0, 1) for each expert, the same for the same question (splitmix64): [targets, layers, E].

    targets: the tokens to come, the next one first.
    """
    firsts = [((seed * 1_000_003 + target) * 4099 * 17 + ahead) % 2**64 for ahead, target in enumerate(targets, 1)]
    key = np.array(firsts, dtype=np.uint64)[:, None, None] + np.uint64(17) * np.array(layers, dtype=np.uint64)[:, None]
    x = np.asarray(np.arange(1, n_experts + 1, dtype=np.uint64) + key * np.uint64(0x9E3779B97F4A7C15), np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53)


def named(chosen: Flags, drawn: Shares, recall: Shares, extra: int) -> Flags:
    """Experts that forecasts name [..., E]: of the chosen those drawn below `recall`, and others up to as many as are
    chosen and `extra`: those with the lowest draws are the wrong ones."""
    right = chosen & (drawn < recall)
    n_chosen = chosen.sum(axis=-1, keepdims=True)
    n_others = chosen.shape[-1] - n_chosen
    n_wrong = np.minimum(n_chosen + extra - right.sum(axis=-1, keepdims=True), n_others)
    order = np.argsort(np.where(chosen, 2.0, drawn), axis=-1, kind="stable")
    np.put_along_axis(right, order, np.take_along_axis(right, order, -1) | (np.arange(chosen.shape[-1]) < n_wrong), -1)
    return right


class SeqMoe(Policy):
    """An oracle of the next tokens with noise: Belady's order on what it names, and prefetching for the next token."""

    name = "seqmoe"
    title = "SeqMoE, by a noisy oracle: Belady on a forecast of 8 tokens"
    source = "arXiv 2609.12978, known from third parties' notes"
    from_notes = True
    traits = frozenset({"oracle"})
    labels = ("surrogate",)
    recall: float = param(
        0.909,
        "share of the next token's experts that are named (published by model: 0.858 to 0.909)",
        within=(0.0, 1.0),
    )
    recall_drop: float = param(
        0.0102,
        "how much less of each further token's (published: 3.58 points on average over 8, here spread evenly)",
        within=(0.0, 1.0),
    )
    horizon: int = param(8, "tokens forecast (published: 8)", within=(1, 64))
    extra: int = param(3, "experts named beyond those a token takes (published: k + 3)", within=(0, 4096))
    prefetch: bool = param(True, "copy what is named for the next token ahead; false keeps by the forecast alone")
    overhead_frac: float = param(
        0.0346, "share of a token's computation that forecasting adds (published: 3.46 % overhead)", within=(0.0, 10.0)
    )
    seed: int = param(0, "for the oracle's mistakes", within=(0, 2**31 - 1))

    def bind(self, view: View) -> None:
        self._n_layers, self._n_experts, self._top_k = view.n_layers, view.n_experts, view.top_k
        self.order = order = Rank(view.n_layers * view.n_experts, ties="index", guarded=True)
        self._rank = order.rank.reshape(view.n_layers, view.n_experts)
        self._last_use = np.full((view.n_layers, view.n_experts), UNNAMED)
        self._rank[:] = UNNAMED
        self._n_uses = 0
        self._chosen = self._future(view)
        self._named: dict[int, list[list[int]]] = {}  # this iteration and the next -> by layer who is named
        self._later = np.full(self._rank.shape, -np.inf)  # ranks by who is named for the tokens after the next
        self._iteration = -1
        self._n_tokens = 1
        self._until = self._asked = 0  # steps named for the next token end here; those prefetched for
        self._after: tuple[Ticket, ...] = ()
        self._n = self._right = 0
        prices = view.prices
        token_s = view.n_layers * (prices.attention_s(0) + prices.shared_s() + view.top_k * prices.expert_s())
        self._predict_s = self.overhead_frac * (token_s + prices.head_s()) / 2.0

    def _future(self, view: View) -> list[Ids]:
        """By iteration the experts that will be asked for, ascending: `layer * E + expert`."""
        n = -(-view.future.n_steps // view.n_layers)
        every = product(range(view.n_layers), range(view.n_experts))
        uses = [view.future.uses(layer, expert)[0] for layer, expert in every]
        ids = np.repeat(np.arange(len(uses)), [len(found) for found in uses])
        asked = np.array([iteration for found in uses for iteration in found], dtype=np.int64)
        ends = np.cumsum(np.bincount(asked, minlength=n))
        return np.split(ids[np.argsort(asked, kind="stable")], ends[:-1])

    # -- the forecast -----------------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        self._named.pop(self._iteration, None)
        self._iteration = iteration.index
        self._n_tokens = sum(r.puts_out for r in iteration.ranges)

    def _forecast(self, layers: range) -> None:
        """Name the experts of these layers for the next tokens, and rank them by when they are wanted."""
        here, first = slice(layers.start, layers.stop), self._iteration + 1
        targets = range(first, min(first + self.horizon, len(self._chosen)))
        later = self._later[here]
        later[:] = -np.inf
        if not targets:
            return
        chosen = np.zeros((len(targets), self._n_layers * self._n_experts), dtype=bool)
        for flags, target in zip(chosen, targets, strict=True):
            flags[self._chosen[target]] = True
        chosen = chosen.reshape(len(targets), self._n_layers, self._n_experts)[:, here]
        recall = np.array([max(0.0, self.recall - ahead * self.recall_drop) for ahead in range(len(targets))])
        drawn = chance(self.seed, targets, layers, self._n_experts)
        found = named(chosen, drawn, recall[:, None, None], self.extra)
        found &= chosen.sum(axis=-1, keepdims=True) <= self._n_tokens * self._top_k  # a prompt's nobody can know
        steps = np.array(targets)[:, None] * self._n_layers + np.array(layers)
        ranks = np.where(found, -steps[:, :, None].astype(np.float64), -np.inf)
        ranks[1:].max(axis=0, initial=-np.inf, out=later)
        self._rank[here] = np.maximum(np.maximum(ranks[0], later), self._last_use[here])
        rows = self._named.setdefault(first, [[] for _ in range(self._n_layers)])
        for layer in layers:
            rows[layer] = np.flatnonzero(found[0, layer - layers.start]).tolist()

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer = gate.layer
        foretold = self._named.get(self._iteration)
        if foretold is not None and foretold[layer]:
            self._n += len(gate.needs)
            self._right += len(gate.needs.keys() & foretold[layer])
        self._n_uses += 1
        last_use = self._last_use[layer]
        last_use[list(gate.needs)] = UNNAMED + self._n_uses
        np.maximum(self._later[layer], last_use, out=self._rank[layer])  # who is named ranks above all that are not
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
            for expert in self._named[iteration][layer] if iteration in self._named else ():
                piece: Piece = view.piece(layer, expert)
                if not view.holds(piece):
                    yield Prefetch(piece, after=self._after)
                    if not view.holds(piece):
                        return
            self._asked += 1

    def stats(self) -> dict[str, float]:
        """Share of the experts chosen by the gates that were named for them by the last forecast."""
        return {"foretold_frac": self._right / self._n if self._n else 0.0}
