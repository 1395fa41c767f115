"""ExpertFlow (arXiv 2410.17954): the whole routing path foretold, slots given to layers by what they will need.

Source: He, Zhang et al., "ExpertFlow: Efficient Mixture-of-Experts Inference via Predictive Expert Caching and Token
Scheduling" (DAC 2026), known here from third-party notes; no code could be had. (Another system of the same name,
arXiv 2510.26730, is not this one.)

- Routing path predictor: one pass before the first layer names the experts of all layers. The published T5-style
  network (at least 90 % right in its domain) is not public; `policies/common/foretold.py` says what stands in.
  Its 7.21 MB are not charged.
- Predictive locality-aware expert caching (PLEC): slots go to layers in order, each as many as it is foretold to need,
  until there are none (room for 4, needs of 3 and 2: 3 and 1). Slots of layers that are over, and of experts foretold
  but not chosen, are given away first, in the order they became free, to what the forecast names next.
- Real-time correction: what the gate chooses and nobody foretold is copied ahead of every forecast, while the experts
  that are there compute.

- Token scheduler: a decode step's tokens run as two batches, one after the other, regrouped by their foretold paths.
  That is `--scheduler batch_affinity`, under which any policy may run; without it a step is one pass, as everywhere.

Not modelled: the pipeline of two batches that hides the prediction (`hidden=true` shows what it would be worth), and
what moving KV entries costs. Several GPUs (not published): each has its own slots.
"""

from __future__ import annotations

from policies.common.foretold import Forecasting
from sim.policy import Gate, Iteration, Predict, Serve, Steps, View, param


class ExpertFlow(Forecasting):
    """Loads the forecast in layer order, as slots become free; what was not foretold comes first."""

    name = "expertflow"
    title = "ExpertFlow (He): routing paths foretold, slots by demand"
    source = "arXiv 2410.17954 (DAC 2026), known from third-party notes"
    from_notes = True
    predict_s: float = param(1e-3, "seconds per prediction (assumed)", within=(0.0, 60.0))
    hidden: bool = param(False, "the prediction costs no time, as if the pipeline of two batches hid it (published)")

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        if not self.hidden:
            yield Predict(self.predict_s, "side", blocking=True)
        self.foretell(iteration)
        self.plan(view.piece(layer, e) for layer in range(view.n_layers) for e in self.foretold(layer))
        yield from self.load(view)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        """Real-time correction; then the layer's slots are free for what comes."""
        self.count(gate.layer, gate.ids)
        self.passed(gate.layer)
        for expert in self.foretold(gate.layer):
            if expert not in gate.needs:
                self._release(gate.layer, expert, view)
        yield Serve()
        for expert in gate.needs:
            self._release(gate.layer, expert, view)
        yield from self.load(view)

    def _release(self, layer: int, expert: int, view: View) -> None:
        """To the end of the line of those who leave first."""
        piece = view.piece(layer, expert)
        if view.holds(piece):
            self.loaded(piece)
