"""Counts of experts without routes: what an importance matrix tells, good for placing experts once and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import yaml
from msgspec import Meta

from sim.base.errors import BadInput
from sim.base.files import read_yaml, replacing, to_struct
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, Floats
from traces.stats.figures import normalised_entropy
from traces.stats.summary import Summary

SCHEMA: Literal["moesim.expert-counts/1"] = "moesim.expert-counts/1"
WHAT_FOR = (
    "counts of experts, no routes: they say what a placement fixed in advance would serve, and nothing of caches, "
    "prefetching or time; `moesim traces stats FILE` shows it, static_cache takes it as profile, a run "
    "needs a trace"
)
MAX_COUNT = 2**53  # whole in any float
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Row = Annotated[list[Count], Meta(min_length=2, max_length=MAX_EXPERTS)]


class ExpertCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens by layer and expert. layers: their numbers in the source. tokens: how many were read, where it is told."""

    schema: Literal["moesim.expert-counts/1"]
    model: str
    source: str
    tokens: int | None
    layers: Annotated[list[int], Meta(min_length=1, max_length=MAX_LAYERS)]
    counts: Annotated[list[Row], Meta(min_length=1, max_length=MAX_LAYERS)]

    def summary(self, name: str) -> Summary:
        """What can be said of it, as of a trace: means over layers."""
        counts = np.array(self.counts, np.int64)
        n_layers, n_experts = counts.shape
        total = counts.sum(axis=1)
        rows = self.tokens or 0
        top_k = round(float(total.mean()) / rows) if rows else 0
        figures: dict[str, float | None] = {
            "popularity_entropy": _mean(normalised_entropy(counts)),
            "top_quarter": _served(counts, 0.25),
        }
        figures |= {f"static_{100 * frac:g}": _served(counts, frac) for frac in (0.25, 0.5, 0.75)}
        shape = f"{n_layers}x{n_experts}" + (f", k={top_k}" if top_k else "")
        return Summary(name, shape, rows, 0, 0, "none: counts only", figures)


def load(path: Path) -> ExpertCounts:
    """A file that `moesim traces convert` wrote from an importance matrix. Raises BadInput."""
    found = to_struct(read_yaml(path), ExpertCounts, str(path))
    if len(found.layers) != len(found.counts) or len({len(row) for row in found.counts}) != 1:
        raise BadInput(f"{path}: counts, got other layers or experts than it says; convert the file again")
    if not all(any(row) for row in found.counts):
        raise BadInput(f"{path}: counts, got a layer that no token used; convert the file again")
    return found


def save(path: Path, found: ExpertCounts) -> None:
    """Write it as YAML, a layer a line."""
    facts = {"schema": SCHEMA, "model": found.model, "source": found.source, "tokens": found.tokens}
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    text += f"layers: {found.layers}\ncounts:\n" + "".join(f"- {row}\n" for row in found.counts)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def is_one(path: Path) -> bool:
    """Whether a file begins as one of these; a pipe, which may never say anything, is none."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(64).startswith(f"schema: {SCHEMA}".encode())
    except (OSError, ValueError):
        return False


def _served(counts: np.ndarray, frac: float) -> float:
    """Share of a layer's choices that go to its most used experts, a fraction of all."""
    n = max(1, round(frac * counts.shape[1]))
    return _mean(np.sort(counts, axis=1)[:, -n:].sum(axis=1) / counts.sum(axis=1))


def _mean(values: Floats) -> float:
    return float(np.mean(values))
