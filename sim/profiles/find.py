"""Find a model, hardware profile or stack by id, alias, or path, and read it as plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar

from sim.base import index
from sim.base.errors import BadInput, did_you_mean
from sim.base.files import MAX_JSON_BYTES, MAX_YAML_BYTES, bundled, read_text, read_yaml, to_struct
from sim.base.paths import mode_of
from sim.base.quantities import explain

T = TypeVar("T")
OF_THE_ORIGINAL = re.compile(r"^(?:aliases|note):.*\n(?:(?:[ \t]*\n)*(?:[ \t]+\S|- ).*\n)*", re.MULTILINE)
PACKAGE = Path(__file__).resolve().parents[2]  # in which the bundled files lie


def find(package: str, what: str, name_or_path: str) -> Path:
    """Return the file meant by an id (`rtx3090`), a spelling of it (`RTX-3090`), an alias or a path.

    Raises:
        BadInput: no such name or file, or an alias that several files have.
    """
    files = bundled(package, ".yaml")
    if name_or_path in files:
        return files[name_or_path]
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json") or S_ISDIR(mode_of(path)):
        path = path / "config.json" if S_ISDIR(mode_of(path)) else path
        if not S_ISREG(mode_of(path)):
            raise BadInput(f"{what}, got {name_or_path!r}: no such file; check the path")
        return path
    meant = called(package, name_or_path)
    if len(meant) > 1:
        both = " and ".join(file.stem for file in meant)
        raise BadInput(
            f"{what}, got {name_or_path!r}: an alias of {both}; name one by its id, or take the alias out of a file"
        )
    if meant:
        return meant[0]
    if S_ISREG(mode_of(path)):
        raise BadInput(f"{what}, got {name_or_path!r}: a file of yours ends in .yaml, .yml or .json; rename it")
    raise BadInput(
        f"{what}, got {name_or_path!r}: unknown; "
        f"{did_you_mean(name_or_path, files, chain.from_iterable(map(_aliases, files.values())))}"
    )


def called(package: str, name: str) -> list[Path]:
    """The files of a data package that an id means, a spelling of it, or an alias, which several may have."""
    files = bundled(package, ".yaml")
    plain = {_plain(stem): file for stem, file in files.items()}
    if _plain(name) in plain:
        return [plain[_plain(name)]]
    return [file for file in files.values() if _plain(name) in map(_plain, _aliases(file))]


def as_a_start(package: str, what: str, name: str | None, alone: bool) -> str:
    """The text of the file that a name means, as `--yaml` prints it for a file of one's own: without what is of the
    original alone, its aliases and its note. Raises BadInput without a name, or not `alone`."""
    if name is None or not alone:
        raise BadInput("--yaml, got no name, or --set or --json beside it: it prints one file; name it alone")
    return OF_THE_ORIGINAL.sub("", read_text(find(package, what, name), MAX_YAML_BYTES))


def _aliases(file: Path) -> list[str]:
    known = index.facts(file)
    return names_in(file) if known is None else list(known["names"])


def names_in(file: Path) -> list[str]:
    """What else a file says it is called."""
    data = read_yaml(file)
    return [str(name) for name in (*data.get("aliases", []), data.get("hf_id")) if name]


def read(path: Path, what: str) -> dict[str, Any]:
    """Read one file whose top level is a mapping with word keys.

    Raises:
        BadInput: unreadable, not YAML (or, named `.json`, not JSON), or not a mapping.
    """
    known = index.facts(path) if path.is_relative_to(PACKAGE) else None
    if known is not None and "data" in known:
        data = known["data"]
    else:
        data = _read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise BadInput(f"{path}, got a {type(data).__name__}: a {what} file maps fields to values; is it the one?")
    return data


def convert(data: Any, kind: type[T], where: str) -> T:
    """`to_struct`, with the remedy for a bare number where a figure with its origin belongs. Raises BadInput."""
    try:
        return to_struct(data, kind, where)
    except BadInput as error:
        raise explain(error) from None
    except UnicodeEncodeError:
        raise BadInput(f"{where}: half a surrogate pair (\\ud800 to \\udfff) is not text; fix the file") from None


def _read_json(path: Path) -> Any:
    # Almost every JSON text is YAML, but not one indented with tabs or with surrogate pairs in its strings.
    try:
        return json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON ({error}); fix the file") from None


def where(path: Path, overrides: Mapping[str, object] | None) -> str:
    """How messages name the origin of a value: the file (a bundled one from its folder on, not where that is
    installed), and the fact that `--set` changed some of it.
    """
    shown = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path
    return f"{shown} with --set {', '.join(overrides)}" if overrides else str(shown)


def _plain(name: str) -> str:
    """`Qwen/Qwen1.5-MoE-A2.7B` -> `qwen15moea27b`: case, punctuation and the organisation do not matter."""
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())
