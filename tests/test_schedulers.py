"""Schedulers: first come, first served by hand; a newcomer is one file, found by its name."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_traces import tiny_trace

from sim.base.errors import BadInput, IllegalDecision
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.workload import schedulers
from sim.workload.batching import Batching
from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler

SHORTEST = '''"""Shortest job first."""

from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler


class ShortestFirst(Scheduler):
    name = "shortest"

    def pick(self, now_s: float) -> RequestInfo | None:
        return min(self.waiting, key=lambda request: request.outputs, default=None)
'''


def said(batching: Batching, times_s: list[float]) -> list[object]:
    """What it composes at these times: (request, first row, phase) of every range, or what else it says."""
    found = (batching.next(now_s) for now_s in times_s)
    return [[(r.request.index, r.start_row, r.phase) for r in one] if isinstance(one, list) else one for one in found]


def test_first_come_by_hand() -> None:
    requests = [
        RequestInfo(i, 10 * i, 3, outputs, "", arrival_s)
        for i, outputs, arrival_s in ((0, 3, 0.0), (1, 1, 0.0), (2, 2, 9.0))
    ]
    first = Batching(schedulers.find("fcfs")(requests, open_loop=True), 2)
    assert said(first, [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0, 11.0]) == [
        [(0, 0, "prefill")],
        [(1, 10, "prefill")],  # one token is all it wants: it takes no slot afterwards
        [(0, 3, "decode")],
        [(0, 4, "decode")],
        9.0,  # nobody runs: the next arrival
        [(2, 20, "prefill")],
        [(2, 23, "decode")],
        None,
    ]
    closed = Batching(schedulers.find("fcfs")(requests), 2)
    assert said(closed, [0.0] * 7) == [
        [(0, 0, "prefill")],
        [(1, 10, "prefill")],
        [(2, 20, "prefill")],
        [(0, 3, "decode"), (2, 23, "decode")],
        [(0, 4, "decode")],
        None,
        None,
    ]


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shortest.py").write_text(SHORTEST)
    monkeypatch.setattr(schedulers, "__path__", [*schedulers.__path__, str(tmp_path)])
    yield
    sys.modules.pop("sim.workload.schedulers.shortest", None)


@pytest.mark.usefixtures("newcomer")
def test_a_newcomer_is_one_file() -> None:
    runs = {}
    for name in (None, "fcfs", "shortest"):
        setup = prepare(RunSpec(policy="lru", hw="rtx3090", requests=4, scheduler=name))
        with setup.trace:
            runs[name] = execute(setup, bounds=name == "shortest"), setup.run_id
    served = {name: [times.request.outputs for times in done.report.requests] for name, (done, _) in runs.items()}
    assert served["shortest"] == sorted(served["fcfs"]) != served["fcfs"]
    assert served[None] == served["fcfs"]
    assert runs[None][1] == runs["fcfs"][1] != runs["shortest"][1]  # the default by its name is the default
    assert runs["shortest"][0].result.lower_bound.above_frac > 0


@pytest.mark.usefixtures("newcomer")
def test_out_of_order_arrivals_leave_the_future_open(tmp_path: Path) -> None:
    """A lower bound and an oracle know the order only where requests start as they arrive."""
    path = tiny_trace(tmp_path / "t.safetensors", 32, 8, 2, levels={"arrivals"})
    known = {}
    for name in ("fcfs", "shortest"):
        setup = prepare(RunSpec(policy="lru", hw="rtx3090", trace=str(path), scheduler=name))
        with setup.trace:
            known[name] = setup.timeless
    assert known == {"fcfs": True, "shortest": False}
    with pytest.raises(BadInput, match="belady with arrivals and --scheduler shortest: which tokens run"):
        prepare(RunSpec(policy="belady", hw="rtx3090", trace=str(path), scheduler="shortest"))


def test_no_such_scheduler() -> None:
    with pytest.raises(BadInput, match=r"--scheduler, got 'fcfd': no such scheduler; did you mean 'fcfs'\?"):
        prepare(RunSpec(policy="lru", hw="rtx3090", scheduler="fcfd"))
    assert schedulers.schedulers() == ("batch_affinity", "edf", "emoe_slo", "fcfs", "sjf")
    with pytest.raises(NotImplementedError):
        Scheduler([]).pick(math.inf)


@pytest.mark.parametrize("answer", [5, "ab", RequestInfo(7, 0, 1, 1, "", 0.0), RequestInfo(1, 3, 2, 1, "", 9.0)])
def test_picks_that_are_none(answer: object) -> None:
    """Nobody, a request that does not wait, and one that has not come yet."""
    requests = [RequestInfo(0, 0, 2, 1, "", 0.0), RequestInfo(1, 3, 2, 1, "", 9.0)]
    kind = type("Wrong", (Scheduler,), {"name": "wrong", "pick": lambda self, now_s: answer})
    with pytest.raises(IllegalDecision, match=r"^pick of scheduler wrong, got .*: nobody who waits and is there"):
        Batching(kind(requests, True), 1).next(0.0)


def test_no_request_is_lost_or_served_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a scheduler does to the queue that it should only look at."""

    def losing(self: Scheduler, now_s: float) -> RequestInfo | None:
        if len(self.waiting) > 1:
            self.waiting.pop()
        return next(self.arrived_by(now_s), None)

    def again(self: Scheduler, now_s: float) -> RequestInfo | None:
        found = next(self.arrived_by(now_s), None)
        if found is not None:
            self.waiting.append(found)
        return found

    trace = tiny_trace(tmp_path / "t.safetensors", n_layers=32, n_experts=8, n_requests=6)
    for pick, told in (
        (losing, "scheduler odd, got 1 requests served of 3: `waiting`"),
        (again, "pick of scheduler odd, got RequestInfo(index=1, "),
    ):
        kind = type("Odd", (Scheduler,), {"name": "odd", "pick": pick})
        monkeypatch.setattr(schedulers, "find", lambda name, kind=kind: kind)
        with pytest.raises(IllegalDecision) as error:
            execute(prepare(RunSpec(policy="lru", hw="rtx3090", trace=str(trace), scheduler="odd")))
        assert str(error.value).startswith(told)  # and no policy is blamed


@pytest.mark.parametrize("inner", [list, iter])
def test_passes_are_lists(inner: Any) -> None:
    """Something that can be gone through once would be gone through by the check."""
    two = [RequestInfo(i, 5 * i, 2, 4, "", None) for i in range(2)]
    body = {"name": "once", "pick": lambda self, now_s: self.waiting[0] if self.waiting else None}
    kind = type("Once", (Scheduler,), body | {"passes": lambda self, ranges: [inner([one]) for one in ranges]})
    batching = Batching(kind(two), 2)
    assert [len(batching.next(0.0) or ()) for _ in range(2)] == [1, 1]
    if inner is list:
        assert [len(batching.next(0.0) or ()) for _ in range(2)] == [1, 1]
        return
    with pytest.raises(IllegalDecision, match=r"^passes of scheduler once, got .*; answer lists of ranges"):
        batching.next(0.0)


def test_a_scheduler_that_picks_nobody() -> None:
    """It may wait for who is still to come, but not for ever."""
    requests = [RequestInfo(0, 0, 2, 1, "", 0.0), RequestInfo(1, 3, 2, 1, "", 9.0)]
    batching = Batching(
        type("Idle", (Scheduler,), {"name": "idle", "pick": lambda self, now_s: None})(requests, True), 1
    )
    assert batching.next(0.0) == 9.0
    with pytest.raises(IllegalDecision, match=r"^pick of scheduler idle, got None: nobody runs, 2 wait, and nobody"):
        batching.next(9.0)


def test_waiting_grows_during_a_run_and_the_scheduler_is_told() -> None:
    told: list[tuple[str, int]] = []
    hooks = {
        name: lambda self, request, name=name: told.append((name, request.index)) for name in ("started", "finished")
    }
    scheduler = type("Told", (schedulers.find("fcfs"),), {"name": "told", **hooks})([], True)
    batching = Batching(scheduler, 1)
    assert batching.next(0.0) is None
    one = RequestInfo(0, 0, 2, 1, "", 1.0)
    scheduler.add(one)
    assert batching.next(0.5) == 1.0
    assert said(batching, [1.0]) == [[(0, 0, "prefill")]]
    batching.served([one], 2.0)
    assert told == [("started", 0), ("finished", 0)]
    assert batching.next(2.0) is None
