"""A compute stream as arithmetic: when does each operation start and end, in launch order?"""

from __future__ import annotations

from collections import deque

from sim.base.flat import floats
from sim.base.lanes import RESOURCES
from sim.machine.lanes import CAUSES, GPU, H2D, HOST, OWED, Spans, cause_of
from sim.machine.meter import Seconds
from sim.machine.price import Operation
from sim.machine.runs import Paths, Runs
from sim.machine.waiting import Waiting
from sim.policy.tickets import UNKNOWN_S, Ticket

_H2D, _HOST, _N_RESOURCES = H2D, HOST, len(RESOURCES)  # machine integers where this is compiled
KEPT = 64
"""Operations of a stream that are remembered, as long as a copy may yet slow them."""
_KEPT = KEPT


class Launched(Ticket):
    """Work launched on a compute stream whose start is not settled yet."""

    __slots__ = (
        *("after", "arrived_s", "duration_s", "expert", "first_s", "last_s", "layer"),
        *("length", "link", "more_s", "n_tokens", "op", "row", "slowed_s", "tail_s"),
    )

    op: str
    layer: int
    expert: int
    n_tokens: int
    first_s: float
    last_s: float
    duration_s: float
    length: int  # place of `duration_s` in `seconds.meter`
    arrived_s: float
    after: tuple[Ticket, ...]
    slowed_s: float
    more_s: float
    tail_s: float
    link: int
    row: int  # of `Waiting`, when it was launched


class Stream:
    """A GPU's compute stream: serves in launch order; an operation waits for its host launch, copies and tickets.

    The gap before an operation is charged to whatever it waited for last. `free_s` is the end of what was placed last,
    `blame` what a stream that waits for that is really waiting for.
    """

    def __init__(self, name: str, n_layers: int = 1, runs: Runs | None = None, link: int = H2D) -> None:
        self.name = name
        self.runs = Paths().of(GPU, 0) if runs is None else runs
        self.link = link  # the lane of copies whose ends are told as numbers
        self.looks_down = False  # what it waits for may have waited for a drive
        self.free_s = 0.0
        self.gaps_s = floats(len(CAUSES))  # waiting, by the cause named by the index
        self.waiting = Waiting(n_layers)
        self.waited_s = self.waiting.waited_s
        self.first_row = self.row = self.waiting.row  # in it, of the phase and of the layer
        self.charged_host_s = 0.0  # of the gaps of all layers, how much is charged to one
        self.charged_h2d_s = 0.0
        self.seconds = Seconds()
        self.blame = 0
        self.blames_prefetch = False
        self.pending: deque[Launched] = deque()
        self.n_pending = 0
        self.joined: tuple[Ticket, ...] = ()  # what the next block waits for; an expert does not
        self.spans: Spans | None = None
        self.copied_s = 0.0  # until when copies to its GPU run, as far as they are settled
        self.written_s = 0.0  # until when pieces are written back
        self.slowed_s = 0.0  # what copies added to its operations
        self.owed_s = 0.0  # what copies that were settled later would have added, to be paid by what comes next
        self.remembers = False  # some copy has started before the end of what had been placed
        self.noted = floats(4 * _KEPT)  # start, end, and what it would take longer: of operations beside no copy
        self.n_noted = 0

    @property
    def busy_s(self) -> float:
        """Seconds spent on operations."""
        return self.seconds.total_s() + self.slowed_s

    @property
    def parts_s(self) -> list[float]:
        """A partition of the stream's whole timeline: busy, or waiting for the cause named by the index."""
        return self.parts()

    def parts(self) -> list[float]:
        """The same, for who asks after every iteration."""
        parts_s = [self.gaps_s[cause] for cause in range(len(CAUSES))]
        parts_s[0] += self.seconds.total_s() + self.slowed_s  # waiting for another GPU's result counts as GPU time too
        return parts_s

    def launch(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        operation: Operation,
        host_s: float,
        launched_s: float,
        arrived_s: float,
        after: tuple[Ticket, ...],
    ) -> Launched | None:
        """`run` an operation that the host launches from `host_s` to `launched_s`."""
        return self.run(
            op,
            layer,
            expert,
            n_tokens,
            host_s + operation.first_s,
            launched_s + operation.tail_s,
            operation.duration_s,
            operation.length,
            arrived_s,
            after,
            operation.slowed_s,
            operation.more_s,
            operation.tail_s,
        )

    def run(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        first_s: float,
        last_s: float,
        duration_s: float,
        length: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        slowed_s: float = 0.0,
        more_s: float = 0.0,
        tail_s: float = 0.0,
    ) -> Launched | None:
        """Launch work whose first kernel reaches the GPU at `first_s` and whose last one ends at `last_s` at best.

        Args:
            length: place of `duration_s` in `seconds.meter`. arrived_s: when the copies it needs had ended, as far as
                that is known. after: whatever else it waits for. slowed_s: what it takes longer beside a copy, more_s:
                beside pieces written back. tail_s: of its last kernel.

        Returns: None when it is settled, and ends at `free_s`.
        """
        if self.n_pending == 0:
            start_s = first_s
            cause = lane = _HOST
            known = True
            if arrived_s > start_s:
                start_s = arrived_s
                cause = _H2D
                lane = self.link
            if after:
                for ticket in after:
                    if ticket.end_s < 0.0:
                        known = False
                        break
                    if ticket.end_s > start_s:
                        start_s = ticket.end_s
                        cause = ticket.cause
                        lane = ticket.lane
            if known:
                self.place(
                    op,
                    layer,
                    expert,
                    n_tokens,
                    start_s,
                    cause,
                    first_s,
                    last_s,
                    duration_s,
                    length,
                    arrived_s,
                    after,
                    slowed_s,
                    more_s,
                    tail_s,
                    lane,
                )
                return None
        work = Launched.__new__(Launched)  # compiled, a fraction of what a constructor takes
        work.end_s = UNKNOWN_S
        work.cause = 0
        work.lane = self.runs.number
        work.speculative = False
        work.op = op
        work.layer = layer
        work.expert = expert
        work.n_tokens = n_tokens
        work.first_s = first_s
        work.last_s = last_s
        work.duration_s = duration_s
        work.length = length
        work.arrived_s = arrived_s
        work.after = after
        work.slowed_s = slowed_s
        work.more_s = more_s
        work.tail_s = tail_s
        work.link = self.link
        work.row = self.row
        self.pending.append(work)
        self.n_pending += 1
        return work

    def join(self, ticket: Ticket) -> None:
        """The next block waits for this, too."""
        self.joined = (*self.joined, ticket)

    def newest(self) -> Ticket:
        """A ticket for what has been launched last."""
        if self.n_pending:
            return self.pending[self.n_pending - 1]
        ticket = Ticket(self.free_s, self.blame)
        ticket.lane = self.runs.number
        ticket.speculative = self.blames_prefetch
        return ticket

    def place(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        start_s: float,
        cause: int,
        first_s: float,
        last_s: float,
        duration_s: float,
        length: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        slowed_s: float,
        more_s: float,
        tail_s: float,
        lane: int,
    ) -> None:
        """Settle work whose start is known, and what it has waited for last."""
        if self.owed_s > 0.0:
            self.pay()
        free_s = self.free_s
        self.blame = 0  # the GPU
        self.blames_prefetch = False
        if start_s > free_s:
            gap_s = start_s - free_s
            self.runs.begin(start_s, lane)
            prefetched = cause == _H2D and arrived_s != start_s and _for_a_prefetch(start_s, after)
            if self.looks_down:
                self._wait_down(layer, expert, cause, prefetched, start_s, lane)
            else:
                self._wait(layer, expert, cause, prefetched, gap_s)
            if gap_s > duration_s and self.late_s(start_s, cause, first_s, arrived_s, after) > duration_s:
                # An expert on another GPU that mostly waited for its copy: whoever waits for it waits for the link.
                # How long that GPU had been idle says nothing: it may just have had nothing to do.
                self.blame = cause
                self.blames_prefetch = prefetched
        else:
            start_s = free_s
        end_s = start_s + duration_s
        if slowed_s > 0.0 or more_s > 0.0:
            end_s = self.beside(start_s, end_s, slowed_s, more_s)
        self.seconds.meter.add(length, 1)
        if self.spans is not None:
            self.spans(self.name, op, layer, expert, n_tokens, 0, start_s, end_s)
        if last_s > end_s:
            # Kernels shorter than their launches: the stream starves between them.
            self.runs.begin(last_s - tail_s, _HOST)
            self._wait(layer, expert, _HOST, False, last_s - end_s)
            end_s = last_s
        self.free_s = end_s

    def beside(self, start_s: float, end_s: float, slowed_s: float, more_s: float) -> float:
        """When an operation ends that starts then: what runs while it starts slows all of it."""
        # The loops of `blocks.py`, `experts.py` and `plain_layers.py` say this again: a call into another module for
        # every operation was tried, and costs a tenth of a replay of many small experts.
        if start_s < self.written_s:
            end_s += more_s
            self.slowed_s += more_s
        if start_s < self.copied_s:
            end_s += slowed_s
            self.slowed_s += slowed_s
        elif self.remembers:
            self.note(start_s, end_s, slowed_s, more_s)
        return end_s

    def note(self, start_s: float, end_s: float, slowed_s: float, more_s: float) -> None:
        """Remember an operation that a copy may yet slow."""
        at = 4 * (self.n_noted % _KEPT)
        self.noted[at] = start_s
        self.noted[at + 1] = end_s
        self.noted[at + 2] = slowed_s
        self.noted[at + 3] = more_s
        self.n_noted += 1

    def copies(self, start_s: float, end_s: float, back: bool) -> None:
        """Something is copied to its GPU then, or (back) from it: operations that are placed owe what that adds."""
        if start_s < self.free_s:
            self.remembers = True
            for before in range(self.n_noted if self.n_noted < _KEPT else _KEPT):
                at = 4 * ((self.n_noted - 1 - before) % _KEPT)
                ended_s = self.noted[at + 1]
                if ended_s <= start_s:
                    break
                began_s = self.noted[at]
                added_s = self.noted[at + 3] if back else self.noted[at + 2]
                if began_s < end_s and added_s > 0.0:
                    both_s = (ended_s if ended_s < end_s else end_s) - (began_s if began_s > start_s else start_s)
                    self.owed_s += both_s * added_s / (ended_s - began_s + added_s)
        if back:
            self.written_s = end_s
        elif end_s > self.copied_s:  # of several links one may be done before another that was settled first
            self.copied_s = end_s

    def pay(self) -> None:
        """It is free later, by what it owes."""
        free_s = self.free_s
        self.free_s += self.owed_s
        self.slowed_s += self.owed_s
        self.owed_s = 0.0
        if self.spans is not None:
            self.spans(self.name, OWED, -1, -1, 0, 0, free_s, self.free_s)

    def _wait(self, layer: int, expert: int, cause: int, speculative: bool, gap_s: float) -> None:
        """Stand still, before an operation of a layer or (-1) while the host does."""
        at = self.row if layer < 0 else self.waiting.row_of(layer, expert, cause)
        if at == self.row and not speculative and cause in (_HOST, _H2D):
            self.gaps_s[cause] += gap_s  # told apart when the layer ends
            return
        self.charge()
        self.gaps_s[cause] += gap_s
        self.charged_host_s = self.gaps_s[_HOST]
        self.charged_h2d_s = self.gaps_s[_H2D]
        self.waiting.charge(at, cause, speculative, gap_s)

    def _wait_down(self, layer: int, expert: int, cause: int, speculative: bool, time_s: float, lane: int) -> None:
        """Stand still up to then for what ends on a lane: each lane that led to it is charged its own time."""
        at = self.row if layer < 0 else self.waiting.row_of(layer, expert, cause)
        charged_s = self.runs.paths.charge(lane, time_s, self.free_s)
        self.charge()
        for resource in range(_N_RESOURCES):
            if charged_s[resource] > 0.0:
                own = cause_of(resource, cause)
                self.gaps_s[own] += charged_s[resource]
                self.waiting.charge(at, own, speculative, charged_s[resource])
        self.charged_host_s = self.gaps_s[_HOST]
        self.charged_h2d_s = self.gaps_s[_H2D]

    def charge(self) -> None:
        """Charge what gaps have grown by, and was charged to no layer, to the one that runs."""
        self.waited_s[self.row + _HOST] += self.gaps_s[_HOST] - self.charged_host_s
        self.waited_s[self.row + _H2D] += self.gaps_s[_H2D] - self.charged_h2d_s
        self.charged_host_s = self.gaps_s[_HOST]
        self.charged_h2d_s = self.gaps_s[_H2D]

    def begin(self, phase: int) -> None:
        """An iteration of a phase begins, by its number."""
        self.charge()
        self.waiting.begin(phase)
        self.row = self.first_row = self.waiting.row

    def enter(self, layer: int) -> None:
        """What follows is of this layer."""
        self.charge()
        self.waiting.enter(layer)
        self.row = self.waiting.row

    def leave(self) -> None:
        """The iteration is over."""
        self.charge()
        self.waiting.leave()
        self.row = self.first_row = self.waiting.row

    def late_s(self, start_s: float, cause: int, first_s: float, arrived_s: float, after: tuple[Ticket, ...]) -> float:
        """How much later work starts than had what it waited for last, the `cause`, not been in its way."""
        ready_s = self.free_s
        if cause != _H2D and arrived_s > ready_s:
            ready_s = arrived_s
        for ticket in after:
            if ticket.cause != cause and ticket.end_s > ready_s:
                ready_s = ticket.end_s
        return start_s - (ready_s if cause == _HOST or ready_s > first_s else first_s)

    def progress(self) -> bool:
        """Settle pending work whose tickets have settled; True when none is left pending."""
        while self.n_pending:
            work: Launched = self.pending[0]
            start_s = work.first_s
            cause = lane = _HOST
            if work.arrived_s > start_s:
                start_s = work.arrived_s
                cause = _H2D
                lane = work.link
            for ticket in work.after:
                if ticket.end_s < 0.0:
                    return False
                if ticket.end_s > start_s:
                    start_s = ticket.end_s
                    cause = ticket.cause
                    lane = ticket.lane
            self.pending.popleft()
            self.n_pending -= 1
            row = self.row
            if work.layer < 0 and work.row != row:  # names no layer: waits count for the one in which it was launched
                self.charge()
                self.row = work.row
            self.place(
                work.op,
                work.layer,
                work.expert,
                work.n_tokens,
                start_s,
                cause,
                work.first_s,
                work.last_s,
                work.duration_s,
                work.length,
                work.arrived_s,
                work.after,
                work.slowed_s,
                work.more_s,
                work.tail_s,
                lane,
            )
            if self.row != row:
                self.charge()
                self.row = row
            work.end_s = self.free_s
            work.cause = self.blame
            work.speculative = self.blames_prefetch
            work.after = ()
        return True

    def idle_until(self, time_s: float, cause: int, speculative: bool = False, lane: int = -1) -> None:
        """Charge the time up to `time_s` to `cause` (the host's last read, or waiting for an arrival).

        Args:
            lane: on which what was waited for has ended.
        """
        if time_s > self.free_s:
            self.runs.begin(time_s, _HOST)  # the host goes on now
            if self.looks_down and lane >= 0:
                self._wait_down(-1, -1, cause, speculative and cause == _H2D, time_s, lane)
            else:
                self._wait(-1, -1, cause, speculative and cause == _H2D, time_s - self.free_s)
            self.free_s = time_s


def _for_a_prefetch(start_s: float, after: tuple[Ticket, ...]) -> bool:
    """Whether the copy that ended last, at `start_s`, was speculative."""
    for ticket in after:
        if ticket.end_s == start_s and ticket.cause == _H2D:
            return ticket.speculative
    return False


def progress(streams: list[Stream]) -> None:
    """Work on any stream may wait for work on any other, so go round until nothing more can be placed."""
    if len(streams) == 1:
        streams[0].progress()
        return
    waiting, before = sum([stream.n_pending for stream in streams]), -1
    while waiting and waiting != before:
        for stream in reversed(streams):  # GPU 0's mostly waits for the others'
            if stream.n_pending:
                stream.progress()
        before, waiting = waiting, sum([stream.n_pending for stream in streams])
