"""A candidate: a policy on a machine, with a capacity; what is known of it, and how that was found out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_yaml, to_struct
from sim.base.kinds import capacity_of
from sim.base.units import show_bytes, show_ram
from sim.options import OPTIONS, RunSpec
from sim.policy.registry import find
from sim.profiles.drives import DRIVES
from sim.profiles.hardware import Hardware, load_hardware
from sim.profiles.precisions import BITS_PER_PARAM
from sim.results.record import Result
from sim.studies.answer import hidden, null
from sim.studies.plan.goal import Limit, Reading, least_margin
from sim.studies.runner.work import OK, Resolved

OPEN, REACHES, MISSES, EXCLUDED, SCREENED, DEARER, NOT_RUN = (
    *("open", "reaches", "misses", "excluded_by_bound"),
    *("screened_out", "dearer", "not_run"),
)
"""States: not settled yet; replayed on all requests, it reaches every goal, or misses one; its lower bound misses one;
replayed on the first few requests, it is too far from the goal or from the best policy of its setting; not replayed,
since a cheaper setting reaches the goals; it cannot run, the reason says why."""
VERDICTS = {EXCLUDED: "ruled out by the bound", NOT_RUN: "does not run"}
INSIDE = ", inside the band"
BOUGHT = ("gpus", "replicas", "precision", "vram", "cache", "ram", "drive", "drive_evict")
"""Options of a run that tell candidates of one policy apart."""
SOLD_GIB = (
    *(2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80),
    *(94, 96, 120, 128, 141, 144, 180, 192, 256, 288, 384, 512),
)
"""Sizes of memory that cards and machines of one memory are sold with."""
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


class Prices(msgspec.Struct, frozen=True):
    """What machines cost, by the id of their profile: no price is known here, and none is made up."""

    file: str
    unit: str
    _by_id: dict[str, float] = {}

    def of(self, hw: str) -> float | None:
        """Of one GPU."""
        return self._by_id.get(hw)


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
    return Prices(str(path), found.unit, by_id)


def nominal_gib(vram_bytes: float) -> float:
    """The memory that a card is sold with: what programs see is less by what its driver and error correction take."""
    seen = round(vram_bytes / 2**30, 2)
    at = bisect_left(SOLD_GIB, seen)
    return SOLD_GIB[at] if at < len(SOLD_GIB) else seen


def hardware_of(spec: RunSpec) -> Hardware:
    """The profile of a run, with all that was set of it."""
    return load_hardware(spec.hw, spec.overrides.hw, spec.pcie, spec.drive)


def order_of(spec: RunSpec) -> tuple[float, ...]:
    """By which settings of one machine are ordered: the finest precision first; host memory for experts and the drive's
    bandwidth (that of its own, which is paid for, comes first), the expert cache, in the unit of the one that there is,
    and the cap on the card's memory; infinity where there is none."""
    cap = float("inf") if spec.capacity is None else float(spec.capacity.amount)
    host, vram = (float("inf") if n is None else float(n) for n in (spec.ram, spec.vram))
    drive = None if spec.drive is None else DRIVES.get(spec.drive)
    by_drive = 0.0 if drive is None else drive.bandwidth_bytes_per_s.value
    return -BITS_PER_PARAM[spec.precision], float(_PRECISIONS.index(spec.precision)), host, by_drive, cap, vram


class Candidate(msgspec.Struct, kw_only=True, eq=False):
    """One of them: its entry in `--json`, filled in while it is looked at.

    Attributes:
        policy: as it was called. price: of all its cards. card_vram_bytes, h2d_bytes_per_s, gpu_bytes_per_s: of one
            card, by which machines are ordered where there are no prices; within one memory there is no link.
            vram_bytes, cache, ram_bytes, drive: capacities that were asked for; of the least memory, cache: what was
            found. figures: of goals, over all requests. bottleneck: what takes most of its time. experts_by_the_bound:
            of the cache, below which the bound misses the goals. asked: what its names mean. limit: what no lossless
            policy beats there. result: of all requests.
    """

    policy: str
    hw: str
    gpus: int
    replicas: int
    host_cpu: str
    price: float | None
    card_vram_bytes: float
    h2d_bytes_per_s: float | None
    gpu_bytes_per_s: float
    precision: str
    vram_bytes: int | None
    cache: str | None
    ram_bytes: int | None = None
    drive: str | None = None
    drive_evict: str | None = None
    state: str = OPEN
    reason: str | None = null()
    figures: list[Reading] = []
    figures_of_few_requests: list[Reading] = []
    bounds: list[Reading] = []
    run_id: str | None = null()
    hit_rate: float | None = null()
    peak_vram_bytes: int | None = null()
    needed_vram_bytes: int | None = null()
    bottleneck: str | None = null()
    caveats: list[str] | None = null()
    figures_with_one_expert_less: list[Reading] | None = None
    experts_by_the_bound: int | None = None
    asked: Resolved = hidden("asked")
    limit: Limit | None = hidden("limit")
    result: Result | None = hidden("result")

    @classmethod
    def of(cls, label: str, asked: Resolved, prices: Prices | None) -> Self:
        """That of a point, which may be one that cannot be set up. Raises BadInput for its hardware."""
        spec, hw = asked.spec, hardware_of(asked.spec)
        price = None if prices is None else prices.of(hw.id)
        one = cls(
            policy=label,
            hw=hw.id,
            host_cpu=hw.cpu.id,
            price=None if price is None else price * spec.gpus * spec.replicas,
            card_vram_bytes=hw.vram_bytes.value,
            h2d_bytes_per_s=None if hw.one_memory else hw.h2d.bandwidth_bytes_per_s.value,
            gpu_bytes_per_s=hw.gpu.memory_bandwidth_bytes_per_s.value,
            **{row.columned: getattr(spec, row.field) for row in map(OPTIONS.by_field.__getitem__, BOUGHT)},
        )
        one.asked = asked
        if asked.status != OK:
            one.settle(NOT_RUN, asked.reason)
        return one

    @property
    def spec(self) -> RunSpec:
        """Its run."""
        return self.asked.spec

    @property
    def ready(self) -> bool:
        """Whether it can be set up."""
        return self.asked.status == OK

    @property
    def lossless(self) -> bool:
        """Whether a bound holds for it: it leaves what the model computes as it is."""
        return "lossy" not in find(self.spec.policy).traits

    @property
    def machine(self) -> str:
        """`2 x rtx3090`, `3 replicas of 2 x rtx3090`."""
        one = self.hw if self.gpus == 1 else f"{self.gpus} x {self.hw}"
        return one if self.replicas == 1 else f"{self.replicas} replicas of {one}"

    @property
    def all_vram_bytes(self) -> float:
        """Of all cards."""
        return self.gpus * self.replicas * self.card_vram_bytes

    @property
    def cost(self) -> tuple[float, ...]:
        """By which machines are ordered: price (those without come last), then nominal memory, then bandwidth."""
        priced, n_cards = (0.0, self.price) if self.price is not None else (1.0, 0.0), self.gpus * self.replicas
        return (*priced, n_cards * nominal_gib(self.card_vram_bytes), self.h2d_bytes_per_s or 0.0, self.gpu_bytes_per_s)

    @property
    def capacity(self) -> str:
        """Host memory, drive and caps as people write them; nothing where all that is left may be used."""
        host = "" if self.ram_bytes is None else f"{show_ram(self.ram_bytes)} of host memory"
        if self.drive is not None:
            host = f"{host or 'host memory'} above {self.drive}"
        cap = "" if self.vram_bytes is None else f"{show_bytes(self.vram_bytes)} of VRAM"
        if self.cache is not None:
            cap = f"a cache of {capacity_of(self.cache).words}"
        return ", ".join(text for text in (host, cap) if text)

    @property
    def and_capacity(self) -> str:
        """`and 16.0 GB of VRAM`."""
        return f" and {self.capacity}" if self.capacity else ""

    @property
    def known(self) -> list[Reading]:
        """The best figures that there are."""
        return self.figures or self.figures_of_few_requests

    @property
    def margin(self) -> float:
        """The least margin over the goals, by which candidates are compared."""
        return least_margin(self.known)

    @property
    def said(self) -> str:
        """Its figures, in a sentence."""
        return ", ".join(one.said for one in self.known)

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.state in VERDICTS:
            return VERDICTS[self.state]
        if self.state == MISSES and self.reason:
            return "misses: the queue grows"
        if self.state == REACHES:
            return "reaches" if all(one.beyond_the_band for one in self.figures) else f"reaches{INSIDE}"
        if not self.figures:
            return "misses on few requests"
        return "misses" if any(one.beyond_the_band and not one.met for one in self.figures) else f"misses{INSIDE}"

    def settle(self, state: str, reason: str | None = None) -> None:
        """It is in that state now."""
        self.state, self.reason = state, reason

    def bounded(self, limit: Limit, bounds: list[Reading]) -> None:
        """Its bound is known, which may rule it out."""
        self.limit, self.bounds = limit, bounds
        if not all(one.met for one in bounds):
            self.state = EXCLUDED

    def ran(self, result: Result, prefill: bool) -> None:
        """It was replayed on all requests. prefill: all goals are of the TTFT, so that what binds prefill binds it."""
        self.result, bound = result, result.bottleneck
        self.run_id, self.hit_rate, self.needed_vram_bytes = result.run_id, result.hit_rate, result.memory.needed_bytes
        self.peak_vram_bytes = result.peak_vram_bytes
        self.bottleneck, self.caveats = bound.prefill.largest() if prefill else bound.resource, result.caveats


def live(some: Iterable[Candidate]) -> list[Candidate]:
    """Those that are not settled, the largest margin first."""
    return best_first(one for one in some if one.state == OPEN)


def best_first(some: Iterable[Candidate]) -> list[Candidate]:
    """The largest margin first."""
    return sorted(some, key=lambda one: (-one.margin, one.policy))


def closest(some: Sequence[Candidate]) -> Candidate | None:
    """The one that is nearest to the goals: by a replay, else by its bound."""
    replayed = [one for one in some if one.figures] or [one for one in some if one.known]
    if replayed:
        return max(replayed, key=lambda one: one.margin)
    return max((one for one in some if one.bounds), key=lambda one: least_margin(one.bounds), default=None)


class Setting(NamedTuple):
    """Candidates with one machine and one capacity."""

    candidates: list[Candidate]

    @property
    def first(self) -> Candidate:
        """That tells of the machine."""
        return self.candidates[0]

    @property
    def reaching(self) -> list[Candidate]:
        """Those that reach the goals, the largest margin first."""
        return best_first(one for one in self.candidates if one.state == REACHES)

    @property
    def needed_bytes(self) -> float:
        """Of VRAM, for the first of these; endlessly much where there is none."""
        return min((one.needed_vram_bytes or 0 for one in self.reaching), default=math.inf)


def settings_of(candidates: Iterable[Candidate]) -> list[Setting]:
    """The cheapest machine first, and on it the smallest capacity."""
    found: dict[Any, Setting] = {}
    for one in candidates:
        found.setdefault((one.cost, one.machine, order_of(one.spec)), Setting([])).candidates.append(one)
    return [found[at] for at in sorted(found)]


def by_machine(some: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates by machine, in order."""
    found: dict[str, list[Candidate]] = {}
    for one in some:
        found.setdefault(one.machine, []).append(one)
    return found


def spokesman(own: Sequence[Candidate]) -> Candidate:
    """The candidate that tells most of a machine: the first setting's best that reaches, else the nearest."""
    if reaching := [one for one in own if one.state == REACHES]:
        first = reaching[0].precision, reaching[0].capacity
        return best_first(one for one in reaching if (one.precision, one.capacity) == first)[0]
    return closest(own) or next((one for one in own if one.state != NOT_RUN), own[0])
