"""Experts on GPUs: what one takes by itself or in a group, and turns in which they run one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.host import Host
from sim.machine.kernel_group import Group
from sim.machine.lanes import H2D, HOST
from sim.machine.operations import Operations
from sim.machine.price import Launch, Operation, Price
from sim.machine.stream import Stream
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece

_H2D, _HOST = H2D, HOST  # machine integers where this is compiled


class Experts:
    """Finds an expert's operation: alone, or as what it adds to the group that was launched last on its GPU.

    `grouped`: experts of a layer share kernels. `group`: GPU 0's.
    """

    def __init__(self, cost: Cost, host: Host, streams: list[Stream], operations: Operations, n_gpus: int) -> None:
        self._cost = cost
        self._host = host
        self._stream = streams[0]
        self._operations = operations
        self.members = operations.members
        self.grouped = cost.launches.grouped
        self.precision = cost.precision
        alone = len(streams) == 1
        self._groups = [Group()] * n_gpus if alone else [Group() for _ in range(n_gpus)]
        self.group = self._groups[0]
        self._alone = alone
        self._by_size: dict[tuple[int, object, float, float, bool], Operation] = {}  # that share no kernels
        self._of_one_token: list[Operation | None] = []  # of them, by `Piece.index`; the commonest
        # In a group: what others left to fill (-1: the first) -> tokens (of others than whole experts in the serving
        # precision: with precision and share) -> and what it leaves.
        self._in_groups: dict[float, dict[object, tuple[Operation, float]]] = {}
        self._leader: Operation | None = None  # a whole expert of one token, in the serving precision, begins a group

    def forget(self) -> None:
        """Operations begin anew."""
        self._by_size.clear()
        self._of_one_token.clear()
        self._in_groups.clear()
        self._leader = None

    def close(self) -> None:
        """No group spans what the host or a stream does now."""
        self.group.open = False
        if not self._alone:
            for group in self._groups:
                group.open = False

    def operation(self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...]) -> Operation:
        """What an expert that is launched now takes."""
        if self.grouped and piece.kernels_frac == 1.0:
            return self._join(piece, n_tokens, arrived_s, after)
        group: Group = self._groups[piece.gpu]
        group.open = False
        return self._by_itself(piece, n_tokens)

    # -- by itself --------------------------------------------------------------------------------------------------

    def _by_itself(self, piece: Piece, n_tokens: int) -> Operation:
        """What an expert (or a piece of one) takes that shares no kernels with others."""
        of_index = self._of_one_token
        index = piece.index
        while index >= len(of_index):
            of_index.append(None)
        operation: Operation | None = of_index[index]
        if operation is None or n_tokens != 1:
            operation = self._of_size(piece, n_tokens)
            if n_tokens == 1:
                of_index[index] = operation
        return operation

    def _of_size(self, piece: Piece, n_tokens: int) -> Operation:
        """The same of all pieces that take as long."""
        frac, first = piece.stop_frac - piece.start_frac, piece.start_frac == 0.0
        key = (n_tokens, piece.precision, frac, piece.kernels_frac, first)
        operation = self._by_size.get(key)
        if operation is None:
            whole = piece.kernels_frac == 1.0
            launches = self._cost.launches
            launch = launches.expert if whole else launches.part(piece.kernels_frac, first)
            price = self._cost.expert(n_tokens, piece.precision, frac, piece.kernels_frac)
            operation = self._by_size[key] = self._operations.of(price, launch)
        return operation

    # -- in a group -------------------------------------------------------------------------------------------------

    def _join(self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...]) -> Operation:
        """What an expert (or a slice of its columns) adds to the group launched last, or to one that it begins."""
        group: Group = self._groups[piece.gpu]
        joins = group.open and group.precision == piece.precision and arrived_s <= group.launched_s
        if joins and after:
            for ticket in after:
                if ticket.end_s < 0.0:
                    self._host.look()
                if not 0.0 <= ticket.end_s <= group.launched_s and not group.awaits(ticket):
                    joins = False
                    break
        plain = n_tokens == 1 and piece.serving  # of those, a place in the group says all
        last = group.last
        if joins:
            if plain and last is not None:
                group.last = last.next if last.next is not None else self._member(last)
                return group.last
            return self._of_share(group, group.slack_s if last is None else last.slack_s, piece, n_tokens)
        group.open = True
        group.launched_s = self._host.now_s
        group.precision = piece.precision
        group.waits = after if after else None
        if not plain:
            return self._of_share(group, -1.0, piece, n_tokens)
        group.last = self._leader if self._leader is not None else self._lead()
        return group.last

    def _lead(self) -> Operation:
        """A whole expert of one token that begins a group."""
        self._leader = self._place(self._cost.launches.expert, self._cost.leader(1, self.precision, 1.0))
        return self._leader

    def _member(self, last: Operation) -> Operation:
        """One that joins after `last`."""
        last.next = self._place(self._cost.launches.member, self._cost.member(last.slack_s, 1, self.precision, 1.0))
        last.next.place = last.place + 1
        return last.next

    def _place(self, launch: Launch, priced: tuple[Price, float]) -> Operation:
        """A whole expert of one token by its place in a group: an operation of its own, which knows the next one."""
        price, slack_s = priced
        operation = self._operations.of(price, launch)
        operation.slack_s = slack_s
        return operation

    def meet(self, place: int) -> None:
        """A member of a group is used for the first time since counters were told, by its place."""
        members = self.members
        while place >= members.n:
            if members.n == 0:
                members.put(0, self._leader if self._leader is not None else self._lead())
            else:
                last: Operation = members.operations[members.n - 1]
                members.put(members.n, last.next if last.next is not None else self._member(last))
        self._operations.meet(members.operations[place])
        members.n_met = place + 1

    def _of_share(self, group: Group, slack_s: float, piece: Piece, n_tokens: int) -> Operation:
        """An expert whose place in its group does not say all: after what the others left to fill; -1: the first."""
        frac = piece.stop_frac - piece.start_frac
        group.last = None
        by_kind = self._in_groups.get(slack_s)
        if by_kind is None:
            by_kind = self._in_groups[slack_s] = {}
        key: object = n_tokens if piece.serving else (n_tokens, piece.precision, frac)
        found = by_kind.get(key)
        if found is None:
            cost = self._cost
            if slack_s < 0.0:
                price, left_s = cost.leader(n_tokens, piece.precision, frac)
                operation = self._operations.of(price, cost.launches.expert)
            else:
                price, left_s = cost.member(slack_s, n_tokens, piece.precision, frac)
                operation = self._operations.of(price, cost.launches.member)
            found = by_kind[key] = operation, left_s
        group.slack_s = found[1]
        joined: Operation = found[0]
        return joined

    # -- in turn ----------------------------------------------------------------------------------------------------

    def run_turn(self, turn: Turn) -> bool:
        """Launch a turn's experts on GPU 0, all of whose times are known then; False where they are not, undone."""
        group, stream, host, members = self.group, self._stream, self._host, self.members
        if not self.grouped or not self._alone or stream.n_pending:
            return False
        spans = host.spans
        place = -1
        launched_s = -1.0  # no copy has arrived before that
        if group.open:
            if group.last is None or group.last.place >= members.n_met:
                return False
            place = group.last.place
            launched_s = group.launched_s
        if stream.written_s > host.now_s:
            return False
        if stream.owed_s > 0.0:
            stream.pay()
        copied_s = stream.copied_s
        now_s, free_s = host.now_s, stream.free_s
        waited_s, starved_s = stream.gaps_s[_H2D], stream.gaps_s[_HOST]
        told = spans is not None or stream.remembers
        begins = ran = False
        runs = stream.runs
        n, at = turn.n, 0
        while at < n:
            # This loop makes no call, so a processor keeps its sums at hand.
            while at < n:
                arrived_s = turn.arrived_s[at]
                place = place + 1 if arrived_s <= launched_s else 0
                if place >= members.n_met:
                    break  # to be noted
                if place == 0:
                    launched_s = now_s
                    begins = True
                members.n_used[place] += 1
                costs = 8 * place
                host_s = now_s
                now_s += members.costs_s[costs]  # all_s
                start_s = host_s + members.costs_s[costs + 1]  # first_s
                if arrived_s > start_s:
                    start_s = arrived_s
                    if start_s > free_s:
                        waited_s += start_s - free_s
                        runs.begin(start_s, _H2D)
                    else:
                        start_s = free_s
                elif start_s > free_s:
                    starved_s += start_s - free_s
                    runs.begin(start_s, _HOST)
                else:
                    start_s = free_s
                free_s = start_s + members.costs_s[costs + 2]  # duration_s
                if start_s < copied_s:
                    free_s += members.costs_s[costs + 4]  # slowed_s
                    stream.slowed_s += members.costs_s[costs + 4]
                end_s = free_s
                last_s = now_s + members.costs_s[costs + 3]  # tail_s
                if last_s > free_s:
                    # Kernels shorter than their launches: the stream starves between them.
                    starved_s += last_s - free_s
                    runs.begin(last_s - members.costs_s[costs + 3], _HOST)
                    free_s = last_s
                turn.ends_s[at] = free_s
                at += 1
                if told:
                    ran = True
                    break
            if ran:
                ran = False
                slowed_s, more_s = members.costs_s[costs + 4], members.costs_s[costs + 5]
                if stream.remembers and start_s >= copied_s and (slowed_s > 0.0 or more_s > 0.0):
                    stream.note(start_s, end_s, slowed_s, more_s)
                if spans is not None:
                    spans("host", "launch expert", turn.layer, turn.experts[at - 1], 1, 0, host_s, now_s)
                    spans(stream.name, "expert", turn.layer, turn.experts[at - 1], 1, 0, start_s, end_s)
            elif at < n:
                self.meet(place)
                place -= 1
        if begins:
            group.waits = None
        if n:
            group.open = True
            group.launched_s = launched_s
            group.last = members.operations[place]
        group.precision = self.precision
        host.now_s = now_s
        stream.free_s = free_s
        stream.gaps_s[_H2D] = waited_s
        stream.gaps_s[_HOST] = starved_s
        return True
