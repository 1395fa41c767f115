"""DALI (arXiv 2602.03495): a layer divided greedily between CPU and GPU, prefetching by workload, a cache by workload.

Known from third parties' notes: rules in words, and a port of its Algorithm 2 (the cache) in C. What they leave open is
a parameter, or said here.

- Assignment: of the experts that a layer's tokens ask for, one after the other goes where max(T_gpu, T_cpu) grows
  least, in the order of the difference of CPU and GPU time. Costs are this run's prices (profiled at warm-up there);
  an expert that is not on the GPU costs its copy and its computation there (assumed: copies and computations overlap).
  The notes give the greedy division 92 % of the optimum, and no rule for ties.
- Residual prefetching: the next layer's gate on this layer's gate input plus a fixed vector, the mean difference of the
  two layers' inputs over a corpus, says which experts will have most tokens; these are copied ahead. Traces hold no
  such vector: `predictor=recorded` is the same without it (label `gate reuse`); the next layer's gate reads what this
  one's read. Prompts are not predicted (traces hold predictions for generated tokens).
- Cache: as many experts of each layer as fit equally, exchanged every `w_size` steps (`Warc`); a step
  is an iteration, and scores begin anew when no request runs (there: with each sequence). What is copied on demand or
  ahead passes through a buffer beside the cache (assumed: twice what is prefetched, at least two experts).

Assumed, too: the first ids of each layer are there at the start; a prefetched expert counts as being there. Several
GPUs (not published): each has a share of every layer, and the division takes them for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from policies.common.foretold import foretold
from policies.common.placement import beside, each_layer, fits_whole, most_on_a_gpu
from sim.policy import (
    PREFILL,
    SURROGATE,
    BadInput,
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    Prefetch,
    RequestInfo,
    RunCpu,
    RunGpu,
    Steps,
    StoreSplit,
    Surrogate,
    View,
    param,
)


class Warc:
    """The workload-aware cache (WARC) of one layer on one GPU: the experts that stay, as many as at first.

    Args:
        residents: those that stay at first. others: the rest of the layer's on that GPU.
        w_size: steps from one exchange to the next. u_size: experts exchanged at once, at most.
    """

    def __init__(self, residents: Iterable[int], others: Iterable[int], w_size: int, u_size: int) -> None:
        self.residents = set(residents)
        self._others = set(others)
        self._w_size, self._u_size = w_size, u_size
        self._scores: dict[int, int] = {}
        self._steps = 0

    def forget(self) -> None:
        """A sequence begins: workloads and steps count anew."""
        self._scores.clear()
        self._steps = 0

    def step(self, needs: Mapping[int, int]) -> list[tuple[int, int]]:
        """Count a step's tokens by expert; every `w_size` steps (who leaves, who comes) of an exchange.

        The k <= u_size others of the highest positive score come, for the k residents of the lowest; ties to the lower
        id, and all scores begin at 0 again.
        """
        scores = self._scores
        for expert, n_tokens in needs.items():
            scores[expert] = scores.get(expert, 0) + n_tokens
        self._steps += 1
        if self._steps < self._w_size:
            return []
        busiest = sorted((e for e in self._others if scores.get(e)), key=lambda e: (-scores[e], e))
        idlest = sorted(self.residents, key=lambda e: (scores.get(e, 0), e))
        exchanged = list(zip(idlest, busiest[: self._u_size], strict=False))
        for leaves, comes in exchanged:
            self.residents.remove(leaves)
            self._others.remove(comes)
            self.residents.add(comes)
            self._others.add(leaves)
        self.forget()
        return exchanged


class Costs(NamedTuple):
    """Seconds of one expert on either side; on the GPU its copy included, where it has to be copied."""

    gpu_s: float
    cpu_s: float


class Shares(NamedTuple):
    """Places of the experts on either side, in the order they were placed."""

    gpu: list[int]
    cpu: list[int]


def divide(costs: Sequence[Costs], order: str) -> Shares:
    """Greedy assignment: place one expert after the other where max(T_gpu, T_cpu) grows least; a tie goes to the side
    that ends earlier, then to the GPU.

    Args:
        order: who is placed first: `descending`, the largest CPU time less GPU time; `absolute`, the largest difference
            whichever side is faster. Of equals the first.
    """
    differences = [one.cpu_s - one.gpu_s for one in costs]
    if order == "absolute":
        differences = [abs(difference) for difference in differences]
    shares = Shares([], [])
    gpu_s = cpu_s = 0.0
    for at in sorted(range(len(costs)), key=lambda at: -differences[at]):
        if_gpu_s, if_cpu_s = gpu_s + costs[at].gpu_s, cpu_s + costs[at].cpu_s
        if (max(if_gpu_s, cpu_s), if_gpu_s) <= (max(gpu_s, if_cpu_s), if_cpu_s):
            gpu_s = if_gpu_s
            shares.gpu.append(at)
        else:
            cpu_s = if_cpu_s
            shares.cpu.append(at)
    return shares


class Dali(Policy):
    """Divides every layer between CPU and GPU by cost, prefetches the busiest, keeps what was busy lately."""

    name = "dali"
    title = "DALI: greedy assignment, prefetch and cache by workload"
    source = "arXiv 2602.03495, known from third parties' notes"
    from_notes = True
    traits = frozenset({"cpu", "evicts_eagerly"})
    needs = frozenset({"experts", "next_scores_1"})
    w_size: int = param(
        4, "steps from one exchange of the cache to the next (not published; the port: to 64)", within=(1, 64)
    )
    u_size: int = param(
        1, "experts of a layer exchanged at once, at most (not published; the port: to 16)", within=(0, 16)
    )
    prefetch_size: int = param(
        1, "experts of the next layer copied ahead, by predicted workload (not published)", within=(0, 4096)
    )
    first: str = param(
        "descending",
        "who is placed first: largest CPU time less GPU time, or largest difference either way (the notes say by the "
        "difference)",
        ("descending", "absolute"),
    )
    predictor: str = param(
        "recorded",
        "recorded: the next gate on this layer's gate input, from the trace; or a labelled stand-in: surrogate:SHARE",
    )
    seed: int = param(0, "for a surrogate's draws", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.predictor.startswith(SURROGATE):
            self.needs, self.labels = frozenset({"experts"}), (SURROGATE,)
        elif self.predictor != "recorded":
            raise BadInput(f"{self.name}.predictor, got {self.predictor!r}: write recorded, or surrogate:0.9")
        elif self.prefetch_size:
            self.labels = ("gate reuse",)
        else:
            self.needs = frozenset({"experts"})

    # -- the cache --------------------------------------------------------------------------------------------------

    def _buffer(self, view: View) -> int:
        """Experts per GPU beside the cache: half for this layer, half for the next."""
        return 0 if fits_whole(view) else 2 * max(1, self.prefetch_size)

    def min_experts(self, view: View) -> int:
        return min(most_on_a_gpu(view), 2 * max(1, self.prefetch_size))

    def bind(self, view: View) -> None:
        self._caches: list[list[Warc]] = []
        self._placed: list[Piece] = []
        buffer = self._buffer(view)
        sizes = [each_layer(beside(buffer, gpu, view), gpu, view) for gpu in range(view.n_gpus)]
        for layer in range(view.n_layers):
            pieces = [view.piece(layer, expert) for expert in range(view.n_experts)]
            self._caches.append([])
            for gpu in range(view.n_gpus):
                mine = [piece for piece in pieces if piece.gpu == gpu]
                stay = mine[: sizes[gpu]] if buffer else mine
                others = [piece.expert for piece in mine[len(stay) :]]
                self._caches[layer].append(Warc([p.expert for p in stay], others, self.w_size, self.u_size))
                self._placed += stay
        self._ahead: list[Piece] = []  # copied for the layer that comes, into the buffer
        self._n_running = self._n_exchanged = self._n_named = self._n_right = 0
        self._copy_s = view.prices.copy_s()

    def initial(self, view: View) -> Iterable[Piece]:
        return self._placed

    def request_start(self, request: RequestInfo, view: View) -> None:
        if not self._n_running:
            for caches in self._caches:
                for cache in caches:
                    cache.forget()
        self._n_running += 1

    def request_end(self, request: RequestInfo, view: View) -> None:
        self._n_running -= 1

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        experts = list(gate.needs)
        costs = [self._costs(gate, expert, view) for expert in experts]
        shares = divide(costs, self.first)
        yield [RunCpu(experts[at]) for at in shares.cpu]
        pieces = [view.piece(gate.layer, experts[at]) for at in shares.gpu]
        yield from self._drop_unused(gate, pieces)
        exchange = self._exchange(gate, view)
        yield from self._run(pieces, exchange, view)
        self._ahead = []
        if gate.phase != PREFILL and self.prefetch_size and gate.layer + 1 < view.n_layers:
            yield from self._prefetch(gate, view)
        for comes, leaves in exchange.items():
            yield Evict(leaves)
            yield Prefetch(comes)

    def _costs(self, gate: Gate, expert: int, view: View) -> Costs:
        n_tokens = gate.needs[expert]
        there = view.resident(gate.layer, expert)
        return Costs(view.prices.gpu_s(n_tokens) + (0.0 if there else self._copy_s), view.prices.cpu_s(n_tokens))

    def _drop_unused(self, gate: Gate, pieces: list[Piece]) -> Steps:
        """What was copied ahead, and is not computed on the GPU."""
        for piece in self._ahead:
            self._n_right += piece.expert in gate.needs
            if piece not in pieces:
                yield Evict(piece)

    def _exchange(self, gate: Gate, view: View) -> dict[Piece, Piece]:
        """The step's exchange of the cache: who comes -> who leaves."""
        exchange: dict[Piece, Piece] = {}
        for gpu, cache in enumerate(self._caches[gate.layer]):
            needs = {e: n for e, n in gate.needs.items() if view.piece(gate.layer, e).gpu == gpu}
            for leaves, comes in cache.step(needs):
                exchange[view.piece(gate.layer, comes)] = view.piece(gate.layer, leaves)
        self._n_exchanged += len(exchange)
        return exchange

    def _run(self, pieces: list[Piece], exchange: dict[Piece, Piece], view: View) -> Steps:
        """Compute on the GPU: what is there while the rest is copied through the buffer.

        Of what passes through, who comes into the cache stays; it is then taken out of `exchange`.
        """
        passing = deque(piece for piece in pieces if piece in self._ahead)
        there = [piece for piece in pieces if view.holds(piece) and piece not in passing]
        missing = deque(piece for piece in pieces if not view.holds(piece))
        yield from self._fetch(missing, passing, view)
        yield [RunGpu(piece.expert) for piece in there]
        while passing:
            piece = passing.popleft()
            yield RunGpu(piece.expert)
            yield Evict(exchange.pop(piece, piece))
            yield from self._fetch(missing, passing, view)

    def _fetch(self, missing: deque[Piece], passing: deque[Piece], view: View) -> Steps:
        """As many as there is room for."""
        while missing and view.free_bytes(missing[0].gpu) >= missing[0].n_bytes:
            piece = missing.popleft()
            yield Fetch(piece)
            passing.append(piece)

    # -- the next layer ---------------------------------------------------------------------------------------------

    def learn(self, store: StoreSplit) -> None:
        self._surrogate: Surrogate | None = None
        if self.predictor != "recorded":
            self._surrogate = Surrogate(self.predictor, store.trace.top_k, store.trace.n_experts, self.seed)

    def _foretell(self, gate: Gate, view: View) -> list[int]:
        """Experts of the next layer, those with most predicted tokens first; ties to the lower id."""
        named = foretold(gate, 1, self._surrogate, view)
        ids, counts = np.unique(named, return_counts=True)
        found: list[int] = ids[np.argsort(-counts, kind="stable")].tolist()
        return found

    def _prefetch(self, gate: Gate, view: View) -> Steps:
        """Of the busiest experts foretold those that are not there, as many as are to be copied ahead."""
        for expert in self._foretell(gate, view):
            piece = view.piece(gate.layer + 1, expert)
            if len(self._ahead) == self.prefetch_size:
                return
            if not view.holds(piece) and view.free_bytes(piece.gpu) >= piece.n_bytes:
                self._ahead.append(piece)
                self._n_named += 1
                yield Prefetch(piece)

    def stats(self) -> dict[str, float]:
        """Experts exchanged in the cache, and the share of those copied ahead that the gate then asked for."""
        return {
            "exchanged": float(self._n_exchanged),
            "foretold_frac": self._n_right / self._n_named if self._n_named else 0.0,
        }
