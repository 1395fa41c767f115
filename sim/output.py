"""A result as JSON, a run's inputs as one identity, and the configuration that repeats it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.data import bundled

if TYPE_CHECKING:
    from sim.setup import Setup
    from sim.spec import RunSpec


def to_json(result: dict[str, Any], indent: int | None = None) -> str:
    """JSON text with null where a figure is not finite (JSON has neither NaN nor Infinity)."""
    return json.dumps(finite(result), ensure_ascii=False, allow_nan=False, indent=indent)


def finite(value: Any) -> Any:
    """Plain data without NaN and infinities; numbers of other libraries become Python's own."""
    if isinstance(value, dict):
        return {str(key): finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [finite(child) for child in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):
        return finite(value.item())
    number = float(value)
    return number if math.isfinite(number) else None


def resolved(setup: Setup) -> dict[str, Any]:
    """What the names of a configuration meant: ids, parameters, and digests of everything the figures rest on."""
    return {
        "version": __version__,
        "policy": setup.policy.name,
        "params": dict(setup.policy.settings),
        "hw": setup.hw.id,
        "hw_sha256": _digest(setup.hw),
        "model": setup.model.id,
        "model_sha256": _digest(setup.model),
        "stack": setup.stack.id,
        "stack_sha256": _digest(setup.stack),
        "trace": setup.trace.name,
        "trace_sha256": setup.trace.sha256,
    }


def run_id(setup: Setup) -> str:
    """Twelve hex digits of everything that decides the numbers: equal inputs, equal id, wherever the files lie."""
    spec = {**msgspec.to_builtins(setup.spec), "set": None}
    for name in ("policy", "hw", "model", "stack", "trace"):
        del spec[name]  # `resolved` says what these meant
    return hashlib.sha256(to_json({**spec, **resolved(setup)}).encode()).hexdigest()[:12]


def explicit(setup: Setup) -> RunSpec:
    """The specification with nothing left to defaults that may change: trace and model named, files by whole path."""
    from sim.hardware import GPUS
    from sim.models import PACKAGE as MODELS
    from sim.stack import PACKAGE as STACKS
    from traces.catalogue import bundled_traces

    spec, trace = setup.spec, setup.trace
    return msgspec.structs.replace(
        spec,
        hw=_whole(spec.hw, GPUS),
        stack=_whole(spec.stack, STACKS),
        model=setup.model.id if spec.model is None else _whole(spec.model, MODELS),
        trace=trace.name if bundled_traces().get(trace.name) == trace.path else str(trace.path.resolve()),
    )


def _whole(name: str, package: str) -> str:
    """A bundled name as it is, the path of an own file made absolute, so that it works from any folder."""
    path = Path(name)
    return str(path.resolve()) if name not in bundled(package, ".yaml") and path.exists() else name


def _digest(node: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(node, order="sorted")).hexdigest()
