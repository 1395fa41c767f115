"""What happened to experts and what GPU 0 waited for, by phase and MoE layer and by expert: the same counts, summed.

Columns are documented in docs/output.md; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.by_expert import COLUMNS
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.engine.report import Report

Row = dict[str, Any]
"""One row: column -> whole number, seconds, share or text."""
Ints = NDArray[np.int64]

FOUND = ("hit", "partial_hit", "late_hit", "miss", "cpu", "substituted", "dropped")
MISSES = ("cold", "capacity", "evicted_unused", "wrong_prediction", "too_late")
FATES = ("issued", "useful", "late", "wasted", "harmful", "cancelled")
COUNTS = (
    "asked_n",
    *(f"{name}_n" for name in FOUND),
    *(f"miss_{name}_n" for name in MISSES),
    "instead_n",
    "experts_n",
    "gpu_n",
    "cpu_ahead_n",
    "part_n",
    "evict_n",
    "cancel_n",
    "demand_copies_n",
    *(f"prefetch_{fate}_n" for fate in FATES),
    "prefetch_refused_n",
    "write_back_n",
    "demand_copies_bytes",
    *(f"prefetch_{fate}_bytes" for fate in FATES),
    "write_back_bytes",
)
WAITS = ("demand", "prefetch", "host", "cpu", "predictor", "gpu")
WAITS_S = tuple(f"wait_{name}_s" for name in WAITS)
WAIT_DRIVE_S = "wait_drive_s"
"""Of runs with a drive below host memory."""


def counted(of_engine: Ints, expert_bytes: int) -> Iterator[tuple[int, ...]]:
    """The columns `COUNTS` of layers or of experts, a tuple each, from what the engine counted of them [columns, n]."""
    n = dict(zip(COLUMNS, of_engine, strict=True))
    together = {name: n[f"exchanged_{name}"] for name in ("cold", "capacity", "evicted_unused")}
    missed = {name: n[f"miss_{name}"] + together.get(name, 0) for name in MISSES}
    exchanged = sum(together.values())
    demanded = n["demand"] + exchanged
    on_gpu = n["gpu"] + exchanged
    served = on_gpu + n["ran_on_cpu"]
    found = {name: n[name] for name in FOUND if name not in ("hit", "miss")} | {"miss": sum(missed.values())}
    others = ("partial_hit", "late_hit", "miss", "cpu")
    found["hit"] = served - n["instead"] - sum(found[name] for name in others)
    values = [
        sum(found.values()),
        *(found[name] for name in FOUND),
        *missed.values(),
        n["instead"],
        served,
        on_gpu,
        n["ran_ahead"],
        n["part"],
        n["evict_piece"] + n["held"] + demanded + n["issued_whole"] - n["cancel_whole"],
        n["cancel"],
        demanded + n["demand_piece"],
        *(n[fate] for fate in FATES),
        n["refused"],
        n["write_back"],
        demanded * expert_bytes + n["demand_piece_bytes"],
        *(n[f"{fate}_bytes"] for fate in FATES),
        n["write_back_bytes"],
    ]
    return zip(*np.array(values).tolist(), strict=True)


def layer_rows(report: Report, drive: bool = False) -> list[Row]:
    """One row per phase that ran and MoE layer, in this order: the key `by_layer`.

    Args:
        drive: it had one below host memory; waits for it have a column of their own.
    """
    rows, of_layers = [], report.counts.tally.by_expert.table().sum(axis=3)
    waiting, expert_bytes = report.lanes.waiting, report.counts.expert_bytes
    for number, phase in enumerate(PHASES):
        n_iterations = report.phases[phase].n_iterations
        for layer, values in enumerate(counted(of_layers[:, number], expert_bytes) if n_iterations else ()):
            row: Row = {"phase": phase, "layer": layer, "iterations_n": n_iterations}
            row |= zip(COUNTS, values, strict=True)
            waited_s = waiting.seconds(number, layer)
            row |= {column: waited_s[name] for column, name in zip(WAITS_S, WAITS, strict=True)}
            if drive:
                row[WAIT_DRIVE_S] = waited_s["nvme"]
            rows.append(row)
    return rows


def layer_table(rows: list[Row]) -> Iterator[tuple[Any, ...]]:
    """The table `layers`: the rows, some of their columns by the names of the decisions that they count, too."""
    for row in rows:
        ran = row["experts_n"]
        fetched_frac = row["demand_copies_n"] / ran if ran else None
        told = (value for name, value in row.items() if name != WAIT_DRIVE_S)  # the table has the same columns always
        yield (*told, row["demand_copies_n"], row["prefetch_issued_n"], fetched_frac)


def expert_table(report: Report) -> Iterator[tuple[Any, ...]]:
    """The table `experts`: one row per phase that ran, MoE layer and expert, in this order."""
    counts = report.counts.tally.by_expert
    table = counts.table()
    for number, phase in enumerate(PHASES):
        if not report.phases[phase].n_iterations:
            continue
        of_phase = table[:, number].reshape(len(COLUMNS), -1)
        for at, values in enumerate(counted(of_phase, report.counts.expert_bytes)):
            yield (phase, *divmod(at, counts.n_experts), *values)
