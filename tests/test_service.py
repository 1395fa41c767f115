"""The default service: experts that come together are exchanged together, which changes no number and no decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from easy_numbers import Run, execute_easy, setup
from tiny_traces import from_rows

from policies.fifo import Fifo
from policies.lru import Lru
from sim.engine.engine import Engine
from sim.machine.forwarding import ForwardingMachine
from sim.machine.simulated import SimulatedMachine
from sim.machine.turn import Turn
from sim.policy import Piece, View
from sim.results.by_layer import expert_table
from sim.run import execute
from traces.format.reader import Trace

N_TOKENS, N_LAYERS, N_EXPERTS, TOP_K = 40, 4, 16, 4


class Counting(ForwardingMachine):
    """Counts experts that were demanded together of a machine which it otherwise is."""

    n_together = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(SimulatedMachine(*args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def demand_turn(self, turn: Turn) -> bool:
        done = super().demand_turn(turn)
        Counting.n_together += done * (turn.n - turn.n_here)
        return done


class ToldLru(Lru):
    """The same policy, told of each eviction: then each expert is demanded for itself."""

    def evicted(self, piece: Piece, view: View) -> None:
        pass


class ToldFifo(Fifo):
    def evicted(self, piece: Piece, view: View) -> None:
        pass


def replayed(
    kind: type[Lru] | type[Fifo], scope: str, room: int, folder: Path, grouped: bool, seen: bool = True
) -> tuple[Run, int]:
    """Random routing under a policy, and how many experts were demanded together.

    Args:
        seen: somebody looks on.
    """
    rng = np.random.default_rng(3)
    rows: Any = rng.permuted(np.tile(np.arange(N_EXPERTS), (N_TOKENS, N_LAYERS, 1)), axis=2)[..., :TOP_K].tolist()
    Counting.n_together = 0
    with Trace(from_rows(folder / f"{kind.__name__}.safetensors", rows, N_EXPERTS)) as trace:
        made = setup(kind(scope=scope), trace, room)
        made = replace(made, machine=Counting, stack=msgspec.structs.replace(made.stack, grouped=grouped))
        engines: list[Engine] = []
        of = execute_easy(made) if seen else Run(execute(made, begun=engines.append), *engines)
        return of, Counting.n_together


def counts_by_expert(of: Run) -> list[tuple[Any, ...]]:
    """What happened to each expert."""
    return list(expert_table(of.outcome.report))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("room", [N_LAYERS * TOP_K, 40, 60])  # the least there can be without waiting; more; nearly all
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize(("kind", "told"), [(Lru, ToldLru), (Fifo, ToldFifo)])
def test_exchanged_together_is_as_if_one_by_one(
    kind: type[Lru] | type[Fifo], told: type[Lru] | type[Fifo], scope: str, room: int, grouped: bool, tmp_path: Path
) -> None:
    together, n_together = replayed(kind, scope, room, tmp_path, grouped)
    single, n_single = replayed(told, scope, room, tmp_path, grouped)
    unseen, n_unseen = replayed(kind, scope, room, tmp_path, grouped, seen=False)  # then it is written down in one go
    assert n_single == 0
    assert n_unseen == n_together
    assert n_together > 0.5 * together.outcome.report.counts.tally.n_demand > 0
    assert together.log == single.log
    assert together.spans == single.spans
    assert unseen.end_state() == together.end_state() == single.end_state()
    assert counts_by_expert(unseen) == counts_by_expert(together) == counts_by_expert(single)
    for phase in ("prefill", "decode"):
        assert together.classes(phase) == single.classes(phase)
