"""The real machine on the CPU backend: same decisions, real bytes, real outputs, spans that fit together."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from grids import few_each_time  # noqa: E402
from real_world import ALL, carried_out, lanes_and_weights, tiny_setup  # noqa: E402
from test_timeline_parts import Shuffled  # noqa: E402

from sim.base.device_faults import DeviceFault  # noqa: E402
from sim.base.errors import BadInput  # noqa: E402
from sim.machine.protocol import SPECULATIVE  # noqa: E402
from sim.policy.registry import policies  # noqa: E402
from sim.real.devices.cpu import CpuDevice  # noqa: E402
from sim.real.devices.lanes import Lanes  # noqa: E402
from sim.real.devices.open import usable_device  # noqa: E402
from sim.real.devices.work import COMPUTE, H2D, Work  # noqa: E402
from sim.real.machine.arena import Arena, aligned  # noqa: E402
from sim.real.requirements import check_memory  # noqa: E402
from sim.real.run import measure  # noqa: E402
from sim.run import execute  # noqa: E402

LOSSLESS = sorted(name for name, kind in policies().items() if "lossy" not in kind.traits)
# Slices of columns are summed one by one, and a GPU's kernels are not the CPU's: there the last bits may differ.
LAST_BITS = {"moepic", *(name for name in LOSSLESS if "cpu" in policies()[name].traits)}
TAUGHT = {"duoserve"}  # a predictor trained for the trace's shape
WHOLE_LAYERS = {"deepspeed": ALL, "moesys": ALL}


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    """The run with every expert in place."""
    return carried_out(tmp_path_factory.mktemp("resident"), "lru", ALL)


# Whole experts, whole layers, parts, write-backs, prefetches by priority, the CPU, drafts, an oracle.
FEW = ("belady", "dali", "deepspeed", "fine_moe", "mixtral_offloading", "moe_speq", "moepic", "promoe")


@pytest.mark.parametrize("name", few_each_time(sorted(set(LOSSLESS) - TAUGHT), FEW))
def test_lossless_policies_compute_what_the_resident_model_computes(tmp_path, name, resident):
    done = carried_out(tmp_path, name, WHOLE_LAYERS.get(name, 8))
    assert done.result.real is True
    assert len(done.machine.output.hidden) == len(resident.machine.output.hidden) == 2 * 6
    for mine, theirs in zip(done.machine.output.hidden, resident.machine.output.hidden, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if name not in LAST_BITS:
        assert done.machine.output.digest == resident.machine.output.digest, "the same sums, in order: the same bits"
        assert done.result.measured.output_digest == resident.result.measured.output_digest


def in_parts(folder, cuts, order, lanes=None):
    """A real run in which chance cuts experts and shuffles the order in which their parts are computed."""
    policy = Shuffled()
    setup = replace(tiny_setup(folder, "lru", 8), policy=policy)
    policy.cuts, policy.turns = cuts, order
    log = []
    with lanes_and_weights(setup, lanes) as (own, weights):
        done = measure(
            setup,
            own,
            weights,
            None,
            lambda kind, *_: log.append(kind),
            prepared=lambda machine: setattr(machine.output, "keep_hidden", True),
        )
    setup.close()
    return done.machine, log


@pytest.mark.parametrize("cuts", [0, *(pytest.param(cuts, marks=pytest.mark.thorough) for cuts in (1, 2))])
def test_parts_in_any_order_add_up_to_the_same(tmp_path, cuts, resident):
    (one, log), (two, other) = in_parts(tmp_path, cuts, 1), in_parts(tmp_path, cuts, 2)
    assert log != other
    assert log.count("part") > 30
    for mine, theirs in zip(one.output.hidden, resident.machine.output.hidden, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert one.output.digest == two.output.digest, "results are added in order of columns, whatever ran first"


def test_slow_copies_down_are_waited_for(tmp_path, resident):
    """What an expert is written back from is not overwritten before that copy is over."""

    class Slow(Lanes):
        def submit(self, work):
            if work.op == "write_back":
                work.call = partial(later, work.call)
            super().submit(work)

    def later(call):
        time.sleep(0.005)
        call()

    done = carried_out(tmp_path, "mixtral_offloading", 8, Slow(CpuDevice(), pool_threads=1))
    assert done.result.d2h_bytes > 0
    assert done.machine.output.digest == resident.machine.output.digest


@pytest.mark.parametrize("name", sorted(TAUGHT))
def test_lossless_policies_with_bundled_predictors_too(name):
    """On the bundled trace, whose shape they were trained for, with experts and vocabulary made small."""
    from sim.options import RunSpec
    from sim.run import prepare
    from traces.format.bundled import DEFAULT, bundled_traces

    if DEFAULT not in bundled_traces():
        pytest.skip("the default trace is not in this checkout")
    small = {"model.hidden_size": 64, "model.expert_intermediate_size": 256, "model.vocab_size": 512}
    digests = []
    for policy, experts in (("lru", 256), (name, 200)):
        setup = prepare(
            RunSpec(
                policy=policy,
                hw="rtx3090",
                model="cpu-small",
                trace=DEFAULT,
                precision="fp32",
                cache=f"{experts}experts",
                requests=1,
                set=small,
            )
        )
        setup = replace(setup, requests=[request._replace(outputs=4) for request in setup.requests])
        with lanes_and_weights(setup) as (lanes, weights):
            done = measure(setup, lanes, weights)
            assert done.machine.broken_copies() == []
            digests.append(done.machine.output.digest)
        setup.close()
    assert done.result.miss_rate > 0
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["llama_cpp", "ktransformers", "hybrimoe"])
def test_experts_on_the_cpu_add_the_same(tmp_path, name, resident):
    done = carried_out(tmp_path, name, 8)
    assert done.result.cpu_rate > 0 or done.result.prefill_hit_rates.cpu > 0
    if name != "ktransformers":  # its deferral adds results a layer late: not the same model
        for mine, theirs in zip(done.machine.output.hidden, resident.machine.output.hidden, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


DECIDE_ALIKE = ("lru", "lfu", "on_demand", "belady", "deepspeed", "fiddler", "pregated", "moesys")


@pytest.mark.parametrize("name", few_each_time(DECIDE_ALIKE, ("lru", "fiddler", "pregated")))
def test_policies_without_timing_decide_alike_in_both_worlds(tmp_path, name):
    logs = {"real": [], "sim": []}
    room = WHOLE_LAYERS.get(name, 8)
    real = carried_out(tmp_path, name, room, log=lambda *entry: logs["real"].append(entry))
    setup = tiny_setup(tmp_path, name, room)
    sim = execute(setup, spans=lambda *_: None, log=lambda *entry: logs["sim"].append(entry))
    setup.close()
    assert logs["real"] == logs["sim"]
    assert len(logs["real"]) > 40
    for key in ("h2d_bytes", "d2h_bytes", "demand_copies", "cache_peak_bytes", "miss_rate"):
        assert getattr(real.result, key) == getattr(sim.result, key), key
    if name in ("lru", "lfu", "fiddler"):  # whether a prefetch has arrived is a matter of time
        assert real.result.hit_rate == sim.result.hit_rate


def test_a_lossy_policy_really_computes_with_other_experts(tmp_path, resident):
    done = carried_out(tmp_path, "importance", 10)
    assert done.result.activations_changed_frac > 0
    assert done.machine.output.digest != resident.machine.output.digest


def test_a_copy_that_went_wrong_is_found(tmp_path):
    setup = tiny_setup(tmp_path, "lru", 8)
    with lanes_and_weights(setup) as (lanes, weights):
        done = measure(setup, lanes, weights)
        assert done.machine.broken_copies() == []
        block, _ = next(iter(done.machine.store.blocks.values()))
        block.bytes(8)[3] += 1
        assert len(done.machine.broken_copies()) == 1
    setup.close()


BOTH = {"shared": True, "dense": True}


@pytest.mark.parametrize("shape", few_each_time([{"shared": True}, {"parallel": True}, BOTH], [BOTH]))
def test_shared_experts_and_dense_layers_are_computed(tmp_path, shape):
    one = carried_out(tmp_path, "lru", ALL, **shape)
    two = carried_out(tmp_path, "lru", 5, **shape)
    assert one.machine.output.digest == two.machine.output.digest
    ops = set(one.result.measured.operations)
    assert ("gpu: shared_expert" in ops) == ("shared" in shape)
    assert ("gpu: dense_layer" in ops) == ("dense" in shape)


def test_a_batch_computes_each_request_as_alone(tmp_path):
    alone = carried_out(tmp_path, "lru", ALL)
    both = carried_out(tmp_path, "lru", 6, batch=2)
    last = [hidden[-1] for hidden in alone.machine.output.hidden]  # prefill, five decodes, of each of two requests
    assert [len(hidden) for hidden in both.machine.output.hidden] == [5, 5, 2, 2, 2, 2, 2]
    torch.testing.assert_close(both.machine.output.hidden[-1], torch.stack([last[5], last[11]]), rtol=1e-4, atol=1e-5)


def test_spans_fit_together(tmp_path):
    spans = []
    done = carried_out(tmp_path, "belady", 8, spans=lambda *span: spans.append(span))
    by_lane = {}
    for lane, _, _, _, _, _, start_s, end_s in spans:
        assert 0 <= start_s <= end_s
        by_lane.setdefault(lane, []).append((start_s, end_s))
    assert {"host", "gpu", "h2d"} <= set(by_lane)
    for lane in ("gpu", "h2d"):  # one thing at a time
        assert all(a[1] <= b[0] for a, b in zip(by_lane[lane], by_lane[lane][1:], strict=False))
    copied = sum(n_bytes for lane, *_, n_bytes, _, _ in spans if lane == "h2d")
    assert copied == done.result.h2d_bytes
    first = {}
    for lane, _, layer, expert, _, _, start_s, end_s in sorted(spans, key=lambda span: span[-1]):
        if lane == "h2d":
            first.setdefault((layer, expert), end_s)
        elif lane == "gpu" and expert >= 0:
            assert first[layer, expert] <= start_s, "computed before its first copy was over"
    assert sum(done.machine.parts_s()) == pytest.approx(done.machine.ledger._free_s, rel=0.05)
    policy = [span for span in spans if span[0] == "host" and span[1].startswith("policy")]
    assert policy
    assert done.result.measured.policy_code_s == pytest.approx(sum(s[-1] - s[-2] for s in policy))


def test_kept_tables_and_timelines_take_measured_spans(tmp_path):
    from functools import partial

    from sim.real.run import execute_real
    from sim.results.keep import Keep
    from sim.results.sinks import FILES, recorded

    setup = tiny_setup(tmp_path, "lru", 8)
    run = partial(execute_real, device="cpu")
    done = recorded(run, setup, None, Keep(tmp_path / "out", True, timeline=tmp_path / "t.json", timeline_iterations=3))
    setup.close()
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert (tmp_path / "t.json").stat().st_size > 1000
    assert done.result.simulator == "real"


def test_a_copy_waits_for_its_room_and_lets_ready_ones_pass():
    lanes, ran, gate = Lanes(CpuDevice()), [], threading.Event()
    try:
        reader = Work(COMPUTE, "reader", lambda: (gate.wait(), ran.append("reader")))
        lanes.submit(reader)
        lanes.submit(waits := Work(H2D, "waits", lambda: ran.append("waits"), (reader,)))
        lanes.submit(ready := Work(H2D, "ready", lambda: ran.append("ready"), priority=SPECULATIVE))
        lanes.wait(ready)
        assert not lanes.over(waits)
        gate.set()
        lanes.settle()
        assert ran == ["ready", "reader", "waits"]
        assert waits.start_s >= reader.end_s == waits.ready_s
        assert waits.waited_for == reader.cause
    finally:
        lanes.close()


@pytest.mark.parametrize(("raised", "fault"), [(KeyboardInterrupt(), "interrupted"), (DeviceFault("lost"), "lost")])
def test_an_interrupt_keeps_what_was_measured_and_frees_memory(tmp_path, raised, fault):
    setup = tiny_setup(tmp_path, "lru", 8)
    n_threads = threading.active_count()
    with lanes_and_weights(setup) as (lanes, weights):

        def stop(step):
            if step.iteration.index == 8:  # the second request's second token
                raise raised

        done = measure(setup, lanes, weights, on_step=stop)
    setup.close()
    assert done.fault == fault
    assert done.result.n_requests == 2, "the second with the three tokens that it has put out"
    assert [times.request.outputs for times in done.report.requests] == [6, 3]
    assert done.result.tpot_s.n == 2
    assert "stopped early, after 9 of 12 tokens" in done.result.caveats
    assert threading.active_count() == n_threads, "lanes are gone"


def test_experts_share_host_buffers_where_memory_is_short(tmp_path):
    from sim.real.weights.random_weights import random_weights

    setup = tiny_setup(tmp_path, "lru", 8)
    lanes = Lanes(CpuDevice())
    try:
        size = setup.model.expert_bytes("fp32")
        weights = random_weights(setup.model, "fp32", lanes.device, 0, 5 * size)
        done = measure(setup, lanes, weights)
        assert done.result.measured.distinct_host_experts == 5
        assert "16 experts share 5 host buffers" in done.result.caveats
        with pytest.raises(DeviceFault, match="at least one layer's 4; take --model cpu-small"):
            random_weights(setup.model, "fp32", lanes.device, 0, 3 * size)
        with pytest.raises(BadInput, match=r"it needs .* on cpu, which has .* free"):
            check_memory(setup, lanes.device, (1 << 20, 1 << 20))
        assert check_memory(setup, lanes.device, (1 << 30, 1 << 30)) > 4 * size
    finally:
        lanes.close()
        setup.close()


def test_the_arena_is_a_free_list_first_freed_first_used():
    buffer = torch.zeros(4 * 4096, dtype=torch.uint8)
    arena = Arena(buffer, len(buffer), lambda n: torch.zeros(n, dtype=torch.uint8))
    a, b, c, d = (arena.take(4000) for _ in range(4))
    assert [block.start for block in (a, b, c, d)] == [0, 4096, 8192, 12288]
    hazard = Work(COMPUTE, "x", lambda: None)
    arena.give(c, [hazard])
    arena.give(a, [])
    again = arena.take(4000)
    assert (again.start, again.hazards) == (8192, [hazard])
    assert arena.take(1).start == 0
    arena.give(b, [])
    arena.give(again, [])
    assert arena.take(8000).start == 4096, "neighbours are joined when no single block is large enough"
    spilt = arena.take(5000)
    assert arena.spilt_bytes == aligned(5000) == 8192
    assert spilt.bytes(5000).numel() == 5000


def test_devices_are_named():
    assert usable_device("cpu") == "cpu"
    with pytest.raises(BadInput, match="--real, got 'tpu'"):
        usable_device("tpu")
    if not torch.cuda.is_available():
        assert usable_device(None) == "cpu"
        with pytest.raises(BadInput, match="torch sees no CUDA device here; write --real=cpu"):
            usable_device("cuda:0")
