"""At which acceptance drafts break even: where a step with drafts takes as long per token as decoding without any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

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


class BreakEven(NamedTuple):
    """Points that differ in acceptance alone, beside the same run without drafts.

    Attributes:
        label: the policy. draft: without its acceptance. without_s: TPOT without drafts.
        measured: (acceptance, TPOT in s) of each point, the least acceptance first.
        acceptance: from which drafts pay, by a straight line between two points; None: they do at all points, or at the
            highest not.
    """

    label: str
    draft: str
    without_s: float
    measured: tuple[tuple[float, float], ...]
    acceptance: float | None

    @property
    def text(self) -> str:
        """In a sentence."""
        (low, _), *_, (high, last_s) = self.measured
        who = f"{self.draft} with {self.label}"
        beside = f"{show_seconds(self.without_s)} per token without drafts"
        if self.acceptance is not None:
            return f"{who}: drafts break even at an acceptance of {self.acceptance:.2f} ({beside})"
        if last_s >= self.without_s:
            return f"{who}: drafts do not pay up to an acceptance of {high:g} ({beside})"
        return f"{who}: drafts pay from an acceptance of {low:g} on, the least that was asked ({beside})"


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
        BreakEven(label, kind, without[alike], measured, _crossing(measured, without[alike]))
        for (alike, label, kind), times in found.items()
        if alike in without and len(measured := tuple(sorted(times.items()))) > 1
    ]


def _crossing(measured: Sequence[tuple[float, float]], without_s: float) -> float | None:
    """The acceptance from which every higher point is faster than without drafts."""
    if measured[-1][1] >= without_s:
        return None
    for (low, slow_s), (high, quick_s) in reversed(list(pairwise(measured))):
        if slow_s >= without_s > quick_s:
            return low + (high - low) * (slow_s - without_s) / (slow_s - quick_s)
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


def facts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The same as data."""
    return [
        {
            "policy": one.label,
            "draft": one.draft,
            "tpot_without_s": one.without_s,
            "acceptance": one.acceptance,
            "points": [{"acceptance": share, "tpot_s": tpot_s} for share, tpot_s in one.measured],
        }
        for one in break_even(rows)
    ]
