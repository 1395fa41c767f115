"""Samples of operations on the real machine's lanes, and the files that keep them beside a profile."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from calibrate.store import Count, MachineFacts, unpacked
from sim.base.errors import BadInput
from sim.base.files import replacing, to_struct

FORMAT = 1
MAX_S = 1e6  # no operation takes longer, and no file of samples says so
PER_POINT = 4000  # samples kept of one point and case


@dataclass
class Samples:
    """Seconds by (operation, abscissa), by case; and the host's by verb, by run."""

    operations: dict[tuple[str, float], dict[str, list[float]]] = field(default_factory=dict)
    copies: dict[int, list[float]] = field(default_factory=dict)  # by bytes
    sends: dict[int, list[float]] = field(default_factory=dict)  # activations to the host, by bytes
    verbs: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # the host's: by verb and run
    overlap: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # (share beside copies, seconds)
    alone: dict[str, list[float]] = field(default_factory=dict)  # see `calibrate.duplex`
    swaps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # way: (seconds, beside the other way)
    policy: list[tuple[float, float]] = field(default_factory=list)  # seconds of policy code: in a run, and simulated
    environment: dict[str, Any] = field(default_factory=dict)

    def add(self, op: str, at: float, case: str, seconds: float) -> None:
        kept = self.operations.setdefault((op, at), {}).setdefault(case, [])
        if len(kept) < PER_POINT:
            kept.append(seconds)


def save(samples: Samples, path: Path) -> None:
    """Write the samples beside the profile, whole or not at all."""
    rows = [
        {"op": op, "at": at, "case": case, "seconds": [round(s, 8) for s in seconds]}
        for (op, at), cases in sorted(samples.operations.items())
        for case, seconds in cases.items()
    ]
    plain = {
        "format": FORMAT,
        "environment": samples.environment,
        "operations": rows,
        "copies": {str(n): _rounded(s) for n, s in sorted(samples.copies.items())},
        "sends": {str(n): _rounded(s) for n, s in sorted(samples.sends.items())},
        "verbs": {
            verb: {run: _rounded(s[:PER_POINT]) for run, s in runs.items()}
            for verb, runs in sorted(samples.verbs.items())
        },
        "overlap": {case: [[f, round(s, 8)] for f, s in pairs[:PER_POINT]] for case, pairs in samples.overlap.items()},
        "policy": [[round(a, 8), round(b, 8)] for a, b in samples.policy],
        "alone": {way: _rounded(s) for way, s in samples.alone.items()},
        "swaps": {
            way: [[round(a, 8), round(b, 8)] for a, b in pairs[:PER_POINT]] for way, pairs in samples.swaps.items()
        },
    }
    with replacing(path) as part:
        part.write_bytes(gzip.compress(json.dumps(plain, separators=(",", ":")).encode(), 6, mtime=0))


def _rounded(seconds: list[float]) -> list[float]:
    return [round(s, 8) for s in seconds]


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
    samples = Samples(
        environment=plain.environment,
        copies=plain.copies,
        sends=plain.sends,
        verbs={verb: runs if isinstance(runs, dict) else {"": runs} for verb, runs in plain.verbs.items()},
        overlap=plain.overlap,
        alone=plain.alone,
        swaps=plain.swaps,
        policy=plain.policy,
    )
    for row in plain.operations:
        samples.operations.setdefault((row.op, row.at), {})[row.case] = row.seconds
    return samples


Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]


class _Operation(msgspec.Struct):
    op: str
    at: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    case: str
    seconds: list[Seconds]


class _Environment(msgspec.Struct):
    """What is read of where the samples were taken; the rest is for people."""

    device: str
    model: str
    precision: str
    cores: Count
    measured: str
    load: list[float]
    machine: MachineFacts


class _File(msgspec.Struct):
    """What `save` writes."""

    format: Literal[1]
    environment: dict[str, Any]
    operations: list[_Operation]
    copies: dict[Annotated[int, msgspec.Meta(ge=1)], list[Seconds]]
    sends: dict[Annotated[int, msgspec.Meta(ge=1)], list[Seconds]]
    verbs: dict[str, list[Seconds] | dict[str, list[Seconds]]]  # of all runs together, before version 0.2
    overlap: dict[str, list[tuple[float, Seconds]]]
    policy: list[tuple[Seconds, Seconds]] = []
    alone: dict[str, list[Seconds]] = {}
    swaps: dict[str, list[tuple[Seconds, Seconds]]] = {}
