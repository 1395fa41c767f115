"""What every scheduler must keep, installed or in a file of one's own. A function is a rule, its docstring says it.

Rules look at what it declares, never at names. Each serves small random loads: arrivals that come together, late, or
when others are answered; prompts and outputs of one token; SLOs of some tasks; every number of slots from 1 to 4.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from sim.base.errors import CheckFailed
from sim.workload.batching import Batching, shares_out
from sim.workload.iterations import DECODE, Range, RequestInfo
from sim.workload.known_requests import Profiled
from sim.workload.schedulers import checked
from sim.workload.slo import Slos

if TYPE_CHECKING:
    from sim.workload.scheduler import Scheduler
    from sim.workload.token_paths import TokenPaths

N_LOADS = 60
TASKS = ("chat", "code", "new")  # the last is in no store split
SLOS = Slos({"chat": {"ttft_s": 5.0, "tpot_s": 2.0}, "code": {"e2e_s": 30.0}})


class Load(NamedTuple):
    """Requests in order of arrival, for so many slots.

    clients: of a closed loop; 0: they come by themselves. most_tokens, static: as `Batching` has them.
    """

    requests: list[RequestInfo]
    batch: int
    open_loop: bool
    clients: int
    most_tokens: int = 0
    static: bool = False


class Served(NamedTuple):
    """What a scheduler made of a load: (request, first row, last row) of every iteration, and who started when."""

    iterations: list[list[tuple[int, int, int]]]
    started: list[int]


class Foretold:
    """Experts of every row's token: whatever its last digits say."""

    n_experts = 4

    def paths(self, rows: list[int]) -> np.ndarray:
        return np.array([[[row % 4], [row // 4 % 4]] for row in rows], dtype=np.int64)


class Loads:
    """A scheduler's class, and the loads that it is put to."""

    def __init__(self, kind: type[Scheduler]) -> None:
        self.kind = kind
        self.scenario = ""  # the load under way, in words

    def all(self) -> list[Load]:
        """The same for every scheduler."""
        return [drawn(seed) for seed in range(N_LOADS)]

    def made(self, load: Load) -> Scheduler:
        """A new one, which knows what may be known of requests before they run."""
        return self.kind(load.requests, load.open_loop, load.clients, known(load))

    def serve(self, load: Load) -> Served:
        """Serve it, a second per token; raises CheckFailed where somebody is not served, or twice."""
        n = len(load.requests)
        told = [f"{n} requests", f"batch {load.batch}", f"closed:{load.clients}" if load.clients else ""]
        told += ["static" if load.static else "", f"at most {load.most_tokens} tokens" if load.most_tokens else ""]
        self.scenario = ", ".join(filter(None, told))
        served = serve(self.made(load), load)
        self.scenario = ""
        return served


def drawn(seed: int) -> Load:
    """A load."""
    chance = np.random.default_rng(seed)
    n, batch, open_loop = int(chance.integers(1, 15)), int(chance.integers(1, 5)), chance.random() < 0.85
    clients = int(chance.integers(1, 6)) if open_loop and chance.random() < 0.3 else 0
    at_s = sorted(chance.integers(0, 4 * n + 1, n).tolist())
    requests, row = [], 0
    for i in range(n):
        arrival_s = None if not open_loop else float(at_s[i]) if not clients else 0.0 if i < clients else None
        prompt, outputs = int(chance.choice((1, 2, 9))), int(chance.choice((1, 2, 3, 12)))
        requests.append(RequestInfo(i, row, prompt, outputs, str(chance.choice(TASKS)), arrival_s))
        row += prompt + outputs - 1
    return Load(requests, batch, open_loop, clients)


def known(load: Load) -> Profiled:
    """What a scheduler may know of it."""
    seen = [request for request in load.requests if request.task != TASKS[-1]]
    outputs = dict.fromkeys(TASKS[:-1], 4.0)
    return Profiled(
        outputs,
        4.0 if seen else None,
        SLOS if load.open_loop else Slos(),
        token_s=0.5,
        loading_s={"chat": 2.0},
        any_loading_s=1.0,
        max_tokens=20,
        paths=cast("TokenPaths", Foretold()),
    )


def serve(scheduler: Scheduler, load: Load) -> Served:
    """Every iteration of a load. Raises CheckFailed where rows are left out, come twice or out of order."""
    batching = Batching(scheduler, load.batch, None, load.most_tokens, load.static)
    now_s, iterations, started = 0.0, list[list[tuple[int, int, int]]](), list[int]()
    rows, left = dict[int, list[int]](), {r.index: r.outputs for r in load.requests}
    most = sum(2 * (r.prompt_len + r.outputs) for r in load.requests) + 4 * len(load.requests)
    while (composed := batching.next(now_s)) is not None:
        _require(len(iterations) <= most, f"after {most} iterations it has not come to an end")
        if not isinstance(composed, list):
            _require(composed > now_s, f"it waits at {now_s:g} s until {composed:g} s")
            now_s = composed
            continue
        begun_s, complete = now_s, []
        now_s += sum(r.stop_row - r.start_row for r in composed)
        iterations.append([(r.request.index, r.start_row, r.stop_row) for r in composed])
        for r in composed:
            at = r.request.index
            if at not in rows:
                started.append(at)
                come_s = r.request.arrival_s
                _require(come_s is None or come_s <= begun_s, f"request {at} runs before it has come")
            rows.setdefault(at, []).extend(range(r.start_row, r.stop_row))
            left[at] -= r.stop_row >= r.request.first_row + r.request.prompt_len
            if not left[at]:
                complete.append(r.request)
        if batching.listens:
            scheduler.ran(composed)
        batching.served(complete, now_s)
        running = sum(1 for at in rows if left[at])
        _require(running <= load.batch, f"{running} requests run at a time in {load.batch} slots")
    want = {r.index: list(range(r.first_row, r.first_row + r.prompt_len + r.outputs - 1)) for r in load.requests}
    wrong = sorted(at for at in want if rows.get(at) != want[at])
    _require(not wrong, f"requests {wrong} are not served once from beginning to end")
    return Served(iterations, started)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CheckFailed(message)


# -- the rules --------------------------------------------------------------------------------------------------------


def check_is_declared(world: Loads) -> None:
    """It has a name, says what it does in its docstring or its module's, needs what there is, and answers `pick`."""
    kind = world.kind
    _require(kind.name.isidentifier(), f"its name is {kind.name!r}: a word that can be typed")
    told = inspect.getdoc(kind) or inspect.getdoc(sys.modules[kind.__module__])
    _require(bool(told), "neither the class nor its module has a docstring")
    checked(kind, kind.name)
    _require("pick" in {name for base in kind.__mro__[:-2] for name in vars(base)}, "it has no `pick`")
    seconds = kind.sharing_out_s
    _require(isinstance(seconds, int | float) and 0 <= seconds < math.inf, f"sharing_out_s is {seconds!r}")


def check_serves_everybody_once(world: Loads) -> None:
    """Every request is served from its first row to its last, once, never before it has come, in as many slots as
    there are, also where prompts run in parts or batches are static; and it comes to an end: where nobody runs and
    nobody else will come, somebody is picked."""
    for load in world.all():
        world.serve(load)
        world.serve(load._replace(most_tokens=5))
        world.serve(load._replace(static=True))


def check_is_deterministic(world: Loads) -> None:
    """The same load is served alike by two instances, one of which is asked while the other serves."""
    for load in world.all():
        first, other = world.serve(load), world.made(load)
        other.pick(0.0)
        _require(world.serve(load) == first, "two runs of one load differ")


def check_does_not_know_how_long_answers_are(world: Loads) -> None:
    """Who is picked does not depend on `outputs`, which nobody knows beforehand; profiled means are for that."""
    for load in world.all():
        requests = [request._replace(outputs=13 - request.outputs) for request in load.requests]
        now_s = max((r.arrival_s or 0.0) for r in load.requests)
        one, other = (world.made(load._replace(requests=asked)).pick(now_s) for asked in (load.requests, requests))
        _require((one is None) == (other is None), "it picks somebody or nobody, depending on `outputs`")
        _require(one is None or other is None or one.index == other.index, "whom it picks depends on `outputs`")


def check_pick_takes_nobody_away(world: Loads) -> None:
    """`pick` only answers: whoever waits waits afterwards, and asked again at once it answers alike."""
    for load in world.all():
        made = world.made(load)
        waiting = list(made.waiting)
        first, again = made.pick(0.0), made.pick(0.0)
        _require(list(made.waiting) == waiting, "`pick` changes `waiting`")
        _require(first == again, "asked twice at once, it picks two")


def check_in_order_is_true(world: Loads) -> None:
    """Where it declares `in_order`, requests start in order of arrival."""
    if not world.kind.in_order:
        return
    for load in world.all():
        started = world.serve(load).started
        _require(started == sorted(started), f"requests start as {started}")


def check_passes_share_a_step_out(world: Loads) -> None:
    """`passes` has every token of a step once, and rests on the step alone: another instance says the same."""
    for load in world.all():
        step = [Range(r, r.first_row, r.first_row + 1, DECODE, 1) for r in load.requests]
        if len(step) < 2:
            continue
        used = world.made(load)
        serve(used, load)
        first, again = used.passes(list(step)), world.made(load).passes(list(step))
        _require(shares_out(first, step), f"got {first!r}: every token of a decode step runs in one pass")
        _require(first == again, "it depends on what it was asked before")


Rule = Callable[[Loads], None]
CHECKS: tuple[Rule, ...] = (
    check_is_declared,
    check_serves_everybody_once,
    check_is_deterministic,
    check_does_not_know_how_long_answers_are,
    check_pick_takes_nobody_away,
    check_in_order_is_true,
    check_passes_share_a_step_out,
)
