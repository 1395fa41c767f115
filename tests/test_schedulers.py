"""Schedulers: first come, first served by hand; a newcomer is one file, found by its name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_traces import tiny_trace

from sim.base.errors import BadInput
from sim.run import execute, prepare
from sim.setup.spec import RunSpec
from sim.workload import schedulers
from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler

SHORTEST = '''"""Shortest job first."""

from sim.workload.iterations import Range
from sim.workload.scheduler import Scheduler


class ShortestFirst(Scheduler):
    name = "shortest"

    def compose(self, now_s: float) -> list[Range] | float | None:
        if self.waiting and self.n_running < self.batch:
            return self.prefill(min(self.waiting, key=lambda request: request.outputs))
        return self.decode() if self.n_running else None
'''


def said(scheduler: Scheduler, times_s: list[float]) -> list[object]:
    """What it composes at these times: (request, first row, phase) of every range, or what else it says."""
    found = (scheduler.next(now_s) for now_s in times_s)
    return [[(r.request.index, r.start_row, r.phase) for r in one] if isinstance(one, list) else one for one in found]


def test_first_come_by_hand() -> None:
    requests = [
        RequestInfo(i, 10 * i, 3, outputs, "", arrival_s)
        for i, outputs, arrival_s in ((0, 3, 0.0), (1, 1, 0.0), (2, 2, 9.0))
    ]
    first = schedulers.find("fcfs")(requests, 2, open_loop=True)
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
    closed = schedulers.find("fcfs")(requests, 2)
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
    schedulers.find.cache_clear()


@pytest.mark.usefixtures("newcomer")
def test_a_newcomer_is_one_file() -> None:
    runs = {}
    for name in (None, "fcfs", "shortest"):
        setup = prepare(RunSpec(policy="lru", hw="rtx3090", requests=4, scheduler=name))
        with setup.trace:
            runs[name] = execute(setup, bounds=name == "shortest"), setup.run_id
    served = {name: [times.request.outputs for times in done.clockwork.requests] for name, (done, _) in runs.items()}
    assert served["shortest"] == sorted(served["fcfs"]) != served["fcfs"]
    assert served[None] == served["fcfs"]
    assert runs[None][1] == runs["fcfs"][1] != runs["shortest"][1]  # the default by its name is the default
    assert runs["shortest"][0].result.bound.above_frac > 0


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
    assert schedulers.schedulers() == ("edf", "fcfs", "sjf")
    with pytest.raises(NotImplementedError):
        Scheduler([], 1).next(math.inf)
