"""Measured curves of single operations: used instead of rooflines where a profile has them for this very geometry."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated

import msgspec

from sim.base.errors import BadInput
from sim.base.quantities import Quantity

Rising = Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]

AGAINST = {
    "attention": "tokens of a prompt",
    "attention_decode": "positions attended to",
    "gate": "tokens",
    "expert": "tokens",
    "shared_expert": "tokens",
    "head": "requests",
    "dense_layer": "tokens",
    "cpu_expert": "tokens",
    "unpack": "bits of an expert's values",
}
"""Operations that a profile may have a curve of, and what each is measured against."""


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one operation: median, interquartile range and number of samples at each abscissa, rising."""

    at: Rising
    seconds: tuple[float, ...]
    iqr_s: tuple[float, ...]
    n: tuple[int, ...]

    def value(self, x: float) -> float:
        """Linear between points; beyond the last one along the last stretch, before the first one its own value."""
        at, seconds = self.at, self.seconds
        if x <= at[0] or len(at) == 1:
            return seconds[0] if x <= at[0] else seconds[0] * x / at[0]
        right = min(bisect_left(at, x), len(at) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (at[right] - at[left])
        if x > at[-1]:
            return seconds[-1] + max(slope, 0.0) * (x - at[-1])
        return seconds[left] + slope * (x - at[left])

    def covers(self, x: float) -> bool:
        """True inside the measured range."""
        return self.at[0] <= x <= self.at[-1]

    def figure(self) -> Quantity:
        """The curve as one figure for provenance: its value and relative spread, at the point measured most often."""
        best = max(range(len(self.n)), key=lambda i: (self.n[i], -i))
        return Quantity(value=self.seconds[best], source="measured", iqr=self.iqr_s[best], n=sum(self.n))


class Curves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one model's operations took on the real machine's own lanes, and what launching each cost the host."""

    model: str
    precision: str
    operations: dict[str, Curve]
    launches: dict[str, Quantity] = {}
    policy_slowdown: Quantity | None = None  # extra time of policy code beside the lanes' threads: a share of its own

    def check(self, where: str) -> None:
        """Raises BadInput naming the curve that is not one."""
        for name, curve in self.operations.items():
            columns = (curve.seconds, curve.iqr_s, curve.n)
            rising = all(a < b for a, b in zip(curve.at, curve.at[1:], strict=False))
            if (
                name not in AGAINST
                or any(len(column) != len(curve.at) for column in columns)
                or not rising
                or not all(0 < s < 3600 for s in curve.seconds)
            ):
                raise BadInput(
                    f"{where}: curves.operations.{name}: a known operation with columns at, seconds, iqr_s "
                    "and n of one length, `at` rising and seconds positive; calibrate again"
                )
