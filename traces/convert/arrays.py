"""Read arrays out of untrusted .npz and .safetensors files a block of rows at a time; sizes are judged first."""

from __future__ import annotations

import json
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from sim.base.errors import BadInput
from traces.convert.text import FREE_BYTES, MAX_RATIO, bad
from traces.format.layout import MAX_HEADER_BYTES, Array

_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}
_DTYPES |= {"U16": "<u2", "U8": "u1", "BOOL": "?"}
MAX_MEMBERS = 65_536


class Arrays:
    """The arrays of one file by name: shapes without reading, rows block by block. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.facts: dict[str, str] = {}
        self._zip = False
        self._files: dict[str, Callable[[], IO[bytes]]] = {}
        self._dtypes: dict[str, tuple[np.dtype[Any], bool]] = {}  # and whether it is bfloat16
        self._stack = ExitStack()
        try:
            with path.open("rb") as file:
                zipped = file.read(4) == b"PK\x03\x04"
            self._open_npz() if zipped else self._open_safetensors()
        except OSError as error:
            self.close()
            raise BadInput(f"{path}: {error.strerror or 'cannot be read'}; check the path") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._stack.close()

    def is_whole(self, name: str) -> bool:
        """Whether an array holds whole numbers."""
        dtype, brain = self._dtypes[name]
        return dtype.kind in "iub" and not brain

    def blocks(self, name: str, n_rows: int) -> Iterator[Array]:
        """The array's rows, `n_rows` at a time; bfloat16 comes as float32. Raises BadInput when data end early."""
        dtype, brain = self._dtypes[name]
        shape = self.shapes[name]
        width = max(1, math.prod(shape[1:])) * dtype.itemsize
        source = self._reader(name)
        left = shape[0]
        while left:
            count = min(left, n_rows)
            data = source(count * width)
            if len(data) < count * width:
                got = f"{shape[0] - left} of {shape[0]} rows"
                raise bad(str(self.path), name, got, "the file was cut", "copy it again")
            rows = np.frombuffer(data, dtype).reshape(count, *shape[1:])
            yield (rows.astype("<u4") << 16).view("<f4") if brain else rows
            left -= count

    def whole(self, name: str, most: int) -> Array:
        """A whole array of at most `most` values."""
        if math.prod(self.shapes[name]) > most:
            got = f"shape {self.shapes[name]}"
            raise bad(str(self.path), name, got, f"at most {most} values", "is it the right file?")
        parts = list(self.blocks(name, max(1, self.shapes[name][0]))) if self.shapes[name][:1] != (0,) else []
        return parts[0] if parts else np.empty(self.shapes[name], self._dtypes[name][0])

    def _reader(self, name: str) -> Callable[[int], bytes]:
        file = self._stack.enter_context(self._files[name]())
        if self._zip:
            self._npy_header(name, file)

        def read(n_bytes: int) -> bytes:
            try:
                return file.read(n_bytes)
            except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
                raise BadInput(f"{self.path}: {name}: {str(error)[:80] or 'damaged'}; copy the file again") from None

        return read

    def _open_npz(self) -> None:
        self._zip = True
        try:
            archive = self._stack.enter_context(zipfile.ZipFile(self.path))
            members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, UnicodeDecodeError) as error:
            raise BadInput(f"{self.path}: not a sound .npz file ({str(error)[:80]}); copy it again") from None
        if len(members) > MAX_MEMBERS:
            raise BadInput(f"{self.path}, got {len(members)} arrays: at most {MAX_MEMBERS}; is it the right file?")
        if any(info.filename.endswith("data.pkl") for info in members):
            raise BadInput(f"{self.path}: {PICKLED}")
        for info in members:
            if info.file_size > FREE_BYTES and info.file_size > MAX_RATIO * max(1, info.compress_size):
                got = f"{info.file_size} bytes out of {info.compress_size}"
                rule, way = f"at most {MAX_RATIO}-fold is unpacked", "if the file is genuine, save it uncompressed"
                raise bad(str(self.path), info.filename, got, rule, way)
            name = info.filename.removesuffix(".npy")
            self._files[name] = partial(self._member, archive, info)
            with self._files[name]() as file:
                shape, dtype = self._npy_header(name, file)
            n_bytes = math.prod(shape) * dtype.itemsize
            if n_bytes > info.file_size:
                got = f"{info.file_size} bytes for shape {shape}"
                raise bad(str(self.path), name, got, "the file was cut", "copy it again")
            self.shapes[name], self._dtypes[name] = shape, (dtype, False)

    def _npy_header(self, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Read past the header of a .npy member; no pickles, no Fortran order."""
        from numpy.lib import format as npy

        try:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            with warnings.catch_warnings(action="ignore"):  # on headers of Python 2
                shape, fortran, dtype = read(file)
            if not all(type(n) is int for n in shape):  # NumPy lets True pass
                raise ValueError
        except Exception:  # it is read as Python source, which may fail in any way
            raise BadInput(f"{self.path}: {name}: not a plain NumPy array; save it with numpy.savez again") from None
        if dtype.kind not in "fiub?" or dtype.hasobject or dtype.itemsize > 8 or fortran or any(n < 0 for n in shape):
            got, way = f"type {dtype}{' in Fortran order' if fortran else ''}", "save numpy.ascontiguousarray of it"
            raise bad(str(self.path), name, got, "numbers in C order", way)
        return shape, dtype

    def _open_safetensors(self) -> None:
        try:
            with self.path.open("rb") as file:
                n_header = int.from_bytes(file.read(8), "little")
                if not 2 <= n_header <= MAX_HEADER_BYTES:
                    raise BadInput(f"{self.path}: neither .npz nor .safetensors; save the arrays as one of them")
                text = file.read(n_header)
            with safe_open(str(self.path), framework="numpy"):
                pass  # sizes, overlaps and types are judged by the format's own library
            header = json.loads(text)
        except SafetensorError as error:
            why = f"not a valid safetensors file ({str(error)[:80]})"
            raise BadInput(f"{self.path}: {why}; copy or save it again") from None
        except (ValueError, RecursionError):
            raise BadInput(f"{self.path}: the header is not plain JSON; save the file again") from None
        self.facts = header.pop("__metadata__", None) or {}
        for name, fact in header.items():
            if fact["dtype"] not in _DTYPES:
                rule = f"one of {', '.join(_DTYPES)}"
                raise bad(str(self.path), f"{name[:60]!r}", f"type {fact['dtype']}", rule, "save it again")
            start = 8 + n_header + fact["data_offsets"][0]
            self.shapes[name] = tuple(fact["shape"])
            self._dtypes[name] = (np.dtype(_DTYPES[fact["dtype"]]), fact["dtype"] == "BF16")
            self._files[name] = partial(self._from, start)

    def _member(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
        try:
            return archive.open(info)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError, EOFError, zlib.error) as error:
            raise BadInput(f"{self.path}: {info.filename!a} ({str(error)[:80]}); copy or save it again") from None

    def _from(self, start: int) -> IO[bytes]:
        file = self.path.open("rb")
        file.seek(start)
        return file


PICKLED = (
    "a pickle (torch.save): it could run any code when read and is never opened; in your own Python, "
    "torch.load it and save the arrays as .safetensors, .npz or .jsonl (docs/convert.md has the lines)"
)
