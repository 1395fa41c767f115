"""Watch a Hugging Face MoE model route, and let its gates look ahead, one forward at a time.

Tensors are flattened over batch and position: row b * S + s is position s of sequence b.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch

from sim.base.errors import BadInput, CheckFailed
from traces.format.header import GateRule
from traces.format.layout import DISTANCES, Array
from traces.record.families import TESTED_WITH, MoeLayer, gate_scores

# The weights of a bfloat16 router may be this far from those that float32 scores give.
WEIGHT_RTOL, WEIGHT_ATOL = 0.02, 1e-4
_OTHER_GATE = f"it is another gate than the class of transformers {TESTED_WITH} has"
Rows = dict[str, Array]


class RoutingProbe:
    """Context manager; after each forward of the model, `take()` returns its rows, tensor name of FORMAT.md -> array.

    Ids and weights are those that the experts module was given. That they are the router's output, that they are its
    top-k, and that weights follow from scores is checked on every forward: a trace must hold what the model did.
    Predictions call the next layers' own routers on this layer's gate input while the forward is under way, so that no
    more than the gate inputs of four layers are alive at a time.
    """

    def __init__(
        self, layers: list[MoeLayer], gate: GateRule, ranked: bool, embedding: Any = None, keep_inputs: bool = False
    ) -> None:
        """Watch `layers`; `embedding` is the model's input embedding module, when its output is wanted."""
        self.layers, self.gate, self.ranked = layers, gate, ranked
        self.embedding, self.keep_inputs = embedding, keep_inputs
        self._handles: list[Any] = []
        self._paused = False
        self._forget()

    def _forget(self) -> None:
        self._choices: list[tuple[torch.Tensor, torch.Tensor]] = []  # what the experts of each layer were given
        self._routed: list[tuple[torch.Tensor, torch.Tensor]] = []  # what the router said
        self._logits: list[torch.Tensor] = []
        self._ahead: dict[str, list[torch.Tensor]] = {}
        self._norms: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._inputs: dict[int, torch.Tensor] = {}  # gate inputs of the last layers
        self._residual: dict[int, torch.Tensor] = {}
        self._shared: dict[int, torch.Tensor] = {}
        self._shared_gate: dict[int, torch.Tensor] = {}
        self._embedded: torch.Tensor | None = None

    def __enter__(self) -> RoutingProbe:
        for index, layer in enumerate(self.layers):
            self._handles += [
                layer.post_norm.register_forward_hook(self._keeper(self._residual_of, index)),
                layer.router.register_forward_hook(self._keeper(self._router, index)),
                layer.experts.register_forward_pre_hook(self._experts, with_kwargs=True),
            ]
            for module, keep in ((layer.shared, self._shared_of), (layer.shared_gate, self._shared_gate_of)):
                if module is not None:
                    self._handles.append(module.register_forward_hook(self._keeper(keep, index)))
        if self.embedding is not None:
            self._handles.append(self.embedding.register_forward_hook(self._keeper(self._embedding_of, 0)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    def _keeper(self, keep: Any, index: int) -> Any:
        """A forward hook: `keep(index, module, first argument, output)`, unless it is the probe itself that calls."""

        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            if not self._paused:
                keep(index, module, args[0], output)

        return hook

    def _embedding_of(self, _index: int, _module: Any, _ids: torch.Tensor, output: torch.Tensor) -> None:
        self._embedded = _flat(output)

    def _residual_of(self, index: int, _module: Any, residual: torch.Tensor, _output: torch.Tensor) -> None:
        self._residual[index] = _flat(residual)

    def _shared_of(self, index: int, _module: Any, _input: torch.Tensor, output: torch.Tensor) -> None:
        self._shared[index] = _flat(output)

    def _shared_gate_of(self, index: int, _module: Any, _input: torch.Tensor, output: torch.Tensor) -> None:
        self._shared_gate[index] = _flat(output).sigmoid()

    def _experts(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _hidden, ids, weights = (*args, *kwargs.values())
        self._choices.append((ids, weights))

    def _router(self, index: int, module: Any, gate_input: torch.Tensor, output: tuple[torch.Tensor, ...]) -> None:
        if index != len(self._routed):
            raise self._elsewhere()
        if len(output) != 3:
            rule = f"logits, weights and ids are recorded, as transformers {TESTED_WITH} has them"
            raise BadInput(f"router, got {len(output)} outputs: {rule}; pip install 'transformers>={TESTED_WITH}'")
        logits, weights, ids = output
        here = _flat(gate_input)
        self._logits.append(logits)
        self._routed.append((ids, weights))
        self._norms.append(here.float().norm(dim=-1))
        if self.keep_inputs:
            self._kept.append(here)
        seen = {f"next_scores_{d}": self._inputs[index - d] for d in DISTANCES if index >= d}
        if index:
            seen["shared_scores"] = self._without_attention(index)
        self._look(module, seen, here.device)
        self._inputs[index] = here
        for past in (self._inputs, self._residual, self._shared, self._shared_gate):
            for old in [at for at in past if at <= index - max(DISTANCES)]:
                del past[old]

    def _look(self, router: Any, inputs: dict[str, torch.Tensor], device: torch.device) -> None:
        """Apply one router to the inputs [rows, h] that earlier layers saw, all in one call."""
        if not inputs:
            return
        self._paused = True
        try:
            logits = router(torch.cat([values.to(device) for values in inputs.values()]))[0]
        finally:
            self._paused = False
        for name, part in zip(inputs, logits.chunk(len(inputs)), strict=True):
            self._ahead.setdefault(name, []).append(part)

    def _without_attention(self, index: int) -> torch.Tensor:
        """What layer `index`'s gate would see, had the layer before neither routed experts nor attention after it.

        x = gate input + shared expert's output + residual of the layer before, then post_norm(x + input_norm(x)): the
        public code of Importance-Driven Expert Scheduling (goingshr/SMoE, utils/prefetch_norm.py at c014161), whose
        attention is the identity.
        """
        layer, before = self.layers[index], index - 1
        device = self._residual[index].device
        x = self._inputs[before] + self._residual[before]
        if before in self._shared:
            shared = self._shared[before]
            x = x + (self._shared_gate[before] * shared if before in self._shared_gate else shared)
        self._paused = True
        try:
            x = x.to(device)
            return _flat(layer.post_norm(x + layer.input_norm(x)))
        finally:
            self._paused = False

    def take(self) -> Rows:
        """Rows of the last forward; scores and weights are float32, experts int64.

        Raises:
            CheckFailed: what was seen is not what the experts used, or not what the gate is said to do.
        """
        n_layers = len(self.layers)
        if len(self._choices) != n_layers or len(self._routed) != n_layers:
            raise self._elsewhere()
        last = n_layers - 1
        self._look(self.layers[0].router, {"wrap": self._inputs[last]}, self._logits[0].device)
        self._ahead.setdefault("next_scores_1", []).append(self._ahead.pop("wrap")[0])
        ids, weights = (_stacked([choice[i] for choice in self._choices]) for i in (0, 1))
        scores = gate_scores(_stacked(self._logits), self.gate.score)
        self._check(ids, weights, scores)
        if not self.ranked:
            order = weights.argsort(dim=-1, descending=True, stable=True)
            ids, weights = ids.gather(-1, order), weights.gather(-1, order)
        found = {
            "experts": ids,
            "weights": weights.float(),
            "scores": scores,
            "gate_input_norms": _stacked(self._norms),
        }
        for name, logits in self._ahead.items():
            found[name] = gate_scores(_stacked(logits), self.gate.score)
        if self.keep_inputs:
            found["gate_inputs"] = _stacked(self._kept).float()
        if self._embedded is not None:
            found["embeddings"] = self._embedded.float()
        self._forget()
        return {name: np.asarray(values.cpu().numpy()) for name, values in found.items()}

    def _elsewhere(self) -> CheckFailed:
        got = f"{len(self._routed)} calls and {len(self._choices)} of experts in {len(self.layers)} layers"
        rule = "the model routes elsewhere (fused or quantised kernels?); load it unquantised"
        return CheckFailed(f"routers, got {got}: {rule}")

    def _check(self, ids: torch.Tensor, weights: torch.Tensor, scores: torch.Tensor) -> None:
        routed_ids, routed_weights = (_stacked([said[i] for said in self._routed]) for i in (0, 1))
        if not (torch.equal(ids, routed_ids) and torch.equal(weights, routed_weights)):
            raise CheckFailed("router and experts disagree on the chosen experts: the model class routes elsewhere")
        own = scores.gather(-1, ids)
        if self.gate.selection == "topk":
            # Compared by value, one rounding forgiven: scores that round to one may come in either order.
            ranked = own if self.ranked else own.sort(dim=-1, descending=True).values
            if not torch.allclose(scores.topk(ids.shape[-1], dim=-1).values, ranked, rtol=1e-6, atol=0):
                raise CheckFailed(f"the chosen experts are not the top-k of the router's scores: {_OTHER_GATE}")
        if self.gate.score == "sparsemixer":
            return  # its weights do not follow from the scores
        if self.gate.renormalised:
            own = own / own.sum(dim=-1, keepdim=True)
        if not torch.allclose(weights.float(), own * self.gate.scaling, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL):
            raise CheckFailed(f"the weights do not follow from the router's scores: {_OTHER_GATE}")


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1])


def _stacked(layers: list[torch.Tensor]) -> torch.Tensor:
    """Per-layer tensors [rows, ...] as one [rows, L, ...], on the first one's device (layers may live on several)."""
    return torch.stack([values.to(layers[0].device) for values in layers], dim=1)
