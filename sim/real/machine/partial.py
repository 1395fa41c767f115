"""An expert computed from its pieces, each as it arrives: slices of columns add up, slices of matrices follow up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.real.machine.store import Extent

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.real.machine.decoder import Decoder


class Result:
    """What one expert (or the shared ones) adds to which rows; `out` is there once its work has run."""

    __slots__ = ("foreign", "key", "out", "rows", "share")

    def __init__(self, key: tuple[int, int, float], rows: Any, share: Any) -> None:
        self.key = key  # layer, expert, start_frac: results are added in this order, whatever came first
        self.rows = rows  # of the iteration, or None for all of them
        self.share = share  # weight, a float or [rows, 1]; None: 1
        self.out: Any = None
        self.foreign = False  # made on another lane than the one that adds it up


class Partial:
    """One expert of the layer under way: what of it has been launched, and what its matrices have come to.

    Slices of columns may come in any order, slices of matrices from the first row on; where pieces overlap, the later
    one computes only what the earlier ones have not.
    """

    def __init__(self, layer: int, expert: int, rows: int, routed: tuple[Any, Any]) -> None:
        self.layer, self.expert, self.rows = layer, expert, rows
        self._routed = routed
        self._covered: list[tuple[int, int]] = []  # columns or rows launched
        self._by_matrix: bool | None = None
        self._x: Any = None  # what the expert reads, once its first piece has run
        self._inner: list[Any] = [None, None]  # x times gate, x times up
        self._gated: Any = None
        self._result: Result | None = None

    def add(
        self, part: Extent, values: Callable[[], Any], decoder: Decoder, read: Callable[[Result], Any]
    ) -> tuple[list[Result], Callable[[], None]]:
        """One more piece: results that are new with it, and the call that computes it on its lane.

        Args:
            values: the piece's rows. read: the rows of the iteration that a result is about.
        """
        if self._by_matrix not in (None, part.by_matrix):
            raise BadInput(
                f"--real, got expert {self.expert} of layer {self.layer} in columns and in matrices: a real "
                "run computes one kind at a time; take one"
            )
        self._by_matrix = part.by_matrix
        todo = self._uncovered(part.start, part.stop)
        self._covered += todo
        if part.by_matrix:
            return self._add_matrices(part, todo[0][0] - part.start if todo else part.n_rows, values, decoder, read)
        result = Result((self.layer, self.expert, part.start / self.rows), *self._routed)

        def columns() -> None:
            rows, x = values(), read(result)
            matrices = rows.view(3, part.stop - part.start, rows.shape[-1])
            if todo == [(part.start, part.stop)]:
                result.out = decoder.ffn(x, matrices)
                return
            outs = [decoder.ffn(x, matrices[:, start - part.start : stop - part.start]) for start, stop in todo]
            result.out = sum(outs[1:], outs[0])

        return [result] if todo else [], columns if todo else _nothing

    def _uncovered(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of a range has not been launched, ascending."""
        left = [(start, stop)]
        for a, b in self._covered:
            left = [(low, high) for x, y in left for low, high in ((x, min(y, a)), (max(x, b), y)) if low < high]
        return left

    def _add_matrices(
        self, part: Extent, skip: int, values: Callable[[], Any], decoder: Decoder, read: Callable[[Result], Any]
    ) -> tuple[list[Result], Callable[[], None]]:
        new = []
        if self._result is None:
            self._result = Result((self.layer, self.expert, 0.0), *self._routed)
            new.append(self._result)
        result, rows = self._result, self.rows

        def matrices() -> None:
            linear, found = decoder.torch.nn.functional.linear, values()
            if self._x is None:
                self._x = read(result)
            for which in range(3):
                start, stop = max(part.start + skip, which * rows), min(part.stop, (which + 1) * rows)
                if start >= stop:
                    continue
                mine, at = found[start - part.start : stop - part.start], start - which * rows
                if which < 2:
                    self._fill(which, at, linear(self._x, mine))
                else:
                    self._put_out(result, at, mine, decoder)

        return new, matrices

    def _fill(self, which: int, at: int, columns: Any) -> None:
        if columns.shape[1] == self.rows:
            self._inner[which] = columns
            return
        if self._inner[which] is None:
            self._inner[which] = columns.new_empty((len(columns), self.rows))
        self._inner[which][:, at : at + columns.shape[1]] = columns

    def _put_out(self, result: Result, at: int, down: Any, decoder: Decoder) -> None:
        if self._gated is None:
            gate, up = self._inner
            self._gated = decoder.torch.nn.functional.silu(gate) * up
        out = self._gated[:, at : at + len(down)] @ down if len(down) < self.rows else self._gated @ down
        result.out = out if result.out is None else result.out + out


def _nothing() -> None:
    """A piece of which everything has been computed from others."""
