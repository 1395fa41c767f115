"""The folder of a run: known by its manifest, written whole or not at all, and nobody else's files touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sim import __version__
from sim.base.digests import of_file
from sim.base.errors import BadInput
from sim.base.files import OLD, behind_links, hidden_folder, is_hidden, must_be_writable, orphans, set_aside, sweep
from sim.figures import SCHEMA

TABLES = ("runs", "requests", "iterations", "decisions", "spans", "layers", "experts")
CONFIG, RESULT, MANIFEST = "config.yaml", "result.json", "manifest.json"
FILES = frozenset({CONFIG, RESULT, MANIFEST, *(f"{name}.parquet" for name in TABLES)})
MAX_RESULT_BYTES = 64 * 1024 * 1024
MAX_MANIFEST_BYTES = 64 * 1024


@contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that takes its place on success; on an error nothing is left behind, unless
    the result was written: a finished run is never thrown away, and the error says where it is.

    A process that is killed leaves a hidden folder, which whoever writes `out` next removes; if it was about to
    replace a run, that one comes back first.

    The last file that is written is a manifest: the digest of each of the others. `force` replaces nothing but those.

    Raises:
        BadInput: `out` exists and is not empty, unless it is a run's and `force` says to replace it.
    """
    target = behind_links(out)
    for left in orphans(target, OLD):
        if not target.exists() and (left / "run").is_dir():
            (left / "run").rename(target)
        _remove(left)
    _check(out, target, force)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    sweep(target)
    part = hidden_folder(target)
    try:
        yield part
    except BaseException:
        if (part / RESULT).is_file():  # the last that is written: what went wrong came afterwards
            _put(out, part, target, force)
        else:
            shutil.rmtree(part, ignore_errors=True)
        raise
    _put(out, part, target, force)


def _put(out: Path, part: Path, target: Path, force: bool) -> None:
    """Put a finished run in place; somewhere else, if somebody has put something there meanwhile."""
    try:
        files = {path.name: of_file(path) for path in sorted(part.iterdir())}
        manifest = {"schema": SCHEMA, "version": __version__, "sha256": files}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        part.chmod(0o755)
        if not _check(out, target, force):
            if target.exists():
                _sweep_in(target)
                target.rmdir()
            part.rename(target)
            return
        old = hidden_folder(target, OLD)
        target.rename(old / "run")
        part.rename(target)
        _remove(old)
    except (BadInput, OSError) as error:
        why = error if isinstance(error, BadInput) else f"{out}: {error.strerror or error}"
        raise BadInput(f"{why}; the run that is over lies in {str(set_aside(part, target))!r}") from None


def _remove(old: Path) -> None:
    """Remove a run that was replaced: the files that it lists. What somebody has put beside them since stays."""
    if old.is_symlink():
        old.unlink()
        return
    run = old / "run"
    for name in [*(_listed(run) or {}), MANIFEST]:  # the list last: who goes on after a kill needs it
        with suppress(OSError):
            (run / name).unlink()
    _sweep_in(run)
    with suppress(OSError):
        run.rmdir()
    if not run.exists():
        shutil.rmtree(old, ignore_errors=True)


def _sweep_in(folder: Path) -> None:
    """Remove what killed writers left in a folder that is about to go."""
    for path in [path for path in (folder.iterdir() if folder.is_dir() else ()) if is_hidden(path.name)]:
        with suppress(OSError):
            path.unlink()


def check_place(out: Path, force: bool) -> None:
    """Find out before a run whether it can be kept there. Raises BadInput as `new_folder` does; changes nothing."""
    target = behind_links(out)
    must_be_writable(target.absolute().parent, folder=True)
    _check(out, target, force)


def check_apart(out: Path, timeline: Path) -> None:
    """Raises BadInput when one of them is to lie in the other: the folder is put in place as a whole."""
    folder, file = behind_links(out).absolute(), timeline.absolute()
    with suppress(OSError, RuntimeError):
        folder, file = folder.resolve(), file.parent.resolve() / file.name
    if file.is_relative_to(folder) or folder.is_relative_to(file):
        raise BadInput(
            f"--timeline, got {str(timeline)!r}: it and --out {str(out)!r} lie in one another, and the "
            "folder is put in place as a whole; name a file beside it"
        )


def _check(out: Path, target: Path, force: bool) -> bool:
    """True when an earlier run has to be replaced."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise BadInput(f"--out, got {str(out)!r}: it is a file; name a folder")
    present = {path.name: path for path in target.iterdir() if not is_hidden(path.name)}
    if not present:
        return False
    listed = _listed(target)
    if listed is None:
        raise BadInput(
            f"--out, got {str(out)!r}: it holds {min(present)!r} and no {MANIFEST} of a run; name a new folder, or "
            "move away what is there"
        )
    own = {*listed, MANIFEST}
    foreign = sorted(name for name, path in present.items() if name not in own or path.is_symlink() or path.is_dir())
    if foreign:
        raise BadInput(
            f"--out, got {str(out)!r}: it holds {foreign[0]!r}, which is no part of a run; name a new folder"
        )
    if not force:
        raise BadInput(f"--out, got {str(out)!r}: it holds a run; add --overwrite to replace it, or name a new folder")
    changed = sorted(name for name in present if name != MANIFEST and of_file(present[name]) != listed[name])
    if changed:
        raise BadInput(
            f"--out, got {str(out)!r}: its {changed[0]!r} has been changed since the run, and --overwrite replaces a "
            "run's "
            "own files; name a new folder, or move that file away"
        )
    return True


def _listed(folder: Path) -> dict[str, str] | None:
    """The files of a run and their digests, as its manifest has them; None without one."""
    path = folder / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        listed = json.loads(path.read_bytes())["sha256"]
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        return None
    ours = isinstance(listed, dict) and all(isinstance(digest, str) for digest in listed.values())
    return listed if ours and set(listed) <= FILES else None
