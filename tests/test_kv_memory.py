"""Memory for keys and values by pages: who starts, who makes room, what that costs, and that nobody is lost by it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import random_worlds
from click.testing import CliRunner
from easy_numbers import setup as easy_setup
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import ALL, from_rows, tiny_trace
from untaught import UNTAUGHT

from policies.gpu_only import GpuOnly
from sim.base.errors import BadInput, DoesNotFit
from sim.options import OPTIONS, RunSpec
from sim.results.load import parts
from sim.run import Outcome, execute, prepare
from sim.workload import schedulers
from sim.workload.batching import Batching
from sim.workload.iterations import RequestInfo
from sim.workload.known_requests import Profiled
from sim.workload.kv_memory import KvMemory, KvPool
from sim.workload.slo import Slos
from traces.format.reader import Trace

LENGTHS = [(2, 3), (2, 3), (1, 2)]  # (prompt, outputs) of three requests
PAGES = 3  # of two tokens


def three() -> list[RequestInfo]:
    return [RequestInfo(i, 10 * i, prompt, outputs, "", None) for i, (prompt, outputs) in enumerate(LENGTHS)]


def composed(batching: Batching) -> list[list[tuple[int, int, int]]]:
    """(request, first row within it, rows) of every range of every iteration."""
    found = iter(lambda: batching.next(math.inf), None)
    return [
        [(r.request.index, r.start_row - r.request.first_row, r.stop_row - r.start_row) for r in ranges]
        for ranges in found
        if isinstance(ranges, list)
    ]


# -- by hand --------------------------------------------------------------------------------------------------------


def test_recompute_by_hand() -> None:
    """The fourth iteration wants a second page for request 0, and the third page is taken: 2 goes for it. Then 1 wants
    one, and is itself the last to have come. Both come back when 0 is done, each with all it had put out as prompt."""
    kv = KvMemory(KvPool(PAGES, 2, 32))
    assert composed(Batching(schedulers.find("fcfs")(three()), 3, kv)) == [
        [(0, 0, 2)],
        [(1, 0, 2)],
        [(2, 0, 1)],
        [(0, 2, 1)],
        [(0, 3, 1)],
        [(1, 0, 3)],
        [(2, 0, 2)],
        [(1, 3, 1)],
    ]
    assert kv.n_preemptions == {1: 1, 2: 1}
    assert kv.recomputed_tokens == 2 + 1
    assert (kv.n_free, kv.peak_pages, kv.held) == (PAGES, PAGES, {})


def test_swap_by_hand() -> None:
    """The same, but they go on where they were, together: there are three pages for two and one."""
    kv = KvMemory(KvPool(PAGES, 2, 32, swaps=True))
    assert composed(Batching(schedulers.find("fcfs")(three()), 3, kv)) == [
        [(0, 0, 2)],
        [(1, 0, 2)],
        [(2, 0, 1)],
        [(0, 2, 1)],
        [(0, 3, 1)],
        [(1, 2, 1), (2, 1, 1)],
        [(1, 3, 1)],
    ]
    assert kv.n_preemptions == {1: 1, 2: 1}
    assert (kv.n_out_pages, kv.n_in_pages, kv.peak_swapped_pages, kv.recomputed_tokens) == (2, 2, 2, 0)
    assert (kv.n_free, kv.held) == (PAGES, {})


def two() -> list[RequestInfo]:
    return [RequestInfo(i, 10 * i, prompt, outputs, "", None) for i, (prompt, outputs) in enumerate([(2, 4), (5, 1)])]


@pytest.mark.parametrize("swaps", [False, True])
def test_a_prompt_under_way_makes_room_by_hand(swaps: bool) -> None:
    """Two tokens at a time, five pages: request 1 has two tokens of its prompt there when 0 wants a third page."""
    kv = KvMemory(KvPool(5, 2, 32, swaps))
    before = [[(0, 0, 2)], [(0, 2, 1), (1, 0, 1)], [(0, 3, 1), (1, 1, 1)], [(0, 4, 1)]]
    after = [[(1, 2, 2)], [(1, 4, 1)]] if swaps else [[(1, 0, 2)], [(1, 2, 2)], [(1, 4, 1)]]
    assert composed(Batching(schedulers.find("fcfs")(two()), 2, kv, 2)) == before + after
    assert (kv.n_preemptions, kv.recomputed_tokens) == ({1: 1}, 0 if swaps else 2)
    assert (kv.n_out_pages, kv.n_in_pages) == ((1, 1) if swaps else (0, 0))


def test_static_batches_by_hand() -> None:
    """Nobody joins before 0 and 1 are done, also while 1 is away."""
    kv = KvMemory(KvPool(PAGES, 2, 32))
    assert composed(Batching(schedulers.find("fcfs")(three()), 2, kv, static=True)) == [
        [(0, 0, 2), (1, 0, 2)],
        [(0, 2, 1)],
        [(0, 3, 1)],
        [(1, 0, 3)],
        [(1, 3, 1)],
        [(2, 0, 1)],
        [(2, 1, 1)],
    ]
    assert kv.n_preemptions == {1: 1}


def server(folder: Path, pool: KvPool | None, batch: int = 3, engine: str | None = None, **spec: Any) -> Outcome:
    """Nothing is offloaded: an iteration takes 4 s, and a page of 32 bytes 2 s each way."""
    rows = [[[0]] for prompt, outputs in LENGTHS for _ in range(prompt + outputs - 1)]
    with Trace(from_rows(folder / "three.safetensors", rows, 2, LENGTHS)) as trace:
        made = easy_setup(GpuOnly(), trace, 2, batch=batch)
        preempt = "swap" if pool is not None and pool.swaps else "recompute"
        asked = RunSpec(hw="easy", policy="gpu_only", batch=batch, sim_simulator=engine, kv_preempt=preempt, **spec)
        return execute(replace(made, kv=pool, spec=asked), bounds=False)


def ends(outcome: Outcome) -> list[tuple[float, float]]:
    """(first token, last token) of every request."""
    return [(t.first_token_s, t.last_token_s) for t in outcome.report.requests]


@pytest.mark.parametrize("engine", ["core", "simpy"])
def test_times_by_hand(tmp_path: Path, engine: str) -> None:
    assert ends(server(tmp_path, None, engine=engine)) == [(4, 20), (8, 20), (12, 16)]
    anew = server(tmp_path, KvPool(PAGES, 2, 32), engine=engine)
    assert ends(anew) == [(4, 20), (8, 32), (12, 28)]
    assert [t.tpot_s for t in anew.report.requests] == [8, 12, 16]
    swapped = server(tmp_path, KvPool(PAGES, 2, 32, swaps=True), engine=engine)
    # Two pages go down from 12 s on, and request 0 goes on at 16; at 24 it is done, and two pages come up.
    assert ends(swapped) == [(4, 24), (8, 36), (12, 32)]
    kv = swapped.result.kv
    assert (kv.kv_swap_out_bytes, kv.kv_swap_in_bytes, kv.peak_swapped_bytes) == (64, 64, 64)
    assert (kv.pages, kv.peak_pages, kv.preemptions, kv.preempted_requests) == (3, 3, 2, 2)
    assert kv.preempted_s == 12 + 12
    # One page until 4, two until 8, three until 12; two until 24; then three, and two from 32 on.
    assert kv.mean_pages == (4 * 1 + 4 * 2 + 4 * 3 + 12 * 2 + 8 * 3 + 4 * 2) / 36
    assert (swapped.result.d2h_bytes, swapped.result.h2d_bytes) == (64, 64)
    decode = swapped.result.bottleneck.decode
    assert (decode.copy, decode.back) == (4 / (36 - 12), 4 / (36 - 12))
    busy = {name: share and share * 36 for name, share in swapped.result.lane_utilisation.items()}
    assert (busy["d2h"], busy["h2d"]) == (4, 4)
    assert [t.n_preemptions for t in swapped.report.requests] == [0, 1, 1]
    assert [t.n_preemptions for t in server(tmp_path, None).report.requests] == [None] * 3


def test_waiting_after_a_preemption_is_queueing(tmp_path: Path) -> None:
    """Request 1: first token at 8, then 4 s of another's prompt; away from 12 to 24; 4 s of copies, and 8 s run."""
    served = server(tmp_path, KvPool(PAGES, 2, 32, swaps=True)).report.requests
    one = served[1]
    found = parts(one.away_s, one.last_token_s - one.first_token_s, one.until_first, one.until_last)
    assert found == (12, 4, 4, 8, 0)
    late = {"*": {"tpot_s": 1.0}}
    violations = server(tmp_path, KvPool(PAGES, 2, 32, swaps=True), slo=late).result.slo.violations
    # Request 0: 8 s run, 8 s of prompts, 4 s of copies; 1 and 2 are away for longer than anything else takes.
    assert (violations.queue, violations.prefill, violations.copies, violations.compute) == (2, 1, 0, 0)


def test_a_watermark_is_kept_beside_others() -> None:
    """Of 200 pages two stay free where a request starts beside others; alone it may have all."""
    kv = KvMemory(KvPool(200, 1, 1))
    first, second = RequestInfo(0, 0, 100, 1, "", None), RequestInfo(1, 200, 99, 1, "", None)
    assert kv.fits(200, 0)
    assert not kv.fits(201, 0)
    kv.hold(first, 100)
    assert kv.fits(98, 1)
    assert not kv.fits(99, 1)
    assert kv.fits(99, 0)
    assert composed(Batching(schedulers.find("fcfs")([first, second]), 2, KvMemory(KvPool(200, 1, 1)))) == [
        [(0, 0, 100)],
        [(1, 0, 99)],
    ]


# -- of any load ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=14),
    st.integers(1, 5),
    st.sampled_from(["fcfs", "sjf", "edf"]),
    st.integers(1, 4),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from([(0, False), (0, True), (1, False), (3, False), (8, False)]),
)
def test_pages_and_requests_of_any_load(
    asked: list[tuple[int, int, int]],
    batch: int,
    name: str,
    page: int,
    spare: int,
    swaps: bool,
    how: tuple[int, bool],
) -> None:
    """Memory never above budget, all of it returned; every token put out once, from keys and values that are there;
    whoever came first of those that run is never sent away, so nobody starves under first come, first served."""
    come, row = [], 0
    for i, (at, prompt, outputs) in enumerate(sorted(asked)):
        come.append(RequestInfo(i, row, prompt, outputs, "", float(at)))
        row += prompt + outputs - 1
    largest = max(-(-(r.prompt_len + r.outputs - 1) // page) for r in come)
    pool = KvPool(largest + spare, page, 1, swaps)
    pool.check(come, pool.n_pages)
    kv = KvMemory(pool)
    profiled = Profiled.of(come, Slos({"*": {"ttft_s": 3.0}}))
    made = Batching(schedulers.find(name)(come, True, 0, profiled), batch, kv, *how)
    now_s, begun = 0.0, []
    there: dict[int, int] = defaultdict(int)  # tokens whose keys and values are there
    out: dict[int, int] = defaultdict(int)  # tokens put out
    away: set[int] = set()
    for _ in range(20_000):
        ranges = made.next(now_s)
        if ranges is None:
            break
        if isinstance(ranges, float):
            assert not away
            now_s = ranges
            continue
        assert len({r.request.index for r in ranges}) == len(ranges)
        for request in kv.left:
            assert request.index > min(kv.held)
            away.add(request.index)
            if not swaps:
                there[request.index] = 0
        assert sum(kv.held.values()) + kv.n_free == pool.n_pages
        assert kv.n_free >= 0
        for r in ranges:
            index = r.request.index
            if index not in begun:
                assert not away, "a new request starts before those that were sent away are back"
                begun.append(index)
            away.discard(index)
            assert r.start_row == r.request.first_row + there[index]
            assert r.context == there[index]
            there[index] += r.stop_row - r.start_row
            out[index] += r.puts_out
            assert there[index] <= r.request.prompt_len + out[index] - 1 or not out[index]
            if r.puts_out:
                assert there[index] == r.request.prompt_len + out[index] - 1
            assert kv.held[index] * page >= there[index]
        assert len(kv.held) <= batch + len(ranges)
        now_s += 1.0
    else:
        pytest.fail("it never ends")
    assert out == {r.index: r.outputs for r in come}
    assert (kv.n_free, kv.held, kv.away) == (pool.n_pages, {}, [])
    assert kv.n_out_pages == kv.n_in_pages
    if name == "fcfs":
        assert begun == sorted(begun)


# -- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_trace(
        tmp_path_factory.mktemp("t") / "t.safetensors",
        32,
        8,
        2,
        n_requests=4,
        prompt=4,
        outputs=9,
        levels=ALL - {"arrivals"},
    )


def spec_of(tiny: Path, policy: str = "lru", **rest: Any) -> RunSpec:
    """Four requests of 12 tokens; pages of 2 tokens of a model with 131,072 bytes per token, 14 of them."""
    pool = {"kv_memory": 14 * 2 * 131_072, "kv_page": 2, "batch": 3}
    rest["set"] = UNTAUGHT.get(policy, {}) | rest.get("set", {})
    named = {"policy": policy, "hw": "rtx3090", "trace": str(tiny), "model": "mixtral-8x7b", "split": "all"}
    return RunSpec(**named | pool | rest)


def result_of(spec: RunSpec, bounds: bool = True) -> dict[str, Any]:
    made = prepare(spec)
    with made.trace:
        found = execute(made, bounds=bounds).result.to_dict()
    return {key: value for key, value in found.items() if key != "wall_s"}


def pooled(engine: str, swaps: bool) -> Any:
    """Stands for `random_worlds.by_engine`: with pages of two tokens, which are as large as most of an expert."""

    def loop(setup: Any, spans: Any, log: Any) -> Any:
        come = sorted(3 * setup.requests, key=lambda r: r.arrival_s or 0.0)
        most = max(r.prompt_len + r.outputs - 1 for r in come)
        setup = replace(
            setup,
            requests=[r._replace(index=i) for i, r in enumerate(come)],
            kv=KvPool(-(-most // 2), 2, 2 * setup.pieces.whole[0][0].n_bytes // 3 + 1, swaps),
            spec=msgspec.structs.replace(setup.spec, sim_simulator=engine),
        )
        return random_worlds.by_engine(setup, spans, log)

    return loop


@pytest.mark.thorough
def test_simpy_says_the_same_in_random_worlds(tmp_path: Path) -> None:
    """Policies drawn at random, write-backs and experts on the CPU among them: every decision, span and figure."""
    n_preempted = 0
    for seed in range(50):
        of = random_worlds.world(seed, tmp_path)
        for swaps in (False, True) if of.facts["spec"].batch > 1 else ():
            seen = [random_worlds.run(of, pooled(engine, swaps)) for engine in ("core", "simpy")]
            for one in seen:
                assert not one.crash, one.crash
                one.spans.sort()  # told when work ends by one, when its end is known by the other
                if one.error:
                    one.spans.clear()
            assert random_worlds.disagreement(*seen) is None, of
            n_preempted += bool(seen[0].result) and seen[0].result["kv"]["preemptions"] > 0
        of.trace.unlink()
    assert n_preempted > 10


def test_copies_of_pages_and_of_experts_take_turns(tiny: Path) -> None:
    """On every lane one thing at a time; what runs waits for pages that come, and for the room of those that go."""
    made, spans = prepare(spec_of(tiny, kv_preempt="swap")), []
    with made.trace:
        execute(made, spans=lambda *span: spans.append(span), bounds=False)
    by_lane = defaultdict(list)
    for lane, op, *_, start_s, end_s in spans:
        by_lane[lane].append((start_s, end_s, op))
    for lane in ("h2d", "d2h", "gpu"):
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(by_lane[lane]))), lane
    moved = [one for lane in ("h2d", "d2h") for one in by_lane[lane] if one[2].startswith("kv_")]
    assert {op for _, _, op in moved} == {"kv_in", "kv_out"}
    for start_s, end_s, _ in moved:
        assert not [one for one in by_lane["gpu"] if start_s < one[1] and one[0] < end_s]


@pytest.mark.parametrize("preempt", OPTIONS.by_field["kv_preempt"].choices)
@pytest.mark.parametrize("how", [{}, {"prefill_chunk": 3}, {"batch_static": True}])
def test_one_at_a_time_is_as_without_a_pool(tiny: Path, how: dict[str, Any], preempt: str) -> None:
    """Nobody makes room for itself: every figure but those of memory."""
    with_pool = result_of(spec_of(tiny, batch=1, kv_preempt=preempt, cache="60experts", **how))
    without = result_of(spec_of(tiny, batch=1, kv_memory=None, kv_page=16, cache="60experts", **how))
    assert with_pool["kv"]["preemptions"] == 0
    assert "kv" not in without
    for name in ("run_id", "name", "memory", "peak_vram_bytes", "kv"):
        with_pool.pop(name)
        without.pop(name, None)
    assert with_pool == without


@pytest.mark.parametrize("preempt", OPTIONS.by_field["kv_preempt"].choices)
@pytest.mark.parametrize("how", [{}, {"prefill_chunk": 4}])
def test_who_knows_the_future_knows_who_makes_room(tiny: Path, how: dict[str, Any], preempt: str) -> None:
    """`belady` keeps what is used soonest, of iterations as they come with pre-emption: it copies the least, and no
    policy is below the bound, which is of these iterations, too."""
    policies = ("belady", "lru", "lfu")
    found = {
        policy: result_of(spec_of(tiny, policy, kv_preempt=preempt, cache="60experts", **how)) for policy in policies
    }
    copied = {policy: one["h2d_bytes"] for policy, one in found.items()}
    assert min(copied, key=lambda policy: copied[policy]) == "belady"
    for one in found.values():
        assert one["kv"]["preemptions"]
        assert one["tpot_s"]["mean"] >= one["lower_bound"]["tpot_s"]
        assert one["ttft_s"]["mean"] >= one["lower_bound"]["ttft_s"]
        assert one["lower_bound"] is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-memory", "1MB"], "--kv-memory, got 1.00 MB: one page of 16 tokens takes 2.10 MB; give more"),
        (["--kv-memory", "5MB"], "--kv-memory, got 5.00 MB (2 pages of 16 tokens): request "),
        (["--kv-memory", "2"], "--kv-memory, got '2': that is 2 bytes; did you mean 2GB?"),
        (["--set", "kv.page=32"], "--set kv.page, got 32 without a pool, where nobody is refused; add --kv-memory"),
        (["--set", "kv.preempt=swap"], "--set kv.preempt, got 'swap' without a pool"),
        (["--kv-memory", "1GB", "--set", "kv.page=0"], "--set kv.page, got 0: at least 1"),
        (
            ["--kv-memory", "1GB", "--set", "kv.preempt=swop"],
            "--set kv.preempt, got 'swop': no such value; did you mean 'swap'",
        ),
        (["--kv-memory", "30GB"], "dense parts and --kv-memory need"),
    ],
)
def test_bad_pools(options: list[str], said: str) -> None:
    from sim.cli.run import command

    done = CliRunner().invoke(command, ["--policy", "lru", "--hw", "rtx3090", *options])
    assert isinstance(done.exception, BadInput), done.output
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


def test_host_memory_takes_what_is_swapped() -> None:
    fields: dict[str, Any] = {"policy": "lru", "hw": "rtx3090", "requests": 2, "batch": 2, "kv_memory": 10**9}
    small = {"hw.cpu.memory_bytes": 90_200_000_000}
    prepare(RunSpec(**fields, set=small)).close()
    with pytest.raises(DoesNotFit, match=r"--set kv.preempt, got 'swap': up to .* may go to host memory"):
        prepare(RunSpec(**fields, kv_preempt="swap", set=small))
