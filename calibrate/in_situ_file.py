"""Samples of operations on the real machine's lanes, and the files that keep them beside a profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from calibrate.store import Count, MachineFacts, unpacked
from sim.base.errors import BadInput
from sim.base.files import replacing, to_struct

MAX_S = 1e6  # no operation takes longer, and no file of samples says so
PER_POINT = 4000  # samples kept of one point and case
DIGITS = 8
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
Bytes = Annotated[int, msgspec.Meta(ge=1)]


class _Kept(msgspec.Struct, kw_only=True):
    """What is alike in memory and in the file.

    Attributes:
        copies, sends: by bytes, of experts to the device and of activations to the host. verbs: the host's, by verb and
            run. overlap: by case, (share beside copies, seconds). alone: see `calibrate.duplex`. swaps: by way,
            (seconds, of them beside the other way). policy: of its code, in a run and simulated.
    """

    environment: dict[str, Any] = {}
    copies: dict[Bytes, list[Seconds]] = {}
    sends: dict[Bytes, list[Seconds]] = {}
    verbs: dict[str, dict[str, list[Seconds]]] = {}
    overlap: dict[str, list[tuple[float, Seconds]]] = {}
    policy: list[tuple[Seconds, Seconds]] = []
    alone: dict[str, list[Seconds]] = {}
    swaps: dict[str, list[tuple[Seconds, Seconds]]] = {}


class Samples(_Kept, kw_only=True):
    """Seconds by (operation, abscissa), by case; and what else there is."""

    operations: dict[tuple[str, float], dict[str, list[float]]] = {}

    def add(self, op: str, at: float, case: str, seconds: float) -> None:
        kept = self.operations.setdefault((op, at), {}).setdefault(case, [])
        if len(kept) < PER_POINT:
            kept.append(seconds)


class _Operation(msgspec.Struct):
    op: str
    at: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    case: str
    seconds: list[Seconds]


class _File(_Kept, kw_only=True):
    format: Literal[1]
    operations: list[_Operation]


class _Environment(msgspec.Struct):
    """What is read of where the samples were taken; the rest is for people."""

    device: str
    model: str
    precision: str
    cores: Count
    measured: str
    load: list[float]
    machine: MachineFacts


def save(samples: Samples, path: Path) -> None:
    """Write the samples beside the profile, whole or not at all."""
    kept = {name: getattr(samples, name) for name in _Kept.__struct_fields__}
    for name in ("overlap", "swaps"):
        kept[name] = {key: pairs[:PER_POINT] for key, pairs in kept[name].items()}
    rows = [
        {"op": op, "at": at, "case": case, "seconds": _rounded(seconds)}
        for (op, at), cases in sorted(samples.operations.items())
        for case, seconds in cases.items()
    ]
    plain = {"format": 1, "operations": rows, **_rounded(kept), "environment": samples.environment}
    with replacing(path) as part:
        part.write_bytes(gzip.compress(json.dumps(plain, separators=(",", ":")).encode(), 6, mtime=0))


def _rounded(value: Any) -> Any:
    """Times to 10 ns."""
    if isinstance(value, dict):
        return {str(key): _rounded(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(child) for child in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def beside(base: Path) -> list[Path]:
    """Files of samples of the profile `base`.yaml: NAME.lanes.json.gz first, then NAME@MODEL.lanes.json.gz."""
    first = base.with_name(f"{base.name}.lanes.json.gz")
    rest = (path for path in base.parent.glob("*.lanes.json.gz") if path.name.startswith(f"{base.name}@"))
    return [path for path in (first, *sorted(rest)) if path.is_file()]


def load(path: Path) -> Samples:
    """Read samples back. Raises BadInput."""
    try:
        plain = msgspec.json.decode(unpacked(path), type=_File)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{path}: not the samples of a calibration on the real machine ({error}); calibrate again"
        ) from None
    to_struct(plain.environment, _Environment, f"{path}: environment")
    samples = Samples(**{name: getattr(plain, name) for name in _Kept.__struct_fields__})
    for row in plain.operations:
        samples.operations.setdefault((row.op, row.at), {})[row.case] = row.seconds
    return samples
