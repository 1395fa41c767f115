"""Record once, time many: points that differ in hardware alone share one run's decisions, where no price or time had a
part in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.run import Outcome, Recording, execute, record, tellable, timed

if TYPE_CHECKING:
    from sim.setup.setup import Setup

MOST_KEPT = 4
"""Recordings of a process; points of one family follow one another."""

_KEPT: dict[str, Recording | None] = {}  # by family; None: its decisions are not to be told from one run


def family_terms(setup: Setup) -> dict[str, Any] | None:
    """All that decides a run's decisions where prices and times do not; None where they are known to."""
    if not tellable(setup):
        return None
    spec, meant = setup.spec, setup.resolved()
    return {
        "expert_bytes": setup.memory.expert_bytes,
        **{name: meant.get(name) for name in ("version", "policy", "policy_sha256", "params", "scheduler_sha256")},
        **{f"{what}_sha256": meant[f"{what}_sha256"] for what in ("model", "trace")},
        **{name: getattr(spec, name) for name in ("precision", "split", "requests", "seed")},
        **setup.batch_terms,
    }


def outcome_of(setup: Setup, family: str) -> Outcome:
    """The outcome of a point without its bound and its layers, equal to a run of its own; '': it has no family."""
    if not family:
        return execute(setup, bounds=False, by_layer=False)
    if family not in _KEPT:
        outcome, recording = record(setup, by_layer=False)
        while len(_KEPT) >= MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[family] = recording
        return outcome
    recording = _KEPT[family]
    if recording is None:
        return execute(setup, bounds=False, by_layer=False)
    return timed(setup, recording, by_layer=False)
