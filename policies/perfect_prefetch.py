"""Perfect prefetching: only unavoidable copies, each as early as there is room. A bound, not a system.

Source: Belady 1966 for which copies (`kept` plans over the whole run what to keep from one use to the next); the oracle
prefetcher named in Pre-gated MoE (arXiv 2308.12066) for when: copies run in order of use, ahead of the pass, into room
whose expert is not to be kept. Copying in order of use into whatever is wanted later ("aggressive": Cao, Felten, Karlin
and Li, SIGMETRICS 1995) makes up to twice as many where the link is slow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from policies.common.placement import every
from sim.policy import Fetch, Gate, Iteration, Piece, Policy, Prefetch, RunGpu, Steps, View, kept


class PerfectPrefetch(Policy):
    """Reads the future: keeps what Belady would keep, and copies the rest before it is asked for."""

    name = "perfect_prefetch"
    title = "Perfect prefetching (oracle)"
    source = "Belady 1966; arXiv 2308.12066 (oracle prefetcher)"
    traits = frozenset({"oracle", "bound"})

    def bind(self, view: View) -> None:
        self._plan: dict[Piece, list[int]] = {}  # per use, 1 where it finds its expert kept since the use before
        for gpu in range(view.n_gpus):
            self._plan |= plan(gpu, view)
        self._step = [0] * view.n_gpus  # per GPU: before this step, all that is needed has its room
        self._asked: dict[Piece, int] = {}  # on the GPU or on the way: numbered in order of asking
        self._n_asked = 0
        self._idle: list[set[Piece]] = [
            set() for _ in range(view.n_gpus)
        ]  # resident, to be copied anew for its next use
        self._heaps: list[list[tuple[float, int, Piece]]] = [[] for _ in range(view.n_gpus)]  # the same, last use first
        self._needed: list[list[Piece]] = [[] for _ in range(view.future.n_steps)]
        for piece in sorted(self._plan, key=lambda p: p.index):
            for iteration in view.future.uses(piece.layer, piece.expert)[0]:
                self._needed[iteration * view.n_layers + piece.layer].append(piece)

    def initial(self, view: View) -> Iterable[Piece]:
        """What the plan keeps from the start until its first use."""
        for piece, free in self._plan.items():
            if free and free[0]:
                self._hold(piece)
                yield piece

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        for gpu in range(view.n_gpus):
            yield from self._provide(gpu, view)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        needed = [view.piece(gate.layer, expert) for expert in gate.needs]
        there = sorted((piece for piece in needed if piece in self._asked), key=self._asked.__getitem__)
        # More experts than room: the rest pass through it, the one wanted again soonest last.
        rest = [piece for piece in needed if piece not in self._asked]
        rest.sort(key=lambda p: (-view.future.next_use(p.layer, p.expert), p.index))
        for piece in there + rest:
            yield Fetch(piece)  # one that still waits for its copy goes ahead of all others
            self._hold(piece)
            yield RunGpu(piece.expert)
            self._ran(piece, view)
        for gpu in range(view.n_gpus):
            yield from self._provide(gpu, view)

    def _provide(self, gpu: int, view: View) -> Steps:
        """Copy what coming steps miss, in order, while there is room whose expert is not to be kept."""
        while self._step[gpu] < view.future.n_steps:
            step = self._step[gpu]
            for piece in self._needed[step]:
                # What the pass has reached is served by its gate.
                if piece.gpu != gpu or view.future.next_use(piece.layer, piece.expert) != step:
                    continue
                if piece in self._asked:
                    self._idle[gpu].discard(piece)
                    continue
                if view.free_bytes(gpu) < piece.n_bytes and not self._idle[gpu]:
                    return
                yield Prefetch(piece)
                self._hold(piece)
            self._step[gpu] = step + 1

    def _hold(self, piece: Piece) -> None:
        if piece not in self._asked:
            self._n_asked += 1
            self._asked[piece] = self._n_asked

    def _ran(self, piece: Piece, view: View) -> None:
        """From here to its next use it is kept, or its room is free for others."""
        uses, at = view.future.uses(piece.layer, piece.expert)
        if at == len(uses) or not self._plan[piece][at]:
            self._idle[piece.gpu].add(piece)
            step = view.future.next_use(piece.layer, piece.expert)
            heapq.heappush(self._heaps[piece.gpu], (-step, piece.index, piece))

    def evicted(self, piece: Piece, view: View) -> None:
        del self._asked[piece]
        self._idle[piece.gpu].discard(piece)
        step = view.future.next_use(piece.layer, piece.expert)
        if step < self._step[piece.gpu]:  # a layer of more experts than room took it; it has to come back
            self._step[piece.gpu] = int(step)

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        heap, idle = self._heaps[piece.gpu], self._idle[piece.gpu]
        while heap:
            found = heapq.heappop(heap)[2]
            if found in idle:
                return found
        # The plan lets experts of one layer pass each other; where they cannot, who is wanted last leaves.
        others = (p for p in self._asked if p.gpu == piece.gpu and p is not piece and view.evictable(p))
        return max(others, key=lambda p: (view.future.next_use(p.layer, p.expert), -p.index), default=None)


def plan(gpu: int, view: View) -> dict[Piece, list[int]]:
    """What to keep: per expert of a GPU, 1 for every use that is to find it kept."""
    mine = [piece for piece in every(view) if piece.gpu == gpu]
    uses = [view.future.uses(piece.layer, piece.expert)[0] for piece in mine]
    if not any(len(found) for found in uses):  # more GPUs than experts, or none of its experts is ever asked for
        return {piece: [] for piece in mine}
    ids = np.repeat(np.arange(len(mine)), [len(found) for found in uses])
    steps = np.array([i * view.n_layers + p.layer for p, found in zip(mine, uses, strict=True) for i in found])
    order = np.argsort(steps, kind="stable")
    stops = np.append(np.flatnonzero(np.diff(steps[order])) + 1, len(ids))
    flags = np.frombuffer(kept(ids[order], stops, view.capacity_of(gpu), 1), dtype=np.uint8)
    back = np.empty(len(ids), dtype=np.int64)
    back[order] = flags
    ends = np.cumsum([len(found) for found in uses])[:-1]
    return dict(zip(mine, (part.tolist() for part in np.split(back, ends)), strict=True))
