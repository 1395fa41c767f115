"""Logs that go forward pass by forward pass and layer by layer, and name neither request nor phase (llama.cpp's).

What is made of the passes: one of several tokens is (a part of) a prompt, one of a single token is a decoded token, and
a prompt after decoded tokens begins the next request. llama.cpp runs the last layer for the tokens only whose logits
are wanted, so a pass may have fewer rows in a later layer than in its first, never more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.base.errors import BadInput
from traces.convert.spool import DECODE, DROPPED, PREFILL, UNKNOWN, Spool

ALIKE = 3  # passes of equal size in a row that look like a batch of requests, or like drafted tokens
NOTE = "Forward passes of several tokens are taken for prompts, those of one token for decoding."
SMALL = 32  # tokens; equal passes from this size on are pieces of one long prompt (llama.cpp's ubatches)


@dataclass(slots=True)
class Forwards:
    """Gives every row of a file its token, and every token its request once its forward pass is over.

    several_layers: whether more than one layer came up; else passes cannot be told apart where rows have no index.
    """

    spool: Spool
    task: str
    several_layers: bool = False
    _first: int = -1  # token the pass begins with
    _stop: int = -1
    _number: int = 0  # record the pass begins with
    _first_layer: int = -1
    _layer: int = -1
    _at: int = 0  # rows of this layer so far
    _request: int = -1
    _n_requests: int = 0
    _decoding: bool = False
    _sizes: list[int] = field(default_factory=list)  # of the passes that just went by, all of one size

    def token(self, layer: int, number: int, index: int | None = None) -> int:
        """The token of the next row.

        Args:
            index: the row's number within its pass and layer, where the log has it.

        Raises:
            BadInput: an index out of turn, a token that the pass's first layer does not have, or a batch.
        """
        where = self.spool.place(number)
        if layer == self._layer and index != 0:
            self._at += 1
        else:
            if self._first < 0 or layer <= self._layer:
                self.end()
                self._first = self._stop = len(self.spool.owner)
                self._number, self._first_layer = number, layer
            self.several_layers |= layer not in (self._layer, -1) and self._layer >= 0
            self._layer, self._at = layer, 0
        if index is not None and index != self._at:
            raise BadInput(
                f"{where}: token, got {index}: {self._at} is next in layer {layer}; the log was cut, sorted or "
                f"filtered, record it again"
            )
        at = self._first + self._at
        if at == self._stop:
            if layer != self._first_layer:
                raise BadInput(
                    f"{where}: layer {layer}, got one token more than in layer {self._first_layer}: a forward pass has "
                    f"its tokens in its first layer; the log was cut or filtered, record it again"
                )
            self.spool.token(DROPPED, UNKNOWN)
            self._stop += 1
        return at

    def end(self) -> None:
        """The pass is over: its tokens get their request. Raises BadInput where it is one of a batch."""
        n = self._stop - self._first
        if n <= 0:
            return
        self._sizes = [*self._sizes, n] if n in self._sizes else [n]
        if len(self._sizes) == ALIKE and 1 < n < SMALL:
            raise BadInput(
                f"{self.spool.place(self._number)}: forward pass, got {ALIKE} of {n} tokens in a row: a batch of "
                f"requests or drafted tokens, whose rows belong to no known request; record one request at a time, "
                f"without drafting"
            )
        if self._request < 0 or (n > 1 and self._decoding):
            self._request = self.spool.request(("forwards", self._n_requests), self.task)
            self._n_requests += 1
        self._decoding = n == 1
        for token in range(self._first, self._stop):
            self.spool.owner[token], self.spool.phase[token] = self._request, DECODE if n == 1 else PREFILL
