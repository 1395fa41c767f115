"""MoEpic (arXiv 2509.08342): experts split in two; tops of hot ones are cached, bottoms prefetched layer by layer.

Source: Yan, Liu, Xu and Huang, "Accelerating Mixture-of-Expert Inference with Adaptive Expert Split Mechanism". No
public code; sections, equations and Algorithm 1 are cited at each step. `docs/moepic.md` lists what the text leaves
open and how it is read here. The ablations of Table 3 are parameters: w/o SP is `prefetch=random`, w/o LCP
`evict=random`, w/o CCA `configure=false`; the limits of section 2.3 are `configure=false` with `split=1 prefetch=none`
(cache only) and `split=0` (prefetch only).

Not published: several GPUs (each holds its share of every layer's budget and cache; links load side by side), batches
(predicted scores are summed; the cache is updated whenever a request ends) and prefetching for prompts, whose
predictions traces do not record (experts in order of cache priority).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random as Draws

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import homes, most_sharing
from policies.lcp import Priorities
from policies.moepic.cache import Division, Replacement, Tops, shuffled
from policies.moepic.config import Statistics, Times, Windows, allocate
from policies.moepic.history import History
from sim.policy import (
    DECODE,
    Buffer,
    Decision,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    RequestInfo,
    RunGpu,
    Segment,
    Steps,
    StoreSplit,
    Ticket,
    View,
    Wait,
    param,
)


class Moepic(Policy):
    """Caches the tops of hot experts per layer, prefetches what else the next layer needs, and sizes both by profit."""

    name = "moepic"
    title = "MoEpic: adaptive expert split"
    source = "arXiv 2509.08342"
    traits = frozenset({"timing"})
    needs = frozenset({"experts", "next_scores_1"})
    omega: int = param(128, "observation window of the cache priority, tokens (section 3.3)", within=(1, 10**9))
    rho: float = param(
        0.25, "weight of activations against intervals in the cache priority (section 3.3)", within=(1e-9, 1 - 1e-9)
    )
    tau: int = param(5000, "tokens between two runs of the configurator (section 4.1)", within=(1, 10**9))
    zeta: float = param(
        0.01, "share of the budget that the configurator moves at a time (section 4.1)", within=(1e-4, 1.0)
    )
    split: float = param(
        0.5,
        "share of an expert in its top before the configurator has run (Algorithm 1); 0 caches nothing",
        within=(0.0, 1.0),
    )
    buffer: int | None = param(
        None,
        "whole experts in the buffer of prefetched and missing segments; published: K (section 4.1)",
        within=(1, 10**6),
    )
    prefetch: str = param(
        "speculative",
        "speculative: by predicted score (section 3.2); random: Table 3, w/o SP; none",
        ("speculative", "random", "none"),
    )
    evict: str = param("lcp", "lcp: least cache priority (section 3.3); random: Table 3, w/o LCP", ("lcp", "random"))
    configure: bool = param(
        True, "run the configurator (section 3.4); false: equal budgets, fixed split (Table 3, w/o CCA)"
    )
    admission: str = param(
        "always",
        "a missed expert always replaces the lowest (section 3.3), or only when its priority is no lower",
        ("always", "priority"),
    )
    replace: str = param(
        "lowest",
        "whose place a miss takes where a prompt or a batch needs all that are cached: the lowest of all (section "
        "3.3), and while that one is still to run the miss passes through the buffer; or the lowest of those that "
        "have run, however high their priority",
        ("lowest", "idle"),
    )
    compute: str = param(
        "segments",
        "segments: what is there is computed first, tops before any bottom (sections 2.3 and 3.2); experts: one "
        "expert after the other, its bottom right after its top",
        ("segments", "experts"),
    )
    concatenate: bool = param(
        True,
        "an expert all of which is there is computed as one (section 3.1: concatenated); false: its top, then its "
        "bottom",
    )
    loading: str = param(
        "bottoms",
        "what is missing: bottoms first, then whole experts; or as the gate ranks them (the paper leaves the order "
        "open)",
        ("bottoms", "gate"),
    )
    copies: int = param(
        3,
        "slices that a segment is copied in, so that prefetching ends between two of them (section 3.2: it is "
        "terminated when the gate has spoken): the gate, up and down parts of a segment are three tensors (assumed); "
        "1: a segment under way always arrives",
        within=(1, 64),
    )
    history: str = param(
        "store",
        "store: the trace's store split has been served before, and the device was idle at its end: configured "
        "there, however few tokens it has (the paper measures a system that has served tau and more); none: "
        "Algorithm 1 starts from nothing, cached experts chosen at random",
        ("store", "none"),
    )
    seed: int = param(0, "seed of random choices; --seed sets it too", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.prefetch != "speculative":
            self.needs = frozenset({"experts"})

    def min_experts(self, view: View) -> int:
        return int(self.buffer or view.top_k)

    def bind(self, view: View) -> None:
        self._draw = Draws(self.seed).random  # noqa: S311 - a simulation, not a secret
        self._view = view
        self.settings["buffer"] = room = int(self.buffer or view.top_k)
        self._division = Division(room, self.split, self.copies, view)
        self._tops, self._fits = self._division.tops, self._division.fits
        self._priorities = Priorities(view.n_layers, view.n_experts, self.omega, self.rho)
        self._replacement = Replacement(
            self._priorities, self.evict == "random", self.admission, self.replace, self._draw
        )
        statistics = Statistics(view.n_layers, view.n_experts, view.top_k)
        self._history = History(self._priorities, statistics, self.configure, self.prefetch == "speculative")
        self._windows = Windows(view)
        self._gpu_of = homes(view).tolist()
        self._run_whole = [RunGpu(expert) for expert in range(view.n_experts)]
        self._run_joined = [RunGpu(expert, joined=True) for expert in range(view.n_experts)]
        self._buffer = Buffer(view.n_gpus)
        self._n_links = most_sharing(view)  # that copy experts of a layer side by side
        self._ahead: list[Segment] = []
        self._n_hits = self._n_activated = self._n_configured = 0

    # -- before the first request -----------------------------------------------------------------------------------

    def learn(self, store: StoreSplit) -> None:
        """The store split has been served: counts, priorities and the configurator, every tau tokens and at its end."""
        if self.history == "store":
            self._history.learn(store, self._configure_if_due)
            if self.configure and not self._fits and self._history.since:
                self._run_configurator()

    def initial(self, view: View) -> Iterator[Piece]:
        """Tops of the C experts of highest priority (section 3.4.2), at random before anything was served."""
        for tops in (tops for groups in self._tops for tops in groups):
            self._choose(tops, random=self.evict == "random" or not any(self._priorities.uses[tops.layer]))
            tops.holds_tops(view)
            for expert in tops.cached:
                yield from tops.top_slices(expert)

    def _choose(self, tops: Tops, random: bool) -> None:
        if random:
            stay = list(tops.cached)
            rest = [e for e in tops.experts if e not in tops.cached]
            tops.cached = dict.fromkeys((stay + list(shuffled(rest, self._draw)))[: tops.n_cached])
        else:
            keys = self._priorities.keys[tops.layer]
            tops.cached = dict.fromkeys(tops.best(keys.__getitem__))

    # -- a layer (section 3.2) --------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        self._history.begin()
        self._windows.begin(iteration)

    def gate_done(self, gate: Gate, view: View) -> list[Decision]:
        self._history.observe(gate)
        buffer = self._buffer
        buffer.begin(view, self._division.kept_bytes)
        for segment in self._ahead:
            if segment.expert not in gate.needs:
                buffer.leave(segment)  # "terminates the prefetch operation": withdrawn, or dropped once it is over
        self._ahead.clear()
        self._serve(gate, view)
        self._look_ahead(gate, view)
        return buffer.said

    def _serve(self, gate: Gate, view: View) -> None:
        """Missing segments are loaded while what is there is computed: whole experts, then tops (or bottoms) that lack
        the rest, then the rest as it arrives; experts that lack only their bottom are loaded before misses."""
        layer, pending, buffer = gate.layer, dict(gate.needs), self._buffer
        groups, gpu_of = self._tops[layer], self._gpu_of[layer]
        order: list[tuple[int, int, int]] = []
        for place, expert in enumerate(pending):
            tops = groups[gpu_of[expert]]
            tops.splits[expert].look(view)  # "checks whether all ... fully loaded"
            order.append((self._readiness(tops, expert), place, expert))
        order.sort()
        unsent: list[list[int]] = [[] for _ in groups]  # by GPU, what lacks a segment
        whole: list[int] = []
        for readiness, _, expert in order:
            tops, n_tokens = groups[gpu_of[expert]], pending[expert]
            cached = expert in tops.cached
            self._n_activated += n_tokens
            if cached:
                self._n_hits += n_tokens
            buffer.wait(tops.splits[expert])  # prefetched, but not there: it is waited for now
            if readiness > 1:
                unsent[tops.gpu].append(expert)
                continue
            if not readiness:
                whole.append(expert)
            if not cached:
                self._replacement.admit(tops, expert, gate.needs, pending, buffer)
        for tops in groups:
            if unsent[tops.gpu]:
                self._send(tops, unsent[tops.gpu], gate.needs, pending)
        if self.compute == "segments":
            for expert in whole:
                self._run(groups[gpu_of[expert]], expert, True, unsent, gate.needs, pending)
            for expert in pending:
                buffer.run_ready(groups[gpu_of[expert]].splits[expert])
        for _, _, expert in order:
            if expert in pending:
                tops = groups[gpu_of[expert]]
                if expert in unsent[tops.gpu]:  # all before it have run and left the buffer
                    self._send(tops, unsent[tops.gpu], gate.needs, pending, at_least=1)
                self._run(tops, expert, expert in whole, unsent, gate.needs, pending)

    def _run(
        self,
        tops: Tops,
        expert: int,
        whole: bool,
        unsent: list[list[int]],
        needs: Mapping[int, int],
        pending: dict[int, int],
    ) -> None:
        """Compute an expert, or what is left of it; its buffered segments make room for missing ones."""
        split = tops.splits[expert]
        one = None
        if whole and self.concatenate:
            one = self._run_joined[expert] if split.n_slices > 1 else self._run_whole[expert]
        self._buffer.run(split, one, expert in tops.cached)
        del pending[expert]
        if unsent[tops.gpu]:
            self._send(tops, unsent[tops.gpu], needs, pending)

    def _send(
        self, tops: Tops, unsent: list[int], needs: Mapping[int, int], pending: dict[int, int], at_least: int = 0
    ) -> None:
        """Load missing segments on demand, as far as there is room."""
        buffer = self._buffer
        while unsent:
            expert = unsent[0]
            if expert not in tops.cached:
                self._replacement.admit(tops, expert, needs, pending, buffer)
            split = tops.splits[expert]
            if at_least <= 0 and not buffer.fits(split, tops.gpu):
                return
            buffer.demand(split)
            del unsent[0]
            at_least -= 1

    def _readiness(self, tops: Tops, expert: int) -> int:
        """The order of loading (and, of what is not there yet, of computing); equals in the gate's order."""
        split = tops.splits[expert]
        n_held = split.n_held
        if n_held == split.n_slices:
            return 1 if split.absent else 0
        if self.loading == "gate":
            return 2
        if expert in tops.cached:
            return 3
        return 2 if n_held else 4

    def _look_ahead(self, gate: Gate, view: View) -> None:
        """Bottoms of the next layer's likeliest experts whose tops are cached, else all of them, while the buffer has
        room; after the last layer the first one's, for the next token."""
        if self.prefetch == "none" or self._fits:
            return
        layer = (gate.layer + 1) % view.n_layers
        order, window_s = self._order(gate, layer, view), self._windows.longest_s(gate)
        for tops in self._tops[layer]:
            self._ahead += self._buffer.ahead(tops.splits, order, tops.gpu, window_s)

    def _order(self, gate: Gate, layer: int, view: View) -> list[int]:
        if self.prefetch == "random":
            return list(shuffled(list(range(view.n_experts)), self._draw))
        if gate.phase == DECODE:
            found: list[int] = gate.by_layer(self._likeliest, "next_scores_1")
            return found
        return self._priorities.ranking(layer)

    def _likeliest(self, scores: NDArray[np.float64]) -> list[list[int]]:
        """By layer, the experts of the next one by what all tokens predict [n, L, E]."""
        total = scores[0] if len(scores) == 1 else scores.sum(axis=0)
        order: list[list[int]] = np.argsort(-total, axis=1, kind="stable").tolist()
        return order

    # -- the configurator (section 3.4) -----------------------------------------------------------------------------

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        self._history.end(iteration)

    def request_end(self, request: RequestInfo, view: View) -> Steps:
        """The end of a request stands for an idle device; the next one starts when the cache has been updated."""
        self._history.forget(request.index)
        if self._due:
            yield from self._update(view)

    def idle(self, view: View) -> Steps:
        if self._due:
            yield from self._update(view)

    @property
    def _due(self) -> bool:
        return self.configure and not self._fits and self._history.since >= self.tau

    def _configure_if_due(self) -> None:
        if self._due:
            self._run_configurator()

    def _run_configurator(self) -> None:
        self._history.count()
        prices, top_k = self._view.prices, self._view.top_k
        times = Times(
            attention_s=prices.attention_s(self._history.mean_context),
            moe_s=top_k * prices.expert_s() + prices.shared_s(),
            head_s=prices.head_s(),
            load_s=prices.load_s() / self._n_links,
            top_k=top_k,
        )
        odds = self._history.statistics.odds(self.prefetch, self.evict)
        self._division.budgets, plans = allocate(self._division.budgets, self.zeta, odds, times)
        self._history.since = 0
        self._n_configured += 1
        self._division.lay_out(plans, self._view)

    def _update(self, view: View) -> Steps:
        """Algorithm 1, lines 9 and 10: new budgets and splits, then the tops of each layer's best C experts."""
        self._ahead.clear()
        held = list(view.residents())
        self._run_configurator()
        wanted: dict[Piece, None] = {}
        for tops in (tops for groups in self._tops for tops in groups):
            tops.cached = {e: None for e in tops.cached if e in tops.experts}
            self._choose(tops, self.evict == "random")
            tops.holds_tops(view)
            wanted.update((piece, None) for expert in tops.cached for piece in tops.top_slices(expert))
        for piece in held:
            if piece not in wanted:
                yield Evict(piece)
        tickets: list[Ticket] = []
        for piece in [piece for piece in wanted if not view.holds(piece)]:
            ticket = yield Fetch(piece)
            tickets.append(ticket)
        yield Wait(tuple(tickets))

    def stats(self) -> dict[str, float]:
        groups = [tops for layer in self._tops for tops in layer if tops.experts]
        fracs = [tops.split_frac for tops in groups]
        return {
            "top_hit_rate": self._n_hits / max(1, self._n_activated),  # section 3.4.2: activated experts found cached
            "configured": float(self._n_configured),
            "cached_tops": float(sum(tops.n_cached for tops in groups)),
            "split_mean_frac": math.fsum(fracs) / len(fracs),
            "split_min_frac": min(fracs),
            "split_max_frac": max(fracs),
            "admitted": float(self._replacement.n_admitted),
        }
