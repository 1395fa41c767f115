"""A run by decisions that no hardware has a part in: what it asked of its machine and what it counted, also as bytes.

Whoever times another machine by it needs the tape, and the counts that a report has of an engine. The bytes are for
other processes of the same command; nobody keeps them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.engine.counts import Tally
from sim.engine.replay import Tape
from sim.engine.report import Counts
from sim.workload.iterations import PHASES, Iteration, Range

if TYPE_CHECKING:
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


class Recording(NamedTuple):
    """What is left of such a run: what it asked for, what it counted, and its scheduler's figures."""

    tape: Tape
    pieces: Pieces
    counts: Counts
    scheduler_stats: dict[str, Any]

    def to_bytes(self) -> bytes:
        """For `from_bytes` in a process that has the same trace, requests and pieces."""
        tape, counts = self.tape, self.counts
        ranges = [
            (at, r.request.index, r.start_row, r.stop_row, PHASES.index(r.phase), r.context, r.puts_out, r.n_rejected)
            for at, iteration in enumerate(tape.iterations)
            for r in iteration.ranges
        ]
        arrays = [
            np.asarray(some, dtype=np.int64) for some in (tape.said(), tape.placed, ranges, numbers_of(counts.tally))
        ]
        facts = {
            "sizes": [some.size for some in arrays],
            "indices": [iteration.index for iteration in tape.iterations],
            "room": [tape.budget_bytes, counts.capacity_bytes, counts.peak_bytes],
            "expert_bytes": counts.expert_bytes,
            "mass": [counts.tally.loss.mass_before, counts.tally.loss.mass_kept],
            "settings": counts.settings,
            "labels": counts.labels,
            "stats": counts.stats,
            "scheduler_stats": self.scheduler_stats,
            "kept": sorted(counts.kept),
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
        budget_bytes, capacity_bytes, peak_bytes = facts["room"]
        tape = Tape()
        tape.say_again(said.tolist())
        tape.iterations.extend(Iteration(*one, trace) for one in zip(facts["indices"], groups, strict=True))
        tape.placed.extend(placed.tolist())
        tape.budget_bytes = budget_bytes
        tally = tally_of(counted.tolist(), *n_shape)
        tally.loss.mass_before, tally.loss.mass_kept = facts["mass"]
        counts = Counts(
            tally,
            tuple(capacity_bytes),
            tuple(peak_bytes),
            facts["expert_bytes"],
            frozenset(facts["kept"]),
            facts["settings"],
            tuple(facts["labels"]),
            facts["stats"],
        )
        return cls(tape, pieces, counts, facts["scheduler_stats"])
