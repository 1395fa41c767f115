"""The same loop with the same numbers, written flat, for plain caches on one simulated GPU.

A policy that only answers `accessed`, `victim` and `evicted` issues no speculative copy, so every ticket is a number
the moment it is made: copies and computations follow from max and + on three clocks (host, stream, copy engine).
Nothing waits for room either: what an earlier layer computed is over before the host has read this layer's gate.
This file is `run_layer`, `Engine` and `SimMachine` for that case with the calls taken out; `tests/test_fast.py` holds
it equal to them bit for bit. It is chosen by `applies`, never by name, and gives up (`Unsuitable`) where an expert
would have to wait for another of its own layer; the caller then starts again with the general loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.engine.counts import HIT, MISS
from sim.engine.drive import Clockwork, Step
from sim.machine.lanes import H2D, HOST
from sim.machine.protocol import DEMAND
from sim.machine.simulated import SimMachine
from sim.policy.api import overrides
from sim.workload.future import decode_row
from sim.workload.iterations import DECODE, Iteration, PieceFeed, Scheduler

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.machine.cost import Cost
    from sim.machine.price import Launch, Price
    from sim.policy.api import Policy
    from sim.policy.pieces import Piece
    from traces.format.reader import Trace

DECIDING = ("request_start", "iteration_start", "layer_enter", "gate_input", "assign", "gate_done", "expert_done",
            "copy_done", "layer_done", "iteration_end", "request_end", "idle", "placed")  # fmt: skip

ASKED = ("exchange", "accessed", "victim", "evicted")


class Unsuitable(Exception):
    """The policy refused room; the general loop knows what to do then."""


def applies(engine: Engine, machine: SimMachine) -> bool:
    """True when the run needs nothing but the default service on one simulated GPU."""
    policy, cache = engine.policy, engine.cache
    return (
        type(machine) is SimMachine
        and machine.n_gpus == 1
        and machine.spans is None
        and engine.log is None
        and not cache.divided
        and not engine.polls
        and not machine.cost.has_dense
        and not machine.cost.hw.contention.active
        and engine.future is None
        and machine.cost.copy_s(engine.pieces.whole[0][0].n_bytes) >= machine.cost.copy_launch_s
        and not any(overrides(policy, hook) for hook in DECIDING)
    )


def exchanges(policy: Policy) -> bool:
    """True when `exchange` is the policy's own: written by the class, or below those, that answer one by one."""
    order = [set(vars(kind)) for kind in type(policy).__mro__]
    depth = {ask: next(at for at, names in enumerate(order) if ask in names) for ask in ASKED}
    return overrides(policy, "exchange") and all(depth["exchange"] <= at for at in depth.values())


def drive_flat(
    engine: Engine, machine: SimMachine, scheduler: Scheduler, trace: Trace, clockwork: Clockwork, open_loop: bool
) -> Iterator[Step]:
    """`sim.engine.drive.drive` for the case `applies` describes. Raises Unsuitable."""
    view, feed, flat, index = engine.view, PieceFeed(trace, engine.pieces.whole), Flat(engine, machine, trace.top_k), 0
    while (ranges := scheduler.next(machine.now_s)) is not None:
        if isinstance(ranges, float):
            machine.wait_until(ranges)
            clockwork.skip(machine.parts_s())
            continue
        row = decode_row(feed, ranges) if flat.holds_a_token else None
        iteration = Iteration(index, ranges, trace, None)
        start_s = machine.now_s
        clockwork.begin(iteration, start_s, open_loop)
        view.phase = iteration.phase
        machine.begin(iteration)
        if row is not None:
            flat.decode(row)
        else:
            flat.several(iteration)
        machine.end()
        end_s = machine.now_s
        clockwork.end(iteration, start_s, end_s, machine.parts_s())
        engine.tally.n_iterations[iteration.phase] += 1
        yield Step(iteration, start_s, end_s)
        index += 1
    flat.close()


class Flat:
    """All layers of one iteration at a time; holds what does not change from one to the next."""

    def __init__(self, engine: Engine, machine: SimMachine, top_k: int) -> None:
        self.engine = engine
        self.machine = machine
        cost, whole, policy = machine.cost, engine.pieces.whole, engine.policy
        self.whole = whole
        self.top_k = top_k
        self.n_bytes = whole[0][0].n_bytes
        self.copy_s = cost.copy_s(self.n_bytes)
        # An expert's price and launch by its place in its group; without groups every place is the first.
        self.places = _places(cost, whole[0][0].precision, top_k)
        self.evicted = policy.evicted if engine.tells_evicted else None
        self.exchange = policy.exchange if exchanges(policy) else self.ask
        # Residents, in the order they came; nobody asks for their tickets here.
        self.entries: dict[Piece, None] = dict.fromkeys(engine.cache.entries)
        engine.view.follow(self.entries)
        self.capacity = engine.cache.budget_bytes[0] // self.n_bytes
        self.room = self.capacity - len(self.entries)
        self.holds_a_token = self.capacity >= top_k
        self.n_evicted = 0
        self.needs: dict[int, int] = {}  # expert -> tokens of a layer that serves several; {}: one token

    def ask(self, wanted: list[Piece], room: int, _: object) -> tuple[list[Piece], list[Piece]] | None:
        """`Policy.exchange` of a policy that answers expert by expert."""
        policy, view, entries, evicted = self.engine.policy, self.engine.view, self.entries, self.evicted
        accessed = policy.accessed
        self.engine.unrun = self.needs or {piece.expert: 1 for piece in wanted}
        hits = [piece for piece in wanted if piece in entries]
        for piece in hits:
            accessed(piece, True, view)
        missing = [piece for piece in wanted if piece not in entries]
        for piece in missing:
            if room:
                room -= 1
            else:
                loser = policy.victim(piece, False, view)
                if loser is None or loser not in entries or not view.evictable(loser):
                    return None  # the general loop says what is wrong with it
                del entries[loser]
                if evicted is not None:
                    evicted(loser, view)
            entries[piece] = None
            accessed(piece, False, view)
        return hits, missing

    def several(self, iteration: Iteration) -> None:
        """An iteration of several tokens: experts differ in their work, and the machine's own verbs do the sums."""
        engine, machine, tally = self.engine, self.machine, self.engine.tally
        counts = tally.hits[iteration.phase]
        for layer, pieces in enumerate(self.whole):
            engine.layer = engine.view.layer = layer
            machine.attention(layer)
            ticket = machine.gate(layer)
            machine.shared(layer)
            machine.sync(ticket)
            needs = iteration.chosen(layer)
            wanted = [pieces[expert] for expert in needs]
            self.needs = needs
            told = self.exchange(wanted, self.room, engine.view) if len(wanted) <= self.capacity else None
            if told is None:
                raise Unsuitable
            hits, missing = told
            self.n_evicted += max(0, len(missing) - self.room)
            self.room = max(0, self.room - len(missing))
            copies = [machine.copy(piece, DEMAND, ()) for piece in missing]
            for piece in hits:
                machine.expert(piece, needs[piece.expert], ())
            for piece, copy in zip(missing, copies, strict=True):
                machine.expert(piece, needs[piece.expert], (copy,))
            for kind, found in ((HIT, hits), (MISS, missing)):
                counts.experts[kind] += len(found)
                counts.tokens[kind] += sum(needs[piece.expert] for piece in found)
            tally.n_executed += sum(needs.values())
        engine.unrun, engine.layer, self.needs = {}, -1, {}

    def decode(self, row: list[Piece]) -> None:
        """An iteration of one token. One long function on purpose: calls are what it saves."""
        engine, machine, exchange, top_k = self.engine, self.machine, self.exchange, self.top_k
        cost, view = machine.cost, engine.view
        stream, lane = machine.streams[0], machine.up[0]
        attention, gate, shared = machine.prices()
        a_s, a_first, a_all, a_tail = _timed(attention, cost.launch_attention)
        g_s, g_first, g_all, g_tail = _timed(gate, cost.launch_gate)
        places, placed = [_timed(*place) for place in self.places], [0] * top_k
        grouped = cost.grouped
        if shared is not None:
            s_s, s_first, s_all, s_tail = _timed(shared, cost.launch_shared)
        sync_s, copy_launch_s, copy_s = cost.sync_s, cost.copy_launch_s, self.copy_s
        host_s, free_s, link_s = machine.now_s, stream.free_s, lane.free_s
        host_gap_s, h2d_gap_s = stream.gaps_s[HOST], stream.gaps_s[H2D]
        n_hits, room = 0, self.room
        for layer in range(len(self.whole)):
            # attention, gate, shared expert: launch, then in stream order
            start_s = host_s + a_first
            host_s += a_all
            if start_s > free_s:
                host_gap_s += start_s - free_s
                free_s = start_s
            free_s += a_s
            last_s = host_s + a_tail
            if last_s > free_s:
                host_gap_s += last_s - free_s
                free_s = last_s
            start_s = host_s + g_first
            host_s += g_all
            if start_s > free_s:
                host_gap_s += start_s - free_s
                free_s = start_s
            free_s += g_s
            last_s = host_s + g_tail
            if last_s > free_s:
                host_gap_s += last_s - free_s
                free_s = last_s
            gate_s = free_s
            if shared is not None:
                start_s = host_s + s_first
                host_s += s_all
                if start_s > free_s:
                    host_gap_s += start_s - free_s
                    free_s = start_s
                free_s += s_s
                last_s = host_s + s_tail
                if last_s > free_s:
                    host_gap_s += last_s - free_s
                    free_s = last_s
            host_s = (gate_s if gate_s > host_s else host_s) + sync_s
            # what is there, what is missing; residents run while copies arrive, then each copy in turn
            engine.layer = view.layer = layer
            at = layer * top_k
            told = exchange(row[at : at + top_k], room, view)
            if told is None:
                raise Unsuitable
            hits, missing = told
            n_hits += len(hits)
            if missing:
                if room:
                    room = max(0, room - len(missing))
                host_s += copy_launch_s
                arrival_s = (link_s if link_s > host_s else host_s) + copy_s
                for _ in range(len(missing) - 1):
                    host_s += copy_launch_s  # and the link, busy for longer than a launch takes, is not waiting
            in_group, launched_s = 0, host_s
            for _ in hits:
                e_s, e_first, e_all, e_tail = places[in_group]
                placed[in_group] += 1
                in_group += 1
                start_s = host_s + e_first
                host_s += e_all
                if start_s > free_s:
                    host_gap_s += start_s - free_s
                    free_s = start_s
                free_s += e_s
                last_s = host_s + e_tail
                if last_s > free_s:
                    host_gap_s += last_s - free_s
                    free_s = last_s
            for _ in missing:
                if not grouped or arrival_s > launched_s or not in_group:
                    in_group, launched_s = 0, host_s
                e_s, e_first, e_all, e_tail = places[in_group]
                placed[in_group] += 1
                in_group += 1
                start_s = host_s + e_first
                host_s += e_all
                if arrival_s > start_s:
                    if arrival_s > free_s:
                        h2d_gap_s += arrival_s - free_s
                        free_s = arrival_s
                elif start_s > free_s:
                    host_gap_s += start_s - free_s
                    free_s = start_s
                free_s += e_s
                last_s = host_s + e_tail
                if last_s > free_s:
                    host_gap_s += last_s - free_s
                    free_s = last_s
                link_s = arrival_s
                arrival_s += copy_s
        engine.unrun, engine.layer = {}, -1
        machine.now_s, stream.free_s, lane.free_s = host_s, free_s, link_s
        stream.gaps_s[HOST], stream.gaps_s[H2D] = host_gap_s, h2d_gap_s
        n_misses = len(row) - n_hits
        self.n_evicted += n_misses - (self.room - room)
        self.room = room
        self.count(n_hits, n_misses, placed)

    def count(self, n_hits: int, n_misses: int, placed: list[int]) -> None:
        """Book what `decode` has done, as the machine's verbs and the engine would have."""
        machine, tally, cost, n_layers = self.machine, self.engine.tally, self.machine.cost, len(self.whole)
        attention, gate, shared = machine.prices()
        launched = [(attention, cost.launch_attention, n_layers), (gate, cost.launch_gate, n_layers)]
        if shared is not None:
            launched.append((shared, cost.launch_shared, n_layers))
        launched += [(*place, n) for place, n in zip(self.places, placed, strict=True) if n]
        uses, used, lane = machine.streams[0].uses, machine.used, machine.up[0]
        for price, launch, n in launched:
            launch.n += n
            used[price] = used.get(price, 0) + n
            uses[price.duration_s] = uses.get(price.duration_s, 0) + n
        machine.n_syncs += n_layers
        machine.n_copy_launches += n_misses
        machine.experts_launched += n_misses
        if n_misses:
            lane.uses[self.copy_s] = lane.uses.get(self.copy_s, 0) + n_misses
        lane.n_copies += n_misses
        lane.copied_bytes += n_misses * self.n_bytes
        counts = tally.hits[DECODE]
        for kind, n in ((HIT, n_hits), (MISS, n_misses)):
            counts.experts[kind] += n
            counts.tokens[kind] += n
        tally.n_executed += n_hits + n_misses

    def close(self) -> None:
        """What only the end of the run tells."""
        cache, tally = self.engine.cache, self.engine.tally
        cache.used_bytes[0] = (self.capacity - self.room) * self.n_bytes
        cache.peak_bytes[0] = max(cache.peak_bytes[0], cache.used_bytes[0])  # residents never grow fewer
        tally.n_evicted += self.n_evicted
        tally.n_demand = self.machine.up[0].n_copies
        tally.demand_bytes = self.machine.up[0].copied_bytes


def _places(cost: Cost, precision: str, top_k: int) -> list[tuple[Price, Launch]]:
    """What an expert of one token takes and what launching it does, by its place in a group of at most `top_k`."""
    if not cost.grouped:
        return [(cost.expert(1, precision), cost.launch_expert)] * top_k
    price, slack_s = cost.leader(1, precision)
    places = [(price, cost.launch_expert)]
    while len(places) < top_k:
        price, slack_s = cost.member(slack_s, 1, precision)
        places.append((price, cost.launch_member))
    return places


def _timed(price: Price, launch: Launch) -> tuple[float, float, float, float]:
    """(seconds on the stream; after a launch begins, its first kernel, its last kernel, how long that one takes)."""
    return price.duration_s, launch.first_s, launch.all_s, launch.tail_frac * price.duration_s
