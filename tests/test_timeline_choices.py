"""Waiting hosts, CPU results computed ahead and experts in a lower precision, worked out by hand.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s (CPU: 5 s), a token's hidden state 1 s each way,
attention 1 s, head 1 s; gates and everything the host does take no time.
"""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import run

from sim.base.errors import IllegalDecision
from sim.policy.api import Assignment, Policy
from sim.policy.decisions import Fetch, RunCpu, RunCpuAhead, RunGpu, Wait
from sim.workload.iterations import PREFILL


class Synchronous(Policy):
    """Fetches one expert after the other and waits for each, as a pageable copy on the current stream does."""

    waits = True

    def gate_done(self, gate, view):
        for expert in gate.needs:
            ticket = yield Fetch(view.piece(gate.layer, expert))
            if self.waits:
                yield Wait((ticket,))
        for expert in gate.needs:
            yield RunGpu(expert)


def test_a_waiting_host_launches_nothing_meanwhile(tmp_path):
    # attention 0..1, copies 1..11 and 11..21. Waiting: both experts are launched at 21 and run 21..23, 23..25.
    # Not waiting: the first runs as soon as it is there, 11..13.
    rows, lengths = [[[0, 1]]], [(1, 1)]
    seen = run(Synchronous(), tmp_path, rows, room=2, lengths=lengths)
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 21, 23), ("expert 0.1", 23, 25), ("head", 25, 26)]
    # The stream idles 1..21 because the copies are under way, whoever waits for them.
    assert seen.machine.parts_s() == [6, 20, 0, 0, 0, 0, 0]
    policy = Synchronous()
    policy.waits = False
    assert run(policy, tmp_path, rows, room=2, lengths=lengths).lane("gpu")[1] == ("expert 0.0", 11, 13)


class Ahead(Policy):
    """In layer 0, computes an expert of layer 1 on the CPU; layer 1 takes its result if it is asked for."""

    traits = frozenset({"cpu", "lossy"})
    guess = 0

    def initial(self, view):
        return [view.piece(0, 0), view.piece(1, 1)]

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield RunCpuAhead(1, self.guess, 1)
        for expert in gate.needs:
            yield RunCpu(expert) if (gate.layer, expert) == (1, 0) else RunGpu(expert)


def test_a_result_computed_ahead_is_ready_when_asked_for(tmp_path):
    # attention 0: 0..1. Ahead: hidden state down 1..2, CPU 2..7, up 7..8. Expert 0.0 runs 1..3, attention 1: 3..4.
    # The head waits for the result: 8..9. Computed when asked, at 4: down 4..5, CPU 5..10, up 10..11, head 11..12.
    seen = run(Ahead(), tmp_path, [[[0], [0]]], room=2, lengths=[(1, 1)], n_experts=2)
    assert seen.lane("cpu") == [("expert 1.0", 2, 7)]
    assert seen.end_s == 9
    assert seen.classes("prefill") == {"hit": 1, "cpu": 1}

    # Guessed wrong: expert 2 was computed in vain, and 0 is computed after it.
    policy = Ahead()
    policy.guess = 2
    seen = run(policy, tmp_path, [[[0], [0]]], room=2, lengths=[(1, 1)], n_experts=3)
    assert seen.lane("cpu") == [("expert 1.2", 2, 7), ("expert 1.0", 7, 12)]
    assert seen.outcome.report.counts.tally.n_executed == 2

    # A guess of one iteration does not serve the next: each computes its own.
    seen = run(Ahead(), tmp_path, [[[0], [1]], [[0], [1]]], room=2, lengths=[(1, 2)])
    assert [what for what, _, _ in seen.lane("cpu")] == ["expert 1.0", "expert 1.0"]


@pytest.mark.parametrize(
    ("layer", "expert", "n", "rule"),
    [
        (0, 0, 1, "a later layer"),
        (2, 0, 1, "a later layer"),
        (1, 9, 1, "a later layer"),
        (1, 0, 0, "one token"),
    ],
)
def test_what_cannot_be_computed_ahead(tmp_path, layer, expert, n, rule):
    class Wrong(Ahead):
        def gate_done(self, gate, view):
            yield RunCpuAhead(layer, expert, n)

    with pytest.raises(IllegalDecision, match=rule):
        run(Wrong(), tmp_path, [[[0], [0]]], room=2, lengths=[(1, 1)], n_experts=2)


class Lowered(Policy):
    """Lets every expert but the heaviest of a token run in int4 (a quarter of bf16)."""

    traits = frozenset({"lossy"})

    def assign(self, gate, view):
        return Assignment(gate.ids, gate.ids, {int(expert): "int4" for expert in gate.ids[0, 1:]})

    def gate_done(self, gate, view):
        for rank, expert in enumerate(gate.needs):
            piece = view.part(gate.layer, expert, 0.0, 1.0, "int4") if rank else view.piece(gate.layer, expert)
            if not view.holds(piece) and not view.resident(gate.layer, expert):
                yield Fetch(piece)
        for expert in gate.needs:
            yield RunGpu(expert)


def test_a_lower_precision_is_copied_kept_and_counted_as_such(tmp_path):
    # Layer 0 chooses 0 (bf16: 10 s) and 1 (int4: 2.5 s). Second token: 1 then 0: expert 1 is needed in bf16 now, and
    # its int4 copy does not do (10 s); 0 may be int4 and its bf16 copy does.
    seen = run(Lowered(), tmp_path, [[[0, 1]], [[1, 0]]], room=3, lengths=[(1, 2)])
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 11, 13.5), ("demand 0.1", 17.5, 27.5)]
    assert seen.classes("prefill") == {"miss": 2}
    assert seen.classes("decode") == {"miss": 1, "hit": 1}
    assert seen.result.activations_lowered_frac == 0.25  # 1 of the 4 that were executed
    assert seen.result.activations_changed_frac == 0.0

    # The other way round nothing has to be copied: int4 was there for what may be int4.
    seen = run(Lowered(), tmp_path, [[[0, 1]], [[0, 1]]], room=3, lengths=[(1, 2)])
    assert seen.classes("decode") == {"hit": 2}
    assert seen.result.activations_lowered_frac == 0.5


def test_a_lower_precision_nobody_allowed_does_not_do(tmp_path):
    class Sneaky(Lowered):
        def assign(self, gate, view):
            return None

    with pytest.raises(IllegalDecision, match="not on the GPU"):
        run(Sneaky(), tmp_path, [[[0, 1]]], room=3, lengths=[(1, 1)])


def test_an_unknown_precision_is_refused(tmp_path):
    class Odd(Lowered):
        def assign(self, gate, view):
            return Assignment(gate.ids, gate.ids, {0: "int5"})

    with pytest.raises(IllegalDecision, match="did you mean 'int"):
        run(Odd(), tmp_path, [[[0, 1]]], room=3, lengths=[(1, 1)])


def test_mass_nobody_recorded_is_not_invented(tmp_path):
    class Dropping(Policy):
        traits = frozenset({"lossy"})

        def assign(self, gate, view):
            ids = np.array(gate.ids)
            ids[:, 1] = -1
            return Assignment(ids, ids) if gate.phase == PREFILL else None

    seen = run(Dropping(), tmp_path, [[[0, 1]], [[0, 1]]], room=2, lengths=[(1, 2)])
    assert seen.result.gate_mass_kept is None
    assert seen.result.activations_changed_frac == 0.25


def test_matrices_launch_their_share_and_columns_launch_everything(tmp_path):
    # An expert of 2 kernels, each 1 s at least and 0.5 s to launch. Copies of halves: 1.5..6.5, 6.5..11.5 (attention
    # launched by 0.5). Halves of columns run 2 kernels each (2 s), of matrices 1 each (1 s).
    class Halves(Policy):
        by_matrix = True

        def gate_done(self, gate, view):
            parts = [view.part(0, 0, 0.0, 0.5), view.part(0, 0, 0.5, 1.0)]
            for part in view.matrices(0, 0, 2) if self.by_matrix else parts:
                yield Fetch(part)
            yield RunGpu(0)

    policy = Halves()
    seen = run(policy, tmp_path, [[[0]]], room=1, lengths=[(1, 1)], launch_s=0.5)
    assert seen.lane("gpu")[1:3] == [("expert 0.0", 6.5, 7.5), ("expert 0.0", 11.5, 12.5)]
    assert [end - start for what, start, end in seen.lane("host") if what == "launch expert 0.0"] == [0.5, 0.5]
    policy = Halves()
    policy.by_matrix = False
    seen = run(policy, tmp_path, [[[0]]], room=1, lengths=[(1, 1)], launch_s=0.5)
    assert seen.lane("gpu")[1:3] == [("expert 0.0", 6.5, 8.5), ("expert 0.0", 11.5, 13.5)]
    assert [end - start for what, start, end in seen.lane("host") if what == "launch expert 0.0"] == [1.0, 1.0]
