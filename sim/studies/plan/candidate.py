"""A candidate: a policy on a machine, with a capacity; what is known of it, and how that was found out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_yaml, to_struct
from sim.base.units import show_bytes, show_ram
from sim.options import OPTIONS, RunSpec
from sim.profiles.drives import DRIVES
from sim.profiles.hardware import Hardware, load_hardware
from sim.profiles.precisions import BITS_PER_PARAM
from sim.studies.plan.goal import Reading
from sim.studies.runner.work import OK, Resolved

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.studies.plan.bounds import Limit
    from sim.studies.sweep.grid import Point

OPEN, REACHES, MISSES, EXCLUDED, SCREENED, DEARER, NOT_RUN = (
    *("open", "reaches", "misses", "excluded_by_bound"),
    *("screened_out", "dearer", "not_run"),
)
"""States: not settled yet; replayed on all requests, it reaches every goal, or misses one; its lower bound misses one;
replayed on the first few requests, it is too far from the goal or from the best policy of its setting; not replayed,
since a cheaper setting reaches the goals; it cannot run, the reason says why."""
VERDICTS = {EXCLUDED: "ruled out by the bound", NOT_RUN: "does not run"}
SOLD_GIB = (
    *(2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80),
    *(94, 96, 120, 128, 141, 144, 180, 192, 256, 288, 384, 512),
)
"""Sizes of memory that cards and machines of one memory are sold with."""
TIER = ("ram", "drive", "drive_evict")
"""Options that say how a model that does not fit host memory is served."""
_PRECISIONS = tuple(BITS_PER_PARAM)
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{price: 700, note: "used, November 2026"}`."""

    price: Amount
    note: str = ""


class PriceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one GPU of a profile each, in the unit that the file names."""

    schema: Literal[1]
    unit: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    prices: dict[str, Amount | Price]


class Prices(NamedTuple):
    """What machines cost, by the id of their profile: no price is known here, and none is made up."""

    path: Path
    unit: str
    by_id: dict[str, float]

    def show(self, price: float) -> str:
        """`700 EUR`."""
        return f"{price:,.10g} {self.unit}"


def read_prices(path: Path) -> Prices:
    """Read and check a file.

    Raises:
        BadInput: naming file and field; also for a name that no profile has, or two names of one profile.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        said = f"{path}, got {type(data).__name__}"
        raise BadInput(f"{said}: prices are a mapping with schema, unit and prices; see docs/plan.md")
    found = to_struct(data, PriceFile, str(path))
    if not found.prices:
        raise BadInput(f"{path}: prices: there are none; list at least one, e.g. rtx3090: 700")
    by_id: dict[str, float] = {}
    for name, price in found.prices.items():
        try:
            own = load_hardware(name).id
        except BadInput as error:
            raise BadInput(f"{path}: prices.{name}: {error}") from None
        if own in by_id:
            raise BadInput(f"{path}: prices.{name}: {own} has a price already; keep one of them")
        by_id[own] = price.price if isinstance(price, Price) else float(price)
    return Prices(path, found.unit, by_id)


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


def hardware_of(spec: RunSpec) -> Hardware:
    """The profile of a run, with all that was set of it."""
    return load_hardware(spec.hw, spec.overrides.hw, spec.pcie, spec.drive)


def machine_of(spec: RunSpec, prices: Prices | None) -> Machine:
    """The machine of a run. Raises BadInput."""
    hw = hardware_of(spec)
    price = None if prices is None else prices.by_id.get(hw.id)
    return Machine(
        hw.id,
        spec.gpus,
        hw.vram_bytes.value,
        0.0 if hw.one_memory else hw.h2d.bandwidth_bytes_per_s.value,
        hw.gpu.memory_bandwidth_bytes_per_s.value,
        hw.cpu.id,
        None if price is None else price * spec.gpus * spec.replicas,
        spec.replicas,
    )


def capacity_of(spec: RunSpec) -> tuple[float, ...]:
    """By which settings of one machine are ordered: the finest precision first; host memory for experts and the drive's
    bandwidth (that of its own, which is paid for, comes first), the cap, in the unit of the one that there is, and that
    on the card's memory; infinity where there is none."""
    cap = float("inf") if spec.capacity is None else float(spec.capacity.amount)
    host, vram = (float("inf") if n is None else float(n) for n in (spec.ram, spec.vram))
    drive = None if spec.drive is None else DRIVES.get(spec.drive)
    by_drive = 0.0 if drive is None else drive.bandwidth_bytes_per_s.value
    return -BITS_PER_PARAM[spec.precision], float(_PRECISIONS.index(spec.precision)), host, by_drive, cap, vram


def capacity_text(spec: RunSpec) -> str:
    """Host memory, drive and cap as people write them; nothing where all that is left may be used."""
    host = "" if spec.ram is None else f"{show_ram(spec.ram)} of host memory"
    if spec.drive is not None:
        host = f"{host or 'host memory'} above {spec.drive}"
    cap = "" if spec.vram is None else f"{show_bytes(spec.vram)} of VRAM"
    if spec.capacity is not None:
        cap = f"room for {spec.capacity.words}"
    return ", ".join(text for text in (host, cap) if text)


@dataclass
class Candidate:
    """One of them.

    Attributes:
        asked: what its names mean. lossy: it changes what the model computes, so that no bound holds for it.
        limit: what no lossless policy beats there. few: figures over the first few requests. found: over all of them.
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
    def known(self) -> list[Reading]:
        """The best figures that there are."""
        return self.found or self.few

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
        """The least margin over the goals, by which candidates are compared."""
        return min((one.margin_frac for one in self.known), default=float("-inf"))

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.state in VERDICTS:
            return VERDICTS[self.state]
        if self.state == MISSES and self.reason:
            return "misses: the queue grows"
        if self.state == REACHES:
            return "reaches" if all(told.sure for told in self.found) else "reaches, inside the band"
        if not self.found:
            return "misses on few requests"
        return "misses" if any(told.sure and not told.met for told in self.found) else "misses, inside the band"

    def settle(self, state: str, reason: str = "") -> None:
        """It is in that state now."""
        self.state, self.reason = state, reason

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        result, machine, spec = self.result, self.machine, self.spec
        values = ((OPTIONS.by_field[name].columned, getattr(spec, name)) for name in TIER)
        return {
            "policy": self.label,
            "hw": machine.id,
            "gpus": machine.n_gpus,
            **({"replicas": machine.n_replicas} if machine.n_replicas > 1 else {}),
            "host_cpu": machine.cpu,
            "price": machine.price,
            "precision": spec.precision,
            "vram_bytes": spec.vram,
            "cache": spec.cache,
            **{name: value for name, value in values if value is not None},
            "state": self.state,
            "reason": self.reason or None,
            "figures": [one.to_dict() for one in self.found],
            "figures_of_few_requests": [one.to_dict() for one in self.few],
            "bounds": [{"key": one.goal.key, "value": one.value, "met": one.met} for one in self.bounds],
            **{name: getattr(result, name, None) for name in ("run_id", "hit_rate", "peak_vram_bytes")},
            "bottleneck": self.bottleneck,
            "caveats": None if result is None else result.caveats,
        }


def live(some: Iterable[Candidate]) -> list[Candidate]:
    """Those that are not settled, the largest margin first."""
    return sorted((one for one in some if one.state == OPEN), key=lambda one: (-one.margin_frac, one.label))


def closest(some: Sequence[Candidate]) -> Candidate | None:
    """The one that is nearest to the goals: by a replay, else by its bound."""
    replayed = [one for one in some if one.found] or [one for one in some if one.few]
    if replayed:
        return max(replayed, key=lambda one: one.margin_frac)
    bounded = [one for one in some if one.bounds]
    return max(bounded, key=lambda one: min(told.margin_frac for told in one.bounds), default=None)


class Setting(NamedTuple):
    """Candidates with one machine and one capacity."""

    machine: Machine
    capacity: tuple[float, ...]
    candidates: list[Candidate]

    @property
    def reaching(self) -> list[Candidate]:
        """Those that reach the goals, the largest margin first."""
        found = [one for one in self.candidates if one.state == REACHES]
        return sorted(found, key=lambda one: (-one.margin_frac, one.label))


def settings_of(candidates: Sequence[Candidate]) -> list[Setting]:
    """The cheapest machine first, and on it the smallest capacity."""
    found: dict[tuple[Machine, tuple[float, ...]], Setting] = {}
    for one in candidates:
        at = one.machine, capacity_of(one.spec)
        found.setdefault(at, Setting(*at, [])).candidates.append(one)
    return sorted(found.values(), key=lambda setting: (setting.machine.cost, setting.machine.id, setting.capacity))


def by_machine(some: Sequence[Candidate]) -> list[tuple[Machine, list[Candidate]]]:
    """Candidates by machine, in order."""
    found: dict[Machine, list[Candidate]] = {}
    for one in some:
        found.setdefault(one.machine, []).append(one)
    return list(found.items())


def spokesman(own: Sequence[Candidate]) -> Candidate:
    """The candidate that tells most of a machine: the first setting's best that reaches, else the nearest."""
    if reaching := [one for one in own if one.state == REACHES]:
        same = [one for one in reaching if capacity_of(one.spec) == capacity_of(reaching[0].spec)]
        return min(same, key=lambda one: (-one.margin_frac, one.label))
    return closest(own) or next((one for one in own if one.ready), own[0])
