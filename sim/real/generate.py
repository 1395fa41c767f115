"""A real small model end to end: it routes itself, and what a lossy policy changes changes every layer and token after.

A trace supplies the prompts (and, teacher-forced, the text that perplexity is taken over); scores, weights and
predictions that policies look at come from the model as it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import BadInput
from sim.base.json import finite
from sim.base.kinds import EXPERTS, amount_in
from sim.figures import SCHEMA
from sim.profiles.overrides import of_profile
from sim.real.live import LiveIteration, LiveRouting, LiveTrace
from sim.real.run import assemble_real, open_weighed, run_real
from sim.real.weights.weights import Weights
from sim.run import execute, prepare
from sim.setup.naming import show
from sim.workload.iterations import Iteration

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.real.comparison import Talk, Talked
    from sim.real.devices.lanes import Lanes
    from sim.results.record import Result
    from sim.setup.setup import Setup


@dataclass
class Spoken:
    """One policy's run of the model: tokens by request, and the loss over the trace's own text where it was forced."""

    policy: str
    lossy: bool
    tokens: dict[int, list[int]]
    result: Result
    nll: list[float] = field(default_factory=list)
    experts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int64))  # [rows, layers, k] taken

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood per token, natural log; None when nothing was scored."""
        return math.exp(math.fsum(self.nll) / len(self.nll)) if self.nll else None


def speak(
    spec: RunSpec, lanes: Lanes, weights: Weights, n_outputs: int, *, free: bool, foretold: np.ndarray | None = None
) -> Spoken:
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
            raise BadInput(
                f"policy {setup.policy.name}: it reads the future of a trace, a live model has none; leave it out"
            )
        if spec.batch != 1:
            raise BadInput(f"--batch, got {spec.batch}: a live model runs one request at a time")
        if setup.drawn is not None:
            raise BadInput(f"--predictor, got {setup.stand_in}: a live model's own gates predict; leave it out")
        setup.trace.require("token_ids", "a live model")
        live = LiveTrace(setup.trace)
        if oracle and foretold is not None:
            live.experts[:] = foretold
        live.table = weights.embedding.to("cpu").float().numpy()
        setup = replace(setup.asking(n_outputs), trace=live)  # type: ignore[arg-type]
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
        return Spoken(setup.policy.name, "lossy" in setup.policy.traits, routing.text, done.result, nll, live.experts)
    finally:
        setup.close()


def open_checkpoint(spec: RunSpec, folder: Path, device: str) -> tuple[Lanes, Weights]:
    """Lanes and a checkpoint's weights; the caller closes the lanes."""
    setup: Setup = prepare(spec)
    setup.close()
    return open_weighed(setup, device, spec.seed, folder)


def open_loop(spec: RunSpec) -> Result:
    """The replay's own account of a lossy policy: share of activations changed and of gate mass kept."""
    setup = prepare(spec)
    try:
        return execute(setup, bounds=False).result
    finally:
        setup.close()


def talk(specs: list[RunSpec], folder: Path, device: str, n_outputs: int) -> list[Talked]:
    """Every policy's tokens against the resident model's, and its perplexity against it; a row per policy."""
    import msgspec

    lanes, weights = open_checkpoint(specs[0], folder, device)
    rows: list[Talked] = []
    try:
        everything = msgspec.structs.replace(specs[0], policy="lru", set={}, cache="100%")
        base = [speak(everything, lanes, weights, n_outputs, free=free) for free in (True, False)]
        for spec in specs:
            text, forced = (
                speak(spec, lanes, weights, n_outputs, free=free, foretold=base[not free].experts)
                for free in (True, False)
            )
            same = [a == b for r in base[0].tokens for a, b in zip(base[0].tokens[r], text.tokens[r], strict=True)]
            replay = open_loop(spec)
            own = {key: value for key, value in spec.set.items() if not of_profile(key)}
            rows.append(
                {
                    "policy": " ".join([text.policy, *(f"{key}={show(key, value)}" for key, value in own.items())]),
                    "lossy": text.lossy,
                    "tokens": len(same),
                    "tokens_same_frac": float(np.mean(same)),
                    "tokens_identical": text.tokens == base[0].tokens,
                    "perplexity": forced.perplexity,
                    "perplexity_resident": base[1].perplexity,
                    "scored_tokens": len(forced.nll),
                    "perplexity_change_frac": (forced.perplexity or math.nan) / (base[1].perplexity or math.nan) - 1.0,
                    "closed_loop_activations_changed_frac": forced.result.activations_changed_frac,
                    "open_loop_activations_changed_frac": replay.activations_changed_frac,
                    "open_loop_gate_mass_kept": replay.gate_mass_kept,
                    "hit_rate": text.result.hit_rate,
                    "experts": amount_in(EXPERTS, spec.capacity),
                }
            )
    finally:
        lanes.close()
    return rows


def generated(specs: list[RunSpec], folder: Path, device: str, n_outputs: int) -> Talk:
    """The real small model under every policy, with what is wrong: what a lossless one changes."""
    rows = talk(specs, folder, device, n_outputs)
    wrong = [
        f"{row['policy']}: lossless, yet its tokens differ from the resident model's"
        for row in rows
        if not row["lossy"] and not row["tokens_identical"]
    ]
    found: Talk = finite({"schema": SCHEMA, "checkpoint": folder.name, "policies": rows, "wrong": wrong})
    return found
