"""What MoEpic says while one layer is served: decisions in their order, and the room that they leave."""

from __future__ import annotations

from collections import deque

from policies.moepic.cache import Division, Segment, Tops
from policies.moepic.replace import Replacement
from sim.policy import Decision, View


class Serving:
    """Decisions of one call of `gate_done`; whatever is decided holds at once for what is decided next.

    Attributes:
        said: the decisions. room: by GPU, bytes left in the buffer.
    """

    def __init__(self, division: Division, view: View) -> None:
        self.said: list[Decision] = []
        self.room = [division.room(gpu, view) for gpu in range(view.n_gpus)]

    def leave(self, segment: Segment) -> None:
        """Free a segment's room."""
        self.said += segment.evict
        segment.held = segment.settled = False
        self.room[segment.gpu] += segment.n_bytes

    def take(self, segments: list[Segment], gpu: int, ahead: bool = False) -> None:
        """Copy segments, on demand or ahead of it."""
        for segment in segments:
            self.said += segment.prefetch if ahead else segment.fetch
            segment.held = True
            self.room[gpu] -= segment.n_bytes

    def admit(self, replacement: Replacement, tops: Tops, expert: int, pending: dict[int, int]) -> None:
        """Cache a missed expert's top, in the place of another."""
        leaving = replacement.admit(tops, expert, pending)
        if leaving is not None:
            self.leave(leaving)

    def send(
        self, replacement: Replacement, tops: Tops, unsent: deque[int], pending: dict[int, int], at_least: int = 0
    ) -> None:
        """Load missing segments on demand, as far as there is room."""
        while unsent:
            expert = unsent[0]
            if expert not in tops.cached:
                self.admit(replacement, tops, expert, pending)
            missing = [segment for segment in tops.segments[expert] if not segment.held]
            if at_least <= 0 and sum([segment.n_bytes for segment in missing]) > self.room[tops.gpu]:
                return
            self.take(missing, tops.gpu)
            unsent.popleft()
            at_least -= 1
