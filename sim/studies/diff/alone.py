"""What each input that differs brings by itself: the first run, replayed with that one taken from the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.base.errors import BadInput, MoesimError
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.setup.naming import show

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.studies.diff.side import Side

OF_POLICY = ("policy", "predictor")
Told = Callable[[int, int], None]


class Alone(NamedTuple):
    """A, with one input of B. `reason`: why it cannot run so; then there are no figures."""

    input: str
    value: str
    tpot_s: float | None
    ttft_s: float | None
    hit_rate: float | None
    reason: str = ""


def alone(a: Side, b: Side, progress: Told | None) -> list[Alone]:
    """One row per input that differs, in the order of a configuration.

    Raises:
        BadInput: what replays one of the runs is not known.
    """
    for which, side in (("A", a), ("B", b)):
        if not side.replayed:
            raise BadInput(f"--one-at-a-time: {which} cannot be replayed ({'; '.join(side.notes)}); leave it out")
    assert a.spec is not None
    assert b.spec is not None
    changes = _changes(a.spec, b.spec)
    found = []
    for at, (name, value, spec) in enumerate(changes):
        kind = b.kind if name == "policy" else a.kind
        found.append(_run(name, value, spec, kind))
        if progress is not None:
            progress(at + 1, len(changes))
    return found


def _changes(a: RunSpec, b: RunSpec) -> list[tuple[str, str, RunSpec]]:
    """(input, its value in B, A with that of B). What only means something together is one input: a policy and its
    parameters."""
    own, other = msgspec.to_builtins(a), msgspec.to_builtins(b)
    found: list[tuple[str, str, dict[str, Any]]] = []
    mine = {**{name: other[name] for name in OF_POLICY}, "set": {**_shared(a), **_own(b)}}
    if any(own[name] != other[name] for name in OF_POLICY) or _own(a) != _own(b):
        words = [b.policy, *(f"{key}={show(key, value)}" for key, value in _own(b).items())]
        found.append(("policy", " ".join(words), mine))
    grouped = (*OF_POLICY, "set")
    alike = [name for name in own if name in grouped or own[name] == other[name]]
    found += [(name, show(name, other[name]), {name: other[name]}) for name in own if name not in alike]
    for key in dict.fromkeys([*_shared(a), *_shared(b)]):
        if _shared(a).get(key) != _shared(b).get(key):
            without = {name: value for name, value in a.set.items() if name != key}
            given = {key: b.set[key]} if key in b.set else {}
            found.append((key, show(key, b.set[key]) if given else "not set", {"set": {**without, **given}}))
    return [(name, value, msgspec.structs.replace(a, **change)) for name, value, change in found]


def _shared(spec: RunSpec) -> dict[str, Any]:
    from sim.profiles.overrides import GROUPS

    return {key: value for key, value in spec.set.items() if "." in key and key.partition(".")[0] in GROUPS}


def _own(spec: RunSpec) -> dict[str, Any]:
    return {key: value for key, value in spec.set.items() if key not in _shared(spec)}


def _run(name: str, value: str, spec: RunSpec, kind: type[Policy] | None) -> Alone:
    try:
        setup = prepare(spec, kind)
        try:
            result = execute(setup, bounds=False).result
        finally:
            setup.close()
    except MoesimError as error:
        return Alone(name, value, None, None, None, str(error))
    return Alone(name, value, result.tpot_s.mean, result.ttft_s.mean, result.hit_rate)
