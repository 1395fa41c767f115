"""What `moesim validate` makes of given numbers: verdicts, medians, the order of policies, where decisions part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from calibrate import duplex
from sim.figures import Copies, HitRates, Statistic
from sim.options import RunSpec
from sim.real.order import grouped, order, told
from sim.real.validate import Case, World, compared, judge, parts_at, summary


def test_slow_downs_are_worked_out_from_overlap():
    # Alone 10 s, a term of 0.5. Beside the other way all along: 15 s. For 6 s, which do 4 s of work: 6 + 6 s.
    assert duplex.slowdown([(15.0, 15.0)] * 40, 10.0)["value"] == pytest.approx(0.5)
    assert duplex.slowdown([(12.0, 6.0), (15.0, 15.0), (10.0, 0.0)] * 20, 10.0)["value"] == pytest.approx(0.5)
    assert duplex.slowdown([(9.0, 9.0)] * 40, 10.0)["value"] == 0.0
    assert duplex.slowdown([(300.0, 280.0)] * 40, 10.0)["value"] == 1.0, "two share what one has alone"
    paused = [(15.0, 15.0)] * 78 + [(900.0, 20.0)] * 2
    assert duplex.slowdown(paused, 10.0)["value"] == pytest.approx(0.5), "pauses of the machine do not count"
    assert duplex.slowdown([(15.0, 15.0)] * 10, 10.0) is None
    assert duplex.slowdown([(10.0, 0.5)] * 40, 10.0) is None, "hardly ever beside"
    assert duplex.ratio_down({"up": [1.0] * 5, "down": [2.0] * 5}) == 2.0
    assert duplex.rate_down({"up": [1.0] * 5, "down": [2.0] * 5}, {"value": 8e9})["value"] == 4e9
    assert duplex.rate_down({"up": [1.0]}, {"value": 8e9}) is None


def test_decisions_that_part_and_bytes_that_differ_are_wrong():
    pair = {"predicted": 1.0, "measured": 1.0, "error_frac": 0.0}
    parted = {"identical": False, "part_at": 7, "predicted": [("fetch", 0, 1)], "measured": []}
    found = {"tpot_s": pair, "ttft_s": pair, "traits": ["evicts_eagerly"]}
    found |= {"bytes": {"asked_bytes": pair}, "decisions": parted}
    assert "decisions part at entry 7" in judge(found, 0.1)[0]
    found["traits"] = ["timing"]
    assert judge(found, 0.1) == []
    found |= {"traits": [], "decisions": {"identical": True}, "bytes": {"asked_bytes": {"predicted": 5, "measured": 4}}}
    assert judge(found, 0.1) == ["bytes asked for: 5 predicted, 4 measured"]


def test_ranks_and_medians():
    def case(budget, predicted, measured):
        pair = {"predicted": predicted, "measured": measured, "error_frac": predicted / measured - 1}
        return {"cache_capacity_bytes": budget, "tpot_s": pair, "ttft_s": pair}

    cases = [case(1, 1.0, 1.0), case(1, 2.0, 4.0), case(1, 3.0, 3.0), case(2, 1.0, 2.0)]
    assert summary(cases)["tpot_s_worst_error_frac"] == 0.5
    assert summary(cases)["tpot_s_median_error_frac"] == pytest.approx(0.25)


def test_times_within_the_noise_are_ties():
    assert grouped([3.0, 1.0, 2.0], 0.5) == [2, 0, 1]
    assert grouped([1.0, 1.4, 1.6, 2.2], 0.5) == [0, 0, 1, 2], "a group spans no more than the noise"
    assert grouped([5.0, 5.0], 0.0) == [0, 0]


def ordered(*times, sd=0.0, **more):
    """Comparisons of policies with (predicted, measured) times, each measured twice, `sd` apart in the deviation."""
    return [
        {
            "policy": str(i),
            "model": "m",
            "cache_capacity_bytes": 2_000_000,
            "decode_iqr_frac": 0.1,
            "tpot_s": {"predicted": a, "measured": b},
            "decode_tokens": 100,
            "repeats": {"tpot_s": [b - sd / 2**0.5, b + sd / 2**0.5]},
            **more,
        }
        for i, (a, b) in enumerate(times)
    ]


def test_the_order_of_policies_counts_only_where_it_can_be_told():
    # Standard deviation of one run 0.01 s, so 0.00707 s of a mean of two and 0.01 s of a difference: noise 0.02 s.
    where = "m at 2 MB"
    right = order(ordered((0.10, 0.11), (0.20, 0.19), (0.30, 0.33), sd=0.01))[where]
    assert right["noise_s"] == pytest.approx(0.02)
    assert right["tau_b"] == pytest.approx(1.0)
    assert (right["pairs"], right["pairs_apart"], right["pairs_agree"]) == (3, 3, 3)
    # The first two swap places, by less than the noise: a tie in both worlds, and nothing is wrong.
    tied = order(ordered((0.100, 0.105), (0.105, 0.100), (0.30, 0.33), sd=0.01))[where]
    assert tied["tau_b"] == pytest.approx(1.0)
    assert (tied["pairs_apart"], tied["pairs_agree"]) == (2, 2)
    # They swap by more than the noise: of three pairs one is discordant, tau = (2 - 1) / 3.
    wrong = order(ordered((0.10, 0.19), (0.20, 0.11), (0.30, 0.33), sd=0.01))[where]
    assert wrong["tau_b"] == pytest.approx(1 / 3)
    assert wrong["pairs_agree"] == 2
    # A tie measured where a difference was predicted: 2 concordant pairs, tau-b = 2 / sqrt(3 x 2).
    half = order(ordered((0.10, 0.100), (0.20, 0.105), (0.30, 0.33), sd=0.01))[where]
    assert half["tau_b"] == pytest.approx(2 / 6**0.5)
    none = order(ordered((0.10, 0.101), (0.101, 0.10), (0.102, 0.1), sd=0.01))[where]
    assert none["tau_b"] is None
    assert "no two of them differ by more than the noise (20.0 ms)" in told(where, none)
    assert "Kendall's tau-b 0.33, differences within the noise (20.0 ms) taken as ties" in told(where, wrong)
    assert order(ordered((0.1, 0.1), (0.2, 0.2))) == {}, "two policies make no order"
    # One run alone: its iterations' IQR, 0.1 x 0.1349 s / 1.349 = 0.01 s, over 100 of them: 0.001 s of the mean.
    single = order(ordered((0.1, 0.1349), (0.2, 0.1349), (0.3, 0.1349), repeats={"tpot_s": [0.1349]}))[where]
    assert single["noise_s"] == pytest.approx(2 * 2**0.5 * 0.001)


def test_an_order_whose_noise_nobody_knows_is_none():
    few = ordered((0.1, 0.1), (0.2, 0.2), (0.3, 0.3), repeats={"tpot_s": [0.1]}, decode_iqr_frac=None)
    row = order(few)["m at 2 MB"]
    assert row["tau_b"] is None
    assert "the noise is not known, too little was measured; give --repeat 2" in told("m at 2 MB", row)


def test_where_logs_part():
    assert parts_at([("fetch", 0, 1)], [("fetch", 0, 1)]) is None
    assert parts_at([("fetch", 0, 1), ("gpu", 0, 1)], [("fetch", 0, 1), ("gpu", 0, 2)]) == 1
    assert parts_at([("fetch", 0, 1)], []) == 0


def test_of_several_runs_the_one_that_decides_otherwise_is_told():
    def world_of(log, tpot_s, n_bytes=6):
        statistic = Statistic(tpot_s, None, None, None, 1)
        result = SimpleNamespace(
            policy="p",
            params={},
            hw="h",
            model="m",
            trace="t",
            precision="fp32",
            device="d",
            n_requests=1,
            cache_capacity_bytes=[4],
            decode_tokens=3,
            ttft_s=statistic,
            tpot_s=statistic,
            uncertainty=SimpleNamespace(plus_minus_frac=0.1),
            h2d_bytes=n_bytes,
            d2h_bytes=0,
            caveats=[],
            demand_copies=Copies(1, n_bytes),
            prefetch=SimpleNamespace(issued=Copies(0, 0)),
            lane_utilisation={},
            phases=SimpleNamespace(n_iterations=2),
            hit_rates=HitRates(*[tpot_s] * 7),
        )
        return World(result, log, {("gpu", "expert"): tpot_s}, 0.0, {"decode": [tpot_s] * 4})

    same, other = [("fetch", 0, 1)], [("fetch", 0, 2)]
    case = Case(
        RunSpec(policy="p", hw="h"),
        sim=world_of(same, 1.0),
        reals=[world_of(same, 1.0), world_of(other, 4.0, 7), world_of(same, 2.5)],
    )
    found = compared(case)
    assert found["tpot_s"]["measured"] == 2.5, "the median"
    assert found["classes"]["hit_rate"]["measured"] == 2.5, "the mean"
    assert found["operations"]["gpu: expert"]["measured_s"] == 7.5 / 3 / 2
    assert found["decisions"]["measured"] == other
    assert found["bytes"]["asked_bytes"]["measured"] == 7
