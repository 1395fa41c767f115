"""What a sweep has found so far: a record for each point and each bound, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim import __version__
from sim.base.errors import BadInput
from sim.base.files import hidden_file, is_hidden, must_be_writable, sweep_out
from sim.base.json import to_json
from sim.figures import SCHEMA, check_schema
from sim.studies.answer_file import ANSWER

MANIFEST, TABLE, PLAN = "sweep.json", "sweep.parquet", "plan.json"
POINTS, BOUNDS = "points", "bounds"
LAYERED, LIMITS, SUGGESTIONS = "layered", "limits", "suggestions"  # of plans: points with layers, what else takes long
FILES = frozenset({MANIFEST, TABLE, POINTS, BOUNDS})
PLAN_FOLDERS = (POINTS, LAYERED, LIMITS, SUGGESTIONS)
PLAN_FILES = frozenset({PLAN, ANSWER, *PLAN_FOLDERS})
MAX_RECORD_BYTES = 64 * 1024 * 1024
_VERSION_CHARACTERS = 40
_SEAL = ', "sha256": "'


class Records:
    """Records by kind (`points`, `bounds`) and id: in memory, and in a folder where there is one.

    A folder holds one sweep: `sweep.json` says of which points, and each finished one is `points/ID.json`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def check_place(self) -> None:
        """Find out before points are resolved whether a sweep can be kept there. Raises BadInput; changes nothing."""
        if self.folder is not None:
            must_be_writable(self.folder, folder=True)
            self._present(FILES, "sweep")

    def begin(self, ids: Sequence[str], resume: bool) -> None:
        """Take over the folder for these points, in this order.

        Raises:
            BadInput: it holds something else, another sweep, or this one and nobody said `resume`.
        """
        if self.folder is None:
            return
        digest = _digest(ids)
        written = self.check(digest, resume)
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep_out(self.folder)
        if not written:
            manifest = {"schema": SCHEMA, "version": __version__, "n_points": len(ids), "sha256": digest, "points": ids}
            self._write(self.folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")

    def begin_plan(self, resume: bool) -> None:
        """Take over the folder for plans: their runs are found by what decides their numbers, whatever was asked.

        Raises:
            BadInput: it holds something else, runs of another version, or runs and nobody said `resume`.
        """
        if self.folder is None:
            return
        present = self._present(PLAN_FILES, "plan")
        said = f"--out, got {str(self.folder)!r}"
        if PLAN in present:
            manifest = _read(self.folder / PLAN)
            version = None if manifest is None else manifest.get("version")
            if not isinstance(version, str) or len(version) > _VERSION_CHARACTERS:
                raise BadInput(f"{said}: its {PLAN} is not one of a plan; name a new folder")
            assert manifest is not None
            check_schema(manifest, self.folder / PLAN, "name a new folder")
            if version != __version__:
                raise BadInput(f"{said}: it holds runs of version {version}, this is {__version__}; name a new folder")
            if not resume:
                raise BadInput(
                    f"{said}: it holds runs of a plan; add --resume to go on with them, or name a new folder"
                )
        elif any(any((self.folder / kind).iterdir()) for kind in present if kind in PLAN_FOLDERS):
            raise BadInput(f"{said}: it holds records and no {PLAN} to say of what; name a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep_out(self.folder)
        if PLAN not in present:
            self._write(self.folder / PLAN, json.dumps({"schema": SCHEMA, "version": __version__}) + "\n")

    def _present(self, known: frozenset[str], what: str) -> list[str]:
        """What the folder holds. Raises BadInput for anything but such files."""
        folder = self.folder
        assert folder is not None
        said = f"--out, got {str(folder)!r}"
        if not folder.exists():
            return []
        if not folder.is_dir():
            raise BadInput(f"{said}: it is a file; name a folder")
        present = sorted(path.name for path in folder.iterdir() if not is_hidden(path.name))
        if foreign := [name for name in present if name not in known]:
            raise BadInput(f"{said}: it holds {foreign[0]!r}, which is no part of a {what}; name a new folder")
        if TABLE in present:
            check_table(folder / TABLE)
        return present

    def check(self, digest: str, resume: bool) -> bool:
        """Whether the folder holds this sweep already. Raises BadInput as `begin` does; touches nothing."""
        folder = self.folder
        assert folder is not None
        said = f"--out, got {str(folder)!r}"
        present = self._present(FILES, "sweep")
        if MANIFEST not in present:
            if any((folder / kind).is_dir() and any((folder / kind).iterdir()) for kind in (POINTS, BOUNDS)):
                raise BadInput(f"{said}: it holds records and no {MANIFEST} to say of which sweep; name a new folder")
            return False
        manifest = _read(folder / MANIFEST)
        if manifest is None or not isinstance(manifest.get("points"), list):
            raise BadInput(f"{said}: its {MANIFEST} is not one of a sweep; name a new folder")
        check_schema(manifest, folder / MANIFEST, "name a new folder")
        done = sum((folder / POINTS / f"{id_}.json").is_file() for id_ in manifest["points"])
        state = f"{done:,} of {len(manifest['points']):,} points done"
        if manifest.get("sha256") != digest:
            version = manifest.get("version")
            older = f", made by version {version}" if version != __version__ else ""
            raise BadInput(
                f"{said}: it holds another sweep{older} ({state}), of other settings or of files that have changed "
                "since; name a new folder"
            )
        if not resume:
            raise BadInput(f"{said}: it holds this sweep, {state}; add --resume to go on, or name a new folder")
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
    except (OSError, ArrowException):
        ours = False
    if not ours:
        raise BadInput(
            f"{path}: it is there, and not as a sweep has written it; name a new folder, or move that file away"
        )


def _digest(ids: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([__version__, *ids]).encode()).hexdigest()


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
