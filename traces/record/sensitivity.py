"""How much a task minds wrong routing (arXiv 2503.06823, sections 2.2.3 and 3.4), measured on a trained model (torch).

As the paper does: from the first MoE layer on, in one layer more each time, every token goes to experts drawn at
random, and the output is compared with that of the untouched model. The paper compares texts by a BERT model; here it
is the distribution of the next token at every position of recorded requests: the cosine of the two, averaged. Measured
beside it: how often both hold the same token to be the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from sim.base.errors import BadInput
from traces.record.families import moe_layers

if TYPE_CHECKING:
    from traces.format.reader import Trace

Told = Callable[[int, int, float], None]


class RandomRouting:
    """Context manager: the first `n` MoE layers of a model send every token to random experts, weights as they were."""

    def __init__(self, model: Any, n: int, seed: int) -> None:
        self._routers = [layer.router for layer in moe_layers(model, "checkpoint")][:n]
        self._generator = torch.Generator().manual_seed(seed)
        self._handles: list[Any] = []

    def __enter__(self) -> RandomRouting:
        self._handles = [router.register_forward_hook(self._shuffle) for router in self._routers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _shuffle(self, _module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, ids = output
        drawn = torch.rand(logits.shape, generator=self._generator).topk(ids.shape[-1], dim=-1).indices
        return logits, weights, drawn


@torch.no_grad()
def similarity(
    model: Any, trace: Trace, per_task: int, seed: int, told: Told | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(cosine, same likeliest token) with random routing in the first 1 .. L MoE layers, each [tasks, L].

    Args:
        per_task: requests of the store split read per task, prompt and output.

    Raises:
        BadInput: the model is not the one the trace was recorded from, as far as its layers tell.
    """
    n_layers, tasks = len(moe_layers(model, "checkpoint")), trace.header.tasks
    if n_layers != trace.n_layers:
        raise BadInput(f"{trace.path}: {trace.n_layers} MoE layers, the checkpoint has {n_layers}: not the same model")
    cosine, same = np.zeros((len(tasks), n_layers)), np.zeros((len(tasks), n_layers))
    store = [request for request in trace.requests if request.split == "store"]
    for at, task in enumerate(tasks):
        rows = [(r.first_row, r.first_row + r.prompt_len + r.outputs - 1) for r in store if r.task == task][:per_task]
        texts = [torch.from_numpy(np.array(trace.token_ids[a:b], dtype=np.int64))[None] for a, b in rows]
        whole = [model(input_ids=text, use_cache=False).logits.softmax(-1) for text in texts]
        for n in range(1, n_layers + 1):
            with RandomRouting(model, n, seed):
                other = [model(input_ids=text, use_cache=False).logits.softmax(-1) for text in texts]
            cosine[at, n - 1], same[at, n - 1] = compared(whole, other)
            if told is not None:
                told(at * n_layers + n, len(tasks) * n_layers, float(cosine[at, n - 1]))
    return cosine, same


def compared(whole: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
    """Mean cosine of distributions [1, n, vocabulary], and share of positions whose likeliest token is the same."""
    pairs = list(zip(whole, other, strict=True))
    cosine = torch.cat([functional.cosine_similarity(a, b, dim=-1)[0] for a, b in pairs])
    same = torch.cat([(a.argmax(-1) == b.argmax(-1))[0].float() for a, b in pairs])
    return float(cosine.mean()), float(same.mean())
