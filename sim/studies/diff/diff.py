"""Two runs beside each other: what `moesim diff` prints, and what `moesim.diff` answers with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.extras import need
from sim.base.json import finite
from sim.figures import SCHEMA, Timed
from sim.results.compared import Compared, differing, verdict_of
from sim.results.record import Result
from sim.studies.diff.decisions import FirstDifference, first_difference
from sim.studies.diff.inputs import Alone, alone, inputs, machine
from sim.studies.diff.named import Named, both
from sim.studies.diff.side import Side, opened
from sim.studies.diff.times import (
    Difference,
    LayerRow,
    LayerWait,
    Paired,
    Reason,
    by_layer,
    difference,
    misses,
    paired,
    waits,
)
from sim.studies.simulate import Replay

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.studies.diff.side import Progress


TIMES: tuple[Timed, ...] = ("tpot_s", "ttft_s")
Run = str | os.PathLike[str] | Result
Told = Callable[[float, float | None, str], None]
ECHOED = ("params.", "overrides.")  # keys of a result that only tell what was set


@dataclass
class Diff:
    """Two runs compared; differences are B less A. Attributes that end in `_rows` have DataFrames beside them.

    Attributes:
        input_rows: inputs that differ. machine_rows: figures of machine, model and engine that do.
        figure_rows: every figure of the two results that differs, by its name in `--json`.
        times: mean TPOT and TTFT, and their parts. request_rows: requests that both served.
        first: where their decisions part. not_compared: why that cannot be said.
        layer_rows: figures of layers that differ. layer_waits: what GPU 0 waited for in each. misses: why there were.
        alone_rows: what each input brings by itself, where it was asked for.
    """

    a: Side
    b: Side
    input_rows: list[Compared]
    machine_rows: list[Compared]
    figure_rows: list[Compared]
    times: dict[Timed, Difference]
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
    def leading(self) -> Timed:
        """The time that an answer is about: per token, or to the first where there is but one."""
        return "tpot_s" if self.times["tpot_s"].difference_s is not None else "ttft_s"

    @property
    def answer(self) -> str:
        """Which one is faster, by how much, and what that is for."""
        from sim.studies.diff.answer import answer

        return answer(self)

    @property
    def parts(self) -> DataFrame:
        """What the mean times go to in each run: one row per time and part, which sum to the mean."""
        rows = [
            {"time": time, **msgspec.structs.asdict(part)} for time, one in self.times.items() for part in one.parts
        ]
        return _frame(rows, ("time", "part", "a_s", "b_s", "difference_s"))

    @property
    def requests(self) -> DataFrame:
        """Requests that both served, the largest difference first."""
        return _frame(self.request_rows, Paired.__struct_fields__)

    @property
    def layers(self) -> DataFrame:
        """Every count and time of a layer that differs."""
        return _frame(self.layer_rows, LayerRow.__struct_fields__)

    @property
    def waits(self) -> DataFrame:
        """What GPU 0 waited for in each layer per iteration of decode, the largest difference first."""
        return _frame(self.layer_waits, LayerWait.__struct_fields__)

    @property
    def inputs(self) -> DataFrame:
        """Inputs that differ."""
        return _frame(self.input_rows, ("key", "a", "b"))

    @property
    def figures(self) -> DataFrame:
        """Every figure of the results that differs, by its name in `--json`."""
        return _frame(self.figure_rows, Compared.__struct_fields__)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; documented in docs/diff.md."""
        time = self.times[self.leading]
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "answer": self.answer,
            "equal": self.equal,
            "times_as_fast": time.a_s / time.b_s if time.a_s and time.b_s else None,
            "a": _of_side(self.a),
            "b": _of_side(self.b),
            "inputs": self.input_rows,
            "machine_figures": self.machine_rows,
            "tpot_s": self.times["tpot_s"],
            "ttft_s": self.times["ttft_s"],
            "figures": self.figure_rows,
            "requests": self.request_rows,
            "misses": self.misses,
            "layer_waits": self.layer_waits,
            "layers": self.layer_rows,
            "first_decision": self.first,
            "decisions_not_compared": self.not_compared or None,
            "one_at_a_time": self.alone_rows,
        }
        plain: dict[str, Any] = finite(msgspec.to_builtins(found))
        return plain

    def __str__(self) -> str:
        from sim.base.tables import fold
        from sim.studies.diff.text import render

        return f"{fold(self.answer)}\n\n{render(self)}"

    def __repr__(self) -> str:
        return f"<moesim.Diff: {self.answer}>"


def _frame(rows: list[Any], columns: tuple[str, ...]) -> DataFrame:
    import pandas as pd

    plain = [row if isinstance(row, dict) else msgspec.structs.asdict(row) for row in rows]
    return pd.DataFrame(plain, columns=list(columns))


def _of_side(side: Side) -> dict[str, Any]:
    result = side.result
    told = {key: value for key, value in result.to_dict().items() if key not in ("wall_s", "by_layer")}
    who = {"applied_as": side.label, "name": result.name, "run_id": result.run_id}
    return {**who, "replayed": side.replayed, "notes": side.notes, "result": told}


def diff(a: Run, b: Run, *, replay: bool = True, one_at_a_time: bool = False) -> Diff:
    """Two runs beside each other: what `moesim diff` does on the command line.

    Args:
        a, b: results of `moesim.simulate`, folders of `--out`, or runs in words (`"lru hw=rtx3090"`); what words do not
            say is as in the other one. replay: recorded runs are replayed where their inputs are still the same.
        one_at_a_time: replay A with each single input of B that differs, too.

    Raises:
        BadInput: a run that cannot be read or set up, in one line.
    """
    sides = [_of_result(run) if isinstance(run, Result) else os.fspath(run) for run in (a, b)]
    return of_named(both(sides[0], sides[1], {}), replay, one_at_a_time)


def _of_result(result: Result) -> Named:
    kept = result.kept
    spec, kind = (kept.spec, kept.kind) if isinstance(kept, Replay) else (None, None)
    return Named(result.name, result=result, spec=spec, kind=kind)


def of_named(sides: tuple[Named, Named], replay: bool, one_at_a_time: bool, progress: Told | None = None) -> Diff:
    """The same for sides that are known. progress: told of (done, in all, what is done). Raises BadInput."""

    def told(which: str) -> Progress | None:
        return None if progress is None else lambda done, total: progress(done, total, f"replaying {which}")

    need("diff", "pyarrow")
    with tempfile.TemporaryDirectory(prefix="moesim-") as scratch:
        found = []
        for which, one in zip("AB", sides, strict=True):
            folder = Path(scratch) / which
            folder.mkdir()
            found.append(opened(one, folder, replay, told(which)))
        a, b = found
        first, why = first_difference(a, b)
        return Diff(
            a,
            b,
            input_rows=inputs(a, b),
            machine_rows=machine(a, b),
            figure_rows=[
                msgspec.structs.replace(row, verdict=verdict_of(row.key, row.a, row.b))
                for row in differing(a.facts, b.facts)
                if not row.key.startswith(ECHOED)
            ],
            times={time: difference(a, b, time) for time in TIMES},
            request_rows=paired(a, b),
            layer_rows=by_layer(a, b),
            layer_waits=waits(a, b),
            misses=misses(a, b),
            first=first,
            not_compared=why,
            alone_rows=alone(a, b, told("A with one input of B")) if one_at_a_time else [],
        )
