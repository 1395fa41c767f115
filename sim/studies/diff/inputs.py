"""Which inputs of two runs differ: what was asked for, what names stand for, and the figures behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.options import OPTIONS

if TYPE_CHECKING:
    from sim.studies.diff.side import Side

LOAD = "arrivals asked for"
TOLD = (
    "version",
    "policy",
    "hw",
    "model",
    "precision",
    "engine",
    "trace",
    "trace_sha256",
    "split",
    "requests",
    "gpus",
    "batch",
    "arrivals",
    "seed",
    "hit_definition",
)
TOLD_OF = (*TOLD, "engine", "policy", "set", "pcie", "vram", "cache", "cpu", "predictor", "sim_hit", "arrivals")
"""Fields of a run that its result tells, under the same name or as what was set."""
ASKED = tuple(row.field for row in OPTIONS.rows if row.field not in TOLD_OF)
DIGESTS = ("arrivals_sha256", "hw_sha256", "model_sha256", "router_sha256", "scheduler_sha256", "engine_sha256")


class Input(NamedTuple):
    """An input that is not the same in both; None: that side has none of it, or nobody knows."""

    key: str
    a: Any
    b: Any


def inputs(a: Side, b: Side) -> list[Input]:
    """Inputs that differ, what weighs most first; empty where none does."""
    own, other = _of(a), _of(b)
    keys = [*own, *(key for key in other if key not in own)]
    return [
        Input(key, own.get(key), other.get(key))
        for key in keys
        if own.get(key) != other.get(key) and not _unknown(key, own, other)
    ]


def _unknown(key: str, own: dict[str, Any], other: dict[str, Any]) -> bool:
    """A digest or a field that one side never told of does not differ."""
    return key in (*DIGESTS, *ASKED, LOAD) and not (key in own and key in other)


def _of(side: Side) -> dict[str, Any]:
    told = side.told
    facts: dict[str, Any] = msgspec.to_builtins(told)
    found = {key: facts[key] for key in TOLD}
    if told.policy_file is not None:
        found["policy_sha256"] = told.policy_file.sha256
    found |= {f"params.{key}": value for key, value in told.params.items()}
    found |= {f"set.{key}": value for key, value in told.overrides.items() if key not in told.params}
    if side.spec is not None:
        found |= {key: getattr(side.spec, key) for key in ASKED}
        found[LOAD] = side.spec.arrivals
    return found | {key: side.meant[key] for key in DIGESTS if key in side.meant}


def machine_figures(a: Side, b: Side) -> list[Input]:
    """Figures of machine, model and stack that differ; of sides that were not replayed, those that time rests on."""
    if a.figures and b.figures:
        own, other = a.figures, b.figures
        keys = dict.fromkeys([*own, *other])
        return [Input(key, own.get(key), other.get(key)) for key in keys if own.get(key) != other.get(key)]
    rests = [{f"hw.{one.figure}": one.value for one in side.told.provenance.figures} for side in (a, b)]
    shared = [key for key in rests[0] if key in rests[1]]
    return [Input(key, rests[0][key], rests[1][key]) for key in shared if rests[0][key] != rests[1][key]]


def rests_on(side: Side, key: str) -> float:
    """The share of a run's time that rests on a figure."""
    name = key.removeprefix("hw.")
    return sum(one.share for one in side.told.provenance.figures if one.figure in (name, key))
