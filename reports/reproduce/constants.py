"""The constants that rows may rest on: one per (testbed, system), each from one published figure that is not scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reports.reproduce.closed import cost_of
from reports.reproduce.rows import Constant, Row
from sim.errors import BadInput

MAX_STEPS = 4


@dataclass(frozen=True)
class Fitted:
    """A constant and the seconds that make its row come out."""

    constant: Constant
    value_s: float

    def settings(self, hw: str, model: str, precision: str) -> dict[str, float]:
        """As dotted overrides for one machine, model and precision.

        Seconds per copy become the bandwidth at which a whole expert takes that much longer. So a part of an expert
        takes its share: the printed figure is of whole experts, and nobody is to gain or lose by splitting them.
        """
        if self.constant.form == "per_layer":
            return {"stack.per_layer_s": self.value_s}
        cost = cost_of(hw, model, precision)
        n_bytes = cost.model.expert_bytes(precision)
        if self.constant.form == "on_cpu":
            overhead_s = cost.hw.cpu.expert_overhead_s.value
            return {"hw.cpu.memory_bandwidth_bytes_per_s": n_bytes / (self.value_s - overhead_s)}
        return {"hw.h2d.bandwidth_bytes_per_s": n_bytes / (n_bytes / cost.h2d_bytes_per_s + self.value_s)}


def fit(constant: Constant, rows: dict[str, Row], tpot_s: Callable[[float], float] | None = None) -> Fitted:
    """Solve for the constant.

    Args:
        tpot_s: seconds per token of the constant's model with a value of it, everything resident; `per_layer` needs it.

    Raises:
        BadInput: its row has no such figure, or one that leaves nothing for the software.
    """
    figure = rows[constant.row].published.get(constant.label) if constant.row in rows else None
    if not isinstance(figure, float | int):
        raise BadInput(f"constant {constant.id}: row {constant.row} has no figure {constant.label!r}; correct the file")
    cost = cost_of(constant.hw, constant.model, constant.precision)
    n_bytes = cost.model.expert_bytes(constant.precision)
    if constant.form == "on_cpu":
        return Fitted(constant, figure * cost.copy_s(n_bytes))
    if constant.form == "per_copy":
        value = figure * constant.seconds / constant.copies - cost.copy_s(n_bytes)
    else:
        assert tpot_s is not None
        n_layers = cost.model.n_layers
        value = 1.0 / (figure * n_layers)
        # Time per token is linear in it once the host is the bottleneck, so that a step or two settle it.
        for _ in range(MAX_STEPS):
            value += (1.0 / figure - tpot_s(value)) / n_layers
    if value <= 0:
        raise BadInput(f"constant {constant.id}, got {value:.3g} s: the hardware alone is slower than {constant.row}")
    return Fitted(constant, value)
