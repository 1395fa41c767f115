"""How long the requests of a public chat log are: quantiles, from which lengths are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
