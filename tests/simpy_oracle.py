"""The lanes once more, naively, as SimPy processes and events.

A script is a list of host operations, run one after the other. Tickets are numbered in order of asking.

    ("host", seconds)                                  the host is busy
    ("run", gpu, first, all, seconds, after)           the host launches for `all`; the first kernel is there after
                                                       `first`, and runs in launch order, after these tickets
    ("block", first, all, seconds)                     the same on GPU 0, after what was joined and all of GPU 1's work
    ("copy", gpu, launch, seconds, demand, after)      enqueueing takes the host `launch`
    ("cpu", launch, down, seconds, up)                 down, CPU, up as a demand copy of link 0; the ticket is the last
    ("join", ticket)                                   the next block waits for it
    ("sync", ticket) ("promote", ticket) ("cancel", ticket) ("look", ticket)

Rules for ties: what the host says at t comes before what a link starts at t, so a speculative copy that would start
exactly when a demand is asked is overtaken, and one that would start exactly when it is cancelled is withdrawn.
A demand is a commitment: it is not withdrawn, even while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import simpy

LATE = 10  # events of this priority come after everything else that happens at the same time
DEMAND, SPECULATIVE = 0, 1


@dataclass
class Observed:
    """What a replay shows; None for a copy that was withdrawn."""

    ends: list[float | None] = field(default_factory=list)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    answers: list[tuple[str, bool]] = field(default_factory=list)  # of cancel and look
    host_s: float = 0.0


class Job:
    def __init__(self, env: simpy.Environment, seconds: float, after: list[simpy.Event], lane: str) -> None:
        self.env, self.seconds, self.after, self.lane = env, seconds, after, lane
        self.done = env.event()
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.priority = DEMAND
        self.link: Link | None = None

    def finish(self) -> None:
        self.end_s = self.env.now
        self.done.succeed()


class Link:
    """A copy engine: whenever it is idle it takes, at the end of the instant, the best of what is ready."""

    def __init__(self, env: simpy.Environment, spans: list[tuple[str, float, float]]) -> None:
        self.env, self.spans = env, spans
        self.queue: list[Job] = []
        self.busy = False

    def submit(self, job: Job) -> None:
        self.queue.append(job)
        for event in job.after:
            if event.callbacks is not None:
                event.callbacks.append(lambda _: self.wake())
        self.wake()

    def wake(self) -> None:
        decide = self.env.event()
        decide._ok, decide._value = True, None
        decide.callbacks.append(lambda _: self.decide())
        self.env.schedule(decide, priority=LATE)

    def decide(self) -> None:
        ready = [job for job in self.queue if all(event.triggered for event in job.after)]
        if self.busy or not ready:
            return
        job = min(ready, key=lambda job: job.priority)  # the first of the best: in order of asking
        self.queue.remove(job)
        self.busy = True
        job.start_s = self.env.now
        self.env.process(self.carry(job))

    def carry(self, job: Job) -> Any:
        yield self.env.timeout(job.seconds)
        self.spans.append((job.lane, job.start_s or 0.0, self.env.now))
        self.busy = False
        job.finish()
        self.wake()


class InOrder:
    """A lane that serves in order of asking: a compute stream, the CPU, the way down."""

    def __init__(self, env: simpy.Environment, spans: list[tuple[str, float, float]]) -> None:
        self.env, self.spans = env, spans
        self.jobs: simpy.Store = simpy.Store(env)
        env.process(self.serve())

    def serve(self) -> Any:
        while True:
            job, first_s, last_s = yield self.jobs.get()
            yield from job.after
            if self.env.now < first_s:
                yield self.env.timeout(first_s - self.env.now)
            job.start_s = self.env.now
            yield self.env.timeout(job.seconds)
            self.spans.append((job.lane, job.start_s, self.env.now))
            if self.env.now < last_s:  # four kernels: the last one starts once it has been launched
                yield self.env.timeout(last_s - self.env.now)
            job.finish()


def replay(script: list[tuple[Any, ...]]) -> Observed:
    """Run a script."""
    env, seen = simpy.Environment(), Observed()
    links = [Link(env, seen.spans) for _ in range(2)]
    streams = [InOrder(env, seen.spans) for _ in range(2)]
    down, cpu = InOrder(env, seen.spans), InOrder(env, seen.spans)
    tickets: list[Job] = []
    joined: list[simpy.Event] = []
    looks: list[tuple[int, float]] = []
    place: list[int] = []  # of looks among the answers

    def host() -> Any:
        for op, *rest in script:
            if op == "host":
                yield env.timeout(rest[0])
            elif op in ("run", "block"):
                gpu = rest.pop(0) if op == "run" else 0
                first, launch, seconds = rest[:3]
                if op == "block":
                    after = list(joined)
                    joined.clear()
                else:
                    after = [tickets[t].done for t in rest[3]]
                job = Job(env, seconds, after, f"gpu{gpu}")
                tickets.append(job)
                streams[gpu].jobs.put((job, env.now + first, env.now + launch + job.seconds / 4))
                if gpu:
                    joined.append(job.done)
                yield env.timeout(launch)
            elif op == "copy":
                gpu, launch, seconds, demand, after_ids = rest
                yield env.timeout(launch)
                job = Job(env, seconds, [tickets[t].done for t in after_ids], f"h2d{gpu}")
                job.priority, job.link = (DEMAND if demand else SPECULATIVE), links[gpu]
                tickets.append(job)
                links[gpu].submit(job)
            elif op == "cpu":
                launch, down_s, seconds, up_s = rest
                yield env.timeout(launch)
                sent = Job(env, down_s, [], "d2h")
                down.jobs.put((sent, env.now, env.now))
                computed = Job(env, seconds, [sent.done], "cpu")
                cpu.jobs.put((computed, env.now, env.now))
                back = Job(env, up_s, [computed.done], "h2d0")
                back.link = links[0]
                tickets.append(back)
                links[0].submit(back)
            elif op == "join":
                joined.append(tickets[rest[0]].done)
            elif op == "sync":
                yield tickets[rest[0]].done
            elif op == "promote":
                job = tickets[rest[0]]
                if job.link and job in job.link.queue and job.priority != DEMAND:
                    job.priority = DEMAND
                    job.link.queue.remove(job)
                    job.link.queue.append(job)
            elif op == "cancel":
                job = tickets[rest[0]]
                waiting = job.link is not None and job in job.link.queue and job.priority != DEMAND
                if waiting and job.link:
                    job.link.queue.remove(job)
                    job.done.succeed()
                seen.answers.append(("cancel", waiting))
            elif op == "look":
                place.append(len(seen.answers))
                looks.append((rest[0], env.now))
                seen.answers.append(("look", False))
        seen.host_s = env.now

    env.process(host())
    env.run()
    for at, (ticket, when) in zip(place, looks, strict=True):
        end_s = tickets[ticket].end_s
        seen.answers[at] = ("look", end_s is not None and end_s <= when)
    seen.ends = [job.end_s for job in tickets]
    seen.spans.sort()
    return seen
