"""Where the luck of a draw comes from: a generator per purpose and request, so that no draw depends on another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from traces.format.layout import DISTANCES, Array
from traces.synth.profile import FADES

# Streams of random numbers. A new one goes to the end, so that the others keep what they draw.
_STREAMS = (
    *("table", "weights", "tasks", "requests", "tokens", "request", "fresh"),
    *(f"fade{n}" for n in FADES),
    *(f"ahead{d}" for d in DISTANCES),
    *("shared", "contexts", "pair", "triple", "rest"),
)


def stream(seed: int, name: str, request: int = 0) -> np.random.Generator:
    """The generator of one purpose, for one request."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, _STREAMS.index(name), request))))


def fading(fresh: Array, keep: float, state: Array | None) -> tuple[Array, Array]:
    """Rows of which each keeps `keep` of the row before, of variance 1 throughout, and what the next ones go on from.

    fresh: (n, ...) independent normal numbers; may be changed.
    """
    own, kept = (fresh.dtype.type(value) for value in (np.sqrt(1 - keep * keep), keep))
    if state is None:
        state = np.zeros(fresh.shape[1:], fresh.dtype)
        fresh[0] /= own  # nothing comes before the first row, so it is all fresh
    rows = own * fresh
    for row in rows:
        row += state
        state = kept * row
    return rows, state


@dataclass(frozen=True)
class RequestPlan:
    """One request to draw: its place in the trace, where its lengths and task come from."""

    index: int
    prompt_len: int
    n_decode: int
    task: int
    split: str

    @property
    def n_rows(self) -> int:
        """Rows of the request."""
        return self.prompt_len + self.n_decode


class Noise:
    """The luck of one request: a generator per purpose, and what its fading numbers have come to."""

    def __init__(self, seed: int, plan: RequestPlan, names: Iterable[str], lasting: Collection[str]) -> None:
        self.fades = {n: f"fade{n}" for n in FADES if f"fade{n}" in lasting}
        every = (*names, *self.fades.values(), *(f"ahead{d}" for d in DISTANCES), "shared")
        self.of = {name: stream(seed, name, plan.index) for name in every}
        self._memory: dict[str, Array | None] = dict.fromkeys(self.fades.values())

    def fading(self, name: str, fade: int, fresh: Array) -> Array:
        """The next rows of numbers that fade to 1/e over so many tokens."""
        rows, self._memory[name] = fading(fresh, float(np.exp(-1 / fade)), self._memory[name])
        return rows
