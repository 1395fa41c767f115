"""Measured curves: interpolation, what prices rest on, error bars, and how samples become figures."""

from __future__ import annotations

import math

import msgspec
import pytest
from easy_numbers import figure, hardware, model, stack

from calibrate.in_situ_file import Samples
from calibrate.in_situ_fit import curve, link, typical
from sim.base.errors import BadInput
from sim.machine.cost import Cost
from sim.options import RunSpec
from sim.profiles.curves import Curve, Curves
from sim.profiles.hardware import Ranges, load_hardware
from sim.results.provenance import Attribution, plus_minus
from sim.run import execute, prepare


def made(at, seconds, iqr=0.0, n=10):
    k = len(at)
    return Curve(at=tuple(at), seconds=tuple(seconds), iqr_s=(iqr,) * k, n=(n,) * k)


def test_between_points_linear_beyond_them_along_the_last_stretch():
    found = made((1.0, 4.0, 8.0), (2.0, 8.0, 10.0))
    assert [found.value(x) for x in (0.5, 1, 2, 4, 6, 8, 10)] == [2.0, 2.0, 4.0, 8.0, 9.0, 10.0, 11.0]
    assert [found.covers(x) for x in (0.5, 1, 8, 8.5)] == [False, True, True, False]
    falling = made((1.0, 2.0), (5.0, 4.0))
    assert falling.value(10) == 4.0, "noise at the end must not make long operations free"
    one = made((4.0,), (2.0,))
    assert [one.value(x) for x in (1, 4, 8)] == [2.0, 2.0, 4.0], "in proportion beyond a single point"


def priced(**operations):
    launches = {"expert": figure(0.5), "attention": figure(0.25), "begin": figure(0.125), "cpu_expert": figure(3.0)}
    curves = Curves(model="easy", precision="bf16", operations=operations, launches=launches)
    return msgspec.structs.replace(hardware(), curves=curves)


def test_prices_come_from_curves_for_their_own_model_alone():
    hw = priced(
        expert=made((1.0, 3.0), (4.0, 8.0)),
        gate=made((1.0,), (1.0,)),
        head=made((1.0,), (7.0,)),
        cpu_expert=made((1.0,), (9.0,)),
    )
    cost = Cost(hw, model(2, 4, 1), stack(), "bf16")
    assert cost.expert(2, "bf16").duration_s == 6.0
    assert cost.expert(1, "bf16", 0.5).duration_s == 2.5, "1 for handing over, and half of the other 3"
    assert (cost.head(1).duration_s, cost.expert_cpu(1).duration_s) == (7.0, 9.0)
    assert (cost.launches.expert.all_s, cost.launches.attention.all_s, cost.launches.begin_s, cost.launches.cpu_s) == (
        0.5,
        0.25,
        0.125,
        3.0,
    )
    assert cost.figures.entries[cost.expert(2, "bf16").attributed_to][0] == "curves.expert"
    assert not cost.measured.beyond
    cost.expert(5, "bf16")
    cost.expert(9, "bf16"), cost.expert(7, "bf16")
    assert cost.measured.beyond == {"expert at 9 tokens (measured: 1 to 3)"}, "the farthest alone"
    other = Cost(hw, msgspec.structs.replace(model(2, 4, 1), id="other"), stack(), "bf16")
    assert other.expert(2, "bf16").duration_s == 2.0, "two kernels of a second"
    assert other.measured.beyond == {"other in bf16, for which fits stand in (curves measured: easy in bf16)"}


def test_unpacking_is_priced_where_it_was_measured():
    hw = priced(expert=made((1.0, 3.0), (4.0, 8.0)), gate=made((1.0,), (1.0,)), unpack=made((2.0, 4.0), (10.0, 20.0)))
    cost = Cost(hw, model(2, 4, 1), stack(), "bf16")
    assert cost.expert(1, "int4").duration_s == 24.0
    assert cost.expert(1, "int2", 0.5).duration_s == 1 + 0.5 * (3 + 10)
    assert not cost.measured.beyond
    assert cost.expert(1, "int8").duration_s == 4.0
    assert cost.measured.beyond == {"unpacking int8, not measured and taken to cost nothing"}


def test_fits_asked_for_more_than_they_rest_on_say_so():
    ranges = Ranges(
        copy_bytes=(10.0, 200.0), expert_tokens=(1.0, 4.0), cpu_expert_tokens=(1.0, 2.0), context_tokens=(8.0, 16.0)
    )
    cost = Cost(msgspec.structs.replace(hardware(), ranges=ranges), model(2, 4, 1), stack(), "bf16")
    cost.copies.h2d_s(200), cost.copies.d2h_s(5), cost.expert(4, "bf16"), cost.expert_cpu(2)
    assert not cost.measured.beyond
    rounded = msgspec.structs.replace(hardware(), ranges=Ranges(copy_bytes=(1.0, 12582900.0)))
    long = Cost(rounded, model(2, 4, 1), stack(), "bf16")
    long.copies.h2d_s(12_582_912)
    assert not long.measured.beyond, "six digits of the very size that was measured"
    cost.copies.h2d_s(300), cost.expert(5, "bf16"), cost.expert_cpu(3)
    assert cost.measured.beyond == {
        "copy at 300 bytes (measured: 10 to 200)",
        "expert at 5 tokens (measured: 1 to 4)",
        "cpu_expert at 3 tokens (measured: 1 to 2)",
    }


def test_error_bars_add_in_quadrature():
    rows = [
        Attribution("a", "measured", 3.0, 1, 1, 1.0, "", 0.1349),
        Attribution("b", "measured", 1.0, 1, 1, 1.0, "", 0.4047),
    ]
    assert plus_minus(rows, 4.0) == pytest.approx(math.hypot(0.75 * 0.1, 0.25 * 0.3))
    unknown = Attribution("c", "assumed", 1.0, 1, 1, 1.0, "", None)
    assert plus_minus([*rows, unknown], 5.0) is None, "a fifth rests on no samples"


def test_samples_become_figures():
    assert typical([1.0] * 39 + [1000.0]) == 1.0, "one pause of the machine is left out"
    assert typical([1.0, 3.0]) == 2.0, "a mean, because only means add up"
    samples = Samples()
    for at, seconds in ((16, 1.0), (17, 3.0), (18, 2.0), (64, 9.0)):
        samples.add("expert", at, "case", seconds)
    found = curve(samples, "expert")
    assert found["at"] == [18.0], "near ones are pooled, and one sample is none"
    assert found["seconds"] == [2.0]
    up = link({1024: [1e-4] * 5, 3 << 20: [1e-4 + 3e-4] * 5})
    assert up["bandwidth_bytes_per_s"]["value"] == pytest.approx(((3 << 20) - 1024) / 3e-4)
    assert up["latency_s"]["value"] == pytest.approx(1e-4, rel=0.01)
    assert link({1024: [1e-4] * 5}) is None
    assert link({1024: [1e-4] * 5, 4096: [2e-4] * 5}) is None, "too close to tell latency and bandwidth apart"


@pytest.mark.parametrize("small_s", [3e-4, 2.9e-4, 5e-4])
def test_small_copies_that_took_as_long_as_large_ones_make_no_endless_bandwidth(small_s):
    """On a busy machine: version 0.1 wrote 3e15 bytes per second, which no profile may hold."""
    large = [2.5e-4, 2.9e-4, 3e-4, 3.1e-4, 3.5e-4]
    up = link({1024: [small_s] * 5, 3 << 20: large})
    assert up["bandwidth_bytes_per_s"]["value"] == pytest.approx((3 << 20) / 3e-4)
    assert up["latency_s"]["value"] == pytest.approx(0.0, abs=1e-12)
    assert "idle machine" in up["latency_s"]["note"]


def test_a_broken_curve_is_refused(tmp_path):
    hw = msgspec.to_builtins(load_hardware("rtx3090"))
    path = tmp_path / "x.yaml"
    good = {"at": [1.0, 2.0], "seconds": [1e-3, 2e-3], "iqr_s": [0.0, 0.0], "n": [1, 1]}
    for change in ({"at": [2.0, 1.0]}, {"seconds": [1e-3]}, {"seconds": [1e-3, -1.0]}):
        operations = {"expert": {**good, **change}}
        path.write_text(
            msgspec.yaml.encode(hw | {"curves": {"model": "m", "precision": "fp32", "operations": operations}}).decode()
        )
        with pytest.raises(BadInput, match=r"curves\.operations\.expert"):
            load_hardware(path)


def test_results_say_what_lies_beyond_the_measured_range(tmp_path):
    hw = msgspec.to_builtins(load_hardware("rtx3090"))
    quantity = {"value": 1e-5, "source": "measured", "iqr": 1e-6, "n": 9}
    operations = {
        name: {"at": [1.0], "seconds": [1e-3], "iqr_s": [1e-4], "n": [50]}
        for name in ("attention", "attention_decode", "gate", "expert", "head")
    }
    curves = {"model": "cpu-small", "precision": "fp32", "operations": operations, "launches": {"expert": quantity}}
    path = tmp_path / "x.yaml"
    path.write_text(msgspec.yaml.encode(hw | {"curves": curves}).decode())
    setup = prepare(RunSpec(policy="lru", hw=str(path), model="cpu-small", precision="fp32", requests=1))
    result = execute(setup, bounds=False).result
    setup.close()
    assert any(label.startswith("beyond the calibrated range: attention at ") for label in result.caveats)
