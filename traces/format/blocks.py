"""Squeezed tensors: blocks of rows, each unpacked when a row of it is asked for (FORMAT.md, version 4)."""

from __future__ import annotations

import lzma
import math
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.base.errors import BadInput
from traces.format.container import Entry
from traces.format.layout import DTYPES, REMEDY, TENSORS, Array

BLOCK_ROWS: Final = 1024
MOST_BLOCK_BYTES: Final = 1 << 24  # of what a block unpacks to; blocks of wide rows have fewer of them
MOST_TIMES: Final = 64  # a squeezed tensor's own bytes: what it unpacks to, so that a small file makes no huge trace
KEPT_BYTES: Final = 1 << 26
"""Unpacked blocks of all traces that a process keeps. All of a bundled trace fits: a replay goes back and forth between
requests, and would unpack a block anew at every turn."""
_FILTERS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 20}]  # the whole of what unpacking may need
_PLAIN = re.compile(r"^(U8|U16|I32|I64|F16|F32|F64)((?: (?:0|[1-9][0-9]{0,11})){1,3})$")


def can_be_squeezed(name: str, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a tensor of that shape is one that blocks are made of: tensors with a row each for many things."""
    spec = TENSORS.get(name)
    wide = math.prod(shape[1:]) * DTYPES[dtype].itemsize > MOST_BLOCK_BYTES
    return spec is not None and (spec.by_row or spec.dims[0] == "V") and shape[0] > 0 and not wide


def block_rows(row_bytes: int) -> int:
    """Rows of a block, each of so many bytes."""
    return max(1, min(BLOCK_ROWS, MOST_BLOCK_BYTES // max(1, row_bytes)))


def _most_packed(raw_bytes: int) -> int:
    """Bytes that a block of so many takes at most: LZMA2 keeps what does not shrink as it is, with 3 bytes for each
    64 KiB or less."""
    return raw_bytes + raw_bytes // 1024 + 64


def pack(rows: Array) -> tuple[bytes, int]:
    """A block of rows squeezed, and the CRC-32 of what it unpacks to."""
    raw = _planes(rows)
    return lzma.compress(raw, lzma.FORMAT_RAW, filters=_FILTERS), zlib.crc32(raw)


def _planes(rows: Array) -> bytes:
    """Bytes of rows: of wider numbers the lowest bytes of all come first, then the next ones."""
    width = rows.dtype.itemsize
    return np.ascontiguousarray(np.ascontiguousarray(rows).view(np.uint8).reshape(-1, width).T).tobytes()


class Blocks(msgspec.Struct, frozen=True):
    """Where a squeezed tensor's blocks lie, checked when the file is opened, and what they unpack to."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int  # of a block; the last has what is left
    start: int  # of the first block in the file
    stop: int
    ends: NDArray[np.int64]  # of each, counted from the first one's start
    checks: NDArray[np.int64]  # CRC-32 of what each unpacks to

    def unpack(self, block: int, mapped: NDArray[np.uint8], where: str) -> Array:
        """Rows of a block. Raises BadInput when it does not hold them."""
        count = min(self.rows, self.shape[0] - block * self.rows)
        want = count * math.prod(self.shape[1:]) * self.dtype.itemsize
        first = self.start + (int(self.ends[block - 1]) if block else 0)
        opener = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
        try:
            raw = opener.decompress(mapped[first : self.start + int(self.ends[block])].tobytes(), want + 1)
        except lzma.LZMAError:
            raise self._damaged(where, block, "bytes that are not LZMA2") from None
        if len(raw) > want:
            raise self._damaged(where, block, f"more than the {want} bytes of its {count} rows")
        if len(raw) < want or not opener.eof or opener.unused_data:
            raise self._damaged(where, block, f"{len(raw)} bytes in place of the {want} of its {count} rows")
        if zlib.crc32(raw) != self.checks[block]:
            raise self._damaged(where, block, "other bytes than its checksum is of")
        flat = np.frombuffer(raw, np.uint8)
        if self.dtype.itemsize > 1:
            flat = np.ascontiguousarray(flat.reshape(self.dtype.itemsize, -1).T).reshape(-1)
            flat.flags.writeable = False
        return flat.view(self.dtype).reshape(count, *self.shape[1:])

    def _damaged(self, where: str, block: int, what: str) -> BadInput:
        return BadInput(
            f"{where}: {self.name}, block {block}, got {what}: a block unpacks to its rows; copy or record it again"
        )


class _Kept:
    """The blocks that were unpacked last, of all traces of the process: `KEPT_BYTES` at most."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Hashable, Array] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Array | None:
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
            return found

    def put(self, key: Hashable, rows: Array) -> None:
        with self._lock:
            before = self._blocks.pop(key, None)  # two threads may have unpacked it
            self._bytes += rows.nbytes - (0 if before is None else before.nbytes)
            self._blocks[key] = rows
            while self._bytes > KEPT_BYTES and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes


_KEPT = _Kept()
Judge = Callable[[int, Array], None]


class Column:
    """A squeezed tensor as an array that cannot be written: `len`, `shape`, slices and lists of rows work as there."""

    def __init__(
        self, blocks: Blocks, mapped: NDArray[np.uint8], where: str, file: Hashable, judge: Judge | None = None
    ) -> None:
        """`file` tells what is kept of it from others'; `judge(first row, rows)` sees every block before it is used."""
        self._blocks, self._mapped, self._where, self._file, self._judge = blocks, mapped, where, file, judge
        self._judged = bytearray(len(blocks.ends)) if judge else b""
        self.shape, self.dtype, self.ndim = blocks.shape, blocks.dtype, len(blocks.shape)
        self.size = math.prod(blocks.shape)
        self.nbytes = self.size * blocks.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def judged_by(self, judge: Judge) -> Column:
        """The same, with somebody who sees a block before others do."""
        return Column(self._blocks, self._mapped, self._where, self._file, judge)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self._blocks.name} is squeezed: its values are copied")
        found = self[:]
        return found if dtype is None else found.astype(dtype)

    def __getitem__(self, key: Any) -> Array:
        """As of an array; the first index says which blocks are unpacked."""
        rows, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if isinstance(rows, slice):
            first, stop, step = rows.indices(len(self))
            if step != 1:
                return self[(np.arange(first, stop, step), *rest)]
            found = self._slice(first, stop)
            return np.asarray(found[(slice(None), *rest)]) if rest else found
        picked = np.asarray(rows)
        if picked.dtype == bool:
            picked = np.flatnonzero(picked)
        if not picked.size:
            return np.asarray(np.empty((0, *self.shape[1:]), self.dtype)[(picked.astype(np.int64), *rest)])
        low, high = int(picked.min()), int(picked.max())
        if low < -len(self) or high >= len(self):
            raise IndexError(f"row {low if low < 0 else high} of {self._blocks.name}: it has {len(self)}")
        wanted = np.where(picked < 0, picked + len(self), picked)
        owner = wanted // self._blocks.rows
        if owner.min() == owner.max():
            return np.asarray(self._block(int(owner.flat[0]))[(wanted % self._blocks.rows, *rest)])
        found, at = np.empty((*picked.shape, *self.shape[1:]), self.dtype), owner.ravel()
        flat, inside = found.reshape(-1, *self.shape[1:]), (wanted % self._blocks.rows).ravel()
        for block in np.unique(at):
            own = at == block
            flat[own] = self._block(int(block))[inside[own]]
        return found[(np.arange(len(flat)).reshape(picked.shape), *rest)] if rest else found

    def _slice(self, first: int, stop: int) -> Array:
        step = self._blocks.rows
        if first >= stop:
            return np.empty((0, *self.shape[1:]), self.dtype)
        parts = [
            self._block(i)[max(0, first - i * step) : stop - i * step] for i in range(first // step, -(-stop // step))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _block(self, block: int) -> Array:
        key = self._file, self._blocks.name, block
        rows = _KEPT.get(key)
        if rows is None:
            rows = self._blocks.unpack(block, self._mapped, self._where)
            _KEPT.put(key, rows)
        if self._judge and not self._judged[block]:
            self._judge(block * self._blocks.rows, rows)
            self._judged[block] = 1  # type: ignore[index]
        return rows


def unsqueezed(
    pairs: Mapping[str, str], entries: Mapping[str, Entry], mapped: NDArray[np.uint8], where: str
) -> tuple[dict[str, Entry], dict[str, Blocks]]:
    """The tensors of a file as if none were squeezed, and the blocks of those that are.

    Raises:
        BadInput: a squeezed tensor whose parts do not fit each other, or a file that does not say what it was made of.
    """
    squeezed = {key.removesuffix(".squeezed"): text for key, text in pairs.items() if key.endswith(".squeezed")}
    if bool(squeezed) != ("plain_sha256" in pairs):
        raise BadInput(
            f"{where}: metadata plain_sha256 and squeezed tensors, got one of them: the two come together; {REMEDY}"
        )
    plain, blocks = dict(entries), {}
    for name, text in squeezed.items():
        stored, table = entries.get(name), plain.pop(f"{name}.blocks", None)
        if stored is None or table is None:
            raise BadInput(
                f"{where}: {name} squeezed, got no tensor {name if stored is None else name + '.blocks'}: "
                f"a squeezed tensor has both; {REMEDY}"
            )
        blocks[name] = _blocks(name, text, stored, table, mapped, where)
        plain[name] = msgspec.structs.replace(stored, dtype=text.split()[0], shape=blocks[name].shape)
    return plain, blocks


def _blocks(name: str, text: str, stored: Entry, table: Entry, mapped: NDArray[np.uint8], where: str) -> Blocks:
    """One squeezed tensor: what it unpacks to by the header, held against the list of its blocks."""
    said = _PLAIN.match(text)
    if not said:
        raise BadInput(
            f"{where}: metadata {name}.squeezed, got {text[:40]!r}: the type and shape that it unpacks to, such as "
            f"'U8 2048 32 8'; {REMEDY}"
        )
    dtype, shape = said[1], tuple(int(size) for size in said[2].split())
    if not can_be_squeezed(name, shape, dtype):
        raise BadInput(
            f"{where}: {name}, got {text!r} squeezed: tensors of rows, at least one, of at most {MOST_BLOCK_BYTES} "
            f"bytes each; {REMEDY}"
        )
    row_bytes = math.prod(shape[1:]) * DTYPES[dtype].itemsize
    rows = block_rows(row_bytes)
    wanted = -(-shape[0] // rows)
    if (stored.dtype, len(stored.shape)) != ("U8", 1) or (table.dtype, table.shape) != ("I64", (wanted, 2)):
        raise BadInput(
            f"{where}: {name}.blocks, got {table.dtype} of shape {table.shape} for {stored.dtype} of {stored.shape}: "
            f"I64 of shape ({wanted}, 2), a line for each {rows} rows, and U8 of one axis; {REMEDY}"
        )
    lines = mapped[table.start : table.stop].view(DTYPES["I64"]).reshape(table.shape)
    ends, checks = np.array(lines[:, 0]), np.array(lines[:, 1])
    if ends[0] < 1 or (ends[1:] <= ends[:-1]).any() or ends[-1] != stored.shape[0]:
        raise BadInput(
            f"{where}: {name}.blocks, got ends that do not go up to {stored.shape[0]}: each block ends behind the one "
            f"before, and the last with the tensor; {REMEDY}"
        )
    if shape[0] * row_bytes > MOST_TIMES * stored.shape[0]:
        raise BadInput(
            f"{where}: {name}, got {stored.shape[0]} bytes for {shape[0] * row_bytes}: a squeezed tensor unpacks to at "
            f"most {MOST_TIMES} times its bytes; {REMEDY}"
        )
    if (longest := int(np.diff(ends, prepend=0).max())) > _most_packed(rows * row_bytes):
        raise BadInput(
            f"{where}: {name}.blocks, got a block of {longest} bytes: one of {rows} rows takes at most "
            f"{_most_packed(rows * row_bytes)}; {REMEDY}"
        )
    return Blocks(name, DTYPES[dtype], shape, rows, stored.start, stored.stop, ends, checks)
