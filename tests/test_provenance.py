"""What a result rests on: predictor time is charged to what its policy says it rests on, on every lane."""

from __future__ import annotations

import pytest
from easy_numbers import run

from sim.api import Policy, Steps
from sim.decisions import Predict, Serve
from sim.iterations import Gate, Iteration, RequestInfo
from sim.lanes import CAUSES
from sim.pieces import Piece
from sim.view import View


class Thinks(Policy):
    """Thinks for 4 s after every gate, then serves what was there from the start."""

    name, lane, basis, blocking = "thinks", "side", "datasheet", True

    def initial(self, view: View) -> list[Piece]:
        return [view.piece(0, 0)]

    def gate_done(self, gate: Gate, view: View) -> Steps:
        yield Predict(4.0, self.lane, blocking=self.blocking, basis=self.basis)  # type: ignore[arg-type]
        yield Serve()


@pytest.mark.parametrize("lane", ["side", "host", "gpu"])
def test_predictor_time_rests_on_what_the_policy_says(lane, tmp_path):
    # attention 1 s, then 4 s of thinking while the host is blocked, expert 2 s, head 1 s
    policy = type("ThinksHere", (Thinks,), {"lane": lane, "name": f"thinks_{lane}"})()
    seen = run(policy, tmp_path, [[[0]]], room=1)
    figures = {f["figure"]: f["share"] for f in seen.result["provenance"]["figures"]}
    assert seen.end_s == 8
    assert figures["predictor time (datasheet)"] == pytest.approx(4 / 8)
    assert seen.result["provenance"]["datasheet"] >= 4 / 8


class ThinksLater(Thinks):
    """Thinks for 3 s after every iteration, and for 5 s after every request."""

    name = "thinks_later"

    def gate_done(self, gate: Gate, view: View) -> Steps:
        yield Serve()

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        yield Predict(3.0, "host")

    def request_end(self, request: RequestInfo, view: View) -> Steps:
        yield Predict(5.0, "host")


def test_thinking_after_the_last_read_is_part_of_the_iteration(tmp_path):
    # attention 1 s, expert 2 s, head 1 s, then 3 s of thinking: 7 s a token, for two requests of a prompt and a token
    # with 5 s between them that belong to neither phase
    seen = run(ThinksLater(), tmp_path, [[[0]]] * 4, room=1, lengths=[(1, 2), (1, 2)])
    for phase in seen.outcome.clockwork.phases.values():
        assert phase.time_s == 14
        assert dict(zip(CAUSES, phase.parts_s, strict=True)) == {
            "gpu": 8, "h2d": 0, "host": 6, "cpu": 0, "predictor": 0, "idle": 0,
        }  # fmt: skip
