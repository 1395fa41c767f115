"""Every probe on every path: the CUDA backend over a stand-in for `torch.cuda`, and the CPU backend for real."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_real_cuda import FakeDevice  # noqa: E402

from calibrate import probes_contention  # noqa: E402
from calibrate.bench import Bench, Point, Probe, Ring  # noqa: E402
from calibrate.ops import (  # noqa: E402
    AttentionShape,
    ExpertShape,
    Int4Experts,
    MeasuredGeometry,
)
from calibrate.runner import PROBES, Health, run  # noqa: E402
from calibrate.store import Store  # noqa: E402
from sim.base.errors import BadInput  # noqa: E402
from sim.real.devices.cpu import CpuDevice  # noqa: E402
from sim.real.devices.cuda import CudaDevice  # noqa: E402

TINY = MeasuredGeometry("tiny", ExpertShape(64, 128), ExpertShape(64, 96), AttentionShape(64, 4, 2, 16), 8, 2, 512)
SMALL = MeasuredGeometry("small", ExpertShape(32, 64), None, AttentionShape(32, 2, 2, 16), 4, 1, 256)


class FakeCuda(FakeDevice):
    """What the backend uses of `torch.cuda`, executed at once."""

    clock_s = property(lambda self: time.perf_counter(), lambda self, value: None)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="Fake GPU", L2_cache_size=1 << 16, multi_processor_count=4, total_memory=1 << 28)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1 << 28, 1 << 28

    def _sleep(self, cycles: int) -> None:
        assert cycles >= 0 and self.current, "spinning outside a lane"


def fake_bench(**changes: Any) -> Bench:
    device = CudaDevice("cuda:0", cuda=FakeCuda(), place="cpu")
    limits: dict[str, Any] = {
        "matmul_sizes": (64,),
        "max_tokens": 64,
        "max_context": 512,
        "threads": (1, 2),
        "llc_bytes": 1 << 16,
        "host_bytes": 1 << 28,
        "max_copy_bytes": 1 << 20,
        "device_bytes": int(0.9 * (1 << 28)),
    }
    return Bench(
        device=device, geometries=(TINY, SMALL), dtype="float32", cpu_dtypes=("float32",), **{**limits, **changes}
    )


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_every_point_of_every_probe_runs_on_the_cuda_path(probe, tmp_path):
    ticks = iter(range(10**9))  # every look at the clock costs a second: each point ends after its fewest samples
    bench, store = fake_bench(now=lambda: float(next(ticks))), Store(tmp_path / "s.jsonl.gz")
    run(bench, store, 1e7, Health(dict), probes=[probe], max_rounds=1)
    assert len(store) >= 2 and [(r.key, r.why) for r in store if r.status != "ok"] == []
    assert all(sample >= 0 for record in store for sample in record.samples_s)


def test_experts_on_the_cpu_and_gathered_copies_are_timed_alone_and_together_on_the_real_kernels(tmp_path):
    """The quick mode of the pair, on this machine's cores: all four states, and the bytes that make rates of them."""

    def gathered(bench):
        yield from (point for point in probes_contention.points(bench) if "gather" in point.key["what"])

    store = Store(tmp_path / "s.jsonl.gz")
    with contextlib.closing(CpuDevice()) as device:
        bench = dataclasses.replace(fake_bench(max_tokens=1), device=device)
        run(bench, store, 1e6, Health(dict), probes=[Probe("contention", 1, gathered)], max_rounds=1)
    assert [(r.key["what"], r.key["state"], r.status) for r in store] == [
        ("cpu_by_gather", "alone", "ok"),
        ("cpu_by_gather", "both", "ok"),
        ("gather_by_cpu", "both", "ok"),
        ("gather_by_cpu", "alone", "ok"),
    ]
    assert {(r.key["cpu_bytes"], r.key["copy_bytes"]) for r in store} == {(3 * 64 * 128 * 4, 3 * 64 * 128 * 4)}
    assert all(sample > 0 for record in store for sample in record.samples_s)


def test_gathered_pieces_lie_apart_and_each_comes_once_before_any_comes_again():
    buffer = torch.arange(64 * 4096, dtype=torch.int64).to(torch.uint8)
    places = Ring(buffer, 5000, scattered=True)  # on pages of their own: 8 KiB apart
    starts = [places.next().data_ptr() - buffer.data_ptr() for _ in range(64)]
    assert sorted(starts[:32]) == [8192 * at for at in range(32)]
    assert starts[32:] == starts[:32]
    assert sum(after - before == 8192 for before, after in pairwise(starts[:32])) < 4


def test_the_same_samples_come_back_from_disk(tmp_path):
    store = Store(tmp_path / "s.jsonl.gz")
    run(fake_bench(), store, 1.0, Health(dict), probes=PROBES[:1], max_rounds=1)
    again = Store.load(store.path)
    assert [(r.ident, r.status, len(r.samples_s)) for r in again] == [
        (r.ident, r.status, len(r.samples_s)) for r in store
    ]


def test_a_failing_point_is_recorded_and_the_next_ones_still_run(tmp_path):
    def points(bench):
        yield Point({"what": "broken"}, lambda: 1 / 0)
        yield Point({"what": "works"}, lambda: (lambda: None, bench_clock(bench)))
        raise RuntimeError("set-up of the third point")

    store = Store(tmp_path / "s.jsonl.gz")
    run(fake_bench(), store, 5.0, Health(dict), probes=[Probe("mixed", 1, points), PROBES[0]], max_rounds=1)
    found = {(r.probe, r.key.get("what")): r for r in store}
    assert found["mixed", "broken"].status == "failed"
    assert found["mixed", "broken"].why == "ZeroDivisionError: division by zero"
    assert found["mixed", "works"].status == "ok"
    assert found["mixed", "set-up"].why == "RuntimeError: set-up of the third point"
    assert found["host", "launch"].status == "ok"


def bench_clock(bench):
    from calibrate.clock import LaneClock

    return LaneClock(bench.device, bench.compute)


def test_points_over_budget_are_skipped_and_resume_measures_them(tmp_path):
    store = Store(tmp_path / "s.jsonl.gz")
    ticks = iter(range(10**9))
    slow = fake_bench(now=lambda: float(next(ticks)))  # each look at the clock costs a second
    run(slow, store, 40.0, Health(dict), probes=PROBES[:1], max_rounds=1)
    skipped = [r for r in store if r.status == "skipped"]
    assert skipped and "--resume" in skipped[0].why
    measured = {r.ident: r.samples_s for r in store if r.status == "ok"}
    again = Store.load(store.path)
    run(fake_bench(), again, 5.0, Health(dict), probes=PROBES[:1], max_rounds=1)
    assert not [r for r in again if r.status == "skipped"]
    kept = {r.ident: r.samples_s for r in again if r.ident in measured}
    assert kept == {ident: tuple(round(s, 10) for s in samples) for ident, samples in measured.items()}


def test_a_missing_device_names_the_way_out():
    class NoCuda(FakeCuda):
        def is_available(self):
            return False

    with pytest.raises(BadInput, match="torch sees no CUDA device; name cpu"):
        CudaDevice("cuda:0", cuda=NoCuda(), place="cpu")
    with pytest.raises(BadInput, match="1 are here; name cpu, or cuda:0"):
        CudaDevice("cuda:3", cuda=FakeCuda(), place="cpu")


@pytest.mark.parametrize(("hidden", "intermediate"), [(4096, 14336), (2048, 1408), (2048, 768), (96, 64)])
def test_four_bit_experts_have_the_shapes_that_torch_s_kernel_takes(hidden, intermediate):
    """On fake tensors torch checks shapes and types as on a GPU, and computes nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape = ExpertShape(hidden, intermediate)
    with FakeTensorMode():
        experts = Int4Experts(torch, shape, 2, "cuda")
        out = experts.call(torch.empty((3, hidden), dtype=torch.bfloat16, device="cuda"))()
    assert out.shape == (3, hidden) and out.dtype == torch.bfloat16
    for packed, group, scales in experts._weights[0]:
        assert packed.dtype == torch.int32 and scales.shape[0] * group in (hidden, intermediate)
    assert sum(4 * packed.numel() for packed, _, _ in experts._weights[0]) == shape.weight_bytes(0.5)


def test_a_width_that_the_four_bit_kernel_cannot_take_is_a_failed_point_that_says_so():
    with pytest.raises(ValueError, match="widths of whole groups of 32, not 64 x 100"):
        Int4Experts(torch, ExpertShape(100, 64), 1, "meta")


def test_old_gpus_compute_in_fp16_and_new_ones_in_bf16():
    class Turing(FakeCuda):
        def get_device_properties(self, index: int) -> SimpleNamespace:
            return SimpleNamespace(**vars(super().get_device_properties(index)), major=7)

    assert CudaDevice("cuda:0", cuda=Turing(), place="cpu").facts.dtype == "float16"
    assert CudaDevice("cuda:0", cuda=FakeCuda(), place="cpu").facts.dtype == "bfloat16"
