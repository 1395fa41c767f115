"""Requests over time: queues that theory knows, waits recomputed one by one, who goes next, what was promised."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from easy_numbers import setup as easy_setup
from grids import few_each_time
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import from_rows

from policies.gpu_only import GpuOnly
from sim.base.errors import BadInput
from sim.base.lanes import H2D
from sim.conformance.scheduling import Foretold
from sim.engine.run_loop import RequestTimes, Spent
from sim.options import RunSpec
from sim.results.load import Moments, interval, parts, taken_while_some_wait
from sim.run import Outcome, execute, prepare
from sim.workload import schedulers
from sim.workload.batching import Batching
from sim.workload.iterations import RequestInfo
from sim.workload.known_requests import Profiled
from sim.workload.load import DRAWN, load_of
from sim.workload.slo import Slos, parse_slo
from traces.format.reader import Trace


class Server:
    """Nothing is offloaded: a request takes as long as its tokens, and nothing else is waited for.

    Args:
        lengths: (prompt, outputs) of the requests that are recorded.
    """

    def __init__(self, folder: Path, lengths: list[tuple[int, int]]) -> None:
        rows = [[[0]] for prompt, outputs in lengths for _ in range(prompt + outputs - 1)]
        self.path = from_rows(folder / "server.safetensors", rows, 2, lengths)

    def run(
        self, source: str, n: int, batch: int = 1, scheduler: str | None = None, seed: int = 0, **spec: Any
    ) -> Outcome:
        with Trace(self.path) as trace:
            made = easy_setup(GpuOnly(), trace, 2, batch=batch)
            load = load_of(made.requests, source, n, seed)
            fields = {"hw": "easy", "policy": "gpu_only", "batch": batch, "arrivals": source, "scheduler": scheduler}
            loaded = {"requests": load.requests, "open_loop": load.open_loop, "clients": load.clients}
            return execute(replace(made, **loaded, spec=RunSpec(**fields, **spec)), bounds=False)

    def service_s(self) -> list[float]:
        """Of every recorded request, alone."""
        served = self.run("none", len(self.lengths())).report.requests
        return [t.last_token_s - t.begun_s for t in served]

    def lengths(self) -> list[RequestInfo]:
        with Trace(self.path) as trace:
            return easy_setup(GpuOnly(), trace, 2).requests


def standard_error(values: list[float], n_batches: int = 20) -> float:
    """Of the mean of a series whose neighbours resemble one another: by means of batches."""
    means = [float(np.mean(part)) for part in np.array_split(values, n_batches)]
    return float(np.std(means, ddof=1) / math.sqrt(n_batches))


@pytest.mark.parametrize("load_frac", few_each_time([0.5, 0.8], [0.8]))
def test_waits_as_pollaczek_and_khinchine_have_them(tmp_path: Path, load_frac: float) -> None:
    """M/D/1 and M/G/1: the mean wait is rate * E[S^2] / (2 (1 - load))."""
    for name, lengths in (("d", [(1, 1)]), ("g", [(1, 1), (1, 9)])):
        (tmp_path / name).mkdir()
        server = Server(tmp_path / name, lengths)
        took = np.array(server.service_s())
        rate_per_s = load_frac / float(took.mean())
        served = server.run(f"poisson:{rate_per_s!r}", 4000).report.requests
        waits = [times.queue_s for times in served]
        expected_s = rate_per_s * (took**2).mean() / (2 * (1 - load_frac))
        assert abs(np.mean(waits) - expected_s) < 3.5 * standard_error(waits)
        assert standard_error(waits) < 0.2 * expected_s  # so that the line above can fail


def test_lindley_recomputes_every_wait(tmp_path: Path) -> None:
    server = Server(tmp_path, [(1, 1), (3, 5), (2, 30)])
    rate_per_s = 0.9 / float(np.mean(server.service_s()))
    served = server.run(f"gamma:{rate_per_s!r},2", 500).report.requests
    wait_s = 0.0
    for before, times in pairwise(served):
        took_s = before.last_token_s - before.begun_s
        wait_s = max(0.0, wait_s + took_s - (times.start_s - before.start_s))
        assert times.queue_s == pytest.approx(wait_s, abs=1e-9)
    assert sum(times.queue_s for times in served)


def test_little(tmp_path: Path) -> None:
    """Requests there on average, counted along time, are their rate times what each takes."""
    server = Server(tmp_path, [(1, 4), (2, 9)])
    outcome = server.run(f"poisson:{2 / float(np.mean(server.service_s()))!r}", 300, batch=4)
    served, found = outcome.report.requests, outcome.result.load
    events = sorted([(t.start_s, 1) for t in served] + [(t.last_token_s, -1) for t in served])
    area, there = 0.0, 0
    for (at_s, change), (until_s, _) in pairwise(events):
        there += change
        area += there * (until_s - at_s)
    span_s = events[-1][0] - events[0][0]
    assert found.requests_in_system == pytest.approx(area / span_s, rel=1e-9)
    assert found.requests_in_system == pytest.approx(found.served_per_s * outcome.result.e2e_s.mean, rel=1e-9)
    assert found.requests_waiting == pytest.approx(found.served_per_s * outcome.result.queue_s.mean, rel=1e-9)
    assert found.busy_frac <= 1.0


def test_a_closed_loop_by_hand(tmp_path: Path) -> None:
    """Three clients, one server: the first three wait for 0, 1 and 2 others, and each further one for 2."""
    server = Server(tmp_path, [(1, 3)])
    (took_s,) = server.service_s()
    served = server.run("closed:3", 7).report.requests
    assert [t.queue_s / took_s for t in served] == pytest.approx([0, 1, 2, 2, 2, 2, 2])
    assert [t.start_s / took_s for t in served] == pytest.approx([0, 0, 0, 1, 2, 3, 4])
    one, alone = server.run("closed:1", 5).report.requests, server.run("none", 1).report.requests
    assert [t.queue_s for t in one] == [0.0] * 5
    assert (one[0].ttft_s, one[0].tpot_s) == (alone[0].ttft_s, alone[0].tpot_s)


def test_slots_that_fill_say_nothing_of_how_fast_they_are_served(tmp_path: Path) -> None:
    """Six slots, twelve requests, twice as many as are served: the first six are taken in as fast as prompts run."""
    server = Server(tmp_path, [(4, 40)])
    served_per_s = server.run("closed:12", 240, batch=6).result.load.served_per_s
    for come, n in ((f"poisson:{2 * served_per_s!r}", 18), ("closed:12", 30)):
        found = server.run(come, n, batch=6).result.load
        assert found.capacity_per_s == pytest.approx(served_per_s, rel=0.2)
        assert found.stable == (come == "closed:12")


def test_capacity_with_slots_by_hand() -> None:
    """Three slots, each taken for 10 s, prompts of 1 s: they are full at 2, and then three in 10 s are taken in."""
    came, begun = [0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 40.0, 40.5], [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 40.0, 41.0]
    served: list[Any] = [
        SimpleNamespace(start_s=a, begun_s=b, last_token_s=b + 10) for a, b in zip(came, begun, strict=True)
    ]
    assert Moments(served[:6], "poisson:1", 3).capacity_per_s == 3 / 10
    assert Moments(served[:3] + served[6:], "poisson:1", 3).capacity_per_s is None
    assert Moments(served, "poisson:1", 9).capacity_per_s == Moments(served, "poisson:1").capacity_per_s == 4 / 11
    # Of all eight three waited for a slot: too few to say how fast such are taken in.
    assert Moments(served, "poisson:1", 3).taken == (3, 10.0, True, 3, 8)
    assert Moments(served, "poisson:1", 3).capacity_per_s is None


@pytest.mark.parametrize("batch", [1, 4])
def test_few_that_wait_make_no_queue_unstable(tmp_path: Path, batch: int) -> None:
    """At a fifth of what it serves, whatever the draw; at one and a half times that, unstable in each."""
    server = Server(tmp_path, [(2, 6), (4, 40)])
    served_per_s = server.run(f"closed:{2 * batch}", 400, batch=batch).result.load.served_per_s
    for seed in range(6):
        for share, stable in ((0.2, True), (1.5, False)):
            found = server.run(f"poisson:{share * served_per_s!r}", 60, batch=batch, seed=seed).result.load
            assert found is not None
            assert found.stable == stable
            assert (found.capacity_per_s is None) == stable


def test_overload_is_told_by_name(tmp_path: Path) -> None:
    server = Server(tmp_path, [(1, 3)])
    (took_s,) = server.service_s()
    over = server.run(f"poisson:{1.5 / took_s!r}", 200)
    found, result = over.result.load, over.result
    assert not found.stable
    assert found.capacity_per_s == pytest.approx(1 / took_s)
    assert 0 < result.queue_s.p50 < result.ttft_s.p50 < result.e2e_s.p50 < result.e2e_s.p95
    assert result.service_s.p50 == pytest.approx(result.service_s.mean)
    said = f"unstable queue: arrives {found.arrivals_per_s:.3g}/s, serves {found.capacity_per_s:.3g}/s"
    assert [label for label in result.caveats if label.startswith(said)]
    below = server.run(f"poisson:{0.7 / took_s!r}", 200).result
    assert below.load.stable
    assert not [label for label in below.caveats if label.startswith("unstable queue")]


def test_capacity_by_hand() -> None:
    """Two stretches in which somebody waits: begun at 2, 4, 6 (each 2 apart), and at 21 alone, which says nothing."""
    came, begun = np.array([0.0, 0.5, 1.0, 3.0, 20.0, 20.5]), np.array([0.0, 2.0, 4.0, 6.0, 20.0, 21.0])

    def while_some_wait(came: np.ndarray, begun: np.ndarray) -> float | None:
        n, taken_s = taken_while_some_wait(came, begun)
        return n / taken_s if taken_s > 0 else None

    assert while_some_wait(came, begun) == 0.5
    assert while_some_wait(came[4:], begun[4:]) is None
    assert while_some_wait(came[:1], begun[:1]) is None


# -- who goes next --------------------------------------------------------------------------------------------------


def requests(*rows: tuple[float, str]) -> list[RequestInfo]:
    return [RequestInfo(i, 10 * i, 2, 1, task, arrival_s) for i, (arrival_s, task) in enumerate(rows)]


def order(name: str, come: list[RequestInfo], profiled: Profiled, at_s: list[float]) -> list[object]:
    made = Batching(schedulers.find(name)(come, True, 0, profiled), 1)
    found = (made.next(now_s) for now_s in at_s)
    return [one[0].request.index if isinstance(one, list) else one for one in found]


def test_shortest_job_first_by_hand() -> None:
    """Means of the store split: chat 10, code 4; of a task that nobody has seen, their mean."""
    before = [(8, "chat"), (12, "chat"), (4, "code")]
    store = [RequestInfo(i, 0, 1, n, task, None) for i, (n, task) in enumerate(before)]
    profiled = Profiled.of(store, Slos())
    assert [profiled.outputs_of(r) for r in requests((0, "chat"), (0, "code"), (0, "new"))] == [10, 4, 8]
    come = requests((0.0, "chat"), (0.0, "new"), (0.0, "code"), (1.0, "code"), (9.0, "chat"))
    assert order("sjf", come, profiled, [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0]) == [2, 3, 1, 0, 9.0, 4, None]


def test_earliest_deadline_first_by_hand() -> None:
    slos = Slos({"chat": {"ttft_s": 5.0}, "code": {"e2e_s": 2.0, "tpot_s": 1.0}})
    come = requests((0.0, "new"), (0.0, "chat"), (1.0, "code"), (2.0, "code"), (2.0, "chat"))
    # Deadlines: never, 5, 3, 4, 7.
    assert order("edf", come, Profiled(slos=slos), [2.0] * 6) == [2, 3, 1, 4, 0, None]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.sampled_from("abc")), min_size=1, max_size=25),
    st.integers(1, 4),
    st.sampled_from(schedulers.schedulers()),
    st.integers(0, 5),
)
def test_nobody_is_lost_or_served_twice(asked: list[tuple[int, int, str]], batch: int, name: str, clients: int) -> None:
    """Any load, equal arrivals among it: every row once, in order within a request, never more at a time than slots."""
    rows = sorted(asked)
    come, row = [], 0
    for i, (at, outputs, task) in enumerate(rows):
        arrival_s = float(at) if not clients else 0.0 if i < clients else None
        come.append(RequestInfo(i, row, 2, outputs, task, arrival_s))
        row += 1 + outputs
    profiled = msgspec.structs.replace(Profiled.of(come, Slos({"a": {"ttft_s": 3.0}})), paths=Foretold())
    made = Batching(schedulers.find(name)(come, True, clients, profiled), batch)
    now_s, seen, left = 0.0, dict[int, list[int]](), {r.index: r.outputs for r in come}
    for _ in range(10_000):
        composed = made.next(now_s)
        if composed is None:
            break
        if isinstance(composed, float):
            assert composed > now_s
            now_s = composed
            continue
        now_s += 1.0
        done = []
        for r in composed:
            assert r.request.arrival_s is None or r.request.arrival_s <= now_s - 1.0
            seen.setdefault(r.request.index, []).extend(range(r.start_row, r.stop_row))
            left[r.request.index] -= 1
            if not left[r.request.index]:
                done.append(r.request)
        made.served(done, now_s)
        begun = [i for i in seen if left[i]]
        assert len(begun) <= batch
    assert seen == {r.index: list(range(r.first_row, r.first_row + 1 + r.outputs)) for r in come}


# -- what was promised ----------------------------------------------------------------------------------------------


def test_attainment_by_hand(tmp_path: Path) -> None:
    """One server, three clients, two and a half services allowed: the first two keep to it, others queue too long."""
    server = Server(tmp_path, [(1, 3)])
    (took_s,) = server.service_s()
    result = server.run("closed:3", 7, slo={"*": {"e2e_s": 2.5 * took_s}}).result
    slo = result.slo
    assert (slo.requests, slo.met, slo.attained_frac) == (7, 2, 2 / 7)
    assert slo.limits == {"*": {"e2e_s": 2.5 * took_s}}
    assert slo.goodput_requests_per_s == pytest.approx(2 / (7 * took_s))
    assert slo.goodput_tokens_per_s == pytest.approx(6 / (7 * took_s))
    assert (slo.violations.queue, slo.violations.prefill, slo.violations.copies, slo.violations.compute) == (5, 0, 0, 0)
    none = server.run("closed:3", 7, slo={"other": {"e2e_s": 1.0}}).result.slo
    assert (none.requests, none.attained_frac, none.tasks) == (0, None, {})
    tight = server.run("none", 1, slo={"*": {"tpot_s": 1e-9}}).result.slo
    assert (tight.met, tight.violations.compute) == (0, 1)


def test_reads_from_a_drive_are_no_computation() -> None:
    """An iteration of a prompt and one of decoding, 10 s each: of both 2 s of copies and 5 s of the drive."""
    until = Spent(10.0, 2.0, 5.0, 2.0, 5.0)
    assert parts(1.0, 21.0, Spent(), until)._asdict() == {
        "queue": 1,
        "prefill": 3,
        "copies": 4,
        "drive": 10,
        "compute": 3,
    }


def test_shares_that_kept_have_an_interval() -> None:
    """Wilson's by hand: 15 of 20, and 20 of 20, of which the share itself says nothing; alike in blocks it is wider."""
    some = [float(i not in (0, 1, 13, 15, 18)) for i in range(20)]
    assert interval(some) == pytest.approx((0.5313, 0.8881), abs=1e-4)
    assert interval([1.0] * 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert interval([]) is None
    in_a_row = [0.0] * 5 + [1.0] * 15
    assert interval(in_a_row)[0] < 0.45


def test_what_a_request_waited_for_sums_to_its_time() -> None:
    """Of a run with copies, batches and arrivals."""
    from sim.results.load import parts

    setup = prepare(RunSpec(policy="lru", hw="rtx3090", cache="20%", arrivals="poisson:0.02", requests=6, batch=2))
    with setup.trace:
        outcome = execute(setup, bounds=False)
    served: list[RequestTimes] = outcome.report.requests
    for times in served:
        found = parts(times.queue_s, times.e2e_s, times.until_begun, times.until_last)
        assert math.fsum(found) == pytest.approx(times.e2e_s)
        assert min(found) >= -1e-9
        assert times.queue_s + times.service_s == pytest.approx(times.ttft_s)
    copies_s = sum(parts(0.0, t.service_s, t.until_begun, t.until_first).copies for t in served)
    waited_s = outcome.report.phases["prefill"].parts_s[H2D]
    assert copies_s == pytest.approx(waited_s)  # prompts run one at a time, so each waits for its own copies


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft_s < 2", "--slo, got 'ttft_s < 2': not LIMIT <= SECONDS"),
        ("ttft <= 2", "--slo, got 'ttft': no limit of an SLO; did you mean 'ttft_s'"),
        ("ttft_s <= 2, ttft_s <= 3", "--slo, got ttft_s twice"),
        ("ttft_s <= 0", "--slo ttft_s, got '0': more than nothing"),
        ("tpot_s <= 2MB", "--slo tpot_s, got '2MB': not a time"),
    ],
)
def test_bad_slos(text: str, said: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_slo(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "got NoneType: a mapping"), ("a: 3\n", "a, got 3: a mapping"), ("a: {ttft_s: -1}\n", "more than nothing")],
)
def test_bad_slo_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        parse_slo(str(path))
    assert str(path) in str(error.value)
    assert said in str(error.value)


# -- loads ----------------------------------------------------------------------------------------------------------


def test_requests_are_drawn_where_there_are_not_as_many() -> None:
    recorded = requests((0.0, "a"), (5.0, "b"), (6.0, "c"))
    few = load_of(recorded, "poisson:2", 2, 0)
    assert [r.first_row for r in few.requests] == [0, 10]
    assert few.labels == ()
    many = load_of(recorded, "poisson:2", 300, 0)
    assert [r.index for r in many.requests] == list(range(300))
    counts = np.bincount([r.first_row // 10 for r in many.requests])
    assert counts.sum() == 300
    assert counts.min() > 70
    assert many.labels == (f"{DRAWN} from 3 recorded",)
    assert many == load_of(recorded, "poisson:2", 300, 0) != load_of(recorded, "poisson:2", 300, 1)
    times = [r.arrival_s for r in many.requests]
    assert times == sorted(times)
    assert load_of(recorded, "poisson:2", 300, 0, rate_scale=2.0).requests[-1].arrival_s == pytest.approx(times[-1] / 2)
    assert not load_of(recorded, "none", None, 0).open_loop
    assert load_of(recorded, None, 2, 0).requests == recorded[:2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arrivals", "closed:0"], "--arrivals, got 'closed:0': a number of clients"),
        (["--arrivals", "closed:" + "9" * 5000], ": a number of clients, such as closed:8; correct it"),
        (["--batch", str(10**30)], f"--batch, got {10**30}: at most 1,000,000,000; lower it"),
        (["--arrivals", "closed:2", "--set", "arrivals.scale=2"], "a closed loop has no rate"),
        (["--set", "arrivals.scale=2"], "--set arrivals.scale, got 2 without a rate"),
        (["--arrivals", "poisson:x"], "--arrivals, got rate 'x'"),
        (["--arrivals", "poisson:"], "--arrivals, got rate '': a number from 1e-9 to 1e9"),
        (["--arrivals", "nowhere.csv"], "nowhere.csv"),
        (["--scheduler", "edf"], "--scheduler edf: it goes by deadlines"),
        (["--scheduler", "edf", "--arrivals", "poisson:1"], "--scheduler edf: it goes by deadlines"),
        (["--arrivals", "posson:1"], "--arrivals, got 'posson:1': neither poisson:RATE"),
        (["--slo", "ttft_s <= x"], "--slo ttft_s, got 'x'"),
        (["--slo", "ttft_s >= 1s"], "--slo, got 'ttft_s >= 1s': not LIMIT <= SECONDS"),
        (["--arrivals", "poisson:1", "--requests", "2000000"], "at most 1000000"),
    ],
)
def test_bad_loads(options: list[str], said: str) -> None:
    from sim.cli.run import command

    done = CliRunner().invoke(command, ["--policy", "lru", "--hw", "rtx3090", *options])
    assert isinstance(done.exception, BadInput), done.output
    assert said in str(done.exception)


def test_a_log_is_part_of_the_run(tmp_path: Path) -> None:
    """BurstGPT's columns; the run's id holds what the log says, not where it lies."""
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    ids = {}
    for name, second in (("a.csv", 40), ("b.csv", 40), ("c.csv", 41)):
        path = tmp_path / name
        path.write_text(head + f"5,ChatGPT,10,20,30,API log\n{second}.5,GPT-4,1,2,3,API log\n")
        setup = prepare(RunSpec(policy="lru", hw="rtx3090", arrivals=str(path), requests=2))
        with setup.trace:
            assert [r.arrival_s for r in setup.requests] == [0.0, second - 4.5]
            ids[name] = setup.run_id
    assert ids["a.csv"] == ids["b.csv"] != ids["c.csv"]
    with pytest.raises(BadInput, match="fewer than the 3 asked for; give --requests 2"):
        prepare(RunSpec(policy="lru", hw="rtx3090", arrivals=str(path), requests=3))
