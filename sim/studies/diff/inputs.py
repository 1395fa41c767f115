"""Which inputs of two runs differ: what was asked for, what names stand for, the figures behind them; and what each
brings by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.errors import BadInput, MoesimError
from sim.options import OPTIONS, RunSpec
from sim.results.compared import Compared, differing
from sim.run import execute, prepare
from sim.setup.naming import REPLACES, show
from sim.studies.diff.named import of_profiles

if TYPE_CHECKING:
    from sim.studies.diff.side import Progress, Side

TOLD = (
    *("version", "policy", "hw", "model", "precision", "engine", "trace", "trace_sha256", "split", "requests"),
    *("gpus", "batch", "arrivals", "seed", "hit_definition"),
)
"""What decides a run and its result tells; more is among what was set."""
ASKED = tuple(
    row.field
    for row in OPTIONS.rows
    if row.field not in (*TOLD, *REPLACES, "sim_hit", "predictor", "set")  # `hit_definition`, `set.*`
)
LOAD = "arrivals asked for"
DIGESTS = tuple(f"{what}_sha256" for what in ("arrivals", "hw", "model", "router", "scheduler", "engine"))
OF_POLICY = ("policy", "predictor")


class Alone(msgspec.Struct, frozen=True):
    """A, with one input of B. `reason`: why it cannot run so; then there are no figures."""

    input: str
    value: str
    tpot_s: float | None
    ttft_s: float | None
    hit_rate: float | None
    reason: str = ""


def inputs(a: Side, b: Side) -> list[Compared]:
    """Inputs that differ. A digest or a field that one side never told of does not differ."""
    own, other = _inputs_of(a), _inputs_of(b)
    unknown = [key for key in (*DIGESTS, *ASKED, LOAD) if not (key in own and key in other)]
    return [row for row in differing(own, other) if row.key not in unknown]


def _inputs_of(side: Side) -> dict[str, Any]:
    result = side.result
    found = {key: getattr(result, "n_requests" if key == "requests" else key) for key in TOLD}
    if result.policy_file is not None:
        found["policy_sha256"] = result.policy_file.sha256
    found |= {f"params.{key}": value for key, value in result.params.items()}
    found |= {f"set.{key}": value for key, value in result.overrides.items() if key not in result.params}
    if side.spec is not None:
        found |= {key: getattr(side.spec, key) for key in ASKED} | {LOAD: side.spec.arrivals}
    return found | {key: side.meant[key] for key in DIGESTS if key in side.meant}


def machine(a: Side, b: Side) -> list[Compared]:
    """Figures of machine, model and stack that differ; of sides that were not replayed, those that time rests on."""
    if a.figures and b.figures:
        return differing(a.figures, b.figures)
    own, other = ({f"hw.{one.figure}": one.value for one in side.result.provenance.figures} for side in (a, b))
    return [row for row in differing(own, other) if row.key in own and row.key in other]


def alone(a: Side, b: Side, progress: Progress | None) -> list[Alone]:
    """A, replayed with each single input of B: one row per input that differs, in the order of a configuration.

    Raises:
        BadInput: what replays one of the runs is not known.
    """
    for which, side in (("A", a), ("B", b)):
        if not side.replayed:
            raise BadInput(f"--one-at-a-time: {which} cannot be replayed ({'; '.join(side.notes)}); leave it out")
    assert a.spec is not None
    assert b.spec is not None
    found = []
    for name, value, change in (changes := _changes(a.spec, b.spec)):
        kind = b.kind if name == "policy" else a.kind
        try:
            setup = prepare(msgspec.structs.replace(a.spec, **change), kind)
            try:
                result = execute(setup, bounds=False).result
            finally:
                setup.close()
            found.append(Alone(name, value, result.tpot_s.mean, result.ttft_s.mean, result.hit_rate))
        except MoesimError as error:
            found.append(Alone(name, value, None, None, None, str(error)))
        if progress is not None:
            progress(len(found), len(changes))
    return found


def _changes(a: RunSpec, b: RunSpec) -> list[tuple[str, str, dict[str, Any]]]:
    """(input, its value in B, fields of A that become those of B). What only means something together is one input: a
    policy and its parameters."""
    own, other = msgspec.to_builtins(a), msgspec.to_builtins(b)
    shared, theirs = of_profiles(a.set), of_profiles(b.set)
    params, set_ = (
        {key: value for key, value in spec.set.items() if key not in of_profiles(spec.set)} for spec in (a, b)
    )
    found: list[tuple[str, str, dict[str, Any]]] = []
    if any(own[name] != other[name] for name in OF_POLICY) or params != set_:
        words = [b.policy, *(f"{key}={show(key, value)}" for key, value in set_.items())]
        found.append(("policy", " ".join(words), {**{name: other[name] for name in OF_POLICY}, "set": shared | set_}))
    changed = [name for name in own if name not in (*OF_POLICY, "set") and own[name] != other[name]]
    found += [(name, show(name, other[name]), {name: other[name]}) for name in changed]
    for row in differing(shared, theirs):
        without = {name: old for name, old in a.set.items() if name != row.key}
        there = {row.key: row.b} if row.key in theirs else {}
        found.append((row.key, show(row.key, row.b) if there else "not set", {"set": without | there}))
    return found
