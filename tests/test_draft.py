"""Speculative decoding: which rows a step has, what it takes of them, what it costs, and what results say of it."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from easy_numbers import setup as easy_setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batching import composed, queue
from tiny_traces import from_rows

from policies.lru import Lru
from sim.base.errors import BadInput
from sim.cli.sweep import command as sweep
from sim.options import RunSpec
from sim.real.requirements import check
from sim.run import Outcome, execute, prepare, record, timed
from sim.setup.drafting import Drafter
from sim.workload.batching import Batching
from sim.workload.draft_options import MOST_COUNT_BYTES, Draft, read_accepted
from sim.workload.draft_steps import Drafts
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.kv_memory import KvMemory, KvPool
from sim.workload.schedulers.fcfs import FirstCome
from traces.format.reader import Trace

FIELDS: dict[str, Any] = {"policy": "lru", "hw": "rtx3090", "requests": 2, "cache": "20%"}


def run(progress: Any = None, **spec: Any) -> Outcome:
    made = prepare(RunSpec(**{**FIELDS, **spec}))
    with made.trace:
        return execute(made, progress=progress)


def figures(result: Any) -> dict[str, Any]:
    return {key: value for key, value in result.to_dict().items() if key not in ("wall_s", "simulator")}


def drafts(k: int, *acceptance: float, rejected: str = "next", seed: int = 0) -> Drafts:
    return Drafts(Draft(k, acceptance, rejected=rejected), seed)


# -- rows -----------------------------------------------------------------------------------------------------------


def test_all_taken_advances_by_k_plus_1() -> None:
    """Nine rows to decode: three, three, and no more drafted than the answer takes."""
    steps = composed(Batching(FirstCome(queue([(2, 9)])), 1, drafts=drafts(2, 1.0)))
    assert [step[0][1:3] for step in steps] == [(0, 2), (2, 5), (5, 8), (8, 10)]
    assert [step[0][3] for step in steps] == [PREFILL, DECODE, DECODE, DECODE]


def test_none_taken_advances_by_one() -> None:
    """Each step has k + 1 rows, as long as so many are left, and goes on one further."""
    steps = composed(Batching(FirstCome(queue([(2, 6)])), 1, drafts=drafts(2, 0.0)))
    assert [step[0][1:3] for step in steps] == [(0, 2), (2, 5), (3, 6), (4, 7), (5, 7), (6, 7)]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6), st.floats(0, 1), st.integers(1, 60), st.integers(0, 3), st.sampled_from(["next", "elsewhere"])
)
def test_every_row_is_taken_once(k: int, acceptance: float, outputs: int, seed: int, rejected: str) -> None:
    """Whatever is drafted, tokens come out in order, and a step has no more rows than its request has left."""
    request = RequestInfo(3, 10, 4, outputs, "", None)
    found, row, stop = drafts(k, acceptance, rejected=rejected, seed=seed), 14, 13 + outputs
    while row < stop:
        ranges = found.step(request, row, stop)
        last = ranges[-1]
        assert last.start_row == row < last.taken_row <= stop
        assert sum(r.stop_row - r.start_row for r in ranges) == min(k, stop - row - 1) + 1
        assert all(14 <= r.start_row < r.stop_row <= stop and r.phase == DECODE for r in ranges)
        assert last.context == row - 10
        for r in ranges[:-1]:
            assert r.n_rejected == r.stop_row - r.start_row
            assert r.context == last.stop_row - 10
        row = last.taken_row


def test_rejected_drafts_stand_anywhere() -> None:
    """In any quarter of the answer alike, although the draw that rejected a draft is known to be high."""
    quarters = [0, 0, 0, 0]
    for index in range(300):
        request = RequestInfo(index, 0, 1, 100, "", None)
        found, row = drafts(2, 0.8, rejected="elsewhere", seed=5), 1
        while row < 60:
            *stands, last = found.step(request, row, 100)
            for r in stands:
                quarters[min(3, (r.start_row - 1) * 4 // 98)] += 1
            row = last.taken_row
    n = sum(quarters)
    assert n > 2000
    assert all(abs(each - n / 4) < 5 * math.sqrt(n * 3 / 16) for each in quarters), quarters


def test_tokens_a_step_are_what_the_formula_says() -> None:
    """(1 - a^(k+1)) / (1 - a), within five standard errors of many draws; by position, the product of shares."""
    for k, acceptance in ((1, (0.5,)), (4, (0.7,)), (8, (0.9,)), (4, (0.8, 0.7, 0.6, 0.5))):
        request = RequestInfo(0, 0, 1, 40_000, "", None)
        found, row, taken = drafts(k, *acceptance), 1, []
        while row < 39_000:
            last = found.step(request, row, 40_000)[-1]
            taken.append(last.taken_row - row)
            row = last.taken_row
        expected = Draft(k, acceptance).expected()
        if len(acceptance) == 1:
            a = acceptance[0]
            assert expected == pytest.approx((1 - a ** (k + 1)) / (1 - a))
        assert abs(np.mean(taken) - expected) < 5 * np.std(taken) / math.sqrt(len(taken))


def test_a_longer_draft_takes_what_a_shorter_takes() -> None:
    request = RequestInfo(5, 0, 1, 500, "", None)
    taken = [[drafts(k, 0.6).step(request, row, 500)[-1].taken_row - row for row in range(1, 480)] for k in range(9)]
    for k, (fewer, more) in enumerate(pairwise(taken)):
        assert all(b in (a, k + 2) and (a == b or a == k + 1) for a, b in zip(fewer, more, strict=True))
    assert taken[0] == [1] * 479


def test_recorded_counts_are_taken_in_turn() -> None:
    """By request where the file has them; a count beyond k is cut, and a list that ends begins anew."""
    requests = [RequestInfo(i, 0, 1, 100, "", None) for i in range(2)]
    found = Drafts(Draft(2, accepted="x.csv"), 0, [[0, 3], [1]])
    for request, expected in ((requests[0], [1, 3, 1, 3]), (requests[1], [2, 2, 2])):
        assert [found.step(request, 10, 90)[-1].taken_row - 10 for _ in expected] == expected


def test_a_file_of_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("request,accepted\na,1\nb,0\na,4\n")
    assert read_accepted(path) == [[1, 4], [0]]
    path.write_text("accepted\n2\n0\n")
    assert read_accepted(path) == [[2, 0]]
    for text, wrong in (("x\n1\n", "no column accepted"), ("accepted\n-1\n", "row 1"), ("accepted\n", "no rows")):
        path.write_text(text)
        with pytest.raises(BadInput, match=wrong):
            read_accepted(path)
    path.write_text("\ufeffaccepted\n2\n", encoding="utf-8")  # as spreadsheets save it
    assert read_accepted(path) == [[2]]
    result = run(draft=f"k=3,accepted={_counts(path, [3, 3, 3])}").result
    assert result.draft.acceptance == 1.0
    assert result.run_id != run(draft=f"k=3,accepted={_counts(path, [3, 3, 2])}").result.run_id


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_counts_that_never_end_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(BadInput, match="name a CSV with a column accepted"):
            read_accepted(path)
    (tmp_path / "large.csv").write_text("accepted\n")
    os.truncate(tmp_path / "large.csv", MOST_COUNT_BYTES + 1)
    with pytest.raises(BadInput, match="64,000,001 bytes: at most 64,000,000"):
        read_accepted(tmp_path / "large.csv")


def _counts(path: Path, counts: list[int]) -> Path:
    path.write_text("\n".join(["accepted", *map(str, counts)]))
    return path


def test_pages_of_rejected_drafts_are_given_back() -> None:
    """Pages of one token: a step holds k + 1, and keeps those of what it takes."""
    kv = KvMemory(KvPool(20, 1, 1))
    batching = Batching(FirstCome(queue([(2, 9)])), 1, kv, drafts=drafts(3, 0.0))
    held = []
    while isinstance(batching.next(0.0), list):
        held.append(kv.n_used)
    assert held == [2, 6, 7, 8, 9, 10, 10, 10, 10]  # two of the prompt; the first step 1 + 3 more; ends at 10 tokens
    assert kv.n_free == 20


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_pre_empted_requests_with_drafts_put_out_everything(preempt: str) -> None:
    told: list[tuple[int, int]] = []
    pool: dict[str, Any] = {"kv_memory": 30_000_000, "kv_preempt": preempt}
    draft = "k=3,acceptance=0.6"
    outcome = run(lambda put_out, total: told.append((put_out, total)), batch=3, requests=4, draft=draft, **pool)
    assert outcome.result.kv.preemptions > 0
    total = sum(request.outputs for request in outcome.setup.requests)
    assert told[-1] == (total, total)


# -- the same in other ways -----------------------------------------------------------------------------------------


def test_k_0_is_decoding_as_ever() -> None:
    told = figures(run().result)
    assert figures(run(draft="k=0,acceptance=0.7").result) == told
    assert "draft" not in told
    assert "draft_bytes" not in told["memory"]


def test_both_engines_a_tape_and_several_replicas() -> None:
    """Without contention, SimPy gives the same; a recording replays to the same; of replicas, counts are summed."""
    elsewhere: dict[str, Any] = {"draft": "k=5,acceptance=0.7,rejected=elsewhere,draft_s=0.004", "batch": 2}
    for spec in ({"draft": "k=5,acceptance=0.9", "requests": 1}, {**elsewhere, "prefill_chunk": 16}):
        arithmetic, simpy = (
            figures(run(**spec, sim_simulator=engine, sim_contention=False).result) for engine in ("core", "simpy")
        )
        for one in (arithmetic, simpy):
            del one["by_layer"]  # sums of waits in another order
        assert arithmetic == simpy
    made = prepare(RunSpec(**FIELDS, draft="k=3,acceptance=0.7"))
    with made.trace:
        outcome, recording = record(made)
        assert recording is not None
        assert figures(timed(made, recording).result) == figures(outcome.result)
    load = {"requests": 4, "arrivals": "poisson:0.02"}
    alone, both = (run(draft="k=3,acceptance=0.7", replicas=n, **load).result for n in (1, 2))
    assert alone.draft.accepted == both.draft.accepted > 0
    assert alone.draft.steps == both.draft.steps


def test_the_same_drafts_under_every_policy_and_on_every_machine() -> None:
    counts = {
        (policy, hw): run(policy=policy, hw=hw, draft="k=3,acceptance=0.7,draft_s=0.001").result.draft
        for policy in ("lru", "fiddler", "belady")
        for hw in ("rtx3090", "rtx4090")
    }
    assert len({(one.steps, one.accepted, tuple(one.acceptance_by_position)) for one in counts.values()}) == 1


@pytest.mark.thorough
def test_no_one_is_faster_than_the_bound_in_any_batch() -> None:
    """Drawn runs: batches, chunks, pages, GPUs, draft models. What came out is what was accepted and one a step."""
    drawn = random.Random(5)
    for seed in range(60):
        k = drawn.choice([1, 2, 4, 7])
        batch = drawn.choice([1, 2, 3])
        cost = drawn.choice(["", ",draft_s=0.002", ",model=olmoe-1b-7b"])
        more: dict[str, Any] = drawn.choice(
            [{}, {}, {"batch_static": True}, {"prefill_chunk": batch * (k + 1) + drawn.choice([0, 5, 30])}]
        )
        gpus = 1 if cost.startswith(",model") else drawn.choice([1, 1, 2])
        share = f"acceptance={drawn.choice([0, 0.3, 0.7, 0.95, 1])},rejected={drawn.choice(['next', 'elsewhere'])}"
        found = run(
            policy=drawn.choice(["lru", "perfect_prefetch", "fiddler", "belady", "moe_speq", "moe_cache"]),
            trace=drawn.choice(["mixtral-8x7b-small", "qwen1.5-moe-chat"]),
            arrivals="none",
            cache=None,
            requests=drawn.choice([1, 2, 3]),
            seed=seed,
            batch=batch,
            gpus=gpus,
            kv_memory=drawn.choice([None, None, 60_000_000]),
            draft=f"k={k},{share}{cost}",
            **more,
        ).result
        assert found.lower_bound.tpot_s <= found.tpot_s.mean
        assert found.lower_bound.ttft_s <= found.ttft_s.mean
        assert found.draft.accepted + found.draft.steps == found.decode_tokens


# -- what it takes --------------------------------------------------------------------------------------------------

ROWS = [[[0]], [[1]], [[0]], [[1]]]  # a prompt of one token, and three to decode


def easy_run(tmp_path: Path, draft: str | None) -> Outcome:
    """Two of four experts fit; a copy takes 10 s, an expert 2 s, attention and the head 1 s each."""
    with Trace(from_rows(tmp_path / "t.safetensors", ROWS, 4, [(1, 4)])) as trace:
        made = easy_setup(Lru(scope="global"), trace, 2)
        if draft is not None:
            spec = msgspec.structs.replace(made.spec, draft=draft)
            made = replace(made, spec=spec, drafter=Drafter.of(spec))
        return execute(made, bounds=False)


def test_times_by_hand(tmp_path: Path) -> None:
    """The prompt ends at 1 + 10 + 2 + 1 = 14 s with expert 0 there.

    One by one: 1 + 10 + 2 + 1, then 4, then 4 s. All drafts taken: one step, whose copy of expert 1 hides expert 0:
    1 + 10 + 2 + 1. None taken: that step; one of two rows, 1 + 2 + 2 + 1; one of one row, 1 + 2 + 1.
    """
    for draft, tpot_s, union in (
        (None, 22 / 3, 1.0),
        ("k=2,acceptance=1", 14 / 3, 2.0),
        ("k=2,acceptance=0", 24 / 3, 5 / 3),
        ("k=2,acceptance=1,draft_s=0.5", 15 / 3, 2.0),
        ("k=2,acceptance=0,draft_s=0.5", 25.5 / 3, 5 / 3),  # two, one and no tokens drafted
    ):
        outcome = easy_run(tmp_path, draft)
        (served,) = outcome.report.requests
        assert served.first_token_s == 14.0
        assert outcome.result.tpot_s.mean == pytest.approx(tpot_s, rel=1e-12)
        assert outcome.result.distinct_experts.per_layer == pytest.approx(union)
        assert outcome.result.n_outputs == 4
    assert outcome.result.draft.draft_time_s == 1.5
    assert outcome.result.draft.acceptance_by_position == [0.0, None]
    assert (outcome.result.phases.decode.iterations, outcome.result.phases.decode.tokens) == (3, 6)


def test_the_union_is_that_of_the_steps_rows() -> None:
    """Counted row by row from the trace, with the steps that were composed."""
    made = prepare(RunSpec(**FIELDS, draft="k=4,acceptance=0.7"))
    with made.trace as trace:
        batching, unions = made.batching(open_loop=False), []
        while isinstance(ranges := batching.next(math.inf), list):
            (r,) = ranges
            if r.phase == DECODE:
                ids = np.asarray(trace.experts[r.start_row : r.stop_row])
                unions += [len(set(ids[:, layer].ravel().tolist())) for layer in range(trace.n_layers)]
        found = execute(made).result
    assert found.distinct_experts.per_layer == pytest.approx(np.mean(unions), rel=1e-12)
    assert found.distinct_experts.per_layer > run().result.distinct_experts.per_layer


def test_a_step_attends_and_puts_out_k_plus_1_rows() -> None:
    """Priced as a part of k + 1 rows after the context; the head for as many tokens."""
    made = prepare(RunSpec(**FIELDS))
    made.close()
    cost, request = made.cost(), made.requests[0]
    from sim.workload.iterations import Iteration

    def step(n: int) -> Iteration:
        return Iteration(0, [Range(request, 30, 30 + n, DECODE, 30 - request.first_row)], made.trace)

    assert step(5).n_out == 5
    alike = Iteration(0, [Range(request, 30, 35, PREFILL, 30 - request.first_row)], made.trace)
    assert cost.attention(step(5)).duration_s == cost.attention(alike).duration_s > cost.attention(step(1)).duration_s


def test_a_draft_model_takes_time_and_room() -> None:
    """Its weights and keys leave the expert budget; drafting takes what its passes take, as told."""
    without, found = (
        run(cache=None, policy="on_demand", draft=f"k=3,acceptance=0.7{more}").result
        for more in ("", ",model=olmoe-1b-7b")
    )
    n_bytes = found.draft.draft_bytes
    assert n_bytes == found.memory.draft_bytes > 2 * 6.9e9 * 0.99
    assert without.memory.cache_capacity_bytes - found.memory.cache_capacity_bytes == n_bytes
    assert without.draft.draft_time_s == 0.0
    # 1.28e9 active parameters of two bytes at 936 GB/s take 2.7 ms; no pass is faster, nor many times slower.
    each_s = found.draft.draft_time_s / found.draft.drafted
    assert 0.0027 < each_s < 0.01
    assert found.draft.drafted == without.draft.drafted


# -- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no such part"),
        ("k=4", "no acceptance"),
        ("acceptance=0.7", "k, the drafted tokens of a step, is missing"),
        ("k=-1,acceptance=0.7", "from 0 to 64"),
        ("k=4,acceptance=1.2", r"shares in \[0, 1\]"),
        ("k=4,acceptance=nan", r"shares in \[0, 1\]"),
        ("k=4,acceptance=0.8/0.7", "of 2 positions"),
        ("k=4,acceptence=0.7", "did you mean 'acceptance'"),
        ("k=4,k=5,acceptance=0.7", "k twice"),
        ("k=4,acceptance=0.7,ngram,draft_s=1", "one cost at a time"),
        ("k=4,acceptance=0.7,draft_s=-1", "seconds for each drafted token"),
        ("k=4,acceptance=0.7,rejected=never", "no such stand-in"),
        ("k=4,acceptance=0.7,accepted=x.csv", "both"),
        ("k=4,acceptance=0.7,draft_s=1e308", "at most 3600"),
        ("k=4,accepted=nowhere.csv", "nowhere.csv"),
        ("k=4,acceptance=0.7,model=nobody", "nobody"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, wrong: str) -> None:
    with pytest.raises(BadInput, match=wrong) as error:
        prepare(RunSpec(**FIELDS, draft=text)).close()
    assert "\n" not in str(error.value)


def test_what_does_not_go_together() -> None:
    for spec, wrong in (
        ({"prefill_chunk": 8, "batch": 2}, "at least so many"),
        ({"batch": 2, "scheduler": "batch_affinity"}, "shares out"),
    ):
        with pytest.raises(BadInput, match=wrong):
            prepare(RunSpec(**FIELDS, draft="k=4,acceptance=0.7", **spec)).close()


def test_real_runs_refuse_it() -> None:
    made = prepare(RunSpec(**FIELDS, draft="k=4,acceptance=0.7"))
    made.close()
    with pytest.raises(BadInput, match=r"--draft, got .* with --real: it decodes a token at a time"):
        check(made)


def test_a_sweep_says_at_which_acceptance_drafts_break_even() -> None:
    """The straight line between two points, beside replays at that very acceptance and on either side of it."""
    words = ["--policy", "lru", "--hw", "rtx3090", "--requests", "4", "--workers", "1"]
    words += ["--trace", "qwen1.5-moe-chat", "--arrivals", "none"]
    said = json.loads(CliRunner().invoke(sweep, [*words, "--draft", "k=0/4,acceptance=0.1:0.9:0.2", "--json"]).stdout)
    (found,) = said["break_even"]
    at = found["acceptance"]
    assert (found["policy"], found["draft"]) == ("lru", "k=4")
    low = max(one["acceptance"] for one in found["points"] if one["tpot_s"] >= found["tpot_without_s"])
    high = min(one["acceptance"] for one in found["points"] if one["acceptance"] > low)
    assert low <= at <= high
    text = " ".join(CliRunner().invoke(sweep, [*words, "--draft", "k=0/4,acceptance=0.1:0.9:0.2"]).stdout.split())
    assert f"k=4 with lru: drafts break even at an acceptance of {at:.2f}" in text
    assert "n-gram drafts cost nothing here, in time or memory" in text
    dear = " ".join(
        CliRunner().invoke(sweep, [*words, "--draft", "k=0/4,acceptance=0.1:0.9:0.4,draft_s=3"]).stdout.split()
    )
    assert "drafts do not pay up to an acceptance of 0.9" in dear
    assert "n-gram" not in dear
