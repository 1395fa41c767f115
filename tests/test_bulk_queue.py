"""A static batch server with nothing offloaded against the bulk-service queue of the textbooks.

Requests come at random, a batch takes as long whatever its size, and is filled with those who wait when the server is
free, at least one and at most b: the queue M/D[1,b]/1. (Not M/M/1 with batches: no service here is exponential, and a
batch ends with its longest answer.) Bailey, "On queueing processes with bulk service", Journal of the Royal Statistical
Society B 16(1), 1954, has the queue that a batch leaves behind; Neuts, "A general class of bulk queues with Poisson
input", Annals of Mathematical Statistics 38(3), 1967, the rule by which an idle server starts with the first who comes;
Chaudhry and Templeton, "A First Course in Bulk Queues", Wiley 1983, both.
"""

from __future__ import annotations

import cmath
import math
from pathlib import Path

import numpy as np
import pytest
from test_load import Server, standard_error


def mean_wait_s(rate_per_s: float, took_s: float, most: int) -> float:
    """Of M/D[1,b]/1, before service.

    The queue that a batch leaves behind is Y' = max(Y - b, 0) + A, A arrivals during a service, so that its generating
    function is K(z) times a polynomial of degree b over z^b - K(z), K(z) = exp(-r (1 - z)), r = rate x service. The
    polynomial's roots are 1 and those of z^b = K(z) inside the unit circle; they give P(Y = 0) and E[Y]. Over a cycle
    of a service, and of waiting for somebody where Y = 0, (Y - b)+ wait from its beginning and A / 2 on average;
    Little's law makes a wait of that.
    """
    r, roots = rate_per_s * took_s, []
    for k in range(1, most):
        turn, z = cmath.exp(2j * math.pi * k / most), 0j
        for _ in range(500):
            z = turn * cmath.exp(-r / most * (1 - z))
        roots.append(z)
    empty = ((most - r) * math.prod(-z / (1 - z) for z in roots)).real
    left = sum(1 / (1 - z) for z in roots).real + (most - (most - r) ** 2) / (2 * (most - r))
    waiting = (took_s * (left - r) + rate_per_s * took_s**2 / 2) / (took_s + empty / rate_per_s)
    return waiting / rate_per_s


def recursion_s(rate_per_s: float, took_s: float, most: int, n: int) -> list[float]:
    """Waits of n requests, one batch after the other: no more than the rule itself."""
    came = np.cumsum(np.random.default_rng(3).exponential(1 / rate_per_s, n)).tolist()
    waits, free_s, at = list[float](), 0.0, 0
    while at < n:
        begun_s = max(free_s, came[at])
        batch = [time_s for time_s in came[at : at + most] if time_s <= begun_s]
        waits += [begun_s - time_s for time_s in batch]
        at, free_s = at + len(batch), begun_s + took_s
    return waits


@pytest.mark.parametrize("load_frac", [0.3, 0.8])
def test_the_formula(load_frac: float) -> None:
    """For one at a time it is Pollaczek and Khinchine's; for four it is what the rule gives, request by request."""
    assert mean_wait_s(load_frac, 1.0, 1) == pytest.approx(load_frac / (2 * (1 - load_frac)))
    waits = recursion_s(4 * load_frac, 1.0, 4, 200_000)
    assert np.mean(waits) == pytest.approx(mean_wait_s(4 * load_frac, 1.0, 4), abs=4 * standard_error(waits))
    assert standard_error(waits) < 0.01 * np.mean(waits)


@pytest.mark.parametrize(("most", "load_frac"), [(3, 0.5), (4, 0.8)])
def test_static_batches_wait_as_the_formula_says(tmp_path: Path, most: int, load_frac: float) -> None:
    server = Server(tmp_path, [(2, 3)])
    (took_s,) = server.service_s()
    rate_per_s = load_frac * most / took_s
    outcome = server.run(f"poisson:{rate_per_s!r}", 4000, batch=most, batch_static=True)
    served = outcome.report.requests
    waits = [times.queue_s for times in served]
    expected_s = mean_wait_s(rate_per_s, took_s, most)
    assert abs(np.mean(waits) - expected_s) < 3.5 * standard_error(waits)
    assert standard_error(waits) < 0.1 * expected_s  # so that the line above can fail
    # What the formula rests on: a batch takes as long whatever its size, and its requests begin and end together.
    ends = {times.begun_s: times.last_token_s for times in served}
    assert len(ends) < len(served)
    assert [ends[times.begun_s] for times in served] == [times.last_token_s for times in served]
    assert [end_s - begun_s for begun_s, end_s in ends.items()] == pytest.approx([took_s] * len(ends))
