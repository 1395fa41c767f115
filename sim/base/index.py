"""What is asked of the files of a folder of data, kept in one file: a run reads only those it names, and parses none.

`index.json` beside the files has a line for each: its SHA-256, what it is called, its shape, and what is in it. A file
that is not there, or has changed, has to be read: an index that is out of date costs time and misleads nobody. `python
tools/index.py` writes it.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

NAME = "index.json"


def facts(file: Path) -> dict[str, Any] | None:
    """What the index says of a file, for the caller alone; None where it has to be read."""
    index = file.with_name(NAME)
    try:
        line = _lines(index, index.stat().st_mtime_ns).get(file.stem)
        found: dict[str, Any] | None = None if line is None else json.loads(line)
        return found if found is not None and found["sha256"] == digest(file) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def digest(file: Path) -> str:
    """SHA-256 of a file as a checkout on any system has it: lines end as git keeps them."""
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def written(facts: dict[str, dict[str, Any]]) -> str:
    """The text of an index: one JSON object, with a line per file."""
    lines = (f"{json.dumps(stem)}: {json.dumps(said, ensure_ascii=False)}" for stem, said in facts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


@lru_cache(maxsize=8)
def _lines(index: Path, mtime_ns: int) -> dict[str, str]:  # noqa: ARG001 - it tells a changed file
    """Stem -> what its line says, not parsed yet: a run asks for a few of them."""
    halves = (line.partition('": ') for line in index.read_text(encoding="utf-8").split("\n")[1:-2])
    return {name[1:]: said.removesuffix(",") for name, _, said in halves}
