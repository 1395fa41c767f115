"""A run as the reference is told it: what the policy said, what the engine says it did, when copies began and ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class Differs(AssertionError):
    """The engine did something else than the rules say."""


class BreaksOff(Exception):
    """A decision is refused, and the run ends there."""


@dataclass
class Said:
    """Something said, in order, at a time of the host's clock. `what`, with its `facts`:

    - `initial` pieces: what lies on the GPUs before the run. `iteration` phase: one begins, counted under that phase
    - `gate` layer, ids, after, lower: a gate chose `ids` [tokens, k], a lossy policy made them `after` (else None) and
      lets experts run in the precisions of `lower`. `served`: the policy has done with the layer
    - `decision` hook, decision. `requeue` hook, wanted, up_to_layer, most: `Requeue` or `RequeueFrom`, as pairs of a
      piece and its priority
    - `looks`: the host is about to look what has arrived. `looked`: it has
    - `victim` piece, speculative, answer: the policy was asked. `accessed` piece, hit; `placed` piece; `evicted` piece:
      it was told

    n_done: deeds before it. rank, bar: of the policy's `Rank`, at this moment.
    """

    what: str
    now_s: float
    facts: list[Any]
    n_done: int = 0
    rank: list[float] | None = None
    bar: list[int] | None = None


@dataclass
class Script:
    """A whole run, to be followed once.

    done: the engine's log, (kind, layer, expert, the host's clock). copies_s: when each copy began and ended, in order
    of asking; infinite, where it was withdrawn.
    """

    said: list[Said] = field(default_factory=list)
    done: list[tuple[str, int, int, float]] = field(default_factory=list)
    copies_s: list[tuple[float, float]] = field(default_factory=list)
    n_said: int = 0
    n_done: int = 0
    now_s: float = 0.0

    def follow(self) -> Iterator[Said]:
        """All that is said and that nobody else hears. Raises Differs where something was done beyond it."""
        while self.n_said < len(self.said):
            yield self.said[self.n_said]
        if self.n_done < len(self.done):
            raise Differs(f"deed {self.n_done}: expected nothing, got {self.done[self.n_done]}")

    def hear(self, what: str, *facts: Any) -> Said:
        """The next thing said, which must be this."""
        if self.n_said == len(self.said):
            raise Differs(f"before deed {self.n_done}: expected {what} {facts}, got nothing")
        said = self.said[self.n_said]
        if said.what != what or said.facts[: len(facts)] != list(facts):
            raise Differs(f"before deed {self.n_done}: expected {what} {facts}, got {said}")
        self.n_said += 1
        self.now_s = said.now_s
        return said

    def said_by(self, hook: str) -> Said | None:
        """What a hook says next, before anything else is said or done."""
        for said in self.said[self.n_said : self.n_said + 1]:
            if said.facts[:1] == [hook] and said.n_done == self.n_done:
                return self.hear(said.what)
        return None

    def do(self, kind: str, layer: int, expert: int) -> None:
        """The next deed, which must be this."""
        if self.n_done == len(self.done):
            raise Differs(f"deed {self.n_done}: expected {kind} {layer}.{expert}, got nothing")
        *done, self.now_s = self.done[self.n_done]
        if done != [kind, layer, expert]:
            raise Differs(f"deed {self.n_done}: expected {kind} {layer}.{expert}, got {done}")
        self.n_done += 1

    def next_s(self) -> list[float]:
        """When the next deed was done, if there is one."""
        return [done[3] for done in self.done[self.n_done : self.n_done + 1]]
