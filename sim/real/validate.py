"""Both worlds side by side: the same run simulated and carried out, and where their times part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.device_faults import DeviceFault
from sim.base.kinds import EXPERTS, SHARE, amount_in
from sim.base.lanes import ON_DEVICE
from sim.figures import values_of
from sim.machine.forwarding import ForwardingMachine
from sim.machine.lanes import HOST
from sim.policy.api import overrides as implements
from sim.policy.tickets import Ticket
from sim.real.run import measure
from sim.real.watch import watch
from sim.results.fold import fold
from sim.results.metrics import quantile
from sim.run import engine_of, machine_kind, prepare, report_of, run_through

if TYPE_CHECKING:
    from sim.base.quantities import Basis
    from sim.machine.simulated import SimulatedMachine
    from sim.options import RunSpec
    from sim.real.comparison import Comparison, Errors, Off, Pair, Repeats
    from sim.real.devices.lanes import Lanes
    from sim.real.weights.weights import Weights
    from sim.results.record import Result
    from sim.setup.setup import Setup

LANES = (*ON_DEVICE, "host")
Entry = tuple[str, int, int]


@dataclass
class World:
    """One of the two: its result, its decisions, busy seconds by (lane, operation), and seconds of policy code."""

    result: Result
    log: list[Entry]
    busy_s: dict[tuple[str, str], float]
    policy_code_s: float
    iterations_s: dict[str, list[float]] = field(default_factory=dict)
    n_policy_calls: int = 0


class HostPays:
    """Charges the host of a simulation with the time that policy code took just now, as a real host spends it.

    `slowdown`: how much longer it takes where threads of lanes want the interpreter too, as a share of its time alone.
    `each_s`: what every call is charged, in place of its time; None: its time.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        spent: dict[tuple[str, str], float],
        slowdown: float = 0.0,
        each_s: float | None = None,
    ) -> None:
        self._machine, self._spent, self._stretch, self._each_s = machine, spent, 1.0 + slowdown, each_s
        self.total_s = 0.0
        self.n_calls = 0

    def policy(self, hook: str, layer: int, began_s: float, end_s: float) -> None:
        self.n_calls += 1
        spent_s = self._stretch * (end_s - began_s) if self._each_s is None else self._each_s
        self._machine.now_s += spent_s
        self.total_s += spent_s
        self._spent["host", "policy code"] = self._spent.get(("host", "policy code"), 0.0) + spent_s


class FreePredictions(ForwardingMachine):
    """A machine where predictors are policy code, which is charged as it runs."""

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        return Ticket(self.now(), HOST)


def simulated(setup: Setup, each_s: float | None = None) -> World:
    """The simulation of a run, policy code charged as measured while it ran, in place of what predictors ask for.

    Args:
        each_s: charge this for every call of policy code instead.
    """
    busy_s: dict[tuple[str, str], float] = {}
    log: list[Entry] = []

    def span(
        lane: str, op: str, _layer: int, _expert: int, _tokens: int, _bytes: int, start_s: float, end_s: float
    ) -> None:
        busy_s[lane, op] = busy_s.get((lane, op), 0.0) + end_s - start_s

    cost = setup.cost()
    machine = machine_kind(setup)(cost, setup.spec.gpus, span, implements(setup.policy, "copy_done"))
    asked = FreePredictions(machine)
    engine = engine_of(setup, asked, setup.cost(), lambda *entry: log.append(entry))
    measured = setup.hw.curves_of(setup.model.id, setup.spec.precision)
    slowdown = None if measured is None else measured.policy_slowdown
    payer = HostPays(machine, busy_s, 0.0 if slowdown is None else slowdown.value, each_s)
    watch(setup.policy, payer)
    steps: dict[str, list[float]] = {}
    clockwork = run_through(setup, engine, asked, _steps_into(steps), None)
    result = fold(setup, report_of(engine, machine, clockwork))
    n_begun = sum(len(found) for found in steps.values())
    if machine.cost.launches.begin_s:
        busy_s["host", "begin"] = n_begun * machine.cost.launches.begin_s
    return World(result, log, busy_s, payer.total_s, steps, payer.n_calls)


def carried_out(setup: Setup, lanes: Lanes, weights: Weights) -> World:
    """The real run."""
    log: list[Entry] = []
    steps: dict[str, list[float]] = {}
    done = measure(setup, lanes, weights, log=lambda *entry: log.append(entry), on_step=_steps_into(steps))
    if done.fault == "interrupted":
        raise KeyboardInterrupt
    if done.fault:
        raise DeviceFault(done.fault)
    ledger = done.machine.ledger
    busy_s = {key: cost.total_s for key, cost in ledger.by_op.items()}
    for op, cost in ledger.host_by.items():
        name = "sync" if op == "before sync" else op
        busy_s["host", name] = busy_s.get(("host", name), 0.0) + cost.total_s
    busy_s["host", "policy code"] = ledger.policy_s
    return World(done.result, log, busy_s, ledger.policy_s, steps)


def _steps_into(steps: dict[str, list[float]]) -> Callable[[Any], None]:
    return lambda step: steps.setdefault(step.iteration.counted, []).append(step.end_s - step.start_s)


@dataclass
class Case:
    """One policy with one capacity: the run that is compared, and what came of it in both worlds.

    `outputs` caps the tokens put out by each request; None: as many as the trace has. `kept`: an earlier comparison.
    """

    spec: RunSpec
    outputs: int | None = None
    traits: list[str] = field(default_factory=list)
    sim: World | None = None
    reals: list[World] = field(default_factory=list)
    kept: Comparison | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The configuration, as it is kept beside what came of it."""
        return {**msgspec.to_builtins(self.spec), "outputs": self.outputs}

    def _run(self, run: Callable[[Setup], World]) -> World:
        setup = prepare(self.spec)
        try:
            if self.outputs is not None:
                setup = setup.asking(self.outputs)
            self.traits = sorted(setup.policy.traits)
            return run(setup)
        finally:
            setup.close()

    def predict(self, each_s: float | None = None) -> World:
        """Simulate it, every call of policy code charged so much; None: as it is measured."""
        self.sim = self._run(lambda setup: simulated(setup, each_s))
        return self.sim

    def carry_out(self, lanes: Lanes, weights: Weights) -> None:
        """Really run it once more."""
        self.reals.append(self._run(lambda setup: carried_out(setup, lanes, weights)))


def compared(case: Case) -> Comparison:
    """One comparison as plain data: predicted, measured and error of every figure, lane and operation.

    Of several real runs, times are the median (by operation the mean, which adds up), rates the mean; decisions and
    bytes are those of the first run that differs from the simulation, if one does.
    """
    sim, reals, spec = case.sim, case.reals, case.spec
    assert sim is not None
    assert reals
    parted = [parts_at(sim.log, real.log) for real in reals]
    which = next((i for i, at in enumerate(parted) if at is not None), 0)
    real, part = reals[which], parted[which]
    asked = next((r for r in reals if _asked(r.result) != _asked(sim.result)), real)
    operations = _operations(sim, reals)
    repeats: Repeats = {
        "tpot_s": [s for r in reals if (s := r.result.tpot_s.mean) is not None],
        "ttft_s": [s for r in reals if (s := r.result.ttft_s.mean) is not None],
    }
    return {
        "policy": sim.result.policy,
        "params": sim.result.params,
        "traits": case.traits,
        "hw": sim.result.hw,
        "model": sim.result.model,
        "trace": sim.result.trace,
        "precision": sim.result.precision,
        "device": real.result.device,
        "cache_capacity_bytes": sum(sim.result.cache_capacity_bytes),
        "experts": amount_in(EXPERTS, spec.capacity),
        "cache_frac": amount_in(SHARE, spec.capacity),
        "requests": real.result.n_requests,
        "outputs": case.outputs,
        "decode_tokens": real.result.decode_tokens,
        "ttft_s": _pair(sim.result.ttft_s.mean, _median(repeats["ttft_s"])),
        "tpot_s": _pair(sim.result.tpot_s.mean, _median(repeats["tpot_s"])),
        "repeats": repeats,
        "plus_minus_frac": sim.result.uncertainty.plus_minus_frac,
        "decode_iqr_frac": _iqr_frac([s for r in reals for s in r.iterations_s.get("decode", [])]),
        "classes": {
            f"{name}_rate": _pair(share, _mean([getattr(r.result.hit_rates, name) for r in reals]))
            for name, share in values_of(sim.result.hit_rates).items()
        },
        "bytes": {
            "h2d_bytes": _pair(sim.result.h2d_bytes, real.result.h2d_bytes),
            "d2h_bytes": _pair(sim.result.d2h_bytes, real.result.d2h_bytes),
            "asked_bytes": _pair(_asked(sim.result), _asked(asked.result)),
        },
        "utilisation": {
            lane: _pair(
                sim.result.lane_utilisation.get(lane), _mean([r.result.lane_utilisation.get(lane) for r in reals])
            )
            for lane in LANES
        },
        "operations": operations,
        "lanes": _lanes(operations),
        "worst_lane": _worst(_lanes(operations)),
        "worst_operation": _worst(operations),
        "policy_code_s": _pair(sim.policy_code_s, _mean([r.policy_code_s for r in reals])),
        "decisions": {
            "n": len(real.log),
            "identical": part is None,
            "part_at": part,
            "predicted": None if part is None else list(sim.log[part : part + 1]),
            "measured": None if part is None else list(real.log[part : part + 1]),
        },
        "caveats": [label for label in sim.result.caveats if label.startswith("beyond")],
    }


def parts_at(one: list[Entry], other: list[Entry]) -> int | None:
    """Where two logs part; None when they are the same."""
    part = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(len(one), len(other)) if part is None and len(one) != len(other) else part


def _median(values: list[float]) -> float | None:
    return quantile(sorted(values), 0.5) if values else None


def _mean(values: list[Any]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


def _pair(predicted: float | None, measured: float | None) -> Pair:
    error = None
    if predicted is not None and measured:
        error = predicted / measured - 1.0
    return {"predicted": predicted, "measured": measured, "error_frac": error}


def _asked(result: Result) -> int:
    """Bytes of every copy asked for. What was moved may be less by prefetches withdrawn in time, a matter of time."""
    return result.demand_copies.bytes + result.prefetch.issued.bytes


def _iqr_frac(seconds: list[float]) -> float | None:
    """Spread of the real iterations over their median: how quiet the machine was."""
    if len(seconds) < 4:
        return None
    ordered = sorted(seconds)
    return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / quantile(ordered, 0.5)


def _operations(sim: World, reals: list[World]) -> dict[str, Off]:
    """Busy seconds per iteration by lane and operation; their difference is where the time went wrong."""
    n_steps = max(1, reals[0].result.phases.n_iterations)
    found: dict[str, Off] = {}
    for lane, op in sorted({key for world in (sim, *reals) for key in world.busy_s}):
        predicted = sim.busy_s.get((lane, op), 0.0) / n_steps
        measured = math.fsum(real.busy_s.get((lane, op), 0.0) for real in reals) / len(reals) / n_steps
        found[f"{lane}: {op}"] = {"predicted_s": predicted, "measured_s": measured, "off_s": predicted - measured}
    return found


def _lanes(operations: dict[str, Off]) -> dict[str, Off]:
    lanes: dict[str, Off] = {}
    for name, row in operations.items():
        lane = lanes.setdefault(name.partition(":")[0], {"predicted_s": 0.0, "measured_s": 0.0, "off_s": 0.0})
        lane["predicted_s"] += row["predicted_s"]
        lane["measured_s"] += row["measured_s"]
        lane["off_s"] += row["off_s"]
    return lanes


def _worst(rows: dict[str, Off]) -> str:
    return max(rows, key=lambda name: abs(rows[name]["off_s"]), default="")


def judge(found: Comparison, tolerance_frac: float) -> list[str]:
    """What is wrong with a comparison, in words; empty when nothing is."""
    wrong = []
    for title, pair in (("TPOT", found["tpot_s"]), ("TTFT", found["ttft_s"])):
        error = pair["error_frac"]
        if error is not None and abs(error) > tolerance_frac:
            row = found["operations"][found["worst_operation"]]
            wrong.append(
                f"{title} is off by {error:+.0%}; most of the difference is on lane {found['worst_lane']} "
                f"({found['worst_operation']}: {1e3 * row['predicted_s']:.2f} ms an iteration predicted, "
                f"{1e3 * row['measured_s']:.2f} ms measured)"
            )
    if "timing" not in found["traits"]:
        if not found["decisions"]["identical"]:
            at = found["decisions"]
            wrong.append(
                f"decisions part at entry {at['part_at']}: predicted {at['predicted']}, measured "
                f"{at['measured']}; a policy without the trait timing must decide alike in both worlds"
            )
        pair = found["bytes"]["asked_bytes"]
        if pair["predicted"] != pair["measured"]:
            wrong.append(f"bytes asked for: {pair['predicted']} predicted, {pair['measured']} measured")
    return wrong


def summary(comparisons: list[Comparison]) -> Errors:
    """Median and largest absolute error of TPOT and TTFT over all comparisons."""
    tpot, ttft = _errors([c["tpot_s"] for c in comparisons]), _errors([c["ttft_s"] for c in comparisons])
    return {
        "tpot_s_median_error_frac": quantile(tpot, 0.5) if tpot else None,
        "tpot_s_worst_error_frac": tpot[-1] if tpot else None,
        "ttft_s_median_error_frac": quantile(ttft, 0.5) if ttft else None,
        "ttft_s_worst_error_frac": ttft[-1] if ttft else None,
    }


def _errors(pairs: list[Pair]) -> list[float]:
    return sorted(abs(pair["error_frac"]) for pair in pairs if pair["error_frac"] is not None)
