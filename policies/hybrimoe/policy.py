"""HybriMoE (DAC'25, arXiv 2504.05897): CPU and GPU share each layer by a simulated schedule; the cache follows scores.

Source: Zhong et al., "HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference"; code
PKU-SEC-Lab/HybriMoE@508a85b, ktransformers/operators/experts.py (`HSS`, `KScoreAwareCache`, `KExpertsCache`).
`variant=paper`: this machine's latencies (profiled at warm-up there), guesses for three layers ahead, experts
prefetched by simulated gain while the link is idle, random experts to begin with. `variant=code`: the code's constants,
no guesses (`prefetch_size` takes experts of the next layer by their score instead; off as published), the first experts
of each layer.

Departures: an expert that its layer still needs is never evicted (the code has no such protection); with a full layer,
a prefetch's gain is that of having the expert in place of the one it evicts. Steps of several generated tokens are
scheduled by their counts (the code takes them for prompts, without a share of the CPU). The code's loading of a later
layer into the prefill buffer is left out: it aims at the wrong layer and so gains nothing. An expert's matrices are
copied one by one, and computed as they come (the code's events per matrix); results count each as a copy of its own.

Several GPUs (not published): each keeps its share of every layer's cache, and the schedule takes them for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random as Draws

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import (
    asked_by_layer,
    each_layer,
    fits_whole,
    most_layers,
    most_of_a_layer,
    most_on_a_gpu,
    most_sharing,
)
from policies.hybrimoe.cache import Copies, Experts, LayerCaches, MrsScores
from policies.hybrimoe.gains import Gains, Named, Rates, Simulation
from sim.policy import (
    PREFILL,
    BadInput,
    Decision,
    DoesNotFit,
    Evict,
    Gate,
    Iteration,
    Piece,
    Policy,
    RunCpu,
    RunGpu,
    View,
    param,
)

PUBLISHED_LOOKAHEAD = 3


class HybriMoe(Policy):
    """Shares every layer out greedily, keeps what the gate scored high lately, prefetches what saves most time."""

    name = "hybrimoe"
    title = "HybriMoE: hybrid schedule, MRS cache, prefetch by gain"
    source = "arXiv 2504.05897 (DAC'25); PKU-SEC-Lab/HybriMoE@508a85b ktransformers/operators/experts.py"
    traits = frozenset({"cpu", "timing"})
    needs = frozenset({"experts", "scores", *(f"next_scores_{d}" for d in range(1, PUBLISHED_LOOKAHEAD + 1))})
    variant: str = param(
        "paper",
        "the paper's schedule by measured latencies and prefetch by gain, or the public code's constants and its "
        "prefetch by score",
        ("paper", "code"),
    )
    cache_size: int | None = param(
        None,
        "experts per layer on the GPU (code: 16 unless told); without it as many as fit equally in every layer",
        within=(1, 4096),
    )
    alpha: float = param(0.5, "weight of the newest scores in MRS (section IV-D)", within=(0.0, 1.0))
    top_p: int | None = param(
        None,
        "highest scores that count in MRS; published: twice the experts per token (the code's class has 12 as its "
        "default)",
        within=(1, 4096),
    )
    evict: str = param("mrs", "least score, or the paper's baseline in Figure 9", ("mrs", "lru"))
    lookahead: int = param(
        PUBLISHED_LOOKAHEAD,
        "variant paper: layers ahead to guess and prefetch for; 0 prefetches nothing",
        within=(0, PUBLISHED_LOOKAHEAD),
    )
    prefetch_size: int = param(
        0, "variant code: experts of the next layer to have on the GPU, by score (code: 0)", within=(0, 4096)
    )
    matrices: int = param(
        3,
        "copies an expert comes in, so that what is urgent, a CPU result above all, waits for one of them at most "
        "(code: gate, up and down)",
        within=(1, 16),
    )
    initial_seed: int = param(0, "variant paper: seed of the experts drawn to begin with", within=(0, 2**63 - 1))
    gpu_time: float = param(0.5, "variant code: an expert on the GPU (`model_gpu_time`)", within=(0.0, 1e6))
    cpu_time_per_token: float = param(
        1.0,
        "variant code: an expert on the CPU, per token (`model_cpu_time`; the code's comments: Mixtral 0.2, Qwen2 "
        "0.8, DeepSeek 1)",
        within=(0.0, 1e6),
    )
    cpu_first_time: float = param(0.79, "variant code: what a layer's first CPU expert takes longer", within=(0.0, 1e6))
    move_time: float = param(0.418, "variant code: copying an expert (`model_move_time`)", within=(0.0, 1e6))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        ahead = 0 if self.variant == "code" else self.lookahead
        self.needs = frozenset({"experts", "scores", *(f"next_scores_{d}" for d in range(1, ahead + 1))})

    # -- the cache --------------------------------------------------------------------------------------------------

    def _buffer(self, view: View) -> int:
        """Experts per GPU of the buffer that prompts go through: a layer of them."""
        return 0 if fits_whole(view) else most_of_a_layer(view)

    def min_experts(self, view: View) -> int:
        return min(most_on_a_gpu(view), most_layers(view) + most_of_a_layer(view))

    def bind(self, view: View) -> None:
        self._n_experts, self._top_k = view.n_experts, view.top_k
        top_p = 2 * view.top_k if self.top_p is None else self.top_p
        mrs = MrsScores(view.n_layers, view.n_experts, self.alpha, top_p, lru=self.evict == "lru")
        self._sizes = [self._size(gpu, view) for gpu in range(view.n_gpus)]
        self._caches = LayerCaches(mrs, view)
        self._experts = Experts(self.matrices, view)
        self._run_gpu = [RunGpu(expert) for expert in range(view.n_experts)]
        self._run_cpu = [RunCpu(expert) for expert in range(view.n_experts)]
        self._named: tuple[Named, ...] | None = None  # what the layer that runs guesses
        self._guessed: tuple[int, tuple[Named, ...]] | None = None  # who guessed last, unless looked at already
        self._wanted: list[int] = []  # to be prefetched, best last
        self._asked: dict[int, Copies] = {}  # in a cache, and perhaps still under way
        self._awaited: Piece | None = None  # of the first of these, a copy that had not come when that was asked last
        self._simulated = Simulation(self._rates(view).remembered())
        self._gains = Gains(self._caches, self._simulated, view.n_experts, view.n_gpus)
        self._guesses = tuple(f"next_scores_{d}" for d in range(1, self.lookahead + 1))
        self._by_gain = self.variant == "paper" and self.lookahead > 0
        self._weigh, self._weigh_and_name = self._weighed, self._weighed_and_named

    def _size(self, gpu: int, view: View) -> list[int]:
        """Experts by layer on this GPU. Raises DoesNotFit when the one asked for is too large."""
        most = each_layer(view.capacity_of(gpu) - self._buffer(view), gpu, view)
        if self.cache_size is None:
            return [most] * view.n_layers
        if self.cache_size < (n_sharing := most_sharing(view)):
            raise BadInput(
                f"parameter {self.name}.cache_size, got {self.cache_size}: each of {n_sharing} GPUs has a cache of "
                f"every layer, of one expert at least; give {n_sharing} or more, or leave it out"
            )
        sizes = asked_by_layer(self.cache_size, gpu, view)
        if max(sizes) > most:
            raise DoesNotFit(
                f"parameter {self.name}.cache_size, got {self.cache_size}: GPU {gpu} has room for {most} experts of "
                "every layer beside the prefill buffer; lower it, or leave it out"
            )
        return sizes

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
                for piece in mine[: self._sizes[gpu][layer]]:
                    self._caches.add(piece.index)
                    yield from self._experts.of(piece.index).parts

    def _admit(self, at: int, loser: int) -> list[Evict]:
        """Book an expert in its layer's cache, in the place of another; says who leaves for it."""
        self._caches.replace(loser, at)
        self._asked.pop(loser, None)
        self._awaited = None
        self._asked[at] = self._experts.of(at)
        return self._experts.of(loser).evict

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> list[Decision]:
        prompt = gate.phase == PREFILL
        if self._by_gain and not prompt:
            added, self._named = gate.by_layer(self._weigh_and_name, "scores", *self._guesses)
        else:
            added = gate.by_layer(self._weigh)
        self._caches.mrs.observe(gate.layer, added, gate.needs)
        return self._through_gpu(gate) if prompt else self._share(gate)

    def layer_done(self, layer: int, view: View) -> list[Decision] | None:
        """Prefetches for later layers, once all of this one has been launched: the paper's by gain, the public code's
        by score."""
        if self._named is not None:
            self._guessed, self._named = (layer, self._named), None
            return self._pump(view) if self._awaited is None or view.arrived(self._awaited) else None
        if self.variant == "code" and self.prefetch_size and view.phase != PREFILL and layer + 1 < view.n_layers:
            return self._by_score(layer + 1)
        return None

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        self._caches.end()

    def _weighed(self, scores: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """What each layer adds to its recent scores, of gate scores [n, L, E].

        The code takes in the first token's scores alone; the paper has one token at a time.
        """
        first = self.variant == "code" or len(scores) == 1
        return list(self._caches.mrs.weighed(scores[0] if first else scores.sum(axis=0) / len(scores)))

    def _through_gpu(self, gate: Gate) -> list[Decision]:
        """A prompt: every expert on the GPU, what is missing through the buffer, without entering the cache."""
        base, held, said = gate.layer * self._n_experts, self._caches.held, list[Decision]()
        missing = {expert: self._experts.of(base + expert) for expert in gate.needs if not held[base + expert]}
        for copies in missing.values():
            said += copies.fetch
        said += [self._run_gpu[expert] for expert in gate.needs if expert not in missing]
        for expert, copies in missing.items():
            said.append(self._run_gpu[expert])
            said += copies.evict
        return said

    def _share(self, gate: Gate) -> list[Decision]:
        """A generated token: CPU and GPU as `share_out` says; what the CPU computes does not enter the cache."""
        needs, base, held, asked = gate.needs, gate.layer * self._n_experts, self._caches.held, self._asked
        order: list[int] = []
        missing: list[int] = []
        for expert in needs:
            (order if held[base + expert] else missing).append(expert)
        n_there = len(order)
        if gate.iteration.n_tokens == 1:
            on_gpu, on_cpu = self._simulated.layout_of_one(n_there, len(missing))
        else:
            on_gpu, on_cpu = self._simulated.layout(
                tuple([needs[expert] for expert in order]), tuple([needs[expert] for expert in missing])
            )
        order += missing
        said: list[Decision] = []
        for place in on_cpu:
            said.append(self._run_cpu[order[place]])  # noqa: PERF401 - of a few, a comprehension takes longer
        if on_gpu and max(on_gpu) >= n_there:
            pending = [order[place] for place in on_gpu]
            self._move(base, pending, [order[place] for place in on_gpu if place >= n_there], said)
            return said
        for place in on_gpu:
            expert = order[place]
            if base + expert in asked:  # what a prefetch has still to bring goes ahead of all others
                said += asked[base + expert].fetch
            said.append(self._run_gpu[expert])
        return said

    def _move(self, base: int, pending: list[int], moved: list[int], said: list[Decision]) -> None:
        """Compute `pending` on the GPU, of which `moved` are copied first, each in the place of another; where the
        layer has no place on its GPU, through the buffer of prompts."""
        caches, asked = self._caches, self._asked
        while moved:
            at = base + moved[0]
            loser = caches.loser(at, pending)
            if loser < 0:
                break  # all of its layer is still to run: it waits for one of them
            said += self._admit(at, loser)
            said += asked[at].fetch
            del moved[0]
        while pending:
            expert = pending[0]
            at = base + expert
            passes: Copies | None = None
            if expert in moved:
                loser = caches.loser(at, pending)
                if loser >= 0:
                    said += self._admit(at, loser)
                else:
                    passes = self._experts.of(at)
                    said += passes.fetch
            if at in asked:
                said += asked[at].fetch
            del pending[0]
            said.append(self._run_gpu[expert])
            if passes is not None:
                said += passes.evict

    # -- prefetching ------------------------------------------------------------------------------------------------

    def _by_score(self, layer: int) -> list[Decision]:
        """The public code: the next layer's experts of highest score."""
        said: list[Decision] = []
        best = np.argsort(-self._caches.mrs.all[layer], kind="stable")[: self.prefetch_size]
        for at in (layer * self._n_experts + best).tolist():
            loser = -1 if self._caches.held[at] else self._caches.loser_of(layer, self._caches.gpu[at])
            if loser >= 0:
                said += self._admit(at, loser)
                said += self._experts.of(at).prefetch
        return said

    def _weighed_and_named(
        self, scores: NDArray[np.float64], *guesses: NDArray[np.float64]
    ) -> list[tuple[NDArray[np.float64], tuple[Named, ...]]]:
        """The same, and the experts that the next layers will be asked for: by the layer that guesses, of guesses
        [n, L, E] by distance."""
        return list(zip(self._weighed(scores), zip(*map(self._of_guesses, guesses), strict=True), strict=True))

    def _of_guesses(self, scores: NDArray[np.float64]) -> list[Named]:
        best = np.argsort(-scores, axis=2, kind="stable")[:, :, : self._top_k]
        if len(best) == 1:
            found: list[Named] = best[0].tolist()
            return found
        n_layers, n_experts = scores.shape[1:]
        counts = np.zeros((n_layers, n_experts), dtype=np.int64)
        np.add.at(counts, (np.arange(n_layers)[None, :, None], best), 1)
        return [{expert: n for expert, n in enumerate(row) if n} for row in counts.tolist()]

    def _pump(self, view: View) -> list[Decision] | None:
        """While the link is idle, the next best prefetch."""
        asked, arrived = self._asked, view.arrived
        while asked:  # idle: no copy is under way into a cache
            at = next(iter(asked))
            for part in reversed(asked[at].parts):  # the last one is the last to come
                if not arrived(part):
                    self._awaited = part
                    return None
            del asked[at]
        if self._guessed is not None:
            # Since the guess nothing has changed that its gains rest on: caches of later layers change here alone.
            self._wanted = self._gains.wanted(*self._guessed)
            self._guessed = None
        held, first = self._caches.held, (view.layer + 1) * self._n_experts
        while self._wanted:
            at = self._wanted.pop()
            if at >= first and not held[at]:
                loser = self._caches.loser_of(at // self._n_experts, self._caches.gpu[at])
                return [*self._admit(at, loser), *self._experts.of(at).prefetch]
        return None

    def copy_done(self, piece: Piece, view: View) -> list[Decision] | None:
        if not self._wanted and self._guessed is None:
            return None
        awaited = self._awaited
        return self._pump(view) if awaited is None or awaited is piece or view.arrived(awaited) else None
