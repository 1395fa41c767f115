"""Where a conversion keeps what it has read: rows on disk in any order, a few bytes per token in memory.

Sources bring either whole tokens (`rows`: all layers at once) or single cells (`cell`, `cells`: one token, one layer),
in the order of their file. `traces.convert.grid` puts cells in place afterwards.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sim.base.errors import BadInput
from sim.base.files import SPOOL, hidden_folder, sweep
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, Array

_BUFFERED = 4096  # records or tokens that wait in memory
_MAX_LAYER = 65_535  # a layer's number in its source; how many there are is another matter
UNKNOWN, PREFILL, DECODE = -1, 0, 1
DROPPED = -1  # the owner of a token that is not part of the trace


class Spool:
    """Tokens of requests and their experts, on disk beside the trace that is to be written.

    `at(path, unit)` says which file is being read, so that messages name it: `path:12` for lines, or another unit.
    """

    def __init__(self, beside: Path) -> None:
        try:
            sweep(beside, SPOOL)
            self.folder = hidden_folder(beside, SPOOL)
        except OSError as error:
            raise BadInput(
                f"{beside}: {error.strerror or 'cannot be written'}; create the folder, or choose another"
            ) from None
        self.requests: list[tuple[str, float | None]] = []  # task, arrival
        self.owner, self.phase = array("q"), array("b")  # of each token
        self.token_id, self.iteration = array("i"), array("i")  # -1 where the source has none
        self.top_k = 0
        self.weighted = False
        self.layers: set[int] = set()
        self.largest_id, self.largest_at = -1, ""
        self.notes: list[str] = []
        self._keys: dict[Any, int] = {}
        self.where, self._unit = "", ":"
        self._files: dict[str, BinaryIO] = {}
        self._cells: list[tuple[int, int, int, Sequence[int], Sequence[float]]] = []
        self._rows: list[tuple[int, Sequence[Sequence[int]], Sequence[Sequence[float]]]] = []
        self._n_layers = 0
        self.n_experts_scored = 0
        self.layer_names: list[int] = []  # numbers that a source gives the layers of `row` and `block`
        self._n_cells = 0

    def at(self, path: Path, unit: str = ":") -> None:
        """Begin a file: its requests are new ones, whatever they are called."""
        self._flush()
        self.where, self._unit = str(path), unit
        self._keys = {}

    def place(self, number: int) -> str:
        """Where a record stands, for messages."""
        return f"{self.where}{self._unit}{number}"

    def request(self, key: Any, task: str = "", arrival_s: float | None = None) -> int:
        """Index of the request that the file calls `key`, a new one when it has not come up yet."""
        if key not in self._keys:
            self._keys[key] = len(self.requests)
            self.requests.append((task, arrival_s))
        return self._keys[key]

    def token(self, request: int, phase: int, token_id: int = -1, iteration: int = -1) -> int:
        """Add the next token of a request; `phase` is UNKNOWN, PREFILL or DECODE. Returns its number."""
        self.owner.append(request)
        self.phase.append(phase)
        self.token_id.append(token_id)
        self.iteration.append(iteration)
        return len(self.owner) - 1

    def cell(self, token: int, layer: int, ids: Sequence[int], weights: Sequence[float], number: int) -> None:
        """The experts of one token in one layer, told by record `number`. No weights: an empty sequence.

        Raises:
            BadInput: another k or another kind of record than before; a repeated expert (perhaps some records later).
        """
        if not 0 <= layer <= _MAX_LAYER:
            raise BadInput(f"{self.place(number)}: layer, got {layer}: from 0 to {_MAX_LAYER}; mend the record")
        self._same_kind(len(ids), len(weights), number)
        if layer not in self.layers:
            self.layers.add(layer)
            if len(self.layers) > MAX_LAYERS:
                raise BadInput(
                    f"{self.place(number)}: layer, got {layer}, one of more than {MAX_LAYERS}: no model has "
                    f"as many MoE layers; is it the right file?"
                )
        self._cells.append((token, layer, number, ids, weights))
        if len(self._cells) >= _BUFFERED:
            self._flush()

    def row(self, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], number: int) -> None:
        """All layers of the token added last. Raises BadInput as `cell` does, or when layers differ in number."""
        self._n_layers = self._n_layers or len(ids)
        if len(ids) != self._n_layers or (weights and len(weights) != len(ids)):
            raise BadInput(
                f"{self.place(number)}: layers, got {len(ids)} ({len(weights)} with weights): {self._n_layers} before; "
                f"drop or mend the record"
            )
        if not 1 <= len(ids) <= MAX_LAYERS:
            raise BadInput(
                f"{self.place(number)}: layers, got {len(ids)}: from 1 to {MAX_LAYERS}; is it the right file?"
            )
        for layer, chosen in enumerate(ids):
            self._same_kind(len(chosen), len(weights[layer]) if weights else 0, number)
        self._rows.append((number, ids, weights))
        if len(self._rows) * self._n_layers >= _BUFFERED:
            self._flush()

    @property
    def n_layers_read(self) -> int:
        """Layers of `row` and `block`; 0 before the first."""
        return self._n_layers

    def block(self, ids: Array, weights: Array | None, numbers: Array, scores: Array | None = None) -> None:
        """(n, L, K) experts and weights, and (n, L, E) score codes, of the n tokens added last.

        `numbers` (n,) are those of their records. Raises BadInput as `row` does.
        """
        self._flush()
        number = int(numbers[0])
        self._n_layers = self._n_layers or ids.shape[1]
        if ids.shape[1] != self._n_layers or ids.shape[1] > MAX_LAYERS:
            raise BadInput(
                f"{self.place(number)}: layers, got {ids.shape[1]}: {self._n_layers} before, at most "
                f"{MAX_LAYERS}; convert the files one by one"
            )
        self._same_kind(ids.shape[2], 0 if weights is None else ids.shape[2], number)
        if scores is not None and scores.shape[2] != (self.n_experts_scored or scores.shape[2]):
            raise BadInput(
                f"{self.place(number)}: scores, got {scores.shape[2]} experts: {self.n_experts_scored} before; "
                f"convert the files one by one"
            )
        self._judge(ids, numbers)
        self._write("experts", ids.astype("<u2"))
        if weights is not None:
            self._write("weights", weights.astype("<f4"))
        if scores is not None:
            self.n_experts_scored = scores.shape[2]
            self._write("scores", scores.astype("<u2"))

    def _same_kind(self, n_ids: int, n_weights: int, number: int) -> None:
        if not self.top_k:
            if not 1 <= n_ids <= MAX_EXPERTS:
                raise BadInput(
                    f"{self.place(number)}: experts, got {n_ids} ids: from 1 to {MAX_EXPERTS}; mend the record"
                )
            self.top_k, self.weighted = n_ids, n_weights > 0
        if n_ids != self.top_k:
            raise BadInput(
                f"{self.place(number)}: experts, got {n_ids} ids: {self.top_k} before; every token has the same "
                f"number in every layer, drop or mend the record"
            )
        if n_weights != (self.top_k if self.weighted else 0):
            before = f"one per expert ({self.top_k})" if self.weighted else "none before"
            raise BadInput(f"{self.place(number)}: weights, got {n_weights}: {before}; drop or mend the record")

    def _judge(self, ids: Array, numbers: Array) -> None:
        """Refuse repeated experts and remember the largest id; `numbers` are of the first axis."""
        if not ids.size:
            return
        ordered = np.sort(ids, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).reshape(len(ids), -1).any(axis=1)
        if twice.any():
            i = int(np.argmax(twice))
            raise BadInput(
                f"{self.place(int(numbers[i]))}: experts, got one expert twice: the experts of a token in a "
                f"layer are distinct; drop or mend the record"
            )
        largest = ids.reshape(len(ids), -1).max(axis=1)
        i = int(np.argmax(largest))
        if int(largest[i]) > self.largest_id:
            self.largest_id, self.largest_at = int(largest[i]), self.place(int(numbers[i]))

    def record_type(self) -> np.dtype[Any]:
        """A cell as stored: token, layer, number of its record, experts, weights."""
        weights = [("w", "<f4", (self.top_k,))] if self.weighted else []
        return np.dtype([("t", "<i8"), ("l", "<i4"), ("n", "<i8"), ("e", "<u2", (self.top_k,)), *weights])

    def _flush(self) -> None:
        """Judge and store what waits in memory."""
        if self._rows:
            numbers = np.array([row[0] for row in self._rows])
            ids = np.array([row[1] for row in self._rows], np.uint16)
            self._judge(ids, numbers)
            self._write("experts", ids)
            if self.weighted:
                self._write("weights", np.array([row[2] for row in self._rows], "<f4"))
            self._rows = []
        if self._cells:
            packed = np.zeros(len(self._cells), self.record_type())
            packed["t"], packed["l"], packed["n"] = np.array([cell[:3] for cell in self._cells]).T
            packed["e"] = [cell[3] for cell in self._cells]
            if self.weighted:
                packed["w"] = [cell[4] for cell in self._cells]
            self._judge(packed["e"], packed["n"])
            self._write("cells", packed)
            self._n_cells += len(packed)
            self._cells = []

    def _write(self, name: str, values: Array) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
        self._files[name].write(np.ascontiguousarray(values).data)

    def end(self) -> int:
        """Judge and store what is left, and close the files; returns how many cells were read.

        Raises:
            BadInput: nothing was read.
        """
        self._flush()
        for file in self._files.values():
            file.close()
        if not len(self.owner) or not self.top_k:
            raise BadInput(f"{self.where}: no routing found: the file is empty or has only headers; record it again")
        return self._n_cells

    def path(self, name: str) -> Path:
        """Of one of the spool's files."""
        return self.folder / name

    def close(self) -> None:
        """Throw everything away."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
