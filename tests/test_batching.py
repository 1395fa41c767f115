"""What runs together: one queue worked out by hand under each batching, and what any load must keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from easy_numbers import hardware, model, stack
from easy_numbers import setup as easy_setup
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import from_rows

from policies.gpu_only import GpuOnly
from policies.sida import Sida
from sim.base.errors import BadInput
from sim.machine.cost import Cost
from sim.options import RunSpec
from sim.policy.decisions import Predict
from sim.results.text import by_layer
from sim.run import Outcome, execute, prepare, record, timed
from sim.studies.plan.ways import CACHE, way_of
from sim.workload.batching import Batching
from sim.workload.iterations import DECODE, PREFILL, Iteration, Range, RequestInfo
from sim.workload.kv_memory import KvMemory, KvPool
from sim.workload.schedulers.fcfs import FirstCome
from traces.format.reader import Trace

LENGTHS = [(5, 3), (4, 2), (3, 1)]  # prompt, outputs of A, B, C
Step = list[tuple[str, int, int, str, bool]]


def queue(lengths: list[tuple[int, int]], arrivals_s: list[float] | None = None) -> list[RequestInfo]:
    found, row = [], 0
    for i, (prompt, outputs) in enumerate(lengths):
        found.append(RequestInfo(i, row, prompt, outputs, "", (arrivals_s or [0.0] * len(lengths))[i]))
        row += prompt + outputs - 1
    return found


def composed(batching: Batching) -> list[Step]:
    """Every iteration until nobody is left: (request, first and last of its tokens, phase, whether it puts one out)."""
    found = []
    while isinstance(ranges := batching.next(0.0), list):
        first = [r.request.first_row for r in ranges]
        rows = [(r.start_row - at, r.stop_row - at) for r, at in zip(ranges, first, strict=True)]
        assert all(r.context == start for r, (start, _) in zip(ranges, rows, strict=True))
        found.append([("ABC"[r.request.index], *at, r.phase, r.puts_out) for r, at in zip(ranges, rows, strict=True)])
    return found


def test_a_queue_in_parts_by_hand() -> None:
    """Four tokens an iteration: what decodes first, then prompts under way, then new ones."""
    assert composed(Batching(FirstCome(queue(LENGTHS)), 3, most_tokens=4)) == [
        [("A", 0, 4, PREFILL, False)],
        [("A", 4, 5, PREFILL, True), ("B", 0, 3, PREFILL, False)],
        [("A", 5, 6, DECODE, True), ("B", 3, 4, PREFILL, True), ("C", 0, 2, PREFILL, False)],
        [("A", 6, 7, DECODE, True), ("B", 4, 5, DECODE, True), ("C", 2, 3, PREFILL, True)],
    ]


def test_slots_bound_who_starts() -> None:
    """Two slots: C has to wait until B is done, though there are tokens left; its slot is B's until its last is out."""
    assert composed(Batching(FirstCome(queue(LENGTHS)), 2, most_tokens=100)) == [
        [("A", 0, 5, PREFILL, True), ("B", 0, 4, PREFILL, True)],
        [("A", 5, 6, DECODE, True), ("B", 4, 5, DECODE, True)],
        [("A", 6, 7, DECODE, True), ("C", 0, 3, PREFILL, True)],
    ]


def test_a_static_queue_by_hand() -> None:
    """A and B together; B's slot stays empty until A is done, and only then comes C."""
    assert composed(Batching(FirstCome(queue(LENGTHS)), 2, static=True)) == [
        [("A", 0, 5, PREFILL, True), ("B", 0, 4, PREFILL, True)],
        [("A", 5, 6, DECODE, True), ("B", 4, 5, DECODE, True)],
        [("A", 6, 7, DECODE, True)],
        [("C", 0, 3, PREFILL, True)],
    ]


def test_a_continuous_queue_by_hand() -> None:
    """Prompts alone, and first."""
    assert composed(Batching(FirstCome(queue(LENGTHS)), 2)) == [
        [("A", 0, 5, PREFILL, True)],
        [("B", 0, 4, PREFILL, True)],
        [("A", 5, 6, DECODE, True), ("B", 4, 5, DECODE, True)],
        [("C", 0, 3, PREFILL, True)],
        [("A", 6, 7, DECODE, True)],
    ]


def test_one_that_comes_as_another_ends() -> None:
    """An iteration that begins at t has whoever has come by t, t itself too; a static batch takes who is there."""
    come = queue([(1, 2), (1, 1), (1, 1)], [0.0, 2.0, 3.0])
    for options, expected in (
        ({}, [[0], [0], [1], [2]]),
        ({"most_tokens": 8}, [[0], [0], [1], [2]]),
        ({"static": True}, [[0], [0], [1], [2]]),
    ):
        batching = Batching(FirstCome(come, True), 1, **options)
        said = [batching.next(at_s) for at_s in (0.0, 1.0, 2.0, 3.0)]
        assert [[r.request.index for r in one] for one in said] == expected
    waits = Batching(FirstCome(come, True), 3, static=True)
    assert [r.request.index for r in waits.next(0.0)] == [0]  # it does not wait for others to fill it
    assert [r.request.index for r in waits.next(2.5)] == [0]
    assert [r.request.index for r in waits.next(3.0)] == [1, 2]
    assert waits.next(4.0) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from(["parts", "static", "continuous"]),
    st.integers(0, 9),
    st.sampled_from([None, 2, 3]),
)
def test_of_any_load(
    asked: list[tuple[int, int, int]], batch: int, kind: str, more: int, page_tokens: int | None
) -> None:
    """Every row once and in order, no more tokens than allowed, no more requests than slots, who decodes first, nobody
    before he came, and under first come, first served whoever came first starts first. With pages: rows may run again
    after a pre-emption, all pages are free in the end, and every token comes out once."""
    asked = sorted(asked)
    come = queue([(prompt, outputs) for _, prompt, outputs in asked], [float(at) for at, _, _ in asked])
    most = batch + more
    kv = None
    if page_tokens is not None:
        most_pages = max(-(-(prompt + outputs - 1) // page_tokens) for _, prompt, outputs in asked)
        kv = KvMemory(KvPool(most_pages + more % 3, page_tokens, 1, swaps=bool(more % 2)))
    options = {"parts": {"most_tokens": most}, "static": {"static": True}, "continuous": {}}[kind]
    batching = Batching(FirstCome(come, True), batch, kv, **options)
    now_s, begun, done = 0.0, list[int](), set[int]()
    rows = {r.index: list[int]() for r in come}
    out = dict.fromkeys(rows, 0)
    n_preempted = 0
    for _ in range(5000):
        ranges = batching.next(now_s)
        if kv is not None:
            for request in kv.left:
                n_preempted += 1
                if not kv.pool.swaps:
                    rows[request.index].clear()
            kv.told()
            assert 0 <= kv.n_free <= kv.pool.n_pages
        if ranges is None:
            break
        if isinstance(ranges, float):
            assert ranges > now_s
            now_s = ranges
            continue
        assert len({r.request.index for r in ranges}) == len(ranges) <= batch
        phases = [r.phase for r in ranges]
        assert phases == sorted(phases)  # decode, then prefill
        if kind == "parts":
            assert sum(r.stop_row - r.start_row for r in ranges) <= most
        else:
            assert len(set(phases)) == 1
        complete = []
        for r in ranges:
            index = r.request.index
            assert r.request.arrival_s <= now_s
            assert index not in done
            if index not in begun:
                begun.append(index)
            rows[index] += range(r.start_row, r.stop_row)
            out[index] += r.puts_out
            if out[index] == r.request.outputs:
                done.add(index)
                complete.append(r.request)
        if kind == "static" and not n_preempted and phases[0] == PREFILL:
            assert {r.request.index for r in ranges} == set(begun) - done | {r.index for r in complete}
        batching.served(complete, now_s)
        now_s += 1.0
    assert out == {r.index: r.outputs for r in come}
    assert rows == {r.index: list(range(r.first_row, r.first_row + r.prompt_len + r.outputs - 1)) for r in come}
    assert begun == sorted(begun)
    if kv is not None:
        assert kv.n_free == kv.pool.n_pages


# -- what it takes --------------------------------------------------------------------------------------------------


def easy_run(tmp_path: Path, batch: int, **spec: Any) -> Outcome:
    """The queue with everything on the GPU: an iteration takes 3 s, and 1 s more where a token comes out (the head)."""
    rows = [[[0]] for prompt, outputs in LENGTHS for _ in range(prompt + outputs - 1)]
    with Trace(from_rows(tmp_path / "t.safetensors", rows, 2, LENGTHS)) as trace:
        made = easy_setup(GpuOnly(), trace, 2, batch=batch)
        made = replace(
            made,
            requests=[r._replace(arrival_s=0.0) for r in made.requests],
            open_loop=True,
            spec=RunSpec(policy="gpu_only", hw="easy", batch=batch, **spec),
        )
        return execute(made, bounds=False)


def test_times_of_a_queue_in_parts_by_hand(tmp_path: Path) -> None:
    outcome = easy_run(tmp_path, 3, prefill_chunk=4)
    result, served = outcome.result, outcome.report.requests
    assert [t.first_token_s for t in served] == [7.0, 11.0, 15.0]  # with the end of the prompt, not its first part
    assert [t.begun_s for t in served] == [0.0, 3.0, 7.0]
    assert [t.tpot_s for t in served] == [4.0, 4.0, None]  # through iterations that had prompts in them
    phases = result.phases
    assert (phases.prefill.iterations, phases.prefill.tokens, phases.prefill.time_s) == (2, 8, 7.0)
    assert phases.decode.iterations == 0
    mixed = phases.mixed
    assert (mixed.iterations, mixed.tokens, mixed.decode_tokens, mixed.time_s) == (2, 7, 3, 8.0)
    assert result.decode_tokens == 3
    assert result.n_outputs == 6
    assert (result.hit_rate, result.mixed_hit_rates.hit) == (None, 1.0)
    assert {row["phase"]: row["asked_n"] for row in result.by_layer} == {"prefill": 2, "mixed": 2}
    assert result.bottleneck.mixed.gpu == 1.0
    assert result.bottleneck.resource == "gpu"
    assert list(by_layer(result)) == []  # nothing was missed, nothing waited for
    assert way_of(result) == CACHE  # where nothing decodes by itself, by what ran beside prompts
    told = result.to_dict()
    assert told["prefill_chunk"] == 4
    assert told["phases"]["mixed"]["decode_tokens"] == 3


def test_times_of_a_static_queue_by_hand(tmp_path: Path) -> None:
    outcome = easy_run(tmp_path, 2, batch_static=True)
    served = outcome.report.requests
    assert [t.first_token_s for t in served] == [4.0, 4.0, 16.0]
    assert [t.last_token_s for t in served] == [12.0, 8.0, 16.0]
    told = outcome.result.to_dict()
    assert told["batching"] == "static"
    assert "mixed" not in told["phases"]
    assert "mixed_hit_rates" not in told
    assert "prefill_chunk" not in told


def test_a_prompt_in_parts_is_the_same_attention(tmp_path: Path) -> None:
    """Work against keys adds up to that of the whole, exactly; each part reads weights and what is cached anew."""
    hw = hardware(kernel_s=0.0)
    request = RequestInfo(0, 0, 9, 1, "", None)
    trace: Any = SimpleNamespace(n_layers=1, n_experts=2)

    def price(flops_per_s: float, bytes_per_s: float, *parts: tuple[int, int]) -> float:
        import msgspec

        value = msgspec.structs.replace
        gpu = value(
            hw.gpu,
            flops_per_s={"bf16": value(hw.gpu.kernel_floor_s, value=flops_per_s)},
            memory_bandwidth_bytes_per_s=value(hw.gpu.kernel_floor_s, value=bytes_per_s),
        )
        cost = Cost(value(hw, gpu=gpu), model(1, 2, 1), stack(attention=0), "bf16")
        ranges = [Range(request, a, b, PREFILL, a, b == 9) for a, b in parts]
        return sum(cost.attention(Iteration(0, [r], trace)).duration_s for r in ranges)

    inf = float("inf")
    whole, cut = price(1.0, inf, (0, 9)), price(1.0, inf, (0, 4), (4, 7), (7, 9))
    assert whole == cut > 0
    geometry = model(1, 2, 1)
    assert whole == geometry.attention_flops(9, 5.0)  # on average five keys each
    per_key, weights = geometry.kv_bytes_per_token_per_layer("bf16"), geometry.attention_bytes("bf16")
    read = price(inf, 1.0, (0, 4), (4, 7), (7, 9)) - price(inf, 1.0, (0, 9))
    assert read == pytest.approx(2 * weights + (4 + 7) * per_key)


# -- the same in other ways -----------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {"policy": "lru", "hw": "rtx3090", "requests": 5, "batch": 3, "prefill_chunk": 16}


def figures(result: Any) -> dict[str, Any]:
    left_out = ("wall_s", "run_id", "name", "batching", "prefill_chunk", "simulator")
    return {key: value for key, value in result.to_dict().items() if key not in left_out}


def run(**spec: Any) -> Outcome:
    made = prepare(RunSpec(**{**FIELDS, **spec}))
    with made.trace:
        return execute(made)


@pytest.mark.thorough
def test_parts_on_events_and_from_a_tape_and_above_the_bound() -> None:
    """SimPy gives the same times, a recording replays to the same, and no time is below the bound."""
    straight = run().result
    assert straight.phases.mixed.iterations > 3
    on_events = figures(run(sim_simulator="simpy").result)
    mine = figures(straight)
    for key in ("phases", "ttft_s", "tpot_s", "mixed_hit_rates", "simulated_s", "h2d_bytes"):
        assert on_events[key] == mine[key]
    made = prepare(RunSpec(**FIELDS))
    with made.trace:
        outcome, recording = record(made)
        assert recording is not None
        again = timed(made, recording).result
    assert figures(again) == figures(outcome.result) == {**mine, "lower_bound": None}
    assert straight.lower_bound.tpot_s < straight.tpot_s.mean
    assert straight.lower_bound.ttft_s < straight.ttft_s.mean


def test_who_knows_the_future_knows_parts() -> None:
    """Nobody copies less than `belady`, whose future is composed alike."""
    copies = {policy: run(policy=policy).result.demand_copies.n for policy in ("belady", "lru", "lfu")}
    assert copies["belady"] < min(copies["lru"], copies["lfu"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefill-chunk", "0"], "--prefill-chunk, got 0 with --batch 1: tokens of an iteration"),
        (["--prefill-chunk", "7", "--batch", "8"], "--prefill-chunk, got 7 with --batch 8: tokens of an iteration"),
        (
            ["--set", "batch.static=statics"],
            "--set batch.static, got 'statics': on or off",
        ),
        (
            ["--set", "batch.static=on", "--prefill-chunk", "64"],
            "got 64 with --set batch.static=on: its prompts run whole",
        ),
        (["--prefill-chunk", "64", "--real=cpu"], "--prefill-chunk, got 64 with --real: "),
        (["--set", "batch.static=on", "--real=cpu"], "--set batch.static, got True with --real: "),
    ],
)
def test_what_does_not_go_together(options: list[str], said: str) -> None:
    from sim.cli.run import command

    real = ["--model", "cpu-small"] if "--real=cpu" in options else []
    done = CliRunner().invoke(command, ["--policy", "lru", "--hw", "rtx3090", "--requests", "1", *options, *real])
    assert isinstance(done.exception, BadInput), done.output
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


# -- policies -------------------------------------------------------------------------------------------------------


def test_a_prediction_for_decode_tokens_is_waited_for_beside_prompts(tmp_path: Path) -> None:
    """sida: tables of prompts are ready in its queue, those of generated tokens are not."""
    trace: Any = None
    one, two = RequestInfo(0, 0, 4, 3, "", None), RequestInfo(1, 6, 4, 3, "", None)
    part, token = Range(one, 0, 4, PREFILL, 0), Range(two, 10, 11, DECODE, 4)
    policy = Sida()
    for ranges, waits in (([part], False), ([token], True), ([token, part], True)):
        first = next(iter(policy.iteration_start(Iteration(0, ranges, trace), SimpleNamespace())))
        assert isinstance(first, Predict)
        assert first.blocking is waits
