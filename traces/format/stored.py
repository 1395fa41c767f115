"""A routing trace's file: memory-mapped, checked in structure when opened, its tensors as they are stored."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import time
from collections.abc import Hashable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from sim.base.errors import BadInput
from traces.format.blocks import Column, unsqueezed
from traces.format.container import Entry, read_file
from traces.format.growing import DRAWN_SHA256, Growing
from traces.format.header import Header, code_of, parse_header
from traces.format.layout import CODES, DTYPES, LEVELS, TENSORS, Array, Code, common_scale
from traces.format.requests import RequestTable
from traces.format.structure import check_requests, check_shapes

_DIGESTS: dict[tuple[int, ...], str] = {}  # by what a file system knows of a file: device, number, size, last change
_STRUCTURES: dict[tuple[int, ...], dict[str, Any]] = {}  # the same, of files that were opened last
MOST_STRUCTURES = 4
_OWN = {"path", "_bytes"}  # of each that opens it
SETTLED_S = 2.0
"""Files younger than this may change once more without a later time of change."""


def _facts(of: os.stat_result) -> tuple[int, ...]:
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns


def _facts_of(path: Path) -> tuple[int, ...] | None:
    """None where they do not tell whether it is the same file later."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return _facts(found) if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > SETTLED_S else None


class StoredTrace:
    """One open trace file of T rows (tokens), L MoE layers, E experts of which K serve a token, and N requests.

    A file must not be changed while it is open (the writer never does: it replaces). Rows are numbered over the whole
    file; `requests[i]` says which belong together.

    Raises:
        BadInput: from the constructor, when the file's structure breaks a rule of FORMAT.md.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        facts = _facts_of(self.path)
        if facts in _STRUCTURES and self._open_again():
            return
        where = str(self.path)
        pairs, entries, self._bytes = read_file(self.path)
        self.header: Header = parse_header(pairs, where)
        self._entries, self._squeezed = unsqueezed(pairs, entries, self._bytes, where)
        self._decode_only = check_shapes(self.header, pairs, self._entries, where)
        self._codes: dict[str, Code] = {
            name: code_of(name, pairs, where) for name in self._entries if f"{name}.code" in pairs
        }
        self._pairs = pairs
        self._file: Hashable = object()  # whose unpacked blocks are whose
        self.score_scale: int = common_scale(self._codes.values())
        self.requests: RequestTable = self._open_requests(where)
        self.n_tokens, self.n_layers, self.top_k = self._entries["experts"].shape
        self.n_experts, self.n_requests = self.header.n_experts, len(self.requests)
        present = set(self._entries)
        self.levels: frozenset[str] = frozenset(
            level for level, ways in LEVELS.items() if any(way <= present for way in ways)
        )
        absent = self._decode_only
        if self.header.weights_kind == "derived":
            self.levels |= {"weights"}
            absent |= {"weights"} if "scores" in absent else set()
        self.levels_prefill: frozenset[str] = self.levels - absent
        if facts is not None and facts == _facts_of(self.path):
            self._file = facts
            while len(_STRUCTURES) >= MOST_STRUCTURES:
                del _STRUCTURES[next(iter(_STRUCTURES))]
            _STRUCTURES[facts] = {key: value for key, value in vars(self).items() if key not in _OWN}

    def _open_again(self) -> bool:
        """Take over what was found when the same file was opened before, as every point of a sweep opens it."""
        try:
            with self.path.open("rb") as file:
                known = _STRUCTURES.get(_facts(os.fstat(file.fileno())))
                if known is None:
                    return False  # replaced in between
                self._bytes = np.memmap(file, np.uint8, "r")
        except (OSError, ValueError):
            return False  # whoever reads it says why
        vars(self).update(known)
        return True

    def _open_requests(self, where: str) -> RequestTable:
        def column(name: str) -> Array | None:
            return np.array(self.stored(name)) if name in self._entries else None

        columns = {
            name: column(name) for name in ("req_offsets", "req_prompt_len", "req_split", "req_task", "req_arrival_s")
        }
        return check_requests(self.header, columns, self._entries, self._decode_only, where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; arrays already sliced stay valid."""
        self._bytes = np.empty(0, np.uint8)
        self.__dict__.pop("_growing", None)

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.path,)

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}: {self.header.shape}, {self.n_requests} requests, {self.n_tokens} tokens)"

    @property
    def name(self) -> str:
        """Stem of the file name."""
        return self.path.stem

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the whole file, read in pieces; once for many runs of one process.

        Of a squeezed file it is that of the plain one, which its header states: the same routing is the same input,
        however it is stored. `check_trace` unpacks everything and holds the two together. Of a trace whose requests are
        drawn as they are read it is that of what decides them: the same routing, however much of it is there yet.
        """
        if self.squeezed:
            return self._pairs["plain_sha256"]
        if DRAWN_SHA256 in self._pairs:
            return self._pairs[DRAWN_SHA256]
        with self.path.open("rb") as file:
            key = _facts(os.fstat(file.fileno()))
            if key not in _DIGESTS:
                _DIGESTS[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return _DIGESTS[key]

    @property
    def entries(self) -> dict[str, Entry]:
        """The tensors of the file by name."""
        return dict(self._entries)

    @property
    def squeezed(self) -> bool:
        """Whether any tensor is stored in squeezed blocks."""
        return bool(self._squeezed)

    @property
    def plain_pairs(self) -> dict[str, str]:
        """The header's strings without what is said of squeezed tensors."""
        return {
            key: text
            for key, text in self._pairs.items()
            if key not in ("plain_sha256", DRAWN_SHA256) and not key.endswith(".squeezed")
        }

    def plain_shape(self, tensor: str, packed: bool = True) -> tuple[int, ...]:
        """A tensor's shape in a plain file; or with a code for each stored value, as in a squeezed one."""
        shape = self._entries[tensor].shape
        if tensor not in self._codes:
            return shape
        ids = self._entries.get(f"{tensor}.ids")
        n_codes = ids.shape[-1] if ids else self.n_experts
        return (*shape[:-1], CODES[self._codes[tensor].name].width(n_codes) if packed else n_codes)

    def stored(self, tensor: str) -> Array | Column:
        """A tensor exactly as stored (codes, decode rows only, ...), as a read-only view of the mapped file.

        Squeezed ones are unpacked block by block as they are sliced; their codes lie one to a value.
        """
        entry = self._entries[tensor]
        if entry.stop > self._bytes.size:
            raise BadInput(
                f"{self.path}: {tensor} cannot be read: the trace was closed, or the file became shorter; open it again"
            )
        if tensor in self._squeezed:
            return Column(self._squeezed[tensor], self._bytes, str(self.path), self._file)
        found = self._bytes[entry.start : entry.stop].view(DTYPES[entry.dtype]).reshape(entry.shape)
        if DRAWN_SHA256 in self._pairs and TENSORS[tensor].by_row:
            return self._growing.column(tensor, found)
        return found

    @cached_property
    def _growing(self) -> Growing:
        """What is there of its requests."""
        return Growing(self, self._bytes)

    @property
    def code_names(self) -> frozenset[str]:
        """The tensors that hold codes."""
        return frozenset(self._codes)

    def code(self, tensor: str) -> Code:
        """The code a score tensor is stored in."""
        return self._codes[tensor]

    def codes(self, tensor: str, stored: Array) -> Array:
        """The codes, one per score, that rows of a score tensor hold as stored."""
        ids = self._entries.get(f"{tensor}.ids")
        return self._codes[tensor].unstore(stored, ids.shape[-1] if ids else self.n_experts)

    def decode_only(self, tensor: str) -> bool:
        """Whether a tensor is stored for decode rows only (`requests.decode_rows` says which rows those are)."""
        return tensor.removesuffix(".ids") in self._decode_only

    def _let_go(self, tensor: str, row: int) -> None:
        """Tell the system that the mapped pages of a tensor before a row are not wanted for now.

        They would count as this process's memory until somebody else needs it; reading them again costs little.
        """
        if tensor in self._squeezed:
            return
        mapping, entry = getattr(self._bytes, "_mmap", None), self._entries[tensor]
        row_bytes = (entry.stop - entry.start) // entry.shape[0]
        start, stop = (at // mmap.PAGESIZE * mmap.PAGESIZE for at in (entry.start, entry.start + row * row_bytes))
        if mapping is not None and stop > start and hasattr(mmap, "MADV_DONTNEED"):  # Windows has no such call
            mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
