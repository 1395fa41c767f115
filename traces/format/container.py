"""The safetensors container: read a header that cannot be trusted, write one whose bytes are always the same."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sim.base.errors import BadInput
from traces.format.layout import DTYPES, MAX_HEADER_BYTES


class Entry(msgspec.Struct, frozen=True):
    """Where one tensor lies: data type by its safetensors name, shape, and the bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_file(path: Path) -> tuple[dict[str, str], dict[str, Entry], NDArray[np.uint8]]:
    """Metadata map, tensors and mapped bytes of a safetensors file; reads only the header, its declared size first.

    Raises:
        BadInput: unreadable, not a regular file, header too large, or anything the safetensors library refuses
            (sizes past the end of the file, overlaps, holes, unknown types).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: a pipe would block
            raise BadInput(f"{path}: not a regular file; give the path of a trace file")
        with path.open("rb") as file:
            text = _header_text(file, path)
            with safe_open(str(path), framework="numpy"):
                pass  # opening is the check: offsets, sizes, overlaps and types are judged by the format's own library
            mapped = np.memmap(file, np.uint8, "r")
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return read_file(path)  # replaced in between: the library judged another file
    except SafetensorError as error:
        raise BadInput(f"{path}: not a valid safetensors file ({str(error)[:120]}); copy or record it again") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or 'cannot be read'}; check the path") from None
    except ValueError:
        raise BadInput(f"{str(path)!r}: not a path; check the name") from None
    return *_entries(_plain_json(text, path), 8 + len(text), path), mapped


def _header_text(file: BinaryIO, path: Path) -> bytes:
    """The JSON behind the length prefix, once that length is known to be sane."""
    n_file, prefix = os.fstat(file.fileno()).st_size, file.read(8)
    n_header = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
    if n_header < 2 or n_header > n_file - 8:
        raise BadInput(
            f"{path}, got {n_file} bytes: too short for its header, or not a safetensors file; copy or record it again"
        )
    if n_header > MAX_HEADER_BYTES:
        raise BadInput(
            f"{path}, got a header of {n_header} bytes: at most {MAX_HEADER_BYTES} are read; is it a routing trace?"
        )
    return file.read(n_header)


def _entries(header: dict[str, Any], base: int, path: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    metadata = header.pop("__metadata__", None) or {}
    entries = {}
    for name, fact in header.items():
        begin, end = fact["data_offsets"]
        entries[name] = Entry(fact["dtype"], tuple(fact["shape"]), base + begin, base + end)
        if fact["dtype"] not in DTYPES:
            raise BadInput(
                f"{path}: {name[:60]!r}, got type {fact['dtype']}: a trace uses {', '.join(DTYPES)}; "
                f"is it a routing trace?"
            )
    return metadata, entries


def _plain_json(text: bytes, path: Path) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BadInput(f"{path}: a name appears twice in the header; write the trace again")
        return found

    try:
        header: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError):  # the two parsers disagree: believe neither
        raise BadInput(f"{path}: the header is not plain JSON; write the trace again") from None
    return header


def layout(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Place tensors (name -> type, shape) behind each other, widest type first so that all stay aligned, then by name.

    Returns entries in file order whose offsets count from the end of the header.
    """
    entries: dict[str, Entry] = {}
    at = 0
    for name in sorted(shapes, key=lambda name: (-DTYPES[shapes[name][0]].itemsize, name)):
        dtype, shape = shapes[name]
        n_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = Entry(dtype, shape, at, at + n_bytes)
        at += n_bytes
    return entries


def header_bytes(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """Length prefix and JSON header, metadata sorted by key, padded with spaces to a multiple of 8 bytes.

    Raises:
        BadInput: the header would exceed what a reader accepts.
    """
    facts: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for name, entry in entries.items():
        facts[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise BadInput(f"trace header, got {len(text)} bytes: at most {MAX_HEADER_BYTES}; shorten notes or task names")
    return struct.pack("<Q", len(text)) + text
