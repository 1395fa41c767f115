"""What HybriMoE's prefetches are worth: the time that an expert more on the GPU would save a later layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from policies.hybrimoe.cache import LayerCaches

Counts = tuple[int, ...]  # tokens of each of some experts


class Rates(NamedTuple):
    """What the schedule reckons with, in any one unit of time: an expert on each side by its tokens, and a copy.

    `cpu_first`: what the first expert of a layer on the CPU takes longer.
    """

    gpu: Callable[[int], float]
    cpu: Callable[[int], float]
    cpu_first: float
    move: float

    def remembered(self) -> Rates:
        """The same, each asked for once."""
        return self._replace(gpu=cache(self.gpu), cpu=cache(self.cpu))


class Shares(NamedTuple):
    """Experts in the order each side runs them, and when each side is done."""

    gpu: list[int]
    cpu: list[int]
    gpu_end: float
    cpu_end: float

    @property
    def makespan(self) -> float:
        """Until the slower side is done."""
        return max(self.gpu_end, self.cpu_end)


def share_out(there: Sequence[int], missing: Sequence[int], tokens: Mapping[int, int], rates: Rates) -> Shares:
    """`HSS` of the public code: the GPU takes from the front, the CPU from the back, whoever would be done earlier.

    In front what is on the GPU, then what is not, each with most tokens first (ties in the order given). The GPU waits
    for a copy, copies go one after the other. A tie goes to the GPU.
    """
    order = sorted(there, key=lambda e: -tokens[e]) + sorted(missing, key=lambda e: -tokens[e])
    absent = frozenset(missing)
    on_gpu: list[int] = []
    on_cpu: list[int] = []
    gpu_end = cpu_end = moved_end = 0.0
    first, last = 0, len(order) - 1
    while first <= last:
        front, back = order[first], order[last]
        gpu_time = rates.gpu(tokens[front])
        cpu_time = rates.cpu(tokens[back]) + (0.0 if on_cpu else rates.cpu_first)
        arrival = moved_end + rates.move if front in absent else 0.0
        if arrival > gpu_end:
            gpu_time += arrival - gpu_end
        if gpu_end + gpu_time <= cpu_end + cpu_time:
            moved_end = arrival if front in absent else moved_end
            gpu_end += gpu_time
            on_gpu.append(front)
            first += 1
        else:
            cpu_end += cpu_time
            on_cpu.append(back)
            last -= 1
    return Shares(on_gpu, on_cpu, gpu_end, cpu_end)


class Simulation:
    """`share_out`, remembered: it depends on nothing but how many tokens each expert has."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._layouts: dict[tuple[Counts, Counts], tuple[list[int], list[int]]] = {}
        self._makespans: dict[tuple[Counts, Counts], float] = {}
        self.gain_of_one = cache(self._gain_of_one)
        self.layout_of_one = cache(self._layout_of_one)
        self._gains: dict[tuple[Counts, Counts], Callable[[int, int], float]] = {}

    def layout(self, there: Counts, missing: Counts) -> tuple[list[int], list[int]]:
        """Places of the experts that GPU and CPU compute, in their order, among those on the GPU and then the others.

        Args:
            there, missing: tokens of the experts on the GPU, and of those that are not.
        """
        found = self._layouts.get((there, missing))
        if found is None:
            shares = self._share_out(there, missing)
            found = self._layouts[there, missing] = shares.gpu, shares.cpu
        return found

    def _layout_of_one(self, n_there: int, n_missing: int) -> tuple[list[int], list[int]]:
        """The same for one token's experts, which are all alike."""
        return self.layout((1,) * n_there, (1,) * n_missing)

    def gains(self, there: Counts, missing: Counts) -> Callable[[int, int], float]:
        """What it would save a layer if one of its missing experts were on the GPU: asked with the tokens of that one,
        and of the one that makes room for it (0 where that one is not asked for)."""
        found = self._gains.get((there, missing))
        if found is None:
            as_is = self.makespan(there, missing)

            @cache
            def gain(joins: int, leaves: int) -> float:
                stay, others = list(there), list(missing)
                others.remove(joins)
                if leaves:
                    stay.remove(leaves)
                    others.append(leaves)
                return as_is - self.makespan([*stay, joins], others)

            found = self._gains[there, missing] = gain
        return found

    def _gain_of_one(self, n: int, n_missing: int, loses: bool) -> float:
        """The same for one token of `n` experts, which are all alike; `loses`: room is made by one of them."""
        return self.gains((1,) * (n - n_missing), (1,) * n_missing)(1, int(loses))

    def makespan(self, there: Iterable[int], missing: Iterable[int]) -> float:
        """Of a layer whose experts on the GPU, and whose others, have these tokens."""
        key = (tuple(sorted(there)), tuple(sorted(missing)))
        found = self._makespans.get(key)
        if found is None:
            found = self._makespans[key] = self._share_out(*key).makespan
        return found

    def _share_out(self, there: Counts, missing: Counts) -> Shares:
        n, tokens = len(there), (*there, *missing)
        return share_out(range(n), range(n, len(tokens)), dict(enumerate(tokens)), self._rates)


Gain = tuple[float, int, int, int]  # minus the seconds saved, layers ahead, expert, and the expert by its index
Named = list[int] | dict[int, int]  # experts guessed for a layer: of one token, or with the tokens of each


class Gains:
    """Gains by the schedule, as the caches are."""

    def __init__(self, caches: LayerCaches, simulated: Simulation, n_experts: int, n_gpus: int) -> None:
        self._caches = caches
        self._simulated = simulated
        self._n_experts = n_experts
        self._one_gpu = n_gpus == 1

    def wanted(self, layer: int, named: Sequence[Named]) -> list[int]:
        """Experts by their index whose having would save a later layer time, the one that saves most last: of equal
        ones that of the nearest layer, then the lowest.

        Args:
            named: what `layer` guesses for each of the layers after it.
        """
        if not (self._one_gpu and named and isinstance(named[0], list)):
            gains = self.of(layer, named)
            gains.sort(reverse=True)
            return [gain[3] for gain in gains]
        # Of one token: all experts of a layer are alike, so that a gain is a layer's.
        caches, gain_of_one = self._caches, self._simulated.gain_of_one
        held, base = caches.held, layer * self._n_experts
        groups: list[tuple[float, int, list[int]]] = []
        for distance, guess in enumerate(named, 1):
            base += self._n_experts
            if base == len(held):
                break
            missing = [base + expert for expert in guess if not held[base + expert]]
            if missing:
                loser = caches.loser_of(layer + distance, 0)
                saved = gain_of_one(len(guess), len(missing), loser - base in guess) if loser >= 0 else 0.0
                if saved > 0.0:
                    missing.sort(reverse=True)
                    groups.append((saved, -distance, missing))
        groups.sort()
        return [expert for group in groups for expert in group[2]]

    def of(self, layer: int, named: Sequence[Named]) -> list[Gain]:
        """What having an expert on the GPU would save a later layer that is guessed to need it and has it not.

        Args:
            named: what `layer` guesses for each of the layers after it.
        """
        gains: list[Gain] = []
        held, base = self._caches.held, layer * self._n_experts
        for distance, guess in enumerate(named, 1):
            base += self._n_experts
            if base == len(held):
                break
            missing = [expert for expert in guess if not held[base + expert]]
            if not missing:
                continue
            tokens = dict.fromkeys(guess, 1) if isinstance(guess, list) else guess
            gains += self._of_layer(layer, distance, tokens, missing)
        return gains

    def _of_layer(self, layer: int, distance: int, tokens: dict[int, int], missing: list[int]) -> Iterator[Gain]:
        """The same of one layer: experts may differ in their tokens and their GPUs."""
        base = (layer + distance) * self._n_experts
        there = [n for expert, n in tokens.items() if expert not in missing]
        gain_of = self._simulated.gains(tuple(there), tuple([tokens[expert] for expert in missing]))
        for expert in missing:
            at = base + expert
            loser = self._caches.loser_of(layer + distance, self._caches.gpu[at])
            if loser < 0:
                continue  # its layer has no place on that GPU
            saved = gain_of(tokens[expert], tokens.get(loser - base, 0))
            if saved > 0.0:
                yield -saved, distance, expert, at
