"""Read a routing trace: the values of its rows, judged when first read, nothing loaded until it is sliced."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.base.errors import BadInput
from traces.format.blocks import Column
from traces.format.check import row_faults, unsound
from traces.format.growing import Rooms
from traces.format.header import ONE_PROMPT
from traces.format.layout import Array, Floats
from traces.format.stored import StoredTrace

_CHUNK_ROWS = 65_536
_ROWS_AHEAD = 32
_NOTHING = np.empty(0)
_JUDGED_VALUES = 65_536  # of a tensor, held against the rules at a time
HOW_TO_GET = {
    "experts": "every trace has it",
    "iterations": "only a recorder attached to a batching server writes it",
    "tasks": "convert or record with a task per request",
    "arrivals": "record arrival times, or splice them in",
}


class Trace(StoredTrace):
    """The values of an open trace file, by level; slices [a, b) want 0 <= a <= b <= T.

    Raises:
        BadInput: from the constructor, when the file's structure breaks a rule of FORMAT.md; from the methods, when a
            value they read does (each block of rows is judged once, by the rules of `traces.format.check`).
    """

    drawn: frozenset[str] = frozenset()
    """Levels that are not in the file (`sim.workload.drawn_levels`)."""
    drawn_by: tuple[str, int] | tuple[()] = ()
    """What draws them, and the seed."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._blocks: dict[str, tuple[int, Floats]] = {}  # score tensor -> rows read last, the first of them
        self._judged: dict[str, bytearray] = {}  # tensor -> which of its blocks have been found sound

    def close(self) -> None:
        super().close()
        self._blocks.clear()
        self.__dict__.pop("experts", None)

    @cached_property
    def experts(self) -> Array | Column:
        """(T, L, K) expert ids, heaviest first unless the header says `unranked`; uint8 or uint16.

        Raises:
            BadInput: an id of `n_experts` or more, which would otherwise surface as an index error far away, or an
                expert chosen twice by one token, which would surface as a run that is too good.
        """
        ids = self.stored("experts")
        if isinstance(ids, Column):
            return ids.judged_by(self._judge_ids)
        for at in range(0, len(ids), _CHUNK_ROWS):
            self._let_go("experts", at)
            self._judge_ids(at, ids[at : at + _CHUNK_ROWS])
        return ids

    def _judge_ids(self, first: int, chunk: Array) -> None:
        """Refuse some rows of experts that no engine could take."""
        if _repeats(chunk) or int(chunk.max()) >= self.n_experts:  # the quick way to know; which one is found out now
            self._require_sound("experts", first, chunk)

    def _require_sound(self, tensor: str, first: int, chunk: Array) -> None:
        """Refuse rows of a tensor as stored, the first of which is `first`, with one that breaks a rule."""
        for fault in row_faults(self, tensor, first, chunk):
            raise unsound(self, fault.shifted(first))

    @property
    def of_one_prompt(self) -> bool:
        """Whether all of it is one prompt's, or drawn from what was fitted to one; of a log that does not say where
        requests begin nobody knows."""
        labels = self.header.labels
        return ONE_PROMPT in labels or (len(self.requests) == 1 and "unsegmented" not in labels)

    @property
    def token_ids(self) -> Array | Column:
        """(T,) int32 token ids."""
        return self._whole("token_ids")

    @property
    def iterations(self) -> Array | Column:
        """(T,) int32 iteration in which the recorded batch composition processed each row."""
        return self._whole("iterations")

    def weights(self, a: int, b: int) -> Floats:
        """(b - a, L, K) factors the model applies to the experts' outputs, derived when the file holds raw scores, or
        no weights at all."""
        kind = self.header.weights_kind
        if kind == "applied":
            return self._rows("weights", a, b).astype(np.float64)
        if kind == "derived":
            return self._as_weights(self._chosen_scores(a, b), self.score_scale)
        return self._as_weights(self._rows("weights", a, b).astype(np.float64))

    def _as_weights(self, chosen: Floats, scale: int = 1) -> Floats:
        """Weights as the gate makes them of the chosen scores, which are multiples of 1 / scale."""
        gate = self.header.gate
        if gate.renormalised:  # float16 values are multiples of 2**-24 and codes are integers: exact sums in any order
            return self._shares(chosen) * gate.scaling
        return chosen / scale * gate.scaling

    def _shares(self, chosen: Floats) -> Floats:
        """Each of K values as its share of their sum; equal shares of nothing."""
        total = chosen.sum(axis=-1, keepdims=True)
        shares: Floats = np.divide(chosen, total, out=np.full_like(chosen, 1 / self.top_k), where=total > 0)
        return shares

    def _chosen_scores(self, a: int, b: int) -> Floats:
        """(b - a, L, K) scores of the chosen experts, as exact integers."""
        found: Floats = np.take_along_axis(self.scores(a, b), self.experts[a:b].astype(np.int64), -1)
        return found

    def raw_weights(self, a: int, b: int) -> Floats:
        """(b - a, L, K) gate scores of the chosen experts before renormalisation and scaling.

        Raises:
            BadInput: the file holds renormalised weights and no full scores to take them from.
        """
        if self.header.weights_kind == "raw" and "weights" in self._entries:
            return self._rows("weights", a, b).astype(np.float64)
        gate = self.header.gate
        changed = "renormalised" if gate.renormalised else "not the scores" if gate.score == "sparsemixer" else ""
        if not changed and "weights" in self._entries:
            return self._rows("weights", a, b).astype(np.float64) / gate.scaling
        self.require("scores", f"raw_weights (the stored weights are {changed or 'missing'})")
        return self._chosen_scores(a, b) / self.score_scale

    def scores(self, a: int, b: int) -> Floats:
        """(b - a, L, E) gate scores of every expert as exact integers; divide by `score_scale` for probabilities."""
        return self._ahead("scores", a, b)

    def next_scores(self, distance: int, a: int, b: int) -> Floats:
        """(b - a, L, E) scores of layer l + distance's gate applied to layer l's gate input, as exact integers.

        At distance 1 layer L - 1 predicts layer 0 of the next token. Layers without a target are zero, and so is what a
        sparse tensor left out.
        """
        return self._ahead(f"next_scores_{distance}", a, b)

    def shared_scores(self, a: int, b: int) -> Floats:
        """(b - a, L, E) scores of layer l + 1's gate on MoE input + shared expert's output + residual (L4s).

        Exact integers; the last layer has no target and is zero, and so is what a sparse tensor left out.
        """
        return self._ahead("shared_scores", a, b)

    def embeddings(self, a: int, b: int) -> NDArray[np.float32]:
        """(b - a, h) what the embedding layer put out for each row."""
        self.require("embeddings", "embeddings")
        if "embeddings" in self._entries:
            return self._rows("embeddings", a, b).astype(np.float32)
        table = self.stored("embedding_table")
        ids = self._rows("token_ids", a, b)
        rows = table[ids]
        for fault in row_faults(self, "embedding_table", 0, rows):  # of the rows looked up: the table may be long
            raise unsound(self, msgspec.structs.replace(fault, index=(int(ids[fault.index[0]]), *fault.index[1:])))
        return rows.astype(np.float32)

    def gate_inputs(self, a: int, b: int) -> NDArray[np.float32]:
        """(b - a, L, g) input of each gate."""
        return self._rows("gate_inputs", a, b).astype(np.float32)

    def gate_input_norms(self, a: int, b: int) -> NDArray[np.float32]:
        """(b - a, L) Euclidean norm of each gate's input."""
        return np.array(self._rows("gate_input_norms", a, b))

    def require(self, level: str, who: str) -> None:
        """Insist on a level.

        Raises:
            BadInput: names the level, `who` needs it and how to get it.
        """
        if level in self.levels:
            return
        self.require_all({level}, who)

    def require_all(self, levels: Iterable[str], who: str, rest: str = "") -> None:
        """Insist on several levels.

        Args:
            rest: another way out, at the end of the error.

        Raises:
            BadInput: names every level that is missing, `who` needs them and how to get them.
        """
        missing = sorted(set(levels) - self.levels)
        if not missing:
            return
        told = "record it with `moesim record`, or take a bundled trace that has {} (`moesim traces`)"
        told = told.format("it" if len(missing) == 1 else "them")
        how = dict.fromkeys(HOW_TO_GET.get(level, told) for level in missing)
        raise BadInput(
            f"{self.path}: {who} needs {', '.join(missing)}, got {', '.join(sorted(self.levels))}: not "
            f"recorded; {'; '.join(how)}{rest}"
        )

    def _rows(self, tensor: str, a: int, b: int) -> Array:
        """Rows [a, b) of a stored tensor; refuses prefill rows of one that has decode rows only."""
        level = tensor.removesuffix(".ids")
        if not 0 <= a <= b <= self.n_tokens:
            raise IndexError(f"rows [{a}, {b}) of {tensor}: 0 <= a <= b <= {self.n_tokens}")
        self.require(level, level)
        if level not in self._decode_only:
            return self._sound(tensor, a, b)
        at = 0 if a == b else self.requests.decode_position(a, b)
        if at is None:
            raise BadInput(
                f"{self.path}: {level}, got rows {a} to {b}: this trace stores it for the decode rows of a "
                f"request only; ask within those, or record it with prefill rows"
            )
        return self._sound(tensor, at, at + b - a)

    def _whole(self, tensor: str) -> Array | Column:
        """All rows of a stored tensor that has one value per row."""
        self.require(tensor, tensor)
        stored = self.stored(tensor)
        self._judge(tensor, stored, 0, self.n_tokens)
        return stored

    def _sound(self, tensor: str, start: int, stop: int) -> Array:
        """Stored rows [start, stop) of a tensor, every value of which keeps the rules."""
        stored = self.stored(tensor)
        self._judge(tensor, stored, start, stop)
        return stored[start:stop]

    def _judge(self, tensor: str, stored: Array | Column, start: int, stop: int) -> None:
        """Hold rows [start, stop) of a stored tensor against the rules.

        Blocks are judged when they are first read: a trace need not be read twice to be trusted, and a corrupt score
        is named where it stands instead of surfacing as a policy that does oddly well. What is drawn here was judged
        when it was written, and a block may reach into requests that nobody asked for.
        """
        if isinstance(stored, Rooms):
            return
        step = max(1, _JUDGED_VALUES * len(stored) // max(1, stored.size))
        judged = self._judged.setdefault(tensor, bytearray(-(-len(stored) // step)))
        for block in range(start // step, -(-stop // step)):
            if not judged[block]:
                first = block * step
                self._require_sound(tensor, first, stored[first : first + step])
                judged[block] = 1

    def _ahead(self, name: str, a: int, b: int) -> Floats:
        """Rows [a, b) of a score tensor over all layers. Who reads row by row is read a block ahead: what it costs to
        begin with a slice of a mapped file exceeds what a row of it costs."""
        first, block = self._blocks.get(name, (0, _NOTHING))
        at = a - first
        if b - a == 1 and 0 <= at < len(block):
            return block[at : at + 1].copy()
        found = self._padded(self._scores(name, a, b))
        if b - a == 1:
            if at == len(block) and len(block):
                stop = min(a + _ROWS_AHEAD, int(self.requests.offsets[self.requests.request_of(a) + 1]))
                self._blocks[name] = a, self._padded(self._scores(name, a, stop))
            else:
                self._blocks[name] = a, found.copy()
        return found

    def _scores(self, name: str, a: int, b: int) -> Floats:
        """Rows [a, b) of a score tensor for all experts, as exact integers; what a sparse one left out is zero."""
        stored = self._rows(name, a, b)
        values = self._codes[name].decode(self.codes(name, stored), self.score_scale)
        if f"{name}.ids" not in self._entries:
            return values
        dense = np.zeros((*values.shape[:2], self.n_experts))
        ids = self._rows(f"{name}.ids", a, b).astype(np.int64)
        np.put_along_axis(dense, ids, values, axis=-1)
        return dense

    def _padded(self, values: Floats) -> Floats:
        """Fill up missing last layers, those without a target, with zeros."""
        missing = self.n_layers - values.shape[1]
        return np.pad(values, ((0, 0), (0, missing), (0, 0))) if missing else values


def _repeats(ids: Array) -> bool:
    """Whether any token of (n, L, K) ids names an expert twice; comparing columns beats sorting for every real K."""
    k = ids.shape[-1]
    return any(bool((ids[..., i] == ids[..., j]).any()) for i in range(k) for j in range(i))
