"""`moesim.compare`: policies on the same trace, hardware and memory, answered as a DataFrame."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from sim.base.errors import BadInput, IllegalDecision
from sim.base.extras import need
from sim.base.files import to_struct
from sim.options import OPTIONS, RunSpec, option_meant
from sim.policy.policy_file import split
from sim.policy.registry import name_in_file
from sim.setup.naming import for_one
from sim.studies.against import baseline, with_baseline
from sim.studies.common_bound import common_bound, facts_of
from sim.studies.compare import Candidate, by_scheduler, expanded, run_all
from sim.studies.compare_text import verdict
from sim.studies.keywords import with_options
from sim.studies.ranking import ranks_of, row_facts, speed
from sim.studies.simulate import plain
from traces.stats.realism import judge

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.setup.setup import Setup
    from sim.studies.option_types import Name, Options
    from sim.studies.sweep.python_api import Who

TABLES = ("by_layer",)  # keys of a result that are tables of their own: `moesim.simulate(...)` has them as DataFrames


@with_options
def compare(
    policy: Who | Iterable[Who],
    hw: Name,
    *,
    workers: int | None = None,
    against: Name | None = None,
    **options: Unpack[Options],
) -> DataFrame:
    """Rank policies by time per output token: what `moesim compare` does on the command line.

    Args:
        policy: names, with parameters of their own behind them (`"lfu scope=layer"`), files, or classes whose text is
            in a file; `"all"` stands for every installed one. hw: a name that `moesim hw` lists, or a file.
        workers: processes; None: the cores, if it is worth it.
        against: the policy that the others are held against; it is compared if `policy` does not name it.
        options: the others of `moesim.simulate`; `scheduler` may name several, `"fcfs,sjf"`, each for every policy.
            `set` has what holds for every policy, hw.*, model.* and engine.*.

    Returns:
        A row per policy, the fastest first, with the keys of `moesim compare --json` as columns: nested ones by their
        dotted names, as `--expect` has them (`tpot_s.mean`). `attrs` has "answer", the first line that the command
        prints, "realism" of the trace, "common_bound", the lower bound that holds for every row, and "not_run",
        reasons by policy.

    Warns:
        UserWarning: what the command line notes: fewer requests than asked for, or the same run twice.

    Raises:
        BadInput: whatever has to be changed, in one line. IllegalDecision: a policy broke a rule.
    """
    need("compare()", "pandas")
    import pandas as pd

    kinds = [policy] if isinstance(policy, str | os.PathLike) or inspect.isclass(policy) else list(policy)
    fields: dict[str, Any] = {key: plain(value) for key, value in {"hw": hw, **options}.items()}
    items = expanded(
        tuple(os.fspath(kind) if isinstance(kind, str | os.PathLike) else name_in_file(kind) for kind in kinds),
        "compare(): policy",
    )
    realism: list[str] = []

    def first(setup: Setup) -> None:
        for text in setup.notes():
            _warn(text)
        realism.append(judge(setup.trace, quick=True).line)

    schedulers = by_scheduler(fields.get("scheduler"))
    held = None if against is None else os.fspath(against)
    candidates = [
        _candidate({**fields, "scheduler": scheduler}, item, named, said)
        for scheduler, said in schedulers
        for item, named in with_baseline(items, held, [said for _, said in schedulers])
    ]
    rows, missing = run_all(candidates, workers, _warn, first, lambda *_: None)
    broken = next((one for one in missing if one.status == IllegalDecision.exit_code), None)
    if broken is not None:
        raise IllegalDecision(f"policy {broken.label}: {broken.reason}")
    rows.sort(key=lambda row: speed(row.result))
    ranks, base = ranks_of(rows), baseline(rows, candidates, held)
    least = common_bound(row.result for row in rows)
    bound = None if least is None else least[0]
    frame = pd.DataFrame([dict(_flat(row_facts(row, ranks.get(row.label), bound, base))) for row in rows])
    frame.attrs["answer"] = verdict(rows, ranks, base)
    frame.attrs["common_bound"] = facts_of(bound)
    frame.attrs["realism"] = realism[0]
    frame.attrs["not_run"] = {one.label: one.reason for one in missing}
    return frame


def _candidate(fields: Mapping[str, Any], item: str, named: bool, said: str) -> Candidate:
    """`fine_moe variant=code` as a run; `said` tells it from others of that policy."""
    if not item.split():
        raise BadInput("policy, got an empty name: name a policy, or `all`; `moesim policies` lists them")
    name, *own = split(item)
    shared = OPTIONS.values(fields)
    bare = next((key for key in shared.get("set", {}) if "." not in key), None)
    if bare is not None:
        of_all = f"; of all, {way_out}" if (way_out := option_meant(bare, shared["set"][bare])) else ""
        raise BadInput(f"set, got {bare!r}: which policy's? write it behind the name, policy='NAME {bare}=...'{of_all}")
    params, words = for_one(name, own)
    run = {**shared, **words, "policy": name, "set": {**shared.get("set", {}), **params}}
    return Candidate(item + said, to_struct(run, RunSpec, "compare()"), named)


def _flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a result by their dotted names; what was set, and other lists, as they are."""
    for key, value in facts.items():
        if above == "" and key in TABLES:
            continue
        if isinstance(value, Mapping) and key not in ("params", "overrides"):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def _warn(text: str) -> None:
    warnings.warn(text.removeprefix("note: "), stacklevel=4)
