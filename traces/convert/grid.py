"""A finished spool as arrays: cells put in place, layers judged for completeness, rows handed out in any order."""

from __future__ import annotations

import numpy as np

from sim.base.errors import BadInput
from traces.convert.spool import DECODE, DROPPED, Spool
from traces.format.layout import Array


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
        raise BadInput(
            f"{spool.where}, got {n_records} records for {n_tokens} tokens in {n_layers} layers: more than half are "
            f"missing; the log was filtered or cut, or its layers lie in several files: give all of them, or record "
            "it again"
        )
    cells = np.memmap(spool.path("cells"), spool.record_type(), "r", shape=(n_records,))
    experts = np.memmap(spool.path("experts"), "<u2", "w+", shape=(n_tokens, n_layers, k))
    weights = np.memmap(spool.path("weights"), "<f4", "w+", shape=(n_tokens, n_layers, k)) if spool.weighted else None
    filled = np.memmap(spool.path("filled"), "u1", "w+", shape=(n_tokens, n_layers))
    for start in range(0, n_records, 65_536):
        part = cells[start : start + 65_536]
        token, layer = np.asarray(part["t"]), np.searchsorted(layers, part["l"])
        flat = token * n_layers + layer
        again = filled[token, layer] > 0
        again[np.setdiff1d(np.arange(len(flat)), np.unique(flat, return_index=True)[1])] = True
        if again.any():
            i = int(np.argmax(again))
            raise BadInput(
                f"{spool.place(int(part['n'][i]))}: layer {int(part['l'][i])}, got a second record for the same "
                f"token: one is expected; drop or mend the record"
            )
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
    for start in range(0, len(filled), 65_536):
        part = (filled[start : start + 65_536] > 0) | dropped[start : start + 65_536, None]
        have += part.sum(axis=0)
        missing_decode |= (~part[decode[start : start + 65_536]]).any(axis=0)
    partial = have < len(filled)
    for position in np.flatnonzero(partial):
        if missing_decode[position] or not decode.any() or partial.all():
            token = int(np.argmin((filled[:, position] > 0) | dropped))
            before = np.frombuffer(spool.owner, np.int64)[:token]
            row = int((before == spool.owner[token]).sum())
            raise BadInput(
                f"{spool.where}: request {spool.owner[token]}, token {row}, layer {layers[position]}: no record: every "
                f"token is routed in every layer; the log was cut or filtered, drop the token"
            )
    if partial.any():
        names = ", ".join(str(layer) for layer in layers[partial])
        spool.notes.append(f"Layer {names} of the source lacks prefill rows and is left out.")
    return np.flatnonzero(~partial)
