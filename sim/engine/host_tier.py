"""Which experts are in host memory, when a drive holds the others: a cache of its own, under a policy of its own.

The policy is any cache plug-in, asked and told as it is for a GPU: an access here is an expert that was missing on the
GPU, and is copied there or computed by the CPU. What leaves the GPU stays here; nothing is written to the drive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.errors import DoesNotFit, IllegalDecision
from sim.base.units import show_bytes, show_ram
from sim.engine.pending_experts import PendingExperts
from sim.engine.residency import DEMANDED, PLACED, Residency
from sim.engine.victims import victims_of
from sim.machine.protocol import DEMAND, SPECULATIVE, Machine
from sim.policy.api import answers_anew, overrides
from sim.policy.mistakes import blamed
from sim.policy.pieces import Piece, Pieces
from sim.policy.tickets import Ticket
from sim.policy.view import View
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.policy.api import Decisions, Policy
    from sim.workload.gate import Arrays
    from sim.workload.iterations import Iteration
    from sim.workload.learn_split import StoreSplit

COPY, PREFETCH, CPU, AHEAD = "copy", "prefetch", "cpu", "read ahead"
"""What asks: a copy on demand, a speculative one, an expert on the CPU, or nobody yet."""
HIT, LATE, MISS = range(3)


class Reads:
    """Counts by phase and by who asked: experts found in host memory, found under way, and read; and bytes read."""

    def __init__(self) -> None:
        self.found = {phase: {what: [0, 0, 0] for what in (COPY, PREFETCH, CPU, AHEAD)} for phase in PHASES}
        self.n_bytes = {phase: dict.fromkeys((COPY, PREFETCH, CPU, AHEAD), 0) for phase in PHASES}
        self.n_passed = 0  # reads that host memory had no room for: to the GPU by a staging buffer
        self.n_evicted = 0
        self.n_withdrawn = 0


class HostTier:
    """Experts in host memory.

    An expert's room is taken when its read is asked for. What is being read, and what a copy or the CPU reads, stays;
    where the policy names such an expert to leave, or none, the newcomer passes through a staging buffer instead.

    Args:
        pieces: of host memory, one home for all. arrays, top_k: as the GPU's policy sees them. read_ahead: experts that
            follow in the file, asked for after each that was missing.
    """

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        pieces: Pieces,
        n_bytes: int,
        cost: Cost,
        arrays: Arrays,
        top_k: int,
        read_ahead: int = 0,
    ) -> None:
        self.policy = policy
        self.machine = machine
        self.pieces = pieces
        self.residency = Residency(pieces, [n_bytes])
        self.pending = PendingExperts(pieces.n_experts)
        nothing: Any = None  # no copies to GPUs are this policy's
        self.view = View(
            policy, self.residency, self.pending, nothing, machine, cost, arrays, top_k, cost.model.hidden_size, None
        )
        self.read_ahead = read_ahead
        self.n_whole = pieces.n_layers * pieces.n_experts
        self.phase = PHASES[0]
        self.reads = Reads()
        self.reading: dict[int, Ticket] = {}  # by `Piece.index`: its read, as long as nobody has seen it end
        self.passing: dict[int, Ticket] = {}  # the same of what has no room here
        self.readers: dict[int, list[Ticket]] = {}  # what may still read it: copies, experts on the CPU

    def start(self, store: StoreSplit, warm: bool) -> None:
        """Bind the policy, let it learn, and put in place what it names, or what a load of the file leaves."""
        policy, view = self.policy, self.view
        need = policy.min_experts(view)
        if self.residency.budget(0) < need * view.expert_bytes:
            raise DoesNotFit(
                f"--ram, got {show_ram(self.residency.budget(0))}: --set drive.evict={policy.name} needs at least "
                f"{need} whole expert{'s' * (need != 1)} ({show_bytes(need * view.expert_bytes)}); raise it",
                {"host_memory_bytes": self.residency.budget(0)},
            )
        divided = policy.layer_budgets(view)
        if divided is not None:
            self.residency.divide(divided)
        policy.bind(view)
        policy.learn(store)
        order = policy.order
        if order is not None and answers_anew(policy, "victim", "bind"):
            raise IllegalDecision(f"victim of {policy.name}: the `bind` it inherits names a native order; see --policy")
        self.victims = None if order is None else victims_of(order, self.residency, self.pending)
        self._tells = {hook: overrides(policy, hook) for hook in ("accessed", "placed", "evicted", "layer_enter")}
        self._tells |= {hook: overrides(policy, hook) for hook in ("iteration_start", "layer_done", "iteration_end")}
        for piece in policy.initial(view):
            self._place(self.pieces.whole[piece.layer][piece.expert])
        if warm:
            self._load()

    def _load(self) -> None:
        """The file has been read from front to back: its last experts are still there, of each cache there is."""
        every = [piece for layer in self.pieces.whole for piece in layer]
        kept: list[Piece] = []
        used = [0] * self.pieces.n_layers
        room = self.residency.free_bytes(0)
        for piece in reversed(every):
            own = self.residency.divided
            least = self.residency.room_of(piece.layer) - used[piece.layer] if own else room
            if not self.residency.holds(piece) and piece.n_bytes <= min(room, least):
                kept.append(piece)
                used[piece.layer] += piece.n_bytes
                room -= piece.n_bytes
        for piece in reversed(kept):
            self._place(piece)
            self._tell_placed(piece)

    def _place(self, piece: Piece) -> None:
        self.residency.add(piece, None, 0.0, PLACED)
        if self.victims is not None:
            self.victims.placed(piece.index)

    def _tell_placed(self, piece: Piece) -> None:
        """The policy did not ask for it, and has to know that it is here."""
        if self._tells["placed"] and piece.index < self.n_whole:
            with blamed(self.policy):
                self.policy.placed(piece, self.view)

    # -- the pass ---------------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        """An iteration begins."""
        self.phase = iteration.counted
        self.view.phase = iteration.phase
        self._tell("iteration_start", iteration)

    def enter(self, layer: int) -> None:
        """A layer begins: what it asks for from now on stays until the next one does, as on a GPU."""
        if self.pending.layer >= 0:
            self._tell("layer_done", self.pending.layer)
        self.pending.begin()
        self.pending.layer = layer
        self.view.layer = layer
        self._tell("layer_enter", layer)

    def end(self, iteration: Iteration | None) -> None:
        """An iteration is over."""
        if self.pending.layer >= 0:
            self._tell("layer_done", self.pending.layer)
        self.pending.begin()
        self.pending.layer = -1
        if iteration is not None:
            self._tell("iteration_end", iteration)

    def _tell(self, hook: str, what: object) -> None:
        if self._tells[hook]:
            with blamed(self.policy):
                said: Decisions = getattr(self.policy, hook)(what, self.view)
                if said is not None and any(True for _ in said):
                    raise IllegalDecision(
                        f"{hook} of {self.policy.name} as --set drive.evict: it decides something; host memory only "
                        "keeps "
                        "experts; take a cache, e.g. lru"
                    )

    # -- what is asked for ------------------------------------------------------------------------------------------

    def own(self, piece: Piece) -> Piece:
        """The expert of a piece as host memory keeps it: whole, in the piece's precision."""
        whole: Piece = self.pieces.whole[piece.layer][piece.expert]
        if piece.precision == whole.precision:
            return whole
        return self.pieces.part(piece.layer, piece.expert, 0.0, 1.0, piece.precision)

    def ask(self, own: Piece, what: str) -> Ticket | None:
        """Somebody needs an expert here: what its read is, or None where it is there."""
        index, demanded = own.index, what != PREFETCH
        if demanded and own.layer == self.pending.layer and not self.pending.tokens_of(own.layer, own.expert):
            self.pending.add(own.expert, 1)
        counts = self.reads.found[self.phase][what]
        here = self.residency.holds(own)
        read = self._under_way(index, here, demanded)
        if here:
            counts[HIT if read is None else LATE] += 1
            self._used(own)
            return read
        if read is not None:
            counts[LATE] += 1
            return read
        counts[MISS] += 1
        read = self._read(own, what, demanded, pass_by=True)
        if demanded:
            self._ahead(own)
        return read

    def _under_way(self, index: int, here: bool, demanded: bool) -> Ticket | None:
        """The read of an expert that has not ended; promoted where somebody waits for it now."""
        where = self.reading if here else self.passing
        read = where.get(index)
        if read is None:
            return None
        if self.machine.ended(read):
            del where[index]
            return None
        if demanded:
            self.machine.promote(read)
        return read

    def _used(self, own: Piece) -> None:
        if self.victims is not None and self.victims.touches:
            self.victims.touched(own.index)
        if self._tells["accessed"] and own.index < self.n_whole:
            self.policy.accessed(own, True, self.view)

    def _read(self, own: Piece, what: str, demanded: bool, pass_by: bool) -> Ticket | None:
        room = self._make_room(own, not demanded)
        if not room and not pass_by:
            return None
        read = self.machine.read(own.layer, own.expert, own.n_bytes, DEMAND if demanded else SPECULATIVE)
        self.reads.n_bytes[self.phase][what] += own.n_bytes
        if not room:
            self.reads.n_passed += 1
            self.passing[own.index] = read
            return read
        self.residency.add(own, None, 0.0, DEMANDED)
        self.reading[own.index] = read
        if self.victims is not None:
            self.victims.placed(own.index)
        if own.index < self.n_whole:
            if demanded and self._tells["accessed"]:
                self.policy.accessed(own, False, self.view)
            elif not demanded:
                self._tell_placed(own)
        return read

    def _ahead(self, own: Piece) -> None:
        """Experts that follow in the file are read, too, as far as there is room for them."""
        for index in range(own.index + 1, min(own.index + 1 + self.read_ahead, self.n_whole)):
            piece: Piece = self.pieces.all[index]
            if own.index < self.n_whole and not self.residency.holds(piece) and index not in self.passing:
                if self._read(piece, AHEAD, False, pass_by=False) is None:
                    return
                self.reads.found[self.phase][AHEAD][MISS] += 1

    def _make_room(self, own: Piece, speculative: bool) -> bool:
        """Let experts leave until one fits; False where it does not, and passes through a staging buffer."""
        while not self.residency.fits(own):
            leaving = self._victim(own, speculative)
            if leaving is None or self._busy(leaving.index):
                return False
            self._leave(leaving)
            self.reads.n_evicted += 1
        return True

    def _victim(self, own: Piece, speculative: bool) -> Piece | None:
        newcomer: Piece = self.pieces.whole[own.layer][own.expert]  # policies of host memory know whole experts
        if self.victims is None:
            with blamed(self.policy):
                named = self.policy.victim(newcomer, speculative, self.view)
                if named is not None and self.residency.holds(self.residency.known(named)):
                    return named
        else:
            index = self.victims.victim(newcomer, speculative)
            if index >= 0:
                leaving: Piece = self.pieces.all[index]
                return leaving
        # Experts in another precision have no rank: the oldest of them leaves where no other does.
        lowered = (piece for piece in self.residency.resident_pieces() if piece.index >= self.n_whole)
        return next(lowered, None)

    def _leave(self, piece: Piece) -> None:
        self.residency.remove(piece)
        if self.victims is not None:
            self.victims.left(piece.index)
        self.reading.pop(piece.index, None)
        self.readers.pop(piece.index, None)
        if self._tells["evicted"] and piece.index < self.n_whole:
            self.policy.evicted(piece, self.view)

    def _busy(self, index: int) -> bool:
        """Whether an expert is being read, or is read by somebody."""
        read = self.reading.get(index)
        return (read is not None and not self.machine.ended(read)) or bool(self._still(index))

    def _still(self, index: int) -> list[Ticket]:
        left = [ticket for ticket in self.readers.get(index, ()) if not self.machine.ended(ticket)]
        if left:
            self.readers[index] = left
        else:
            self.readers.pop(index, None)
        return left

    def hold(self, own: Piece, reader: Ticket) -> None:
        """A copy, or an expert on the CPU, reads it until then."""
        index = own.index
        if self.residency.holds(own) or index in self.passing:
            self.readers[index] = [*self._still(index), reader]

    def wanted(self, own: Piece) -> None:
        """A copy that waits for its read has been demanded: so is the read."""
        self._under_way(own.index, self.residency.holds(own), True)

    def withdrawn(self, own: Piece) -> None:
        """A copy has been withdrawn: so is its read, where it has not begun and nobody else waits for it."""
        index = own.index
        here = self.residency.holds(own)
        read = (self.reading if here else self.passing).get(index)
        if read is None or self._still(index) or not self.machine.cancel(read):
            return
        self.reads.n_withdrawn += 1
        self.reads.n_bytes[self.phase][PREFETCH] -= own.n_bytes
        if here:
            self._leave(own)
        else:
            del self.passing[index]

    def came_back(self, own: Piece) -> None:
        """An expert has been written back from the GPU: it is here again, where there is room."""
        if not self.residency.holds(own) and self._make_room(own, True):
            self._place(own)
            self._tell_placed(own)
