"""What HybriMoE's prefetches are worth: the time that an expert more on the GPU would save a later layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.hybrimoe.cache import LayerCaches
from policies.hybrimoe.schedule import Simulation

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
