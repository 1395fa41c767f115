"""What a run came to, as far as counting and timing decide it: the names of what was run are left to `sim.setup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oracle import metrics

if TYPE_CHECKING:
    from oracle.drive import Clockwork
    from oracle.engine import Engine
    from oracle.simulated import SimMachine
    from sim.setup.setup import Setup


def fold(setup: Setup, engine: Engine, machine: SimMachine, clockwork: Clockwork) -> dict[str, Any]:
    """The keys of the JSON object that rest on the loop; of `memory`, only the items that do."""
    spec, tally = setup.spec, engine.tally
    timed = metrics.times(clockwork)
    makespan_s = max((t.last_token_s for t in clockwork.requests), default=0.0)
    slots = sum(engine.cache.budget_bytes) / engine.view.expert_bytes / engine.pieces.n_layers
    return {
        **timed,
        "lengths": metrics.lengths(clockwork),
        "phases": metrics.phases(clockwork),
        **metrics.hit_rates(tally, spec.sim_hit),
        "distinct_experts": metrics.distinct(tally, engine.pieces.n_layers, slots),
        "prefetch": metrics.prefetching(tally),
        "demand_copies": {"n": tally.n_demand, "bytes": tally.demand_bytes},
        "h2d_bytes": machine.h2d_bytes,
        "d2h_bytes": machine.d2h_bytes,
        "memory": {
            "cache_capacity_bytes": engine.cache.budget_bytes[0],
            "cache_peak_bytes": engine.cache.peak_bytes[0],
        },
        "expert_bytes": engine.view.expert_bytes,
        "cache_capacity_bytes": list(engine.cache.budget_bytes),
        "cache_peak_bytes": list(engine.cache.peak_bytes),
        "bottleneck": metrics.bottleneck(clockwork),
        "provenance": metrics.provenance(machine, clockwork),
        "uncertainty": metrics.uncertainty(machine, clockwork, timed, spec.batch, setup.open_loop),
        "beyond": sorted(engine.cost.beyond),
        "lane_utilisation": metrics.lane_utilisation(machine, makespan_s),
        "policy_stats": setup.policy.stats(),
        "simulated_s": makespan_s,
    }
