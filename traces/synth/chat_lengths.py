"""How long the requests of a public chat log are: quantiles, from which lengths are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from sim.base.files import read_yaml, to_struct

PUBLISHED = Path(__file__).with_name("chat_lengths.yaml")


@dataclass(frozen=True)
class ChatLengths:
    """Quantiles of a log; `shares` are the probabilities they belong to."""

    schema: str
    source: str
    licence: str
    rank_correlation: float
    mean_gap_s: float
    shares: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]


def load_lengths(path: Path = PUBLISHED) -> ChatLengths:
    """Read the quantiles. Raises BadInput."""
    return to_struct(read_yaml(path), ChatLengths, str(path))


def write_drawn_log(path: Path, n: int) -> None:
    """So many requests in Azure's format: lengths by straight lines between its quantiles, independent gaps."""
    published, rng = load_lengths(), np.random.default_rng(0)
    at_s = np.cumsum(rng.exponential(published.mean_gap_s, n)).tolist()
    lengths = [
        np.rint(np.interp(rng.random(n), published.shares, tokens)).astype(int).tolist()
        for tokens in (published.prompt_tokens, published.output_tokens)
    ]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for seconds, prompt, outputs in zip(at_s, *lengths, strict=True):
        at = datetime(2023, 11, 16, 18) + timedelta(seconds=seconds)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f},{prompt},{outputs}")
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
