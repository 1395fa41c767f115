"""What is asked of every file of a folder of data, kept in one file, so that a run reads only those it names.

`index.json` beside the files says of each, by its SHA-256, what it is called and which shape it has. A file that is not
in it, or has changed, has to be read: an index that is out of date costs time and misleads nobody. `python
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
    """What the index says of a file; None where it has to be read."""
    index = file.with_name(NAME)
    try:
        found: dict[str, Any] | None = _read(index, index.stat().st_mtime_ns).get(file.stem)
        return found if found is not None and found["sha256"] == digest(file) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def digest(file: Path) -> str:
    """SHA-256 of a file as a checkout on any system has it: lines end as git keeps them."""
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


@lru_cache(maxsize=8)
def _read(index: Path, mtime_ns: int) -> Any:  # noqa: ARG001 - it tells a changed file
    return json.loads(index.read_text(encoding="utf-8"))
