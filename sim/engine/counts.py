"""Counts that every result rests on: how the gate found its experts, and what became of prefetches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.base.flat import ints
from sim.workload.iterations import DECODE, PREFILL

if TYPE_CHECKING:
    from sim.policy.pieces import Piece

HIT, PARTIAL, LATE, MISS, ON_CPU, SUBSTITUTED, DROPPED = range(7)
CLASSES = ("hit", "partial_hit", "late_hit", "miss", "cpu", "substituted", "dropped")


class HitCounts:
    """Unique (layer, expert) per iteration and the tokens behind them, by class; one per phase.

    `aside`: how the gate found experts of which `experts` says something else: computed on the CPU, or a policy's
    substitutes. `prefetched`: hits on an expert whose prefetch had not been used before.
    """

    def __init__(self) -> None:
        self.n_experts = ints(7)
        self.n_tokens = ints(7)
        self.n_aside = ints(7)
        self.prefetched = 0

    @property
    def experts(self) -> list[int]:
        """Experts by class."""
        return list(self.n_experts)

    @property
    def tokens(self) -> list[int]:
        """Tokens by class."""
        return list(self.n_tokens)

    @property
    def aside(self) -> list[int]:
        """Experts set aside, by how they were found."""
        return list(self.n_aside)

    def count(self, kind: int, n_tokens: int) -> None:
        """One more expert of a class, and the tokens behind it."""
        self.n_experts[kind] += 1
        self.n_tokens[kind] += n_tokens

    def rates(self, tokens: bool = False) -> dict[str, float | None]:
        """Class -> share of all; None when nothing was asked for. The shares sum to 1."""
        counts = self.tokens if tokens else self.experts
        total = sum(counts)
        return {name: (n / total if total else None) for name, n in zip(CLASSES, counts, strict=True)}

    def served(self) -> dict[str, float | None]:
        """Class -> share of the experts that served, however computed; None when none did. The shares sum to 1."""
        found = {CLASSES[kind]: self.n_experts[kind] + self.n_aside[kind] for kind in (HIT, PARTIAL, LATE, MISS)}
        total = sum(found.values())
        return {name: (n / total if total else None) for name, n in found.items()}


class Prefetched:
    """One speculative copy, from its room being taken to its first use or its eviction."""

    __slots__ = ("harmful", "late", "n_bytes", "open")

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.late = False
        self.harmful = False
        self.open = True


class PrefetchTally:
    """What became of each speculative copy.

    useful: had arrived when the gate asked, and was used. late: used, but still under way when the gate asked.
    wasted: evicted, or left at the end, without a use. These three sum to what was issued and not cancelled.
    harmful: while it had not been used yet, a gate asked for an expert it had evicted; cuts across the three.
    """

    def __init__(self) -> None:
        self.n = {"useful": 0, "late": 0, "wasted": 0, "harmful": 0}
        self.n_bytes = dict.fromkeys(self.n, 0)
        self.n_issued = self.n_cancelled = self.n_dropped = 0
        self.issued_bytes = self.cancelled_bytes = 0
        self.pending: dict[Piece, Prefetched] = {}  # prefetched and not used yet
        self._evicted_for: dict[Piece, Prefetched] = {}  # who is gone -> the prefetch that took the room

    def issue(self, piece: Piece, victims: list[Piece]) -> None:
        """A speculative copy has taken its room, evicting `victims`."""
        record = self.pending[piece] = Prefetched(piece.n_bytes)
        self.n_issued += 1
        self.issued_bytes += piece.n_bytes
        for victim in victims:
            self._evicted_for[victim] = record

    def asked_while_late(self, piece: Piece) -> None:
        """The gate asked for a prefetched piece that is still under way."""
        record = self.pending.get(piece)
        if record is not None:
            record.late = True

    def asked_but_absent(self, piece: Piece) -> None:
        """The gate asked for a piece that is not resident: whoever evicted it for speculation did harm."""
        record = self._evicted_for.pop(piece, None)
        if record is not None and record.open and not record.harmful:
            record.harmful = True
            self._count("harmful", record)

    def used(self, piece: Piece) -> None:
        """First use of a prefetched piece."""
        record = self.pending.pop(piece, None)
        if record is not None:
            record.open = False
            self._count("late" if record.late else "useful", record)

    def gone(self, piece: Piece) -> None:
        """A prefetched piece was evicted without a use."""
        record = self.pending.pop(piece, None)
        if record is not None:
            record.open = False
            self._count("wasted", record)

    def cancelled(self, piece: Piece) -> None:
        """A queued copy was withdrawn before it started: it moved no bytes."""
        record = self.pending.pop(piece, None)
        if record is not None:
            record.open = False
            self.n_cancelled += 1
            self.cancelled_bytes += record.n_bytes

    def finish(self) -> None:
        """End of the run: what was never used is wasted."""
        for piece in list(self.pending):
            self.gone(piece)

    def forget(self, piece: Piece) -> None:
        """The piece is resident again: its eviction can harm nobody any more."""
        self._evicted_for.pop(piece, None)

    def _count(self, kind: str, record: Prefetched) -> None:
        self.n[kind] += 1
        self.n_bytes[kind] += record.n_bytes


@dataclass
class Loss:
    """What lossy routing changed, in (token, expert) activations and in gate mass."""

    activations: int = 0
    changed: int = 0
    dropped: int = 0
    lowered: int = 0  # executed in less than the serving precision
    mass_before: float = 0.0
    mass_kept: float = 0.0

    def gate_mass_kept(self) -> float | None:
        """Share of the chosen experts' gate mass that was still computed; 1 for lossless runs, None where unknown."""
        if self.mass_before:
            return self.mass_kept / self.mass_before
        return None if self.changed + self.dropped else 1.0


class Tally:
    """All counts of one run."""

    def __init__(self) -> None:
        self.hits = {PREFILL: HitCounts(), DECODE: HitCounts()}
        self.prefetch = PrefetchTally()
        self.loss = Loss()
        self.n_demand = self.n_evicted = 0
        self.demand_bytes = 0
        self.n_iterations = {PREFILL: 0, DECODE: 0}
        self.n_executed = 0  # (token, expert) pairs executed, on GPU or CPU
