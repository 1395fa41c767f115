"""Hits of a cache that ranks experts by the trace alone (LFU, LCP, MRS), at every size from one replay.

Such a cache is a stack algorithm (Mattson and others 1970) wherever it holds what one layer asks for at once. While a
layer is served, none of the experts it asks for may leave, and all of them are there afterwards; so the rest of a cache
of C experts is the C - n best of what was there and not asked for, n being how many were. Ranks of these rest on the
trace, not on C, and no two are equal, since ties are settled by expert and layer. Take C + 1, which held the same and
one more expert: one candidate more at most, and one place more. Its best hold the best of C, so what C holds, C + 1
holds, and a stack of experts says what each size does.

A smaller cache has to let go of experts that the layer has run, so there the proof ends: such sizes are counted by the
engine's rules, each with a cache of its own, in the same replay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sim.policy.api import overrides
from sim.policy.decisions import Serve
from sim.policy.order import EXPERT, Rank
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.setup.setup import Setup

Key = tuple[float, int, int]
Hits = dict[str, list[list[int]]]  # phase -> cache -> by size, how many experts were there
SERVE = (Serve(),)


class RankedStack:
    """One cache in every size at once.

    Args:
        size: of the largest. small: sizes below this have a cache of their own.
    """

    def __init__(self, size: int, small: int) -> None:
        self.size = size
        self._stack: list[int] = []  # a cache of C holds the first C, from `small` on
        self._small: list[set[int]] = [set() for _ in range(min(small, size + 1))]  # by size

    def visit(self, pieces: Sequence[int], key: Any, hits: list[int]) -> None:
        """Ask for pieces together, and count in which sizes each is there.

        Args:
            key: of a piece; the least leaves first. hits: by size.
        """
        for size in range(1, len(self._small)):
            hits[size] += self._exchange(self._small[size], size, pieces, key)
        places = {piece: at for at, piece in enumerate(self._stack)}
        for piece in pieces:
            if piece in places:
                for size in range(max(places[piece] + 1, len(self._small)), self.size + 1):
                    hits[size] += 1
        self._restack(pieces, key)

    def _restack(self, pieces: Sequence[int], key: Any) -> None:
        """Those asked for first; then, for each further size, the best of what did not find room in a smaller one."""
        asked, stack = set(pieces), list(pieces)
        left: list[tuple[Any, int]] = []
        n_found = 0
        for at, piece in enumerate(self._stack):
            if piece in asked:
                n_found += 1
            else:
                heapq.heappush(left, (_Best(key(piece)), piece))
            if at >= len(asked) and left:
                stack.append(heapq.heappop(left)[1])
            if n_found == len(asked) and not left and at + 1 >= len(asked):
                stack += self._stack[at + 1 :]  # nothing is under way: below it nobody moves
                break
        stack += [heapq.heappop(left)[1] for _ in range(len(left))]
        self._stack = stack

    @staticmethod
    def _exchange(here: set[int], room: int, pieces: Sequence[int], key: Any) -> int:
        """What the engine does: all that are missing are demanded while none of the layer may leave; those that found
        no room follow one by one, each in the place of the least of all, since the others have run."""
        missing = [piece for piece in pieces if piece not in here]
        asked, later = set(pieces), []
        for piece in missing:
            if len(here) >= room:
                others = here - asked
                if not others:
                    later.append(piece)
                    continue
                here.remove(min(others, key=key))
            here.add(piece)
        for piece in later:
            here.remove(min(here, key=key))
            here.add(piece)
        return len(pieces) - len(missing)


class _Best:
    """Sorts the largest key first."""

    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key

    def __lt__(self, other: _Best) -> bool:
        return self.key > other.key


def ranked_hits(setup: Setup, n_caches: int) -> tuple[dict[str, int], Hits]:
    """Phase -> experts asked for, and `Hits`, of a run with room for all experts, whose ranks say who would leave.

    Args:
        n_caches: one, or as many as layers. setup: with that room.
    """
    from sim.run import execute

    model = setup.model
    n_experts, size = model.n_experts, model.n_experts * model.n_moe_layers // n_caches
    most = n_experts if setup.spec.together > 1 or any(r.prompt_len > 1 for r in setup.requests) else model.top_k
    stacks = [RankedStack(size, most) for _ in range(n_caches)]
    asked = dict.fromkeys(PHASES, 0)
    hits: Hits = {phase: [[0] * (size + 1) for _ in stacks] for phase in PHASES}

    def told(policy: Policy, phase: str, layer: int, experts: Iterable[int]) -> None:
        order = policy.order
        assert isinstance(order, Rank)
        rank = memoryview(order.rank)  # type: ignore[arg-type]
        by_expert = order.ties == EXPERT

        def key(piece: int) -> Key:
            return (rank[piece], piece % n_experts, piece) if by_expert else (rank[piece], piece, 0)

        pieces = [layer * n_experts + expert for expert in experts]
        asked[phase] += len(pieces)
        cache = layer % n_caches
        stacks[cache].visit(pieces, key, hits[phase][cache])

    execute(replace(setup, policy=_watched(setup.policy, told)), bounds=False, by_layer=False)
    return asked, hits


def _watched(policy: Policy, told: Any) -> Policy:
    """The policy, which says what each layer asked for once it is served: ranks of these are settled then, and the
    others' have not changed since its gate spoke."""
    kind: Any = type(policy)
    decides = overrides(policy, "gate_done")
    gates: list[Any] = []

    class Watched(kind):  # type: ignore[misc]
        def gate_done(self, gate: Any, view: Any) -> Any:
            gates[:] = [gate]
            return super().gate_done(gate, view) if decides else SERVE

        def layer_done(self, layer: int, view: Any) -> None:
            told(self, gates[0].iteration.counted, layer, gates[0].needs)

    watched: Policy = Watched(**policy.settings)
    return watched
