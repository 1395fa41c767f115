"""The record of a measured run: that of a simulated one, and what only a measurement has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sim.engine.report import Counts, Lanes, Report
from sim.figures import Measurement, Spent
from sim.results.fold import fold

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.run_loop import Clockwork
    from sim.real.machine.machine import RealMachine
    from sim.results.record import Result
    from sim.setup.setup import Setup


def report_of(engine: Engine, machine: RealMachine, clockwork: Clockwork, began_s: float) -> Report:
    """Of a run on hardware that is over, or was stopped; this computer began it at `began_s`."""
    lanes = Lanes(machine.lane_busy_s(), {}, machine.waiting, machine.h2d_bytes, machine.d2h_bytes)
    wall_s = time.perf_counter() - began_s
    return Report.of(Counts.of(engine), lanes, clockwork, engine.cost.measured.beyond, wall_s)


def fold_real(setup: Setup, report: Report, machine: RealMachine, fault: str) -> Result:
    """Keys as in docs/output.md, and `real`, `device`, `measured` of docs/validate.md."""
    result = fold(setup, report)
    ledger, weights = machine.ledger, machine.weights
    n_all = setup.model.n_moe_layers * setup.model.n_experts
    labels = result.caveats
    if weights.distinct < n_all:
        labels.append(f"{n_all} experts share {weights.distinct} host buffers")
    if fault:
        n_out, n_wanted = (
            sum(r.outputs for r in requests)
            for requests in ((times.request for times in report.requests), setup.requests)
        )
        labels.append(f"stopped early, after {n_out} of {n_wanted} tokens")
    n_tokens = sum(phase.n_iterations for phase in report.phases.values())
    result.simulator, result.real, result.device = "real", True, machine.lanes.title
    result.measured = Measurement(
        output_digest=f"{machine.output.digest:08x}",
        policy_code_s=ledger.policy_s,
        policy_code_per_iteration_s=ledger.policy_s / n_tokens if n_tokens else None,
        predictor_asked_s=ledger.predict_asked_s,
        distinct_host_experts=weights.distinct,
        spilt_arena_bytes=machine.store.spilt_bytes,
        operations={f"{lane}: {op}": Spent(cost.n, cost.total_s) for (lane, op), cost in sorted(ledger.by_op.items())},
        host={op: Spent(cost.n, cost.total_s) for op, cost in sorted(ledger.host_by.items())},
        fault=fault,
    )
    return result
