"""What would have to be true for a machine that misses the goals: one figure changed, everything else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim import __version__
from sim.base.digests import of_text
from sim.base.json import to_json
from sim.base.units import show_bytes, show_frac
from sim.figures import SCHEMA
from sim.profiles.gguf import BLOCKS, MIXES
from sim.profiles.precisions import BITS_PER_PARAM, PLAIN
from sim.results.figure import show_figure
from sim.studies.plan.candidate import EXCLUDED, MISSES, NOT_RUN, SCREENED, Candidate
from sim.studies.plan.goal import Goal
from sim.studies.plan.ladder import few_of
from sim.studies.plan.lever import (
    CPU,
    DRIVE,
    HOST,
    LINK,
    ROOM,
    ByBound,
    ByReplay,
    Found,
    Lever,
    Probe,
    Tried,
    levers_of,
    search,
)
from sim.studies.plan.replays import Replays
from sim.studies.sweep.point_store import REMEDIES

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.results.record import Result
    from sim.setup.setup import Setup
    from sim.studies.plan.plan import Asked
    from sim.studies.pool import Call
    from sim.studies.runner import Progress

REPLAYED, BOUND = "replayed", "bound"
WHAT = {LINK: "bandwidth", ROOM: "vram", CPU: "cpu_bandwidth", DRIVE: "drive_bandwidth", HOST: "host_memory"}
"""What `--json` calls a lever."""


class Remedy(NamedTuple):
    """One change of one figure.

    Attributes:
        what: the figure: of `WHAT`, or `hit_rate` or `precision`. now, need: its value as it
            is and as it would have to be; None where no value reaches the goals.
        how: `replayed` under `policy`; `bound`: needed whatever the policy, and perhaps not enough. said: for
            people, the figure, its value now, and what is needed.
    """

    what: str
    policy: str | None
    now: float | str | None
    need: float | str | None
    how: str
    said: tuple[str, str, str]

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        found = self._asdict()
        del found["said"]
        return found

    @property
    def found_by(self) -> str:
        """In words."""
        return f"replays of {self.policy}" if self.how == REPLAYED else "the bound"


class Case(NamedTuple):
    """A machine that fails: the candidate of it that is asked about, and how."""

    machine: str
    candidate: Candidate
    how: str

    def id_for(self, goals: Sequence[Goal]) -> str:
        """Of all that decides what would have to be true."""
        one, said = self.candidate, [goal.to_dict() for goal in goals]
        terms = {"version": __version__, "run": one.asked.id, "policy": one.label, "how": self.how, "goals": said}
        return of_text(to_json(terms))[:12]


def cases(candidates: Sequence[Candidate]) -> list[Case]:
    """The failing machines: by their nearest policy, and where that uses the CPU by the nearest that does not, too; by
    the bound where it rules out every policy."""
    found: list[Case] = []
    for cards in dict.fromkeys((one.machine.id, one.machine.n_gpus) for one in candidates):
        alike = [one for one in candidates if (one.machine.id, one.machine.n_gpus) == cards]
        if not {one.state for one in alike} <= {EXCLUDED, NOT_RUN, MISSES, SCREENED}:
            continue  # where more replicas reach them, that is what would have to be
        most = max(one.machine.n_replicas for one in alike)
        own = [one for one in alike if one.machine.n_replicas == most]
        machine = own[0].machine.name
        replayed = sorted((one for one in own if one.found or one.few), key=lambda one: -one.margin_frac)
        if replayed:
            found.append(Case(machine, replayed[0], REPLAYED))
            if replayed[0].asked.cpu:
                found += [Case(machine, one, REPLAYED) for one in replayed if not one.asked.cpu][:1]
            continue
        bounded = [one for one in own if one.bounds]
        nearest = max(bounded, key=lambda one: min(told.margin_frac for told in one.bounds), default=None)
        if nearest is not None:
            found.append(Case(machine, nearest, BOUND))
    return found


def remedies(
    asked: Asked, candidates: Sequence[Candidate], replays: Replays, workers: int, progress: Progress
) -> dict[str, list[Remedy]]:
    """By machine, for every one that fails; those of a machine are recorded together."""
    failing, goals = cases(candidates), tuple(asked.goals)
    ids = [one.id_for(goals) for one in failing]
    missing = [at for at, id_ in enumerate(ids) if asked.records.get(REMEDIES, id_) is None]
    calls: list[Call] = []
    for at in missing:
        one = failing[at].candidate
        calls.append((remedies_of, (one.spec, one.label, goals, failing[at].how, one.asked.cpu)))
    with closing(asked.pool(calls, workers if len(calls) > 2 else 1)) as stream:
        for done, (index, (told, *work)) in enumerate(stream):
            id_ = ids[missing[index]]
            plain = {"remedies": [one._asdict() for one in told], "work": work}
            asked.records.put(REMEDIES, id_, {"schema": SCHEMA, "id": id_, **plain})
            progress(done + 1, len(calls), "what would have to be true")
    found: dict[str, list[Remedy]] = {}
    for id_, case in zip(ids, failing, strict=True):
        record = asked.records.get(REMEDIES, id_)
        assert record is not None
        replays.add(*record["work"])
        told = [Remedy(**{**one, "said": tuple(one["said"])}) for one in record["remedies"]]
        found.setdefault(case.machine, []).extend(told)
    return found


def remedies_of(
    spec: RunSpec, policy: str, goals: tuple[Goal, ...], how: str, cpu: bool
) -> tuple[list[Remedy], int, int, int]:
    """Those of one run, and what they took: replays, those of all requests, and requests."""
    from sim.run import prepare

    setup = prepare(spec)
    try:
        replays = Replays(len(setup.requests), 1, lambda *_: None, loaded=setup.open_loop)
        probe: Probe = ByBound(goals, cpu)
        if how == REPLAYED:
            probe = ByReplay(goals, replays, few_of(goals, replays))
        found = [*_levers(setup, spec, policy, probe, cpu), *_precision(spec, policy, probe)]
        return found, replays.n_runs, replays.n_whole, replays.n_replayed
    finally:
        setup.close()


def _levers(setup: Setup, spec: RunSpec, policy: str, probe: Probe, cpu: bool) -> Iterator[Remedy]:
    for lever in levers_of(setup, spec, cpu):
        if lever.now >= lever.most:
            continue
        found = search(lever, probe, lever.now, lever.most)
        yield _told(lever, found, policy)
        if lever.key == ROOM and found.reached and found.tried.result is not None:
            yield _hit_rate(probe, lever, found.tried.result, policy)


def _told(lever: Lever, found: Found, policy: str) -> Remedy:
    what = WHAT[lever.key]
    who, now = policy if found.how == REPLAYED else None, lever.show(lever.now)
    if not found.reached:
        ends = {LINK: "as fast as host memory", ROOM: "with room for all", HOST: "with room for all"}
        end = ends.get(lever.key, f"at {lever.show(lever.most)}")
        need = f"none does: {_figures(found.tried)} {end}" if found.tried.readings else "none does"
        return Remedy(what, who, lever.now, None, found.how, (lever.name, now, need))
    value = found.tried.value
    need = lever.show(value)
    if lever.key == ROOM and found.tried.result is not None:
        need += f" ({show_bytes(found.tried.result.memory.needed_bytes)} of VRAM)"
    if lever.key == LINK and (word := link_word(value)):
        need += f" (as {word})"
    return Remedy(what, who, lever.now, value, found.how, (lever.name, now, need))


def _figures(tried: Tried) -> str:
    return ", ".join(f"{one.goal.key} {show_figure(one.goal.key, one.value)}" for one in tried.readings)


def link_word(bytes_per_s: float) -> str:
    """The slowest link of `moesim hw --links` whose large copies are that fast."""
    from sim.profiles.pcie import LINKS, bandwidth, bus_of

    rates = {word: bandwidth(bus_of(word), up=True).value for word in LINKS}
    return min((word for word, rate in rates.items() if rate >= bytes_per_s), key=lambda word: rates[word], default="")


def _hit_rate(probe: Probe, lever: Lever, result: Result, policy: str) -> Remedy:
    """The hit rate that the policy has where it has room enough: time depends on the room through that alone."""
    before = probe.few(lever, lever.now).result
    now = None if before is None else before.hit_rate
    need = f"{show_frac(result.hit_rate)} (what it has with that room)"
    return Remedy("hit_rate", policy, now, result.hit_rate, REPLAYED, ("hit rate", show_frac(now), need))


def lower_precisions(spec: RunSpec) -> list[str]:
    """Those of fewer bits, of the same kind as a run's, the most bits first."""
    own = BITS_PER_PARAM[spec.precision]
    kind = next((names for names in (PLAIN, MIXES, BLOCKS) if spec.precision in names), PLAIN)  # a file's like
    return sorted((name for name in kind if BITS_PER_PARAM[name] < own), key=lambda name: -BITS_PER_PARAM[name])


def _precision(spec: RunSpec, policy: str, probe: Probe) -> list[Remedy]:
    """The most bits with which the goals are reached."""
    lower = lower_precisions(spec)
    if not lower:
        return []
    who = policy if probe.how == REPLAYED else None
    lever = Lever(
        *("precision", "precision", 0.0, 0.0, len(lower) - 1, True),
        lambda value: msgspec.structs.replace(spec, precision=lower[int(value)]),
    )
    for at, name in enumerate(lower):
        if probe.few(lever, at).met and (tried := probe.whole(lever, at)).met:
            said = ("precision", spec.precision, f"{name}: {_figures(tried)}")
            return [Remedy("precision", who, spec.precision, name, probe.how, said)]
    said = ("precision", spec.precision, f"none does, down to {lower[-1]}")
    return [Remedy("precision", who, spec.precision, None, probe.how, said)]
