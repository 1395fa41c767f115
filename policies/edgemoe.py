"""EdgeMoE (arXiv 2308.14352): the path through two layers tells the next one; frequent and near experts stay.

Source: Yi, Guo, Wei, Zhou, Wang and Xu, "EdgeMoE: Empowering Sparse Large Language Models on Mobile Devices" (IEEE TMC
2025), known here from third-party notes: the exact weights of its eviction score were not found, so it is frequency
over (1 + distance), and the number preloaded is the least of the published range.

Not modelled: experts of different bit widths, chosen offline (all have the serving precision), and flash storage
(experts come over the link of the hardware profile). Published for encoder-decoder models with one expert per token;
for more, a path is the set of experts of each layer. Batches and prompts: the tokens' guesses are added up.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import uses
from sim.policy import Gate, Policy, Prefetch, Rank, Serve, Steps, StoreSplit, View, param

Path = tuple[tuple[int, ...], ...]


class EdgeMoe(Policy):
    """A buffer of experts, filled ahead by a dictionary of paths learnt from the store split."""

    name = "edgemoe"
    title = "EdgeMoE: paths through two layers, frequency and distance"
    source = "arXiv 2308.14352 (IEEE TMC 2025), known from third-party notes"
    from_notes = True
    preload: int = param(
        1, "most likely experts of the next layer to preload (published: 1 to 3); 0 for none", within=(0, 4096)
    )
    path_layers: int = param(2, "layers that make a path (published: the two before the one predicted)", within=(1, 8))

    def bind(self, view: View) -> None:
        self.order = order = Rank(view.n_layers * view.n_experts, ties="index")
        self._ranks = order.rank.reshape(view.n_layers, view.n_experts)
        self._layers = np.arange(view.n_layers)[:, None]
        self._paths: list[dict[Path, Counter[int]]] = [{} for _ in range(view.n_layers)]
        self._rows: list[list[list[int]]] = []  # per token of this iteration, its experts layer by layer so far
        self._needed = self._found = 0

    def learn(self, store: StoreSplit) -> None:
        self._uses: NDArray[np.int64] = uses(store, self.name)
        for request in store.requests:
            stop = request.first_row + request.prompt_len + request.outputs - 1
            for row in store.trace.experts[request.first_row : stop].tolist():
                sets = [tuple(sorted(ids)) for ids in row]
                for layer in range(1, len(row)):
                    seen = self._paths[layer].setdefault(tuple(sets[:layer][-self.path_layers :]), Counter())
                    for expert in row[layer]:
                        seen[expert] = seen.get(expert, 0) + 1  # `update` takes four times as long for so few

    def _path(self, layers: list[list[int]]) -> Path:
        """What the last layers chose, as sets."""
        return tuple(tuple(sorted(ids)) for ids in layers[-self.path_layers :])

    def gate_done(self, gate: Gate, view: View) -> Steps:
        ids = gate.ids.tolist()
        if gate.layer == 0:
            self._rows = [[] for _ in ids]
        for row, chosen in zip(self._rows, ids, strict=True):
            row.append(chosen)
        for expert, n_tokens in gate.needs.items():
            self._uses[gate.layer, expert] += n_tokens
        # Least frequency over (1 + layers until it can be wanted) leaves; of equals the lowest id.
        np.divide(self._uses, 1 + (self._layers - gate.layer - 1) % view.n_layers, out=self._ranks)
        yield Serve()
        if self.preload and gate.layer + 1 < view.n_layers:
            yield [Prefetch(view.piece(gate.layer + 1, expert)) for expert in self._guess(gate.layer + 1)]

    def _guess(self, layer: int) -> list[int]:
        """The most likely experts of the next layer, given the paths of the tokens; none for paths never seen."""
        likely: dict[int, float] = {}
        for row in self._rows:
            seen = self._paths[layer].get(self._path(row), Counter())
            total = sum(seen.values())
            for expert, n in seen.items():
                likely[expert] = likely.get(expert, 0.0) + n / total
        self._needed += len(self._rows)
        self._found += sum(self._path(row) in self._paths[layer] for row in self._rows)
        return sorted(likely, key=lambda e: (-likely[e], e))[: self.preload]

    def stats(self) -> dict[str, float]:
        """Share of paths that the store split had shown."""
        return {"known_paths_frac": self._found / self._needed if self._needed else 0.0}
