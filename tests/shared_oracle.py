"""The oracle of `simpy_oracle` with work that is shared: lanes that slow one another, naively."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import simpy
import simpy_oracle


class Shared(simpy.Environment):
    """Where work is re-timed from scratch whenever anything starts or ends: the model, word for word."""

    def __init__(self, terms: dict[str, float]) -> None:
        super().__init__()
        self.terms, self.running = terms, set()
        self.change = self.event()

    def changed(self) -> None:
        self.change.succeed()
        self.change = self.event()

    def work(self, lane: str, seconds: float) -> Any:
        self.running.add(lane)
        self.changed()
        left = seconds
        while True:
            rate, begun_s = rate_of(lane, self.running, self.terms), self.now
            over = self.timeout(left / rate)
            yield over | self.change
            if over.processed:
                break
            left -= (self.now - begun_s) * rate
        self.running.remove(lane)
        self.changed()


def rate_of(lane: str, running: set[str], terms: dict[str, float]) -> float:
    """1 / (1 + sum of the active terms of what runs beside `lane`)."""
    family, gpu = lane.rstrip("01"), lane[-1]
    extra = 0.0
    for other in running - {lane}:
        beside = other.rstrip("01")
        mine = f"{family}_slowdown_by_{beside}"
        if {family, beside} == {"gpu", "h2d"} and other[-1] != gpu:
            continue  # a link reaches into the memory of its own GPU only
        extra += terms.get(mine, 0.0)
    return 1.0 / (1.0 + extra)


def replay(script, terms: dict[str, float]) -> simpy_oracle.Observed:
    """What a script comes to under these terms."""

    def carry(link, job):
        yield from link.env.work(job.lane, job.seconds)
        link.spans.append((job.lane, job.start_s, link.env.now))
        link.busy = False
        job.finish()
        link.wake()

    def serve(lane):
        while True:
            job, first_s, launched_s = yield lane.jobs.get()
            yield from job.after
            if lane.env.now < first_s:
                yield lane.env.timeout(first_s - lane.env.now)
            job.start_s = lane.env.now
            yield from lane.env.work(job.lane, job.seconds)
            lane.spans.append((job.lane, job.start_s, lane.env.now))
            if lane.env.now < launched_s:
                yield lane.env.timeout(launched_s - lane.env.now)
            job.finish()

    world = SimpleNamespace(Environment=lambda: Shared(terms), Store=simpy.Store, Event=simpy.Event)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simpy_oracle, "simpy", world)
        patch.setattr(simpy_oracle.Link, "carry", carry)
        patch.setattr(simpy_oracle.InOrder, "serve", serve)
        return simpy_oracle.replay(script)
