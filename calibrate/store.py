"""The raw samples of a calibration: one JSON object per measured point, kept as one compressed file and rewritten whole
after every probe, so that an interrupted run loses at most one probe and never leaves half a file.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.files import replacing

Key = Mapping[str, str | int]
FORMAT = 1
MAX_BYTES = 256 * 1024 * 1024
MAX_RATIO = 100  # unpacked to packed; samples of clocks stay far below, a thousandfold is a bomb
FREE_BYTES = 1024 * 1024  # a ratio says nothing about a small file
_BLOCK_BYTES = 256 * 1024


class Kind(NamedTuple):
    """What is alike for all points of a probe.

    Attributes:
        numbers: what the key of a measured point has to say. at: what a curve is drawn against, and `title` of it.
        range: what the profile calls the least and the largest of these.
    """

    numbers: tuple[str, ...] = ()
    at: str = ""
    title: str = ""
    range: str = ""


_EXPERT = ("hidden", "intermediate", "n_tokens")
KINDS = {
    "copy": Kind(("n_bytes",), "n_bytes", range="copy_bytes"),
    "copy_enqueue": Kind(("n_bytes",)),
    "expert": Kind(_EXPERT, "n_tokens", "Experts on the device", "expert_tokens"),
    "cpu_expert": Kind(_EXPERT, "n_tokens", "Experts on the CPU", "cpu_expert_tokens"),
    "attention": Kind((), "context", "Attention, decode", "context_tokens"),
}
"""By probe; of the others nothing is alike."""
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Versions(msgspec.Struct):
    torch: str


class _Cores(msgspec.Struct):
    physical: Count


class MachineFacts(msgspec.Struct):
    """What is read of the machine that samples were taken on (`environment.machine`); the rest is for people."""

    cpu: str
    cores: _Cores
    memory_bytes: Annotated[float, msgspec.Meta(ge=1)]
    versions: _Versions


@dataclass(frozen=True)
class Record:
    """One point of one pass: `samples_s` are seconds per call of blocks of `calls` calls."""

    probe: str
    key: Key
    round: int
    status: Literal["ok", "skipped", "failed"]
    clock: str = ""
    calls: int = 0
    samples_s: tuple[float, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)  # enqueue_s and covered (lists of numbers), bytes
    why: str = ""

    @property
    def ident(self) -> tuple[str, str, int]:
        return self.probe, key_text(self.key), self.round


def key_text(key: Key) -> str:
    """A key as one word, in a fixed order."""
    return ",".join(f"{name}={key[name]}" for name in sorted(key))


class Store:
    """All records of a calibration; later records of the same point and pass replace earlier ones."""

    def __init__(self, path: Path, records: Mapping[tuple[str, str, int], Record] | None = None) -> None:
        self.path = path
        self._records = dict(records or {})

    def add(self, record: Record) -> None:
        self._records[record.ident] = record

    def has(self, probe: str, key: Key, n_round: int) -> bool:
        """Whether a point was measured in a pass; a skipped or failed one is tried again."""
        found = self._records.get((probe, key_text(key), n_round))
        return found is not None and found.status == "ok"

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def save(self) -> None:
        """Write everything, or nothing; times are rounded to 0.1 ns, beyond what any clock here resolves."""
        lines = [json.dumps({"format": FORMAT, "n": len(self._records)})]
        for record in self._records.values():
            plain = asdict(record)
            plain["samples_s"] = [round(value, 10) for value in record.samples_s]
            lines.append(json.dumps(plain, separators=(",", ":")))
        with replacing(self.path) as part:
            # No name and no time in the header: equal samples give equal bytes.
            part.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 6, mtime=0))

    @staticmethod
    def load(path: Path) -> Store:
        """Read samples back. Raises BadInput naming file and line."""
        records: dict[tuple[str, str, int], Record] = {}
        number = 1
        try:
            lines = unpacked(path).decode().splitlines()
            if json.loads(lines[0])["format"] != FORMAT:
                raise BadInput(
                    f"{path}, got format {json.loads(lines[0])['format']!r}: this version reads {FORMAT}; "
                    "calibrate again"
                )
            for line in lines[1:]:
                number += 1
                record = _record(json.loads(line))
                records[record.ident] = record
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not text ({error.reason}); calibrate without --resume") from None
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise BadInput(f"{path} line {number}: not a sample record ({error}); calibrate without --resume") from None
        return Store(path, records)


def _record(plain: Any) -> Record:
    """One line as a record. Raises ValueError (of which msgspec's errors are)."""
    record = msgspec.convert(plain, Record)
    extra = msgspec.convert(record.extra, _Extra)
    for values, least in ((record.samples_s, 0.0), (extra.enqueue_s, 0.0), (extra.covered, -math.inf)):
        if not all(math.isfinite(value) and value >= least for value in values):
            raise ValueError("a sample is finite, and no time is negative")
    if record.status == "ok" and not record.samples_s:
        raise ValueError("it is ok and has no samples")
    for name in KINDS.get(record.probe, Kind()).numbers:
        value = record.key.get(name)
        if record.status == "ok" and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"key {name}, got {value!r}: a whole number, at least 1")
    return record


class _Extra(msgspec.Struct):
    enqueue_s: list[float] = []
    covered: list[float] = []


def unpacked(path: Path) -> bytes:
    """The text of a gzip file.

    Raises:
        BadInput: unreadable, cut, not gzip, or unpacking to more than such a file can genuinely hold.
    """
    try:
        with path.open("rb") as file, gzip.open(file) as packed:
            most_bytes = min(MAX_BYTES, FREE_BYTES + MAX_RATIO * path.stat().st_size)
            blocks, n_bytes = [], 0
            while block := packed.read(_BLOCK_BYTES):
                blocks.append(block)
                n_bytes += len(block)
                if n_bytes > most_bytes:
                    raise BadInput(
                        f"{path}: unpacks to more than {most_bytes} bytes, which samples never do; calibrate again"
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read ({error}); check the path, or calibrate without --resume") from None
    return b"".join(blocks)
