"""A run by decisions that no hardware has a part in: what it asked of its machine and what it counted, also as bytes.

Whoever times another machine by it needs the tape, and in place of an engine and a policy what a result is folded
from. The bytes are for other processes of the same command; nobody keeps them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.engine.counts import Tally
from sim.engine.replay import Tape
from sim.policy.mistakes import figures_of
from sim.workload.iterations import PHASES, Iteration, Range

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.policy.pieces import Pieces
    from sim.workload.iterations import RequestInfo
    from traces.format.reader import Trace

QUICK = 1  # of zlib's levels: tapes repeat themselves
_RANGE = 8  # numbers of a range: its iteration, its request, and its own
_SUMS = ("n_demand", "n_evicted", "demand_bytes", "n_executed")
_PREFETCHES = ("n_issued", "n_cancelled", "n_dropped", "issued_bytes", "cancelled_bytes")
_LOSSES = ("activations", "changed", "dropped", "lowered")


def _sums(tally: Tally) -> list[tuple[Any, tuple[str, ...]]]:
    """What holds numbers, and their names."""
    hits = [(tally.hits[phase], ("prefetched",)) for phase in PHASES]
    return [(tally, _SUMS), (tally.prefetch, _PREFETCHES), (tally.loss, _LOSSES), *hits]


def _rows(tally: Tally) -> list[Any]:
    """Flat arrays of numbers."""
    hits = [row for one in tally.hits.values() for row in (one.n_experts, one.n_tokens, one.n_aside)]
    return [*hits, tally.prefetch.n_of, tally.prefetch.bytes_of, tally.by_expert.n]


def numbers_of(tally: Tally) -> list[int]:
    """All whole numbers of a run that is over, in a row."""
    sums = [getattr(what, name) for what, names in _sums(tally) for name in names]
    return [*tally.n_iterations.values(), *sums, *(number for row in _rows(tally) for number in row)]


def tally_of(numbers: list[int], n_layers: int, n_experts: int) -> Tally:
    """The counts that such a row is of."""
    tally, left = Tally(n_layers, n_experts), iter(numbers)
    for phase in PHASES:
        tally.n_iterations[phase] = next(left)
    for what, names in _sums(tally):
        for name in names:
            setattr(what, name, next(left))
    for row in _rows(tally):
        for at in range(len(row)):
            row[at] = next(left)
    return tally


class _Room:
    def __init__(self, budget_bytes: Sequence[int], peak_bytes: Sequence[int]) -> None:
        self.budget_bytes, self.peak_bytes = list(budget_bytes), list(peak_bytes)


class _Size:
    def __init__(self, expert_bytes: int) -> None:
        self.expert_bytes = expert_bytes


class Recording:
    """What is left of such a run. `tally`, `residency` and `view` say what its engine's would of a result.

    Attributes:
        settings, labels, stats: of its policy, as it resolved them. scheduler_stats: of its scheduler. kept: layers
            whose experts stay on their GPUs.
    """

    def __init__(
        self,
        tape: Tape,
        pieces: Pieces,
        tally: Tally,
        residency: Any,
        view: Any,
        settings: dict[str, Any],
        labels: Sequence[str],
        stats: dict[str, float],
        scheduler_stats: dict[str, Any],
        kept: Iterable[int] = (),
    ) -> None:
        self.tape, self.pieces, self.tally, self.residency, self.view = tape, pieces, tally, residency, view
        self.settings, self.labels, self.stats, self.scheduler_stats = settings, labels, stats, scheduler_stats
        self.kept = frozenset(kept)

    @classmethod
    def of(cls, tape: Tape, engine: Engine, scheduler_stats: dict[str, Any]) -> Recording:
        """Of a run that is over."""
        room, policy = engine.residency, engine.policy
        held, size = _Room(room.budget_bytes, room.peak_bytes), _Size(engine.view.expert_bytes)
        settings, labels, stats = dict(policy.settings), tuple(policy.labels), figures_of(policy)
        return cls(tape, engine.pieces, engine.tally, held, size, settings, labels, stats, scheduler_stats, engine.kept)

    def to_bytes(self) -> bytes:
        """For `from_bytes` in a process that has the same trace, requests and pieces."""
        tape = self.tape
        ranges = [
            (at, r.request.index, r.start_row, r.stop_row, PHASES.index(r.phase), r.context, r.puts_out, r.n_rejected)
            for at, iteration in enumerate(tape.iterations)
            for r in iteration.ranges
        ]
        arrays = [
            np.asarray(some, dtype=np.int64) for some in (tape.said(), tape.placed, ranges, numbers_of(self.tally))
        ]
        facts = {
            "sizes": [some.size for some in arrays],
            "indices": [iteration.index for iteration in tape.iterations],
            "room": [tape.budget_bytes, list(self.residency.budget_bytes), list(self.residency.peak_bytes)],
            "expert_bytes": self.view.expert_bytes,
            "mass": [self.tally.loss.mass_before, self.tally.loss.mass_kept],
            "settings": self.settings,
            "labels": self.labels,
            "stats": self.stats,
            "scheduler_stats": self.scheduler_stats,
            "kept": sorted(self.kept),
        }
        head = json.dumps(facts).encode()
        return zlib.compress(b"%d\n%b" % (len(head), head) + b"".join(some.tobytes() for some in arrays), QUICK)

    @classmethod
    def from_bytes(
        cls, data: bytes, trace: Trace, requests: Sequence[RequestInfo], pieces: Pieces, n_shape: tuple[int, int]
    ) -> Recording:
        """The recording that `to_bytes` was asked for; n_shape: layers and experts of each."""
        length, _, rest = zlib.decompress(data).partition(b"\n")
        facts = json.loads(rest[: int(length)])
        numbers = np.frombuffer(rest[int(length) :], dtype=np.int64)
        said, placed, ranges, counted = np.split(numbers, np.cumsum(facts["sizes"])[:-1])
        by_index = {request.index: request for request in requests}
        groups: list[list[Range]] = [[] for _ in facts["indices"]]
        for at, index, start, stop, phase, context, puts_out, n_rejected in ranges.reshape(-1, _RANGE).tolist():
            rows = by_index[index], start, stop, PHASES[phase], context
            groups[at].append(Range(*rows, bool(puts_out), n_rejected))
        budget_bytes, *room = facts["room"]
        tape = Tape()
        tape.say_again(said.tolist())
        tape.iterations.extend(Iteration(*one, trace) for one in zip(facts["indices"], groups, strict=True))
        tape.placed.extend(placed.tolist())
        tape.budget_bytes = budget_bytes
        tally = tally_of(counted.tolist(), *n_shape)
        tally.loss.mass_before, tally.loss.mass_kept = facts["mass"]
        held, size = _Room(*room), _Size(facts["expert_bytes"])
        told = (facts[name] for name in ("settings", "labels", "stats", "scheduler_stats", "kept"))
        return cls(tape, pieces, tally, held, size, *told)
