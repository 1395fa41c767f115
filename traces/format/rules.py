"""Rules on the values inside tensors, as pure functions on a chunk of rows; writer and validator share them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from traces.format.header import Header
from traces.format.layout import DTYPES, Array, Code, Floats

# Recorders compute in bfloat16 or float16: what they store may be off by this much before any rule calls it wrong.
SUM_SLACK = 0.01
F16_STEP = 2.0**-10


class Fault(msgspec.Struct, frozen=True):
    """One value that breaks one rule. `index` counts in the tensor as stored; empty, it is one of the header's."""

    tensor: str
    index: tuple[int, ...]
    got: str
    rule: str

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.tensor}{at}, got {self.got}: {self.rule}"

    def shifted(self, rows: int) -> Fault:
        """The same fault of a chunk that begins at row `rows`."""
        return Fault(self.tensor, (self.index[0] + rows, *self.index[1:]), self.got, self.rule)


def chunk_faults(
    tensor: str, chunk: Array, experts: Array, header: Header, code: Code | None = None, vocabulary: int | None = None
) -> Iterator[Fault]:
    """Faults of some rows of one tensor as stored; `experts` are the ids of the same rows, (n, L, K)."""
    if tensor == "experts":
        yield from _ids(tensor, chunk, header.n_experts, "distinct experts per token and layer")
    elif tensor.endswith(".ids"):
        yield from _ids(tensor, chunk, header.n_experts, "distinct experts per list")
    elif tensor == "weights":
        yield from _weights(chunk, header)
    elif tensor == "token_ids":
        yield from _where(tensor, chunk, chunk < 0, "a token id is not negative")
        if vocabulary is not None:
            yield from _where(tensor, chunk, chunk >= vocabulary, f"embedding_table has {vocabulary} rows")
    elif tensor == "iterations":
        yield from _where(tensor, chunk, chunk < 0, "an iteration is not negative")
    elif code is not None:
        yield from _where(tensor, chunk, chunk > code.top, f"a {code.name} code is at most {code.top}")
        if tensor == "scores":
            yield from _scores(chunk, experts, header, code)
    elif chunk.dtype.kind == "f":
        yield from _where(tensor, chunk, ~np.isfinite(chunk), "a finite number")
        if tensor == "gate_input_norms":
            yield from _where(tensor, chunk, chunk < 0, "a norm is not negative")


def _columns(values: Array) -> Array:
    """The last axis in front, so that numpy reduces it many rows at a time; a sum of a few numbers costs a call."""
    return np.ascontiguousarray(np.moveaxis(values, -1, 0))


def _of_chosen(values: Array, experts: Array) -> Array:
    """`np.take_along_axis(values, experts, -1)` in a tenth of its time, of experts that there are."""
    rows = np.arange(experts.size // experts.shape[-1]).reshape(*experts.shape[:-1], 1)
    found: Array = np.ascontiguousarray(values).reshape(-1).take(rows * values.shape[-1] + experts)
    return found


def _where(tensor: str, values: Array, bad: Any, rule: str) -> Iterator[Fault]:
    if bad.any():
        for index in np.argwhere(bad):
            at = tuple(int(i) for i in index)
            yield Fault(tensor, at, str(values[at]), rule)


def _ids(tensor: str, ids: Array, n_experts: int, distinct: str) -> Iterator[Fault]:
    yield from _where(tensor, ids, ids >= n_experts, f"an expert id is below n_experts ({n_experts})")
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    for index in np.argwhere(twice) if twice.any() else ():
        at = tuple(int(i) for i in index)
        yield Fault(tensor, at, " ".join(map(str, ids[at])), distinct)


def _weights(stored: Array, header: Header) -> Iterator[Fault]:
    broken = ~np.isfinite(stored)
    yield from _where("weights", stored, broken, "a finite number")
    yield from _where("weights", stored, stored < 0, "a weight is not negative")
    if broken.any():
        return  # sums of infinities say nothing more
    weights = stored.astype(np.float64)
    ordered = header.gate.selection == "topk" and header.expert_order == "router"
    if ordered and header.gate.score != "sparsemixer":
        rising = np.zeros(weights.shape, bool)
        rising[..., 1:] = weights[..., 1:] > weights[..., :-1] * (1 + F16_STEP) + F16_STEP**2
        yield from _where("weights", stored, rising, "weights never rise along K: experts are in router order")
    if header.gate.renormalised and header.weights_kind == "applied":
        total = weights.sum(axis=-1)
        off = np.abs(total - header.gate.scaling) > SUM_SLACK * header.gate.scaling
        yield from _where("weights", total, off, f"renormalised weights sum to {header.gate.scaling:g}")


def _scores(codes: Array, experts: Array, header: Header, code: Code) -> Iterator[Fault]:
    if header.gate.score in ("softmax", "sparsemixer"):
        total = _columns(code.decode(codes, code.scale)).sum(axis=0) / code.scale
        yield from _where(
            "scores",
            total,
            np.abs(total - 1.0) > sum_tolerance(code, header.n_experts),
            "softmax scores over all experts sum to 1",
        )
    if header.gate.selection != "topk" or int(experts.max(initial=0)) >= header.n_experts:
        return
    ids = experts.astype(np.int64)
    chosen = _of_chosen(codes, ids).astype(np.int64)
    rest = np.array(codes)
    np.put_along_axis(rest, ids, 0, axis=-1)
    best = _columns(rest).max(axis=0)
    # Rounding keeps order, so one code of slack covers a recorder whose scores were rounded before ours.
    beaten = best > _columns(chosen).min(axis=0) + 1
    yield from _where("scores", best, beaten, "the chosen experts have the highest scores")
    if header.expert_order == "router":
        rising = chosen[..., 1:] > chosen[..., :-1] + 1
        if rising.any():
            row = rising.any(axis=-1)
            yield from _where("scores", chosen[..., 0], row, "experts are in router order, highest score first")


def weight_faults(stored: Array, codes: Array, experts: Array, header: Header, code: Code) -> Iterator[Fault]:
    """Weights that do not follow from the scores of the chosen experts, given both for the same rows."""
    if int(experts.max(initial=0)) >= header.n_experts or not np.isfinite(stored).all():
        return
    if header.gate.score == "sparsemixer":
        return  # its weights are shares among the experts near the chosen one, which quantised scores cannot give
    chosen = code.decode(_of_chosen(codes, experts.astype(np.int64)), code.scale) / code.scale
    weights, error = stored.astype(np.float64), code.max_error()
    if header.weights_kind == "raw":
        off = np.abs(weights - chosen) > error + SUM_SLACK
    elif header.gate.renormalised:  # compared multiplied out: the sum may be near zero
        total = np.repeat(_columns(chosen).sum(axis=0)[..., None], header.top_k, axis=-1)
        share = weights / header.gate.scaling
        off = np.abs(share * total - chosen) > error * (1 + header.top_k * share) + SUM_SLACK
    else:
        off = np.abs(weights / header.gate.scaling - chosen) > error + SUM_SLACK
    yield from _where("weights", stored, off, "weights follow from the scores of the chosen experts")


def sum_tolerance(code: Code, n_experts: int) -> float:
    """How far quantised softmax scores of one token may sum from 1: the worst rounding of all experts, and slack."""
    if code.power == 1:
        return n_experts * code.max_error() + SUM_SLACK
    # sum of sqrt(p) is at most sqrt(n) when the p sum to 1
    return math.sqrt(n_experts) / code.top + n_experts * 0.25 / code.scale + SUM_SLACK


def as_codes(tensor: str, scores: Array, code: Code) -> Array:
    """Scores as codes: floats in [0, 1] are quantised, integers are taken as codes already.

    Raises:
        ValueError: a value outside the range, as `tensor[index], got value: rule`.
    """
    if scores.dtype.kind in "ui":
        faults = _where(tensor, scores, (scores < 0) | (scores > code.top), f"a {code.name} code is 0 to {code.top}")
    else:
        values: Floats = scores.astype(np.float64)
        # A rounded softmax may pass 1 by a float16 step; NaN fails both comparisons.
        faults = _where(tensor, scores, ~((values >= 0) & (values <= 1 + F16_STEP)), "a score is a number from 0 to 1")
    if fault := next(faults, None):
        raise ValueError(str(fault))
    return scores.astype(DTYPES[code.dtype]) if scores.dtype.kind in "ui" else code.encode(scores)
