"""A model that routes itself: the trace, the iterations and the routing of a run, written while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.real.machine.routing import Routing
from sim.workload.iterations import Iteration, Range

if TYPE_CHECKING:
    from sim.real.machine.decoder import Decoder
    from sim.real.weights.weights import Weights
    from traces.format.reader import Trace


class LiveTrace:
    """A recorded trace whose rows of the iteration under way come from the model that runs."""

    def __init__(self, base: Trace) -> None:
        self._base = base
        self.experts = np.array(base.experts, dtype=np.int64)
        self.token_ids = np.array(base.token_ids)
        self.rows = (0, 0)
        self.live: dict[str, np.ndarray] = {}
        self.table: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def begin(self, start: int, stop: int) -> None:
        """Rows `[start, stop)` are what runs now; they are known layer by layer."""
        base = self._base
        shape = (stop - start, base.n_layers, base.n_experts)
        self.rows = (start, stop)
        self.live = {
            name: np.zeros(shape)
            for name in ("scores", "next_scores_1", "next_scores_2", "next_scores_3", "shared_scores")
        }
        self.live["weights"] = np.zeros((*shape[:2], base.top_k))

    def _of(self, name: str, a: int, b: int) -> np.ndarray | None:
        return self.live[name] if (a, b) == self.rows else None

    def scores(self, a: int, b: int) -> np.ndarray:
        found = self._of("scores", a, b)
        return self._base.scores(a, b) if found is None else found

    def weights(self, a: int, b: int) -> np.ndarray:
        found = self._of("weights", a, b)
        return self._base.weights(a, b) if found is None else found

    def raw_weights(self, a: int, b: int) -> np.ndarray:
        found = self._of("scores", a, b)
        if found is None:
            return self._base.raw_weights(a, b)
        chosen: np.ndarray = np.take_along_axis(found, self.experts[a:b], -1) / self._base.score_scale
        return chosen

    def next_scores(self, distance: int, a: int, b: int) -> np.ndarray:
        found = self._of(f"next_scores_{distance}", a, b)
        return self._base.next_scores(distance, a, b) if found is None else found

    def shared_scores(self, a: int, b: int) -> np.ndarray:
        found = self._of("shared_scores", a, b)
        return self._base.shared_scores(a, b) if found is None else found

    def embeddings(self, a: int, b: int) -> np.ndarray:
        if self.table is None or (a, b) != self.rows:
            return self._base.embeddings(a, b)
        rows: np.ndarray = self.table[self.token_ids[a:b]]
        return rows


class LiveIteration(Iteration):
    """An iteration whose experts are known only once each gate has spoken."""

    __slots__ = ()
    recorded = False

    def __init__(self, index: int, ranges: list[Range], trace: Any, row: Any) -> None:
        super().__init__(index, ranges, trace, None)

    def chosen(self, layer: int) -> dict[int, int]:
        ids = self.ids(layer)
        if len(ids) == 1:
            return dict.fromkeys((int(e) for e in ids[0]), 1)
        counts = np.bincount(ids.reshape(-1))
        return {expert: int(n) for expert, n in enumerate(counts) if n}


class LiveRouting(Routing):
    """The model's own choice; what it says is written into the trace that policies read."""

    def __init__(self, trace: LiveTrace, weights: Weights, torch: Any, precision: str, free: bool) -> None:
        super().__init__(trace, torch, weights.dtype, len(weights.embedding), precision)  # type: ignore[arg-type]
        self.live, self.free = trace, free
        self._gates = [layer.gate for layer in weights.layers]
        self._of = weights
        self.text: dict[int, list[int]] = {}  # request -> tokens put out

    def begin(self, iteration: Iteration) -> None:
        only = iteration.ranges[0]
        self.live.begin(only.start_row, only.stop_row)
        super().begin(iteration)

    def token_ids(self, iteration: Iteration) -> np.ndarray:
        only = iteration.ranges[0]
        return self.live.token_ids[only.start_row : only.stop_row].astype(np.int64)

    def chose(self, layer: int, chosen: list[list[int]], decoder: Decoder) -> None:
        start, stop = self.live.rows
        live, torch, scale = self.live.live, self.torch, self.live.score_scale
        self.live.experts[start:stop, layer] = np.asarray(chosen)
        with torch.inference_mode():
            live["weights"][:, layer] = decoder.top[0].to("cpu").double().numpy()
            live["scores"][:, layer] = self._codes(decoder.logits, scale)
            n = len(self._gates)
            for distance in (1, 2, 3):
                ahead = torch.nn.functional.linear(decoder.normed, self._gates[(layer + distance) % n])
                live[f"next_scores_{distance}"][:, layer] = self._codes(ahead, scale)
            if layer + 1 < n:
                # As traces are recorded (card L4s): the next block with its attention left out.
                after, functional = self._of.layers[layer + 1], torch.nn.functional
                x, eps = decoder.normed + decoder.hidden, self._of.norm_eps
                x = x + functional.rms_norm(x, (x.shape[-1],), after.norm1, eps)
                x = functional.rms_norm(x, (x.shape[-1],), after.norm2, eps)
                live["shared_scores"][:, layer] = self._codes(functional.linear(x, after.gate), scale)

    @staticmethod
    def _codes(logits: Any, scale: int) -> np.ndarray:
        shares: np.ndarray = logits.float().softmax(-1).to("cpu").double().numpy()
        codes: np.ndarray = np.rint(shares * scale)
        return codes

    def put_out(self, iteration: Iteration, next_ids: list[int]) -> None:
        only = iteration.ranges[0]
        request = only.request
        self.text.setdefault(request.index, []).append(next_ids[0])
        if self.free and only.stop_row < request.first_row + request.prompt_len + request.outputs - 1:
            self.live.token_ids[only.stop_row] = next_ids[0]
