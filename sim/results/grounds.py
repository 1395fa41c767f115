"""A figure that a result rests on, as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.units import show_bytes, show_flops, show_frac, show_rate, show_seconds

if TYPE_CHECKING:
    from sim.figures import Input

TOP_FIGURES = 3


def show_ground(figure: Input) -> str:
    """Its share, name, value, source and references."""
    value = "" if figure.value is None else f" = {show_figure(figure.figure, figure.value)}"
    ref = f" [{figure.ref}]" if figure.ref else ""
    return f"{show_frac(figure.share):>7}  {figure.figure}{value} ({figure.source}){ref}"


def show_figure(name: str, value: float) -> str:
    """A figure in the unit people use, chosen by the end of its name."""
    last = name.rsplit(".", 1)[-1]
    if "flops_per_s" in name:
        return show_flops(value)
    if last.endswith("_bytes_per_s"):
        return show_rate(value)
    if last.endswith("_bytes"):
        return show_bytes(value)
    if last.endswith("_w"):
        return f"{value:g} W"
    return show_seconds(value) if last.endswith("_s") else f"{value:g}"
