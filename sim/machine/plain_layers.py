"""Layers of a plain cache in a row, as one loop: `to_gate`, `demand_turn` and `run_turn` without calls between.

A sweep over machines takes these sums for every point (`sim/engine/replay.py`). With one call of each per layer a sweep
of 64 links takes a fifth more instructions, and a tenth more time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.lanes import GPU, H2D, HOST
from sim.machine.simulated import SimulatedMachine
from sim.machine.turn import Turn
from sim.machine.waiting import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

_GPU, _H2D, _HOST, _KINDS = GPU, H2D, HOST, len(KINDS)  # machine integers where this is compiled


def plain_layers(
    machine: SimulatedMachine, first: int, n: int, here: Sequence[int], coming: Sequence[int], turn: Turn
) -> bool:
    """Run `n` layers in a row from `first` on, by how many experts are here and come.

    All of one token each, and who is here has arrived before the gate was read. False, and nothing done, where there is
    more to look at.
    """
    host, stream, links, blocks, experts = machine.host, machine.stream, machine.links, machine.blocks, machine.experts
    queue, group = links.first, experts.group
    if stream.n_pending > 0 or len(stream.joined) > 0 or len(machine.streams) > 1 or links.n > 1:
        return False
    if blocks.together is not None or blocks.dense is not None or host.spans is not None or not experts.grouped:
        return False
    if queue.n_queued or queue.report or turn.n_bytes != queue.last_bytes:
        return False
    if queue.memory is not None or stream.written_s > host.now_s or (queue.n_slows and blocks.of_shared is not None):
        return False
    if stream.owed_s > 0.0:
        stream.pay()
    copied_s = stream.copied_s
    now_s, free_s, link_s, launched_s = host.now_s, stream.free_s, queue.free_s, group.launched_s
    waited_s, starved_s = stream.gaps_s[_H2D], stream.gaps_s[_HOST]
    members, row, launch_s, sync_s = experts.members, blocks.in_a_row, machine.transfers.launch_s, host.sync_s
    runs = stream.runs
    place = -1
    joins = False
    n_copies = 0
    for layer in range(n):
        at = stream.row
        stream.waited_s[at + _HOST] += starved_s - stream.charged_host_s
        stream.waited_s[at + _H2D] += waited_s - stream.charged_h2d_s
        stream.charged_host_s = starved_s
        stream.charged_h2d_s = waited_s
        stream.row = stream.first_row + (first + layer) * _KINDS
        gate_s = 0.0
        since_s = gate_since_s = -1.0
        if row.n_met == 0:
            blocks.meet()
        for block in range(row.n):
            row.n_used[block] += 1
            costs = 8 * block
            start_s = now_s + row.costs_s[costs + 1]  # first_s
            now_s += row.costs_s[costs]  # all_s
            if start_s > free_s:
                starved_s += start_s - free_s
                since_s = free_s = start_s
            start_s = free_s
            free_s += row.costs_s[costs + 2]  # duration_s
            slowed_s, more_s = row.costs_s[costs + 4], row.costs_s[costs + 5]
            if start_s < copied_s:
                free_s += slowed_s
                stream.slowed_s += slowed_s
            elif stream.remembers and (slowed_s > 0.0 or more_s > 0.0):
                stream.note(start_s, free_s, slowed_s, more_s)
            last_s = now_s + row.costs_s[costs + 3]  # tail_s
            if last_s > free_s:
                starved_s += last_s - free_s
                since_s = last_s - row.costs_s[costs + 3]
                free_s = last_s
            if block == 1:
                gate_s = free_s
                gate_since_s = since_s
        if gate_since_s >= 0.0:
            runs.begin(gate_since_s, _HOST)
        if since_s > gate_since_s:
            runs.begin(since_s, _HOST)
        if gate_s > now_s:
            now_s = gate_s
            host.runs.begin(now_s, _GPU)
        now_s += sync_s
        n_here, n_coming = here[layer], coming[layer]
        for at in range(n_coming):
            now_s += launch_s
            start_s = link_s
            if now_s > link_s:
                start_s = now_s
                queue.runs.begin(start_s, _HOST)
            link_s = start_s + queue.last_s
            turn.arrived_s[at] = link_s
        if n_coming and queue.n_slows:
            copied_s = link_s
        n_copies += n_coming
        joins = False
        for at in range(n_here + n_coming):
            arrived_s = 0.0 if at < n_here else turn.arrived_s[at - n_here]
            if joins and arrived_s <= launched_s:
                place += 1
            else:
                place = 0
                launched_s = now_s
                joins = True
            if place == members.n_met:
                experts.meet(place)
            members.n_used[place] += 1
            costs = 8 * place
            start_s = now_s + members.costs_s[costs + 1]  # first_s
            now_s += members.costs_s[costs]  # all_s
            if arrived_s > start_s:
                start_s = arrived_s
                if start_s > free_s:
                    waited_s += start_s - free_s
                    runs.begin(start_s, _H2D)
                else:
                    start_s = free_s
            elif start_s > free_s:
                starved_s += start_s - free_s
                runs.begin(start_s, _HOST)
            else:
                start_s = free_s
            free_s = start_s + members.costs_s[costs + 2]  # duration_s
            slowed_s, more_s = members.costs_s[costs + 4], members.costs_s[costs + 5]
            if start_s < copied_s:
                free_s += slowed_s
                stream.slowed_s += slowed_s
            elif stream.remembers and (slowed_s > 0.0 or more_s > 0.0):
                stream.note(start_s, free_s, slowed_s, more_s)
            last_s = now_s + members.costs_s[costs + 3]  # tail_s
            if last_s > free_s:
                starved_s += last_s - free_s
                runs.begin(last_s - members.costs_s[costs + 3], _HOST)
                free_s = last_s
    group.open = joins
    group.launched_s = launched_s
    if place >= 0:
        group.last = members.operations[place]
    group.waits = None
    group.precision = experts.precision
    host.now_s = now_s
    host.n_syncs += n
    stream.free_s = free_s
    stream.copied_s = copied_s
    stream.gaps_s[_H2D] = waited_s
    stream.gaps_s[_HOST] = starved_s
    host.experts_copied += n_copies
    host.n_copies += n_copies * machine.transfers.calls
    queue.served(n_copies, link_s)
    return True
