"""An axis: one option of a run, or figure of its profile, that is changed while everything else stays.

One rule answers what a machine lacks, how little memory is enough, up to which rate an answer holds and where two
policies change places: along an axis, the first value at which something holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from sim.base.errors import MoesimError
from sim.base.units import show_bytes, show_count, show_ram, show_rate
from sim.options import OPTIONS
from sim.profiles.drives import Drive
from sim.profiles.precisions import BITS_PER_PARAM, BLOCKS, MIXES, PLAIN
from sim.studies.plan.bounds import limit_of
from sim.studies.plan.goal import Goal, Reading, growing, readings

if TYPE_CHECKING:
    from sim.options import RunSpec, Value
    from sim.results.record import Result
    from sim.setup.setup import Setup
    from sim.studies.plan.replays import Replays

LINK, CPU, VRAM = "hw.h2d.bandwidth_bytes_per_s", "hw.cpu.memory_bandwidth_bytes_per_s", "hw.vram_bytes"
CACHE, HOST, DRIVE = "experts", "ram_bytes", "hw.drive.bandwidth_bytes_per_s"
NEAR_FRAC = 0.02
"""How near a search comes to where something begins to hold."""
AMPLE_BYTES = 1e13  # of VRAM, where the room for experts is what is varied
RANGE = 16.0
ONE_IN = 10
"""Of all requests, those of a first look."""
MOST_STEPS = 12
"""Of the way from where few requests put it to where all of them do."""


class Axis(NamedTuple):
    """What is varied.

    Attributes:
        name: for people. key: of the figure, in `--json`. now: its value. least, most: how far it may be moved.
        spec: the run. option: of its options, or figures of its profile, the one that is set. form: a value -> as it is
            set; show: as people read it. end: what `most` is, in words. whole: in ones.
    """

    name: str
    key: str
    now: float
    least: float
    most: float
    spec: RunSpec
    option: str
    form: Callable[[float], Value] = float
    show: Callable[[float], str] = show_rate
    end: str = ""
    whole: bool = False

    def at(self, value: float) -> RunSpec:
        """The run with that value."""
        return changed(self.spec, self.option, self.form(value))

    def told(self, tried: Tried) -> str:
        """A value that was tried, with what it means for a buyer: the VRAM that it takes, or the slot."""
        text, value = self.show(tried.value), tried.value
        if self.key == CACHE and tried.result is not None:
            return f"{text} ({show_bytes(tried.result.memory.needed_bytes)} of VRAM)"
        return f"{text} (as {word})" if self.key == LINK and (word := link_word(value)) else text


class Tried(NamedTuple):
    """A value of an axis and what came of it there; `result`: of a replay."""

    value: float
    readings: list[Reading]
    result: Result | None = None

    @property
    def met(self) -> bool:
        """Whether every goal is reached."""
        return bool(self.readings) and all(one.met for one in self.readings)


Probe = Callable[[Axis, float, bool], Tried]
"""What becomes of the goals at a value, by a look at few requests or by all of them."""


def by_replay(goals: Sequence[Goal], replays: Replays) -> Probe:
    """Replays of one policy: of few requests while a value is sought, of all where it is said."""
    few = few_of(goals, replays)

    def probe(axis: Axis, value: float, whole: bool) -> Tried:
        (answer,) = replays.of([axis.at(value)], "what would have to be true", None if whole else few)
        if isinstance(answer, str):
            return Tried(value, [])
        return Tried(value, [] if growing(answer) else readings(goals, answer), answer)

    return probe


def by_bound(goals: Sequence[Goal], cpu: bool) -> Probe:
    """The lower bound: what it says is needed whatever the policy, and may not be enough for any."""

    def probe(axis: Axis, value: float, _whole: bool) -> Tried:
        try:
            limit = limit_of(axis.at(value), cpu)
        except MoesimError:
            return Tried(value, [])
        least = [(goal, None if limit is None else limit.value(goal)) for goal in goals]
        return Tried(value, [Reading(goal, known) for goal, known in least if known is not None])

    return probe


def few_of(goals: Sequence[Goal], replays: Replays) -> int | None:
    """How many requests a search looks at while it is under way; None: all, as percentiles and queues need them."""
    return None if any(goal.fewest for goal in goals) else replays.few(ONE_IN)


def narrowed(
    holds: Callable[[float], object], near: float, far: float, whole: bool = False, near_frac: float = NEAR_FRAC
) -> tuple[float, float]:
    """The last value at which something does not hold yet and the first at which it does, to a share or to the whole
    number; at `near` it does not, at `far` it does, and in between it begins to once."""
    while abs(far - near) > 1 if whole else max(far, near) / min(far, near) > 1 + near_frac:
        middle = (near + far) // 2 if whole else math.sqrt(near * far)
        if holds(middle):
            far = middle
        else:
            near = middle
    return near, far


def search(axis: Axis, probe: Probe, low: float, high: float) -> Tried:
    """The least value in (low, high] that reaches the goals; where none does, what came of `high`.

    It takes for granted that more of it is better; at `low` the goals are missed.
    """
    if not probe(axis, high, False).met and not (end := probe(axis, high, True)).met:
        return end
    _, value = narrowed(lambda at: probe(axis, at, False).met, low, high, axis.whole)
    found = probe(axis, value, True)
    for _ in range(MOST_STEPS):
        if found.met or value >= high:
            break
        value = min(high, value + max(1, math.ceil(NEAR_FRAC * value)) if axis.whole else value * (1 + NEAR_FRAC))
        found = probe(axis, value, True)
    return probe(axis, high, True) if not found.met and value < high else found


def changed(spec: RunSpec, key: str, value: Value) -> RunSpec:
    """The same run with another value of one option, or of one figure of a profile."""
    if (row := OPTIONS.by_name.get(key)) is not None:
        return replace(spec, **{row.field: value})
    return replace(spec, set={**spec.set, key: value})


def axes_of(setup: Setup, spec: RunSpec, cpu: bool) -> list[Axis]:
    """Those of a run: the link, up to what host memory gives; the room for experts; the CPU's memory; and above a drive
    that, and host memory up to room for every expert. Within one memory there are none."""
    hw = setup.hw
    if hw.one_memory:
        return []
    link, host = hw.h2d.bandwidth_bytes_per_s.value, hw.cpu.memory_bandwidth_bytes_per_s.value
    found = [rate_axis("link bandwidth", spec, LINK, link, max(link, host))._replace(end="as fast as host memory")]
    if spec.gpus == 1:
        found.append(cache_axis(setup, spec))
    if cpu:
        found.append(rate_axis("CPU memory bandwidth", spec, CPU, host, RANGE * host))
    if setup.tier is not None:
        assert isinstance(hw.drive, Drive)
        rate = hw.drive.bandwidth_bytes_per_s.value
        found.append(rate_axis("drive bandwidth", spec, DRIVE, rate, RANGE * rate))
        found.append(_host_axis(setup, spec))
    return found


def rate_axis(name: str, spec: RunSpec, key: str, now: float, most: float) -> Axis:
    """A bandwidth of the profile."""
    return Axis(name, key, now, now / RANGE, most, spec, key)


def _host_axis(setup: Setup, spec: RunSpec) -> Axis:
    """Host memory for experts, from one to all of them."""
    size, n_bytes = setup.pieces.whole[0][0].n_bytes, setup.model.routed_bytes(spec.precision)
    held = min(setup.host_bytes, n_bytes)
    return Axis("host memory", HOST, held, size, n_bytes, spec, "run.ram", math.ceil, show_ram, "with room for all")


def cache_axis(setup: Setup, spec: RunSpec) -> Axis:
    """Whole experts of room, in a card with memory enough for them."""
    plain = changed(replace(spec, vram=None, cache=None), VRAM, AMPLE_BYTES)
    return Axis(
        *("room for experts", CACHE),
        now=setup.memory.expert_bytes[0] // setup.pieces.whole[0][0].n_bytes,
        least=0,
        most=setup.model.n_moe_layers * setup.model.n_experts,
        spec=plain,
        option="run.cache",
        form=lambda value: f"{int(value)}experts",
        show=lambda value: show_count(round(value), "expert"),
        end="with room for all",
        whole=True,
    )


def precision_axis(spec: RunSpec) -> tuple[list[str], Axis]:
    """Precisions of fewer bits, of the same kind as a run's, the most bits first; its values are their places."""
    own = BITS_PER_PARAM[spec.precision]
    kind = next((names for names in (PLAIN, MIXES, BLOCKS) if spec.precision in names), PLAIN)  # a file's like
    lower = sorted((name for name in kind if BITS_PER_PARAM[name] < own), key=lambda name: -BITS_PER_PARAM[name])
    name = lambda place: lower[int(place)]  # noqa: E731 - its form and its text
    return lower, Axis("precision", "precision", -1, 0, len(lower) - 1, spec, "run.precision", name, name, "", True)


def link_word(bytes_per_s: float) -> str:
    """The slowest link of `moesim hw --links` whose large copies are that fast."""
    from sim.profiles.pcie import LINKS, bandwidth, bus_of

    rates = {word: bandwidth(bus_of(word), up=True).value for word in LINKS}
    return min((word for word, rate in rates.items() if rate >= bytes_per_s), key=lambda word: rates[word], default="")
