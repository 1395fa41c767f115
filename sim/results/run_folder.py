"""The folder of a run: known by what its result says, written whole or not at all, and nobody else's files touched."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sim.base.errors import BadInput
from sim.base.files import PART, orphans, owned_prefix, set_aside, sweep
from sim.results.tables import TABLES

CONFIG, RESULT = "config.yaml", "result.json"
OLD = ".old"
FILES = frozenset({CONFIG, RESULT, *(f"{name}.parquet" for name in TABLES)})
MAX_RESULT_BYTES = 64 * 1024 * 1024


@contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that takes its place on success; on an error nothing is left behind, unless
    the result was written: a finished run is never thrown away, and the error says where it is.

    A process that is killed leaves a hidden folder, which whoever writes `out` next removes; if it was about to
    replace a run, that one comes back first.

    Raises:
        BadInput: `out` exists and is not empty, unless it is a run's and `force` says to replace it.
    """
    target = _behind_links(out)
    for left in orphans(target, OLD):
        if not target.exists() and (left / "run").is_dir():
            (left / "run").rename(target)
        _remove(left)
    _check(out, target, force)
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    sweep(target, PART)
    part = Path(tempfile.mkdtemp(prefix=owned_prefix(target), suffix=PART, dir=parent))
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
        part.chmod(0o755)
        if not _check(out, target, force):
            if target.exists():
                target.rmdir()
            part.rename(target)
            return
        old = Path(tempfile.mkdtemp(prefix=owned_prefix(target), suffix=OLD, dir=target.parent))
        target.rename(old / "run")
        part.rename(target)
        _remove(old)
    except (BadInput, OSError) as error:
        why = error if isinstance(error, BadInput) else f"{out}: {error.strerror or error}"
        raise BadInput(f"{why}; the run that is over lies in {str(set_aside(part, target))!r}") from None


def _remove(old: Path) -> None:
    """Remove a run that was replaced: its own files. What somebody has put beside them since stays where it is."""
    if old.is_symlink():
        old.unlink()
        return
    run = old / "run"
    for name in FILES:
        with suppress(OSError):
            (run / name).unlink()
    with suppress(OSError):
        run.rmdir()
    if not run.exists():
        shutil.rmtree(old, ignore_errors=True)


def check_apart(out: Path, timeline: Path) -> None:
    """Raises BadInput when one of them is to lie in the other: the folder is put in place as a whole."""
    folder, file = _behind_links(out).absolute(), timeline.absolute()
    with suppress(OSError, RuntimeError):
        folder, file = folder.resolve(), file.parent.resolve() / file.name
    if file.is_relative_to(folder) or folder.is_relative_to(file):
        raise BadInput(
            f"--timeline, got {str(timeline)!r}: it and --out {str(out)!r} lie in one another, and the "
            "folder is put in place as a whole; name a file beside it"
        )


def _behind_links(out: Path) -> Path:
    """Where a symbolic link leads. Raises BadInput for one that leads round in a circle."""
    if not out.is_symlink():
        return out
    try:
        return out.resolve()
    except (OSError, RuntimeError):
        raise BadInput(f"--out, got {str(out)!r}: a symbolic link to itself; name a folder") from None


def _check(out: Path, target: Path, force: bool) -> bool:
    """True when an earlier run has to be replaced."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise BadInput(f"--out, got {str(out)!r}: it is a file; name a folder")
    present = {path.name: path for path in target.iterdir()}
    if not present:
        return False
    foreign = sorted(
        name for name, path in present.items() if name not in FILES or path.is_symlink() or not path.is_file()
    )
    if foreign:
        raise BadInput(
            f"--out, got {str(out)!r}: it holds {foreign[0]!r}, which is no part of a run; name a new folder"
        )
    if not _is_result(target / RESULT):
        raise BadInput(
            f"--out, got {str(out)!r}: it holds {min(present)!r} and no result of a run ({RESULT} with its "
            "run_id); name a new folder"
        )
    if not force:
        raise BadInput(f"--out, got {str(out)!r}: it holds a run; add --force to replace it, or name a new folder")
    return True


def _is_result(path: Path) -> bool:
    """Whether a file says which run it is the result of."""
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            return False
        result = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(result, dict) and isinstance(result.get("run_id"), str)
