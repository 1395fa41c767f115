"""Does a synthetic trace behave like its source? Fit one half, draw, and hold it against the other half.

And what every bundled fit gives in one shape: a trace that is drawn from one of them could have been drawn from any.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from traces.format.layout import SUFFIX
from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.cuts import of_one_request
from traces.stats.summary import Summary, summarise, title
from traces.synth import fitted
from traces.synth.fit import fit
from traces.synth.profile import Lengths
from traces.synth.scale import scaled
from traces.synth.write import labels, write

ROWS = 128  # of one request, as most of what is published
PLAIN = ("lru", "lfu", "lcp")
_REQUESTS, _PROMPT = 12, 24
_LAYERS = 12  # of a scaled fit: they take their statistics from all depths of the source, and so have the same mean
TOLERANCE = 0.02  # of hit rates of plain caches: two points
ORDER_MARGIN = 0.01  # two hit rates that differ by less have no order
POLICIES, PERCENT = ("lru", "lfu", "lcp", "belady"), (25, 50, 75)
CURVES = [f"{policy}_{percent}" for percent in PERCENT for policy in POLICIES]


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

    def halves(self) -> dict[str, float]:
        """Held out less fitted: what the source differs from itself by, which no fit to one half can know."""
        pairs = ((name, value, self.fitted.figures.get(name)) for name, value in self.heldout.figures.items())
        return {name: one - other for name, one, other in pairs if one is not None and other is not None}

    def worst_curve(self) -> tuple[str, float]:
        """The hit rate of LRU, LFU, LCP or Belady in which what was drawn differs most, and by how much."""
        return _worst(self.differences())

    def worst_half(self) -> tuple[str, float]:
        """The same between the halves of the source."""
        return _worst(self.halves())

    def reachable(self) -> str:
        """Whether the bound could be kept at all, in words."""
        name, apart = self.worst_half()
        if not name:
            return ""
        within = abs(apart) <= TOLERANCE
        bound = f"{100 * TOLERANCE:.0f} points {'can' if within else 'cannot'} be asked of a fit to one of them"
        return f"the halves themselves differ by up to {100 * apart:+.1f} points ({title(name)}): {bound}"

    def out_of_order(self) -> list[str]:
        """Pairs of plain caches that the held-out half tells apart and that rank the other way in what was drawn."""
        found = []
        for percent in PERCENT:
            for one, other in combinations(POLICIES[:-1], 2):
                keys = f"{one}_{percent}", f"{other}_{percent}"
                sides = (self.heldout.figures, self.drawn.figures)
                real, drawn = ((side.get(keys[0]) or 0.0) - (side.get(keys[1]) or 0.0) for side in sides)
                if abs(real) > ORDER_MARGIN and real * drawn < 0:
                    found.append(f"{one.upper()} and {other.upper()} at {percent} %")
        return found


def _worst(apart: dict[str, float]) -> tuple[str, float]:
    worst = max((name for name in CURVES if name in apart), key=lambda name: abs(apart[name]), default="")
    return worst, apart.get(worst, 0.0)


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
                summaries.append(summarise(source, requests))
                step()
    return Comparison(*summaries)


def over_fits(shape: tuple[int, int, int]) -> Iterator[tuple[str, dict[str, float]]]:
    """Id of each bundled fit, and its figures in this shape: `traces.stats.cuts.of_one_request` of `ROWS` tokens.

    A fit of that shape is drawn as it is, another one scaled to `_LAYERS` layers of it.
    """
    for name in fitted.fitted():
        found = fitted.load(name)
        own = tuple(found.shape) == shape
        profile = scaled(found.profile, shape[0] if own else min(shape[0], _LAYERS), *shape[1:])
        n_tasks = max(1, len(profile.tasks))
        alike = [Lengths(_PROMPT, ROWS, i % n_tasks, False) for i in range(_REQUESTS)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}{SUFFIX}"
            write(path, msgspec.structs.replace(profile, requests=alike), levels="experts")
            with Trace(path) as trace:
                figures = of_one_request(trace, ROWS, PLAIN)
        assert figures is not None
        yield name, figures


def drawn_from(trace: Trace) -> str | None:
    """Id of the bundled fit that a trace was drawn from; None where it was not drawn from one."""
    own = set(trace.header.labels)
    if "synthetic" not in own:
        return None
    return next((name for name in fitted.fitted() if labels(fitted.load(name).profile)[1] in own), None)
