"""What `moesim record` is asked to record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from traces.record.load import Source


@dataclass(frozen=True, slots=True)
class Settings:
    """What to record. Defaults are those of the command line, which explains them."""

    source: Source
    out: Path
    prompts: Path | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    n_requests: int | None = None
    max_new_tokens: int = 128
    max_prompt_tokens: int | None = None
    chat: bool = False
    batch: int = 1
    device: str | None = None
    dtype: str = "auto"
    temperature: float = 1.0
    seed: int = 0
    store_frac: float = 0.7
    hidden: bool = False
    compact: bool = False
    embedding_width: int | None = None  # None: as wide as the model; 0: not recorded
    name: str = ""
    text_licence: str = ""
