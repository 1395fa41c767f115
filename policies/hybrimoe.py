"""HybriMoE (DAC'25, arXiv 2504.05897): CPU and GPU share each layer by a simulated schedule; the cache follows scores.

Source: Zhong et al., "HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference"; code
PKU-SEC-Lab/HybriMoE@508a85b, ktransformers/operators/experts.py (`HSS`, `KScoreAwareCache`, `KExpertsCache`).
`variant=paper`: this machine's latencies (profiled at warm-up there), guesses for three layers ahead, experts
prefetched by simulated gain while the link is idle, random experts to begin with. `variant=code`: the code's constants,
no guesses (`prefetch_size` takes experts of the next layer by their score instead; off as published), the first experts
of each layer.

Departures: an expert that its layer still needs is never evicted (the code has no such protection); with a full layer,
a prefetch's gain is that of having the expert in place of the one it evicts. The code's loading of a later layer into
the prefill buffer is left out: it aims at the wrong layer and so gains nothing. An expert's matrices are copied one by
one, and computed as they come (the code's events per matrix); results count each as a copy of its own.

Several GPUs (not published): each keeps its share of every layer's cache, and the schedule takes them for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random as Draws

import numpy as np

from policies._hybrimoe import MrsScores, Rates, Simulation, share_out
from policies._placement import fits_whole
from sim.policy import (
    PREFILL,
    BadInput,
    DoesNotFit,
    Evict,
    Fetch,
    Gate,
    Param,
    Piece,
    Policy,
    Prefetch,
    RunCpu,
    RunGpu,
    Steps,
    View,
)

PUBLISHED_LOOKAHEAD = 3


class HybriMoe(Policy):
    """Shares every layer out greedily, keeps what the gate scored high lately, prefetches what saves most time."""

    name = "hybrimoe"
    title = "HybriMoE: hybrid schedule, MRS cache, prefetch by gain"
    source = "arXiv 2504.05897 (DAC'25); PKU-SEC-Lab/HybriMoE@508a85b ktransformers/operators/experts.py"
    traits = frozenset({"cpu", "timing"})
    needs = frozenset({"experts", "scores", *(f"next_scores_{d}" for d in range(1, PUBLISHED_LOOKAHEAD + 1))})
    params = (
        Param("variant", "paper", "the paper's schedule by measured latencies and prefetch by gain, or the public "
              "code's constants and its prefetch by score", ("paper", "code")),
        Param("cache_size", None, "experts per layer on the GPU (code: 16 unless told); without it as many as fit "
              "equally in every layer", low=1, high=4096),
        Param("alpha", 0.5, "weight of the newest scores in MRS (section IV-D)", low=0.0, high=1.0),
        Param("top_p", None, "highest scores that count in MRS; published: twice the experts per token (the code's "
              "class has 12 as its default)", low=1, high=4096),
        Param("evict", "mrs", "least score, or the paper's baseline in Figure 9", ("mrs", "lru")),
        Param("lookahead", PUBLISHED_LOOKAHEAD, "variant paper: layers ahead to guess and prefetch for; 0 prefetches "
              "nothing", low=0, high=PUBLISHED_LOOKAHEAD),
        Param("prefetch_size", 0, "variant code: experts of the next layer to have on the GPU, by score (code: 0)",
              low=0, high=4096),
        Param("matrices", 3, "copies an expert comes in, so that what is urgent, a CPU result above all, waits for one "
              "of them at most (code: gate, up and down)", low=1, high=16),
        Param("initial_seed", 0, "variant paper: seed of the experts drawn to begin with", low=0, high=2**63 - 1),
        Param("gpu_time", 0.5, "variant code: an expert on the GPU (`model_gpu_time`)", low=0.0, high=1e6),
        Param("cpu_time_per_token", 1.0, "variant code: an expert on the CPU, per token (`model_cpu_time`; the code's "
              "comments: Mixtral 0.2, Qwen2 0.8, DeepSeek 1)", low=0.0, high=1e6),
        Param("cpu_first_time", 0.79, "variant code: what a layer's first CPU expert takes longer", low=0.0, high=1e6),
        Param("move_time", 0.418, "variant code: copying an expert (`model_move_time`)", low=0.0, high=1e6),
    )  # fmt: skip
    variant: str
    cache_size: int | None
    alpha: float
    top_p: int | None
    evict: str
    lookahead: int
    prefetch_size: int
    matrices: int
    initial_seed: int
    gpu_time: float
    cpu_time_per_token: float
    cpu_first_time: float
    move_time: float

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        ahead = 0 if self.variant == "code" else self.lookahead
        self.needs = frozenset({"experts", "scores", *(f"next_scores_{d}" for d in range(1, ahead + 1))})

    # -- the cache --------------------------------------------------------------------------------------------------

    def _buffer(self, view: View) -> int:
        """Experts per GPU of the buffer that prompts go through: a layer of them."""
        return 0 if fits_whole(view) else -(-view.n_experts // view.n_gpus)

    def min_experts(self, view: View) -> int:
        all_of_them = -(-view.n_layers * view.n_experts // view.n_gpus)
        return min(all_of_them, view.n_layers + -(-view.n_experts // view.n_gpus))

    def bind(self, view: View) -> None:
        top_p = 2 * view.top_k if self.top_p is None else self.top_p
        self._mrs = MrsScores(view.n_layers, view.n_experts, self.alpha, top_p, lru=self.evict == "lru")
        self._held: dict[tuple[int, int], dict[Piece, None]] = {}  # (layer, GPU) -> experts its cache holds
        self._parts: dict[Piece, tuple[Piece, ...]] = {}
        self._sizes = [self._size(gpu, view) for gpu in range(view.n_gpus)]
        self._wanted: list[Piece] = []  # to be prefetched, best first
        self._asked: list[Piece] = []  # copies that may still be under way
        self._prices = self._rates(view).remembered()
        self._simulated = Simulation(self._prices)

    def _size(self, gpu: int, view: View) -> int:
        """Experts of each layer on this GPU. Raises DoesNotFit when the one asked for is too large."""
        most = (view.capacity_of(gpu) - self._buffer(view)) // view.n_layers
        if self.cache_size is None:
            return most
        if self.cache_size < view.n_gpus:
            raise BadInput(
                f"parameter {self.name}.cache_size, got {self.cache_size}: each of {view.n_gpus} GPUs has a cache of "
                f"every layer, of one expert at least; give {view.n_gpus} or more, or leave it out"
            )
        each, more = divmod(min(self.cache_size, view.n_experts), view.n_gpus)
        size = each + (gpu < more)
        if size > most:
            raise DoesNotFit(
                f"parameter {self.name}.cache_size, got {self.cache_size}: GPU {gpu} has room for {most} experts of "
                "every layer beside the prefill buffer; lower it, or leave it out"
            )
        return size

    def _rates(self, view: View) -> Rates:
        if self.variant == "code":
            return Rates(
                lambda _: self.gpu_time, lambda n: self.cpu_time_per_token * n, self.cpu_first_time, self.move_time
            )
        prices = view.prices
        return Rates(prices.gpu_s, prices.cpu_s, 0.0, prices.copy_s())

    def initial(self, view: View) -> Iterable[Piece]:
        draw = Draws(self.initial_seed).random  # noqa: S311 - a simulation, not a secret
        for layer in range(view.n_layers):
            experts = list(range(view.n_experts))
            if self.variant == "paper":
                experts = [expert for _, expert in sorted((draw(), expert) for expert in experts)]
            for gpu in range(view.n_gpus):
                mine = [piece for piece in (view.piece(layer, expert) for expert in experts) if piece.gpu == gpu]
                self._held[layer, gpu] = dict.fromkeys(mine[: self._sizes[gpu]])
                for piece in self._held[layer, gpu]:
                    yield from self._copies(piece, view)

    def _copies(self, piece: Piece, view: View) -> tuple[Piece, ...]:
        """The expert's matrices, as pieces."""
        if piece not in self._parts:
            self._parts[piece] = tuple(view.matrices(piece.layer, piece.expert, self.matrices))
        return self._parts[piece]

    def _there(self, layer: int, expert: int, view: View) -> bool:
        """True when the cache has, or is getting, the expert."""
        piece = view.piece(layer, expert)
        return piece in self._held[layer, piece.gpu]

    def _fetch(self, piece: Piece, view: View) -> Steps:
        for part in self._copies(piece, view):
            yield Fetch(part)

    def _prefetch(self, piece: Piece, view: View) -> Steps:
        for part in self._copies(piece, view):
            yield Prefetch(part)

    def _evict(self, piece: Piece, view: View) -> Steps:
        for part in self._copies(piece, view):
            yield Evict(part)

    def _loser(self, piece: Piece, view: View) -> Piece | None:
        """Who leaves for `piece`: the least score of its layer, ties to the lowest id; None when nobody can."""
        held = [p for p in self._held[piece.layer, piece.gpu] if view.evictable(p)]
        if len(held) <= 1:
            return held[0] if held else None
        scores = self._mrs.of(piece.layer)
        return min(held, key=lambda p: (scores[p.expert], p.expert))

    def _full(self, piece: Piece) -> bool:
        return len(self._held[piece.layer, piece.gpu]) >= self._sizes[piece.gpu]

    def _admit(self, piece: Piece, view: View) -> Steps:
        """Make room in its layer, and book it."""
        if self._full(piece):
            loser = self._loser(piece, view)
            assert loser is not None
            del self._held[piece.layer, piece.gpu][loser]
            yield from self._evict(loser, view)
        self._held[piece.layer, piece.gpu][piece] = None
        self._asked.append(piece)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        scores = gate.scores
        # The code takes in the first token's scores alone; the paper has one token at a time.
        row = scores[0] if self.variant == "code" or len(scores) == 1 else scores.sum(axis=0) / len(scores)
        self._mrs.update(gate.layer, row, list(gate.needs))
        if gate.phase == PREFILL:
            yield from self._through_gpu(gate, view)
        else:
            yield from self._share(gate, view)
            yield from self._look_ahead(gate, view)

    def _through_gpu(self, gate: Gate, view: View) -> Steps:
        """A prompt: every expert on the GPU, what is missing through the buffer, without entering the cache."""
        missing = [view.piece(gate.layer, e) for e in gate.needs if not self._there(gate.layer, e, view)]
        for piece in missing:
            yield from self._fetch(piece, view)
        for expert in gate.needs:
            if view.piece(gate.layer, expert) not in missing:
                yield RunGpu(expert)
        for piece in missing:
            yield RunGpu(piece.expert)
            yield from self._evict(piece, view)

    def _share(self, gate: Gate, view: View) -> Steps:
        """A generated token: CPU and GPU as `share_out` says; what the CPU computes does not enter the cache."""
        layer = gate.layer
        there = [expert for expert in gate.needs if self._there(layer, expert, view)]
        missing = [expert for expert in gate.needs if expert not in there]
        shares = share_out(there, missing, gate.needs, self._prices)
        for expert in shares.cpu:
            yield RunCpu(expert)
        moved = [view.piece(layer, expert) for expert in shares.gpu if expert in missing]
        for piece in list(moved):
            if self._full(piece) and self._loser(piece, view) is None:
                break  # all of its layer is still to run: it waits for one of them
            yield from self._admit(piece, view)
            yield from self._fetch(piece, view)
            moved.remove(piece)
        for expert in shares.gpu:
            piece = view.piece(layer, expert)
            if piece in moved:
                yield from self._admit(piece, view)
            yield from self._fetch(piece, view)  # what a prefetch has still to bring goes ahead of all others
            yield RunGpu(expert)

    # -- prefetching ------------------------------------------------------------------------------------------------

    def _look_ahead(self, gate: Gate, view: View) -> Steps:
        if self.variant == "paper":
            gains = [gain for d in range(1, self.lookahead + 1) for gain in self._gains(gate, d, view)]
            self._wanted = [piece for _, _, _, piece in sorted(gains, key=lambda gain: gain[:3])]
            yield from self._pump(view)
        elif self.prefetch_size and gate.layer + 1 < view.n_layers:
            scores = self._mrs.of(gate.layer + 1)
            for expert in sorted(range(view.n_experts), key=lambda e: (-scores[e], e))[: self.prefetch_size]:
                piece = view.piece(gate.layer + 1, expert)
                if not self._there(piece.layer, expert, view):
                    yield from self._admit(piece, view)
                    yield from self._prefetch(piece, view)

    def _gains(self, gate: Gate, distance: int, view: View) -> list[tuple[float, int, int, Piece]]:
        """(minus what the schedule of a later layer would save, distance, expert, piece) of what is missing there."""
        layer = gate.layer + distance
        if layer >= view.n_layers:
            return []
        tokens: dict[int, int] = {}
        for row in np.argsort(-gate.next_scores(distance), axis=1, kind="stable")[:, : view.top_k].tolist():
            for expert in row:
                tokens[expert] = tokens.get(expert, 0) + 1
        there = {expert: n for expert, n in tokens.items() if self._there(layer, expert, view)}
        missing = {expert: n for expert, n in tokens.items() if expert not in there}
        gains = []
        for expert, n in missing.items():
            piece = view.piece(layer, expert)
            loser = self._loser(piece, view) if self._full(piece) else None
            lost = {} if loser is None or loser.expert not in there else {loser.expert: there[loser.expert]}
            stay = [m for e, m in there.items() if e not in lost]
            others = [m for e, m in missing.items() if e != expert]
            as_is = self._simulated.makespan(there.values(), missing.values())
            saved = as_is - self._simulated.makespan([*stay, n], [*others, *lost.values()])
            if saved > 0.0:
                gains.append((-saved, distance, expert, piece))
        return gains

    def _pump(self, view: View) -> Steps:
        """While the link is idle, the next best prefetch."""
        self._asked = [piece for piece in self._asked if self._under_way(piece, view)]
        while self._wanted and not self._asked:
            piece = self._wanted.pop(0)
            if piece.layer > view.layer and not self._there(piece.layer, piece.expert, view):
                yield from self._admit(piece, view)
                yield from self._prefetch(piece, view)

    def _under_way(self, piece: Piece, view: View) -> bool:
        return any(view.holds(part) and not view.arrived(part) for part in self._copies(piece, view))

    def copy_done(self, piece: Piece, view: View) -> Steps:
        yield from self._pump(view)
