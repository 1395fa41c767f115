# cython: boundscheck=True, wraparound=True
"""Experts split in two, a segment computed in one go and copied in slices; and what is said of them in a layer.

A policy may keep both in its own words; these are compiled, and say of a whole segment in one call what takes a
decision for each slice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sim.policy.decisions import Decision, Evict, Fetch, Prefetch, RunPart
from sim.policy.pieces import Piece

if TYPE_CHECKING:
    from sim.policy.view import View


class Segment:
    """A part of an expert: the piece that is computed, and the slices of it that are copied, in their order.

    Attributes:
        held: its slices have their room. n_bytes: of all slices. copies_s: link time of each slice. fetch, prefetch,
            evict: of each slice. run: of all.
    """

    def __init__(self, piece: Piece, slices: tuple[Piece, ...], copies_s: list[float]) -> None:
        self.expert = piece.expert
        self.gpu = piece.gpu
        self.slices = slices
        self.n_bytes = sum([one.n_bytes for one in slices])
        self.copies_s = copies_s
        self.fetch = [Fetch(one) for one in slices]
        self.prefetch = [Prefetch(one) for one in slices]
        self.evict = [Evict(one) for one in slices]
        self.run = RunPart(piece) if len(slices) == 1 else RunPart(piece, (), slices)
        self.held = False
        self.settled = False  # held, and all slices have been seen there
        self.ready = False  # all there when `SplitExpert.look` was called last
        self.begun = False  # said to run, of an expert that is not over

    def hold(self, held: bool) -> None:
        """Its slices have their room, or have not."""
        self.held = held
        self.settled = False


class SplitExpert:
    """An expert in two segments, or in one.

    Attributes:
        top, bottom: None where the other one is everything. n_slices: of both. n_held: slices that have their room, and
            absent: of those the ones that had not arrived, to be waited for, when `look` was called last.
    """

    def __init__(self, top: Segment | None, bottom: Segment | None) -> None:
        self.top = top
        self.bottom = bottom
        self.segments = [segment for segment in (top, bottom) if segment is not None]
        self.n_slices = sum([len(segment.slices) for segment in self.segments])
        self.n_held = 0
        self.absent: list[Fetch] = []

    def look(self, view: View) -> None:
        """See what has its room and what of it is there. Trait `timing`."""
        self.n_held = 0
        self.absent = []
        for segment in self.segments:
            one: Segment = segment
            if one.held:
                self.n_held += len(one.slices)
                if not one.settled:
                    n_absent = len(self.absent)
                    for fetch in one.fetch:
                        asked: Fetch = fetch
                        if not view.arrived(asked.piece):
                            self.absent.append(asked)
                    one.settled = len(self.absent) == n_absent
            one.ready = one.settled

    def missing_bytes(self) -> int:
        """Of segments that have no room."""
        n_bytes = 0
        for segment in self.segments:
            one: Segment = segment
            if not one.held:
                n_bytes += one.n_bytes
        return n_bytes


class Buffer:
    """Room for segments, and decisions about them in their order; what is said holds at once for what is said next.

    Attributes:
        said: decisions since `begin`. room: by GPU, bytes left.
    """

    def __init__(self, n_gpus: int) -> None:
        self.said: list[Decision] = []
        self.room = [0] * n_gpus

    def begin(self, view: View, kept_bytes: Sequence[int]) -> None:
        """Nothing has been said yet; room is what nothing takes, but for the bytes that each GPU keeps."""
        self.said = []
        for gpu in range(len(self.room)):
            self.room[gpu] = view.free_bytes(gpu) - kept_bytes[gpu]

    def fits(self, split: SplitExpert, gpu: int) -> bool:
        """Whether there is room for all that an expert lacks."""
        return split.missing_bytes() <= self.room[gpu]

    def leave(self, segment: Segment) -> None:
        """Free a segment's room."""
        self.said += segment.evict
        segment.hold(False)
        self.room[segment.gpu] += segment.n_bytes

    def wait(self, split: SplitExpert) -> None:
        """Ask for what an expert holds and what is not there: it goes first now."""
        self.said += split.absent

    def demand(self, split: SplitExpert) -> None:
        """Copy what an expert lacks."""
        for segment in split.segments:
            one: Segment = segment
            if not one.held:
                self._take(one, one.fetch)

    def ahead(
        self, splits: Mapping[int, SplitExpert], order: Iterable[int], gpu: int, window_s: float
    ) -> list[Segment]:
        """Copy ahead what experts lack, in this order, until one does not fit or the window has passed.

        Args:
            splits: of the experts on this GPU; others of `order` are passed over. window_s: link time that may go by
                before the next expert.

        Returns: what is copied.
        """
        taken: list[Segment] = []
        for expert in order:
            found = splits.get(expert)
            if found is None:
                continue
            split: SplitExpert = found
            if window_s < 0.0 or split.missing_bytes() > self.room[gpu]:
                break
            for segment in split.segments:
                one: Segment = segment
                if not one.held:
                    self._take(one, one.prefetch)
                    taken.append(one)
                    for copy_s in one.copies_s:
                        window_s -= copy_s
        return taken

    def _take(self, segment: Segment, copies: Sequence[Decision]) -> None:
        self.said += copies
        segment.hold(True)
        self.room[segment.gpu] -= segment.n_bytes

    def run_ready(self, split: SplitExpert) -> None:
        """Compute the segments that were all there when the expert was looked at; the rest follows with `run`."""
        for segment in split.segments:
            one: Segment = segment
            if one.ready:
                one.begun = True
                self.said.append(one.run)

    def run(self, split: SplitExpert, whole: Decision | None, keeps_top: bool) -> None:
        """Compute what is left of an expert, segment by segment, or by the decision that stands for all of it; then
        free its room, but for a top that is kept."""
        if whole is not None:
            self.said.append(whole)
        for segment in split.segments:
            one: Segment = segment
            if whole is None and not one.begun:
                self.said.append(one.run)
            one.begun = False
        if split.bottom is not None:
            self.leave(split.bottom)
        if split.top is not None and not keeps_top:
            self.leave(split.top)


def lowest(keys: Sequence[int], experts: Iterable[int], but_for: Container[int]) -> int:
    """Of some experts the one of the lowest key that is not spared, of equals the lowest id; -1 where all are."""
    found = -1
    for expert in experts:
        if expert not in but_for and (
            found < 0 or keys[expert] < keys[found] or (keys[expert] == keys[found] and expert < found)
        ):
            found = expert
    return found
