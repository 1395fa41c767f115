"""`moesim.simulate`: one run from Python, answered as a typed record with tables."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sim.base.errors import BadInput, CheckFailed
from sim.base.extras import need
from sim.base.files import to_struct
from sim.options import OPTIONS, RunSpec
from sim.policy.registry import name_of
from sim.results.by_layer import expert_table, layer_table
from sim.results.record import Result
from sim.run import execute
from sim.setup.naming import called
from sim.setup.prepare import prepare
from sim.studies.keywords import plain, with_options
from sim.studies.option_types import Name, Options

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.policy.api import Policy
    from sim.run import Outcome


@with_options
def simulate(policy: Name | type[Policy], hw: Name, **options: Unpack[Options]) -> Result:
    """Replay a routing trace under a policy on a described GPU: what `simulate` does on the command line.

    Args:
        policy: a name that `moesim policies` lists, a file (`./mine.py`, `./mine.py:Class`), or a class derived from
            `moesim.Policy`. hw: a name that `moesim hw` lists, or a file.
        options: the others of `simulate --help`, by the names that a saved configuration has.

    Warns:
        UserWarning: of requests or a batch there are fewer than was asked for; a model's name took the first of many.

    Raises:
        BadInput: whatever has to be changed, in one line; `DoesNotFit`, when it is a memory.
        IllegalDecision: the policy broke a rule.
    """
    kind = None if isinstance(policy, str | os.PathLike) else policy
    name = name_of(kind) if kind is not None else policy
    fields: dict[str, Any] = {"policy": name, "hw": hw, **{key: plain(value) for key, value in options.items()}}
    fields = OPTIONS.values(fields)
    if isinstance(name, str) and kind is None:
        fields = called(name, fields)
    spec = to_struct(fields, RunSpec, "simulate()")
    setup = prepare(spec, kind)
    try:
        for note in filter(None, (*setup.notes(), setup.idle)):
            warnings.warn(note.removeprefix("note: "), stacklevel=2)
        outcome = execute(setup)
    finally:
        setup.close()
    return outcome.result.with_tables(Replay(spec, kind, outcome))


class Replay:
    """The tables of a run that is over: what was counted, and all others by replaying it once more."""

    def __init__(self, spec: RunSpec, kind: type[Policy] | None, outcome: Outcome) -> None:
        self.spec, self.kind = spec, kind
        result = outcome.result
        self._run_id, self._facts, self._report = result.run_id, result.to_dict(), outcome.report
        self._frames: dict[str, DataFrame] = {}

    def table(self, name: str) -> DataFrame:
        """A copy of a table, so that what is done to it changes no later answer."""
        need(f"Result.{name}", "pandas", "pyarrow")
        if name not in self._frames:
            self._make(name)
        return self._frames[name].copy()

    def _make(self, name: str) -> None:
        from sim.results.tables import frame, request_rows

        if name == "requests":
            requests = request_rows(self._report)
            self._frames[name] = frame(name, self._run_id, requests, self.spec.replicas > 1)
        elif name == "layers":
            self._frames[name] = frame(name, self._run_id, layer_table(self._facts["by_layer"]))
        elif name == "experts":
            self._frames[name] = frame(name, self._run_id, expert_table(self._report))
        else:
            self._frames |= self._again(name)

    def _again(self, name: str) -> dict[str, DataFrame]:
        """Run it with what keeps tables, as `--out` does, and read them.

        Raises:
            BadInput: what the run was made of has changed since.
            CheckFailed: the policy decided otherwise, so the tables would be another run's.
        """
        import pandas as pd

        from sim.results.keep import Keep
        from sim.results.sinks import recorded

        with tempfile.TemporaryDirectory(prefix="moesim-") as folder:
            setup = prepare(self.spec, self.kind)
            try:
                if setup.run_id != self._run_id:
                    raise BadInput(
                        f"{name}, got inputs that have changed since the run (run_id {setup.run_id}, then "
                        f"{self._run_id}): they are another run's; simulate again"
                    )
                out = Path(folder) / "run"
                outcome = recorded(execute, setup, None, Keep(out, with_spans=name == "spans"))
            finally:
                setup.close()
            if {**outcome.result.to_dict(), "wall_s": None} != {**self._facts, "wall_s": None}:
                raise CheckFailed(
                    f"{name}, got another result from a second replay: policy {setup.policy.name} decides by something "
                    "beside the trace; let it draw by a seed of its own"
                )
            names = ("spans",) if name == "spans" else ("iterations", "decisions")
            return {one: pd.read_parquet(out / f"{one}.parquet") for one in names}
