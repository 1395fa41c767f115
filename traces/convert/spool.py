"""Where a conversion keeps what it has read: rows on disk in any order, a few bytes per token in memory.

Sources bring whole tokens (`row`, `block`: all layers at once), or single cells (`cell`, `entry`: one token, one
layer), in the order of their file. `finish` puts cells in place afterwards, and `Grid` hands rows out in any order.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sim.base.errors import BadInput
from sim.base.files import SPOOL, hidden_folder, sweep
from traces.convert.text import DECODE, bad, expert_of, optional, phase_of, request_key, shown, text_of, whole
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, Array

_BUFFERED = 4096  # records or tokens that wait in memory
_AT_ONCE = 65_536
DROPPED = -1  # the owner of a token that is not part of the trace
DROP = "drop or mend the record"


class Spool:
    """Tokens of requests and their experts, on disk beside the trace that is to be written.

    `at(path, unit)` says which file is being read, so that messages name it: `path:12` for lines, or another unit.
    """

    def __init__(self, beside: Path) -> None:
        try:
            sweep(beside, SPOOL)
            self.folder = hidden_folder(beside, SPOOL)
        except OSError as error:
            why = error.strerror or "cannot be written"
            raise BadInput(f"{beside}: {why}; create the folder, or choose another") from None
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
        self._cell: tuple[int, int] | None = None  # token and layer of the entries that come in, and their first record
        self._first = 0
        self._ids: list[int] = []
        self._weights: list[float] = []

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

    def told_request(self, where: str, data: Mapping[str, Any], task: str, arrival_s: float | None = None) -> int:
        """The request that a record names by `request`, with its `task` where it tells one. Raises BadInput."""
        own = text_of(where, "task", data.get("task")) or task
        return self.request(request_key(where, data.get("request")), own, arrival_s)

    def told_token(self, where: str, data: Mapping[str, Any], request: int) -> int:
        """The next token, as a record tells it by `phase`, `token_id` and `iteration`. Raises BadInput."""
        ids = (optional(where, name, data.get(name)) for name in ("token_id", "iteration"))
        return self.token(request, phase_of(where, data.get("phase")), *ids)

    def entry(
        self, where: str, cell: tuple[int, int], number: int, expert: Any, weight: float | None, rank: tuple[str, Any]
    ) -> None:
        """One expert of a cell (token, layer), whose entries stand together; `rank`: what counts them, and its value.

        Raises:
            BadInput: another rank than the next, or as `cell` does. Call `end_cell` after the last one.
        """
        name, at = rank
        if cell != self._cell:
            self.end_cell()
            self._cell, self._first, self._ids, self._weights = cell, number, [], []
        if at is not None and whole(where, name, at) != len(self._ids):
            way = "sort the rows of a token and layer by rank"
            if name != "rank":
                way = "the log was filtered or cut, record it again"
            raise bad(where, name, shown(at), f"{len(self._ids)} is next", way)
        self._ids.append(expert_of(where, expert))
        if weight is not None:
            self._weights.append(weight)

    def end_cell(self) -> None:
        """The entries of a cell are all there."""
        if self._cell is not None:
            self.cell(*self._cell, self._ids, self._weights, self._first)
        self._cell = None

    def cell(self, token: int, layer: int, ids: Sequence[int], weights: Sequence[float], number: int) -> None:
        """The experts of one token in one layer, told by record `number`. No weights: an empty sequence.

        Raises:
            BadInput: another k or another kind of record than before; a repeated expert (perhaps some records later).
        """
        self._same_kind(len(ids), len(weights), number)
        if layer not in self.layers:
            self.layers.add(layer)
            if len(self.layers) > MAX_LAYERS:
                got, rule = f"{layer}, one of more than {MAX_LAYERS}", "no model has as many MoE layers"
                raise bad(self.place(number), "layer", got, rule, "is it the right file?")
        self._cells.append((token, layer, number, ids, weights))
        if len(self._cells) >= _BUFFERED:
            self._flush()

    def row(self, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], number: int) -> None:
        """All layers of the token added last. Raises BadInput as `cell` does, or when layers differ in number."""
        self._n_layers = self._n_layers or len(ids)
        if len(ids) != self._n_layers or (weights and len(weights) != len(ids)):
            got = f"{len(ids)} ({len(weights)} with weights)"
            raise bad(self.place(number), "layers", got, f"{self._n_layers} before", DROP)
        if not 1 <= len(ids) <= MAX_LAYERS:
            raise bad(self.place(number), "layers", len(ids), f"from 1 to {MAX_LAYERS}", "is it the right file?")
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
        number, way = int(numbers[0]), "convert the files one by one"
        self._n_layers = self._n_layers or ids.shape[1]
        if ids.shape[1] != self._n_layers or ids.shape[1] > MAX_LAYERS:
            rule = f"{self._n_layers} before, at most {MAX_LAYERS}"
            raise bad(self.place(number), "layers", ids.shape[1], rule, way)
        self._same_kind(ids.shape[2], 0 if weights is None else ids.shape[2], number)
        if scores is not None and scores.shape[2] != (self.n_experts_scored or scores.shape[2]):
            got = f"{scores.shape[2]} experts"
            raise bad(self.place(number), "scores", got, f"{self.n_experts_scored} before", way)
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
                raise bad(self.place(number), "experts", f"{n_ids} ids", f"from 1 to {MAX_EXPERTS}")
            self.top_k, self.weighted = n_ids, n_weights > 0
        if n_ids != self.top_k:
            rule = f"{self.top_k} before; every token has the same number in every layer, {DROP}"
            raise BadInput(f"{self.place(number)}: experts, got {n_ids} ids: {rule}")
        if n_weights != (self.top_k if self.weighted else 0):
            before = f"one per expert ({self.top_k})" if self.weighted else "none before"
            raise bad(self.place(number), "weights", n_weights, before, DROP)

    def _judge(self, ids: Array, numbers: Array) -> None:
        """Refuse repeated experts and remember the largest id; `numbers` are of the first axis."""
        if not ids.size:
            return
        ordered = np.sort(ids, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).reshape(len(ids), -1).any(axis=1)
        if twice.any():
            where, rule = self.place(int(numbers[np.argmax(twice)])), "the experts of a token in a layer are distinct"
            raise bad(where, "experts", "one expert twice", rule, DROP)
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


def finish(spool: Spool) -> Grid:
    """Close the spool for reading.

    Raises:
        BadInput: nothing was read, a cell came twice, or one is missing in a layer that cannot be left out.
    """
    if spool.end():
        return Grid(spool, *_in_place(spool, len(spool.owner)))
    layers = spool.layer_names or list(range(spool.n_layers_read))
    return Grid(spool, layers, np.arange(len(layers)), len(layers))


class Grid:
    """A finished spool: (T, L, K) arrays on disk in the order tokens were added, and the layers that are kept."""

    def __init__(self, spool: Spool, layers: list[int], kept: Array, n_stored: int) -> None:
        self.spool, self.layers, self._kept = spool, layers, kept
        shape = (len(spool.owner), n_stored, spool.top_k)
        self._experts = np.memmap(spool.path("experts"), "<u2", "r", shape=shape)
        self._weights = np.memmap(spool.path("weights"), "<f4", "r", shape=shape) if spool.weighted else None
        scored = (*shape[:2], spool.n_experts_scored)
        self._scores = np.memmap(spool.path("scores"), "<u2", "r", shape=scored) if spool.n_experts_scored else None

    def rows(self, tokens: Array) -> dict[str, Array]:
        """Experts, and weights and scores where there are any, of some tokens; heaviest first where weights tell."""
        found = {"experts": np.asarray(self._experts[tokens])[:, self._kept]}
        if self._scores is not None:
            found["scores"] = np.asarray(self._scores[tokens])[:, self._kept]
        if self._weights is not None:
            weights = np.asarray(self._weights[tokens])[:, self._kept]
            order = np.argsort(-weights, axis=-1, kind="stable")  # ties stay in the order of the file
            found["experts"] = np.take_along_axis(found["experts"], order, -1)
            found["weights"] = np.take_along_axis(weights, order, -1)
        return found

    def close(self) -> None:
        """Unmap the files, so that they can be deleted everywhere."""
        del self._experts, self._weights, self._scores


def _in_place(spool: Spool, n_tokens: int) -> tuple[list[int], Array, int]:
    """Scatter cells into `experts` and `weights`; returns the kept layers, their positions and how many are stored."""
    layers = np.array(sorted(spool.layers))
    n_layers, k = len(layers), spool.top_k
    n_records = spool.path("cells").stat().st_size // spool.record_type().itemsize
    if n_tokens * n_layers > 2 * n_records:  # before anything of that size is made
        way = "the log was filtered or cut, or its layers lie in several files: give all of them, or record it again"
        got = f"{n_records} records for {n_tokens} tokens in {n_layers} layers"
        raise BadInput(f"{spool.where}, got {got}: more than half are missing; {way}")
    cells = np.memmap(spool.path("cells"), spool.record_type(), "r", shape=(n_records,))
    experts = np.memmap(spool.path("experts"), "<u2", "w+", shape=(n_tokens, n_layers, k))
    weights = np.memmap(spool.path("weights"), "<f4", "w+", shape=(n_tokens, n_layers, k)) if spool.weighted else None
    filled = np.memmap(spool.path("filled"), "u1", "w+", shape=(n_tokens, n_layers))
    for start in range(0, n_records, _AT_ONCE):
        part = cells[start : start + _AT_ONCE]
        token, layer = np.asarray(part["t"]), np.searchsorted(layers, part["l"])
        flat = token * n_layers + layer
        again = filled[token, layer] > 0
        again[np.setdiff1d(np.arange(len(flat)), np.unique(flat, return_index=True)[1])] = True
        if again.any():
            i = int(np.argmax(again))
            where = f"{spool.place(int(part['n'][i]))}: layer {int(part['l'][i])}"
            raise BadInput(f"{where}, got a second record for the same token: one is expected; {DROP}")
        experts[token, layer], filled[token, layer] = part["e"], 1
        if weights is not None:
            weights[token, layer] = part["w"]
    kept = _complete(spool, layers, filled)
    return [int(layer) for layer in layers[kept]], kept, n_layers


def _complete(spool: Spool, layers: Array, filled: Array) -> Array:
    """Positions of the layers with a record for every token; leaves out those that lack nothing but prefill rows.

    Raises:
        BadInput: a record is missing elsewhere.
    """
    have = np.zeros(len(layers), np.int64)
    dropped = np.frombuffer(spool.owner, np.int64) == DROPPED
    decode = (np.frombuffer(spool.phase, np.int8) == DECODE) & ~dropped
    missing_decode = np.zeros(len(layers), bool)
    for start in range(0, len(filled), _AT_ONCE):
        part = (filled[start : start + _AT_ONCE] > 0) | dropped[start : start + _AT_ONCE, None]
        have += part.sum(axis=0)
        missing_decode |= (~part[decode[start : start + _AT_ONCE]]).any(axis=0)
    partial = have < len(filled)
    for position in np.flatnonzero(partial):
        if missing_decode[position] or not decode.any() or partial.all():
            token = int(np.argmin((filled[:, position] > 0) | dropped))
            before = np.frombuffer(spool.owner, np.int64)[:token]
            row = int((before == spool.owner[token]).sum())
            which = f"request {spool.owner[token]}, token {row}, layer {layers[position]}"
            rule = "every token is routed in every layer; the log was cut or filtered, drop the token"
            raise BadInput(f"{spool.where}: {which}: no record: {rule}")
    if partial.any():
        names = ", ".join(str(layer) for layer in layers[partial])
        spool.notes.append(f"Layer {names} of the source lacks prefill rows and is left out.")
    return np.flatnonzero(~partial)
