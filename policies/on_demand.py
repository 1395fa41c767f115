"""On-demand loading: copy each selected expert after its gate, compute, forget it (Hugging Face Accelerate).

Source: huggingface/accelerate hooks.py (commit 16cb6eb): a pre-forward hook copies the executed module, a post-forward
hook frees it; no cache, no prefetch. DuoServe (arXiv 2509.07379, section 6.1) calls this baseline ACC; in a looped
MoE only experts that receive tokens run, so only they are copied. Mixtral-Offloading (arXiv 2312.17238) compares with a
naive offloading that moves whole MoE layers: `granularity=layer`. The modules hooked are the single matrices (w1, w3,
w2): `matrices=3`. Weights that Accelerate keeps are pageable, and copies of such are slow: `--set engine.pinned=false`.
eMoE (arXiv 2503.06823, section 2.1.1) measures another "dynamic loading": experts that the router selects are loaded
and stay while their prompt runs, for its memory is that of a prompt's active experts (1.4 and 1.5 times less than all,
67 % and 78 % being active) and its transfers are those of each active expert once: `keep=request`.
"""

from __future__ import annotations

from collections import deque

from sim.policy import Evict, Fetch, Gate, Insertion, Piece, Policy, RequestInfo, RunGpu, Steps, Ticket, View, param


class OnDemand(Policy):
    """No cache: every needed expert is fetched, run and freed, in ascending id as the module loop does."""

    name = "on_demand"
    title = "On-demand loading (Hugging Face Accelerate)"
    source = "huggingface/accelerate@16cb6eb hooks.py; DuoServe-MoE section 6.1 (ACC)"
    aliases = ("accelerate",)
    traits = frozenset({"evicts_eagerly"})
    slots: int = param(
        2,
        "experts whose weights may be on the GPU at once; 1 copies only after the last one ran (Accelerate), 2 "
        "overlaps a copy with the computation before it",
        within=(1, 64),
    )
    granularity: str = param(
        "expert",
        "copy the experts that run, or all of the layer (Mixtral-Offloading's naive baseline)",
        ("expert", "layer"),
    )
    keep: str = param(
        "layer",
        "what was loaded is freed once its layer is over (Accelerate), or once no request runs, the oldest before "
        "that when room is short (eMoE's section 2.1.1); not with granularity or slots",
        ("layer", "request"),
    )
    matrices: int = param(
        1, "copies an expert comes in (Accelerate: its three matrices, each a module)", within=(1, 16)
    )

    def bind(self, view: View) -> None:
        self._n_running = 0
        if self.keep == "request":
            self.order = Insertion()

    def request_start(self, request: RequestInfo, view: View) -> None:
        self._n_running += 1

    def request_end(self, request: RequestInfo, view: View) -> Steps:
        self._n_running -= 1
        yield [Evict(piece) for piece in view.residents() if not self._n_running]

    def _run_kept(self, gate: Gate, view: View) -> Steps:
        """In ascending order, each once it is there; what is missing is loaded for as long as a request runs."""
        for expert in sorted(gate.needs):
            parts = view.matrices(gate.layer, expert, self.matrices)
            yield [Fetch(part) for part in parts if not view.holds(part)]
            yield RunGpu(expert)

    def min_experts(self, view: View) -> int:
        return self.slots

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if self.keep == "request":
            yield from self._run_kept(gate, view)
            return
        held: dict[int, deque[list[Piece]]] = {}  # GPU -> experts on it, oldest first
        ran: dict[int, Ticket] = {}
        for expert in range(view.n_experts) if self.granularity == "layer" else sorted(gate.needs):
            pieces = view.matrices(gate.layer, expert, self.matrices)
            on_gpu = held.setdefault(pieces[0].gpu, deque())
            after: tuple[Ticket, ...] = ()
            if len(on_gpu) == self.slots:  # into the slot of the oldest, whatever room there is besides
                oldest = on_gpu.popleft()
                after = (ran[oldest[0].expert],) if oldest[0].expert in ran else ()
                yield [Evict(piece) for piece in oldest]
            yield [Fetch(piece, after) for piece in pieces]
            if expert in gate.needs:
                ran[expert] = yield RunGpu(expert)
            on_gpu.append(pieces)
        for experts in held.values():
            yield [Evict(piece) for pieces in experts for piece in pieces]
