"""What is computed: pending experts of a layer, whole or in parts, on the GPU or on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.errors import IllegalDecision
from sim.base.flat import ints
from sim.base.lanes import GPU as LANE
from sim.engine.by_expert import GPU, INSTEAD, PART, RAN_AHEAD, RAN_ON_CPU
from sim.engine.copies import Copies, Log
from sim.engine.counts import HIT, LATE, MISS, ON_CPU, PARTIAL, HitCounts, Tally
from sim.engine.pending_experts import PendingExperts
from sim.engine.residency import Residency, side_by_side, tiling
from sim.machine.protocol import NO_TICKETS, Machine
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket, ends_at

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.policy.view import View
    from sim.workload.gate import Gate

WHOLE: tuple[Piece, ...] = ()
_GPU, _HIT, _MISS = LANE, HIT, MISS  # machine integers where this is compiled


class Layer:
    """Serves one layer after the other: what its gate finds, what is computed where, and how that is counted."""

    view: View

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        residency: Residency,
        pending: PendingExperts,
        copies: Copies,
        tally: Tally,
        log: Log | None,
    ) -> None:
        pieces = residency.pieces
        self.policy = policy
        self.has_cpu = False
        self.machine = machine
        self.pieces = pieces
        self.residency = residency
        self.pending = pending
        self.copies = copies
        self.tally = tally
        self.log = log
        self.n_experts = pieces.n_experts
        self.by_expert = tally.by_expert
        self.kinds = ints(pieces.n_experts)  # how the gate found each expert it asked for
        self.columns = ints(pieces.n_experts)  # the same in `by_expert`
        self.ran_on_cpu: list[int] = []
        self.joins: dict[int, list[Ticket]] = {}  # layer -> CPU results its stream must wait for
        self.ahead: dict[tuple[int, int], Ticket] = {}  # (layer, expert) -> CPU result computed ahead
        self.begun: dict[int, list[Piece]] = {}  # pending experts of which these pieces have run
        self.lower: dict[int, str] = {}  # experts of the layer that may run in a lower precision

    def start(self, view: View) -> None:
        """Take over what binding the policy has settled."""
        self.view = view
        self.has_cpu = "cpu" in self.policy.traits

    # -- what the gate finds ----------------------------------------------------------------------------------------

    def classify(self, layer: int, counts: HitCounts) -> None:
        """How the gate finds each expert that it asks for, before the policy reacts; counted as that, too."""
        residency, pending = self.residency, self.pending
        first = layer * self.n_experts
        now_s = self.machine.now()
        self.by_expert.spoken = layer
        for at in range(pending.n):
            expert = pending.order[at]
            index = first + expert
            kind = _MISS
            if residency.here[index]:
                kind = _HIT
                prefetched = residency.rows[index].origin == 1
                if prefetched or residency.rows[index].arrived_s > now_s or residency.arrival[index] is not None:
                    kind = self._arrived(index, counts)
            elif residency.n_parts or self.tally.prefetch.n_issued:
                kind = self._classify_parts(index, counts)
            self._note(layer, expert, kind)
            counts.n_experts[kind] += 1
            counts.n_tokens[kind] += pending.asked[at]

    def classify_asked(self, gate: Gate, counts: HitCounts) -> None:
        """The same where a lossy policy has changed the routing: of the gate's own choice, and what else will serve."""
        first = gate.layer * self.n_experts
        self.by_expert.spoken = gate.layer
        for expert, n_tokens in gate.asked.items():
            index = first + expert
            if self.residency.here[index]:
                kind = self._arrived(index, counts)
            else:
                kind = self._classify_parts(index, counts)
            self._note(gate.layer, expert, kind)
            counts.count(kind, n_tokens)
        for expert in gate.needs:
            if expert not in gate.asked:  # a lossy policy's substitutes: no gate asked for them
                counts.n_aside[self._found(first + expert)] += 1
                self.by_expert.more(INSTEAD, first + expert, 1)

    def _note(self, layer: int, expert: int, kind: int) -> None:
        """Write down how the gate found an expert; of a miss, why it was one."""
        index = layer * self.n_experts + expert
        column = self.by_expert.why(layer, index, self.residency.rows[index].left_in) if kind == _MISS else kind
        self.kinds[expert] = kind
        self.columns[expert] = column
        if column:  # hits are what is left of what ran
            self.by_expert.more(column, index, 1)

    def _arrived(self, index: int, counts: HitCounts) -> int:
        """The class of a resident expert."""
        residency = self.residency
        arrival: Ticket | None = residency.arrival[index]
        if arrival is None:
            there = residency.rows[index].arrived_s <= self.machine.now()
        else:
            there = self.machine.ended(arrival)
        if not there:
            self.tally.prefetch.asked_while_late(self.pieces.all[index])
            return LATE
        if residency.rows[index].unused:
            counts.prefetched += 1
        return HIT

    def _found(self, index: int) -> int:
        """The class of an expert that no gate asked for, as `classify` gives it: no prefetch is judged by it."""
        piece: Piece = self.pieces.all[index]
        lower = self.lower.get(piece.expert)
        enough = self.residency.sufficient(piece, lower)
        parts = enough or self.residency.parts(piece, lower)
        here = [self.copies.arrived(part) for part in parts]
        if enough:
            return HIT if all(here) else LATE
        return PARTIAL if any(here) else LATE if here else MISS

    def _classify_parts(self, index: int, counts: HitCounts) -> int:
        """The class of an expert that is not resident whole."""
        piece: Piece = self.pieces.all[index]
        residency, prefetched = self.residency, self.tally.prefetch
        lower = self.lower.get(piece.expert) if self.lower else None
        parts = residency.parts(piece, lower)
        if not parts:
            prefetched.asked_but_absent(piece)
            return MISS
        n_here = 0
        for part in parts:
            if self.copies.arrived(part):
                n_here += 1
            else:
                prefetched.asked_while_late(part)
        enough = residency.sufficient(piece, lower)
        if enough is None:
            return PARTIAL if n_here else LATE
        if n_here < len(parts):
            for part in enough:
                if not self.copies.arrived(part):
                    return LATE
        for part in enough:
            if residency.rows[part.index].unused:
                counts.prefetched += 1
                break
        return HIT

    # -- on the GPU -------------------------------------------------------------------------------------------------

    def run_whole(self, index: int) -> None:
        """Compute a pending expert that is resident whole."""
        piece: Piece = self.pieces.all[index]
        expert = piece.expert
        n_tokens = self.pending.tokens[expert]
        self._launch(piece, n_tokens, NO_TICKETS)
        self._done(expert, n_tokens)

    def run_gpu(self, expert: int, after: tuple[Ticket, ...] = (), joined: bool = False) -> Ticket:
        """Compute a pending expert on the GPU, each of its pieces (or of those that are left) as it arrives."""
        layer, pending, residency = self.pending.layer, self.pending, self.residency
        n_tokens = pending.tokens_of(layer, expert)
        if not n_tokens:
            raise IllegalDecision(f"RunGpu({expert}): layer {layer} does not owe it; run each needed expert once")
        index = layer * self.n_experts + expert
        piece: Piece = self.pieces.all[index]
        if residency.here[index] and (not self.begun or expert not in self.begun):
            ticket = self._settled(self._launch(piece, n_tokens, after))
            self._done(expert, n_tokens)
            return ticket
        return self._run_pieces(piece, n_tokens, after, joined)

    def _run_pieces(self, whole: Piece, n_tokens: int, after: tuple[Ticket, ...], joined: bool) -> Ticket:
        """Compute a pending expert from parts, or what is left of it."""
        expert = whole.expert
        begun: Sequence[Piece] = self.begun.get(expert, ())
        enough = self.residency.sufficient(whole, self.lower.get(expert), begun)
        if enough is None:
            raise IllegalDecision(
                f"RunGpu({expert}): layer {self.pending.layer}'s expert is not on the GPU; Fetch it first"
            )
        if joined and len(enough) > 1:
            if begun or not side_by_side(enough, whole):
                raise IllegalDecision(
                    f"RunGpu({expert}, joined=True): {enough} are not all of the expert in columns "
                    "of the serving precision; leave `joined` out"
                )
            ticket = self._launch_joined(whole, enough, n_tokens, after)
        else:
            for piece in enough:
                launched = self._launch(piece, n_tokens, after)
            ticket = self._settled(launched)
        self._ran(expert, n_tokens, [*begun, *enough])
        return ticket

    def _settled(self, ticket: Ticket | None) -> Ticket:
        """A ticket also for work that the machine has settled at once."""
        return ends_at(self.machine.ends_s, self.machine.cause, _GPU) if ticket is None else ticket

    def run_part(self, piece: Piece, after: tuple[Ticket, ...] = (), slices: Sequence[Piece] = ()) -> Ticket:
        """Compute a piece of a pending expert, as it is or in slices; the last of them completes the expert."""
        expert, layer = piece.expert, self.pending.layer
        n_tokens = self.pending.tokens_of(piece.layer, expert)
        if not n_tokens:
            raise IllegalDecision(f"RunPart of {piece}: layer {layer} does not owe it; run each part once")
        begun: list[Piece] = self.begun.get(expert, [])
        lying: Sequence[Piece] = slices or (piece,)
        whole = not slices or side_by_side(lying, piece)
        if not whole:
            lying = sorted(slices, key=_start)
            whole = side_by_side(lying, piece)
        lower = self.lower.get(expert) if self.lower else None
        serves = piece.precision == self.pieces.precision or piece.precision == lower
        for one in lying:
            serves = serves and self.residency.holds(one)
        if not serves:
            raise IllegalDecision(f"RunPart of {piece}: not on the GPU, or not in a precision that serves; Fetch it")
        if not whole:
            raise IllegalDecision(f"RunPart of {piece}: {lying} are not all of it in columns; name those that are")
        done_frac = 0.0
        for other in begun:
            if other.start_frac < piece.stop_frac and piece.start_frac < other.stop_frac:
                raise IllegalDecision(f"RunPart of {piece}: {begun} have run; run no column twice")
            if other.stop_frac > done_frac:
                done_frac = other.stop_frac
        if piece.kernels_frac < 1.0 and piece.start_frac > done_frac:
            raise IllegalDecision(f"RunPart of {piece}: a matrix needs what those before it come to; run them first")
        if slices:
            ticket = self._launch_joined(piece, lying, n_tokens, after)
        else:
            ticket = self._settled(self._launch(piece, n_tokens, after))
        begun = [*begun, piece]
        if tiling((), begun) is not None:
            self._ran(expert, n_tokens, begun)
            return ticket
        self.begun[expert] = begun
        self.by_expert.add(PART, piece, 1)
        if self.log is not None:
            self.log("part", layer, expert)
        if self.copies.polls:
            self.copies.poll()
        return ticket

    def _launch(self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...]) -> Ticket | None:
        """Compute a resident piece once it has arrived; None where that is settled, as the machine says."""
        residency = self.residency
        index = piece.index
        arrival: Ticket | None = residency.arrival[index]
        arrived_s = residency.rows[index].arrived_s
        if arrival is None and residency.tells:
            arrival = residency.told_of(index)
            if arrival is not None:
                arrived_s = 0.0
        if arrival is not None:
            after = (arrival,) + after  # noqa: RUF005 - compiled, a star takes a list and costs three times as much
        ticket = self.machine.expert(piece, n_tokens, arrived_s, after, WHOLE)
        self._used(index, ticket, self.machine.ends_s)
        return ticket

    def _used(self, index: int, ticket: Ticket | None, ends_s: float) -> None:
        """A resident piece takes part in a computation, which ends with the ticket; without one at `ends_s`."""
        residency = self.residency
        if ticket is not None:
            residency.ticketed = True
        if residency.ticketed:
            residency.busy[index] = ticket
        residency.rows[index].busy_s = ends_s
        if residency.rows[index].unused:
            residency.rows[index].unused = 0
            self.tally.prefetch.used(self.pieces.all[index])
        victims = self.copies.victims
        if victims is not None and victims.touches:
            victims.touched(index)

    def _launch_joined(self, piece: Piece, slices: Sequence[Piece], n_tokens: int, after: tuple[Ticket, ...]) -> Ticket:
        """Compute a piece from slices of columns side by side, once the last of them has arrived."""
        residency, arrived_s = self.residency, 0.0
        arrivals: list[Ticket] = []
        for one in slices:
            arrival = residency.arrival[one.index]
            if arrival is None and residency.tells:
                arrival = residency.told_of(one.index)
            if arrival is not None:
                arrivals.append(arrival)
            else:
                if residency.rows[one.index].arrived_s > arrived_s:
                    arrived_s = residency.rows[one.index].arrived_s
        if arrivals:
            after = (*arrivals, *after) if after else tuple(arrivals)
        ticket = self._settled(self.machine.expert(piece, n_tokens, arrived_s, after, slices))
        for one in slices:
            self._used(one.index, ticket, self.machine.ends_s)
        return ticket

    def _ran(self, expert: int, n_tokens: int, parts: Sequence[Piece]) -> None:
        """A pending expert has been launched for good, whole or in these parts."""
        if parts:
            self.begun.pop(expert, None)
            for part in parts:
                if part.precision != self.pieces.precision:
                    self.tally.loss.lowered += n_tokens
                    break
        self._done(expert, n_tokens)

    def _done(self, expert: int, n_tokens: int) -> None:
        """An expert has run: it is pending no more."""
        self.pending.settle(expert)
        self.tally.n_executed += n_tokens
        self.by_expert.more(GPU, self.pending.layer * self.n_experts + expert, 1)
        if self.log is not None:
            self.log("gpu", self.pending.layer, expert)
        if self.copies.polls:
            self.copies.poll()

    # -- on the CPU -------------------------------------------------------------------------------------------------

    def run_cpu(self, expert: int, join_layer: int | None = None) -> Ticket:
        """Compute a pending expert on the CPU; its result joins the stream at the end of `join_layer`."""
        layer = self.pending.layer
        if expert in self.begun:
            raise IllegalDecision(f"RunCpu({expert}): a part of it has run on the GPU; run the rest there")
        n_tokens = self.pending.tokens_of(layer, expert)
        if not n_tokens:
            raise IllegalDecision(f"RunCpu({expert}): layer {layer} does not owe it; run each needed expert once")
        self.pending.settle(expert)
        if not self.has_cpu:
            raise IllegalDecision(f"RunCpu({expert}) of {self.policy.name}: needs the trait 'cpu'; declare it")
        join_layer = layer if join_layer is None else join_layer
        if not layer <= join_layer < self.pieces.n_layers:
            raise IllegalDecision(f"RunCpu({expert}, join_layer={join_layer}): join at this layer or a later one")
        ticket = self.ahead.pop((layer, expert), None)
        if ticket is None:
            ticket = self.machine.cpu_expert(layer, expert, n_tokens)
        self.joins.setdefault(join_layer, []).append(ticket)
        self.ran_on_cpu.append(expert)
        self.tally.n_executed += n_tokens
        self.by_expert.more(RAN_ON_CPU, layer * self.n_experts + expert, 1)
        if self.log is not None:
            self.log("cpu", layer, expert)
        return ticket

    def run_cpu_ahead(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        """Compute an expert of a later layer on the CPU now; `run_cpu` at that layer takes the result."""
        where = f"RunCpuAhead({layer}, {expert}, {n_tokens})"
        if "cpu" not in self.policy.traits or "lossy" not in self.policy.traits:
            raise IllegalDecision(
                f"{where} of {self.policy.name}: needs the traits 'cpu' and 'lossy' (its input is an "
                "earlier layer's); declare them"
            )
        if not self.pending.layer < layer < self.pieces.n_layers or not 0 <= expert < self.n_experts or n_tokens < 1:
            raise IllegalDecision(f"{where}: must name an expert of a later layer and at least one token")
        if (layer, expert) in self.ahead:
            raise IllegalDecision(f"{where}: computed already; ask once")
        ticket = self.ahead[layer, expert] = self.machine.cpu_expert(layer, expert, n_tokens)
        self.by_expert.more(RAN_AHEAD, layer * self.n_experts + expert, 1)
        if self.log is not None:
            self.log("cpu_ahead", layer, expert)
        return ticket

    # -- the end of a layer -----------------------------------------------------------------------------------------

    def count_on_cpu(self, layer: int, asked: dict[int, int], counts: HitCounts) -> None:
        """Count anew what the CPU has computed of the experts (with their tokens) that the gate asked for."""
        for expert in self.ran_on_cpu:
            if expert in asked:
                kind = self.kinds[expert]
                n_tokens = asked[expert]
                counts.n_aside[kind] += 1
                counts.n_experts[kind] -= 1
                counts.n_tokens[kind] -= n_tokens
                counts.count(ON_CPU, n_tokens)
                index = layer * self.n_experts + expert
                if kind:
                    self.by_expert.more(self.columns[expert], index, -1)
                self.by_expert.more(ON_CPU, index, 1)
        self.ran_on_cpu.clear()

    def join(self, layer: int) -> None:
        """Results of the CPU that the stream waits for after this layer."""
        if self.ahead and layer == self.pieces.n_layers - 1:
            self.ahead.clear()
        if self.joins:
            for ticket in self.joins.pop(layer, ()):
                self.machine.join(ticket)


def _start(piece: Piece) -> float:
    return piece.start_frac
