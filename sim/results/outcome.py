"""A finished run as one value, and how a run tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from sim.engine.report import Report
    from sim.results.record import Result
    from sim.setup.setup import Setup

Progress = Callable[[int, int], None]
"""Told of the tokens that have been put out, and of all."""


class Outcome(msgspec.Struct, frozen=True):
    """A finished run: its record, and the report that this was folded from."""

    result: Result
    report: Report
    setup: Setup
