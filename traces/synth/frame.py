"""The file of a drawn trace before its requests are drawn: header, request table, and room for every row."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from sim.base.errors import BadInput
from sim.base.files import hidden_file, replacing, sweep
from traces.format.container import header_bytes, layout, read_file
from traces.format.growing import DRAWN_SHA256, Rows
from traces.format.layout import TENSORS, Array
from traces.format.parts import type_name


def digest_path(path: Path) -> Path:
    """Where the digest of all but the rows lies."""
    return path.with_name(f"{path.name}.sha256")


def is_sound(path: Path) -> bool:
    """Whether all but the rows is as it was written."""
    with suppress(OSError, ValueError, BadInput):
        return digest_path(path).read_text(encoding="ascii").strip() == _digest(path)
    return False


def _digest(path: Path) -> str:
    _, entries, mapped = read_file(path)
    digest = hashlib.sha256(mapped[: min(entry.start for entry in entries.values())].data)
    for name in sorted(name for name in entries if not TENSORS[name].by_row):
        digest.update(mapped[entries[name].start : entries[name].stop].data)
    return digest.hexdigest()


def begin(path: Path, metadata: Mapping[str, str], rows: Rows, tables: Mapping[str, Array], drawn_from: str) -> None:
    """Make the file without any request, unless another process was first.

    Args:
        metadata: of the header. rows: of one request, for their types and widths; they enter the trace's digest, as
            what draws them does. tables: the tensors that are no rows. drawn_from: what else decides the rows.
    """
    n_rows = int(tables["req_offsets"][-1])
    n_of = {"all": n_rows, "decode": n_rows - int(tables["req_prompt_len"].sum())}
    shapes = {name: (type_name(values), values.shape) for name, values in tables.items()}
    for name, values in rows.items():
        kept = metadata.get(f"{name.removesuffix('.ids')}.rows", "all")
        shapes[name] = (type_name(values), (n_of[kept], *values.shape[1:]))
    entries = layout(shapes)
    digest = hashlib.sha256(header_bytes(metadata, entries) + drawn_from.encode())
    for values in (*(tables[name] for name in sorted(tables)), *(rows[name] for name in sorted(rows))):
        digest.update(np.ascontiguousarray(values).data)
    header = header_bytes({**metadata, DRAWN_SHA256: digest.hexdigest()}, entries)
    sweep(path)
    part = hidden_file(path)
    try:
        with part.open("wb") as file:
            file.write(header)
            for name, values in tables.items():
                file.seek(len(header) + entries[name].start)
                file.write(np.ascontiguousarray(values).data)
            file.truncate(len(header) + max(entry.stop for entry in entries.values()))
            file.flush()
            os.fsync(file.fileno())
        with replacing(digest_path(path)) as own:
            own.write_text(f"{_digest(part)}\n", encoding="ascii")
        part.chmod(0o644)
        try:
            os.link(part, path)  # never over another's: who has that open goes on with it
        except FileExistsError:
            return
        except OSError:
            part.replace(path)  # a file system without links
    finally:
        part.unlink(missing_ok=True)
