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

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from policies._importance_balance import Costs, Missing, by_batch, one_pass, two_pointers
from policies._importance_cache import Residents, ScoreWindow
from policies._importance_router import Thresholds, Token, route
from sim.policy import (
    PREFILL,
    Assignment,
    Decision,
    DropQueue,
    Fetch,
    Gate,
    Param,
    Piece,
    Policy,
    Predict,
    Prefetch,
    Requeue,
    RunCpu,
    RunGpu,
    Steps,
    Ticket,
    View,
    Wait,
)

Foreseen = tuple[list[int], tuple[Ticket, ...]]  # experts of the next layer, best first; what their copies wait for

# Section 6.2, "a ratio of 0.35 in S1, 0.3 in S2, and 0.25 in S3" with Table 1's models; the code ships 0.25 for all.
PUBLISHED_ALPHA = {"deepseek-moe-16b": 0.35, "xverse-moe-a4.2b": 0.30, "qwen2-57b-a14b": 0.25}
SHIPPED_ALPHA = 0.25
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
    params = (
        Param("variant", "paper", "the paper's text, or the public code where they differ", ("paper", "code")),
        Param("alpha", None, "width of the low-score band (section 5.1); published: DeepSeekMoE-16B 0.35, XVERSE 0.30, "
              "Qwen2-57B 0.25 (section 6.2); 0.25 for any other model and in the code", low=0.0, high=1.0),
        Param("low_score_rule", None, "who is replaced: section 5.1 (paper), Algorithm 1, the code's first found "
              "(code), or nobody (the ablation of Figure 16)", ("text", "alg1", "code", "none")),
        Param("couple", True, "the top-score set C is that of the whole batch (section 5.1); false: of each token"),
        Param("prefer_batch", None, "prefer alternatives that more tokens of the batch use, and gather at them what "
              "else would be loaded or left to the CPU (section 5.4: 1); the code has no such rule: 0", low=0, high=1),
        Param("prefetch", None, "predicted top-score experts, best first (paper: abstract, sections 5.2, 6.3); the "
              "predicted top k (section 5.2, to the letter); at most one, after a layer with a miss (code); none",
              ("top_score", "top_k", "one", "none")),
        Param("prefill_prefetch", None, "while a prompt is computed, copy the next layer's experts (section 4.1: 1); "
              "the code predicts while decoding only: 0", low=0, high=1),
        Param("depth", 1, "speculative copies handed to each GPU's copy engine at once: one loading thread, one copy "
              "(sections 4.2, 5.2)", low=1, high=64),
        Param("prediction_s", None, "GPU seconds of a prediction; left out: weights of attention (paper only) and gate "
              "at memory bandwidth (derived)", low=0.0, high=1.0),
        Param("evict", None, "least mean score over the window (section 5.3), oldest load (code as shipped), least "
              "recently used (code as meant), the code's rule with a window",
              ("score", "fifo", "lru", "score_position")),
        Param("score_window", 16, "iterations n of section 5.3, never given (assumed)", low=1, high=100_000),
        Param("shield", True, "what the running layer selected is not evicted (section 5.3)"),
        Param("balance", None, "Algorithm 2 (paper), the code's one pass, or everything loaded, or everything on the "
              "CPU (ablations of Figure 16)", ("alg2", "code", "load", "cpu")),
        Param("prefill_cpu", None, "the balancer also serves prompts (code: 1); the paper loads all they need (0)",
              low=0, high=1),
        Param("barrier", None, "1: loaded experts are computed when all loads of the layer are complete, and the host "
              "waits for the layer's end before it prefetches (code); 0: each as it arrives (paper)", low=0, high=1),
    )  # fmt: skip
    variant: str
    alpha: float | None
    low_score_rule: str | None
    couple: bool
    prefer_batch: int | None
    prefetch: str | None
    prefill_prefetch: int | None
    depth: int
    prediction_s: float | None
    evict: str | None
    score_window: int
    shield: bool
    balance: str | None
    prefill_cpu: int | None
    barrier: int | None

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        for key, value in DERIVED[self.variant].items():
            if self.settings[key] is None:
                self.settings[key] = value
                setattr(self, key, value)
        if self.prefetch == "none":
            self.needs = frozenset({"experts", "scores"})
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
        self._window = ScoreWindow(self.score_window, view.n_layers, view.n_experts)
        self._residents = Residents(str(self.evict), self.shield, self._window, view)
        self._costs = Costs()
        self._tops: set[int] = set()  # top-score experts of the layer being served, over the batch
        self._predicted: list[int] = []  # experts foreseen for the layer to come
        self._n = dict.fromkeys(("used", "there", "predicted", "top", "active", "loaded", "computed"), 0)

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
                    self._residents.add(piece)
                    yield piece

    # -- the expert-cache router (section 5.1) ----------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        self._tops = set()
        if gate.phase == PREFILL:  # section 4.1: a prompt is served as routed
            return None
        scores, ids = gate.scores, gate.ids.tolist()
        tokens = [Token.of(row, chosen) for row, chosen in zip(scores.astype(np.int64).tolist(), ids, strict=True)]
        for token in tokens:
            self._tops.update(self._thresholds.top(token))
        self._count_right(gate)
        if self.low_score_rule == "none":
            return None

        def on_gpu(expert: int) -> bool:  # what is still under way is not in GPU memory yet
            return view.arrived(view.piece(gate.layer, expert))

        rule = str(self.low_score_rule)
        routed = route(tokens, self._thresholds, rule, on_gpu, self.couple, self._by_batch)
        if routed == ids:
            return None
        changed = np.array(routed)
        return Assignment(changed, gate.weights_of(changed))

    # -- serving a layer (section 4.2, Figure 9) --------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        pieces = {expert: view.piece(gate.layer, expert) for expert in gate.needs}
        here = [expert for expert, piece in pieces.items() if view.arrived(piece)]
        coming = [expert for expert, piece in pieces.items() if view.holds(piece) and expert not in here]
        loads: list[Ticket] = []
        for expert in coming:
            ticket = yield Fetch(pieces[expert])  # a prefetch under way stays, and goes first
            loads.append(ticket)
        yield DropQueue()  # section 5.2: the real scores are known, the load queue is cleared
        self._window.observe(gate.layer, gate.scores, gate.score_scale)
        self._residents.shield(pieces.values())
        missing = [(expert, n) for expert, n in gate.needs.items() if expert not in here and expert not in coming]
        load, on_cpu = self._share(missing, gate.phase, view)
        self._count_used(gate, here + coming, load, on_cpu)
        fetched: list[int] = []
        for expert in load:
            if self._has_room(pieces[expert], view):
                loads.append((yield from self._fetch(pieces[expert])))
                fetched.append(expert)
        ends: list[Ticket] = []
        for expert in on_cpu:
            self._costs.ran_on_cpu(view.prices.cpu_s(gate.needs[expert]))
            ends.append((yield RunCpu(expert)))
        for expert in here:
            self._residents.used(pieces[expert])
            ends.append((yield RunGpu(expert)))
        foreseen, after = yield from self._foresee(gate, bool(missing), view)
        for expert in coming + fetched:
            self._residents.used(pieces[expert])
            ends.append((yield RunGpu(expert, tuple(loads) if self._barrier else ())))
        for expert in load:  # more experts than room: each waits until one before it has run
            if expert not in fetched:
                yield from self._fetch(pieces[expert])
                ends.append((yield RunGpu(expert)))
        if self._barrier:
            yield Wait(tuple(ends))
        yield from self._prefetch(gate.layer + 1, foreseen, after, view)

    def layer_done(self, layer: int, view: View) -> None:
        self._residents.shield(())  # section 5.3: revoked when the layer's computation is complete

    def _fetch(self, piece: Piece) -> Generator[Decision, Any, Ticket]:
        ticket: Ticket = yield Fetch(piece)
        self._residents.add(piece)
        return ticket

    def _has_room(self, piece: Piece, view: View) -> bool:
        room = view.free_bytes(piece.gpu) >= piece.n_bytes
        return room or self._residents.victim(piece.gpu, False, view) is not None

    # -- the CPU-load balancer (section 5.4) ------------------------------------------------------------------------

    def _share(self, missing: list[Missing], phase: str, view: View) -> tuple[list[int], list[int]]:
        """(experts to load, experts for the CPU). Prompts are loaded (section 4.1), except by the code."""
        if self.balance == "load" or (phase == PREFILL and not self._prefill_cpu):
            return [expert for expert, _ in by_batch(missing)], []
        if self.balance == "cpu":
            return [], [expert for expert, _ in by_batch(missing)]
        if self.balance == "alg2":
            return two_pointers(missing, view.prices.cpu_s(1), view.prices.copy_s())
        load, on_cpu = one_pass(missing, self._costs.cpu_s, self._costs.load_s)
        for _ in load:
            self._costs.loaded(view.prices.copy_s())
        return load, on_cpu

    # -- prefetching (section 5.2) ----------------------------------------------------------------------------------

    def _foresee(self, gate: Gate, missed: bool, view: View) -> Generator[Decision, Any, Foreseen]:
        """What to load for the next layer; computed on the GPU after the hits."""
        self._predicted = []
        if self.prefetch == "none" or gate.layer + 1 == view.n_layers:
            return [], ()
        if gate.phase == PREFILL:  # nearly all experts will be asked for: no prediction
            return (list(range(view.n_experts)) if self._prefill_ahead else []), ()
        if self.prefetch == "one" and not missed:
            return [], ()
        ticket: Ticket = yield Predict(self._prediction_s, "gpu")
        best: dict[int, int] = {}
        for row in gate.shared_scores.astype(np.int64).tolist():
            token = Token.of(row, sorted(range(len(row)), key=lambda e: (-row[e], e))[: view.top_k])
            chosen = token.chosen if self.prefetch == "top_k" else self._thresholds.top(token)
            for expert in chosen:
                best[expert] = max(best.get(expert, 0), row[expert])
        self._predicted = sorted(best, key=lambda e: (-best[e], e))
        if self.prefetch == "one":  # the first one missing, as a set of small integers yields them
            layer = gate.layer + 1
            return [e for e in sorted(best) if not view.holds(view.piece(layer, e))][:1], (ticket,)
        return self._predicted, (ticket,)

    def _prefetch(self, layer: int, experts: list[int], after: tuple[Ticket, ...], view: View) -> Steps:
        if layer == view.n_layers:
            return
        wanted = [view.piece(layer, expert) for expert in experts]
        self._residents.aimed = set(wanted)
        yield Requeue(tuple(Prefetch(piece, -at, after) for at, piece in enumerate(wanted) if not view.holds(piece)))

    def placed(self, piece: Piece, view: View) -> None:
        self._residents.add(piece)

    def evicted(self, piece: Piece, view: View) -> None:
        self._residents.remove(piece)

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        return self._residents.victim(piece.gpu, speculative, view)

    # -- figures of its own -----------------------------------------------------------------------------------------

    def _count_right(self, gate: Gate) -> None:
        asked = set(gate.needs)
        self._n["predicted"] += len(self._predicted)
        self._n["top"] += len(self._tops.intersection(self._predicted))
        self._n["active"] += len(asked.intersection(self._predicted))
        self._predicted = []

    def _count_used(self, gate: Gate, here: list[int], load: list[int], on_cpu: list[int]) -> None:
        if gate.phase != PREFILL:
            counts = {"used": len(gate.needs), "there": len(here), "loaded": len(load), "computed": len(on_cpu)}
            for name, n in counts.items():
                self._n[name] += n

    def stats(self) -> dict[str, float]:
        """While decoding. cache_ratio: of the experts used after substitution, those in GPU memory or on the way there
        (the paper's GPU cache ratio); of those predicted, top_right_frac had top scores and active_frac were chosen
        (Figure 18: 0.82 and 0.95).
        """
        n = self._n
        return {
            "cache_ratio": n["there"] / n["used"] if n["used"] else 0.0,
            "loaded_frac": n["loaded"] / n["used"] if n["used"] else 0.0,
            "on_cpu_frac": n["computed"] / n["used"] if n["used"] else 0.0,
            "predicted": n["predicted"],
            "top_right_frac": n["top"] / n["predicted"] if n["predicted"] else 0.0,
            "active_frac": n["active"] / n["predicted"] if n["predicted"] else 0.0,
        }
