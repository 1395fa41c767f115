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

from collections.abc import Collection, Iterable, Iterator
from random import Random as Draws
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import fits_whole
from policies.hybrimoe.cache import LayerCaches, MrsScores
from policies.hybrimoe.schedule import Rates, Simulation
from sim.policy import (
    PREFILL,
    BadInput,
    Decision,
    DoesNotFit,
    Evict,
    Fetch,
    Gate,
    Iteration,
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
Gain = tuple[float, int, int, int]  # minus the seconds saved, layers ahead, expert, and the expert by its index
Named = list[int] | dict[int, int]  # experts guessed for a layer: of one token, or with the tokens of each


class Copies(NamedTuple):
    """An expert's matrices, as pieces, and what is said of all of them at once."""

    parts: tuple[Piece, ...]
    fetch: tuple[Fetch, ...]
    prefetch: tuple[Prefetch, ...]
    evict: tuple[Evict, ...]


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
        self._n_experts, n = view.n_experts, view.n_layers * view.n_experts
        top_p = 2 * view.top_k if self.top_p is None else self.top_p
        mrs = MrsScores(view.n_layers, view.n_experts, self.alpha, top_p, lru=self.evict == "lru")
        self._sizes = [self._size(gpu, view) for gpu in range(view.n_gpus)]
        self._caches = LayerCaches(mrs, view)
        self._copies: list[Copies | None] = [None] * n
        self._run_gpu = [RunGpu(expert) for expert in range(view.n_experts)]
        self._run_cpu = [RunCpu(expert) for expert in range(view.n_experts)]
        self._guessed: tuple[int, list[Named]] | None = None  # the layer that guessed last, unless looked at already
        self._wanted: list[int] = []  # to be prefetched, best last
        self._asked: dict[int, Copies] = {}  # in a cache, and perhaps still under way
        self._simulated = Simulation(self._rates(view).remembered())
        self._one_gpu = view.n_gpus == 1
        self._top_k = view.top_k
        self._guesses = tuple(f"next_scores_{d}" for d in range(1, self.lookahead + 1))

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
                for piece in mine[: self._sizes[gpu]]:
                    self._caches.add(piece.index)
                    yield from self._of(piece.index, view).parts

    def _of(self, at: int, view: View) -> Copies:
        """What an expert is copied in."""
        found = self._copies[at]
        if found is None:
            parts = tuple(view.matrices(*divmod(at, self._n_experts), self.matrices))
            found = self._copies[at] = Copies(
                parts, tuple(map(Fetch, parts)), tuple(map(Prefetch, parts)), tuple(map(Evict, parts))
            )
        return found

    def _admit(self, at: int, view: View, owed: Collection[int] = ()) -> tuple[Evict, ...]:
        """Book an expert in its layer's cache; says who leaves for it."""
        caches = self._caches
        loser = caches.loser(at, owed) if owed else caches.losers(at // self._n_experts)[caches.gpu[at]]
        assert loser >= 0
        caches.remove(loser)
        self._asked.pop(loser, None)
        caches.add(at)
        self._asked[at] = self._of(at, view)
        return self._of(loser, view).evict

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        self._caches.mrs.observe(gate.layer, gate.by_layer(self._weighed), list(gate.needs))
        if gate.phase == PREFILL:
            yield from self._through_gpu(gate, view)
        else:
            yield from self._share(gate, view)
            yield from self._look_ahead(gate, view)

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        self._caches.end()

    def _weighed(self, scores: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """What each layer adds to its recent scores, of gate scores [n, L, E].

        The code takes in the first token's scores alone; the paper has one token at a time.
        """
        first = self.variant == "code" or len(scores) == 1
        return list(self._caches.mrs.weighed(scores[0] if first else scores.sum(axis=0) / len(scores)))

    def _through_gpu(self, gate: Gate, view: View) -> Iterator[Decision]:
        """A prompt: every expert on the GPU, what is missing through the buffer, without entering the cache."""
        decision: Decision
        base, held = gate.layer * self._n_experts, self._caches.held
        missing = {expert: self._of(base + expert, view) for expert in gate.needs if not held[base + expert]}
        for copies in missing.values():
            for decision in copies.fetch:
                yield decision
        for expert in gate.needs:
            if expert not in missing:
                yield self._run_gpu[expert]
        for expert, copies in missing.items():
            yield self._run_gpu[expert]
            for decision in copies.evict:
                yield decision

    def _share(self, gate: Gate, view: View) -> Iterator[Decision]:
        """A generated token: CPU and GPU as `share_out` says; what the CPU computes does not enter the cache."""
        decision: Decision
        needs, base, caches = gate.needs, gate.layer * self._n_experts, self._caches
        held, asked = caches.held, self._asked
        there: list[int] = []
        missing: list[int] = []
        for expert in needs:
            (there if held[base + expert] else missing).append(expert)
        on_gpu, on_cpu = self._simulated.layout(
            tuple([needs[expert] for expert in there]), tuple([needs[expert] for expert in missing])
        )
        order = there + missing
        for place in on_cpu:
            yield self._run_cpu[order[place]]
        owed = [order[place] for place in on_gpu]
        moved = [order[place] for place in on_gpu if place >= len(there)]
        while moved:
            at = base + moved[0]
            if caches.loser(at, owed) < 0:
                break  # all of its layer is still to run: it waits for one of them
            for decision in self._admit(at, view, owed):
                yield decision
            for decision in asked[at].fetch:
                yield decision
            del moved[0]
        while owed:
            expert = owed[0]
            at = base + expert
            if expert in moved:
                for decision in self._admit(at, view, owed):
                    yield decision
            if at in asked:
                for decision in asked[at].fetch:  # what a prefetch has still to bring goes ahead of all others
                    yield decision
            del owed[0]
            yield self._run_gpu[expert]

    # -- prefetching ------------------------------------------------------------------------------------------------

    def _look_ahead(self, gate: Gate, view: View) -> Iterator[Decision]:
        """Prefetches for later layers: the paper's by gain, the public code's by score."""
        decisions: Iterable[Decision] = ()
        if self.variant == "code":
            if self.prefetch_size and gate.layer + 1 < view.n_layers:
                decisions = self._by_score(gate.layer + 1, view)
        elif self.lookahead:
            self._guessed = gate.layer, gate.by_layer(self._named, *self._guesses)
            decisions = self._pump(view)
        for decision in decisions:  # noqa: UP028 - a list takes no tickets
            yield decision

    def _by_score(self, layer: int, view: View) -> Iterator[Decision]:
        """The public code: the next layer's experts of highest score."""
        best = np.argsort(-self._caches.mrs.all[layer], kind="stable")[: self.prefetch_size]
        for at in (layer * self._n_experts + best).tolist():
            if not self._caches.held[at]:
                for decision in self._admit(at, view) + self._of(at, view).prefetch:  # noqa: UP028 - takes no tickets
                    yield decision

    def _named(self, *guesses: NDArray[np.float64]) -> list[list[Named]]:
        """Experts that the next layers will be asked for, by the layer that guesses and by distance [n, L, E]."""
        return [list(layer) for layer in zip(*map(self._of_guesses, guesses), strict=True)]

    def _of_guesses(self, scores: NDArray[np.float64]) -> list[Named]:
        best = np.argsort(-scores, axis=2, kind="stable")[:, :, : self._top_k]
        if len(best) == 1:
            found: list[Named] = best[0].tolist()
            return found
        n_layers, n_experts = scores.shape[1:]
        counts = np.zeros((n_layers, n_experts), dtype=np.int64)
        np.add.at(counts, (np.arange(n_layers)[None, :, None], best), 1)
        return [{expert: n for expert, n in enumerate(row) if n} for row in counts.tolist()]

    def _gains(self, layer: int, named: list[Named]) -> list[Gain]:
        """What having an expert on the GPU would save a later layer that is guessed to need it and has it not."""
        gains: list[Gain] = []
        held, base = self._caches.held, layer * self._n_experts
        for distance, guess in enumerate(named, 1):
            base += self._n_experts
            if base == len(held):
                break
            missing = [expert for expert in guess if not held[base + expert]]
            if not missing:
                continue
            losers = self._caches.losers(layer + distance)
            if self._one_gpu and isinstance(guess, list):  # of one token: all experts alike
                saved = self._simulated.gain_of_one(len(guess), len(missing), losers[0] - base in guess)
                if saved > 0.0:
                    gains += [(-saved, distance, expert, base + expert) for expert in missing]
            else:
                tokens = dict.fromkeys(guess, 1) if isinstance(guess, list) else guess
                gains += self._gains_of_several(distance, tokens, missing, losers, base)
        return gains

    def _gains_of_several(
        self, distance: int, tokens: dict[int, int], missing: list[int], losers: list[int], base: int
    ) -> Iterator[Gain]:
        """The same of one layer, where experts differ in their tokens or their GPUs."""
        there = [n for expert, n in tokens.items() if expert not in missing]
        gain_of = self._simulated.gains(tuple(there), tuple([tokens[expert] for expert in missing]))
        for expert in missing:
            at = base + expert
            saved = gain_of(tokens[expert], tokens.get(losers[self._caches.gpu[at]] - base, 0))
            if saved > 0.0:
                yield -saved, distance, expert, at

    def _pump(self, view: View) -> Iterable[Decision]:
        """While the link is idle, the next best prefetch."""
        if self._busy(view):
            return ()
        if self._guessed is not None:
            # Since the guess nothing has changed that its gains rest on: caches of later layers change here alone.
            gains = self._gains(*self._guessed)
            gains.sort(reverse=True)
            self._wanted = [gain[3] for gain in gains]
            self._guessed = None
        held, first = self._caches.held, (view.layer + 1) * self._n_experts
        while self._wanted:
            at = self._wanted.pop()
            if at >= first and not held[at]:
                return self._admit(at, view) + self._of(at, view).prefetch
        return ()

    def _busy(self, view: View) -> bool:
        """True while a copy is under way into a cache."""
        arrived, asked = view.arrived, self._asked
        while asked:
            at = next(iter(asked))
            for part in reversed(asked[at].parts):  # the last one is the last to come
                if not arrived(part):
                    return True
            del asked[at]
        return False

    def copy_done(self, piece: Piece, view: View) -> Iterable[Decision]:
        return self._pump(view) if self._wanted or self._guessed is not None else ()
