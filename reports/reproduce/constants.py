"""The constants that rows may rest on: one per (testbed, system), each from one published figure that is not scored.

Some follow from their figure in closed form. Others are solved for: the experiment of their row is run until the
system's figure is the printed one. No policy or machine is changed by a constant, only what its software costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from reports.reproduce.closed_form import GB, cost_of
from reports.reproduce.judge import standing
from reports.reproduce.rows import Constant, Row
from sim.base.errors import BadInput

FIRST_GUESS_S = 1e-3
MAX_STEPS = 8
NEAR = 1e-3  # a constant has been found when its figure is so close to the printed one
Figures = Callable[[dict[str, float]], dict[str, float]]


class NotFitted(Exception):
    """No constant makes its row come out; rows that ask for it are told without one."""


@dataclass(frozen=True)
class Fitted:
    """A constant and the seconds that make its row come out: added to a copy or a layer, or those of an expert, of a GB
    over the link, or of a GB of weights."""

    constant: Constant
    value_s: float

    def settings(self, hw: str, model: str, precision: str, pinned: bool = True) -> dict[str, float]:
        """As dotted overrides for one machine, model and precision.

        Seconds per copy become the bandwidth at which a whole expert takes that much longer. So a part of an expert
        takes its share: the printed figure is of whole experts, and nobody is to gain or lose by splitting them.

        Args:
            pinned: whether experts lie in page-locked memory; what changes is the bandwidth they are copied at.
        """
        if self.constant.form == "per_layer":
            return {"engine.per_layer_s": self.value_s}
        if self.constant.form == "gpu_gb":
            return {"hw.gpu.memory_bandwidth_bytes_per_s": GB / self.value_s}
        link = "h2d" if pinned else "h2d_pageable"
        if self.constant.form == "link_gb":
            return {f"hw.{link}.bandwidth_bytes_per_s": GB / self.value_s}
        cost = cost_of(hw, model, precision)
        n_bytes = cost.model.expert_bytes(precision)
        if self.constant.form == "on_cpu":
            overhead_s = cost.hw.cpu.expert_overhead_s.value
            return {"hw.cpu.memory_bandwidth_bytes_per_s": n_bytes / (self.value_s - overhead_s)}
        if self.constant.form == "on_gpu":
            return {"hw.gpu.memory_bandwidth_bytes_per_s": n_bytes / self.value_s}
        plain: float = getattr(cost.hw, link).bandwidth_bytes_per_s.value
        return {f"hw.{link}.bandwidth_bytes_per_s": n_bytes / (n_bytes / plain + self.value_s)}


def published(constant: Constant, rows: dict[str, Row]) -> float:
    """The figure it comes from; the middle of a printed range. Raises BadInput where its row has none."""
    figure = rows[constant.row].published.get(constant.label) if constant.row in rows else None
    if isinstance(figure, list):
        return math.fsum(figure) / 2
    if figure is None:
        raise BadInput(f"constant {constant.id}: row {constant.row} has no figure {constant.label!r}; correct the file")
    return figure


def fit(constant: Constant, rows: dict[str, Row]) -> Fitted:
    """A constant in closed form.

    Raises:
        NotFitted: the hardware alone is slower than its figure.
        BadInput: its row has no such figure.
    """
    figure = published(constant, rows)
    cost = cost_of(constant.hw, constant.model, constant.precision)
    copy_s = cost.copies.expert_s(cost.model.expert_bytes(constant.precision))
    if constant.form == "on_cpu":
        return Fitted(constant, figure * copy_s)
    value = figure * constant.seconds / constant.copies - copy_s
    if constant.form == "link_gb" and value > 0:
        gb, link_s = cost.model.expert_bytes(constant.precision) / GB, GB / cost.hw.h2d.bandwidth_bytes_per_s.value
        return Fitted(constant, link_s + value / gb)  # what is not of the bytes, a copy's start, stays as it is
    if value <= 0:
        raise NotFitted(f"the hardware alone is slower than {constant.row} ({constant.label})")
    return Fitted(constant, value)


def solve(
    constants: list[Constant], rows: dict[str, Row], figures: Figures
) -> tuple[dict[str, Fitted], dict[str, str]]:
    """Constants by id, each the seconds at which the experiment of its row gives the printed figure; and why others
    cannot be fitted: the hardware alone is slower than the row, or nothing is found.

    Secants through the last two points: time is nearly linear in a constant, and the rest is in what overlaps.

    Args:
        figures: id -> seconds of every constant, to id -> the figure of its row with them, in the published form.
    """
    if not constants:
        return {}, {}

    def stands(values: dict[str, float]) -> dict[str, float]:
        found = figures(dict(values))
        return {one.id: standing(rows[one.row].relation, found[one.id]) for one in constants}

    target = {one.id: standing(rows[one.row].relation, published(one, rows)) for one in constants}
    before = dict.fromkeys(target, 0.0)
    at_before = stands(before)
    lost = {
        one.id: f"the hardware alone is slower than {one.row} ({one.label})"
        for one in constants
        if at_before[one.id] >= target[one.id]
    }
    sought = [name for name in target if name not in lost]
    values = {name: 0.0 if name in lost else FIRST_GUESS_S for name in target}
    far = sought
    for _ in range(MAX_STEPS):
        if not far:
            break
        at = stands(values)
        far = [name for name in sought if abs(at[name] / target[name] - 1) > NEAR]
        following = dict(values)
        for name in far:
            rise = (at[name] - at_before[name]) / (values[name] - before[name])
            step = (target[name] - at[name]) / rise if rise > 0 else values[name]  # beyond what is hidden
            following[name] = max(values[name] / 4, values[name] + step)
            before[name], at_before[name] = values[name], at[name]
        values = following
    lost |= dict.fromkeys(far, f"not found in {MAX_STEPS} steps; the row it is fitted to may not depend on it")
    return {one.id: Fitted(one, values[one.id]) for one in constants if one.id not in lost}, lost
