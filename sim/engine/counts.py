"""Counts that every result rests on: how the gate found its experts, and what became of prefetches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.flat import ints, longer_ints
from sim.engine.by_expert import CANCELLED, CANCELLED_BYTES, FATE, FATE_BYTES, ISSUED, ISSUED_BYTES, ByExpert
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.policy.pieces import Piece

HIT, PARTIAL, LATE, MISS, ON_CPU, SUBSTITUTED, DROPPED = range(7)
USEFUL, LATE_USE, WASTED, HARMFUL = range(4)
FATES = ("useful", "late", "wasted", "harmful")
_USEFUL, _LATE, _WASTED, _HARMFUL = USEFUL, LATE_USE, WASTED, HARMFUL  # machine integers where this is compiled
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

    def take_in(self, other: HitCounts) -> None:
        """Count what another replica counted, too."""
        for kind in range(len(CLASSES)):
            self.n_experts[kind] += other.n_experts[kind]
            self.n_tokens[kind] += other.n_tokens[kind]
            self.n_aside[kind] += other.n_aside[kind]
        self.prefetched += other.prefetched

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


class PrefetchTally:
    """What became of each speculative copy.

    useful: had arrived when the gate asked, and was used. late: used, but still under way when the gate asked.
    wasted: evicted, or left at the end, without a use. These three sum to what was issued and not cancelled.
    harmful: while it had not been used yet, a gate asked for an expert it had evicted; cuts across the three.
    """

    def __init__(self, by_expert: ByExpert) -> None:
        self.by_expert = by_expert
        self.n_of = ints(len(FATES))
        self.bytes_of = ints(len(FATES))
        self.n_issued = self.n_cancelled = self.n_dropped = 0
        self.issued_bytes = self.cancelled_bytes = 0
        self.n_unused = 0  # pieces prefetched, there or on their way, and not used yet
        self.n_known = 0
        # By `Piece.index`: in which issue it was prefetched, if it has not been used since (else 0); its bytes, and
        # whether that copy was late and did harm.
        self._issue = ints(0)
        self._bytes = ints(0)
        self._row = ints(0)  # of its expert
        self._late = ints(0)
        self._harmful = ints(0)
        # By `Piece.index` of who is gone: the issue that took the room (0: none), and the piece that came instead.
        self._gone_in = ints(0)
        self._gone_for = ints(0)

    @property
    def n(self) -> dict[str, int]:
        """Copies by what became of them."""
        return dict(zip(FATES, self.n_of, strict=True))

    @property
    def n_bytes(self) -> dict[str, int]:
        """Their bytes."""
        return dict(zip(FATES, self.bytes_of, strict=True))

    def issue(self, piece: Piece, victims: list[Piece]) -> None:
        """A speculative copy has taken its room, evicting `victims`."""
        index = piece.index
        if index >= self.n_known:
            self._grow(index + 1)
        self.n_issued += 1
        self.issued_bytes += piece.n_bytes
        self.n_unused += 1
        self._issue[index] = self.n_issued
        self._bytes[index] = piece.n_bytes
        self._row[index] = piece.layer * self.by_expert.n_experts + piece.expert
        self.by_expert.add(ISSUED, piece, 1)
        self.by_expert.add(ISSUED_BYTES, piece, piece.n_bytes)
        self._late[index] = 0
        self._harmful[index] = 0
        for victim in victims:
            if victim.index >= self.n_known:
                self._grow(victim.index + 1)
            self._gone_in[victim.index] = self.n_issued
            self._gone_for[victim.index] = index

    def asked_while_late(self, piece: Piece) -> None:
        """The gate asked for a prefetched piece that is still under way."""
        if piece.index < self.n_known:
            self._late[piece.index] = 1

    def asked_but_absent(self, piece: Piece) -> None:
        """The gate asked for a piece that is not resident: whoever evicted it for speculation did harm."""
        if piece.index < self.n_known and self._gone_in[piece.index]:
            by = self._gone_for[piece.index]
            if self._issue[by] == self._gone_in[piece.index] and not self._harmful[by]:
                self._harmful[by] = 1
                self._count(_HARMFUL, by)
            self._gone_in[piece.index] = 0

    def used(self, piece: Piece) -> None:
        """First use of a prefetched piece."""
        if self._closes(piece):
            self._count(_LATE if self._late[piece.index] else _USEFUL, piece.index)

    def gone(self, piece: Piece) -> None:
        """A prefetched piece was evicted without a use."""
        if self._closes(piece):
            self._count(_WASTED, piece.index)

    def cancelled(self, piece: Piece) -> None:
        """A queued copy was withdrawn before it started: it moved no bytes."""
        if self._closes(piece):
            self.n_cancelled += 1
            self.cancelled_bytes += self._bytes[piece.index]
            self.by_expert.add(CANCELLED, piece, 1)
            self.by_expert.add(CANCELLED_BYTES, piece, self._bytes[piece.index])

    def finish(self) -> None:
        """End of the run: what was never used is wasted."""
        for index in range(self.n_known):
            if self._issue[index]:
                self._count(_WASTED, index)
                self._issue[index] = 0
        self.n_unused = 0

    def forget(self, piece: Piece) -> None:
        """The piece is resident again: its eviction can harm nobody any more."""
        if piece.index < self.n_known:
            self._gone_in[piece.index] = 0

    def take_in(self, other: PrefetchTally) -> None:
        """Count what became of another replica's, too."""
        for fate in range(len(FATES)):
            self.n_of[fate] += other.n_of[fate]
            self.bytes_of[fate] += other.bytes_of[fate]
        self.n_issued += other.n_issued
        self.n_cancelled += other.n_cancelled
        self.n_dropped += other.n_dropped
        self.issued_bytes += other.issued_bytes
        self.cancelled_bytes += other.cancelled_bytes

    def _closes(self, piece: Piece) -> bool:
        """Whether what becomes of a prefetched piece is settled now."""
        if piece.index >= self.n_known or not self._issue[piece.index]:
            return False
        self._issue[piece.index] = 0
        self.n_unused -= 1
        return True

    def _count(self, fate: int, index: int) -> None:
        self.n_of[fate] += 1
        n_bytes, row = self._bytes[index], self._row[index]
        self.bytes_of[fate] += n_bytes
        self.by_expert.more(FATE + fate, row, 1)
        self.by_expert.more(FATE_BYTES + fate, row, n_bytes)

    def _grow(self, n: int) -> None:
        """Take in pieces up to `n`."""
        self.n_known = n = max(n, 2 * self.n_known)
        self._issue = longer_ints(self._issue, n)
        self._bytes = longer_ints(self._bytes, n)
        self._row = longer_ints(self._row, n)
        self._late = longer_ints(self._late, n)
        self._harmful = longer_ints(self._harmful, n)
        self._gone_in = longer_ints(self._gone_in, n)
        self._gone_for = longer_ints(self._gone_for, n)


class Loss:
    """What lossy routing changed, in (token, expert) activations and in gate mass."""

    def __init__(self) -> None:
        self.activations = self.changed = self.dropped = 0
        self.lowered = 0  # executed in less than the serving precision
        self.mass_before = self.mass_kept = 0.0

    def take_in(self, other: Loss) -> None:
        """Add what another replica lost."""
        self.activations += other.activations
        self.changed += other.changed
        self.dropped += other.dropped
        self.lowered += other.lowered
        self.mass_before += other.mass_before
        self.mass_kept += other.mass_kept

    def gate_mass_kept(self) -> float | None:
        """Share of the chosen experts' gate mass that was still computed; 1 for lossless runs, None where unknown."""
        if self.mass_before:
            return self.mass_kept / self.mass_before
        return None if self.changed + self.dropped else 1.0


class Tally:
    """All counts of one run."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.by_expert = ByExpert(n_layers, n_experts)
        self.hits = {phase: HitCounts() for phase in PHASES}
        self.prefetch = PrefetchTally(self.by_expert)
        self.loss = Loss()
        self.n_demand = self.n_evicted = 0
        self.demand_bytes = 0
        self.n_iterations = dict.fromkeys(PHASES, 0)
        self.n_executed = 0  # (token, expert) pairs executed, on GPU or CPU

    def take_in(self, other: Tally) -> None:
        """Add all counts of another replica."""
        self.by_expert.take_in(other.by_expert)
        for phase in PHASES:
            self.hits[phase].take_in(other.hits[phase])
            self.n_iterations[phase] += other.n_iterations[phase]
        self.prefetch.take_in(other.prefetch)
        self.loss.take_in(other.loss)
        self.n_demand += other.n_demand
        self.n_evicted += other.n_evicted
        self.demand_bytes += other.demand_bytes
        self.n_executed += other.n_executed
