"""Figures of routing traces of large models that others published: the figures only, with their sources.

The traces themselves are not part of this project. Each entry of `public_stats.json` is what `moesim traces stats
--json` prints for a trace that `moesim traces convert` made of the published files; a test recomputes them where it has
the files.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta

from traces.stats.summary import Summary

Figure = Annotated[float, Meta(ge=0, le=1)]


class PublicTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one published trace; `files` is what was converted, `figures` as in `summary.Summary`."""

    name: str
    model: str
    files: str
    source: str
    licence: str
    shape: str
    rows: int
    requests: int
    curve_rows: int
    curve_phase: str
    figures: dict[str, Figure | None]

    def summary(self) -> Summary:
        """The same as a summary."""
        return Summary(self.name, self.shape, self.rows, self.requests, self.curve_rows, self.curve_phase, self.figures)


def public_traces() -> list[PublicTrace]:
    """All published traces whose figures are known, by name."""
    text = resources.files("traces").joinpath("stats", "public_stats.json").read_text(encoding="utf-8")
    return msgspec.convert(json.loads(text)["traces"], list[PublicTrace])
