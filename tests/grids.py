"""Grids of which a few cases run each time, all others with the thorough tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

MANY_KINDS = (
    "belady",
    "duoserve",
    "expertflow",
    "fiddler",
    "fine_moe",
    "freetoken",
    "hybrimoe",
    "lru",
    "mixtral_offloading",
    "moepic",
    "promoe",
)
"""Policies that differ in what they ask of an engine: prefetches, orders, parts of experts, the CPU, write-backs."""


def few_each_time(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """All cases as parameters; those that are not among `few` are thorough."""
    found = list(cases)
    assert all(one in found for one in few), [one for one in few if one not in found]
    return [case if case in few else pytest.param(case, marks=pytest.mark.thorough) for case in found]
