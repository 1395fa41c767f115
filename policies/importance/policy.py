"""Importance-Driven Expert Scheduling (arXiv 2508.18983): low-score experts give way to those already on the GPU.

Source: Zhu, Liu, Xiao, Li, Wang, Chen, Dai, Li and Wang, "Enabling MoE on the Edge via Importance-Driven Expert
Scheduling", sections and algorithms cited at each step; public code, later named SMoE: goingshr/SMoE@2de217b.
`variant=paper` follows the text, `variant=code` the public code; every piece can also be chosen on its own.

The published predictor runs the next layer's attention on what shared and resident experts have put out, so its scores
depend on the cache and cannot be recorded. Both variants use the code's, which leaves out routed experts and attention
and depends on the token alone: the trace level `shared_scores` (L4s). For `paper` that is an approximation.

Lossy: substitution changes what later layers see, and a trace cannot tell what they would then choose (open loop).
Several GPUs (not published): each has its cache and its link; the balancer counts all loads as if on one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from policies.common.foretold import rows_of
from policies.importance.balance import Costs, Missing, best_front, by_batch, one_pass, two_pointers
from policies.importance.cache import Leaving, counted
from policies.importance.router import FORMS, LoneToken, StandIn, Thresholds, Token, route, tokens_of
from sim.policy import (
    PREFILL,
    SURROGATE,
    Assignment,
    BadInput,
    DropQueue,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Predict,
    Requeue,
    RunCpu,
    RunGpu,
    Steps,
    Ticket,
    View,
    Wait,
    param,
)

# Counted while decoding: experts used after substitution, of them those in GPU memory or on the way there, those loaded
# and those computed on the CPU; experts predicted, of them those with top scores and those chosen.
USED, THERE, LOADED, COMPUTED, PREDICTED, TOP, ACTIVE = range(7)
DROP_QUEUE = DropQueue()
NOBODY: tuple[list[int], list[int]] = ([], [])

# Section 6.2, "a ratio of 0.35 in S1, 0.3 in S2, and 0.25 in S3" with Table 1's models; the code ships 0.25 for all.
PUBLISHED_ALPHA = {"deepseek-moe-16b": 0.35, "xverse-moe-a4.2b": 0.30, "qwen2-57b-a14b": 0.25}
SHIPPED_ALPHA = 0.25
SPLITS = {"alg2": two_pointers, "minmax": best_front}
DERIVED = {  # what a variant stands for where a parameter is left open
    "paper": {"low_score_rule": "text", "evict": "score", "prefetch": "top_score", "balance": "alg2"},
    "code": {"low_score_rule": "code", "evict": "fifo", "prefetch": "one", "balance": "code"},
}


class Importance(Policy):
    """Keeps what scores high, replaces what scores low, and shares the rest between the link and the CPU."""

    name = "importance"
    title = "Importance: low scores yield"
    source = "arXiv 2508.18983; goingshr/SMoE@2de217b"
    aliases = ("smoe",)
    traits = frozenset({"lossy", "timing", "cpu"})
    needs = frozenset({"experts", "scores", "shared_scores"})
    variant: str = param("paper", "the paper's text, or the public code where they differ", ("paper", "code"))
    alpha: float | None = param(
        None,
        "width of the low-score band (section 5.1); published: DeepSeekMoE-16B 0.35, XVERSE 0.30, Qwen2-57B 0.25 "
        "(section 6.2); 0.25 for any other model and in the code",
        within=(0.0, 1.0),
    )
    low_score_rule: str | None = param(
        None,
        "who is replaced: section 5.1 (paper), Algorithm 1, the code's first found (code), or nobody (the ablation "
        "of Figure 16)",
        ("text", "alg1", "code", "none"),
    )
    couple: bool = param(True, "the top-score set C is that of the whole batch (section 5.1); false: of each token")
    prefer_batch: int | None = param(
        None,
        "prefer alternatives that more tokens of the batch use, and gather at them what else would be loaded or left "
        "to the CPU (section 5.4: 1); the code has no such rule: 0",
        within=(0, 1),
    )
    prefetch: str | None = param(
        None,
        "predicted top-score experts, best first (paper: abstract, sections 5.2, 6.3); the predicted top k (section "
        "5.2, to the letter); at most one, after a layer with a miss (code); none",
        ("top_score", "top_k", "one", "none"),
    )
    predictor: str = param(
        "recorded",
        "recorded: what the public code predicts, from the trace (shared_scores); or a labelled stand-in: "
        "surrogate:TOP/ACTIVE, as surrogate:0.82/0.95 (Figure 18): of the experts named the share with a top score "
        "and, of the others, the share that is active",
    )
    seed: int = param(0, "for a stand-in's draws", within=(0, 2**63 - 1))
    prefill_prefetch: int | None = param(
        None,
        "while a prompt is computed, copy the next layer's experts (section 4.1: 1); the code copies at most one "
        "that it predicts, which is left out, since no trace has to hold predictions for prompts: 0",
        within=(0, 1),
    )
    depth: int = param(
        1,
        "speculative copies handed to each GPU's copy engine at once: one loading thread, one copy (sections 4.2, 5.2)",
        within=(1, 64),
    )
    prediction_s: float | None = param(
        None,
        "GPU seconds of a prediction; left out: weights of attention (paper only) and gate at memory bandwidth "
        "(derived)",
        within=(0.0, 1.0),
    )
    evict: str | None = param(
        None,
        "least mean score over the window (section 5.3), oldest load (code as shipped), least recently used (code as "
        "meant), the code's rule with a window (here of iterations, there of tokens)",
        ("score", "fifo", "lru", "score_position"),
    )
    score_window: int = param(16, "iterations n of section 5.3, never given (assumed)", within=(1, 100_000))
    shield: bool = param(True, "what the running layer selected is not evicted (section 5.3)")
    balance: str | None = param(
        None,
        "Algorithm 2 (paper), which always loads one expert; what section 5.4 asks for in words, the least "
        "max(T_load, T_CPU); the code's one pass; or everything loaded, or everything on the CPU (ablations of "
        "Figure 16)",
        ("alg2", "minmax", "code", "load", "cpu"),
    )
    prefill_cpu: int | None = param(
        None, "the balancer also serves prompts (code: 1); the paper loads all they need (0)", within=(0, 1)
    )
    barrier: int | None = param(
        None,
        "1: loaded experts are computed when all loads of the layer are complete, and the host waits for the layer's "
        "end before it prefetches (code); 0: each as it arrives (paper)",
        within=(0, 1),
    )

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        for key, value in DERIVED[self.variant].items():
            if self.settings[key] is None:
                self.settings[key] = value
                setattr(self, key, value)
        if self.prefetch == "none":
            self.needs = frozenset({"experts", "scores"})
        self._stand_in: StandIn | None = None
        if self.predictor != "recorded":
            if not self.predictor.startswith(SURROGATE):
                raise BadInput(f"{self.name}.predictor, got {self.predictor!r}: write {FORMS}")
            if self.prefetch == "top_k":
                raise BadInput(
                    f"{self.name}.prefetch, got top_k with predictor {self.predictor}: Figure 18 is of experts with "
                    "predicted top scores; take prefetch=top_score, or leave the predictor out"
                )
            self._stand_in = StandIn(self.predictor, self.seed)
            self.needs, self.labels = frozenset({"experts", "scores"}), (SURROGATE,)
        self.prefetch_depth = self.depth

    def bind(self, view: View) -> None:
        code = self.variant == "code"
        published = SHIPPED_ALPHA if code else PUBLISHED_ALPHA.get(view.model_name, SHIPPED_ALPHA)
        alpha = self.settings["alpha"] = published if self.alpha is None else float(self.alpha)
        self._by_batch = self._flag("prefer_batch", not code)
        self._prefill_ahead = self._flag("prefill_prefetch", not code) and self.prefetch != "none"
        self._prefill_cpu = self._flag("prefill_cpu", code)
        self._barrier = self._flag("barrier", code)
        if self.prediction_s is None:
            weights = (0 if code else 4 * view.hidden_size) + view.n_experts
            self.settings["prediction_s"] = weights * view.hidden_size * 2 / view.prices.gpu_bytes_per_s
        self._prediction_s = float(self.settings["prediction_s"] or 0.0)
        self._thresholds = Thresholds(alpha, str(self.low_score_rule))
        self._alone = LoneToken(self._thresholds, str(self.low_score_rule), view.top_k)
        self._leaving = Leaving(str(self.evict), self.score_window, view)
        self.order = self._leaving.order if self._leaving.native else None
        self._costs = Costs(view.n_layers)
        self._cpu_s, self._load_s = view.prices.cpu_s(1), view.prices.copy_s()
        self._pieces = [
            [view.piece(layer, expert) for expert in range(view.n_experts)] for layer in range(view.n_layers)
        ]
        self._roles, self._names, self._tokens = self._alone.roles, self._named, self._tokens_of
        self._ahead = self._tokens_ahead
        self._run_gpu = [RunGpu(expert) for expert in range(view.n_experts)]
        self._run_cpu = [RunCpu(expert) for expert in range(view.n_experts)]
        self._fetches = [[Fetch(piece) for piece in pieces] for pieces in self._pieces]
        self._predict = Predict(self._prediction_s, "gpu")
        self._predicted: list[int] = []  # experts foreseen for the layer to come
        self._n = [0] * 7  # `USED` to `ACTIVE`

    def _flag(self, name: str, otherwise: bool) -> bool:
        value = self.settings[name] = int(otherwise) if self.settings[name] is None else self.settings[name]
        return bool(value)

    def initial(self, view: View) -> Iterable[Piece]:
        """The code fills GPU memory in order of layers; the paper keeps "some" experts there (section 4.1)."""
        free = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]
        for layer in range(view.n_layers):
            for expert in range(view.n_experts):
                piece = view.piece(layer, expert)
                if free[piece.gpu]:
                    free[piece.gpu] -= 1
                    self._leaving.loaded(piece)
                    yield piece

    # -- the expert-cache router (section 5.1) ----------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        if gate.phase == PREFILL:  # section 4.1: a prompt is served as routed
            self._predicted = []
            return None
        if gate.iteration.n_tokens == 1:
            top, low, near = gate.by_layer(self._roles, "scores", "ids")
            self._count_right(gate.needs, top)
            if not low or not near or self.low_score_rule == "none":
                return None
            swaps = self._alone.swaps(low, near, self._on_gpu(gate.layer, view))
            return Assignment([[swaps.get(expert, expert) for expert in gate.needs]]) if swaps else None
        tokens = gate.by_layer(self._tokens, "scores", "ids")
        self._count_right(gate.needs, {expert for token in tokens for expert in token.top})
        if self.low_score_rule == "none":
            return None
        on_gpu = self._on_gpu(gate.layer, view)
        routed = route(tokens, str(self.low_score_rule), on_gpu, self.couple, self._by_batch)
        return None if routed == [token.chosen for token in tokens] else Assignment(routed)

    def _on_gpu(self, layer: int, view: View) -> Callable[[int], bool]:
        """Whether an expert of a layer is in GPU memory; what is still under way is not yet, except to the code, which
        books a copy when it is submitted.
        """
        pieces, there = self._pieces[layer], view.holds if self.low_score_rule == "code" else view.arrived
        return lambda expert: there(pieces[expert])

    def _tokens_of(self, scores: NDArray[np.float64], ids: NDArray[np.int64]) -> list[list[Token]]:
        """By layer, what Algorithm 1 knows of each token, of gate scores [n, L, E] and the experts chosen [n, L, K]."""
        return tokens_of(scores, ids, self._thresholds)

    # -- serving a layer (section 4.2, Figure 9) --------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer, needs, leaving = gate.layer, gate.needs, self._leaving
        decodes, is_last = gate.phase != PREFILL, layer + 1 == view.n_layers
        by_use, run_gpu = leaving.by_use, self._run_gpu
        pieces, fetches, spared = self._pieces[layer], self._fetches[layer], leaving.spared
        arrived, holds = view.arrived, view.holds
        here: list[int] = []
        coming: list[int] = []
        missing: list[Missing] = []
        for expert, n_tokens in needs.items():
            piece = pieces[expert]
            if arrived(piece):
                here.append(expert)
            elif holds(piece):
                coming.append(expert)
            else:
                missing.append((expert, n_tokens))
        loads: list[Ticket] = []
        for expert in coming:
            ticket = yield fetches[expert]  # a prefetch under way stays, and goes first
            loads.append(ticket)
        yield DROP_QUEUE  # section 5.2: the real scores are known, the load queue is cleared
        leaving.window.observe(layer, gate.by_layer(counted))  # section 5.3: they enter the window
        if not leaving.native:
            leaving.score_scale = float(gate.score_scale)
        if self.shield:  # section 5.3: what the router selected stays for as long as its layer runs
            spared.shield(layer, needs)
        load, on_cpu = self._share(layer, missing, decodes) if missing else NOBODY
        if decodes:
            n = self._n
            n[USED] += len(needs)
            n[THERE] += len(here) + len(coming)
            n[LOADED] += len(load)
            n[COMPUTED] += len(on_cpu)
        fetched: list[int] = []
        for expert in load:
            if leaving.makes_room(pieces[expert], view):
                loads.append((yield fetches[expert]))
                leaving.loaded(pieces[expert])
                fetched.append(expert)
        ends: list[Ticket] = []
        measures, cpu_s = self.balance == "code", []
        for expert in on_cpu:
            if measures:
                cpu_s.append(view.prices.cpu_s(needs[expert]))
            ends.append((yield self._run_cpu[expert]))
        if measures and missing:
            self._costs.measured(layer, cpu_s, len(load), self._load_s)
        for expert in here:
            if by_use:
                leaving.used(pieces[expert])
            ends.append((yield run_gpu[expert]))
        foreseen: list[int] = []
        after: tuple[Ticket, ...] = ()
        if not is_last and (self._foresees(missing) if decodes else self._prefill_ahead):
            if decodes:
                after = ((yield self._predict),)  # on the GPU, after the hits
                foreseen = self._predicted = self._foreseen(gate)
                if self.prefetch == "one":  # the first one missing
                    following = self._pieces[layer + 1]
                    foreseen = [expert for expert in foreseen if not holds(following[expert])][:1]
            else:  # nearly all experts will be asked for: no prediction
                foreseen = list(range(view.n_experts))
        for expert in coming + fetched:
            if by_use:
                leaving.used(pieces[expert])
            ends.append((yield RunGpu(expert, tuple(loads)) if self._barrier else run_gpu[expert]))
        for expert in load if len(fetched) < len(load) else ():  # too many: each waits until one before it ran
            if expert not in fetched:
                yield fetches[expert]
                leaving.loaded(pieces[expert])
                ends.append((yield run_gpu[expert]))
        if self._barrier:
            yield Wait(tuple(ends))
        if not is_last:
            spared.aim(layer + 1, foreseen)  # prefetches of the layer to come do not push each other out
            pieces = self._pieces[layer + 1]
            wanted = [(pieces[e], -float(at), after) for at, e in enumerate(foreseen) if not holds(pieces[e])]
            yield Requeue(wanted)
        spared.unshield()  # section 5.3: revoked when the layer's computation is complete

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        self._leaving.window.end()

    # -- the CPU-load balancer (section 5.4) ------------------------------------------------------------------------

    def _share(self, layer: int, missing: list[Missing], decodes: bool) -> tuple[list[int], list[int]]:
        """(experts to load, experts for the CPU). Prompts are loaded (section 4.1), except by the code."""
        if self.balance == "load" or not (decodes or self._prefill_cpu):
            return [expert for expert, _ in by_batch(missing)], []
        if self.balance == "cpu":
            return [], [expert for expert, _ in by_batch(missing)]
        if self.balance in SPLITS:
            return SPLITS[str(self.balance)](missing, self._cpu_s, self._load_s)
        return one_pass(missing, *self._costs.of(layer))

    # -- prefetching (section 5.2) ----------------------------------------------------------------------------------

    def _foresees(self, missing: list[Missing]) -> bool:
        """Whether anything may be loaded for the next layer while decoding."""
        return self.prefetch != "none" and (len(missing) > 0 or self.prefetch != "one")

    def _named(self, scores: NDArray[np.float64]) -> list[list[int]]:
        """By layer, what predicted scores [n, L, E] name."""
        if self.prefetch == "one":
            return self._alone.foreseen_as_code(scores)
        return self._alone.foreseen(scores, only_top=self.prefetch != "top_k")

    def _foreseen(self, gate: Gate) -> list[int]:
        """Experts predicted for the next layer, best first."""
        if self._stand_in is None:
            found: list[int] = gate.by_layer(self._names, "shared_scores")
            return found
        tokens = gate.at_once(self._ahead, "scores", "ids")
        if tokens is None:
            raise BadInput(
                f"{self.name}.predictor, got {self.predictor} where a model routes itself: the stand-in looks at the "
                "next gate, which has not spoken; take predictor=recorded"
            )
        return self._stand_in.name(zip(rows_of(gate.iteration), tokens, strict=True), gate.layer + 1)

    def _tokens_ahead(self, scores: NDArray[np.float64], ids: NDArray[np.int64]) -> list[list[Token]]:
        """By layer, the tokens of the layer after it, which only a stand-in may look at."""
        return [*self._tokens_of(scores, ids)[1:], []]

    def placed(self, piece: Piece, view: View) -> None:
        self._leaving.loaded(piece)

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        return self._leaving.victim(piece, speculative, view)

    # -- figures of its own -----------------------------------------------------------------------------------------

    def _count_right(self, needs: Collection[int], tops: Collection[int]) -> None:
        predicted = self._predicted
        if predicted:
            self._predicted = []
            n = self._n
            n[PREDICTED] += len(predicted)
            for expert in predicted:
                if expert in tops:
                    n[TOP] += 1
                if expert in needs:
                    n[ACTIVE] += 1

    def stats(self) -> dict[str, float]:
        """While decoding. cache_ratio: of the experts used after substitution, those in GPU memory or on the way there
        (the paper's GPU cache ratio); of those predicted, top_right_frac had top scores and active_frac were chosen
        (Figure 18: 0.82 and 0.95).
        """
        n = self._n
        used, predicted = max(1, n[USED]), max(1, n[PREDICTED])
        return {
            "cache_ratio": n[THERE] / used,
            "loaded_frac": n[LOADED] / used,
            "on_cpu_frac": n[COMPUTED] / used,
            "predicted": n[PREDICTED],
            "top_right_frac": n[TOP] / predicted,
            "active_frac": n[ACTIVE] / predicted,
        }
