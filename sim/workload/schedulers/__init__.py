"""Schedulers, found by the name of their file: a newcomer is one file here, with one class of that name; or one of the
user's own (`--scheduler ./mine.py`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.base.errors import BadInput, did_you_mean
from sim.base.plug_ins import Sort, find_in, is_file, names_in

if TYPE_CHECKING:
    from sim.workload.scheduler import Scheduler

DEFAULT = "fcfs"
NO_SCHEDULER = (
    "a scheduler is a class derived from sim.workload.scheduler.Scheduler with a `name`; see docs/schedulers.md"
)


def _base() -> type[Scheduler]:
    from sim.workload.scheduler import Scheduler

    return Scheduler


SORT = Sort("scheduler", "schedulers", NO_SCHEDULER, _base)


def schedulers() -> tuple[str, ...]:
    """Names of those that are installed, without importing any."""
    return names_in(__name__)


def find(name: str) -> type[Scheduler]:
    """The scheduler of that name, or of a file (`./mine.py:Class`). Raises BadInput where there is none to use."""
    kind: type[Scheduler] = find_in(__name__, name, SORT)
    return checked(kind, name) if is_file(name) else kind


def checked(kind: type[Scheduler], name: str) -> type[Scheduler]:
    """The same, where what it declares is what there is to declare. Raises BadInput."""
    from sim.workload.known_requests import NEEDS
    from sim.workload.scheduler import Scheduler

    if kind.pick is Scheduler.pick:
        raise BadInput(f"scheduler, got {name!r} without pick: it says who goes next; see docs/schedulers.md")
    takes_s = kind.sharing_out_s
    if isinstance(takes_s, bool) or not isinstance(takes_s, int | float) or not 0.0 <= takes_s < math.inf:
        raise BadInput(f"scheduler, got {name!r} with sharing_out_s {takes_s!r}: seconds from 0 on; correct the file")
    if not isinstance(kind.needs, tuple) or not all(isinstance(need, str) for need in kind.needs):
        raise BadInput(f"scheduler, got {name!r} with needs {kind.needs!r}: names in a tuple; of {', '.join(NEEDS)}")
    for need in kind.needs:
        if need not in NEEDS:
            raise BadInput(f"scheduler, got {name!r} with need {need!r}: no such need; {did_you_mean(need, NEEDS)}")
    if not isinstance(kind.name, str):
        raise BadInput(f"scheduler, got {name!r} with name {kind.name!r}: a word; correct the file")
    return kind
