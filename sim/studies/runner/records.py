"""What a study has found so far: a record for each point and each bound, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sim import __version__
from sim.base.errors import BadInput
from sim.base.files import hidden_file, is_hidden, must_be_writable, sweep_out
from sim.base.json import to_json
from sim.figures import SCHEMA, check_schema
from sim.studies.answer_file import ANSWER

TABLE = "sweep.parquet"
POINTS, BOUNDS = "points", "bounds"
LAYERED, LIMITS = "layered", "limits"
"""Of plans: points with their layers, and lower bounds of every request."""
MAX_RECORD_BYTES = 64 * 1024 * 1024
_VERSION_CHARACTERS = 40
_SEAL = ', "sha256": "'


class Layout(NamedTuple):
    """What a folder of records may hold: a manifest that says of what, folders of records, and another file."""

    what: str
    manifest: str
    kinds: tuple[str, ...]
    file: str

    def held_by(self, folder: Path) -> list[str]:
        """What the folder holds. Raises BadInput for anything but such files."""
        said = f"--out, got {str(folder)!r}"
        if not folder.exists():
            return []
        if not folder.is_dir():
            raise BadInput(f"{said}: it is a file; name a folder")
        present = sorted(path.name for path in folder.iterdir() if not is_hidden(path.name))
        if foreign := [name for name in present if name not in (self.manifest, *self.kinds, self.file)]:
            raise BadInput(f"{said}: it holds {foreign[0]!r}, which is no part of a {self.what}; name a new folder")
        if TABLE in present:
            check_table(folder / TABLE)
        return present


SWEEP = Layout("sweep", "sweep.json", (POINTS, BOUNDS), TABLE)
PLAN = Layout("plan", "plan.json", (POINTS, LAYERED, LIMITS), ANSWER)
RATES = Layout("search for rates", "saturate.json", (POINTS,), ANSWER)


class Records:
    """Records by kind (`points`, `bounds`) and id: in memory, and in a folder where there is one.

    A folder holds one sweep, whose manifest says of which points, or runs of plans, which are found by what decides
    their numbers, whatever was asked. Each record is `KIND/ID.json`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def check_place(self) -> None:
        """Find out before points are resolved whether a sweep can be kept there. Raises BadInput; changes nothing."""
        if self.folder is not None:
            must_be_writable(self.folder, folder=True)
            SWEEP.held_by(self.folder)

    def begin(self, layout: Layout, resume: bool, ids: Sequence[str] = ()) -> None:
        """Take over the folder; of a sweep for these points, in this order.

        Raises:
            BadInput: it holds something else, another sweep, runs of another version, or what was asked for and nobody
                said `resume`.
        """
        if self.folder is None:
            return
        written = self._holds(layout, resume, list(ids))
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep_out(self.folder)
        if not written:
            points = {"n_points": len(ids), "points": ids} if ids else {}
            manifest = {"schema": SCHEMA, "version": __version__, **points}
            self._write(self.folder / layout.manifest, json.dumps(manifest, indent=1) + "\n")

    def _holds(self, layout: Layout, resume: bool, ids: list[str]) -> bool:
        """Whether the folder holds this already. Raises BadInput as `begin` does; touches nothing."""
        folder = self.folder
        assert folder is not None
        said, what = f"--out, got {str(folder)!r}", layout.what
        present = layout.held_by(folder)
        if layout.manifest not in present:
            if any(any((folder / kind).iterdir()) for kind in layout.kinds if kind in present):
                raise BadInput(
                    f"{said}: it holds records and no {layout.manifest} to say of which {what}; name a new folder"
                )
            return False
        manifest = _read(folder / layout.manifest) or {}
        version, points = manifest.get("version"), manifest.get("points")
        known = isinstance(version, str) and len(version) <= _VERSION_CHARACTERS
        if not known or isinstance(points, list) != bool(ids):
            raise BadInput(f"{said}: its {layout.manifest} is not one of a {what}; name a new folder")
        check_schema(manifest, folder / layout.manifest, "name a new folder")
        if version != __version__:
            raise BadInput(f"{said}: it holds runs of version {version}, this is {__version__}; name a new folder")
        held = f"runs of a {what}"
        if points is not None:
            done = sum((folder / POINTS / f"{id_}.json").is_file() for id_ in points)
            held = f"this {what}, {done:,} of {len(points):,} points done"
            if points != ids:
                raise BadInput(
                    f"{said}: it holds another{held.removeprefix('this')}, of other settings or of files that have "
                    "changed since; name a new folder"
                )
        if not resume:
            raise BadInput(f"{said}: it holds {held}; add --resume to go on, or name a new folder")
        return True

    def get(self, kind: str, id_: str) -> dict[str, Any] | None:
        """A record, None where there is none as it was written: a damaged one is found again by a run."""
        found = self._known.get((kind, id_))
        if found is None and self.folder is not None:
            found = _read(self.folder / kind / f"{id_}.json", sealed=True)
            if found is None or found.get("id") != id_ or found.get("schema") != SCHEMA:
                return None
        return found

    def put(self, kind: str, id_: str, record: dict[str, Any]) -> None:
        """Keep a record; one that says so itself (`kept`: false) is not written."""
        if self.folder is not None and record.get("kept", True):
            self._write(self.folder / kind / f"{id_}.json", _sealed(to_json(record)))
        else:
            self._known[kind, id_] = record

    def _write(self, path: Path, text: str) -> None:
        """Under a hidden name first: whoever is killed leaves a whole record or none."""
        assert self.folder is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        part = hidden_file(path, self.folder)
        try:
            part.write_text(text, encoding="utf-8")
            part.chmod(0o644)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def check_table(path: Path) -> None:
    """Raises BadInput where a table would replace a file that is none of ours; ours say so in their metadata."""
    if not path.exists():
        return
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        ours = b"moesim" in (pq.read_schema(path).metadata or {})
    except (OSError, ArrowException, UnicodeDecodeError):  # pyarrow decodes names of columns
        ours = False
    if not ours:
        raise BadInput(
            f"{path}: it is there, and not as a sweep has written it; name a new folder, or move that file away"
        )


def _sealed(text: str) -> str:
    """JSON of a record with one more name, the digest of all before it."""
    return f'{text[:-1]}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def _is_sealed(written: bytes) -> bool:
    record, seal, digest = written.rpartition(_SEAL.encode())
    return bool(seal) and digest == hashlib.sha256(record + b"}").hexdigest().encode() + b'"}\n'


def _read(path: Path, sealed: bool = False) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            return None
        written = path.read_bytes()
        if sealed and not _is_sealed(written):
            return None
        data = json.loads(written)
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
