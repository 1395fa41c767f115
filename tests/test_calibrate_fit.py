"""Statistics and fits on a clock that says what it is told: exact expectations, no device."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

from calibrate.derive import Table, TimedWork, fit_copy, fit_roofline, link, slowdown, together
from calibrate.profile import contention
from calibrate.stats import Effort, advice, measure, summarise
from calibrate.store import Record, Store
from sim.base.errors import BadInput


class FakeClock:
    """Each call takes `call_s`, plus what `extra_s` yields per block; keeps the block sizes it was asked for."""

    name = "fake"

    def __init__(self, call_s: float, extra_s: Iterable[float] = ()) -> None:
        self.call_s, self._extra, self.asked, self.now_s = call_s, iter(extra_s), [], 0.0

    def total_s(self, call, n):
        for _ in range(n):
            call()
        self.asked.append(n)
        block_s = n * self.call_s + next(self._extra, 0.0)
        self.now_s += block_s
        return block_s

    def now(self):
        return self.now_s


def test_blocks_grow_until_the_clock_can_see_them():
    clock = FakeClock(1e-4)
    samples = measure(lambda: None, clock, Effort(n_samples=5, min_block_s=1e-3, max_calls=64, max_s=10), clock.now)
    # One warm-up, one block of 1 (0.1 ms), then 8 times as many (0.8 ms), then 16 (1.6 ms, long enough), five kept.
    assert clock.asked == [1, 1, 8, 16, 16, 16, 16, 16, 16]
    assert samples.calls == 16
    assert samples.samples_s == pytest.approx([1e-4] * 5)


def test_a_time_box_ends_a_slow_point_with_three_samples():
    clock = FakeClock(0.3)
    samples = measure(lambda: None, clock, Effort(n_samples=20, max_s=0.4), clock.now)
    assert len(samples.samples_s) == 3


def test_the_first_call_is_never_a_sample():
    clock = FakeClock(2e-3, extra_s=[5.0])
    assert max(measure(lambda: None, clock, Effort(n_samples=4, max_s=60), clock.now).samples_s) == pytest.approx(2e-3)


def test_median_and_quartiles():
    summary = summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary.median, summary.low, summary.high, summary.n) == (3.0, 2.0, 4.0, 5)
    assert summary.iqr == 2.0 and summary.noise_frac == pytest.approx(2 / 3) and summary.noisy


def test_noise_is_flagged_above_a_tenth_with_what_to_do():
    assert advice("copy", summarise([1.0, 1.0, 1.05, 1.1, 1.1])) is None
    assert advice("copy", summarise([1.0, 1.0, 1.05, 1.2, 1.3])) == (
        "copy: IQR is 19 % of the median over 5 blocks; give it more --minutes"
    )
    assert "close other work" in str(advice("copy", summarise([1.0, 2.0] * 8)))


def test_a_copy_fit_finds_latency_and_bandwidth_exactly():
    sizes = [4**k for k in range(8, 16)]
    fit = fit_copy(sizes, [8e-6 + n / 5.3e10 for n in sizes])
    assert fit.params["latency_s"] == pytest.approx(8e-6, rel=1e-6)
    assert fit.params["bandwidth_bytes_per_s"] == pytest.approx(5.3e10, rel=1e-6)
    assert fit.worst_frac < 1e-6


def test_one_disturbed_point_does_not_bend_a_copy_fit():
    sizes = [4**k for k in range(8, 16)]
    seconds = [8e-6 + n / 5.3e10 for n in sizes]
    seconds[3] *= 2
    fit = fit_copy(sizes, seconds)
    assert fit.params["bandwidth_bytes_per_s"] == pytest.approx(5.3e10, rel=0.02)
    assert fit.residuals[3] == pytest.approx(-0.5, abs=0.02)


def test_a_roofline_finds_bandwidth_rate_and_overhead_over_two_sizes():
    work = []
    for weights in (1.7e7, 3.5e8):
        for n in (1, 4, 16, 64, 256, 1024, 4096):
            flops = weights * n
            work.append(TimedWork(weights, flops, max(weights / 2.8e12, flops / 7e14) + 3e-6))
    fit = fit_roofline(work, 1e-6, overhead=True)
    assert fit.params["bandwidth_bytes_per_s"] == pytest.approx(2.8e12, rel=1e-3)
    assert fit.params["flops_per_s"] == pytest.approx(7e14, rel=1e-3)
    assert fit.params["overhead_s"] == pytest.approx(3e-6, rel=1e-2)


def test_one_size_leaves_the_overhead_at_zero():
    work = [TimedWork(1e8, 1e8 * n, max(1e8 / 1e12, 1e8 * n / 5e13)) for n in (1, 8, 64, 512)]
    fit = fit_roofline(work, 1e-6, overhead=True)
    assert fit.params["overhead_s"] == 0.0
    assert fit.params["flops_per_s"] == pytest.approx(5e13, rel=1e-3)


def record(probe, key, samples_s, n_round=0, **extra):
    return Record(probe, key, n_round, "ok", "fake", 1, tuple(samples_s), extra)


def test_rounds_are_pooled_and_a_point_skipped_once_but_measured_later_is_measured():
    key = {"what": "launch"}
    table = Table(
        [
            record("host", key, [1.0, 2.0]),
            record("host", key, [3.0], 1),
            Record("host", key, 2, "skipped", why="late"),
            Record("host", {"what": "x"}, 0, "failed"),
        ]
    )
    assert table.one("host", what="launch").summary.median == 2.0
    assert table.skipped == [] and [r.key for r in table.failed] == [{"what": "x"}]


def test_a_link_needs_three_sizes():
    points = [
        record(
            "copy", {"direction": "h2d", "memory": "pinned", "pattern": "queued", "n_bytes": n}, [1e-5 + n / 1e10] * 3
        )
        for n in (65536, 1 << 20, 1 << 24)
    ]
    assert link(Table(points[:2]), "h2d", "pinned") is None
    assert link(Table(points), "h2d", "pinned").fit.params["bandwidth_bytes_per_s"] == pytest.approx(1e10, rel=1e-4)


def test_a_slowdown_is_the_extra_share_and_needs_a_background_that_lasted():
    alone = record("contention", {"what": "gpu_by_h2d", "state": "alone", "n_tokens": 1}, [1.0] * 5)
    both = record("contention", {"what": "gpu_by_h2d", "state": "both", "n_tokens": 1}, [1.2] * 5, covered=[1.5] * 5)
    short = record("contention", {"what": "gpu_by_h2d", "state": "both", "n_tokens": 1}, [1.2] * 5, covered=[0.4] * 5)
    assert slowdown(Table([alone, both]), "gpu_by_h2d", n_tokens=1)["value"] == pytest.approx(0.2)
    assert slowdown(Table([alone, short]), "gpu_by_h2d", n_tokens=1) is None
    assert slowdown(Table([both]), "gpu_by_h2d", n_tokens=1) is None


BOTH = (("cpu", "h2d"), ("h2d", "cpu"))


def gathered(cpu_both_s=2e-3, covered=1.0):
    """4 MB on the CPU in 1 ms alone, 2 ms together; 2 MB gathered in 0.1 ms alone, 0.125 together."""
    moved = {"cpu_bytes": 4_000_000, "copy_bytes": 2_000_000}
    key = {"work": "cpu_expert", "n_tokens": 1, "threads": 8, **moved}
    return [
        record("contention", {"what": "cpu_by_gather", **key, "state": "alone"}, [1e-3] * 3),
        record("contention", {"what": "cpu_by_gather", **key, "state": "both"}, [cpu_both_s] * 3, covered=[covered]),
        record("contention", {"what": "gather_by_cpu", **moved, "state": "alone"}, [1e-4] * 3),
        record("contention", {"what": "gather_by_cpu", **key, "state": "both"}, [1.25e-4] * 3),
    ]


def test_what_memory_gives_at_once_is_the_most_that_was_seen():
    # 4 and 20 GB/s alone; together 2 + 16 = 18, less than the copies alone
    pair = together(Table(gathered()), 8)
    assert [*pair.rates[0], *pair.rates[1]] == pytest.approx([4e9, 2e10, 2e9, 1.6e10])
    assert pair.most == pytest.approx(2e10)
    assert together(Table(gathered(cpu_both_s=5e-4)), 8).most == pytest.approx(8e9 + 1.6e10)
    assert together(Table(gathered(covered=0.5)), 8) is None, "the copies ended before the experts"
    assert together(Table(gathered()[1:]), 8) is None
    assert together(Table(gathered()), 4) is None


def test_terms_of_gathered_experts_go_before_those_of_large_copies():
    key = {"work": "cpu_expert", "n_tokens": 1, "threads": 8}
    large = [
        record("contention", {"what": "cpu_by_h2d", **key, "state": "alone"}, [1e-3] * 3),
        record("contention", {"what": "cpu_by_h2d", **key, "state": "both"}, [1.1e-3] * 3, covered=[1.0]),
        record("contention", {"what": "h2d_by_cpu", "state": "alone"}, [1e-3] * 3),
        record("contention", {"what": "h2d_by_cpu", **key, "state": "both"}, [1.2e-3] * 3),
    ]
    terms = contention(Table(large), 8)
    assert [terms[f"{one}_slowdown_by_{two}"]["value"] for one, two in BOTH] == pytest.approx([0.1, 0.2])
    terms = contention(Table(large + gathered()), 8)
    assert [terms[f"{one}_slowdown_by_{two}"]["value"] for one, two in BOTH] == pytest.approx([1.0, 0.25])
    assert all("gathered" in terms[f"{one}_slowdown_by_{two}"]["note"] for one, two in BOTH)


def test_a_damaged_sample_file_names_the_line(tmp_path):
    import gzip

    path = tmp_path / "x.samples.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"format": 1}\n{"probe": "host"}\n'))
    with pytest.raises(BadInput, match=r"samples.jsonl.gz line 2: not a sample record"):
        Store.load(path)
    path.write_bytes(b"not gzip")
    with pytest.raises(BadInput, match="cannot be read"):
        Store.load(path)
    path.write_bytes(gzip.compress(b'{"format": 9}\n'))
    with pytest.raises(BadInput, match="got format 9: this version reads 1"):
        Store.load(path)


def lane_samples(model: str, n_bytes: int, device: str = "Some GPU"):
    """What `in_situ.run` gives: one kind of operation, copies of one expert's size and of a row."""
    from calibrate.in_situ_file import Samples

    found = Samples(
        copies={8192: [1e-5] * 5, n_bytes: [1e-5 + n_bytes / 50e9] * 5},
        sends={8192: [2e-5] * 5},
        verbs={
            "sync": {"1: lru@1": [1e-5] * 5},
            "before sync": {"1: lru@1": [1e-6] * 5},
            "launch expert": {"1: lru@1": [3e-5] * 5, "2: lru@0.25": [4e-5] * 5, "3: llama_cpp@0.5": [9e-3] * 50},
        },
    )
    for _ in range(5):
        found.add("expert", 1.0, "lru@1", n_bytes / 3e12)
        found.add("cpu_expert", 1.0, "llama_cpp@0.5", n_bytes / 50e9)
    found.environment = {
        "model": model,
        "precision": "bf16",
        "device": device,
        "cores": 16,
        "load": [0.1],
        "machine": {
            "cpu": "Some CPU",
            "cores": {"physical": 16},
            "memory_bytes": 1 << 37,
            "versions": {"torch": "2.9"},
        },
        "measured": "2026-01-01T00:00:00Z",
    }
    return found


def test_one_profile_holds_curves_of_several_models(tmp_path):
    import yaml

    from calibrate import in_situ_fit
    from sim.machine.cost import Cost
    from sim.profiles.find import find
    from sim.profiles.hardware import load_hardware
    from sim.profiles.models import load_model
    from sim.profiles.stack import load_stack

    plain = yaml.safe_load(find("hwprofiles.gpus", "hardware profile", "h100-sxm").read_text())
    sizes = {"mixtral-8x7b": 352321536, "qwen1.5-moe-a2.7b": 17301504}
    first, second = (lane_samples(name, size) for name, size in sizes.items())
    data = in_situ_fit.apply({**plain, "contention": {}}, first, "mine", [second])
    assert data["h2d_pageable"] == plain["h2d_pageable"], "a GPU's pageable copies are not its page-locked ones"
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                **plain,
                "id": "mine",
                "aliases": [],
                "curves": data["curves"],
                "more_curves": data["more_curves"],
                "sources": {**plain["sources"], "lanes": "x"},
            }
        )
    )
    hw = load_hardware(path)
    for name, size in sizes.items():
        cost = Cost(hw, load_model(name), load_stack("bare"), "bf16")
        assert cost.expert_cpu_s(1) == pytest.approx(size / 50e9, rel=1e-3)
    other = Cost(hw, load_model("deepseek-moe-16b"), load_stack("bare"), "bf16")
    assert other.expert_cpu_s(1) != pytest.approx(17301504 / 50e9, rel=1e-3), "its own roofline"


class TestWhatLanesSayOfAGpu:
    """Its kernels and its link were measured alone; runs say what the host pays, and what they add to a copy."""

    def applied(self, device):
        import yaml

        from calibrate import in_situ_fit
        from sim.profiles.find import find

        plain = yaml.safe_load(find("hwprofiles.gpus", "hardware profile", "h100-sxm").read_text())
        plain["ranges"] = {"copy_bytes": [65536.0, 1073741824.0]}
        plain["contention"] = {"gpu_slowdown_by_h2d": {"value": 0.1, "source": "measured", "ref": "samples"}}
        samples = lane_samples("mixtral-8x7b", 352321536, device)
        return plain, in_situ_fit.apply(plain, samples, "mine")

    def test_its_own_operations_are_left_to_kernels_measured_alone(self):
        """What lies between an event before the first kernel and one after the last is mostly their launching."""
        _, data = self.applied("Some GPU")
        assert list(data["curves"]["operations"]) == ["cpu_expert"]
        assert list(self.applied("CPU backend")[1]["curves"]["operations"]) == ["expert", "cpu_expert"]

    def test_its_link_has_the_bandwidth_it_has_alone(self):
        """10 us + bytes / 50 GB/s in runs, on a link of 55: what a run adds is in every copy's latency."""
        plain, data = self.applied("Some GPU")
        alone = plain["h2d"]["bandwidth_bytes_per_s"]
        assert data["h2d"]["bandwidth_bytes_per_s"] == alone
        added_s = 1e-5 + 352321536 * (1 / 50e9 - 1 / float(alone["value"]))
        assert data["h2d"]["latency_s"]["value"] == pytest.approx(added_s)
        assert data["ranges"]["copy_bytes"] == [8192.0, 1073741824.0], "measured alone, or in runs"
        on_threads = self.applied("CPU backend")[1]["h2d"]
        assert on_threads["bandwidth_bytes_per_s"]["value"] == pytest.approx(50e9, rel=1e-3)

    def test_slow_downs_of_what_was_measured_alone_stay(self):
        """Those inside the samples are not billed twice, the others are still to be billed."""
        plain, data = self.applied("Some GPU")
        assert data["contention"]["gpu_slowdown_by_h2d"] == plain["contention"]["gpu_slowdown_by_h2d"]
        assert data["contention"]["cpu_slowdown_by_h2d"]["value"] == 0.0
        assert self.applied("CPU backend")[1]["contention"]["gpu_slowdown_by_h2d"]["value"] == 0.0

    def test_no_single_run_decides_what_launching_costs(self):
        """Means of 30 us, 40 us, and 9 ms in the run whose blocks waited for the CPU: the middle one."""
        _, data = self.applied("Some GPU")
        found = data["curves"]["launches"]["expert"]
        assert found["value"] == pytest.approx(4e-5)
        assert found["n"] == 60

    def test_a_gpus_latency_is_that_of_the_smallest_experts(self):
        """A tenth of a link's rate lost on 352 MB would be 640 us, which no copy of 17 MB should pay."""
        from calibrate.in_situ_fit import beside_bytes

        alone = {"latency_s": {"value": 2e-6}, "bandwidth_bytes_per_s": {"value": 55e9}}
        copies = {4096: [3e-4] * 5, 17301504: [9e-5 + 17301504 / 55e9] * 5, 352321536: [352321536 / 50e9] * 5}
        assert beside_bytes(copies, alone)["latency_s"]["value"] == pytest.approx(9e-5)
        assert beside_bytes({4096: [3e-4] * 5}, alone) is None

    def test_a_file_without_waits_is_refused(self):
        from calibrate import in_situ_fit
        from sim.base.errors import BadInput

        samples = lane_samples("mixtral-8x7b", 352321536)
        samples.verbs["sync"] = {"1: lru@1": []}
        with pytest.raises(BadInput, match="no samples of the host's waiting; calibrate again"):
            in_situ_fit.apply({"h2d": {}, "d2h": {}}, samples, "mine")


def test_each_case_has_an_equal_part_of_the_time_that_is_left():
    from calibrate.in_situ import Timer, TimeUp

    at = [0.0]
    timer = Timer(30.0, 3, now=lambda: at[0])
    timer.start()
    at[0] = 4.0
    timer.check(None)
    timer.stop()  # 26 s left for two
    timer.start()
    at[0] = 16.9
    timer.check(None)
    at[0] = 17.1
    with pytest.raises(TimeUp):
        timer.check(None)


@pytest.mark.parametrize(("gib", "least", "most"), [(79.1, 190, 215), (139.8, 256, 256), (23.6, 40, 60)])
def test_cases_fit_the_gpu_at_hand_not_the_one_in_the_specification(tmp_path, gib, least, most):
    """Mixtral's 256 experts take 84 GiB: what a case calls all resident is what the device holds."""
    from types import SimpleNamespace

    from calibrate import in_situ
    from sim.options import RunSpec
    from sim.profiles.models import load_model
    from sim.run import prepare

    total = int(gib * 2**30)
    facts = SimpleNamespace(kind="cuda", total_bytes=total)
    lanes = SimpleNamespace(device=SimpleNamespace(place="cuda:0", facts=facts, free_bytes=lambda: total - 2**29))
    model = load_model("mixtral-8x7b")
    path = in_situ.script(tmp_path / "t.safetensors", model, 0, (1, 256))
    spec = RunSpec(policy="lru", hw="rtx3090", model="mixtral-8x7b", trace=str(path), cache="1experts")
    settings, found = in_situ.room_for(lanes, spec, 256)
    assert least <= found <= most
    prepare(
        RunSpec(
            policy="lru", hw="rtx3090", model="mixtral-8x7b", trace=str(path), cache=f"{found}experts", set=settings
        )
    ).close()
