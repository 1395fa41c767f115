"""An axis: one option of a run, or figure of its profile, that is changed while everything else stays; and what a
machine that misses the goals would need of each.

One rule answers what a machine lacks, how little memory is enough, up to which rate an answer holds and where two
policies change places: along an axis, the first value at which something holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from sim.base.units import show_bytes, show_count, show_frac, show_ram, show_rate
from sim.options import OPTIONS
from sim.profiles.drives import Drive
from sim.profiles.precisions import BITS_PER_PARAM, BLOCKS, MIXES, PLAIN
from sim.studies.answer import Column, Shown
from sim.studies.plan.candidate import EXCLUDED, MISSES, NOT_RUN, SCREENED, Candidate, closest
from sim.studies.plan.goal import Goal, Reading, figures, growing, readings
from sim.studies.runner.searches import NEAR_FRAC, Bounded, Replays, Search, narrowed

if TYPE_CHECKING:
    from sim.options import RunSpec, Value
    from sim.results.record import Result

LINK, DRIVE = "hw.h2d.bandwidth_bytes_per_s", "hw.drive.bandwidth_bytes_per_s"
CPU, GPU = "hw.cpu.memory_bandwidth_bytes_per_s", "hw.gpu.memory_bandwidth_bytes_per_s"
CACHE, RAM, PRECISION, RATE = "run.cache", "run.ram", "run.precision", "arrivals.scale"
AMPLE = {"hw.vram_bytes": 1e13}  # where the expert cache is what is varied
RANGE = 16.0
ONE_IN = 10
"""Of all requests, those of a first look."""
MOST_STEPS = 12
"""Of the way from where few requests put it to where all of them do."""


class Change(msgspec.Struct, frozen=True):
    """One option of a run, or figure of its profile or result, changed alone.

    Attributes:
        what: its key; name: for people. now, value: as it is, and would be, as that is set; None where no value does.
            now_text, text: for people.
    """

    what: str
    name: str
    now: float | str | None
    value: float | str | None
    now_text: str
    text: str


C = TypeVar("C", bound=Change)


class Axis(NamedTuple):
    """What is varied.

    Attributes:
        key: the option of the run, or figure of its profile, that is set. name: for people. now: its value. least,
            most: how far it may be moved. form: a value -> as it is set; show: as people read it. end: what `most` is,
            in words. whole: in ones.
    """

    key: str
    name: str
    spec: RunSpec
    now: float
    least: float
    most: float
    form: Callable[[float], Value] = float
    show: Callable[[float], str] = show_rate
    end: str = ""
    whole: bool = False

    def at(self, value: float) -> RunSpec:
        """The run with that value."""
        return changed(self.spec, self.key, self.form(value))

    def change(self, kind: type[C], value: float | None, text: str, **more: Any) -> C:
        """Of its value as it is to another, or to none that does."""
        values = self.form(self.now), None if value is None else self.form(value)
        return kind(self.key, self.name, *values, self.show(self.now), text, **more)

    def told(self, tried: Tried) -> str:
        """A value that was tried, with what it means for a buyer: the VRAM that it takes, or the slot."""
        text, value = self.show(tried.value), tried.value
        if self.key == CACHE and tried.result is not None:
            return f"{text} ({show_bytes(tried.result.memory.needed_bytes)} of VRAM)"
        return f"{text} (as {word})" if self.key == LINK and (word := link_word(value)) else text


class Tried(NamedTuple):
    """A value of an axis and what came of it there; `result`: of a replay."""

    value: float
    readings: Sequence[Reading]
    result: Result | None = None

    @property
    def met(self) -> bool:
        """Whether every goal is reached."""
        return bool(self.readings) and all(one.met for one in self.readings)


class Probe(NamedTuple):
    """What becomes of goals at a value of an axis: by replays of the first `few` requests while it is sought, of all
    where it is said; or by the lower bound, which says what is needed whatever the policy, and may be enough for none.
    """

    goals: Sequence[Goal]
    few: int | None = None
    by_bound: bool = False

    def tried(self, axis: Axis, value: float, whole: bool = True) -> Search[Tried]:
        """One value; `whole`: by all requests."""
        spec = axis.at(value)
        if self.by_bound:
            (limit,) = yield [Bounded(spec)]
            return Tried(value, [] if limit is None else limit.readings(self.goals))
        (answer,) = yield [spec if whole or self.few is None else replace(spec, requests=self.few)]
        if isinstance(answer, str):
            return Tried(value, [])
        return Tried(value, [] if growing(answer) else readings(self.goals, answer), answer)

    def first(self, axis: Axis, low: float, high: float) -> Search[Tried]:
        """The least value in (low, high] that reaches the goals; where none does, what came of `high`.

        It takes for granted that more of it is better; at `low` the goals are missed.
        """

        def holds(value: float) -> Search[bool]:
            return (yield from self.tried(axis, value, False)).met

        if not (yield from holds(high)) and not (end := (yield from self.tried(axis, high))).met:
            return end
        _, value = yield from narrowed(holds, low, high, axis.whole)
        found = yield from self.tried(axis, value)
        for _ in range(MOST_STEPS):
            if found.met or value >= high:
                break
            value = min(high, value + max(1, math.ceil(NEAR_FRAC * value)) if axis.whole else value * (1 + NEAR_FRAC))
            found = yield from self.tried(axis, value)
        return (yield from self.tried(axis, high)) if not found.met and value < high else found


def probe_of(goals: Sequence[Goal], replays: Replays) -> Probe:
    """By replays. A search looks at few requests while it is under way, but where percentiles and queues need all."""
    return Probe(goals, None if any(goal.fewest for goal in goals) else replays.few(ONE_IN))


def changed(spec: RunSpec, key: str, value: Value) -> RunSpec:
    """The same run with another value of one option, or of one figure of a profile."""
    if (row := OPTIONS.by_name.get(key)) is not None:
        return replace(spec, **{row.field: value})
    return replace(spec, set={**spec.set, key: value})


def axes_of(spec: RunSpec, cpu: bool) -> list[Axis]:
    """Those of a run: the link, up to what host memory gives; the expert cache; the CPU's memory; above a drive that,
    and host memory up to all experts; and the GPU's memory, down to the link. Within one memory only the last."""
    from sim.run import prepare

    with closing(prepare(spec)) as setup:
        hw, model, size = setup.hw, setup.model, setup.pieces.whole[0][0].n_bytes
        found: list[Axis] = []
        link, host = hw.h2d.bandwidth_bytes_per_s.value, hw.cpu.memory_bandwidth_bytes_per_s.value
        if not hw.one_memory:
            end = "as fast as host memory"
            found.append(_rate(LINK, "link bandwidth", spec, link, max(link, host))._replace(end=end))
            found += [cache_axis(spec)] if spec.gpus == 1 else []
            if cpu:
                found.append(_rate(CPU, "CPU memory bandwidth", spec, host, RANGE * host))
        if setup.tier is not None and not hw.one_memory:
            assert isinstance(hw.drive, Drive)
            rate, n_bytes = hw.drive.bandwidth_bytes_per_s.value, model.routed_bytes(spec.precision)
            found.append(_rate(DRIVE, "drive bandwidth", spec, rate, RANGE * rate))
            sizes = (min(setup.host_bytes, n_bytes), size, n_bytes)
            found.append(Axis(RAM, "host memory", spec, *sizes, math.ceil, show_ram, "with all experts in it"))
        gpu = hw.gpu.memory_bandwidth_bytes_per_s.value
        axis = _rate(GPU, "GPU memory bandwidth", spec, gpu, gpu)
        return [*found, axis._replace(least=min(gpu, max(axis.least, link)))]


def cache_axis(spec: RunSpec) -> Axis:
    """Whole experts that the GPU caches, in a card with memory enough for them."""
    from sim.run import prepare

    with closing(prepare(spec)) as setup:
        there = setup.memory.expert_bytes[0] // setup.pieces.whole[0][0].n_bytes
        every = setup.model.n_moe_layers * setup.model.n_experts
    ample = replace(spec, vram=None, cache=None, set={**spec.set, **AMPLE})
    return Axis(
        *(CACHE, "expert cache", ample, there, 0, every),
        form=lambda value: f"{int(value)}experts",
        show=lambda value: show_count(round(value), "expert"),
        end="with all experts in it",
        whole=True,
    )


def _rate(key: str, name: str, spec: RunSpec, now: float, most: float) -> Axis:
    """A bandwidth of the profile."""
    return Axis(key, name, spec, now, now / RANGE, most)


def precision_axis(spec: RunSpec) -> Axis:
    """Precisions of fewer bits, of the same kind as a run's, the most bits first; its values are their places."""
    own = BITS_PER_PARAM[spec.precision]
    kind = next((names for names in (PLAIN, MIXES, BLOCKS) if spec.precision in names), PLAIN)  # a file's like
    lower = sorted((name for name in kind if BITS_PER_PARAM[name] < own), key=lambda name: -BITS_PER_PARAM[name])
    every = [*lower, spec.precision]  # at -1 there is its own
    name = lambda place: every[int(place)]  # noqa: E731 - its form and its text
    end = f"down to {lower[-1]}" if lower else ""
    return Axis(PRECISION, "precision", spec, -1, 0, len(lower) - 1, name, name, end, True)


def link_word(bytes_per_s: float) -> str:
    """The slowest link of `moesim hw --links` whose large copies are that fast."""
    from sim.profiles.pcie import LINKS, bandwidth, bus_of

    rates = {word: bandwidth(bus_of(word), up=True).value for word in LINKS}
    return min((word for word, rate in rates.items() if rate >= bytes_per_s), key=lambda word: rates[word], default="")


REPLAYED, BOUND = "replayed", "bound"
HIT_RATE = "hit_rate"


class Suggestion(Change, frozen=True, kw_only=True):
    """What a machine that fails would need. how: `replayed` under `policy`; `bound`: needed whatever the policy, and
    perhaps not enough."""

    policy: str | None
    how: str

    @property
    def found_by(self) -> str:
        """In words."""
        return f"replays of {self.policy}" if self.how == REPLAYED else "the bound"


class Case(NamedTuple):
    """A machine that fails: the candidate of it that is asked about, and how."""

    candidate: Candidate
    how: str


def cases(candidates: Sequence[Candidate]) -> list[Case]:
    """The failing machines: by their nearest policy, and where that uses the CPU by the nearest that does not, too; by
    the bound where it rules out every policy."""
    found: list[Case] = []
    for cards in dict.fromkeys((one.hw, one.gpus) for one in candidates):
        alike = [one for one in candidates if (one.hw, one.gpus) == cards]
        if not {one.state for one in alike} <= {EXCLUDED, NOT_RUN, MISSES, SCREENED}:
            continue  # where more replicas reach them, that is what would have to be
        most = max(one.replicas for one in alike)
        own = [one for one in alike if one.replicas == most]
        replayed = sorted((one for one in own if one.known), key=lambda one: -one.margin)
        if replayed:
            copying = [one for one in replayed if not one.asked.cpu] if replayed[0].asked.cpu else []
            found += [Case(one, REPLAYED) for one in (replayed[0], *copying[:1])]
        elif (nearest := closest(own)) is not None:
            found.append(Case(nearest, BOUND))
    return found


def suggestions(probe: Probe, case: Case) -> Search[list[Suggestion]]:
    """Those of one machine that fails."""
    one, how = case
    probe = probe._replace(by_bound=how == BOUND)
    found: list[Suggestion] = []
    for axis in (*axes_of(one.spec, one.asked.cpu), precision_axis(one.spec)):
        if axis.now >= axis.most:
            continue
        tried = yield from probe.first(axis, axis.now, axis.most)
        need = axis.told(tried)
        if not tried.met:
            end = axis.end or f"at {axis.show(axis.most)}"
            need = f"none does: {figures(tried.readings)} {end}" if tried.readings else "none does"
        elif axis.key == PRECISION:
            need += f": {figures(tried.readings)}"
        who: dict[str, Any] = {"policy": one.policy if how == REPLAYED else None, "how": how}
        found.append(axis.change(Suggestion, tried.value if tried.met else None, need, **who))
        if axis.key == CACHE and tried.met and tried.result is not None:  # time depends on the cache through hits alone
            before, after = (yield from probe.tried(axis, axis.now, False)).result, tried.result.hit_rate
            now, need = None if before is None else before.hit_rate, f"{show_frac(after)} (what it has with that cache)"
            found.append(Suggestion(HIT_RATE, "hit rate", now, after, show_frac(now), need, **who))
    return found


COLUMNS = (
    Column("to reach it", lambda row: row[0]),
    Column("changed alone", lambda row: row[1].name),
    Column("is", lambda row: row[1].now_text),
    Column("would have to be", lambda row: row[1].text),
    Column("found by", lambda row: row[1].found_by),
)


def suggestions_table(some: Mapping[str, Sequence[Suggestion]]) -> Shown:
    """What would have to be true of the machines that fail, by their names, one figure changed at a time."""
    lost = [name for name, found in some.items() if all(one.value is None for one in found)]
    told = {name: found for name, found in some.items() if name not in lost}
    every = [one for found in told.values() for one in found if one.value is not None]
    notes = []
    if any(one.how == BOUND for one in every):
        notes.append("the bound: needed whatever the policy, and perhaps not enough for any")
    if any(one.what == PRECISION for one in every):
        notes.append("precision: routing is taken as it is, quality is not looked at")
    if lost:
        names = dict.fromkeys(one.name for name in lost for one in some[name])
        notes.append(f"no change of one figure alone would do ({', '.join(names)}): {', '.join(lost)}")
    sentence = "What a machine that fails would need, one figure at a time."
    rows = [("" if at else name, one) for name, found in told.items() for at, one in enumerate(found)]
    return Shown("suggestions", "What would have to be true", sentence, COLUMNS, rows, notes)
