"""Time is charged down the chain: what a resource is charged is what the run gains when that resource is quicker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from easy_numbers import run
from quicker import MAKES, generic, run_of, worth

from policies.lru import Lru
from sim.base.errors import MoesimError
from sim.base.lanes import GPU, H2D, HOST
from sim.machine.runs import Paths
from sim.policy.api import Policy
from sim.policy.decisions import Predict, RunCpu
from sim.results.metrics import bottleneck

A_LITTLE = 1e-6
PER_CENT = 0.01
SLICES, WORLDS = 3, 12


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("slice_", range(SLICES))
def test_the_gain_from_a_quicker_resource_is_what_was_charged_to_it(tmp_path: Path, kind: str, slice_: int) -> None:
    """In random worlds, every decision kept: a millionth quicker, each resource shortens the run by a millionth of what
    is charged to it; a per cent quicker, none by more, as chains can only take over. So the one that is charged most
    shortens it by at least as much as any other, unless another chain is as long but for that per cent."""
    held = 0
    for seed in range(slice_ * WORLDS, (slice_ + 1) * WORLDS):
        try:
            of = generic(MAKES[kind](seed, tmp_path))
            path_s, gained_s, whole_s, decided_otherwise = worth(of, A_LITTLE)
            _, by_a_per_cent_s, _, moved = worth(of, PER_CENT)
        except MoesimError:
            continue
        assert math.fsum(path_s.values()) == pytest.approx(whole_s, rel=1e-9), of
        for name, gain_s in gained_s.items():
            if name not in decided_otherwise:
                assert gain_s == pytest.approx(path_s[name], abs=2e-6 * whole_s), f"{of}\n{name}"
            if name not in moved:
                assert by_a_per_cent_s[name] <= path_s[name] + 1e-9 * whole_s, f"{of}\n{name}"
        clockwork = run_of(of)[0]
        for name, phase in clockwork.phases.items():
            assert math.fsum(phase.path_s) == pytest.approx(phase.time_s, rel=1e-9, abs=1e-12), f"{of}\n{name}"
        named = bottleneck(clockwork.phases, drive=True).resource
        assert named is not None
        held += 1
    assert held >= WORLDS // 2


def test_down_the_chain_by_hand(tmp_path: Path) -> None:
    # attention 0..1; the copies of both experts 1..11 and 11..21, the experts 11..13 and 21..23, the head 23..24.
    # GPU 0 is idle 1..11 and 13..21. Back from the end: head, expert, both copies, attention.
    seen = run(Lru(), tmp_path, [[[0, 1]]], room=2, n_experts=2)
    shares = seen.result.bottleneck.prefill
    assert (shares.gpu, shares.copy) == (4 / 24, 20 / 24)


class Blocks(Policy):
    """Computes all on the CPU, and waits for a prediction before."""

    name = "blocks"
    traits = frozenset({"cpu"})

    def gate_done(self, gate: Any, view: Any) -> Any:
        yield Predict(7.0, "side", True)
        for expert in gate.needs:
            yield RunCpu(expert)


def test_what_the_host_waits_for_is_charged_to_what_it_waits_for(tmp_path: Path) -> None:
    # attention 0..1, the prediction 1..8, activations 8..9, the CPU 9..14, back 14..15, the head 15..16.
    seen = run(Blocks(), tmp_path, [[[0]]], room=1, n_experts=1)
    assert seen.outcome.report.phases["prefill"].path_s == [2, 1, 0, 5, 7, 0, 0, 1, 0]
    assert seen.result.bottleneck.resource == "predictor"
    assert seen.result.bottleneck.prefill.back == 1 / 16


def test_of_a_lane_that_stays_busy_only_its_stretch_is_kept() -> None:
    """A link that is busy over many settlements: what was charged before is known, and nothing else is kept of it."""
    paths = Paths()
    host, stream, link = (paths.of(lane, 0) for lane in (HOST, GPU, H2D))
    link.begin(2.0, HOST)
    for at_s in range(3, 1000):
        paths.busy_until_s[H2D] = at_s + 1.0
        assert sum(paths.settle(float(at_s))) == at_s
    stream.begin(1000.0, H2D)
    host.begin(1003.0, GPU)
    paths.busy_until_s[H2D] = 0.0
    assert list(paths.settle(1003.0)) == [3.0, 998.0, 2.0, 0, 0, 0, 0, 0, 0]
