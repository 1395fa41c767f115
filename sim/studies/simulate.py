"""`moesim.simulate`: one run from Python, answered as a typed record with tables."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from sim.base.errors import BadInput, CheckFailed
from sim.base.files import to_struct
from sim.base.units import parse_size
from sim.policy.policy_file import split
from sim.policy.registry import name_of
from sim.results.by_layer import expert_table, layer_table
from sim.results.record import Result
from sim.results.replicas import request_rows
from sim.run import execute
from sim.setup.prepare import prepare
from sim.setup.spec import RunSpec
from sim.setup.words import without_caps, words_of
from sim.workload.slo import slo_of

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.policy.api import Policy
    from sim.run import Outcome

Name = str | os.PathLike[str]
Value = bool | int | float | str | None


class Options(TypedDict, total=False):
    """What decides a run beside policy and hardware: the fields of its configuration; sizes are bytes, or `8GB`."""

    model: Name | None  # None: the model whose shape the trace has
    trace: Name | None  # None: the default trace
    precision: str
    stack: Name
    set: Mapping[str, Value]  # parameters of the policy, and hw.*, model.*, stack.*
    gpus: int
    peer: str  # per-expert or all-to-all
    dense: str | None  # gpu0, tensor, data, layers or layers:3/1
    placement: Name | None  # a file: the GPU of each expert; None: dealt round-robin
    host_links: str  # apart, shared or split
    host_memory_bytes: int | str | None  # for experts; None: all that the host has
    nvme: str | None  # a drive for what it does not hold: gen4x4, gen5x4:depth=8 ...
    ram_policy: Name | None  # None: lru
    replicas: int  # equal machines, each with its own `gpus`
    router: str | None  # None: round robin
    batch: int
    split: str
    requests: int | None  # at most this many, in order
    seed: int
    link: str | None
    vram_bytes: int | str | None
    expert_cache_bytes: int | str | None
    experts: int | None
    cache_frac: float | None
    hit_definition: str
    predictor: Name | None
    engine: str | None  # arithmetic or simpy
    contention: str  # on or off
    energy: str | None  # whose joules are counted: gpu or machine
    scheduler: str | None  # None: first come, first served
    batching: str | None  # continuous or static; None: continuous
    prefill_chunk: int | None  # at most so many tokens run in an iteration
    draft: str | None  # speculative decoding: k=4,acceptance=0.7
    arrivals: Name | None  # poisson:RATE, gamma:RATE,CV, closed:CLIENTS, a log, none; None: the trace's
    rate_scale: float
    kv_memory_bytes: int | str | None  # a pool of pages; None: as much as the longest contexts together take
    kv_page: int  # tokens
    preempt: str  # recompute or swap
    slo: str | Mapping[str, Mapping[str, float | str]] | None  # 'ttft_s <= 2s', or task -> limit -> time
    unstable: bool  # show percentiles of a queue that grows as long as requests come


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
    fields = {key: plain(key, value) for key, value in {"policy": name, "hw": hw, **options}.items()}
    if isinstance(fields["policy"], str) and kind is None and len(words := split(fields["policy"])) > 1:
        own, shared = words_of(words[0], words[1:])
        fields = {
            **without_caps(fields, shared),
            **shared,
            "policy": words[0],
            "set": {**(fields.get("set") or {}), **own},
        }
    spec = to_struct(fields, RunSpec, "simulate()")
    setup = prepare(spec, kind)
    try:
        for note in filter(None, (*setup.notes(), setup.idle)):
            warnings.warn(note.removeprefix("note: "), stacklevel=2)
        outcome = execute(setup)
    finally:
        setup.close()
    return outcome.result.with_tables(Replay(spec, kind, outcome))


def plain(key: str, value: Any) -> Any:
    """An option as a configuration has it: paths as text, sizes as bytes, numbers of numpy as Python's."""
    if key == "slo" and value is not None:
        return slo_of(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: plain("", child) for name, child in value.items()}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if key.endswith("_bytes") and isinstance(value, str):
        return parse_size(value, key, key)
    return int(value) if key.endswith("_bytes") and isinstance(value, float) and value.is_integer() else value


class Replay:
    """The tables of a run that is over: what was counted, and all others by replaying it once more."""

    def __init__(self, spec: RunSpec, kind: type[Policy] | None, outcome: Outcome) -> None:
        self.spec, self.kind = spec, kind
        result = outcome.result
        self._run_id, self._facts, self._report = result.run_id, result.to_dict(), outcome.report
        self._frames: dict[str, DataFrame] = {}

    def table(self, name: str) -> DataFrame:
        """A copy of a table, so that what is done to it changes no later answer."""
        if name not in self._frames:
            self._make(name)
        return self._frames[name].copy()

    def _make(self, name: str) -> None:
        from sim.results.tables import frame

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
