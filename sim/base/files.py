"""Read untrusted YAML as data, find bundled files by name, and write files whole or not at all."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sim.base.errors import BadInput, did_you_mean

MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_YAML_BYTES = 512 * 1024  # PyYAML reads about 100 kB per second, and a profile takes a few
MOST_NEEDED = 6  # fields that an error names where one of them is missing
PART, SPOOL, OLD = ".part", ".spool", ".old"
"""How hidden names end: of what is being written, of what waits until it is, of what is being replaced."""
_HIDDEN = r"(?s)\..+\.(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]+)-[a-z0-9_]{8}\.(part|spool|old)"

T = TypeVar("T")


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document as plain data.

    Raises:
        BadInput: not YAML, a duplicate key, an alias, or nested too deep.
    """
    from sim.base import yaml_rules  # PyYAML takes a tenth of a plain run's start, which has no use for it

    return yaml_rules.parse(text, where)


def read_yaml(path: Path) -> Any:
    """Parse a YAML file of at most 512 KiB. Raises BadInput as `parse_yaml` does, or when it cannot be read."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES), str(path))


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 text file whose size is checked first. Raises BadInput."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            data = file.read(max_bytes + 1) if size_bytes <= max_bytes else b""  # a pipe or device has no size
        if max(size_bytes, len(data)) > max_bytes:
            raise BadInput(
                f"{path}, got {size_bytes or 'more'} bytes: at most {max_bytes} are read; is it the right file?"
            )
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text (byte {error.start}); is it the right file?") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}; check the path") from None
    except ValueError:
        raise BadInput(f"{str(path)!r}: not a path; check the name") from None


def read_object(path: Path, max_bytes: int, way_out: str) -> dict[str, Any]:
    """Read one JSON object of a file whose size is checked first. Raises BadInput, ending with the way out."""
    text = read_text(path, max_bytes)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON ({str(error)[:80]}); {way_out}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}, got {type(found).__name__}: not one JSON object; {way_out}")
    return found


def to_struct(data: Any, kind: type[T], where: str) -> T:
    """Convert plain data to a msgspec Struct, strictly. Raises BadInput naming the field by its path."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        message, _, path = text.partition(" - at `")
        key, _, of_key = path.partition("` in `")
        field = (of_key or path).rstrip("`").removeprefix("$.").removeprefix("$") or "top level"
        unknown, fields = re.search(r"unknown field `([^`]+)`", message), _fields_at(kind, field)
        needed = [one.encode_name for one in fields if one.required and "missing required field" in message]
        hint = "; correct the field"
        if unknown and fields:
            hint = f"; {did_you_mean(unknown.group(1), [one.encode_name for one in fields])}"
        elif needed:
            hint = f"; give all of {', '.join(needed)}" if 1 < len(needed) <= MOST_NEEDED else "; give it"
        raise BadInput(f"{where}: {f'{key} of ' if of_key else ''}{field}: {message}{hint}") from None


def _fields_at(kind: Any, path: str) -> Sequence[msgspec.inspect.Field]:
    """The fields of a Struct at a dotted path; none where that leaves Structs."""
    found: Any = msgspec.inspect.type_info(kind)
    for part in [] if path == "top level" else path.split("."):
        fields = getattr(found, "fields", ())
        found = next((field.type for field in fields if field.encode_name == part.split("[")[0]), None)
        found = getattr(found, "item_type", found)
        options = getattr(found, "types", (found,))
        found = next((one for one in options if isinstance(one, msgspec.inspect.StructType)), None)
    return found.fields if isinstance(found, msgspec.inspect.StructType) else ()


def bundled(package: str, suffix: str) -> dict[str, Path]:
    """Map the stem of every `*suffix` file in a data package (`hwprofiles.gpus`) to its path, sorted by name."""
    folder = _folder(package)
    return dict(_listed(folder, suffix, folder.stat().st_mtime_ns))


@cache
def _folder(package: str) -> Path:
    top, *rest = package.split(".")
    return Path(import_module(top).__path__[0], *rest)


@lru_cache(maxsize=64)
def _listed(folder: Path, suffix: str, mtime_ns: int) -> dict[str, Path]:  # noqa: ARG001 - it tells a changed folder
    found = {entry.name.removesuffix(suffix): entry for entry in folder.iterdir() if entry.name.endswith(suffix)}
    return dict(sorted(found.items()))


def hidden_file(target: Path, folder: Path | None = None) -> Path:
    """A new empty file for what will be `target`, beside it or in `folder`.

    Its name says which process of which machine writes, so that others know what a killed one has left.
    """
    from tempfile import mkstemp

    handle, name = mkstemp(prefix=owned_prefix(target), suffix=PART, dir=folder or target.parent)
    os.close(handle)
    return Path(name)


def hidden_folder(target: Path, suffix: str = PART) -> Path:
    """A new empty folder of that kind beside `target`, under such a name."""
    from tempfile import mkdtemp

    return Path(mkdtemp(prefix=owned_prefix(target), suffix=suffix, dir=target.absolute().parent))


def owned_prefix(target: Path) -> str:
    """How hidden names beside `target` begin while this process works on it."""
    return f".{target.name}.{_host()}-{os.getpid()}-"


def is_hidden(name: str) -> bool:
    """Whether a name is one of those: whoever looks into a folder passes over them, or sweeps them out."""
    return re.fullmatch(_HIDDEN, name) is not None


def _is_orphan(name: str) -> bool:
    """Whether a killed process of this machine left it.

    What belongs to a living process or to another machine is none, and on Windows, where asking whether a process lives
    takes more than a signal, nothing is.
    """
    found = re.fullmatch(_HIDDEN, name)
    return found is not None and found["host"] == _host() and not _alive(int(found["pid"]))


def orphans(target: Path, suffix: str) -> list[Path]:
    """What killed processes left beside `target` under such names."""
    hidden = target.parent.glob(f".{glob.escape(target.name)}.{_host()}-*{suffix}")
    return [left for left in hidden if _is_orphan(left.name)]


def sweep(target: Path, suffix: str = PART) -> None:
    """Remove the orphans, now that somebody writes `target` again."""
    _remove(orphans(target, suffix))


def sweep_out(folder: Path) -> None:
    """Remove all orphans in a folder of ours, but for what was being replaced: that may be a finished run."""
    _remove([left for left in folder.iterdir() if _is_orphan(left.name) and left.suffix != OLD])


def _remove(hidden: list[Path]) -> None:
    for left in hidden:
        if left.is_dir() and not left.is_symlink():
            from shutil import rmtree

            rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@cache
def _host() -> str:
    import platform  # for those who write

    return hashlib.sha256(platform.node().encode("utf-8", "replace")).hexdigest()[:8]


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def behind_links(path: Path) -> Path:
    """Where a symbolic link leads. Raises BadInput for one that leads round in a circle."""
    if not path.is_symlink():
        return path
    with suppress(OSError, RuntimeError):
        found = path.resolve()
        if not found.is_symlink():
            return found
    raise BadInput(f"{str(path)!r}: a symbolic link to itself; choose another place")


def _must_be_replaceable(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise BadInput(f"{path}: it is {what}, and output replaces what has its name; name a file")
    if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):  # to root every file looks writable
        raise BadInput(f"{path}: it is read-only, and output would replace it; name another file, or make it writable")


def must_be_writable(target: Path, folder: bool = False) -> None:
    """Find out now, not after the work, whether `target` can be written; nothing is changed, and nothing left behind.

    Args:
        folder: it is to be a folder with files in it. Folders above it that are missing are made when it is written.

    Raises:
        BadInput: no file can be made there; it is a folder, a device or a pipe, or read-only; or no folder.
    """
    try:
        place = behind_links(target)
        if not folder:
            _must_be_replaceable(place)
        elif place.exists() and not place.is_dir():
            raise BadInput(f"{target}: it is a file; name a folder")
        above = place if folder else place.parent
        while not above.exists() and not above.is_symlink():
            above = above.parent
        sweep(above / place.name)  # one that was killed here has left its own
        hidden_file(place, above).unlink()
    except OSError as error:
        raise BadInput(f"{target}: {error.strerror or error}; choose another place") from None
    except ValueError:
        raise BadInput(f"{str(target)!r}: not a path; check the name") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on any error nothing is left behind.

    A symbolic link stays one, and a file that is replaced hands on its permissions. A process that is killed leaves a
    hidden `.NAME.*.part`, which whoever writes `path` next removes.

    Raises:
        BadInput: `path` is read-only, a folder, or a device or pipe (renaming over /dev/null would leave the machine
            without one).
    """
    path = behind_links(path)
    _must_be_replaceable(path)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    part = hidden_file(path)
    try:
        yield part
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.chmod(mode)
    try:
        part.replace(path)
    except OSError as error:
        raise BadInput(
            f"{path}: {error.strerror or error}; what was written lies in {str(set_aside(part, path))!r}"
        ) from None


def set_aside(part: Path, path: Path) -> Path:
    """Give finished work that cannot have its name the next one that is free: `NAME.1`; where it then is."""
    for n in range(1, 1000):
        other = path.with_name(f"{path.name}.{n}")
        if not other.exists() and not other.is_symlink():
            try:
                return part.rename(other)
            except OSError:
                return part
    return part


def write_json(path: Path, data: Any) -> None:
    """Write one JSON document, whole or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
