"""How often intervals of requests under load hold what is known of the queue of one server.

    python tests/queue_intervals.py [SERIES]

Arrivals and services are exponential, so the mean wait is load^2 / (1 - load) between arrivals. A row is a load and a
number of requests; its shares are of series whose 95 % interval holds that mean: from blocks of requests, as results
under load have it, and from single ones. Seeds count up from 1000.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.random import Generator

from sim.results.blocks import errors
from sim.results.sampling import Sample


def waits(rng: Generator, n: int, load: float, before: int = 2000) -> list[float]:
    """Of n requests, once so many were served before them (Lindley's recursion)."""
    gaps, services = rng.exponential(1.0, n + before), rng.exponential(load, n + before)
    found = [0.0]
    for gap, service in zip(gaps[1:], services[:-1], strict=True):
        found.append(max(0.0, found[-1] + service - gap))
    return found[before:]


def shares_held(load: float, n: int, n_series: int) -> tuple[float, float]:
    """Of blocks, and of single requests."""
    mean, held = load * load / (1 - load), [0, 0]
    for seed in range(1000, 1000 + n_series):
        series = waits(np.random.default_rng(seed), n, load)
        for at, ends in enumerate((errors(series, ()).mean, Sample(dict(enumerate(series))).interval())):
            assert ends is not None
            held[at] += ends[0] <= mean <= ends[1]
    return held[0] / n_series, held[1] / n_series


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    print("load  requests  blocks  single requests")  # noqa: T201
    for load in (0.5, 0.8):
        for n in (200, 1000):
            blocks, single = shares_held(load, n, asked)
            print(f"{load:4}  {n:8,}  {blocks:6.0%}  {single:15.0%}")  # noqa: T201
