"""The training split: what a policy may learn from before anything is scored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import BadInput
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.levels import require_declared

if TYPE_CHECKING:
    from traces.format.blocks import Column
    from traces.format.layout import Array, Floats
    from traces.format.reader import Trace
    from traces.format.requests import RequestTable


STORED = "store"  # as files call the split that a policy learns from
MAKE_ONE = "make one with --train-frac 0.7 (`moesim traces convert`, `moesim record`)"


def no_store(trace: Trace | TrainingTrace, who: str, rest: str = "") -> BadInput:
    """The refusal of a trace whose requests are all scored.

    Args:
        who: who learns what there. rest: another way out, after a comma.
    """
    return BadInput(
        f"{trace.path}: split 'store' has no requests: {who}; take a trace with a training split, {MAKE_ONE}{rest}"
    )


class TrainingTrace:
    """Rows of the trace that a policy learns from, of the levels that its `needs` declare; others raise
    IllegalDecision.

    Slices [a, b) are rows, 0 <= a <= b <= n_tokens: n tokens, L MoE layers, E experts, K experts per token.

    Attributes:
        n_tokens, n_layers, n_experts, top_k: its shape. score_scale: what a score is a multiple of.
        levels, levels_prefill: those that are there and declared; of prompts, too. header: model, gate and tasks as
            FORMAT.md has them. path: its file.
        requests: its table of requests, all splits.
    """

    def __init__(self, trace: Trace, needs: Collection[str]) -> None:
        self._trace = trace
        self._needs = needs
        self.n_tokens, self.n_layers, self.top_k = trace.n_tokens, trace.n_layers, trace.top_k
        self.n_experts = trace.n_experts
        self.score_scale = trace.score_scale
        self.levels = trace.levels & frozenset(needs)
        self.levels_prefill = trace.levels_prefill & frozenset(needs)
        self.header = trace.header
        self.path = trace.path
        self.requests = trace.requests

    @property
    def sha256(self) -> str:
        """Digest of the trace, as a file made for it holds it."""
        return self._trace.sha256

    @property
    def drawn_by(self) -> tuple[str, int] | tuple[()]:
        """What drew the levels that were not recorded, and its seed; () where all that is declared was recorded."""
        return self._trace.drawn_by if self._trace.drawn & self.levels else ()

    def _of(self, level: str) -> Trace:
        require_declared(level, self._needs)
        return self._trace

    @property
    def experts(self) -> Array | Column:
        """Expert ids [n_tokens, L, K], heaviest first, to be sliced by rows."""
        return self._trace.experts

    @property
    def token_ids(self) -> Array | Column:
        """Token ids [n_tokens], to be sliced by rows."""
        return self._of("token_ids").token_ids

    def weights(self, a: int, b: int) -> Floats:
        """Weights of the chosen experts [n, L, K] as the model applies them."""
        return self._of("weights").weights(a, b)

    def scores(self, a: int, b: int) -> Floats:
        """Gate scores of all experts [n, L, E], exact integers; divide by `score_scale` for probabilities."""
        return self._of("scores").scores(a, b)

    def next_scores(self, distance: int, a: int, b: int) -> Floats:
        """Scores of layer l + distance predicted at layer l [n, L, E]; zeros where that layer is not there."""
        return self._of(f"next_scores_{distance}").next_scores(distance, a, b)

    def shared_scores(self, a: int, b: int) -> Floats:
        """Scores of layer l + 1's gate on MoE input + shared expert + residual [n, L, E]."""
        return self._of("shared_scores").shared_scores(a, b)

    def embeddings(self, a: int, b: int) -> NDArray[np.float32]:
        """What the embedding layer put out [n, h]."""
        return self._of("embeddings").embeddings(a, b)

    def gate_inputs(self, a: int, b: int) -> NDArray[np.float32]:
        """Input of each gate [n, L, g]."""
        return self._of("gate_inputs").gate_inputs(a, b)

    def gate_input_norms(self, a: int, b: int) -> NDArray[np.float32]:
        """Euclidean norm of each gate's input [n, L]."""
        return self._of("gate_input_norms").gate_input_norms(a, b)


class StoreSplit:
    """Requests set aside for learning, with their trace rows; empty, and false, when the trace has none.

    Attributes:
        requests: RequestInfo of each, in trace order. trace: its rows, as TrainingTrace.
    """

    def __init__(self, trace: Trace | TrainingTrace, requests: Sequence[RequestInfo]) -> None:
        self.trace = trace
        self.requests = list(requests)

    def __bool__(self) -> bool:
        return bool(self.requests)

    def iterations(self) -> Iterator[Range]:
        """Every iteration the requests would run one at a time: a prefill, then one decode token each."""
        for request in self.requests:
            prompt_end = request.first_row + request.prompt_len
            yield Range(request, request.first_row, prompt_end, PREFILL, 0)
            for done in range(request.outputs - 1):
                yield Range(request, prompt_end + done, prompt_end + done + 1, DECODE, request.prompt_len + done)


def requests_of(trace: Trace, split: str) -> list[RequestInfo]:
    """Requests of one split ("train", "test") or of both ("all"), in trace order."""
    return list(_requests_of(trace.requests, split))


@lru_cache(maxsize=8)
def _requests_of(table: RequestTable, split: str) -> tuple[RequestInfo, ...]:
    """Kept, since the points of a sweep ask for the same."""
    found = table if split == "all" else table.in_split(STORED if split == "train" else split)
    return tuple(RequestInfo(r.index, r.first_row, r.prompt_len, r.outputs, r.task, r.arrival_s) for r in found)
