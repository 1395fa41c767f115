"""A candidate: a machine, a budget and a policy; what is known of it, and how that was found out."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.options import OPTIONS, RunSpec
from sim.profiles.drives import DRIVES
from sim.profiles.hardware import Hardware, load_hardware
from sim.profiles.models import load_model
from sim.profiles.power import lacking
from sim.profiles.precisions import BITS_PER_PARAM
from sim.results.routing_words import labels_of, routing_words
from sim.studies.plan.goal import Reading, worst
from sim.studies.sweep.work import OK, Resolved

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.studies.plan.limits import Limit
    from sim.studies.plan.prices import Prices
    from sim.studies.sweep.grid import Point

OPEN, REACHES, MISSES, EXCLUDED, SCREENED, DEARER, NOT_RUN = (
    *("open", "reaches", "misses", "excluded_by_bound"),
    *("screened_out", "dearer", "not_run"),
)
SOLD_GIB = (
    *(2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80),
    *(94, 96, 120, 128, 141, 144, 180, 192, 256, 288, 384, 512),
)
"""Sizes of memory that cards and machines of one memory are sold with."""
TIER = ("ram", "drive", "drive_evict")
"""Of a run's configuration, what says how a model that does not fit host memory is served."""
_PRECISIONS = tuple(BITS_PER_PARAM)
STATES = {
    REACHES: "replayed on all requests: it reaches every goal",
    MISSES: "replayed on all requests: it misses a goal",
    EXCLUDED: "the lower bound misses a goal, so no lossless policy reaches it there; not replayed",
    SCREENED: "replayed on the first few requests: too far from the goal, or from the best policy of its setting",
    DEARER: "not replayed: a cheaper setting reaches the goal",
    NOT_RUN: "it does not fit, or cannot run; the reason says why",
}


class Machine(NamedTuple):
    """What is bought: cards of one profile, with the figures that it is ordered by where there are no prices."""

    id: str
    n_gpus: int
    vram_bytes: float
    h2d_bytes_per_s: float
    gpu_bytes_per_s: float
    cpu: str
    price: float | None
    n_replicas: int = 1

    @property
    def name(self) -> str:
        """`2 x rtx3090`, `3 replicas of 2 x rtx3090`."""
        one = self.id if self.n_gpus == 1 else f"{self.n_gpus} x {self.id}"
        return one if self.n_replicas == 1 else f"{self.n_replicas} replicas of {one}"

    @property
    def n_cards(self) -> int:
        """Of all replicas."""
        return self.n_gpus * self.n_replicas

    @property
    def cost(self) -> tuple[float, ...]:
        """By which machines are ordered: price (those without come last), then nominal memory, then bandwidth."""
        priced = (0.0, self.price) if self.price is not None else (1.0, 0.0)
        return (*priced, self.n_cards * nominal_gib(self.vram_bytes), self.h2d_bytes_per_s, self.gpu_bytes_per_s)


def nominal_gib(vram_bytes: float) -> float:
    """The memory that a card is sold with: what programs see is less by what its driver and error correction take."""
    seen = round(vram_bytes / 2**30, 2)
    at = bisect_left(SOLD_GIB, seen)
    return SOLD_GIB[at] if at < len(SOLD_GIB) else seen


def machine_of(spec: RunSpec, prices: Prices | None) -> Machine:
    """The machine of a run. Raises BadInput."""
    hw = _hardware(spec)
    price = None if prices is None else prices.by_id.get(hw.id)
    return Machine(
        hw.id,
        spec.gpus,
        hw.vram_bytes.value,
        0.0 if hw.one_memory else hw.h2d.bandwidth_bytes_per_s.value,
        hw.gpu.memory_bandwidth_bytes_per_s.value,
        hw.cpu.id,
        None if price is None else price.price * spec.gpus * spec.replicas,
        spec.replicas,
    )


def _hardware(spec: RunSpec) -> Hardware:
    return load_hardware(spec.hw, spec.overrides.hw, spec.pcie, spec.drive)


def routing_of(spec: RunSpec) -> str:
    """What stands behind an answer where routing rests on little; of a run with no default left."""
    from traces.format.catalogue import open_trace

    assert spec.trace is not None
    assert spec.model is not None
    with open_trace(spec.trace) as trace:
        words = routing_words(labels_of(trace), load_model(spec.model).id)
    return f"; {words}" if words else ""


def without_watts(spec: RunSpec) -> str:
    """Why nobody knows the joules that a run is to count, in a line; empty where its profile has watts."""
    if spec.sim_energy is None:
        return ""
    missing = " and ".join(f"hw.{block}" for block in lacking(_hardware(spec), spec.sim_energy))
    way_out = "give its watts in a profile of yours (docs/energy.md)"
    return (
        f"--set sim.energy, got {spec.sim_energy}: the machine's profile has no {missing}; {way_out}" if missing else ""
    )


def budget_of(spec: RunSpec) -> tuple[float, ...]:
    """By which settings of one machine are ordered: the finest precision first; host memory for experts and the drive's
    bandwidth (that of its own, which is paid for, comes first), the cap, in the unit of the one that there is, and that
    on the card's memory; infinity where there is none."""
    cap = float("inf") if spec.capacity is None else float(spec.capacity.amount)
    host, vram = (float("inf") if n is None else float(n) for n in (spec.ram, spec.vram))
    drive = None if spec.drive is None else DRIVES.get(spec.drive)
    by_drive = 0.0 if drive is None else drive.bandwidth_bytes_per_s.value
    return -BITS_PER_PARAM[spec.precision], float(_PRECISIONS.index(spec.precision)), host, by_drive, cap, vram


@dataclass
class Candidate:
    """One of them.

    Attributes:
        asked: what its names mean. lossy: it changes what the model computes, so that no bound holds for it.
        state: one of `STATES`. limit: what no lossless policy beats there. few: figures over the first few requests.
        found: figures over all of them.
    """

    point: Point
    asked: Resolved
    machine: Machine
    lossy: bool
    state: str = OPEN
    reason: str = ""
    limit: Limit | None = None
    bounds: list[Reading] = field(default_factory=list)
    few: list[Reading] = field(default_factory=list)
    found: list[Reading] = field(default_factory=list)
    result: Result | None = None

    @property
    def label(self) -> str:
        """The policy as it was called."""
        return self.point.label

    @property
    def spec(self) -> RunSpec:
        """Its run."""
        return self.asked.spec

    @property
    def ready(self) -> bool:
        """Whether it can be set up."""
        return self.asked.status == OK

    @property
    def bottleneck(self) -> str | None:
        """What takes most of its time: of prefill where all goals are of the TTFT, else as in its result."""
        if self.result is None:
            return None
        bound = self.result.bottleneck
        first = bool(self.found) and all(one.goal.key.startswith("ttft_s") for one in self.found)
        return bound.prefill.largest() if first else bound.resource

    @property
    def margin_frac(self) -> float:
        """The least margin over the goals, of the best figures that there are."""
        known = self.found or self.few
        return worst(known) if known else float("-inf")

    def failed(self, reason: str) -> None:
        """It cannot run."""
        self.state, self.reason = NOT_RUN, reason

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        result = self.result
        return {
            "policy": self.label,
            "hw": self.machine.id,
            "gpus": self.machine.n_gpus,
            **({"replicas": self.machine.n_replicas} if self.machine.n_replicas > 1 else {}),
            "host_cpu": self.machine.cpu,
            "price": self.machine.price,
            "precision": self.spec.precision,
            "vram_bytes": self.spec.vram,
            "cache": self.spec.cache,
            **{
                OPTIONS.by_field[name].columned: value
                for name in TIER
                if (value := getattr(self.spec, name)) is not None
            },
            "state": self.state,
            "reason": self.reason or None,
            "figures": [one.to_dict() for one in self.found],
            "figures_of_few_requests": [one.to_dict() for one in self.few],
            "bounds": [{"key": one.goal.key, "value": one.value, "met": one.met} for one in self.bounds],
            "run_id": None if result is None else result.run_id,
            "hit_rate": None if result is None else result.hit_rate,
            "peak_vram_bytes": None if result is None else result.peak_vram_bytes,
            "bottleneck": self.bottleneck,
            "caveats": None if result is None else result.caveats,
        }
