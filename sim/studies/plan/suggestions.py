"""What would have to be true for a machine that misses the goals: one figure changed, everything else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim import __version__
from sim.base.digests import of_text
from sim.base.json import to_json
from sim.base.units import show_frac
from sim.results.figure import show_figure
from sim.studies.plan.axes import (
    CACHE,
    CPU,
    DRIVE,
    HOST,
    LINK,
    Axis,
    Probe,
    Tried,
    axes_of,
    by_bound,
    by_replay,
    precision_axis,
    search,
)
from sim.studies.plan.candidate import EXCLUDED, MISSES, NOT_RUN, SCREENED, Candidate, closest
from sim.studies.plan.goal import Goal
from sim.studies.plan.replays import Replays
from sim.studies.runner.records import SUGGESTIONS
from sim.studies.runner.runner import recorded

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.plan.request import PlanRequest
    from sim.studies.runner.pool import Call

REPLAYED, BOUND = "replayed", "bound"
WHAT = {LINK: "bandwidth", CACHE: "vram", CPU: "cpu_bandwidth", DRIVE: "drive_bandwidth", HOST: "host_memory"}
"""What `--json` calls an axis."""


class Suggestion(NamedTuple):
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
        name = own[0].machine.name
        replayed = sorted((one for one in own if one.known), key=lambda one: -one.margin_frac)
        if replayed:
            copying = [one for one in replayed if not one.asked.cpu] if replayed[0].asked.cpu else []
            found += [Case(name, one, REPLAYED) for one in (replayed[0], *copying[:1])]
        elif (nearest := closest(own)) is not None:
            found.append(Case(name, nearest, BOUND))
    return found


def suggestions(request: PlanRequest, candidates: Sequence[Candidate], replays: Replays) -> dict[str, list[Suggestion]]:
    """By machine, for every one that fails; those of a machine are recorded together."""
    failing, goals = cases(candidates), tuple(request.goals)
    calls: dict[str, Call] = {}
    for case in failing:
        one = case.candidate
        calls[case.id_for(goals)] = (suggestions_for, (one.spec, one.label, goals, case.how, one.asked.cpu))

    def done(n: int, n_all: int) -> None:
        request.progress(n, n_all, "what would have to be true")

    workers = request.n_workers if len(calls) > 2 else 1
    known = recorded(request.records, SUGGESTIONS, calls, workers, done, request.pool)
    found: dict[str, list[Suggestion]] = {}
    for case in failing:
        record = known[case.id_for(goals)]
        replays.add(*record["work"])
        found.setdefault(case.machine, []).extend(msgspec.convert(record["suggestions"], list[Suggestion]))
    return found


def suggestions_for(spec: RunSpec, policy: str, goals: tuple[Goal, ...], how: str, cpu: bool) -> dict[str, Any]:
    """Those of one run as plain data, and the work: replays, those of all requests, and requests."""
    from sim.run import prepare

    setup = prepare(spec)
    try:
        replays = Replays(len(setup.requests), 1, lambda *_: None, loaded=setup.open_loop)
        probe = by_bound(goals, cpu) if how == BOUND else by_replay(goals, replays)
        found = [*_along_axes(axes_of(setup, spec, cpu), policy, how, probe), *_precision(spec, policy, how, probe)]
        work = [replays.n_runs, replays.n_whole, replays.n_replayed]
        return {"suggestions": msgspec.to_builtins(found), "work": work}
    finally:
        setup.close()


def _along_axes(axes: Sequence[Axis], policy: str, how: str, probe: Probe) -> Iterator[Suggestion]:
    who = policy if how == REPLAYED else None
    for axis in axes:
        if axis.now >= axis.most:
            continue
        tried = search(axis, probe, axis.now, axis.most)
        need = axis.told(tried)
        if not tried.met:
            end = axis.end or f"at {axis.show(axis.most)}"
            need = f"none does: {_figures(tried)} {end}" if tried.readings else "none does"
        said = (axis.name, axis.show(axis.now), need)
        yield Suggestion(WHAT[axis.key], who, axis.now, tried.value if tried.met else None, how, said)
        if axis.key == CACHE and tried.met and tried.result is not None:  # time depends on the room through hits alone
            before, after = probe(axis, axis.now, False).result, tried.result.hit_rate
            now = None if before is None else before.hit_rate
            said = ("hit rate", show_frac(now), f"{show_frac(after)} (what it has with that room)")
            yield Suggestion("hit_rate", policy, now, after, REPLAYED, said)


def _precision(spec: RunSpec, policy: str, how: str, probe: Probe) -> Iterator[Suggestion]:
    """The most bits with which the goals are reached."""
    lower, axis = precision_axis(spec)
    need, text = None, f"none does, down to {lower[-1]}" if lower else ""
    for place, name in enumerate(lower):
        if probe(axis, place, False).met and (tried := probe(axis, place, True)).met:
            need, text = name, f"{name}: {_figures(tried)}"
            break
    if lower:
        who, said = policy if how == REPLAYED else None, ("precision", spec.precision, text)
        yield Suggestion("precision", who, spec.precision, need, how, said)


def _figures(tried: Tried) -> str:
    return ", ".join(f"{one.goal.key} {show_figure(one.goal.key, one.value)}" for one in tried.readings)


def suggestions_table(some: Mapping[str, Sequence[Suggestion]]) -> str:
    """What would have to be true of the machines that fail, by their names, one figure changed at a time."""
    from sim.base.tables import tabled

    titles = ("to reach it", "changed alone", "is", "would have to be", "found by")
    lost = [name for name, found in some.items() if all(one.need is None for one in found)]
    told = {name: found for name, found in some.items() if name not in lost}
    rows = [("" if at else name, *one.said, one.found_by) for name, of in told.items() for at, one in enumerate(of)]
    text = tabled(titles, rows, (1, 2, 3, 4)) if rows else ""
    every = [one for found in told.values() for one in found if one.need is not None]
    if any(one.how == BOUND for one in every):
        text += "the bound: needed whatever the policy, and perhaps not enough for any\n"
    if any(one.what == "precision" for one in every):
        text += "precision: routing is taken as it is, quality is not looked at\n"
    if lost:
        figures = dict.fromkeys(one.said[0] for name in lost for one in some[name])
        text += f"no change of one figure alone would do ({', '.join(figures)}): {', '.join(lost)}\n"
    return text
