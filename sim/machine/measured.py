"""What a calibration measured: curves of single operations, and the ranges that its fits rest on.

Where a profile has curves of this model in this precision they are the prices; elsewhere the ranges tell which
prices are extrapolated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.price import Price
from sim.profiles.curves import AGAINST

if TYPE_CHECKING:
    from sim.machine.figures import Figures
    from sim.profiles.curves import Curve
    from sim.profiles.hardware import Hardware

SIX_DIGITS = 1.00001
"""Profiles are written with six significant digits: what was the largest measured may read as a little less."""


class Measured:
    """Curves and ranges of one (hardware, model, precision), and the operations that were priced outside them.

    `launches`: what was measured of launching an operation, by name. `ranges`: of the fits.
    """

    def __init__(self, hw: Hardware, model: str, precision: str) -> None:
        self.ranges = hw.ranges
        self.found = hw.curves_of(model, precision)
        self.launches = {} if self.found is None else self.found.launches
        self._curves: dict[str, tuple[Curve, int]] = {}
        self._beyond: dict[str, tuple[float, str]] = {}  # by operation: the farthest price outside its measured range
        if self.found is None and hw.curves is not None:
            stands_in = f"(curves measured: {hw.curves.model} in {hw.curves.precision})"
            self._beyond["model"] = (1.0, f"{model} in {precision}, for which fits stand in {stands_in}")

    def enter(self, figures: Figures) -> None:
        """Enter each curve among the figures: none is a price before."""
        operations = {} if self.found is None else self.found.operations
        for name, curve in operations.items():
            self._curves[name] = (curve, figures.enter(f"curves.{name}", curve.figure()))

    def curve(self, name: str) -> Curve | None:
        """The curve of an operation, None where the profile has none."""
        found = self._curves.get(name)
        return None if found is None else found[0]

    def price(self, name: str, at: float) -> Price | None:
        """The price on a measured curve, None where the profile has none."""
        found = self._curves.get(name)
        if found is None:
            return None
        curve, attributed_to = found
        if not curve.covers(at):
            self._leave(name, at, AGAINST[name], (curve.at[0], curve.at[-1]))
        return Price(curve.value(at), attributed_to)

    @property
    def beyond(self) -> set[str]:
        """Operations priced outside the range they were measured in, each at the farthest."""
        return {text for _, text in self._beyond.values()}

    def not_measured(self, name: str, text: str) -> None:
        """Note an operation whose price nothing was measured for."""
        self._beyond[name] = (1.0, text)

    def check(self, name: str, at: float, unit: str, measured: tuple[float, float] | None) -> None:
        """Note a fit that is asked for more than it rests on; for less, its constant term holds."""
        if measured is not None and at > measured[1] * SIX_DIGITS:
            self._leave(name, at, unit, measured)

    def _leave(self, name: str, at: float, unit: str, measured: tuple[float, float]) -> None:
        """Note an operation outside its measured range."""
        low, high = measured
        outside = at / high if at > high else low / max(at, 1e-9)
        if outside > self._beyond.get(name, (0.0, ""))[0]:
            self._beyond[name] = (outside, f"{name} at {at:g} {unit} (measured: {low:g} to {high:g})")
