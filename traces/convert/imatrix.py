"""llama-imatrix: how often each expert was used over some text, out of a GGUF importance matrix. Counts, no routes.

Built from the public code of `tools/imatrix/imatrix.cpp` of https://github.com/ggml-org/llama.cpp: `general.type` is
`imatrix`, `imatrix.chunk_count` times `imatrix.chunk_size` tokens were read, and each `blk.N.ffn_gate_exps.weight` (or
`up`, `down`, `gate_up`) has a companion named `....counts`, F32, of shape [1, experts]: tokens by expert.

The older .dat format keeps sums that were divided by these counts, and not the counts: refused.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sim.base.errors import BadInput
from traces.convert.text import bad, open_bytes, shown
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, Ints
from traces.stats.counts import MAX_COUNT, SCHEMA, ExpertCounts

NAME = "imatrix"
_COUNTS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|gate_up|up|down)_exps\.weight\.counts")
_MAX_FACTS, _MAX_TENSORS, _MAX_TEXT = 65_536, 65_536, 1 << 20
_MAX_HEADER = 64 << 20
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's plain types
_TEXT, _LIST, _U32, _F32 = 8, 9, 4, 0
_KINDS = ("gate", "gate_up", "up", "down")  # whose counts are taken: the first that a layer has


def sniff(head: bytes) -> bool:
    """Whether a file begins as GGUF does."""
    return head[:4] == b"GGUF"


def looks_like_dat(head: bytes) -> bool:
    """Whether a file begins as the older format does: a number of entries, then a tensor's name behind its length."""
    if len(head) < 16:
        return False
    n_entries, n_name = struct.unpack("<ii", head[:8])
    return 0 < n_entries < _MAX_TENSORS and 4 <= n_name <= 256 and head[8:].startswith((b"blk.", b"output."))


def read(path: Path, model: str = "") -> ExpertCounts:
    """The counts of every layer that has experts.

    Raises:
        BadInput: no GGUF, cut, not an importance matrix, one without experts, or counts that are none.
    """
    with open_bytes(path) as file:
        gguf = _Gguf(path, file)
        facts, tensors = gguf.header()
        if facts.get("general.type") != "imatrix":
            got = shown(facts.get("general.type"))
            raise bad(str(path), "general.type", got, "imatrix", "give the file of llama-imatrix")
        found: dict[int, tuple[str, int, int]] = {}
        for name, n_values, at in tensors:
            if match := _COUNTS.fullmatch(name):
                layer = int(match[1])
                if layer not in found or _KINDS.index(match[2]) < _KINDS.index(found[layer][0]):
                    found[layer] = (match[2], n_values, at)
        found = {layer: row for layer, row in found.items() if row[1] > 1}  # one count: not by expert
        if not found:
            way = "is it of an MoE model, written by a llama-imatrix that keeps them?"
            raise bad(str(path), "counts", "none by expert", "no tensor blk.N.ffn_gate_exps.weight.counts", way)
        if len(found) > MAX_LAYERS:
            raise BadInput(f"{path}, got {len(found)} layers: at most {MAX_LAYERS}; is it the right file?")
        layers = sorted(found)
        sizes = {found[layer][1] for layer in layers}
        if len(sizes) > 1:
            raise BadInput(f"{path}: counts, got {sorted(sizes)} experts: every layer has as many; record it again")
        rows = [gguf.counts(found[layer][2], found[layer][1], layer) for layer in layers]
        for layer, row in zip(layers, rows, strict=True):
            if not row.any():
                raise BadInput(f"{path}: layer {layer}: counts, got none at all: no token was read; record it again")
    tokens = facts.get("imatrix.chunk_count"), facts.get("imatrix.chunk_size")
    n_tokens = tokens[0] * tokens[1] if all(isinstance(n, int) for n in tokens) else None  # type: ignore[operator]
    return ExpertCounts(
        schema=SCHEMA,
        model=model,
        source=f"llama-imatrix: {path.name}",
        tokens=n_tokens,
        layers=layers,
        counts=[row.tolist() for row in rows],
    )


class _Gguf:
    """The header of a GGUF file, read with every size checked before it is believed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self._read = 0
        self._data = 0

    def header(self) -> tuple[dict[str, object], list[tuple[str, int, int]]]:
        """Facts (plain and text ones), and (name, values, offset) of every F32 tensor. Raises BadInput."""
        if self._bytes(4) != b"GGUF":
            raise BadInput(f"{self.path}: not a GGUF file; give the importance matrix that llama-imatrix writes")
        version = self._number("<I")
        if version not in (2, 3):
            raise BadInput(f"{self.path}: GGUF version, got {version}: 2 or 3; write it again")
        n_tensors, n_facts = self._number("<Q"), self._number("<Q")
        for what, n, most in (("tensors", n_tensors, _MAX_TENSORS), ("facts", n_facts, _MAX_FACTS)):
            if n > most:
                raise BadInput(f"{self.path}: {what}, got {n}: at most {most}; is it the right file?")
        facts: dict[str, object] = {}
        for _ in range(n_facts):
            name = self._text()
            facts[name] = self._value(self._number("<I"))
        tensors = []
        for _ in range(n_tensors):
            name, n_dims = self._text(), self._number("<I")
            if n_dims > 4:
                raise BadInput(f"{self.path}: {shown(name)}, got {n_dims} dimensions: at most 4; is it the right file?")
            shape = [self._number("<Q") for _ in range(n_dims)]
            kind, at = self._number("<I"), self._number("<Q")
            if kind == _F32:
                tensors.append((name, math.prod(shape), at))
        step = facts.get("general.alignment", 32)
        if not isinstance(step, int) or not 1 <= step <= 1 << 20:
            raise BadInput(f"{self.path}: general.alignment, got {shown(step)}: from 1 to {1 << 20}; write it again")
        self._data = -(-self._read // step) * step
        return facts, tensors

    def counts(self, at: int, n_values: int, layer: int) -> Ints:
        """Counts of one layer. Raises BadInput."""
        if n_values > MAX_EXPERTS:
            raise BadInput(f"{self.path}: layer {layer}, got {n_values} experts: at most {MAX_EXPERTS}; write it again")
        try:
            self.file.seek(self._data + at)
            data = self.file.read(4 * n_values)
        except (OSError, OverflowError, ValueError):
            data = b""
        if len(data) != 4 * n_values:
            raise BadInput(f"{self.path}: layer {layer}: the file was cut; copy it again")
        values = np.frombuffer(data, "<f4")
        if not np.isfinite(values).all() or (values < 0).any() or (values != np.round(values)).any():
            raise BadInput(f"{self.path}: layer {layer}: counts, got some that are no whole numbers; write it again")
        if values.max() > MAX_COUNT:
            raise BadInput(f"{self.path}: layer {layer}: counts, got {values.max():g}: at most 2^53; write it again")
        return values.astype(np.int64)

    def _value(self, kind: int) -> object:
        """A fact: kept where it is text or a whole number of 32 bits, passed over else."""
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            inner, n = self._number("<I"), self._number("<Q")
            if inner == _TEXT:
                for _ in range(n):
                    self._text()
            elif inner in _SIZES:
                self._bytes(n * _SIZES[inner])
            else:
                raise BadInput(f"{self.path}: header, got a list of type {inner}: not one of GGUF; write it again")
            return None
        if kind not in _SIZES:
            raise BadInput(f"{self.path}: header, got type {kind}: not one of GGUF; write it again")
        data = self._bytes(_SIZES[kind])
        return int.from_bytes(data, "little") if kind == _U32 else None

    def _text(self) -> str:
        n = self._number("<Q")
        if n > _MAX_TEXT:
            raise BadInput(f"{self.path}: header, got a text of {n} bytes: at most {_MAX_TEXT}; is it the right file?")
        return self._bytes(n).decode("utf-8", "replace")

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return int(value)

    def _bytes(self, n: int) -> bytes:
        self._read += n
        if self._read > _MAX_HEADER:
            raise BadInput(f"{self.path}: header, got more than {_MAX_HEADER} bytes; is it the right file?")
        data = self.file.read(n)
        if len(data) != n:
            raise BadInput(f"{self.path}: the header ends early: the file was cut; copy it again")
        return data
