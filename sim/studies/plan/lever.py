"""A lever: one figure of a run that is changed while everything else stays, and where along it goals are reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from sim.base.units import show_bytes, show_count, show_ram, show_rate
from sim.profiles.drives import Drive
from sim.studies.plan.goal import Goal, Reading, growing, readings
from sim.studies.plan.limits import limit_of

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.results.record import Result
    from sim.setup.setup import Setup
    from sim.studies.plan.replays import Replays

LINK, CPU, ROOM, VRAM = (
    *("hw.h2d.bandwidth_bytes_per_s", "hw.cpu.memory_bandwidth_bytes_per_s"),
    *("experts", "hw.vram_bytes"),
)
HOST, DRIVE = "ram_bytes", "hw.drive.bandwidth_bytes_per_s"
"""Where experts lie on a drive."""
NEAR_FRAC = 0.02
"""How near a search comes to where a goal is reached."""
AMPLE_BYTES = 1e13  # of VRAM, where the room for experts is what is varied
RANGE = 16.0
MOST_STEPS = 12
"""Of the way from where few requests put it to where all of them do."""


class Lever(NamedTuple):
    """What is varied.

    Attributes:
        name: for people. key: the figure. now: its value. most, least: how far it may be moved. whole: in ones.
    """

    name: str
    key: str
    now: float
    least: float
    most: float
    whole: bool
    at: Callable[[float], RunSpec]

    def show(self, value: float) -> str:
        """A value of it, with its unit."""
        if self.key == ROOM:
            return show_count(round(value), "expert")
        if self.key == HOST:
            return show_ram(value)
        return show_rate(value) if self.key.endswith("bytes_per_s") else show_bytes(value)


class Tried(NamedTuple):
    """A value of a lever and what came of it there; `result`: of a replay."""

    value: float
    readings: list[Reading]
    result: Result | None

    @property
    def met(self) -> bool:
        """Whether every goal is reached."""
        return bool(self.readings) and all(one.met for one in self.readings)


class Probe(Protocol):
    """What tells whether goals are reached: replays, or the bound."""

    how: str

    def few(self, lever: Lever, value: float) -> Tried: ...

    def whole(self, lever: Lever, value: float) -> Tried: ...


class ByReplay:
    """Replays of one policy: of few requests while it is sought, of all where it is said."""

    how = "replayed"

    def __init__(self, goals: Sequence[Goal], replays: Replays, n: int | None) -> None:
        self.goals, self._replays, self._n = goals, replays, n

    def few(self, lever: Lever, value: float) -> Tried:
        return self._tried(lever, value, self._n)

    def whole(self, lever: Lever, value: float) -> Tried:
        return self._tried(lever, value, None)

    def _tried(self, lever: Lever, value: float, n: int | None) -> Tried:
        (answer,) = self._replays.of([lever.at(value)], "what would have to be true", n)
        if isinstance(answer, str):
            return Tried(value, [], None)
        return Tried(value, [] if growing(answer) else readings(self.goals, answer), answer)


class ByBound:
    """The lower bound: what it says is needed whatever the policy, and may not be enough for any."""

    how = "bound"

    def __init__(self, goals: Sequence[Goal], cpu: bool) -> None:
        self.goals, self._cpu = goals, cpu

    def few(self, lever: Lever, value: float) -> Tried:
        return self.whole(lever, value)

    def whole(self, lever: Lever, value: float) -> Tried:
        from sim.base.errors import MoesimError

        try:
            limit = limit_of(lever.at(value), self._cpu)
        except MoesimError:
            return Tried(value, [], None)
        told = [(goal, limit.value(goal) if limit is not None else None) for goal in self.goals]
        return Tried(value, [Reading(goal, least, None) for goal, least in told if least is not None], None)


class Found(NamedTuple):
    """Where a lever reaches the goals; `reached` False: it does not, and `tried` is its end."""

    lever: Lever
    how: str
    reached: bool
    tried: Tried


def search(lever: Lever, probe: Probe, low: float, high: float) -> Found:
    """The least value in (low, high] that reaches the goals, to `NEAR_FRAC` or to the whole number.

    It takes for granted that more of it is better; at `low` the goals are missed.
    """
    end = probe.few(lever, high)
    if not end.met:
        end = probe.whole(lever, high)
        if not end.met:
            return Found(lever, probe.how, False, end)
    failing, last = low, high
    while (last - failing > 1) if lever.whole else (last / failing > 1 + NEAR_FRAC):
        middle = (failing + last) // 2 if lever.whole else math.sqrt(failing * last)
        if probe.few(lever, middle).met:
            last = middle
        else:
            failing = middle
    found = probe.whole(lever, last)
    for _ in range(MOST_STEPS):
        if found.met or last >= high:
            break
        last = min(high, last + max(1, math.ceil(NEAR_FRAC * last)) if lever.whole else last * (1 + NEAR_FRAC))
        found = probe.whole(lever, last)
    if not found.met and last < high:
        found = probe.whole(lever, high)
    return Found(lever, probe.how, found.met, found)


def levers_of(setup: Setup, spec: RunSpec, cpu: bool) -> list[Lever]:
    """Those of a run: the link, up to what host memory gives; the room for experts; the CPU's memory; and above a drive
    that, and host memory up to room for every expert. Within one memory there are none."""
    if setup.hw.one_memory:
        return []
    hw, n_all = setup.hw, setup.model.n_moe_layers * setup.model.n_experts
    link, host = hw.h2d.bandwidth_bytes_per_s.value, hw.cpu.memory_bandwidth_bytes_per_s.value
    found = [rate_lever("link bandwidth", spec, LINK, link, max(link, host))]
    if spec.gpus == 1:
        found.append(room_lever(setup, spec, n_all))
    if cpu:
        found.append(rate_lever("CPU memory bandwidth", spec, CPU, host, RANGE * host))
    if setup.tier is not None:
        assert isinstance(hw.drive, Drive)
        rate = hw.drive.bandwidth_bytes_per_s.value
        found.append(rate_lever("drive bandwidth", spec, DRIVE, rate, RANGE * rate))
        found.append(_host_lever(setup, spec))
    return found


def rate_lever(name: str, spec: RunSpec, key: str, now: float, most: float) -> Lever:
    """A bandwidth of the profile."""

    def at(value: float) -> RunSpec:
        return msgspec.structs.replace(spec, set={**spec.set, key: float(value)})

    return Lever(name, key, now, now / RANGE, most, False, at)


def _host_lever(setup: Setup, spec: RunSpec) -> Lever:
    """Host memory for experts, from one to all of them."""
    size, n_bytes = setup.pieces.whole[0][0].n_bytes, setup.model.routed_bytes(spec.precision)

    def at(value: float) -> RunSpec:
        return msgspec.structs.replace(spec, ram=math.ceil(value))

    held = min(setup.host_bytes, n_bytes)
    return Lever("host memory", HOST, held, size, n_bytes, False, at)


def room_lever(setup: Setup, spec: RunSpec, n_all: int) -> Lever:
    """Whole experts of room, in a card with memory enough for them."""
    plain = msgspec.structs.replace(spec, vram=None, cache=None, set={**spec.set, VRAM: AMPLE_BYTES})

    def at(value: float) -> RunSpec:
        return msgspec.structs.replace(plain, cache=f"{int(value)}experts")

    now = setup.memory.expert_bytes[0] // setup.pieces.whole[0][0].n_bytes
    return Lever("room for experts", ROOM, now, 0, n_all, True, at)
