"""A real small model end to end: it routes itself, and what a lossy policy changes changes every layer and token after.

A trace supplies the prompts (and, teacher-forced, the text that perplexity is taken over); scores, weights and
predictions that policies look at come from the model as it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import BadInput
from sim.real.machine.routing import Routing
from sim.real.run import assemble_real, open_weighed, run_real
from sim.real.weights.weights import Weights
from sim.run import execute, prepare
from sim.workload.iterations import Iteration, Range

if TYPE_CHECKING:
    from sim.real.devices.lanes import Lanes
    from sim.real.machine.decoder import Decoder
    from sim.setup.prepare import Setup
    from sim.setup.spec import RunSpec
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
        self.live = {name: np.zeros(shape) for name in
                     ("scores", "next_scores_1", "next_scores_2", "next_scores_3", "shared_scores")}  # fmt: skip
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


@dataclass
class Spoken:
    """One policy's run of the model: tokens by request, and the loss over the trace's own text where it was forced."""

    policy: str
    lossy: bool
    tokens: dict[int, list[int]]
    result: dict[str, Any]
    nll: list[float] = field(default_factory=list)
    experts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int64))  # [rows, layers, k] taken

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood per token, natural log; None when nothing was scored."""
        return math.exp(math.fsum(self.nll) / len(self.nll)) if self.nll else None


def speak(spec: RunSpec, lanes: Lanes, weights: Weights, n_outputs: int, *, free: bool,
          foretold: np.ndarray | None = None) -> Spoken:  # fmt: skip
    """Let the model run under a policy. `free`: it reads its own tokens; else the trace's text, which is then scored.

    Args:
        foretold: `Spoken.experts` of the resident model's run, for a policy that knows the future: as it changes
            nothing that is computed, the model will choose the very same.

    Raises:
        BadInput: a policy that knows the future where none was told, a batch, or a trace without token ids.
    """
    setup = prepare(spec)
    try:
        oracle = "oracle" in setup.policy.traits
        if oracle and (foretold is None or "lossy" in setup.policy.traits):
            raise BadInput(f"policy {setup.policy.name}: it reads the future of a trace, a live model has none; leave "
                           "it out")  # fmt: skip
        if spec.batch != 1:
            raise BadInput(f"--batch, got {spec.batch}: a live model runs one request at a time")
        setup.trace.require("token_ids", "a live model")
        setup.requests = [r._replace(outputs=min(r.outputs, n_outputs)) for r in setup.requests]
        live = LiveTrace(setup.trace)
        if oracle and foretold is not None:
            live.experts[:] = foretold
        live.table = weights.embedding.to("cpu").float().numpy()
        setup.trace = live  # type: ignore[assignment]
        routing = LiveRouting(live, weights, lanes.torch, spec.precision, free)
        engine, machine = assemble_real(setup, lanes, weights, routing=routing)
        nll: list[float] = []

        def score(iteration: Iteration, logits: Any) -> None:
            only = iteration.ranges[0]
            if only.stop_row < only.request.first_row + only.request.prompt_len + only.request.outputs - 1:
                shares = logits[-1].double().log_softmax(-1)
                nll.append(-float(shares[int(live.token_ids[only.stop_row])]))

        if not free:
            machine.output.on_logits = score
        done = run_real(setup, engine, machine, None, None, 0.0, compose=LiveIteration)
        return Spoken(setup.policy.name, "lossy" in setup.policy.traits, routing.text, done.result, nll,
                      live.experts)  # fmt: skip
    finally:
        setup.close()


def open_checkpoint(spec: RunSpec, folder: Path, device: str) -> tuple[Lanes, Weights]:
    """Lanes and a checkpoint's weights; the caller closes the lanes."""
    setup: Setup = prepare(spec)
    setup.close()
    return open_weighed(setup, device, spec.seed, folder)


def open_loop(spec: RunSpec) -> dict[str, Any]:
    """The replay's own account of a lossy policy: share of activations changed and of gate mass kept."""
    setup = prepare(spec)
    try:
        return execute(setup, bounds=False).result
    finally:
        setup.close()


def talk(specs: list[RunSpec], folder: Path, device: str, n_outputs: int) -> list[dict[str, Any]]:
    """Every policy's tokens against the resident model's, and its perplexity against it; a row per policy."""
    import msgspec

    lanes, weights = open_checkpoint(specs[0], folder, device)
    rows = []
    try:
        everything = msgspec.structs.replace(specs[0], policy="lru", set={}, experts=None, cache_frac=1.0)
        base = [speak(everything, lanes, weights, n_outputs, free=free) for free in (True, False)]
        for spec in specs:
            text, forced = (speak(spec, lanes, weights, n_outputs, free=free, foretold=base[not free].experts)
                            for free in (True, False))  # fmt: skip
            same = [a == b for r in base[0].tokens for a, b in zip(base[0].tokens[r], text.tokens[r], strict=True)]
            replay = open_loop(spec)
            rows.append({
                "policy": text.policy, "lossy": text.lossy, "tokens": len(same),
                "tokens_same_frac": float(np.mean(same)),
                "tokens_identical": text.tokens == base[0].tokens, "perplexity": forced.perplexity,
                "perplexity_resident": base[1].perplexity, "scored_tokens": len(forced.nll),
                "perplexity_change_frac": (forced.perplexity or math.nan) / (base[1].perplexity or math.nan) - 1.0,
                "closed_loop_activations_changed_frac": forced.result["activations_changed_frac"],
                "open_loop_activations_changed_frac": replay["activations_changed_frac"],
                "open_loop_gate_mass_kept": replay["gate_mass_kept"], "hit_rate": text.result["hit_rate"],
                "experts": spec.experts,
            })  # fmt: skip
    finally:
        lanes.close()
    return rows
