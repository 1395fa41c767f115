"""Run requests through a model, batch by batch, and hand out the rows of each forward as they come.

Prompts of different lengths are padded on the left, masked, and the padded rows are dropped. A request that has ended
keeps its place in the batch until the longest one ends; those rows are dropped, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from traces.record.probe import RoutingProbe, Rows
from traces.record.prompts import Prompt

# A prefill is cut so that the float32 scores of one forward stay within this; at least 16 tokens at a time.
FORWARD_BYTES = 128 * 1024 * 1024
MAX_PREFILL_TOKENS, MIN_PREFILL_TOKENS = 1024, 16
SCORED_LEVELS = 5  # scores, three distances, shared_scores


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 takes the likeliest token; `end_ids` end a request, or are never drawn where lengths are fixed."""

    temperature: float
    seed: int
    end_ids: tuple[int, ...] = ()


class _Slot:
    """One request inside a batch: its tokens, its generator, and whether it still produces."""

    def __init__(self, prompt: Prompt, index: int, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling
        # A generator per request: what is drawn depends neither on the batch nor on where a recording was resumed.
        seed = int(np.random.SeedSequence([sampling.seed, index]).generate_state(1)[0])
        self.rng = torch.Generator().manual_seed(seed)
        self.n_outputs = 0
        self.alive = True
        self.token = 0

    def next_token(self, logits: torch.Tensor) -> None:
        """Choose the next token from logits [V] on the CPU; afterwards `alive` says whether it has to be processed."""
        if not self.alive:
            return
        ends = list(self.sampling.end_ids)
        logits = logits.float()
        if self.prompt.fixed_length and ends:
            logits = logits.index_fill(0, torch.tensor(ends), -torch.inf)
        if self.sampling.temperature == 0:
            self.token = int(logits.argmax())
        else:
            shares = (logits / self.sampling.temperature).softmax(dim=-1)
            self.token = int(torch.multinomial(shares, 1, generator=self.rng))
        self.n_outputs += 1
        ended = not self.prompt.fixed_length and self.token in ends
        self.alive = not ended and self.n_outputs < self.prompt.max_outputs


def prefill_tokens(batch: int, n_layers: int, n_experts: int) -> int:
    """Tokens per sequence and forward in a prefill."""
    row_bytes = SCORED_LEVELS * n_layers * n_experts * 4
    return max(MIN_PREFILL_TOKENS, min(MAX_PREFILL_TOKENS, FORWARD_BYTES // (row_bytes * batch)))


@torch.inference_mode()
def run_batch(
    model: Any,
    probe: RoutingProbe,
    prompts: Sequence[Prompt],
    first: int,
    sampling: Sampling,
    max_forward_tokens: int = MAX_PREFILL_TOKENS,
) -> Iterator[tuple[int, Rows]]:
    """Generate for all prompts side by side; yields (position in `prompts`, rows), prompt rows first, then one by one.

    `first` is the number of the first request, from which the seeds follow. The probe must be attached.
    """
    device = model.get_input_embeddings().weight.device
    slots = [_Slot(prompt, first + i, sampling) for i, prompt in enumerate(prompts)]
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
    width = int(lengths.max())
    padded = bool((lengths < width).any())
    ids = torch.stack(
        [torch.tensor([0] * (width - len(prompt.token_ids)) + list(prompt.token_ids)) for prompt in prompts]
    )
    starts = width - lengths  # first position of each sequence that is not padding
    cache = None
    for a in range(0, width, max_forward_tokens):
        b = min(width, a + max_forward_tokens)
        logits, cache = _forward(model, ids[:, a:b], starts if padded else None, a, cache, device)
        yield from _split(probe.take(), ids[:, a:b], [max(0, int(start) - a) for start in starts])
    position = width
    while True:
        for slot, own in zip(slots, logits, strict=True):
            slot.next_token(own)
        if not any(slot.alive for slot in slots):
            return
        ids = torch.tensor([[slot.token] for slot in slots])
        logits, cache = _forward(model, ids, starts if padded else None, position, cache, device)
        yield from _split(probe.take(), ids, [0 if slot.alive else 1 for slot in slots])
        position += 1


def _forward(
    model: Any, ids: torch.Tensor, starts: torch.Tensor | None, at: int, cache: Any, device: torch.device
) -> tuple[torch.Tensor, Any]:
    """Last logits [B, V] on the CPU and the cache, after the tokens [B, S] at positions `at` and on."""
    padding = {}
    if starts is not None:
        end = at + ids.shape[1]
        padding = {
            "attention_mask": (torch.arange(end) >= starts[:, None]).long().to(device),
            "position_ids": (torch.arange(at, end) - starts[:, None]).clamp(min=0).to(device),
        }
    out = model(input_ids=ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1, **padding)
    return out.logits[:, -1].cpu(), out.past_key_values


def _split(rows: Rows, ids: torch.Tensor, skip: Sequence[int]) -> Iterator[tuple[int, Rows]]:
    """Cut the rows of one forward of tokens [B, S] by sequence, leaving out the first `skip` of each."""
    n_tokens = ids.shape[1]
    rows = {**rows, "token_ids": ids.reshape(-1).numpy()}
    for i, n_skipped in enumerate(skip):
        if n_skipped < n_tokens:
            own = slice(i * n_tokens + n_skipped, (i + 1) * n_tokens)
            # Copied: a view would keep the rows of the whole batch alive.
            yield i, {name: values[own].copy() for name, values in rows.items()}
