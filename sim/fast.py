"""The same loop with the same numbers, written flat, for plain caches on one simulated GPU.

A policy that only answers `accessed`, `victim` and `evicted` issues no speculative copy, so every ticket is a number
the moment it is made: copies and computations follow from max and + on three clocks (host, stream, copy engine).
This file is `run_layer`, `Engine` and `SimMachine` for that case with the calls taken out; `tests/test_fast.py` holds
it equal to them bit for bit. It is chosen by `applies`, never by name, and gives up (`Unsuitable`) where an expert
would have to wait for room; the caller then starts again with the general loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from sim.api import overrides
from sim.drive import Clockwork, Step
from sim.future import decode_row
from sim.iterations import Feed, Iteration, Scheduler
from sim.lanes import GPU, H2D, HOST
from sim.tally import HIT, MISS

if TYPE_CHECKING:
    from sim.engine import Engine
    from sim.pieces import Piece
    from sim.sim_machine import SimMachine
    from traces.reader import Trace

DECIDING = ("request_start", "iteration_start", "layer_enter", "gate_input", "assign", "gate_done", "expert_done",
            "copy_done", "layer_done", "iteration_end", "request_end", "idle")  # fmt: skip


class Unsuitable(Exception):
    """The policy refused room; the general loop knows what to do then."""


def applies(engine: Engine, machine: SimMachine) -> bool:
    """True when the run needs nothing but the default service on one simulated GPU."""
    policy, cache = engine.policy, engine.cache
    return (
        machine.n_gpus == 1
        and machine.spans is None
        and engine.log is None
        and not cache.divided
        and not engine.polls
        and not machine.cost.has_dense
        and not machine.cost.hw.contention.active
        and engine.future is None
        and not any(overrides(policy, hook) for hook in DECIDING)
    )


def drive_flat(
    engine: Engine, machine: SimMachine, scheduler: Scheduler, trace: Trace, clockwork: Clockwork, open_loop: bool
) -> Iterator[Step]:
    """`sim.drive.drive` for the case `applies` describes. Raises Unsuitable."""
    view, feed, index = engine.view, Feed(trace), 0
    # In place of entries with tickets, the time each resident's last computation ends.
    engine.cache.entries = dict.fromkeys(engine.cache.entries, 0.0)  # type: ignore[arg-type]
    view.follow(engine.cache.entries)
    while (ranges := scheduler.next(machine.host_s)) is not None:
        if isinstance(ranges, float):
            machine.wait_until(ranges)
            clockwork.skip(machine.parts_s())
            continue
        iteration = Iteration(index, ranges, trace, decode_row(feed, ranges))
        start_s = machine.host_s
        clockwork.begin(iteration, start_s, open_loop)
        view.phase = iteration.phase
        machine.begin(iteration)
        run_layers(engine, machine, iteration)
        engine.layer = -1
        machine.end()
        end_s = machine.host_s
        clockwork.end(iteration, start_s, end_s, machine.parts_s())
        engine.tally.n_iterations[iteration.phase] += 1
        yield Step(iteration, start_s, end_s)
        index += 1


def run_layers(engine: Engine, machine: SimMachine, iteration: Iteration) -> None:
    """All layers of one iteration. One long function on purpose: calls are what it saves."""
    cost, cache, policy, view, tally = machine.cost, engine.cache, engine.policy, engine.view, engine.tally
    accessed, victim = policy.accessed, policy.victim
    evicted = policy.evicted if engine.tells_evicted else None
    entries = cache.entries
    stream, lane, gpu_s, parts_s = machine.streams[0], machine.up[0], machine.gpu_s, machine.streams[0].parts_s
    attention, gate, shared = machine.prices()
    a_s, a_q = attention
    a_first, a_all, a_tail = cost.launch_attention.first_s, cost.launch_attention.all_s, cost.launch_attention.tail_frac
    a_tail *= a_s
    g_s, g_q = gate
    g_first, g_all, g_tail = cost.launch_gate.first_s, cost.launch_gate.all_s, cost.launch_gate.tail_frac * g_s
    s_first, s_all = cost.launch_shared.first_s, cost.launch_shared.all_s
    s_tail = cost.launch_shared.tail_frac * shared.duration_s if shared is not None else 0.0
    e_first, e_all, e_frac = cost.launch_expert.first_s, cost.launch_expert.all_s, cost.launch_expert.tail_frac
    sync_s, copy_launch_s, whole = cost.sync_s, cost.copy_launch_s, engine.pieces.whole
    n_bytes = whole[0][0].n_bytes
    copy_s, budget, precision = cost.copy_s(n_bytes), cache.budget_bytes[0], whole[0][0].precision
    used_bytes, peak_bytes = cache.used_bytes[0], cache.peak_bytes[0]
    host_s, free_s, link_s, busy_s, link_busy_s = machine.host_s, stream.free_s, lane.free_s, stream.busy_s, lane.busy_s
    gpu_part, h2d_part, host_part = parts_s[GPU], parts_s[H2D], parts_s[HOST]
    row = iteration.row
    front = ((a_first, a_all, a_tail, a_s, a_q), (g_first, g_all, g_tail, g_s, g_q))
    hits = misses = hit_tokens = miss_tokens = n_evicted = n_experts = 0
    tokens, (work_s, q) = 1, cost.expert(1, precision)
    for layer in range(len(whole)):
        engine.layer = view.layer = layer
        # attention, gate, shared expert: launch, then in stream order
        for first, launch, tail_s, front_s, front_q in front:
            start_s = host_s + first
            host_s += launch
            gpu_s[front_q] += front_s
            if start_s > free_s:
                host_part += start_s - free_s
            else:
                start_s = free_s
            free_s = start_s + front_s
            busy_s += front_s
            gpu_part += front_s
            last_s = host_s + tail_s
            if last_s > free_s:
                host_part += last_s - free_s
                free_s = last_s
        gate_s = free_s
        if shared is not None:
            start_s = host_s + s_first
            host_s += s_all
            gpu_s[shared.rests_on] += shared.duration_s
            if start_s > free_s:
                host_part += start_s - free_s
            else:
                start_s = free_s
            free_s = start_s + shared.duration_s
            busy_s += shared.duration_s
            gpu_part += shared.duration_s
            last_s = host_s + s_tail
            if last_s > free_s:
                host_part += last_s - free_s
                free_s = last_s
        host_s = (gate_s if gate_s > host_s else host_s) + sync_s
        # what is there, what is missing
        needs: Collection[int] = row[layer] if row is not None else iteration.chosen(layer)
        engine.unrun = needs  # type: ignore[assignment]  # asked only whether it contains one
        pieces = whole[layer]
        missing: list[Piece] = []
        order: list[Piece] = []
        for expert in needs:
            piece = pieces[expert]
            if piece in entries:
                order.append(piece)
                accessed(piece, True, view)
            else:
                missing.append(piece)
        hits += len(order)
        arrivals: list[float] = []
        for piece in missing:
            while used_bytes + n_bytes > budget:
                loser = victim(piece, False, view)
                if loser is None or entries[loser] > host_s:  # type: ignore[operator]
                    raise Unsuitable
                del entries[loser]
                used_bytes -= n_bytes
                n_evicted += 1
                if evicted is not None:
                    evicted(loser, view)
            used_bytes += n_bytes
            if used_bytes > peak_bytes:
                peak_bytes = used_bytes
            host_s += copy_launch_s
            if host_s > link_s:
                link_s = host_s
            link_s += copy_s
            link_busy_s += copy_s
            arrivals.append(link_s)
            entries[piece] = link_s  # type: ignore[assignment]
            accessed(piece, False, view)
        # residents run while copies arrive, then each copy in turn
        n_experts += len(needs)
        for piece in order:
            if row is None:
                tokens = needs[piece.expert]  # type: ignore[index]
                work_s, q = cost.expert(tokens, precision)
            hit_tokens += tokens
            start_s = host_s + e_first
            host_s += e_all
            gpu_s[q] += work_s
            if start_s > free_s:
                host_part += start_s - free_s
            else:
                start_s = free_s
            free_s = start_s + work_s
            busy_s += work_s
            gpu_part += work_s
            last_s = host_s + e_frac * work_s
            if last_s > free_s:
                host_part += last_s - free_s
                free_s = last_s
            entries[piece] = free_s  # type: ignore[assignment]
        misses += len(missing)
        for piece, arrival_s in zip(missing, arrivals, strict=True):
            if row is None:
                tokens = needs[piece.expert]  # type: ignore[index]
                work_s, q = cost.expert(tokens, precision)
            miss_tokens += tokens
            start_s = host_s + e_first
            host_s += e_all
            gpu_s[q] += work_s
            if arrival_s > start_s:
                if arrival_s > free_s:
                    h2d_part += arrival_s - free_s
                    free_s = arrival_s
            elif start_s > free_s:
                host_part += start_s - free_s
                free_s = start_s
            free_s += work_s
            busy_s += work_s
            gpu_part += work_s
            last_s = host_s + e_frac * work_s
            if last_s > free_s:
                host_part += last_s - free_s
                free_s = last_s
            entries[piece] = free_s  # type: ignore[assignment]
    engine.unrun = {}
    machine.host_s, stream.free_s, stream.busy_s = host_s, free_s, busy_s
    lane.free_s, lane.busy_s = link_s, link_busy_s
    parts_s[GPU], parts_s[H2D], parts_s[HOST] = gpu_part, h2d_part, host_part
    cache.used_bytes[0], cache.peak_bytes[0] = used_bytes, peak_bytes
    n_layers = len(whole)
    cost.launch_attention.n += n_layers
    cost.launch_gate.n += n_layers
    cost.launch_shared.n += n_layers if shared is not None else 0
    cost.launch_expert.n += n_experts
    machine.n_syncs += n_layers
    machine.n_copy_launches += misses
    lane.n_copies += misses
    lane.copied_bytes += misses * n_bytes
    tally.n_demand += misses
    tally.demand_bytes += misses * n_bytes
    tally.n_evicted += n_evicted
    tally.n_executed += hit_tokens + miss_tokens
    counts = tally.hits[iteration.phase]
    counts.experts[HIT] += hits
    counts.experts[MISS] += misses
    counts.tokens[HIT] += hit_tokens
    counts.tokens[MISS] += miss_tokens
