"""Does a synthetic trace behave like its source? Fit one half, draw, and hold it against the other half."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.curves import FRACS
from traces.stats.summary import Summary, summarise
from traces.synth.fit import fit
from traces.synth.write import write

TOLERANCE = 0.03  # of hit rates of plain caches: three points


@dataclass(frozen=True)
class Comparison:
    """Figures of the fitted half, of the half that was held out, and of what was drawn from the fit."""

    fitted: Summary
    heldout: Summary
    drawn: Summary

    def differences(self) -> dict[str, float]:
        """Drawn less held out, for every figure that both have."""
        pairs = ((name, self.drawn.figures.get(name), value) for name, value in self.heldout.figures.items())
        return {name: drawn - real for name, drawn, real in pairs if drawn is not None and real is not None}

    def worst_curve(self) -> tuple[str, float]:
        """The LRU or LFU hit rate that differs most, and by how much."""
        curves = {k: v for k, v in self.differences().items() if k.startswith(("lru_", "lfu_"))}
        worst = max(curves, key=lambda name: abs(curves[name]), default="")
        return worst, curves.get(worst, 0.0)


def compare(trace: Trace, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Comparison:
    """Fit one half of the requests (task by task, every second one), draw as many, and summarise all three.

    Raises:
        BadInput: fewer than two requests.
    """
    one, other = observe.halves(trace)
    if not one or not other:
        raise observe.too_few(trace)
    steps = iter(range(1, 6))

    def step() -> None:
        if progress:
            progress(next(steps), 5)

    profile = fit(trace, one)
    step()
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "drawn.safetensors", profile, seed=seed, n_requests=len(other))
        step()
        with Trace(path) as drawn:
            summaries = []
            for source, requests in ((trace, one), (trace, other), (drawn, None)):
                summaries.append(summarise(source, requests, FRACS))
                step()
    return Comparison(*summaries)
