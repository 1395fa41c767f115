"""What is computed: experts that a layer owes, whole or in parts, on the GPU or on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oracle.hooks import overrides
from oracle.protocol import Machine, Ticket
from oracle.residency import Cache, Entry, side_by_side, tiling
from oracle.transfers import Log, Transfers
from sim.base.errors import IllegalDecision

if TYPE_CHECKING:
    from oracle.pieces import Piece, Pieces
    from sim.policy.api import Policy


class Execution(Transfers):
    """The part of the engine that computes; `Transfers` fills the cache, `Engine` serves layers."""

    def __init__(self, policy: Policy, machine: Machine, cache: Cache, pieces: Pieces, log: Log | None) -> None:
        super().__init__(policy, machine, cache, log)
        self.pieces = pieces
        self._ran_on_cpu: set[int] = set()
        self._joins: dict[int, list[Ticket]] = {}  # layer -> CPU results its stream must wait for
        self._ahead: dict[tuple[int, int], Ticket] = {}  # (layer, expert) -> CPU result computed ahead
        self._begun: dict[int, list[Piece]] = {}  # owed experts of which these pieces have run
        self._lower: dict[int, str] = {}  # experts of the current layer that may run in a lower precision
        self._own_expert_done = overrides(policy, "expert_done")

    # -- on the GPU -------------------------------------------------------------------------------------------------

    def run_gpu(self, expert: int, after: tuple[Ticket, ...] = (), joined: bool = False) -> Ticket:
        """Compute an owed expert on the GPU, each of its pieces (or of those that are left) as it arrives."""
        n_tokens = self.unrun.get(expert)
        if n_tokens is None:
            raise IllegalDecision(f"RunGpu({expert}): layer {self.layer} does not owe it; run each needed expert once")
        whole = self.pieces.whole[self.layer][expert]
        entry = self.cache.entries.get(whole)
        if entry is not None and expert not in self._begun:
            ticket = self._launch(entry, n_tokens, after)
            self._ran(expert, n_tokens, ())
            return ticket
        begun = self._begun.get(expert, ())
        enough = self.cache.sufficient(whole, self._lower.get(expert), begun)
        if enough is None:
            raise IllegalDecision(f"RunGpu({expert}): layer {self.layer}'s expert is not on the GPU; Fetch it first")
        if joined and len(enough) > 1:
            lying = [used.piece for used in enough]
            if begun or not side_by_side(lying, whole):
                raise IllegalDecision(
                    f"RunGpu({expert}, joined=True): {lying} are not all of the expert in columns "
                    "of the serving precision; leave `joined` out"
                )
            ticket = self._launch_joined(whole, enough, n_tokens, after)
        else:
            for used in enough:
                ticket = self._launch(used, n_tokens, after)
        self._ran(expert, n_tokens, [*begun, *(used.piece for used in enough)])
        return ticket

    def run_part(self, piece: Piece, after: tuple[Ticket, ...] = (), slices: Sequence[Piece] = ()) -> Ticket:
        """Compute a piece of an owed expert, resident as it is or in slices; the last of them completes the expert."""
        expert = piece.expert
        n_tokens = self.unrun.get(expert) if piece.layer == self.layer else None
        if n_tokens is None:
            raise IllegalDecision(f"RunPart of {piece}: layer {self.layer} does not owe it; run each part once")
        begun = self._begun.get(expert, [])
        lying = sorted(slices, key=lambda one: one.start_frac) if slices else (piece,)
        entries = [entry for one in lying if (entry := self.cache.entries.get(one)) is not None]
        if len(entries) < len(lying) or piece.precision not in (self.pieces.precision, self._lower.get(expert)):
            raise IllegalDecision(f"RunPart of {piece}: not on the GPU, or not in a precision that serves; Fetch it")
        if slices and not side_by_side(lying, piece):
            raise IllegalDecision(f"RunPart of {piece}: {lying} are not all of it in columns; name those that are")
        if any(other.start_frac < piece.stop_frac and piece.start_frac < other.stop_frac for other in begun):
            raise IllegalDecision(f"RunPart of {piece}: {begun} have run; run no column twice")
        if piece.kernels_frac < 1.0 and piece.start_frac > max((other.stop_frac for other in begun), default=0.0):
            raise IllegalDecision(f"RunPart of {piece}: a matrix needs what those before it come to; run them first")
        if slices:
            ticket = self._launch_joined(piece, entries, n_tokens, after)
        else:
            ticket = self._launch(entries[0], n_tokens, after)
        begun = [*begun, piece]
        if tiling((), begun) is not None:
            self._ran(expert, n_tokens, begun)
            return ticket
        self._begun[expert] = begun
        if self.log:
            self.log("part", self.layer, expert)
        if self.polls:
            self.poll()
        return ticket

    def _launch(self, entry: Entry, n_tokens: int, after: tuple[Ticket, ...]) -> Ticket:
        """Compute a resident piece once it has arrived."""
        arrival = entry.arrival
        ticket = entry.last_use = self.machine.expert(
            entry.piece, n_tokens, after if arrival is None else (arrival, *after)
        )
        self.stamps.stamp(entry.piece)
        if not entry.used:
            self.tally.used(entry)
        return ticket

    def _launch_joined(self, piece: Piece, slices: Sequence[Entry], n_tokens: int, after: tuple[Ticket, ...]) -> Ticket:
        """Compute a piece from slices of columns side by side, once the last of them has arrived."""
        arrivals = tuple(entry.arrival for entry in slices if entry.arrival is not None)
        ticket = self.machine.expert(piece, n_tokens, (*arrivals, *after), [entry.piece for entry in slices])
        for entry in slices:
            entry.last_use = ticket
            self.stamps.stamp(entry.piece)
            if not entry.used:
                self.tally.used(entry)
        return ticket

    def _ran(self, expert: int, n_tokens: int, parts: Sequence[Piece]) -> None:
        """An owed expert has been launched for good, whole or in these parts."""
        tally = self.tally
        if parts:
            self._begun.pop(expert, None)
            if any(part.precision != self.pieces.precision for part in parts):
                tally.loss.lowered += n_tokens
        del self.unrun[expert]
        tally.n_executed += n_tokens
        if self.log:
            self.log("gpu", self.layer, expert)
        if self._own_expert_done:
            self.obey(self.policy.expert_done(self.layer, expert, self.view), "expert_done")
        if self.polls:
            self.poll()

    # -- on the CPU -------------------------------------------------------------------------------------------------

    def run_cpu(self, expert: int, join_layer: int | None = None) -> Ticket:
        """Compute an owed expert on the CPU; its result joins the stream at the end of `join_layer`."""
        if expert in self._begun:
            raise IllegalDecision(f"RunCpu({expert}): a part of it has run on the GPU; run the rest there")
        n_tokens = self.unrun.pop(expert, None)
        if n_tokens is None:
            raise IllegalDecision(f"RunCpu({expert}): layer {self.layer} does not owe it; run each needed expert once")
        if "cpu" not in self.policy.traits:
            raise IllegalDecision(f"RunCpu({expert}) of {self.policy.name}: needs the trait 'cpu'; declare it")
        join_layer = self.layer if join_layer is None else join_layer
        if not self.layer <= join_layer < self.pieces.n_layers:
            raise IllegalDecision(f"RunCpu({expert}, join_layer={join_layer}): join at this layer or a later one")
        ticket = self._ahead.pop((self.layer, expert), None) or self.machine.cpu_expert(self.layer, expert, n_tokens)
        self._joins.setdefault(join_layer, []).append(ticket)
        self._ran_on_cpu.add(expert)
        self.tally.n_executed += n_tokens
        if self.log:
            self.log("cpu", self.layer, expert)
        return ticket

    def run_cpu_ahead(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        """Compute an expert of a later layer on the CPU now; `run_cpu` at that layer takes the result."""
        where = f"RunCpuAhead({layer}, {expert}, {n_tokens})"
        if "cpu" not in self.policy.traits or "lossy" not in self.policy.traits:
            raise IllegalDecision(
                f"{where} of {self.policy.name}: needs the traits 'cpu' and 'lossy' (its input is an "
                "earlier layer's); declare them"
            )
        if not self.layer < layer < self.pieces.n_layers or not 0 <= expert < self.pieces.n_experts or n_tokens < 1:
            raise IllegalDecision(f"{where}: must name an expert of a later layer and at least one token")
        if (layer, expert) in self._ahead:
            raise IllegalDecision(f"{where}: computed already; ask once")
        ticket = self._ahead[layer, expert] = self.machine.cpu_expert(layer, expert, n_tokens)
        if self.log:
            self.log("cpu_ahead", layer, expert)
        return ticket
