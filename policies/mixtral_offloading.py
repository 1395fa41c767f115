"""Mixtral-Offloading (arXiv 2312.17238): an LRU cache per layer, swaps, and experts guessed one layer ahead.

Source: Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading", sections 3.1 (LRU)
and 3.2 (speculative loading); code dvmazur/mixtral-offloading@ce54518, src/expert_cache.py (`load_experts`, `_swap`),
cited at each step. An expert is either on the GPU or in pinned host memory, so every copy up sends one down.
`variant=code` does both on the stream that computes and guesses nothing; `variant=paper` copies beside computation
and guesses with the next layer's gate on this layer's gate input.

Several GPUs (not published): each keeps its own groups, buffers and stream of swaps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from policies.common.placement import each_layer, most_layers
from sim.policy import (
    PREFILL,
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    Prefetch,
    RunGpu,
    Steps,
    Ticket,
    View,
    WriteBack,
    param,
)

PUBLISHED_OFFLOAD = 4  # of Mixtral's 8: the notebook's `offload_per_layer`; it advises 5 for smaller GPUs


class Group:
    """The experts of one layer on one GPU: `main` are resident, least recently used first."""

    def __init__(self, gpu: int, main: Iterable[Piece]) -> None:
        self.gpu = gpu
        self.main = dict.fromkeys(main)
        self.guessed: list[Piece] = []  # loaded ahead into shared buffers; nothing has left for them yet

    def touch(self, piece: Piece) -> None:
        """Make it the most recently used."""
        self.main.pop(piece, None)
        self.main[piece] = None


class MixtralOffloading(Policy):
    """Swaps a missing expert with the least recently used one of its layer."""

    name = "mixtral_offloading"
    title = "Mixtral-Offloading: LRU per layer, gate reuse"
    source = "arXiv 2312.17238 section 3; dvmazur/mixtral-offloading@ce54518 src/expert_cache.py"
    traits = frozenset({"evicts_eagerly"})  # its room is a fixed number of experts, whatever the budget
    needs = frozenset({"experts", "next_scores_1"})
    variant: str = param(
        "paper",
        "the paper's asynchronous copies and guesses, or the public code, which has neither (and needs no "
        "next_scores_1)",
        ("paper", "code"),
    )
    offload_per_layer: int = param(
        PUBLISHED_OFFLOAD,
        "experts of a layer kept in host memory, as published for Mixtral's 8; more where the budget is smaller",
        within=(0, 4096),
    )
    buffer_size: int = param(
        4, "spare expert buffers on the GPU, shared by all layers (code, `buffer_size`)", within=(2, 64)
    )
    guesses: int = param(
        2, "experts loaded ahead for the next layer, 1 or 2 as published (section 3.2)", within=(0, 64)
    )
    write_back: bool = param(True, "send the expert that leaves back to the host, as the code's swap does")

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.variant == "code" or not self.guesses:
            self.needs = frozenset({"experts"})

    def min_experts(self, view: View) -> int:
        return most_layers(view) + self.buffer_size

    def bind(self, view: View) -> None:
        self._groups: dict[tuple[int, int], Group] = {}
        self._last: dict[int, Ticket] = {}  # GPU -> the last thing on its stream (variant code)
        for gpu in range(view.n_gpus):
            room = view.capacity_of(gpu)
            # Where so few live that a layer would have no place beside the buffer, all of them have their room.
            fits = each_layer(max(0, room - self.buffer_size), gpu, view) or each_layer(room, gpu, view)
            for layer in range(view.n_layers):
                pieces = (view.piece(layer, expert) for expert in range(view.n_experts))
                mine = [piece for piece in pieces if piece.gpu == gpu]
                n_main = min(max(1, len(mine) - self.offload_per_layer), fits, len(mine))
                # The first ones start offloaded; the rest are resident, ascending ids as order of use (`build_model`).
                self._groups[gpu, layer] = Group(gpu, mine[len(mine) - n_main :])

    def initial(self, view: View) -> Iterable[Piece]:
        return (piece for group in self._groups.values() for piece in group.main)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        for gpu in range(view.n_gpus):
            group = self._groups[gpu, gate.layer]
            needed = [p for p in (view.piece(gate.layer, expert) for expert in sorted(gate.needs)) if p.gpu == gpu]
            yield from self._serve(group, needed, gate, view)

    def _serve(self, group: Group, needed: list[Piece], gate: Gate, view: View) -> Steps:
        """`load_experts`: residents first, at most `buffer_size` - 1 swaps ahead of the computation."""
        here = [piece for piece in needed if piece in group.main]
        guessed = [piece for piece in group.guessed if piece in needed]
        for piece in group.guessed:
            if piece not in guessed:
                yield Evict(piece)  # a wrong guess is discarded (section 3.2)
        group.guessed = []
        to_load = guessed + [piece for piece in needed if piece not in here and piece not in guessed]
        for piece in here:
            group.touch(piece)
        window = min(self.buffer_size - 1, len(group.main), len(to_load))
        pending = dict.fromkeys(here + to_load)
        kept: list[Piece] = []  # swapped out already, but this very layer still has to run them
        for piece in to_load[:window]:
            yield from self._swap(group, piece, pending, kept)
        if window == len(to_load):
            yield from self._guess(gate, kept, group, view)
        for at, piece in enumerate(here + to_load):
            self._note(piece, (yield RunGpu(piece.expert, self._stream(piece))))
            del pending[piece]
            if piece in kept:
                kept.remove(piece)
                yield Evict(piece)
            ahead = at - len(here) + window
            if at >= len(here) and ahead < len(to_load):
                yield from self._swap(group, to_load[ahead], pending, kept)
                if ahead == len(to_load) - 1:
                    yield from self._guess(gate, kept, group, view)

    def _swap(self, group: Group, piece: Piece, pending: dict[Piece, None], kept: list[Piece]) -> Steps:
        """`_swap`: the new expert into a free buffer, then the least recently used one to the host."""
        victim = next(iter(group.main))
        self._note(piece, (yield Fetch(piece, self._stream(piece))))
        if self.write_back:
            self._note(victim, (yield WriteBack(victim, self._stream(victim))))
        del group.main[victim]
        group.touch(piece)
        if victim in pending:
            kept.append(victim)
        else:
            yield Evict(victim)

    def _stream(self, piece: Piece) -> tuple[Ticket, ...]:
        """What precedes on the stream, where one stream does everything (the code uses the default stream alone)."""
        last = self._last.get(piece.gpu)
        return () if self.variant == "paper" or last is None else (last,)

    def _note(self, piece: Piece, ticket: Ticket | None) -> None:
        if ticket is not None and self.variant == "code":
            self._last[piece.gpu] = ticket

    def _guess(self, gate: Gate, kept: list[Piece], group: Group, view: View) -> Steps:
        """Section 3.2: once this layer's experts are loaded, the likeliest of the next layer's go into free buffers.

        Of a prompt all experts are loaded anyhow, and the paper tells of generating tokens: only those are guessed for.
        """
        layer = gate.layer + 1
        if self.variant == "code" or not self.guesses or layer == view.n_layers or gate.phase == PREFILL:
            return
        following = self._groups[group.gpu, layer]
        scores = gate.next_scores(1).sum(axis=0)  # of a batch, the mass its tokens give together
        for expert in np.argsort(-scores, kind="stable")[: self.guesses].tolist():
            piece = view.piece(layer, expert)
            free = self.buffer_size - len(kept) - len(following.guessed)
            if piece.gpu == group.gpu and piece not in following.main and free > 0:
                yield Prefetch(piece)
                following.guessed.append(piece)
