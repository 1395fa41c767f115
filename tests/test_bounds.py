"""The lower bound: exact where it can be, below everything else, and compared with exhaustive search in small cases."""

from __future__ import annotations

import contextlib
from itertools import combinations

import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from grids import few_each_time
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scopes import one_cache
from tiny_traces import from_rows, noise, tiny_trace

from policies.belady import Belady
from policies.gpu_only import GpuOnly
from policies.lru import Lru
from policies.perfect_prefetch import PerfectPrefetch
from sim.bounds import time_bound
from sim.bounds.time_bound import Line, lower_bound, lowest
from sim.conformance.world import ALL, World
from sim.options import RunSpec
from sim.policy.api import Policy
from sim.policy.decisions import Evict, Fetch, Prefetch, RunCpu, RunGpu
from sim.policy.registry import policies
from sim.run import execute, prepare
from sim.workload.fewest_copies import kept
from traces.format.reader import Trace

SEARCHED = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# -- which copies cannot be avoided ------------------------------------------------------------------------------------


def intervals(steps):
    """(first, last) point an expert kept from one use to the next occupies; points: 2 s at step s, 2 s + 1 after."""
    last, found = {}, []
    for s, experts in enumerate(steps):
        for e in experts:
            found.append((2 * last[e] + 1 if e in last else -1, 2 * s - 1))
            last[e] = s
    return found


def counted(steps, room, working=1):
    ids = np.array([e for experts in steps for e in experts])
    return sum(kept(ids, np.cumsum([len(experts) for experts in steps]), room, working))


cases = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5)


@SEARCHED
@given(steps=cases, room=st.integers(1, 4), working=st.integers(0, 1))
def test_most_intervals_kept_equals_the_linear_programme(steps, room, working):
    """Any subset, even any fractions: an interval matrix leaves the optimum whole."""
    found = intervals(steps)
    points = range(-1, 2 * len(steps))
    rows = [[first <= p <= last for first, last in found] for p in points]
    limits = [room - working if p % 2 == 0 else room for p in points]
    best = linprog([-1.0] * len(found), A_ub=np.array(rows, float), b_ub=limits, bounds=(0, 1))
    assert counted(steps, room, working) == pytest.approx(-best.fun, abs=1e-7)


def test_copies_by_hand():
    # Room 2, one for whoever runs, so one stays across a step. Uses 0 1 2 0 1: 0 and 1 are there at the start, and 1
    # crosses step 0 alone. Of 0 and 1 one crosses step 2; 2 is copied: 3 of 5 are free.
    assert counted([[0], [1], [2], [0], [1]], 2) == 3
    # Room 3: 1 and 2 cross step 0, and 2 step 1 with 0; then 0 and 1 cross step 2: all are free.
    assert counted([[0], [1], [2], [0], [1]], 3) == 5
    assert counted([[0], [1], [2], [0], [1]], 1) == 1  # nothing crosses a step
    assert counted([[0], [0], [0]], 1) == 3  # nor does it have to


# -- the split between link and CPU ------------------------------------------------------------------------------------


def test_the_lowest_point_of_lines():
    # 10 copies of 4 s against 10 experts of 6 s on the CPU: 40 - 4 x = 6 x at 4.
    assert lowest([Line(40, -4), Line(0, 6)], 10) == pytest.approx(24)
    assert lowest([Line(40, -4), Line(0, 6), Line(30, 0)], 10) == 30
    assert lowest([Line(40, -4), Line(0, 0)], 5) == 20  # no more than 5 can move
    assert lowest([Line(1, 2)], 9) == 1


# -- against exhaustive search -----------------------------------------------------------------------------------------


class Worse(Exception):
    """This branch cannot beat what was found."""


class Choices:
    """Walks a tree of choices depth first: each run replays the path so far and takes the first branch after it."""

    def __init__(self):
        self.path, self.at = [], 0

    def choose(self, options):
        if self.at == len(self.path):
            self.path.append([0, len(options)])
        taken = self.path[self.at][0]
        self.at += 1
        return options[taken]

    def advance(self):
        """On to the next path; False when all have been walked."""
        self.at = 0
        while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
            self.path.pop()
        if self.path:
            self.path[-1][0] += 1
        return bool(self.path)


class Anything(Policy):
    """Every lossless way to serve: any contents at first, any order, any victim, any prefetch after any computation.

    Left out is what cannot help: evicting a prefetch that was never used (not asking for it is as good and cheaper),
    and, before the first token, prefetching sooner than after its last layer (any contents may be there at first).
    """

    name = "anything"
    traits = frozenset({"oracle"})
    on_cpu = False

    def __init__(self, choices, best_s, iteration_s, n_iterations):
        super().__init__()
        self.choices, self.best_s, self.iteration_s, self.n_left = choices, best_s, iteration_s, n_iterations
        self.first_s, self.unused = None, set()

    def initial(self, view):
        used = [
            view.piece(at, e)
            for at in range(view.n_layers)
            for e in range(view.n_experts)
            if view.future.uses(at, e)[0]
        ]
        return self.choices.choose(list(combinations(used, min(view.capacity, len(used)))))

    def iteration_start(self, iteration, view):
        self.n_left -= 1
        if iteration.index == 1:
            self.first_s = view._machine.now_s
        self.give_up(view, self.n_left + 1)
        if iteration.index:
            yield from self.ahead(view)

    def give_up(self, view, n_iterations):
        """Stop where even iterations that never wait would come too late."""
        if self.first_s is not None:
            spent_s = view._machine.now_s - self.first_s
            if spent_s + n_iterations * self.iteration_s >= self.best_s:
                raise Worse

    def gate_done(self, gate, view):
        pending = sorted(gate.needs)
        while pending:
            ways = [(e, False) for e in pending] + [(e, True) for e in pending if self.on_cpu]
            expert, cpu = self.choices.choose(ways)
            pending.remove(expert)
            if cpu:
                yield RunCpu(expert)
            else:
                piece = view.piece(gate.layer, expert)
                if not view.holds(piece):
                    yield from self.room(view)
                yield Fetch(piece)
                yield RunGpu(expert)
                self.unused.discard(piece)
            self.give_up(view, self.n_left)
            if self.first_s is not None or gate.layer == view.n_layers - 1:
                yield from self.ahead(view)

    def leavers(self, view):
        """Who may leave, the one wanted last first."""
        free = [p for p in view.residents() if view.evictable(p) and p not in self.unused]
        return sorted(free, key=lambda p: -view.future.next_use(p.layer, p.expert))

    def room(self, view):
        if view.free_bytes() < view.expert_bytes:
            free = self.leavers(view)
            if not free:
                raise Worse
            yield Evict(self.choices.choose(free))

    def ahead(self, view):
        """Any number of prefetches, each into any room."""
        while True:
            coming = [view.piece(at, e) for at in range(view.n_layers) for e in range(view.n_experts)]
            coming = [p for p in coming if not view.holds(p) and view.future.next_use(p.layer, p.expert) < 1e9]
            coming.sort(key=lambda p: view.future.next_use(p.layer, p.expert))
            out = [None] if view.free_bytes() >= view.expert_bytes else self.leavers(view)
            way = self.choices.choose([*((p, v) for p in coming for v in out), None])
            if way is None:
                return
            piece, leaver = way
            if leaver is not None:
                yield Evict(leaver)
            yield Prefetch(piece)
            self.unused.add(piece)


class AnythingOrCpu(Anything):
    traits = frozenset({"oracle", "cpu"})
    on_cpu = True


def shortest_decode(trace, room, kind, limit=30_000, **world):
    """The least decode time over all decisions, by running each in the engine; and how many were run."""
    never_waits = execute(setup(GpuOnly(), trace, trace.n_layers * trace.n_experts, **world), bounds=False)
    n_iterations = 1 + never_waits.report.phases["decode"].n_iterations
    iteration_s = never_waits.report.phases["decode"].time_s / (n_iterations - 1)
    if kind.on_cpu:  # none of its experts on the GPU, nor launched for it
        iteration_s -= trace.n_layers * trace.top_k * (2 + 2 * world.get("launch_s", 0))
    choices, best_s = Choices(), float("inf")
    for n_runs in range(1, limit):
        try:
            policy = kind(choices, best_s, iteration_s, n_iterations)
            seen = execute(setup(policy, trace, room, **world), bounds=False)
            (times,) = seen.report.requests
            best_s = min(best_s, times.last_token_s - times.first_token_s)
        except Worse:
            pass
        if not choices.advance():
            return best_s, n_runs
    raise AssertionError(f"more than {limit} ways")


# (layers, experts, decode tokens, room, machine): copy 10 s, expert 2 s, attention 1 s unless told.
SMALL = [
    (2, 3, 2, 1, {}),
    (2, 3, 2, 2, {}),
    (2, 3, 2, 3, {}),
    (2, 3, 2, 2, {"copy_s": 3.0}),
    (2, 3, 2, 3, {"copy_s": 3.0}),
    (2, 3, 2, 2, {"copy_s": 2.0, "launch_s": 0.75, "sync_s": 0.25, "copy_launch_s": 0.125}),
    (3, 3, 1, 1, {}),
    (1, 3, 4, 2, {"copy_s": 4.0}),
]


def small(*quick, of):
    """Some cases; those that take seconds are thorough."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.thorough) for case in of]


@pytest.mark.parametrize("case", small(0, 1, 3, 4, 5, 6, 7, of=range(len(SMALL))))
def test_nothing_beats_the_bound(case, tmp_path):
    layers, experts, tokens, room, machine = SMALL[case]
    rows = (noise(20 + case, tokens + 1, layers, 1) % experts).tolist()
    with Trace(from_rows(tmp_path / "t", rows, experts)) as trace:
        least_s, n_runs = shortest_decode(trace, room, Anything, **machine)
        bound_s = lower_bound(setup(Lru(scope="global"), trace, room, **machine)).tpot_s * tokens
        assert n_runs > 10
        assert bound_s <= least_s
        prefetched = execute(setup(PerfectPrefetch(), trace, room, **machine)).report.requests[0]
        assert least_s <= prefetched.last_token_s - prefetched.first_token_s


@pytest.mark.parametrize("case", small(0, of=(0, 1, 7)))
def test_nothing_beats_the_bound_with_a_cpu(case, tmp_path):
    cpu_s = {0: 5.0, 1: 1.0, 7: 3.0}[case]
    layers, experts, tokens, room, machine = SMALL[case]
    rows = (noise(20 + case, tokens + 1, layers, 1) % experts).tolist()
    with Trace(from_rows(tmp_path / "t", rows, experts)) as trace:
        least_s, n_runs = shortest_decode(trace, room, AnythingOrCpu, cpu_s=cpu_s, **machine)
        bound_s = lower_bound(setup(Lru(scope="global"), trace, room, cpu_s=cpu_s, **machine), cpu=True).tpot_s * tokens
        assert n_runs > 10
        assert bound_s <= least_s


def test_perfect_prefetching_on_more_gpus_than_experts(tmp_path):
    """Four GPUs, two experts in one layer: two GPUs have nothing to hold. Of three layers an expert is never used."""
    for layers in (1, 3):
        rows = [[[token % 2 if layer == 0 else 0] for layer in range(layers)] for token in range(5)]
        with Trace(from_rows(tmp_path / f"t{layers}", rows, 2)) as trace:
            result = execute(setup(PerfectPrefetch(), trace, 2, gpus=4)).result
        assert (result.hit_rate, result.h2d_bytes) == (1.0, 0)  # there is room for all on the GPUs they live on


class AnyCopies(Anything):
    """The same from an empty start, and what counts is copies, asked for by prefetch or demand."""

    def __init__(self, choices, fewest):
        super().__init__(choices, 0.0, 0.0, 0)
        self.fewest, self.n_copies = fewest, 0

    def initial(self, view):
        return ()

    def give_up(self, view, n_iterations):
        self.n_copies = sum(entry[0] in ("fetch", "prefetch") for entry in self.log)
        if self.n_copies >= self.fewest:
            raise Worse


# (layers, experts, k, tokens, room)
FEW = [(2, 3, 1, 3, 2), (2, 3, 1, 3, 3), (1, 3, 2, 3, 2), (1, 4, 2, 3, 3), (2, 3, 2, 2, 3)]


@pytest.mark.parametrize("case", few_each_time(range(len(FEW)), [0, 1, 2]))
def test_no_policy_copies_less_than_belady_prefetching_or_not(case, tmp_path):
    """From an empty start, over a whole run. `test_laws` searches more cases of demand fetching.

    The argument: put each copy off until its expert runs, and leave out those that are never used; room is only freed.
    """
    layers, experts, k, tokens, room = FEW[case]
    rows = np.argsort(noise(70 + case, tokens, layers, experts), axis=-1)[..., :k].tolist()
    with Trace(from_rows(tmp_path / "t", rows, experts)) as trace:
        least = execute(setup(Belady(), trace, room), bounds=False).report.counts.tally.n_demand
        choices, n_runs = Choices(), 0
        while n_runs == 0 or choices.advance():
            n_runs += 1
            log, policy = [], AnyCopies(choices, least)
            policy.log = log
            with contextlib.suppress(Worse):
                execute(setup(policy, trace, room), log=lambda *entry, log=log: log.append(entry), bounds=False)
                policy.give_up(None, 0)
                pytest.fail(f"{policy.n_copies} copies are enough, belady makes {least}: {log}")
        assert n_runs > 10


# -- below every policy ------------------------------------------------------------------------------------------------


LOSSLESS = [kind for kind in policies().values() if "lossy" not in kind.traits]


@pytest.mark.parametrize("kind", LOSSLESS, ids=lambda kind: kind.name)
def test_every_policy_lies_above(kind):
    with World(kind) as world:
        for experts, gpus, batch in ((6, 1, 1), (12, 1, 1), (ALL, 1, 1), (12, 1, 2), (12, 2, 1), (16, 2, 2)):
            room = world.room(experts, gpus)
            result = world.run(room, gpus=gpus, batch=batch).result
            bound = lower_bound(world.setup(room, gpus=gpus, batch=batch))
            if bound is None:
                assert batch > 1
                continue
            assert bound.lanes == ("copy + cpu" if "cpu" in kind.traits else "copy")
            assert 0 < bound.tpot_s <= result.tpot_s.mean
            assert 0 < bound.ttft_s <= result.ttft_s.mean


HOSTS = [{}, {"launch_s": 0.75, "sync_s": 0.25}, {"launch_s": 2.0, "copy_launch_s": 0.5}]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    room=st.integers(1, 14),
    make=st.sampled_from([Lru, Belady, PerfectPrefetch]),
    host=st.sampled_from(HOSTS),
    copy_s=st.sampled_from([0.5, 2.0, 10.0]),
    batch=st.sampled_from([1, 2, 3]),
    dense=st.sampled_from([(), (0, 2, 4)]),
    shared=st.booleans(),
    gpus=st.sampled_from([1, 2]),
)
def test_any_machine(seed, room, make, host, copy_s, batch, dense, shared, gpus, tmp_path_factory):
    path = tiny_trace(tmp_path_factory.mktemp("any") / "t", 2, 5, 2, n_requests=4, levels=set(), seed=seed, outputs=4)
    with Trace(path) as trace:
        world = dict(host, copy_s=copy_s, batch=batch, dense_layers=dense, shared=shared, gpus=gpus, peer_s=0.5)
        result = execute_easy(setup(one_cache(make), trace, room, **world)).result
        assert result.lower_bound.tpot_s <= result.tpot_s.mean
        assert result.lower_bound.ttft_s <= result.ttft_s.mean


@pytest.mark.parametrize("host", HOSTS)
def test_gpu_only_is_the_bound(host, tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 3, 5, 2, prompt=4, outputs=7, levels=set())) as trace:
        result = execute(setup(GpuOnly(), trace, 15, **host)).result
        assert result.lower_bound.above_frac == pytest.approx(0, abs=1e-9)
        assert result.lower_bound.ttft_s == pytest.approx(result.ttft_s.mean)


@pytest.mark.parametrize("room", [20, 60, 100])
def test_perfect_prefetching_comes_close_where_the_link_is_the_bottleneck(room, tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 16, 8, 2, n_requests=4, outputs=40, levels=set())) as trace:
        results = [execute(setup(one_cache(make), trace, room)).result for make in (PerfectPrefetch, Belady, Lru)]
        above = [result.lower_bound.above_frac for result in results]
        assert 0 <= above[0] < 0.08
        assert above[0] < above[1] < above[2]


def test_arrivals_and_batches_leave_the_future_open(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 2, 4, 2, levels={"arrivals"})) as trace:
        assert lower_bound(setup(Lru(scope="global"), trace, 3, batch=2)) is None
        assert execute(setup(Lru(scope="global"), trace, 3, batch=2)).result.lower_bound is None
        waiting = execute(setup(Lru(scope="global"), trace, 3)).result
        # One by one in turn, a request waits for those before it, whoever decides.
        assert waiting.lower_bound.ttft_s <= waiting.ttft_s.mean


def test_links_share_what_they_have_no_part_in(monkeypatch):
    """Paths are kept for machines that differ in links alone; whatever else differs is worked out anew."""
    asked = {"policy": "lru", "hw": "rtx3090", "cache": "48experts", "requests": 2}
    changes = {
        "hw.h2d.bandwidth_bytes_per_s": 3e9,
        "hw.h2d.latency_s": 1e-4,
        "hw.gpu.kernel_floor_s": 1e-4,
        "hw.gpu.memory_bandwidth_bytes_per_s": 1e10,
        "hw.host.launch_s": 1e-4,
        "hw.host.sync_s": 1e-3,
        "engine.per_layer_s": 1e-3,
    }
    setups = [prepare(RunSpec(**asked, set=own)) for own in ({}, *({key: value} for key, value in changes.items()))]
    monkeypatch.setattr(time_bound, "_KEPT", [])
    together = [lower_bound(made) for made in (*setups, *setups)]
    assert len(time_bound._KEPT) == len(changes) - 1  # both of the link are those of the first
    paths = set()
    for made, at_first, again in zip(setups, together, together[len(setups) :], strict=False):
        time_bound._KEPT.clear()
        assert at_first == again == lower_bound(made)
        windows = time_bound.Bounds(made, cpu=False).windows()
        paths.add(tuple(one.path for prefill, decode, _ in windows for one in (*prefill, *decode)))
        made.close()
    assert len(paths) == len(changes) - 1
