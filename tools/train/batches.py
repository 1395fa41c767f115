"""Draw training windows from token files that live whole on the training device, and cut held-out windows."""

from __future__ import annotations

import numpy as np
import torch

from tools.train.tokens import Tokens


class WindowSampler:
    """Random windows of `length + 1` tokens from the tasks' token streams.

    A task's share of the batches is the square root of its share of the tokens: small tasks are seen more often than
    their size says, yet not so often that they are learnt by heart.
    """

    def __init__(self, tokens: dict[str, Tokens], length: int, seed: int, device: str) -> None:
        self.length = length
        sizes = np.array([len(ids) for ids in tokens.values()], np.int64)
        self.sizes = torch.from_numpy(sizes)
        self.starts = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)[:-1]]))
        self.share = torch.from_numpy(np.sqrt(sizes / sizes.sum()))
        joined = np.concatenate(list(tokens.values())).astype(np.int32)
        self.data = torch.from_numpy(joined).to(device)
        self.generator = torch.Generator().manual_seed(seed)  # on the CPU: the same windows on every device

    def draw(self, windows: int, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, next ids), both [windows, length] int64; another length than usual may be asked for."""
        length = length or self.length
        task = torch.multinomial(self.share, windows, replacement=True, generator=self.generator)
        usable = (self.sizes - length)[task]
        offset = (torch.rand(windows, generator=self.generator, dtype=torch.float64) * usable).long()
        start = (self.starts[task] + offset).to(self.data.device, non_blocking=True)
        block = self.data[start[:, None] + torch.arange(length + 1, device=self.data.device)].long()
        return block[:, :-1], block[:, 1:]


def heldout_windows(ids: Tokens, length: int, limit: int) -> torch.Tensor:
    """Consecutive windows [n, length + 1] from the start of a token stream, at most `limit` predicted tokens."""
    count = min((len(ids) - 1) // length, max(1, limit // length))
    rows = [ids[i * length : i * length + length + 1] for i in range(count)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
