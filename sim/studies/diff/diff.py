"""Two runs beside each other, as an object: what `moesim diff` prints, and what `moesim.diff` answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.base.json import finite
from sim.figures import SCHEMA
from sim.studies.diff.decisions import FirstDifference, Made, first_difference
from sim.studies.diff.inputs import Input, inputs, machine_figures
from sim.studies.diff.layers import LayerRow, LayerWait, Reason, by_layer, misses, waits
from sim.studies.diff.side import compared
from sim.studies.diff.times import Difference, Paired, difference, paired

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.studies.diff.alone import Alone
    from sim.studies.diff.side import Side


@dataclass
class Diff:
    """Two runs compared; differences are B less A. Attributes that end in `_rows` have DataFrames beside them.

    Attributes:
        input_rows: inputs that differ. machine_rows: figures of machine, model and stack that do.
        figure_rows: (key, A, B) of every figure of the two results that differs.
        tpot, ttft: mean times and their parts. request_rows: requests that both served.
        first: where their decisions part. not_compared: why that cannot be said.
        layer_rows: figures of layers that differ. layer_waits: what GPU 0 waited for in each. misses: why there were.
        alone_rows: what each input brings by itself, where it was asked for.
    """

    a: Side
    b: Side
    input_rows: list[Input]
    machine_rows: list[Input]
    figure_rows: list[tuple[str, float | None, float | None]]
    tpot: Difference
    ttft: Difference
    request_rows: list[Paired]
    layer_rows: list[LayerRow]
    layer_waits: list[LayerWait]
    misses: list[Reason]
    first: FirstDifference | None
    not_compared: str
    alone_rows: list[Alone] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every figure of both results is the same, to the bit, and so is every decision."""
        return not self.figure_rows and self.first is None

    @property
    def answer(self) -> str:
        """Which one is faster, by how much, and what that is for."""
        from sim.studies.diff.answer import answer

        return answer(self)

    @property
    def parts(self) -> DataFrame:
        """What the mean times go to in each run: one row per time and part, which sum to the mean."""
        rows = [
            {"time": one.time, **part._asdict(), "difference_s": part.difference_s}
            for one in (self.tpot, self.ttft)
            for part in one.parts
        ]
        return _frame(rows, ("time", "part", "a_s", "b_s", "difference_s"))

    @property
    def requests(self) -> DataFrame:
        """Requests that both served, the largest difference first."""
        return _frame([one._asdict() for one in self.request_rows], Paired._fields)

    @property
    def layers(self) -> DataFrame:
        """Every count and time of a layer that differs."""
        return _frame([one._asdict() for one in self.layer_rows], LayerRow._fields)

    @property
    def waits(self) -> DataFrame:
        """What GPU 0 waited for in each layer per iteration of decode, the largest difference first."""
        return _frame([one._asdict() for one in self.layer_waits], LayerWait._fields)

    @property
    def inputs(self) -> DataFrame:
        """Inputs that differ."""
        return _frame([one._asdict() for one in self.input_rows], Input._fields)

    @property
    def figures(self) -> DataFrame:
        """Every figure of the results that differs, by its name in `--json`."""
        return _frame([dict(zip(("key", "a", "b"), row, strict=True)) for row in self.figure_rows], ("key", "a", "b"))

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; documented in docs/diff.md."""
        from sim.studies.diff.answer import times_as_fast

        found: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "answer": self.answer,
                "equal": self.equal,
                "times_as_fast": times_as_fast(self),
                "a": _of_side(self.a),
                "b": _of_side(self.b),
                "inputs": [one._asdict() for one in self.input_rows],
                "machine_figures": [one._asdict() for one in self.machine_rows],
                "tpot_s": _of_time(self.tpot),
                "ttft_s": _of_time(self.ttft),
                "figures": [dict(zip(("key", "a", "b"), row, strict=True)) for row in self.figure_rows],
                "requests": [one._asdict() for one in self.request_rows],
                "misses": [one._asdict() for one in self.misses],
                "layer_waits": [{**one._asdict(), "difference_s": one.difference_s} for one in self.layer_waits],
                "layers": [one._asdict() for one in self.layer_rows],
                "first_decision": _of_first(self.first),
                "decisions_not_compared": self.not_compared or None,
                "one_at_a_time": [one._asdict() for one in self.alone_rows],
            }
        )
        return found

    def __str__(self) -> str:
        from sim.base.tables import fold
        from sim.studies.diff.text import render

        return f"{fold(self.answer)}\n\n{render(self)}"

    def __repr__(self) -> str:
        return f"<moesim.Diff: {self.answer}>"


def compare(a: Side, b: Side) -> Diff:
    """Everything that can be said of two runs. Raises BadInput for a table that cannot be read."""
    first, not_compared = first_difference(a, b)
    return Diff(
        a,
        b,
        inputs(a, b),
        machine_figures(a, b),
        _figures(a, b),
        difference(a, b, "tpot_s"),
        difference(a, b, "ttft_s"),
        paired(a, b),
        by_layer(a, b),
        waits(a, b),
        misses(a, b),
        first,
        not_compared,
    )


def _figures(a: Side, b: Side) -> list[tuple[str, float | None, float | None]]:
    own, other = compared(a.facts), compared(b.facts)
    keys = dict.fromkeys([*own, *other])
    return [
        (key, own.get(key), other.get(key))
        for key in keys
        if own.get(key) != other.get(key) and not key.startswith(("params.", "overrides."))
    ]


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(columns))


def _of_side(side: Side) -> dict[str, Any]:
    told = side.told
    return {
        "applied_as": side.label,
        "name": told.name,
        "run_id": told.run_id,
        "replayed": side.replayed,
        "notes": side.notes,
        "result": {key: value for key, value in side.facts.items() if key not in ("wall_s", "by_layer")},
    }


def _of_time(found: Difference) -> dict[str, Any]:
    return {
        "a": found.a_s,
        "b": found.b_s,
        "difference": found.difference_s,
        "requests_a": found.n_a,
        "requests_b": found.n_b,
        "paired": found.paired,
        "interval": found.interval,
        "significant": found.significant,
        "basis": found.basis,
        "reason": found.reason or None,
        "parts": [{**part._asdict(), "difference_s": part.difference_s} for part in found.parts],
    }


def _of_first(first: FirstDifference | None) -> dict[str, Any] | None:
    if first is None:
        return None
    return {
        "at": first.at,
        "phase": first.phase,
        "request": first.request,
        "a": _of_made(first.a),
        "b": _of_made(first.b),
        "before": [one._asdict() for one in first.before],
        "then_a": [one._asdict() for one in first.then_a],
        "then_b": [one._asdict() for one in first.then_b],
    }


def _of_made(made: Made | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {**made.decision._asdict(), "used_before": made.used_before, "used_next": made.used_next}
