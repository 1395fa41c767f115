"""Write files whole or not at all, with the standard library alone.

`sim.data.replacing` does the same, but importing it needs msgspec, and the training chain has to run on machines where
nothing but torch, transformers and what they bring is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on any error nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write one JSON document."""
    with replacing(path) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
