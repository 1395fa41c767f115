"""What machines cost, from a file of the user's: no price is known here, and none is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_yaml, to_struct
from sim.profiles.hardware import load_hardware

Amount = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{price: 700, note: "used, November 2026"}`."""

    price: Amount
    note: str = ""


class Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds: of one GPU of that profile, in the unit that the file names."""

    schema: Literal[1]
    unit: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    prices: dict[str, Amount | Price]


class Prices(NamedTuple):
    """Prices by the id of a profile."""

    path: Path
    unit: str
    by_id: dict[str, Price]

    def show(self, price: float) -> str:
        """`700 EUR`."""
        return f"{price:,.10g} {self.unit}"


def read_prices(path: Path) -> Prices:
    """Read and check a file.

    Raises:
        BadInput: naming file and field; also for a name that no profile has, or two names of one profile.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise BadInput(
            f"{path}, got {type(data).__name__}: prices are a mapping with schema, unit and prices; see docs"
        )
    found = to_struct(data, Written, str(path))
    if not found.prices:
        raise BadInput(f"{path}: prices: there are none; list at least one, e.g. rtx3090: 700")
    by_id: dict[str, Price] = {}
    for name, price in found.prices.items():
        try:
            own = load_hardware(name).id
        except BadInput as error:
            raise BadInput(f"{path}: prices.{name}: {error}") from None
        if own in by_id:
            raise BadInput(f"{path}: prices.{name}: {own} has a price already; keep one of them")
        by_id[own] = price if isinstance(price, Price) else Price(float(price))
    return Prices(path, found.unit, by_id)
