"""A finished run as one value, and how a run tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.report import Report
    from sim.engine.run_loop import Step
    from sim.results.record import Result
    from sim.setup.setup import Setup

Progress = Callable[[int, int], None]
"""Told of the tokens that have been put out, and of all."""


class Outcome(msgspec.Struct, frozen=True):
    """A finished run: its record, and the report that this was folded from."""

    result: Result
    report: Report
    setup: Setup


class Watched(NamedTuple):
    """Who is told what of one replica; the arguments of `execute`."""

    spans: Any = None
    log: Any = None
    on_step: Callable[[Step], None] | None = None
    begun: Callable[[Engine], None] | None = None
