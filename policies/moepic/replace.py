"""How MoEpic replaces cached tops (section 3.3): whose place a missed expert's top takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from policies.common.priority import Priorities
from policies.moepic.cache import Tops
from sim.policy import Buffer, lowest


class Replacement:
    """Puts missed experts' tops in the place of others.

    Args:
        at_random: instead of by priority (Table 3, w/o LCP). admission, replace: the policy's parameters. draw: from
            [0, 1).

    Attributes:
        n_admitted: missed experts whose tops have been cached.
    """

    def __init__(
        self, priorities: Priorities, at_random: bool, admission: str, replace: str, draw: Callable[[], float]
    ) -> None:
        self._priorities = priorities
        self._at_random = at_random
        self._admission = admission
        self._by_all = replace == "lowest"
        self._draw = draw
        self.n_admitted = 0

    def admit(self, tops: Tops, expert: int, needs: Mapping[int, int], pending: dict[int, int], buffer: Buffer) -> None:
        """A missed expert's top takes the place of the one of lowest priority that the layer does not need; where it
        needs all that are cached (prompts, batches), of the lowest, or passes through the buffer while that one is
        still to run."""
        if not tops.n_cached:
            return
        if len(tops.cached) >= tops.n_cached:
            keys = self._priorities.keys[tops.layer]
            victim = self._any(tops, pending) if self._at_random else self._lowest(keys, tops, needs, pending)
            if victim < 0 or (self._admission == "priority" and keys[expert] < keys[victim]):
                return
            leaving = tops.splits[victim].top
            if leaving is not None:
                buffer.leave(leaving)
            del tops.cached[victim]
        tops.cached[expert] = None
        self.n_admitted += 1

    def _lowest(self, keys: list[int], tops: Tops, needs: Mapping[int, int], pending: dict[int, int]) -> int:
        """The cached expert that leaves, -1 where it cannot yet."""
        if not self._by_all:
            return lowest(keys, tops.cached, pending)
        victim = lowest(keys, tops.cached, needs)
        if victim < 0:
            victim = lowest(keys, tops.cached, {})
        return -1 if victim in pending else victim

    def _any(self, tops: Tops, pending: dict[int, int]) -> int:
        """One of those cached that are not still to run, -1 where there is none."""
        candidates = [e for e in tops.cached if e not in pending]
        return candidates[int(self._draw() * len(candidates))] if candidates else -1


def shuffled(experts: list[int], draw: Callable[[], float]) -> Iterator[int]:
    """The experts in random order, which becomes the order of the list."""
    for left in range(len(experts), 0, -1):
        at = int(draw() * left)
        experts[at], experts[left - 1] = experts[left - 1], experts[at]
        yield experts[left - 1]
