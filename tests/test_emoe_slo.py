"""eMoE's request scheduling (section 3.5): equation 3 and Algorithm 1 on hand-written queues, and what a run gives."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from cpu_bench import written
from easy_numbers import setup as easy_setup

import moesim
from policies.lru import Lru
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.setup.request_estimates import estimated
from sim.setup.setup import Setup
from sim.workload.batching import Batching
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.known_requests import Profiled
from sim.workload.schedulers.emoe_slo import Scheduled, TaskAware, expected_latency_s
from sim.workload.slo import Slos
from traces.format.reader import Trace

# Tasks by name: what they put out is profiled, and what they are promised.
OUTPUTS = {"short": 10.0, "middle": 40.0, "long": 90.0}


def asked(*rows: tuple[str, int, float]) -> list[RequestInfo]:
    """(task, input tokens, arrival) of requests that put out 50 tokens each."""
    return [RequestInfo(i, 1000 * i, inputs, 50, task, at_s) for i, (task, inputs, at_s) in enumerate(rows)]


def estimated_of(setup: Setup, needs: Collection[str]) -> Profiled:
    return estimated(setup, Profiled.of(setup.store, setup.slos), needs)


def scheduler(
    rows: list[tuple[str, int, float]], slos: dict[str, dict[str, float]], *, max_tokens: float = math.inf, **known: Any
) -> TaskAware:
    """Loading experts takes 1 s, an input token 0.01 s."""
    prices = {"token_s": 0.01, "any_loading_s": 1.0, "any_outputs": 20.0, **known}
    return TaskAware(asked(*rows), True, 0, Profiled(OUTPUTS, slos=Slos(slos), max_tokens=max_tokens, **prices))


def starts(made: TaskAware, now_s: float) -> list[int]:
    """Who is scheduled at an instant, in order: as long as somebody is picked, he is taken and started."""
    found = []
    while (request := made.pick(now_s)) is not None:
        made.take(request)
        made.started(request)
        found.append(request.index)
    return found


def decodes(made: TaskAware, index: int, tokens: int) -> None:
    """A request has put out so many tokens in all."""
    request = RequestInfo(index, 1000 * index, made.running[index].inputs, 50, "", 0.0)
    row = request.first_row + request.prompt_len + tokens - 2
    made.ran([Range(request, row, row + 1, DECODE, 0)])


# -- equation 3 -------------------------------------------------------------------------------------------------------


def test_equation_3() -> None:
    """Three run; 200 input tokens join; loading takes 3 s, an input token 0.01 s; it is second 10."""
    short, middle, long = (Scheduled(50, n, 100.0, at_s) for n, at_s in ((10, 9.0), (40, 5.0), (90, 10.0)))
    running = [short, middle, long]
    # dE + (W + n x G) x c + r: two end after the short one, one after the middle one, none after the long one.
    for request, expected in (
        (short, 3 + (200 + 2 * 10) * 0.01 + 1),
        (middle, 3 + (200 + 1 * 40) * 0.01 + 5),
        (long, 3 + 200 * 0.01),
    ):
        assert expected_latency_s(request, running, 200, 3.0, 0.01, 10.0) == pytest.approx(expected)
    middle.put_out = 35  # five to go: it ends before the short one
    assert expected_latency_s(short, running, 0, 0.0, 0.01, 10.0) == pytest.approx(1 * 10 * 0.01 + 1)


def test_tokens_to_go_start_anew_at_five_per_cent() -> None:
    """`If G reaches 0 but the request is not completed, G is reset to a value proportional (e.g., 5%)`."""
    one = Scheduled(10, 40, 1.0)
    left = []
    for one.put_out in (0, 1, 39, 40, 41, 42, 43):
        left.append(one.left)
    assert left == [40, 39, 1, 2, 1, 2, 1]
    assert [Scheduled(1, 1, 1.0, 0.0, n).left for n in (0, 1, 2, 9)] == [1, 1, 1, 1]


# -- Algorithm 1 ------------------------------------------------------------------------------------------------------

PROMISED = {"short": {"ttft_s": 5.0, "e2e_s": 4.0}, "middle": {"ttft_s": 2.0, "e2e_s": 50.0}, "long": {"ttft_s": 9.0}}


def test_most_stringent_first() -> None:
    """Lines 2 and 3: by when the first token is wanted, not by who came first; equals in order of arrival."""
    rows = [("long", 5, 0.0), ("short", 5, 0.0), ("middle", 5, 1.0), ("middle", 5, 1.0), ("other", 5, 1.0)]
    # Deadlines: 9, 5, 3, 3, never.
    assert starts(scheduler(rows, {**PROMISED, "short": {"ttft_s": 5.0}}), 1.0) == [2, 3, 1, 0, 4]


def test_tokens_stay_below_the_most() -> None:
    """Line 4: who would take the tokens of all to T_max stays in the queue, and others behind him are looked at."""
    rows = [("middle", 100, 0.0), ("middle", 300, 0.0), ("middle", 250, 0.0), ("middle", 49, 0.0), ("long", 1, 0.0)]
    assert starts(scheduler(rows, PROMISED, max_tokens=400), 0.0) == [0, 2, 3]  # 399 tokens; 400 are not below 400
    assert starts(scheduler(rows, PROMISED, max_tokens=401), 0.0) == [0, 1]
    assert starts(scheduler(rows, PROMISED), 0.0) == [0, 1, 2, 3, 4]


def test_nobody_who_runs_may_miss_his_slo_for_it() -> None:
    """Line 5: a short one has run for a second and may take 4 s. 390 tokens are too many: 1 + 3.9 + 1 = 5.9 s."""
    rows = [("short", 5, 0.0), ("middle", 390, 1.0), ("middle", 150, 1.0), ("long", 30, 1.0)]
    made = scheduler(rows, PROMISED)
    assert starts(made, 0.0) == [0]
    # 150: 1 + 1.5 + 1 = 3.5 s. 30 more, and one that ends after it: 1 + 1.8 + 1 x 10 x 0.01 + 1 = 3.9 s.
    assert starts(made, 1.0) == [2, 3]
    assert made.stats()["held_back_n"] == 1
    rows[3] = ("long", 40, 1.0)  # 4 s is not below 4 s
    made = scheduler(rows, PROMISED)
    assert (starts(made, 0.0), starts(made, 1.0)) == ([0], [2])


def test_several_that_join_at_once_count_together() -> None:
    """`Scheduling a new batch of requests introduces an initial upfront latency cost`: W is of all of them."""
    rows = [("short", 5, 0.0), ("middle", 150, 0.0), ("middle", 150, 0.0)]
    assert starts(scheduler(rows, {**PROMISED, "short": {"ttft_s": 1.0, "e2e_s": 4.0}}), 0.0) == [0, 1]
    apart = scheduler(rows, {**PROMISED, "short": {"ttft_s": 1.0, "e2e_s": 4.0}})
    assert [apart.pick(0.0).index for _ in range(2)] == [0, 0]
    assert starts(apart, 0.0) == [0, 1]
    decodes(apart, 0, 9)  # one to go: 1 + 1.5 + 1 x 1 x 0.01 + 1 = 3.51 s
    apart.finished(RequestInfo(7, 0, 1, 1, "", 0.0))
    assert starts(apart, 1.0) == [2]


def test_the_queue_counts_for_the_slo() -> None:
    """r begins when a request is scheduled; what it waited before is off the 4 s that it may take."""
    rows = [("short", 5, 0.0), ("long", 100, 0.0)]
    made = scheduler(rows, {**PROMISED, "short": {"ttft_s": 3.0, "e2e_s": 4.0}})
    assert starts(made, 2.5) == [0]  # 1.5 s are left; 1 + 1 s would be spent
    assert made.running[0].limit_s == 1.5
    assert starts(scheduler(rows, {**PROMISED, "short": {"ttft_s": 3.0, "e2e_s": 4.0}}), 1.5) == [0, 1]


def test_an_slo_of_tokens_is_a_latency_too() -> None:
    """`ttft_s` and nine further tokens of `tpot_s`; with a TTFT alone nothing that joins can break it."""
    rows = [("short", 5, 0.0), ("long", 400, 0.0)]
    for slo, limit_s in (
        ({"ttft_s": 1.0, "tpot_s": 0.5}, 5.5),
        ({"ttft_s": 1.0, "tpot_s": 0.5, "e2e_s": 5.0}, 5.0),
        ({"ttft_s": 1.0}, math.inf),
        ({"tpot_s": 0.5}, math.inf),
    ):
        made = scheduler(rows, {"short": slo})
        made.pick(0.0)
        made.started(made.waiting[0])
        assert made.running[0].limit_s == limit_s


def test_it_runs_when_somebody_comes_or_ends() -> None:
    """`whenever a new request arrives or a running request completes`: in between nobody is reconsidered."""
    rows = [("short", 5, 0.0), ("long", 390, 0.0), ("long", 10, 6.0)]
    made = scheduler(rows, PROMISED)
    assert starts(made, 0.0) == [0]
    decodes(made, 0, 30)  # far beyond its profile: 1 to go
    made.running[0].limit_s = 100.0  # it would be let in by now
    assert starts(made, 5.0) == []
    assert starts(made, 6.0) == [1, 2]


def test_who_has_missed_his_slo_blocks_nobody() -> None:
    """As printed, line 5 would be false until he ended."""
    rows = [("short", 5, 0.0), ("long", 10, 50.0)]
    made = scheduler(rows, PROMISED)
    assert starts(made, 0.0) == [0]
    assert starts(made, 50.0) == [1]  # the short one may take 4 s and has taken 50
    kept = scheduler(rows, {**PROMISED, "short": {"ttft_s": 5.0, "e2e_s": 51.0}})
    assert starts(kept, 0.0) == [0]
    assert starts(kept, 50.0) == []  # 1 + 0.1 + 50 s: he would miss it for that


def test_who_waits_and_has_missed_his_comes_last_and_is_counted() -> None:
    rows = [("middle", 5, 0.0), ("middle", 5, 1.0), ("long", 5, 2.0), ("long", 5, 3.0)]
    made = scheduler(rows, PROMISED)
    # At second 3 deadlines 2 and 3 have passed (a token that begins at its deadline is late); 11 and 12 have not.
    assert starts(made, 3.0) == [2, 3, 0, 1]
    assert made.stats()["started_late_n"] == 2


def test_somebody_runs_where_nobody_does() -> None:
    """Who asks for more than there is room for runs alone; the queue ends."""
    rows = [("middle", 500, 0.0), ("long", 700, 0.0)]
    made = scheduler(rows, PROMISED, max_tokens=400)
    assert starts(made, 0.0) == [0]
    made.finished(asked(*rows)[0])
    assert starts(made, 1.0) == [1]


def test_a_queue_from_end_to_end() -> None:
    """One slot, a second per token, four per request. 1 is wanted first, then 0 by second 7; at 8 the deadline of 2 has
    just passed, so that 3 goes before it."""
    rows = (("a", 0.0), ("b", 0.0), ("a", 1.0), ("c", 2.0))
    requests = [RequestInfo(i, 10 * i, 3, 2, task, at_s) for i, (task, at_s) in enumerate(rows)]
    slos = Slos({"a": {"ttft_s": 7.0}, "b": {"ttft_s": 4.0}, "c": {"ttft_s": 60.0}})
    batching = Batching(TaskAware(requests, True, 0, Profiled({"a": 2.0}, 2.0, slos)), 1)
    now_s, order = 0.0, []
    while (composed := batching.next(now_s)) is not None:
        assert isinstance(composed, list)
        now_s += sum(r.stop_row - r.start_row for r in composed)
        order += [r.request.index for r in composed if r.phase == PREFILL]
        batching.served([r.request for r in composed if r.phase == DECODE], now_s)
    assert order == [1, 0, 3, 2]


# -- what it rests on -------------------------------------------------------------------------------------------------


def test_prices_by_hand(tmp_path: Path) -> None:
    """Three tokens go to 3 and 2 experts of two layers: 2 x 1 s of attention, 5 x 2 s, 1 s of the head."""
    rows = [[[0], [0]], [[1], [1]], [[2], [1]], [[3], [3]]]
    path = written(tmp_path / "t.safetensors", [(3, 1, "store"), (1, 1, "test")], rows, 4)
    with Trace(path) as trace:
        found = estimated_of(easy_setup(Lru(), trace, 2), TaskAware.needs)
        assert found.token_s == pytest.approx(13 / 3)
        # Five experts, six of eight of which are not there, 10 s each.
        assert found.any_loading_s == pytest.approx(5 * 6 / 8 * 10)
        assert estimated_of(easy_setup(Lru(), trace, 8), TaskAware.needs).any_loading_s == 0.0
        both = estimated_of(easy_setup(Lru(), trace, 2, gpus=2), TaskAware.needs)  # 4 of 8 are there, on two links
        assert (both.token_s, both.any_loading_s) == pytest.approx(((3 + 10 / 2) / 3, 5 * 4 / 8 * 10 / 2))
        assert estimated_of(easy_setup(Lru(), trace, 2), ("outputs",)).token_s == 0.0


def test_an_average_prompt_is_as_long_as_it_takes() -> None:
    """c times the tokens of a prompt is what its prefill takes, where nothing has to be copied."""
    setup = prepare(RunSpec(policy="gpu_only", hw="a100-80g-sxm", gpus=2, requests=18))
    with setup.trace:
        known = estimated_of(setup, TaskAware.needs)
        served = execute(setup, bounds=False).report.requests
    spent_s = sum(times.service_s for times in served)
    assert known.token_s * sum(times.request.prompt_len for times in served) == pytest.approx(spent_s, rel=0.25)
    assert set(known.loading_s.values()) == {0.0}


# -- its effect -------------------------------------------------------------------------------------------------------


def test_more_requests_keep_their_slo_than_under_fcfs() -> None:
    """The published direction, near capacity: tasks of which two are in a hurry (docs/schedulers.md)."""
    hurried, patient = {"ttft_s": 1.0, "e2e_s": 8.0}, {"ttft_s": 10.0, "e2e_s": 30.0}
    load = {
        "arrivals": "poisson:4.5",
        "requests": 80,
        "batch": 8,
        "slo": {"code": hurried, "french": hurried, "*": patient},
    }
    kept = {}
    for name in ("fcfs", "emoe_slo"):
        result = moesim.simulate("gpu_only", "a100-40g-pcie", gpus=4, trace="mixtral-8x7b-chat", scheduler=name, **load)
        kept[name] = result.slo.attained_frac
        told = result.scheduling
    assert kept["emoe_slo"] > kept["fcfs"] + 0.05
    assert set(told.stats) >= {"token_s", "loading_s", "max_tokens", "held_back_n", "started_late_n"}
    assert f"emoe_slo: token {1e6 * told.stats['token_s']:.1f} us" in str(result)
