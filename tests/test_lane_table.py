"""The table of lanes says what machines, profiles and the calibration know of them."""

from __future__ import annotations

from calibrate.runner import PROBES
from sim.base.lanes import LANES, ON_DEVICE, WAITED_FOR
from sim.machine.lanes import CAUSES
from sim.profiles.hardware import Hardware
from sim.real.devices.work import COMPUTE, D2H, H2D, POOL


def test_causes_are_the_lanes_that_gpu_0_waits_for() -> None:
    assert (*(lane.name for lane in WAITED_FOR.values()), "idle") == CAUSES


def test_each_lane_is_priced_by_a_block_of_the_profile_and_measured_by_a_probe() -> None:
    probes = {probe.name for probe in PROBES}
    for lane in LANES:
        assert lane.block in Hardware.__struct_fields__
        assert lane.probe in probes


def test_a_device_has_its_lanes_in_this_order() -> None:
    assert [ON_DEVICE[index] for index in (COMPUTE, H2D, D2H, POOL)] == ["gpu", "h2d", "d2h", "cpu"]
