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

    def of(self, layer: int, named: Sequence[Named]) -> list[Gain]:
        """What having an expert on the GPU would save a later layer that is guessed to need it and has it not.

        Args:
            named: what `layer` guesses for each of the layers after it.
        """
        gains: list[Gain] = []
        caches = self._caches
        held, base = caches.held, layer * self._n_experts
        for distance, guess in enumerate(named, 1):
            base += self._n_experts
            if base == len(held):
                break
            missing = [expert for expert in guess if not held[base + expert]]
            if not missing:
                continue
            if self._one_gpu and isinstance(guess, list):  # of one token: all experts alike
                loser = caches.loser_of(layer + distance, 0)
                saved = self._simulated.gain_of_one(len(guess), len(missing), loser - base in guess)
                if saved > 0.0 and loser >= 0:
                    gains += [(-saved, distance, expert, base + expert) for expert in missing]
            else:
                tokens = dict.fromkeys(guess, 1) if isinstance(guess, list) else guess
                gains += self._of_several(layer, distance, tokens, missing)
        return gains

    def _of_several(self, layer: int, distance: int, tokens: dict[int, int], missing: list[int]) -> Iterator[Gain]:
        """The same of one layer, where experts differ in their tokens or their GPUs."""
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
