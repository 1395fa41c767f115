"""One row of a comparison, and what ranks it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """A run of the comparison: what the user called it, and its result."""

    label: str
    result: dict[str, Any]


def speed(result: dict[str, Any]) -> float:
    """What is ranked, in seconds: time per output token, or to the first where there is but one."""
    tpot_s = result["tpot_s"]["mean"]
    return float(tpot_s if tpot_s is not None else result["ttft_s"]["mean"])
