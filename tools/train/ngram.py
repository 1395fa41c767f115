"""Interpolated bigram and trigram models (Jelinek-Mercer): the baselines a language model has to beat.

p(w|u,v) = l3 c(u,v,w)/c(u,v) + l2 c(v,w)/c(v) + l1 (c(w)+1)/(N+V); the weights l depend on how often the context
was seen (buckets of powers of two) and are fitted by expectation-maximisation on text that was not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BUCKETS = 12  # contexts seen 0, 1, 2-3, 4-7, ... times; the last bucket is open
EM_ROUNDS = 15


@dataclass(frozen=True)
class _Table:
    """Counts of n-grams coded as integers, sorted by code."""

    codes: Ints
    counts: Ints

    @staticmethod
    def of(codes: Ints) -> _Table:
        return _Table(*np.unique(codes, return_counts=True))

    def look_up(self, codes: Ints) -> Ints:
        at = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[at] == codes, self.counts[at], 0)


def _bucket(context_counts: Ints) -> Ints:
    return np.minimum(np.ceil(np.log2(context_counts + 1)), BUCKETS - 1).astype(np.int64)


class NGram:
    """Counts of orders 1 to `order` (2 or 3) with interpolation weights [bucket, order]; a stream is a 1-D id array."""

    def __init__(
        self, order: int, vocab: int, counted: list[npt.NDArray[np.uint16]], fitted: list[npt.NDArray[np.uint16]]
    ):
        self.order, self.vocab = order, vocab
        streams = [ids.astype(np.int64) for ids in counted]
        unigram = np.bincount(np.concatenate(streams), minlength=vocab)
        self.unigram = (unigram + 1) / (unigram.sum() + vocab)
        # tables[n]: n-grams; contexts[n]: how often the first n-1 words were followed by anything
        self.tables = {
            n: _Table.of(np.concatenate([self._codes(ids, n) for ids in streams])) for n in range(2, order + 1)
        }
        self.contexts = {}
        for n, table in self.tables.items():
            heads = table.codes // vocab
            codes, first = np.unique(heads, return_index=True)
            self.contexts[n] = _Table(codes, np.add.reduceat(table.counts, first))
        self.weights = np.full((BUCKETS, order), 1 / order)
        self._fit([ids.astype(np.int64) for ids in fitted])

    def _codes(self, ids: Ints, n: int) -> Ints:
        code = ids[: len(ids) - n + 1].copy()
        for i in range(1, n):
            code = code * self.vocab + ids[i : len(ids) - n + 1 + i]
        return code

    def _components(self, ids: Ints) -> tuple[Floats, Ints]:
        """(probability of each order [P, order], bucket [P]) for positions order-1.. of a stream."""
        size = len(ids) - self.order + 1
        parts = [self.unigram[ids[self.order - 1 :]]]
        seen = np.zeros(size, np.int64)
        for n in range(2, self.order + 1):
            codes = self._codes(ids[self.order - n :], n)
            seen = self.contexts[n].look_up(codes // self.vocab)
            parts.append(self.tables[n].look_up(codes) / np.maximum(seen, 1))
        return np.stack(parts, axis=1), _bucket(seen)

    def _fit(self, streams: list[Ints]) -> None:
        pieces = [self._components(ids) for ids in streams]
        parts = np.concatenate([p for p, _ in pieces])
        bucket = np.concatenate([b for _, b in pieces])
        for b in range(BUCKETS):
            rows = parts[bucket == b]
            if len(rows) < 10:
                continue
            mix = np.full(self.order, 1 / self.order)
            for _ in range(EM_ROUNDS):
                share = rows * mix
                mix = (share / share.sum(axis=1, keepdims=True)).mean(axis=0)
            self.weights[b] = mix

    def log_probabilities(self, ids: npt.NDArray[np.uint16]) -> Floats:
        """Natural-log probability of ids[order-1:] given what precedes each."""
        parts, bucket = self._components(ids.astype(np.int64))
        mixed: Floats = np.log((parts * self.weights[bucket]).sum(axis=1))
        return mixed
