"""Grids of which a few cases run each time, all others with the thorough tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_each_time(cases: Iterable[str], few: Collection[str]) -> list[Any]:
    """All cases as parameters; those that are not among `few` are thorough."""
    found = list(cases)
    assert set(few) <= set(found), sorted(set(few) - set(found))
    return [case if case in few else pytest.param(case, marks=pytest.mark.thorough) for case in found]
