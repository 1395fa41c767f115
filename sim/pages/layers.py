"""Hits, misses and waits layer by layer, and expert by expert, where the run kept them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.pages.page import Section

if TYPE_CHECKING:
    from sim.pages.inputs import Run


def by_layer(runs: list[Run]) -> list[Section]:
    """Sections; none where no run has such tables."""
    if not any(run.has("layers") for run in runs):
        return []
    raise NotImplementedError
