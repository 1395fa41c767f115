"""At which acceptance drafts break even: where a step with drafts takes as long per token as decoding without any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from sim.base.json import to_json
from sim.base.units import show_seconds
from sim.studies.sweep.summary import settings_of
from sim.workload.draft_options import parse_draft

if TYPE_CHECKING:
    from sim.studies.rows import Row

MOST_SAID = 6
FREE = (
    "n-gram drafts cost nothing here, in time or memory; where a draft takes time, name it with draft_s=SECONDS or "
    "model=NAME"
)


class Measured(msgspec.Struct, frozen=True, order=True):
    """A point of a sweep."""

    acceptance: float
    tpot_s: float


class BreakEven(msgspec.Struct, frozen=True):
    """Points that differ in acceptance alone, the least first, beside the same run without drafts.

    Attributes:
        draft: without its acceptance. acceptance: from which drafts pay, by a straight line between two points; None:
            they do at all points, or at the highest not.
    """

    policy: str
    draft: str
    tpot_without_s: float
    acceptance: float | None
    points: list[Measured]

    @property
    def text(self) -> str:
        """In a sentence."""
        first, last = self.points[0], self.points[-1]
        who = f"{self.draft} with {self.policy}"
        beside = f"{show_seconds(self.tpot_without_s)} per token without drafts"
        if self.acceptance is not None:
            return f"{who}: drafts break even at an acceptance of {self.acceptance:.2f} ({beside})"
        if last.tpot_s >= self.tpot_without_s:
            return f"{who}: drafts do not pay up to an acceptance of {last.acceptance:g} ({beside})"
        return f"{who}: drafts pay from an acceptance of {first.acceptance:g} on, the least that was asked ({beside})"


def break_even(rows: Sequence[Row]) -> list[BreakEven]:
    """One for every policy, setting and kind of draft of which two acceptances, and a run without drafts, are there."""
    without: dict[str, float] = {}
    found: dict[tuple[str, str, str], dict[float, float]] = defaultdict(dict)
    for row in rows:
        if row.result is None or (tpot_s := row.result.tpot_s.mean) is None:
            continue
        alike = to_json({"label": row.label, **settings_of(row), "draft": None})
        draft = None if row.asked.spec.draft is None else parse_draft(row.asked.spec.draft)
        if draft is None:
            without[alike] = tpot_s
        elif len(draft.acceptance) == 1:
            kind = replace(draft, acceptance=()).title
            found[alike, row.label, kind][draft.acceptance[0]] = tpot_s
    return [
        BreakEven(label, kind, without[alike], _crossing(points, without[alike]), points)
        for (alike, label, kind), times in found.items()
        if alike in without and len(points := sorted(Measured(*one) for one in times.items())) > 1
    ]


def _crossing(points: Sequence[Measured], without_s: float) -> float | None:
    """The acceptance from which every higher point is faster than without drafts."""
    if points[-1].tpot_s >= without_s:
        return None
    for slow, quick in reversed(list(pairwise(points))):
        if slow.tpot_s >= without_s > quick.tpot_s:
            share = (slow.tpot_s - without_s) / (slow.tpot_s - quick.tpot_s)
            return slow.acceptance + (quick.acceptance - slow.acceptance) * share
    return None


def said(rows: Sequence[Row]) -> list[str]:
    """What a sweep says of its drafts, a line each."""
    drafts = [parse_draft(row.asked.spec.draft) for row in rows if row.asked.spec.draft is not None]
    lines = [one.text for one in break_even(rows)]
    if len(lines) > MOST_SAID:
        lines = [*lines[:MOST_SAID], f"{len(lines) - MOST_SAID} more break-even points are in --json"]
    if any(draft is not None and draft.draft_s is None and draft.model is None for draft in drafts):
        lines.append(FREE)
    return lines
