"""The default service of a layer: what a policy gets that leaves it to the engine, or that decides `Serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.flat import ints
from sim.engine.by_expert import DEMAND, EXCHANGED
from sim.engine.copies import Copies, Log
from sim.engine.counts import HIT, MISS, HitCounts, Tally
from sim.engine.layer import Layer
from sim.engine.pending_experts import PendingExperts
from sim.engine.residency import Residency
from sim.engine.victims import InTurn
from sim.machine.protocol import Machine
from sim.machine.turn import Turn
from sim.policy.api import overrides
from sim.policy.pieces import Piece

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.policy.view import View

_HIT, _MISS, _DEMAND, _EXCHANGED = HIT, MISS, DEMAND, EXCHANGED  # machine integers where this is compiled


class Service:
    """Fetches what is missing, runs residents meanwhile, then what arrives, in the order of the gate.

    Experts that come together are exchanged together: `_exchange` looks for all who leave, and has all copied, before
    it changes anything. Where one of them needs more than that, each is demanded for itself (`Copies.demand`).
    """

    view: View

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        residency: Residency,
        pending: PendingExperts,
        copies: Copies,
        layer: Layer,
        tally: Tally,
        log: Log | None,
    ) -> None:
        pieces = residency.pieces
        self.policy = policy
        self.machine = machine
        self.pieces = pieces
        self.residency = residency
        self.pending = pending
        self.copies = copies
        self.layer = layer
        self.tally = tally
        self.log = log
        self.by_expert = tally.by_expert
        self.counts = tally.by_expert.n
        self.n_experts = pieces.n_experts
        self.n_whole = len(pieces.whole) * pieces.n_experts
        self.turn = Turn(pieces.n_experts, pieces.all[0].n_bytes)
        self.missing = ints(pieces.n_experts)
        self.tells_accessed = False
        self.order: InTurn | None = None  # by which experts are exchanged together
        self.ordered = False  # whether the turn's experts have been put last in it
        self.n_missing = 0
        self.in_a_row = False  # whether all who leave are the first in the order, and `stays` what is behind them
        self.stays = 0
        self.single = False  # whether each expert is known to be for one token
        self.now_s = 0.0  # when the layer was looked at
        self.n_known = 0  # how many of the turn's first experts are, and are there at `turn.arrived_s`
        self._accessed = policy.accessed

    def start(self, view: View) -> None:
        """Take over what binding the policy has settled."""
        self.view = view
        self.tells_accessed = overrides(self.policy, "accessed")
        copies, victims = self.copies, self.copies.victims
        told = self.tells_accessed or copies.tells_evicted or copies.polls or self.machine.keeps_pieces
        self.order = victims if isinstance(victims, InTurn) and not told and self.residency.n_gpus == 1 else None

    def take_hooks(self) -> None:
        """Bind the hooks that are told of experts: once, not at each of millions of calls."""
        self._accessed = self.policy.accessed

    def serve_chosen(self, counts: HitCounts, now_s: float) -> None:
        """Classify what the gate has asked for and serve it, for a policy that is not asked in between."""
        if self._look(counts, now_s):
            if self.tells_accessed:
                for at in range(self.turn.n):
                    self._accessed(self.pieces.all[self.turn.first + self.turn.experts[at]], True, self.view)
            self._finish(True)
        else:
            self.layer.classify(self.pending.layer, counts)
            self.serve()

    def _look(self, counts: HitCounts, now_s: float) -> bool:
        """Tell hits from misses and count them, where there is nothing else; False, and nothing done, where there is.

        That is so where anything has been prefetched, or lies there in parts or other precisions, or is under way.
        """
        residency, pending, turn = self.residency, self.pending, self.turn
        if self.tally.prefetch.n_issued or residency.n_parts or self.layer.lower or self.layer.begun:
            return False
        turn.begin(pending.layer)
        n_here = 0
        n_missing = 0
        for at in range(pending.n):
            expert = pending.order[at]
            index = turn.first + expert
            here = residency.here[index]
            arrived_s = residency.rows[index].arrived_s
            # Asked last, and written into both lists, of which one grows: no processor foresees who is there.
            late = arrived_s > now_s
            if (late or residency.ticketed) and here and (late or residency.arrival[index] is not None):
                return False
            turn.experts[n_here] = expert
            turn.arrived_s[n_here] = arrived_s
            self.missing[n_missing] = expert
            n_here += here
            n_missing += 1 - here
        self.by_expert.spoken = turn.layer
        self.now_s = now_s
        turn.n = turn.n_here = n_here
        self.n_missing = n_missing
        self.single = pending.n_tokens == pending.n
        self.n_known = n_here if self.single else 0
        counts.n_experts[_HIT] += n_here
        counts.n_experts[_MISS] += n_missing
        n_tokens = n_here
        if not self.single:
            n_tokens = 0
            for at in range(n_here):
                n_tokens += pending.tokens[turn.experts[at]]
        counts.n_tokens[_HIT] += n_tokens
        counts.n_tokens[_MISS] += pending.n_tokens - n_tokens
        return True

    def serve(self) -> None:
        """Serve what is left of the running layer."""
        residency, pending, copies, turn = self.residency, self.pending, self.copies, self.turn
        if self.layer.lower or self.layer.begun:
            self._serve_mixed()
            return
        turn.begin(pending.layer)
        n_here = 0
        n_missing = 0
        for at in range(pending.n):
            expert = pending.order[at]
            if not pending.tokens[expert]:
                continue
            index = turn.first + expert
            if residency.here[index]:
                turn.experts[n_here] = expert
                n_here += 1
                if residency.ticketed and residency.arrival[index] is not None:
                    copies.promote(self.pieces.all[index])
                if self.tells_accessed:
                    self._accessed(self.pieces.all[index], True, self.view)
            else:
                self.missing[n_missing] = expert
                n_missing += 1
        turn.n = turn.n_here = n_here
        self.n_missing = n_missing
        self.single = False
        self.n_known = 0
        self.now_s = self.machine.now()
        self._finish(False)

    def _finish(self, to_count: bool) -> None:
        """Fetch what is missing and compute the turn.

        Args:
            to_count: why what is missing is so has not been counted yet.
        """
        copies, turn, n_missing = self.copies, self.turn, self.n_missing
        self.ordered = False
        n_later = 0
        if n_missing and self.order is not None and self._exchange(n_missing):
            if self.single and self.log is None and self.machine.run_turn(turn):
                self._replace_and_run(n_missing, to_count)
                return
            if to_count:
                self._count_missing(n_missing)
            self._replace(n_missing)
        elif n_missing:
            if to_count:
                self._count_missing(n_missing)
            n_later = self._demand_each(n_missing)
        if copies.polls or not self._run_together():
            for at in range(turn.n):
                self.layer.run_whole(turn.first + turn.experts[at])
        for at in range(n_later):  # more experts than room: each waits until one before it has run
            expert = self.missing[at]
            piece: Piece = self.pieces.all[turn.first + expert]
            copies.fetch(piece)
            if self.tells_accessed:
                self._accessed(piece, False, self.view)
            self.layer.run_whole(turn.first + expert)

    def _count_missing(self, n_missing: int) -> None:
        """Count why each missing expert is so."""
        by_expert, turn = self.by_expert, self.turn
        for at in range(n_missing):
            index = turn.first + self.missing[at]
            by_expert.more(by_expert.why(turn.layer, index, self.residency.rows[index].left_in), index, 1)

    def _serve_mixed(self) -> None:
        """`serve` where experts may run in a lower precision, or have been begun."""
        policy, view, residency, copies, layer = self.policy, self.view, self.residency, self.copies, self.pending.layer
        there, missing = [], []
        for expert in self.pending.experts():
            piece = self.pieces.whole[layer][expert]
            if not residency.holds(piece) and expert in self.layer.lower:
                piece = self.pieces.part(layer, expert, 0.0, 1.0, self.layer.lower[expert])
            if not residency.holds(piece):
                missing.append(piece)
                continue
            there.append(expert)
            copies.promote(piece)
            policy.accessed(piece, True, view)
        later: list[Piece] = []
        for piece in missing:
            copies.queue.remove(piece)
            if not copies.demand(piece):
                later.append(piece)
                continue
            policy.accessed(piece, False, view)
            there.append(piece.expert)  # or will be, by the time it runs
        for expert in there:
            self.layer.run_gpu(expert)
        for piece in later:
            copies.fetch(piece)
            policy.accessed(piece, False, view)
            self.layer.run_gpu(piece.expert)

    # -- room and copies --------------------------------------------------------------------------------------------

    def _demand_each(self, n_missing: int) -> int:
        """Demand one missing expert after the other; how many found no room yet."""
        copies, turn = self.copies, self.turn
        queued = copies.queue.n_waiting > 0
        n_later = 0
        for at in range(n_missing):
            expert = self.missing[at]
            piece: Piece = self.pieces.all[self.turn.first + expert]
            if queued:
                copies.queue.remove(piece)
            if copies.demand(piece):
                if self.tells_accessed:
                    self._accessed(piece, False, self.view)
                turn.experts[turn.n] = expert
                turn.n += 1
            else:
                self.missing[n_later] = expert
                n_later += 1
        return n_later

    def _exchange(self, n_missing: int) -> bool:
        """Demand all missing experts together; False, and nothing done, where each has to be demanded for itself.

        Nothing is written down yet of who comes and leaves. It is done where all room is clean, whoever leaves is a
        whole expert that nothing reads any more, and the machine knows when each copy ends.
        """
        residency, order, turn = self.residency, self.order, self.turn
        assert order is not None
        if self.copies.rooms.n_freed or residency.read_back or (residency.divided and not order.per_layer):
            return False
        n_bytes = turn.n_bytes
        free_bytes = residency.room_of(turn.layer)
        index = order.line.first[turn.layer if order.per_layer else 0]  # of this cache
        now_s = self.now_s
        n_leaving = 0
        n_staying = 0  # of those who were looked at
        for at in range(n_missing):
            turn.experts[turn.n_here + at] = self.missing[at]
            if n_bytes <= free_bytes:
                free_bytes -= n_bytes
                continue
            while True:
                if index < 0 or index >= self.n_whole:
                    return False
                expert = index - turn.first
                if expert < 0 or expert >= self.n_experts or not self.pending.tokens[expert]:
                    break
                n_staying += 1
                index = residency.rows[index].next
            if residency.rows[index].busy_s > now_s or (residency.ticketed and residency.busy[index] is not None):
                return False
            if residency.rows[index].unused:  # a prefetch that was of no use
                return False
            turn.leaving[n_leaving] = index
            n_leaving += 1
            index = residency.rows[index].next
        turn.n = turn.n_here + n_missing
        turn.n_leaving = n_leaving
        if not self.machine.demand_turn(turn):
            turn.n = turn.n_here
            return False
        self.in_a_row = n_staying == 0
        self.stays = index
        if self.single:
            self.n_known = turn.n
        return True

    def _replace_and_run(self, n_missing: int, to_count: bool) -> None:
        """Write down that a turn has been exchanged, and all of it computed."""
        residency, order, turn, by_expert = self.residency, self.order, self.turn, self.by_expert
        assert order is not None
        together = to_count and not by_expert.predicts  # one column says all of who comes
        if to_count and not together:
            self._count_missing(n_missing)
        pass_n = by_expert.pass_n
        column = by_expert.first + (_EXCHANGED if together else _DEMAND) * by_expert.stride
        residency.leave(turn, 0, turn.n_leaving, pass_n)
        residency.come(turn, turn.n_here, turn.n, True, column, 2 * by_expert.stride, pass_n if together else 0)
        order.exchange(turn, self.in_a_row, self.stays)
        self._count_exchanged(n_missing)
        self._ran(0, turn.n_here)
        if not together:
            for at in range(turn.n_here, turn.n):
                self.counts[by_expert.first + turn.first + turn.experts[at]] += 1

    def _replace(self, n_missing: int) -> None:
        """Those who leave are gone, and the turn's last experts there: the first of these in room that nobody had."""
        residency, order, turn, by_expert = self.residency, self.order, self.turn, self.by_expert
        assert order is not None
        pass_n = by_expert.pass_n
        column = by_expert.first + _DEMAND * by_expert.stride
        if self.log is None:
            residency.leave(turn, 0, turn.n_leaving, pass_n)
            residency.come(turn, turn.n_here, turn.n, False, column, 0, 0)
            order.exchange(turn, self.in_a_row, self.stays)
        else:
            if order.touches:
                order.touch(turn, 0, turn.n_here)
            self._replace_in_turn(n_missing - turn.n_leaving, column, pass_n)
        self.ordered = order.touches  # who is there runs before who comes
        self._count_exchanged(n_missing)

    def _count_exchanged(self, n_missing: int) -> None:
        """Count copies and who has left for them; those who came before have had room that nobody had."""
        turn, tally, n_leaving = self.turn, self.tally, self.turn.n_leaving
        self.copies.rooms.clean_bytes[0] -= (n_missing - n_leaving) * turn.n_bytes
        tally.n_evicted += n_leaving
        tally.n_demand += n_missing
        tally.demand_bytes += n_missing * turn.n_bytes
        if tally.prefetch.n_issued:
            for at in range(turn.n_here, turn.n):
                tally.prefetch.forget(self.pieces.all[turn.first + turn.experts[at]])

    def _replace_in_turn(self, n_new: int, column: int, pass_n: int) -> None:
        """The same, one after the other and told."""
        residency, order, turn = self.residency, self.order, self.turn
        assert order is not None and self.log is not None
        for at in range(turn.n_here, turn.n):
            left = at - turn.n_here - n_new
            if left >= 0:
                residency.leave(turn, left, left + 1, pass_n)
                order.leave(turn, left, left + 1)
                gone: Piece = self.pieces.all[turn.leaving[left]]
                self.log("evict", gone.layer, gone.expert)
            residency.come(turn, at, at + 1, False, column, 0, 0)
            order.come(turn, at, at + 1)
            self.log("fetch", turn.layer, turn.experts[at])

    # -- computing --------------------------------------------------------------------------------------------------

    def _run_together(self) -> bool:
        """Compute experts that are resident whole in one go; False where the machine cannot say now when each ends."""
        turn, residency, pending = self.turn, self.residency, self.pending
        for at in range(self.n_known, turn.n):
            expert = turn.experts[at]
            index = turn.first + expert
            if pending.tokens[expert] != 1 or (residency.ticketed and residency.arrival[index] is not None):
                return False
            turn.arrived_s[at] = residency.rows[index].arrived_s
        if not self.machine.run_turn(turn):
            return False
        self._ran(0, turn.n)
        victims = self.copies.victims
        if victims is not None and victims.touches and not self.ordered:
            victims.touch(turn, 0, turn.n)
        return True

    def _ran(self, start: int, stop: int) -> None:
        """All of the turn has been computed; write down of these what each was found with."""
        turn, residency, pending = self.turn, self.residency, self.pending
        for at in range(start, stop):
            expert = turn.experts[at]
            index = turn.first + expert
            if residency.ticketed:
                residency.busy[index] = None
            residency.rows[index].busy_s = turn.ends_s[at]
            residency.rows[index].n_ran += 1
            if residency.rows[index].unused:
                residency.rows[index].unused = 0
                self.tally.prefetch.used(self.pieces.all[index])
        for at in range(turn.n):
            pending.tokens[turn.experts[at]] = 0
        if self.log is not None:
            for at in range(turn.n):
                self.log("gpu", turn.layer, turn.experts[at])
        pending.n_left -= turn.n
        self.tally.n_executed += turn.n
