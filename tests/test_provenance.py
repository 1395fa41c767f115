"""What a result rests on: predictor time is charged to what its policy says it rests on, on every lane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from easy_numbers import figure, run, setup
from tiny_traces import from_rows

from policies.lru import Lru
from sim.machine.lanes import CAUSES
from sim.policy.api import Policy, Steps
from sim.policy.decisions import Predict, Serve
from sim.policy.pieces import Piece
from sim.policy.view import View
from sim.run import execute
from sim.workload.gate import Gate
from sim.workload.iterations import Iteration, RequestInfo
from traces.format.reader import Trace


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
    figures = {f.figure: f.share for f in seen.result.provenance.figures}
    assert seen.end_s == 8
    assert figures["predictor time (datasheet)"] == pytest.approx(4 / 8)
    assert seen.result.provenance.datasheet >= 4 / 8


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
    phases = seen.outcome.report.phases
    assert phases["mixed"].n_iterations == 0
    for phase in (phases["prefill"], phases["decode"]):
        assert phase.time_s == 14
        assert dict(zip(CAUSES, phase.parts_s, strict=True)) == {
            "gpu": 8,
            "h2d": 0,
            "host": 6,
            "cpu": 0,
            "predictor": 0,
            "nvme": 0,
            "idle": 0,
        }


def band_of(tmp_path: Path, **link: object) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """(shares by source, by figure; [lowest TTFT, highest]) of one token: 4 s of kernels, a copy of 10 s on `link`."""
    with Trace(from_rows(tmp_path / "t", [[[0]]])) as trace:
        made = setup(Lru(), trace, 1)
        bandwidth = msgspec.structs.replace(made.hw.h2d.bandwidth_bytes_per_s, **link)
        made = replace(
            made,
            hw=msgspec.structs.replace(
                made.hw, h2d=msgspec.structs.replace(made.hw.h2d, bandwidth_bytes_per_s=bandwidth)
            ),
        )
        result = execute(made).result
    assert result.ttft_s.mean == 14
    origin = result.provenance
    return origin.by_source(), {f.figure: f.share for f in origin.figures}, result.uncertainty.ttft_s


@pytest.mark.parametrize("name", ["per_copy_s", "per_expert_s", "per_layer_s"])
def test_what_a_framework_costs_rests_on_its_stack(tmp_path, name):
    # attention 1 s, expert 2 s, head 1 s, a copy in no time but for 1 s to enqueue it, and 3 s of the framework's own
    with Trace(from_rows(tmp_path / "t", [[[0]]])) as trace:
        made = setup(Lru(), trace, 1, copy_s=0, copy_launch_s=1.0)
        made = replace(made, stack=msgspec.structs.replace(made.stack, **{name: figure(3.0)}))
        result = execute(made).result
    assert result.ttft_s.mean == 8
    assert {f.figure: f.share for f in result.provenance.figures} == pytest.approx(
        {"gpu.kernel_floor_s": 4 / 8, "host.copy_launch_s": 1 / 8, f"engine.{name}": 3 / 8}
    )


def test_each_time_has_the_band_of_its_own_phase(tmp_path):
    # One expert, copied for the prompt (14 s, 10 of them on the link) and there for the next token (4 s of kernels).
    alone = run(Lru(), tmp_path, [[[0]]] * 2, room=1, lengths=[(1, 2)]).result
    assert alone.tpot_s.mean == 4
    assert alone.uncertainty.tpot_s == pytest.approx([4 * 0.7, 4 * 1.3])
    assert alone.uncertainty.ttft_s == pytest.approx([2.8 + 10 / 1.3, 5.2 + 10 / 0.7])
    factors = [(8 * 0.7 + 10 / 1.3) / 18, (8 * 1.3 + 10 / 0.7) / 18]
    assert [getattr(alone.uncertainty, f"{end}_factor") for end in ("low", "high")] == pytest.approx(factors)
    # Two together: the first one's TPOT holds the prefill of the second, so both are of the whole run.
    pair = run(Lru(), tmp_path, [[[0]]] * 4, room=1, lengths=[(1, 2), (1, 2)], batch=2).result
    factors = [getattr(pair.uncertainty, f"{end}_factor") for end in ("low", "high")]
    assert pair.uncertainty.tpot_s == pytest.approx([pair.tpot_s.mean * factor for factor in factors])
    assert pair.uncertainty.ttft_s != pytest.approx([pair.ttft_s.mean * factor for factor in factors])


def test_the_band_holds_the_choice_of_requests(tmp_path):
    # Two prompts, one that waits for its expert's copy and one that finds it: 14 s and 4 s, so 9 s +- 12.7 x 5 s.
    outcome = run(Lru(), tmp_path, [[[0]]] * 2, room=1, lengths=[(1, 1), (1, 1)]).result
    assert [outcome.ttft_s.mean, outcome.n_requests] == [9, 2]
    band = outcome.uncertainty
    assert band.sampling.ttft_s == pytest.approx([0, 9 + 12.7062047 * 5])
    assert (band.sampling.tpot_s, band.sampling.tpot_n, band.sampling.ttft_n) == (None, 0, 2)
    assert band.ttft_s == pytest.approx([0.0, (9 + 12.7062047 * 5) * band.high_factor])  # no time is negative
    # One request says nothing of others, so its band is that of the figures alone.
    one = run(Lru(), tmp_path, [[[0]]], room=1, lengths=[(1, 1)]).result
    assert one.uncertainty.sampling.ttft_s is None
    factors = [getattr(one.uncertainty, f"{end}_factor") for end in ("low", "high")]
    assert one.uncertainty.ttft_s == pytest.approx([14 * factor for factor in factors])


def test_shares_and_band_by_hand(tmp_path):
    # All assumed, 30 % either way: kernels 4 s x 0.7 to 1.3; a rate moves its time the other way, 10 s / 1.3 to / 0.7.
    sources, figures, band = band_of(tmp_path)
    assert sources == {"measured": 0, "datasheet": 0, "assumed": 1}
    assert figures == pytest.approx({"gpu.kernel_floor_s": 4 / 14, "h2d.bandwidth_bytes_per_s": 10 / 14})
    assert band == pytest.approx([2.8 + 10 / 1.3, 5.2 + 10 / 0.7])
    # A vendor's link, 15 %; a measured one, 5 %; and one whose file gives a range of its own: 8 to 20 bytes/s of 16.
    for link, spread in (({"source": "datasheet"}, 0.15), ({"source": "measured"}, 0.05)):
        sources, _, band = band_of(tmp_path, **link)
        assert sources[link["source"]] == pytest.approx(10 / 14)
        assert band == pytest.approx([2.8 + 10 / (1 + spread), 5.2 + 10 / (1 - spread)])
    assert band_of(tmp_path, source="measured", low=8.0, high=20.0)[2] == pytest.approx([2.8 + 8, 5.2 + 20])
