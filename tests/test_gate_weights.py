"""The weights of experts a gate did not choose: as the recorded model would have made them of its scores."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sim.workload.gate import Arrays
from sim.workload.gate import Gate as Spoken
from sim.workload.iterations import Iteration, Range
from sim.workload.learn_split import requests_of
from traces.format.bundled import bundled_traces
from traces.format.header import GateRule
from traces.format.reader import Trace


def spoken(scores, weights, gate):
    trace = SimpleNamespace(
        header=SimpleNamespace(gate=gate),
        score_scale=10,
        n_layers=1,
        n_experts=len(scores[0]),
        scores=lambda first, stop: np.array([[row] for row in scores[first:stop]], dtype=float),
        weights=lambda first, stop: np.array([[row] for row in weights[first:stop]], dtype=float),
    )
    iteration = SimpleNamespace(phase="decode", token=None, gather=lambda read: read(0, len(scores)))
    arrays = Arrays(trace)
    arrays.begin(iteration)
    return Spoken(0, iteration, {}, arrays)


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (GateRule(renormalised=True), [[2 / 3, 1 / 3], [1.0, 0.0], [0.0, 0.0]]),
        (GateRule(renormalised=True, scaling=2.5), [[5 / 3, 2.5 / 3], [2.5, 0.0], [0.0, 0.0]]),
        (GateRule(renormalised=False), [[0.2, 0.1], [0.1, 0.0], [0.0, 0.0]]),
        (GateRule(renormalised=False, scaling=16.0), [[3.2, 1.6], [1.6, 0.0], [0.0, 0.0]]),
        (GateRule(score="sigmoid", renormalised=True), [[2 / 3, 1 / 3], [1.0, 0.0], [0.0, 0.0]]),
        (GateRule(score="sparsemixer", renormalised=False), [[0.9, 0.4], [0.9, 0.0], [0.0, 0.0]]),
    ],
)
def test_by_hand(gate, expected):
    """Scores of ten: the gate chose 0 and 1; who serves is 1 and 2, then 2 alone, then nobody."""
    one = spoken([[6, 2, 1, 1]] * 3, [[0.9, 0.4]] * 3, gate)
    found = one.weights_of(np.array([[1, 2], [2, -1], [-1, -1]]))
    assert found == pytest.approx(np.array(expected))


@pytest.mark.parametrize("name", bundled_traces())
def test_of_its_own_choice_the_gate_has_its_own_weights(name):
    """Recorded weights are what the model applied; recorded scores are rounded, to steps of 8 % in packed files.

    Those of `qwen1.5-moe-chat` have four bits: half a step is 0.03 at a score of 0.2.
    """
    with Trace(bundled_traces()[name]) as trace:
        request = requests_of(trace, "test")[0]
        row = request.first_row + request.prompt_len
        iteration = Iteration(0, [Range(request, row, row + 8, "decode", request.prompt_len)], trace, None)
        arrays = Arrays(trace)
        arrays.begin(iteration)
        off = 0.03 if name == "qwen1.5-moe-chat" else 0.012
        for layer in range(trace.n_layers):
            gate = Spoken(layer, iteration, dict(iteration.chosen(layer)), arrays)
            np.testing.assert_allclose(gate.weights_of(gate.ids), gate.weights, rtol=0.09, atol=off)
