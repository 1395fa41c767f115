"""Operations of a run: each is priced once, and its uses are counted, not added up."""

from __future__ import annotations

from sim.base.flat import floats, ints, longer_floats, longer_ints
from sim.machine.meter import Meter
from sim.machine.price import Launch, Operation, Price
from sim.machine.shared_memory import GpuMemory
from sim.machine.stream import Stream

MOST_LENGTHS = 512
"""Different durations kept counters for; each context has one of its own, so they begin anew now and then."""


class Places:
    """Operations by their place, and what each costs as numbers: for loops over many of them.

    `costs_s`: of place i, from 8 i on, `all_s`, `first_s`, `duration_s`, `tail_s`, `slowed_s` and `more_s` of its
    operation. `n_used`: uses that the operation does not know of yet, of the first `n_met` of `n` places.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.n = 0
        self.n_met = 0
        self.costs_s = floats(64)
        self.n_used = ints(8)

    def put(self, place: int, operation: Operation) -> None:
        """Here is this one now, at the first place that is empty or in place of one whose uses have been told."""
        if place == self.n:
            if place == len(self.n_used):
                self.costs_s = longer_floats(self.costs_s, 16 * place)
                self.n_used = longer_ints(self.n_used, 2 * place)
            self.operations.append(operation)
            self.n += 1
        self.operations[place] = operation
        at = 8 * place
        self.costs_s[at] = operation.all_s
        self.costs_s[at + 1] = operation.first_s
        self.costs_s[at + 2] = operation.duration_s
        self.costs_s[at + 3] = operation.tail_s
        self.costs_s[at + 4] = operation.slowed_s
        self.costs_s[at + 5] = operation.more_s

    def tell(self) -> None:
        """Tell the operations of their uses."""
        for place in range(self.n_met):
            operation: Operation = self.operations[place]
            operation.n += self.n_used[place]
            self.n_used[place] = 0
        self.n_met = 0

    def forget(self) -> None:
        """Begin anew; only where all uses have been told."""
        self.operations.clear()
        self.n = 0


class Operations:
    """Makes operations out of prices and launches, and hands their uses to the counters.

    Sums are taken in the order in which operations are first used. Loops count uses by place: of whole experts of one
    token in a group (`members`), and of a layer's blocks (`blocks`).

    Args:
        stream: GPU 0's, which counts seconds of its own. memory: what copies slow kernels in; None: nothing is shared.
    """

    def __init__(self, stream: Stream, memory: GpuMemory | None) -> None:
        self.memory = memory
        self._seconds = stream.seconds
        self._lengths = stream.seconds.meter
        self.members = Places()
        self.blocks = Places()
        self._prices = Meter()  # uses of this iteration by price
        self._used: list[Operation] = []  # the first `_n_used` have uses that no counter knows of yet
        self._n_used = 0

    def of(self, price: Price, launch: Launch) -> Operation:
        """An operation on GPU 0."""
        operation = Operation(launch)
        self.reprice(operation, price)
        return operation

    def reprice(self, operation: Operation, price: Price) -> None:
        """From now on it costs this."""
        operation.cost(
            price.duration_s, self._lengths.at(price.duration_s), self._prices.at(price.duration_s, price.attributed_to)
        )
        if self.memory is not None:
            self.memory.slow(operation, price)

    def used_on(self, stream: Stream, price: Price, launch: Launch) -> Operation:
        """An operation that is launched on a stream now, as one of several; counted, but for its launch."""
        self.tell()
        operation = Operation(launch)
        duration_s = price.duration_s
        operation.cost(
            duration_s, stream.seconds.meter.at(duration_s), self._prices.at(duration_s, price.attributed_to)
        )
        self._prices.add(operation.priced, 1)
        if self.memory is not None:
            self.memory.slow(operation, price)
        return operation

    def use(self, operation: Operation) -> None:
        """Count its price and launch; its stream counts its seconds once it is placed."""
        if self._n_used:
            self.tell()
        operation.launch.n += 1
        self._prices.add(operation.priced, 1)

    def meet(self, operation: Operation) -> None:
        """Its place is about to count uses, the first since counters were told."""
        if self._n_used == len(self._used):
            self._used.append(operation)
        else:
            self._used[self._n_used] = operation
        self._n_used += 1

    def tell(self) -> None:
        """Hand over what places have counted, in the order in which operations were first met."""
        if self._n_used:
            self.members.tell()
            self.blocks.tell()
        for at in range(self._n_used):
            operation: Operation = self._used[at]
            operation.launch.n += operation.n
            self._prices.add(operation.priced, operation.n)
            self._lengths.add(operation.length, operation.n)
            operation.n = 0
        self._n_used = 0

    def spend(self, spent_s: list[float]) -> None:
        """The iteration is over: add its seconds to those of each quantity."""
        self.tell()
        self._prices.spend(spent_s)

    def are_many(self) -> bool:
        """Whether it is time to begin anew, so that memory does not grow with the trace."""
        return self._lengths.n_known > MOST_LENGTHS

    def forget(self) -> None:
        """Begin anew, between iterations; no operation made so far is used again."""
        self.tell()
        self._seconds.total_s()
        self._lengths.forget()
        self._prices.forget()
        self.members.forget()
        self.blocks.forget()
