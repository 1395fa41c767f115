"""No lossless policy can be faster than this: a lower bound on TPOT and TTFT, given the whole future and the lanes.

A window (one request's decode, or its prefill) lasts at least as long as its computation with nothing missing, and at
least as long as the copies nobody can avoid there take on their link; `docs/bounds.md` derives it. With a CPU lane an
expert may run there instead of being copied; the bound is then the best split, relaxed to fractions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from sim.bounds.alone import MOST_KNOWN, Alone, Uses, alone, chosen, in_turn, most_first, used
from sim.bounds.path import Experts, Path, path_of
from sim.machine.dense_parallel import Together
from sim.workload.iterations import DECODE, PREFILL, Iteration, Range

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.setup.setup import Setup
    from traces.format.layout import Ints

ROUNDING = 1e-10  # sums here and in the engine are taken in different orders; a bound must not exceed a time by that


class Line(NamedTuple):
    """Seconds as a function of x, the experts computed on the CPU: start + slope * x."""

    start_s: float
    slope_s: float


class LeastTimes(NamedTuple):
    """What one request takes at least, before rounding is allowed for."""

    ttft_s: float
    tpot_s: float | None  # None: it has one token
    e2e_s: float
    outputs: int


class Pass(msgspec.Struct):
    """Iterations in turn: their path, and the experts they use, by GPU and all together."""

    index: int
    path: Path
    uses: list[Uses]
    tokens: frozenset[int]  # how many an expert serves, without repetition
    every: Uses


class Reads(NamedTuple):
    """What lies on a drive, and how long it takes to come.

    Attributes:
        room: whole experts that GPUs and host memory hold together. flying: reads that may be under way when a window
            begins, and that nobody has room for. each_s: of the drive; lag_s: from there until it has come.
    """

    room: int
    flying: int
    each_s: float
    lag_s: float


Window = tuple[list[Pass], list[Pass], int]
"""One request's prefill, decode, and tokens put out."""
LINKS = ("h2d", "d2h", "h2d_pageable", "d2h_pageable", "p2p")  # of a machine
MOST_KEPT = 8
_KEPT: list[tuple[tuple[Any, ...], list[Window]]] = []  # by `_without_links`: many links are held against one machine


class Bounds:
    """The bound of one run.

    Args:
        cpu: experts may be computed on the CPU. cost: prices of its hardware, where they are at hand.
    """

    def __init__(self, setup: Setup, cpu: bool, cost: Cost | None = None) -> None:
        self.setup = setup
        self.cpu = cpu and not setup.hw.one_memory  # within one memory no expert is left to it
        self.cost = cost or setup.cost()
        self.experts = Experts(self.cost)
        self.n_gpus = setup.spec.gpus
        self.in_turn, self.read_routers = setup.several.in_turn, not setup.leaves_unread
        self.homes = np.array(setup.several.homes_of(setup.trace.n_layers * setup.trace.n_experts))
        self.together = Together(self.cost) if setup.several.together else None
        size = setup.pieces.whole[0][0].n_bytes
        self._chosen = chosen(setup.trace)
        # A policy may hold part of an expert in what is left of the budget: rounded up, in its favour.
        self.rooms = [-(-budget // size) for budget in setup.memory.expert_bytes]
        self.copy_s = self.cost.copies.expert_s(size)
        self.host_s = size / self.cost.copies.shared_bytes_per_s  # of host memory, where links share it
        self.reads = self._reads(size)

    def _reads(self, size: int) -> Reads | None:
        """None where host memory holds every expert, or a drive takes no time."""
        drive, setup = self.cost.drive, self.setup
        if drive is None or not (each_s := drive.busy_s(size)):
            return None
        host_bytes = setup.host_bytes - setup.model.host_bytes(setup.spec.precision)  # tables stay there
        flying = 1 + math.ceil(drive.lag_s / each_s)
        return Reads(sum(self.rooms) + host_bytes // size, flying, each_s, drive.lag_s)

    def windows(self) -> Iterator[Window]:
        """Of every request, in the order they complete."""
        most = self.setup.spec.prefill_chunk
        whole = most is None or most >= max((r.prompt_len for r in self.setup.requests), default=0)
        if self.setup.spec.batch == self.n_gpus == 1 and whole and self.setup.drafter is None:
            yield from self._one_by_one()
            return
        trace, index = self.setup.trace, 0
        batching = self.setup.batching(open_loop=False)
        passes: deque[Pass] = deque()
        begun: dict[int, int] = {}
        answered: dict[int, int] = {}
        while isinstance(ranges := batching.next(math.inf), list):
            iteration = Iteration(index, ranges, trace)
            drafted_s = [] if batching.drafts is None else batching.drafts.each_s(iteration)
            passes.append(self._pass(iteration, drafted_s))
            for r in ranges:
                if r.phase == PREFILL:
                    begun.setdefault(r.request.index, index)  # once: a prompt that is prefilled anew was begun before
                    if r.puts_out:
                        answered.setdefault(r.request.index, index)
                if r.taken_row == r.request.first_row + r.request.prompt_len + r.request.outputs - 1:
                    first = begun.pop(r.request.index)
                    window = list(passes)[first - passes[0].index :]
                    n_prefill = answered.pop(r.request.index) - first + 1
                    yield window[:n_prefill], window[n_prefill:], r.request.outputs
            oldest = min(begun.values(), default=index + 1)
            while passes and passes[0].index < oldest:
                passes.popleft()
            index += 1

    def _one_by_one(self) -> Iterator[Window]:
        if len(self.setup.requests) > MOST_KNOWN:
            yield from self._alone()
            return
        key = self._without_links()
        found = next((windows for other, windows in _KEPT if other == key), None)
        if found is None:
            found = list(self._alone())
            _KEPT.append((key, found))
            del _KEPT[:-MOST_KEPT]
        yield from found

    def _without_links(self) -> tuple[Any, ...]:
        """All that the paths of requests that are served alone are made of: links have no part in them."""
        setup = self.setup
        hw = msgspec.structs.replace(setup.hw, **dict.fromkeys(LINKS))
        prices = (hw, setup.model, setup.stack, setup.spec.precision, setup.several, setup.leaves_unread)
        return (*prices, setup.trace.sha256, tuple(setup.requests))

    def _alone(self) -> Iterator[Window]:
        trace = self.setup.trace
        none = [0] * trace.n_layers
        for one in alone(trace, self.setup.requests):
            path = self._path(Iteration(0, one.prefill, trace), one.counts, one.at_first.stops, none)
            prefill, outputs = Pass(0, path, [one.at_first], one.tokens, one.at_first), one.request.outputs
            yield [prefill], [self._decode(one)] if outputs > 1 else [], outputs

    def _path(
        self, iteration: Iteration, tokens: Ints, stops: Ints, elsewhere: list[int], away_s: Sequence[float] = ()
    ) -> Path:
        cost, experts, reads = self.cost, self.experts, self.read_routers
        return path_of(cost, experts, iteration, tokens, stops, elsewhere, self.together, away_s, reads)

    def _decode(self, one: Alone) -> Pass:
        """All decode iterations of a request served alone, at once.

        They differ in context alone. As long as an iteration's time is convex in it, they take no less than as many
        iterations in the middle of it (Jensen's inequality); so they are cut where a measured curve has a point.
        """
        trace, request = self.setup.trace, one.request
        n, first = request.outputs - 1, request.first_row + request.prompt_len
        n_chosen, none = trace.n_layers * trace.top_k, [0] * trace.n_layers
        ones, stops = np.ones(n_chosen, dtype=np.int64), np.arange(trace.top_k, n_chosen + 1, trace.top_k)
        path = Path(0.0, 0.0, 0.0, 0.0)
        for start, stop in self._convex(first, n, first - request.first_row):
            for row in (start + (stop - 1 - start) // 2, start + (stop - start) // 2):
                ranges = [Range(request, row, row + 1, DECODE, row - request.first_row)]
                at = self._path(Iteration(0, ranges, trace), ones, stops, none)
                path = path.plus(at, (stop - start) / 2)
        return Pass(0, path, [one.later], frozenset({1}), one.later)

    def _convex(self, first: int, n: int, context: int) -> list[tuple[int, int]]:
        """Rows [start, stop) over which the price of attention is convex in context; `context` is the first row's."""
        cuts = {math.ceil(at) - 1 - context for at in self.cost.decode_points()}
        ends = [0, *sorted(cut for cut in cuts if 0 < cut < n), n]
        return [(first + start, first + stop) for start, stop in pairwise(ends)]

    def _after(self, drafted_s: list[float], path: Path) -> Path:
        """An iteration's path with its drafts before it, one after the other; the host waits until it has read them."""
        if not drafted_s:
            return path
        took_s = self.cost.launches.kernel_s + math.fsum(drafted_s) + self.cost.launches.sync_s
        return Path(path.whole_s + took_s, path.dense_s + took_s, path.host_s + took_s, path.last_s)

    def _pass(self, iteration: Iteration, drafted_s: list[float]) -> Pass:
        n_layers, n_experts = self.setup.trace.n_layers, self.setup.trace.n_experts
        rows = [self._chosen[r.start_row : r.stop_row] for r in iteration.ranges]
        every, counts = used(rows[0] if len(rows) == 1 else np.concatenate(rows), n_layers, n_experts)
        tokens = frozenset(counts.tolist())
        none = [0] * n_layers
        if self.n_gpus == 1:
            path = self._path(iteration, most_first(counts, every.stops), every.stops, none)
            return Pass(iteration.index, self._after(drafted_s, path), [every], tokens, every)
        home = self.homes[every.ids]
        mines = [np.flatnonzero(home == gpu) for gpu in range(self.n_gpus)]
        ends = [np.searchsorted(mine, every.stops) for mine in mines]
        found = [Uses(every.ids[mine], end[np.diff(end, prepend=0) > 0]) for mine, end in zip(mines, ends, strict=True)]
        if self.in_turn:  # where GPUs take turns, they compute as one
            path = self._path(iteration, most_first(counts, every.stops), every.stops, none)
        else:
            elsewhere = (np.diff(every.stops, prepend=0) - np.diff(ends[0], prepend=0)).tolist()
            away_s = () if self.cpu else self._away_s(counts, home, every.stops)
            path = self._path(iteration, most_first(counts[mines[0]], ends[0]), ends[0], elsewhere, away_s)
        return Pass(iteration.index, self._after(drafted_s, path), found, tokens, every)

    def _away_s(self, counts: Ints, home: Ints, stops: Ints) -> list[float]:
        """Per layer, what the busiest of the other GPUs takes, at least, for its experts of so many tokens: their work
        one after the other, and the way back of one result, unless hidden states are brought together anyhow."""
        cost, found = self.cost, []
        for tokens, homes in zip(np.split(counts, stops[:-1]), np.split(home, stops[:-1]), strict=True):
            own_s = [0.0] * self.n_gpus
            for n, gpu in zip(tokens.tolist(), homes.tolist(), strict=True):
                own_s[gpu] += self.experts.work_of(n)
            busiest_s, fewest = max(own_s[1:]), int(tokens.min())
            back_s = 0.0 if self.together is not None else cost.copies.p2p_s(cost.activation_bytes(fewest))
            found.append(busiest_s + back_s if busiest_s else 0.0)
        return found

    def copies(self, window: list[Pass], gpu: int) -> int:
        """Copies no policy can avoid in these iterations, whatever lay on the GPU when they began."""
        every = [p.uses[gpu] for p in window]
        return (every[0] if len(every) == 1 else in_turn(every)).copies(self.rooms[gpu], 0 if self.cpu else 1)

    def reading_s(self, window: list[Pass], part_s: float) -> float:
        """From the start of a window to where its last read's expert begins, at least; 0 where none is needed.

        Args:
            part_s: what the least part of an expert takes that is copied after that read; 0 beside a CPU.
        """
        reads = self.reads
        if reads is None:
            return 0.0
        every = window[0].every if len(window) == 1 else in_turn([p.every for p in window])
        n = every.copies(reads.room, 0 if self.cpu else 1) - reads.flying
        return n * reads.each_s + reads.lag_s + part_s if n > 0 else 0.0

    def seconds(self, window: list[Pass]) -> float:
        """The least time these iterations take."""
        cost = self.cost
        whole_s, dense_s = math.fsum(p.path.whole_s for p in window), math.fsum(p.path.dense_s for p in window)
        host_s, last_s = math.fsum(p.path.host_s for p in window), window[-1].path.last_s
        copies = [self.copies(window, gpu) for gpu in range(self.n_gpus)]
        tokens = frozenset[int]().union(*(p.tokens for p in window))
        fewest = min(tokens)
        if not self.cpu:
            # Part of an expert may be all that waited for the last copy: what is left of a slice's price as it shrinks.
            part_s = cost.expert(fewest, cost.precision, 0.0, 0.0).duration_s
            on_links_s = max(n * self.copy_s + (part_s if n else 0.0) for n in copies) + last_s
            from_host_s = sum(copies) * self.host_s + last_s
            from_drive_s = self.reading_s(window, part_s) + last_s
            return max(whole_s, on_links_s, from_host_s, from_drive_s, host_s + sum(copies) * cost.launches.copy_s)
        most_s = max(cost.expert(n, cost.precision).duration_s for n in tokens)
        least_s = min(cost.expert_cpu_joined(n).duration_s for n in tokens)
        launch_s, activations_s = cost.launches.expert.all_s, cost.copies.h2d_s(cost.activation_bytes(fewest))
        back_s = activations_s if self.n_gpus == 1 else 0.0
        n_links = self.n_gpus if self.in_turn else 1  # that results take: the first GPU's, or its layer's
        lines = [
            Line(whole_s, -(launch_s + most_s)),
            Line(dense_s, 0.0),
            Line(host_s + sum(copies) * cost.launches.copy_s, cost.launches.cpu_s - cost.launches.copy_s - launch_s),
            Line(last_s, max(least_s, activations_s / n_links)),  # results go up, one after the other on each link
            Line(sum(copies) * self.copy_s / self.n_gpus + last_s, back_s - self.copy_s / self.n_gpus),
            *(Line(n * self.copy_s + last_s, back_s - self.copy_s) for n in copies),
            Line(sum(copies) * self.host_s + last_s, -self.host_s),
            Line(self.reading_s(window, 0.0) + last_s, 0.0),  # whoever computes it, an expert has to be read
        ]
        return lowest(lines, sum(len(uses.ids) for p in window for uses in p.uses))

    def requests(self) -> Iterator[LeastTimes]:
        """The least times of every request, in the order they complete."""
        now_s, arrivals = 0.0, iter([r.arrival_s for r in self.setup.requests] if self.setup.open_loop else ())
        for prefill, decode, outputs in self.windows():
            # With arrivals requests run one by one in turn: none starts before the one before it can have ended.
            arrival_s = next(arrivals, None)
            now_s = now_s if arrival_s is None else max(now_s, arrival_s)
            prefill_s = self.seconds(prefill)
            decode_s = self.seconds(decode) if outputs > 1 else 0.0
            ttft_s = prefill_s if arrival_s is None else now_s - arrival_s + prefill_s
            now_s += prefill_s + decode_s
            yield LeastTimes(ttft_s, decode_s / (outputs - 1) if outputs > 1 else None, ttft_s + decode_s, outputs)

    def means(self) -> tuple[float | None, float | None]:
        """(TPOT, TTFT): means over requests, as results give them."""
        found = list(self.requests())
        return _mean([one.tpot_s for one in found if one.tpot_s is not None]), _mean([one.ttft_s for one in found])


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) * (1 - ROUNDING) if values else None


def lowest(lines: list[Line], limit: float) -> float:
    """The least of max(lines) over 0 <= x <= limit: convex and made of lines, so at an end or where two cross."""
    at = {0.0, float(limit)}
    for i, one in enumerate(lines):
        for two in lines[:i]:
            if one.slope_s != two.slope_s:
                x = (two.start_s - one.start_s) / (one.slope_s - two.slope_s)
                if 0.0 < x < limit:
                    at.add(x)
    return min(max(line.start_s + line.slope_s * x for line in lines) for x in at)


class LowerBound(NamedTuple):
    """Mean times that no lossless policy can beat (None where no request has them) on these lanes."""

    tpot_s: float | None
    ttft_s: float | None
    lanes: str


def lower_bound(setup: Setup, cpu: bool | None = None, cost: Cost | None = None) -> LowerBound | None:
    """The bound of a run that is set up.

    Args:
        cpu: whether experts may be computed on the CPU; default: where the policy has the trait.
        cost: the run's prices, where they are at hand.

    Returns:
        None where arrivals and batches leave open which tokens run together, so that there is no future to know.
    """
    if not setup.timeless:
        return None
    if cpu is None:
        cpu = "cpu" in setup.policy.traits
    bounds = Bounds(setup, cpu, cost)
    return LowerBound(*bounds.means(), "copy + cpu" if bounds.cpu else "copy")
