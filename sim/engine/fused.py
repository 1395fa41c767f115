"""Engine and machine in one, for one simulated GPU where nobody looks on: the same objects, the calls taken out.

What `Transfers`, `Execution`, `Engine`, `SimLinks` and `SimMachine` do for a whole expert in the serving precision, in
two long functions. Whatever is unusual (parts, lower precisions, rooms still written back, work that waits for a copy
not settled yet) goes the general way, on the same state; so does all of a run that is logged or whose spans are kept.
`tests/test_fused.py` holds the two equal for every policy, bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.engine.engine import Engine
from sim.engine.residency import DEMANDED, PREFETCHED, Entry
from sim.machine.copy_queue import Copy
from sim.machine.lanes import GPU, HOST
from sim.machine.protocol import DEMAND, SPECULATIVE, UNKNOWN_S, Ticket
from sim.machine.simulated import SimMachine

if TYPE_CHECKING:
    from sim.engine.transfers import Log
    from sim.machine.price import Price
    from sim.machine.protocol import Machine
    from sim.policy.pieces import Piece


def applies(machine: Machine, log: Log | None) -> bool:
    """True for one simulated GPU without contention, spans and log."""
    return type(machine) is SimMachine and machine.n_gpus == 1 and machine.spans is None and log is None


class FusedEngine(Engine):
    """`Engine` on a `SimMachine` for which `applies` holds."""

    machine: SimMachine

    def start(self) -> None:
        super().start()
        self._prices: dict[int, tuple[Price, float, float]] = {}  # tokens -> an expert, its seconds, those of its tail
        self._copy_s = self.machine.cost.copy_s(self.pieces.whole[0][0].n_bytes)

    def poll(self) -> None:
        if self._own_copy_done:
            super().poll()
        elif self.queue.waiting and (len(self._speculative[0]) != self._depth or self.machine.now_s >= self._quiet_s):
            self.pump()

    def _forget_ended(self) -> None:
        machine = self.machine
        if len(machine.links) > 1:
            super()._forget_ended()
            return
        flying, lane, now_s = self._speculative[0], machine.up[0], machine.now_s
        over, quiet_s = [], math.inf
        for piece, ticket in flying.items():
            if ticket.end_s == UNKNOWN_S and lane.free_s < now_s:
                lane.advance(now_s)
            end_s = ticket.end_s
            if end_s == UNKNOWN_S:
                end_s = lane.free_s  # as `SimLinks.quiet_s` has it
            elif end_s <= now_s:
                over.append(piece)
                continue
            if end_s < quiet_s:
                quiet_s = end_s
        for piece in over:
            del flying[piece]
        self._quiet_s = quiet_s

    # -- copies -----------------------------------------------------------------------------------------------------

    def _demand(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> Ticket | None:
        if not piece.serving:
            return super()._demand(piece, after)
        brought = self._bring(piece, False, after)
        if brought is None:
            return None
        self._count_demand(piece)
        return brought[0]

    def _hand_over(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket | None:
        if not piece.serving or len(self.machine.links) > 1:
            return super()._hand_over(piece, after)
        brought = self._bring(piece, True, after)
        if brought is None:
            self.tally.prefetch.n_dropped += 1
            return None
        copy, victims = brought
        prefetch, free_s = self.tally.prefetch, self.machine.up[0].free_s
        prefetch.forget(piece)
        prefetch.issue(piece, victims)
        self._speculative[0][piece] = copy
        if free_s < self._quiet_s:  # as `SimLinks.quiet_s` has it: the copy is queued and begins after that
            self._quiet_s = free_s
        if self._tells_placed:
            self.policy.placed(piece, self.view)
        return copy

    def _bring(self, piece: Piece, speculative: bool, after: tuple[Ticket, ...]) -> tuple[Ticket, list[Piece]] | None:
        """`_make_room`, `_take_room`, `SimLinks.copy` and `Cache.add`: the copy and the victims; None without room."""
        cache, machine, policy, view, tally = self.cache, self.machine, self.policy, self.view, self.tally
        entries, used, n_bytes = cache.entries, cache.used_bytes, piece.n_bytes
        most_bytes, layer = cache.budget_bytes[0] - n_bytes, piece.layer
        victims: list[Piece] = []
        copy: Ticket
        layer_used, layer_budget = cache.layer_used, cache.layer_budget  # where layers have budgets of their own
        while used[0] > most_bytes or (
            layer_budget is not None and layer_used[0][layer] + n_bytes > layer_budget[0][layer]
        ):  # fmt: skip
            victim = policy.victim(piece, speculative, view)
            if victim is None:
                return None
            victims.append(victim)
            entry = entries.get(victim)
            if (
                entry is None or not victim.serving or (entry.origin == PREFETCHED and not entry.used)
                or entry.copied_down is not None or (victim.layer == self.layer and victim.expert in self.unrun)
            ):  # fmt: skip
                self.evict(victim)
                continue
            del entries[victim]
            used[0] -= victim.n_bytes
            if layer_budget is not None:
                layer_used[0][victim.layer] -= victim.n_bytes
            tally.n_evicted += 1
            busy = entry.last_use or entry.arrival
            if busy is None or UNKNOWN_S < busy.end_s <= machine.now_s:
                self._clean_bytes[0] += victim.n_bytes
            else:
                self._freed[0].append((victim.n_bytes, busy))
            if self.tells_evicted:
                policy.evicted(victim, view)
        # room: what has been freed longest, as much as it takes
        freed, clean_bytes, now_s = self._freed[0], self._clean_bytes[0], machine.now_s
        while freed and UNKNOWN_S < freed[0][1].end_s <= now_s:
            clean_bytes += freed.popleft()[0]
        waits: tuple[Ticket, ...] = ()
        lacks_bytes, n_before = n_bytes, 0
        while clean_bytes < n_bytes and freed:
            more_bytes, ticket = freed.popleft()
            clean_bytes += more_bytes
            waits = (*waits, ticket)
            if more_bytes > lacks_bytes:
                self._leave(0, more_bytes - lacks_bytes, waits[n_before:])
                clean_bytes -= more_bytes - lacks_bytes
            elif more_bytes:
                lacks_bytes, n_before = lacks_bytes - more_bytes, len(waits)
        self._clean_bytes[0] = clean_bytes - n_bytes
        # the copy
        if len(machine.links) > 1:
            copy = machine.copy(piece, SPECULATIVE if speculative else DEMAND, waits + after)
        elif speculative:
            machine.now_s = now_s = now_s + machine.cost.copy_launch_s
            machine.n_copy_launches += 1
            machine.experts_launched += 1.0
            lane = machine.up[0]
            waits_for = waits + after
            asked = Copy("prefetch", layer, piece.expert, n_bytes, self._copy_s, SPECULATIVE, now_s, waits_for)
            asked.piece = piece
            if lane.queue and lane.free_s < now_s:
                lane.advance(now_s)
            lane.queue.append(asked)
            copy = asked
        else:
            machine.now_s = now_s = now_s + machine.cost.copy_launch_s
            machine.n_copy_launches += 1
            machine.experts_launched += 1.0
            asked = Copy("demand", piece.layer, piece.expert, n_bytes, self._copy_s, DEMAND, now_s, waits + after)
            asked.piece = piece
            machine.up[0].submit(asked, now_s)
            copy = asked
        # and its entry
        used[0] = used_bytes = used[0] + n_bytes
        if layer_budget is not None:
            layer_used[0][layer] += n_bytes
        if used_bytes > cache.peak_bytes[0]:
            cache.peak_bytes[0] = used_bytes
        entry = entries[piece] = Entry(piece, copy, PREFETCHED if speculative else DEMANDED)
        if speculative:
            entry.room_after = waits
        return copy, victims

    # -- experts ----------------------------------------------------------------------------------------------------

    def _serve_owed(self) -> None:
        if self._lower or self._begun or self._own_expert_done:
            super()._serve_owed()
            return
        policy, view, whole, unrun = self.policy, self.view, self.pieces.whole[self.layer], self.unrun
        entries, waiting = self.cache.entries, self.queue.waiting
        there: list[Entry] = []
        missing: list[Piece] = []
        for expert in unrun:
            piece = whole[expert]
            entry = entries.get(piece)
            if entry is None:
                missing.append(piece)
                continue
            there.append(entry)
            if entry.arrival is not None and entry.arrival.end_s == UNKNOWN_S:
                self._promote(entry)
            policy.accessed(piece, True, view)
        later: list[Piece] = []
        for piece in missing:
            if waiting:
                self.queue.remove(piece)
            if self._demand(piece) is None:
                later.append(piece)
                continue
            policy.accessed(piece, False, view)
            there.append(entries[piece])
        for entry in there:
            self._run(entry, unrun.pop(entry.piece.expert))
        for piece in later:
            self.fetch(piece)
            policy.accessed(piece, False, view)
            self._run(entries[piece], unrun.pop(piece.expert))

    def run_gpu(self, expert: int, after: tuple[Ticket, ...] = (), joined: bool = False) -> Ticket:
        entry = self.cache.entries.get(self.pieces.whole[self.layer][expert])
        if after or entry is None or self._begun or self._own_expert_done or expert not in self.unrun:
            return super().run_gpu(expert, after, joined)
        return self._run(entry, self.unrun.pop(expert))

    def _run(self, entry: Entry, n_tokens: int) -> Ticket:
        """`run_gpu`, `SimMachine.expert` and `Stream.run` for a whole expert."""
        machine, tally, arrival = self.machine, self.tally, entry.arrival
        stream, cost = machine.streams[0], machine.cost
        ready_s = 0.0 if arrival is None else arrival.end_s
        if stream.pending or ready_s == UNKNOWN_S:
            ticket = entry.last_use = machine.expert(entry.piece, n_tokens, () if arrival is None else (arrival,))
        else:
            launch = cost.launch_expert
            if cost.grouped:
                price, launch = machine.grouped(entry.piece, n_tokens, () if arrival is None else (arrival,))
                duration_s, tail_s = price.duration_s, launch.tail_frac * price.duration_s
            else:
                known = self._prices.get(n_tokens)
                if known is None:
                    price = cost.expert(n_tokens, entry.piece.precision)
                    tail_s = launch.tail_frac * price.duration_s
                    known = self._prices[n_tokens] = (price, price.duration_s, tail_s)
                price, duration_s, tail_s = known
            start_s = first_s = machine.now_s + launch.first_s
            machine.now_s = last_s = machine.now_s + launch.all_s
            last_s += tail_s
            launch.n += 1
            used, uses = machine.used, stream.uses
            used[price] = used.get(price, 0) + 1
            uses[duration_s] = uses.get(duration_s, 0) + 1
            cause = HOST
            if arrival is not None and ready_s > start_s:
                start_s, cause = ready_s, arrival.cause
            end_s, blame = stream.free_s, GPU
            if start_s > end_s:
                stream.gaps_s[cause] += start_s - end_s
                sooner_s = first_s if ready_s > first_s else ready_s  # what it would have waited for but for the cause
                if start_s - (sooner_s if sooner_s > end_s else end_s) > duration_s:
                    blame = cause
                end_s = start_s
            end_s += duration_s
            if last_s > end_s:
                stream.gaps_s[HOST] += last_s - end_s
                end_s = last_s
            stream.free_s, stream.blame = end_s, blame
            ticket = entry.last_use = Ticket(end_s, blame)
        if not entry.used:
            tally.used(entry)
        tally.n_executed += n_tokens
        if self.polls:
            self.poll()
        return ticket
