"""Record once, time many: points that differ in hardware alone share one run's decisions, where no price or time had a
part in them.

`family_terms` and `Families` decide who may share, and who goes first; `outcome_of` uses what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.run import Outcome, Recording, execute, record, tellable, timed
from sim.studies.runner.pool import Awaited

if TYPE_CHECKING:
    from sim.setup.setup import Setup
    from sim.studies.runner.work import Resolved

MOST_KEPT = 4
"""Recordings of a process; points of one family follow one another."""

_KEPT: dict[str, Recording | None] = {}  # by family; None: its decisions are not to be told from one run


def family_terms(setup: Setup) -> dict[str, Any] | None:
    """All that decides a run's decisions where prices and times do not; None where they are known to."""
    if not tellable(setup) or setup.leaves_unread:
        return None
    spec, meant = setup.spec, setup.resolved()
    return {
        "expert_bytes": setup.memory.expert_bytes,
        **{
            name: meant.get(name)
            for name in ("version", "policy", "policy_sha256", "params", "drawn", "scheduler_sha256")
        },
        **{f"{what}_sha256": meant[f"{what}_sha256"] for what in ("model", "trace")},
        **{name: getattr(spec, name) for name in ("precision", "split", "requests", "seed")},
        **setup.batch_terms,
    }


class Answer(NamedTuple):
    """What a worker answers of one call.

    Attributes:
        point, bound: records, None where it was not asked for one. by_recording: another's decisions timed the point.
        recorded: what other workers need of its decisions (`told`), where they asked; else None. wall_s: of the point.
    """

    point: dict[str, Any] | None
    bound: dict[str, Any] | None = None
    by_recording: bool = False
    recorded: bytes | None = None
    wall_s: float = 0.0


RECORDED = Answer._fields.index("recorded")


class Family(NamedTuple):
    """Points that one run's decisions may time.

    Attributes:
        id: of them. shared: workers are told what the first one finds out (`recorded`), else each finds out by itself.
    """

    id: str = ""
    shared: bool = False


NO_FAMILY = Family()


class Families:
    """Points by what their decisions rest on: the first of each family is run, and tells the others.

    Args:
        shared: it tells other processes, too. alone: of a family of which only one is here others may follow later.
    """

    def __init__(self, rows: Sequence[Resolved], shared: bool, alone: bool = False) -> None:
        self._rows: dict[str, list[Resolved]] = {}
        for row in rows:
            self._rows.setdefault(row.family or row.id, []).append(row)
        self._shared, self._alone = shared, alone
        self._first: dict[str, int] = {}  # family -> the call of its first point

    def in_turn(self) -> list[Resolved]:
        """All of them, those of a family one after the other, while their recording is at hand."""
        return [row for some in self._rows.values() for row in some]

    def of(self, row: Resolved, index: int) -> tuple[Family, Awaited | None]:
        """The family of the call of that index, and what it waits for. Points come as `in_turn` has them."""
        several = len(self._rows[row.family or row.id]) > 1
        family = row.family if several or self._alone else ""
        first = self._first.setdefault(family, index) if family else index
        recorded = Awaited(first, RECORDED) if self._shared and first != index else None
        return Family(family, several and self._shared), recorded


class Timed(NamedTuple):
    """A finished run, and whether another's decisions timed it."""

    outcome: Outcome
    by_recording: bool


def outcome_of(setup: Setup, family: str, recorded: bytes | None = None, by_layer: bool = False) -> Timed:
    """The outcome of a point without its bound, equal to a run of its own.

    Args:
        family: of points that may be timed by one another's decisions; '': it has none.
        recorded: what `told` says of it in another process; None: nothing, so this one finds out for itself.
    """
    if family and family not in _KEPT and recorded is None:
        outcome, recording = record(setup, by_layer)
        _keep(family, recording)
        return Timed(outcome, False)
    if family and family not in _KEPT:
        _keep(family, _read(setup, recorded) if recorded else None)
    recording = _KEPT[family] if family else None
    if recording is None:
        return Timed(execute(setup, bounds=False, by_layer=by_layer), False)
    return Timed(timed(setup, recording, by_layer), True)


def told(family: str) -> bytes | None:
    """What this process knows of a family, for others; empty: its points have to decide for themselves; None: nothing
    yet."""
    if family not in _KEPT:
        return None
    recording = _KEPT[family]
    return b"" if recording is None else recording.to_bytes()


def _keep(family: str, recording: Recording | None) -> None:
    while len(_KEPT) >= MOST_KEPT:
        del _KEPT[next(iter(_KEPT))]
    _KEPT[family] = recording


def _read(setup: Setup, recorded: bytes) -> Recording:
    shape = setup.model.n_moe_layers, setup.model.n_experts
    return Recording.from_bytes(recorded, setup.trace, setup.requests, setup.pieces, shape)
