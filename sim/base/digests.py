"""SHA-256 digests of what decides a run's numbers: texts, files, and plain data or records."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from sim.base.errors import BadInput


def of_text(text: str) -> str:
    """Of a text, as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def of_file(path: Path) -> str:
    """Of a file's bytes. Raises BadInput where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}; check the path") from None


def of_data(node: msgspec.Struct | dict[str, Any]) -> str:
    """Of what a record or plain data holds, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(node, order="sorted")).hexdigest()
