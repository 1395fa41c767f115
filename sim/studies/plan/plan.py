"""The cheapest machine and policy that reach a goal, what the others lack, and how `moesim plan` says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count, show_rate
from sim.options import OPTIONS
from sim.results.text import BOUND_IS_OF
from sim.studies.answer import Answer, Column, Shown
from sim.studies.plan.axes import BOUND, HIT_RATE, Suggestion, cases, probe_of, suggestions, suggestions_table
from sim.studies.plan.candidate import (
    DEARER,
    EXCLUDED,
    MISSES,
    NOT_RUN,
    Candidate,
    Prices,
    Setting,
    by_machine,
    closest,
    spokesman,
)
from sim.studies.plan.cheapest import UpToRate, cheapest, least_cache, up_to_rate
from sim.studies.plan.goal import Goal, Reading
from sim.studies.plan.request import Candidates, PlanRequest, candidates_of, with_replicas
from sim.studies.plan.ways import compare_ways
from sim.studies.runner.searches import Replays

MOST_REASONS = 5
NEEDS, BY_BOUND, LESS = "needs", "experts by the bound", "one expert less"
SPARE = ("link", "VRAM", BY_BOUND, "band", LESS, "capacity", "CPU", "bound by")
NO_GOAL = (
    "--goal, got none: say what is to be reached, e.g. --goal 'tpot_s.mean <= 100ms'; or name one --hw, to compare "
    "what streaming, caching and its CPU give there"
)


def ask(request: PlanRequest, least: bool) -> Answer:
    """The answer to what was asked: the least memory, the cheapest machine, or without a goal the ways of one machine.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    if request.goals:
        return plan(request, least)
    if least or len(request.block.axes.get("hw", ())) != 1:
        raise BadInput(NO_GOAL)
    return compare_ways(request)


class Plan(Answer, kw_only=True, eq=False):
    """A plan that is made.

    Attributes:
        goals: all of them have to be reached. least_memory: whether the least memory of each machine was looked for, or
            the cheapest setting. best: the policy that reaches them there with the largest margin. up_to_rate: under
            load, up to which the answer would hold. suggestions: by machine that fails, what would have to be true.
            candidates: those of the first setting first.
    """

    ROWS: ClassVar = "candidates"
    least_memory: bool
    reached: bool
    goals: list[Goal]
    prices: Prices | None
    best: Candidate | None
    up_to_rate: UpToRate | None = None
    work: dict[str, float]
    suggestions: dict[str, list[Suggestion]]
    candidates: list[Candidate]

    def rows(self) -> list[dict[str, Any]]:
        """One per candidate, for a frame: its plain figures, and each goal's."""
        rows = []
        for one, plain in zip(self.candidates, super().rows(), strict=True):
            row = {name: value for name, value in plain.items() if not isinstance(value, list)}
            for goal in self.goals:
                told, least = _of(goal, one.figures), _of(goal, one.bounds)
                names = {"": "value", ".low": "low", ".high": "high", ".margin_frac": "margin_frac"}
                row |= {goal.key + end: getattr(told, name, None) for end, name in names.items()}
                row[f"{goal.key}.bound"] = None if least is None else least.value
            rows.append(row)
        return rows

    def tables(self) -> list[Shown]:
        """One row per machine: the setting that reaches the goals, or the policy that comes nearest; and what those
        that fail lack."""
        own = by_machine(self.candidates)
        told = [one for some in own.values() if (one := spokesman(some)).state != DEARER]
        columns = [
            Column("machine", lambda one: one.machine),
            Column("price", lambda one: one.price, "x"),
            Column("VRAM", lambda one: one.all_vram_bytes, "bytes"),
            Column("link", lambda one: show_rate(rate) if (rate := one.h2d_bytes_per_s) else None, "x"),
            Column("CPU", lambda one: one.host_cpu),
            Column("verdict", lambda one: one.verdict),
            Column("policy", lambda one: one.policy if one.known else None),
            Column("precision", lambda one: one.precision),
            Column("capacity", lambda one: one.capacity or "all"),
            Column(NEEDS, lambda one: one.needed_vram_bytes, "bytes"),
            Column(BY_BOUND, lambda one: one.experts_by_the_bound, "n"),
        ]
        left_out = [] if self.prices is not None else ["price"]
        left_out += [] if len({one.precision for one in self.candidates}) > 1 else ["precision"]
        left_out += [] if any(one.capacity for one in told) else ["capacity"]
        left_out += [] if self.least_memory else [NEEDS, BY_BOUND, LESS]
        below = False
        for goal in self.goals:
            least = {machine: _least(some, goal) for machine, some in own.items()}
            columns += [
                Column(goal.key, partial(_value, goal), "x"),
                Column("band", partial(_band, goal), "x"),
                Column("bound", partial(_bound, least), "x"),
                Column(LESS, partial(_with_less, goal), "x"),
            ]
            below = below or any(_begins_below(_of(goal, one.figures), least[one.machine]) for one in told)
        columns.append(Column("bound by", lambda one: one.bottleneck))
        columns = [one for one in columns if one.title not in left_out]
        notes = [f"a band that begins below the bound: that {BOUND_IS_OF}"] if below else []
        machines = Shown("machines", "Machines", "", columns, told, notes, SPARE)
        rest = Shown("not-run", "Not replayed", "", [], [], [*self._dearer(own), *self._not_run()])
        return [machines, suggestions_table(self.suggestions), rest]

    def _dearer(self, own: dict[str, list[Candidate]]) -> list[str]:
        """Machines that were not replayed, since a cheaper one reaches the goals."""
        left = [one for some in own.values() if (one := spokesman(some)).state == DEARER]
        names = ", ".join(dict.fromkeys(_with_more(one, left) for one in left))
        which = "larger" if self.prices is None else "dearer"
        return [f"not replayed, since {which} than the answer (--all-machines settles them): {names}"] if names else []

    def _not_run(self) -> list[str]:
        """A line for each reason, with the machines it holds for."""
        by_reason: dict[str | None, list[Candidate]] = {}
        for one in self.candidates:
            if one.state == NOT_RUN:
                by_reason.setdefault(one.reason, []).append(one)
        lines = []
        for reason, some in list(by_reason.items())[:MOST_REASONS]:
            who = f"{some[0].policy} on {some[0].machine}" if len(some) == 1 else show_count(len(some), "candidate")
            lines.append(f"not run: {who}: {reason}")
        left = sum(len(some) for some in list(by_reason.values())[MOST_REASONS:])
        return [*lines, *([f"not run: {show_count(left, 'candidate')} more; --json says why"] if left else [])]


def plan(request: PlanRequest, least_memory: bool = False) -> Plan:
    """The cheapest machine that reaches the goals, or the least memory with which each reaches them.

    Raises:
        BadInput: whatever has to be changed, in one line; for the least memory also a cap, or several GPUs.
    """
    if least_memory:
        _check_alone(request)
    asked = candidates_of(request if least_memory else replace(request, block=with_replicas(request.block)))
    asked.rule_out()
    goals, replays, settings = request.goals, asked.replays, asked.settings
    probe = probe_of(goals, replays)
    setting: Setting | None
    if least_memory:
        replays.together([least_cache(one, probe, replays) for one in settings], "the least memory")
        settings = sorted(settings, key=lambda one: (one.needed_bytes, one.first.cost))
        setting = settings[0] if settings[0].reaching else None
    else:
        setting = replays.one(cheapest(goals, settings, replays, request.every), "the cheapest machine")
    work: dict[str, Any] = {
        "candidates": len(asked.every),
        "can_be_set_up": len(asked.ready),
        "lower_bounds": replays.n_bounds,
        "replays": replays.n_runs,
        "replays_of_all_requests": replays.n_whole,
        "whole_replays": replays.share,
    }
    candidates = [one for setting in settings for one in setting.candidates]
    best, rate, lacks = None if setting is None else setting.reaching[0], None, dict[str, list[Suggestion]]()
    found_by = _bisected(replays) if least_memory else _counts(asked, work)
    if request.suggest:
        rate = None if best is None or least_memory else replays.one(up_to_rate(goals, best), "up to which rate")
        failing = cases(candidates)
        told = replays.together([suggestions(probe, case) for case in failing], "what would have to be true")
        for case, some in zip(failing, told, strict=True):
            lacks.setdefault(case.candidate.machine, []).extend(some)
    if best is not None:
        answer = _found(asked, best, least_memory)
    else:
        answer = _lacking_memory(asked, settings, lacks) if least_memory else _nearest(asked, work)
    order = None if least_memory else _order(asked, candidates)
    sentences = (None if rate is None else rate.text, asked.hosts, order, found_by, *asked.sources)
    return Plan(
        first_line=answer + asked.routing,
        trace=asked.trace,
        hosts=asked.hosts,
        least_memory=least_memory,
        reached=best is not None,
        goals=goals,
        prices=asked.prices,
        best=best,
        up_to_rate=rate,
        work={**work, "replays_for_suggestions": replays.n_runs - work["replays"]},
        suggestions=lacks,
        candidates=candidates,
        _lines=[line for line in sentences if line],
    )


def _check_alone(request: PlanRequest) -> None:
    for name, values in request.block.axes.items():
        said = f"--least-memory, got {OPTIONS.by_field[name].said}"
        if name in ("cache", "vram"):
            raise BadInput(f"{said}: it looks for the capacity itself; leave one of them out")
        if name == "gpus" and values != [1]:
            raise BadInput(f"{said}: it knows one GPU; leave one of them out")
        if name in ("ram", "drive", "precision") and (n := len(values)) > 1:
            raise BadInput(f"{said.replace('got', f'got {n} values of')}: it is asked of one; give one of them")


def _bisected(replays: Replays) -> str:
    return f"found by bisection over whole experts: {replays.said}; it takes for granted that more memory is better"


def _lacking_memory(asked: Candidates, settings: Sequence[Setting], lacks: dict[str, list[Suggestion]]) -> str:
    """What would do on the first machine with more bandwidth or memory, or fewer bits."""
    names = [setting.first.machine for setting in settings]
    several = len(names) > 1
    who = f"none of {', '.join(names)} reaches" if several else f"{names[0]} does not reach"
    text = f"{who} {asked.request.said} with all its memory"
    for name, found in lacks.items():
        if some := [one for one in found if one.value is not None]:
            where = f" on {name}" if several else ""
            least = " at the least" if any(one.how == BOUND for one in some) else ""
            ways = [f"{one.name} {one.text}" for one in some if one.what != HIT_RATE]
            return f"{text}; alone it would take{where}{least}: {', or '.join(ways)}"
    return text


def _found(asked: Candidates, best: Candidate, least_memory: bool) -> str:
    prices, needed = asked.prices, best.needed_vram_bytes
    what = "smallest" if prices is None else "cheapest"
    cost = "" if best.price is None or prices is None else f" ({best.price:,.10g} {prices.unit})"
    where = f"{best.machine}{cost}{best.and_capacity}"
    where += f" ({show_bytes(needed)} of VRAM)" if least_memory and needed is not None else ""
    where += f" with {best.policy}"
    where += f" on its {best.host_cpu}" if best.asked.cpu else ""
    what_for = "least memory" if least_memory else f"{what} machine"
    text = f"{what_for} for {asked.request.said} of {best.asked.meant['model']} in {best.precision}: "
    text += f"{where}: {best.said}"
    text += f"; bound by the {best.bottleneck}" if best.bottleneck else ""
    text += _undecided(asked.request.goals, best)
    less = set() if least_memory else {one.machine for one in asked.every if one.cost < best.cost}
    n = len(less - {one.machine for one in asked.every if one.state != NOT_RUN})
    some = f"{what.replace('est', 'er')} {'one does' if n == 1 else 'ones do'}"
    return f"{text}; {n} {some} not run, see below" if n else text


def _undecided(goals: Sequence[Goal], best: Candidate) -> str:
    """What decides where a goal lies inside the band; nothing where it does not."""
    for goal, one in zip(goals, best.figures, strict=True):
        if not one.beyond_the_band and best.result is not None and one.key in ("tpot_s.mean", "ttft_s.mean"):
            ends, n = best.result.uncertainty.sampling.of("tpot_s" if one.key == "tpot_s.mean" else "ttft_s")
            if ends is not None and not all(goal.met(end) for end in ends):
                return f"; the goal lies inside what so few requests leave open (n = {n}): replay more"
    inside = not all(one.beyond_the_band for one in best.figures)
    return "; the goal lies inside the band, so the figures behind it decide" if inside else ""


def _nearest(asked: Candidates, work: dict[str, float]) -> str:
    """Where nothing reaches the goals: what comes nearest."""
    ready, near = asked.ready, closest(asked.ready)
    several = len({one.machine for one in ready}) > 1
    text = "no machine reaches" if several else f"{ready[0].machine} does not reach"
    text += f" {asked.request.said}"
    if near is None:
        return text
    where = near.machine
    if near.state == MISSES and near.reason:
        return f"{text}: requests come faster than they are served, nearest {near.policy} on {where}"
    where += f" in {near.precision}" if len({one.precision for one in ready}) > 1 else ""
    where += near.and_capacity
    if not work["replays"]:
        told = ", ".join(
            f"{one.key} no {'better' if '<' in one.goal else 'more'} than {one.shown}"
            for one in near.bounds
            if not one.met
        )
        return f"{text}: ruled out by lower bounds alone, without a replay; nearest: {where}, {told}"
    return f"{text}; nearest: {near.policy} on {where}: {near.said}{'' if near.figures else ' (from few requests)'}"


def _order(asked: Candidates, candidates: Sequence[Candidate]) -> str:
    """By what machines are ordered."""
    text = "no prices (--prices FILE): machines are ordered by nominal VRAM, then link, then GPU memory bandwidth"
    if asked.prices is not None:
        text = f"prices from {asked.prices.file}"
        if without := sorted({one.machine for one in candidates if one.price is None}):
            text += f"; none for {', '.join(without)}: they come last"
    several = len({one.precision for one in candidates}) > 1
    return text + ("; on each the finest precision first, whose quality is not looked at" if several else "")


def _counts(asked: Candidates, work: dict[str, Any]) -> str:
    """What was worked out, and what trying everything would have taken."""
    every, ready = asked.every, len(asked.ready)
    n_runs, n_whole, machines = work["replays"], work["replays_of_all_requests"], len({one.machine for one in every})
    text = f"{show_count(len(every), 'candidate')}: {show_count(machines, 'machine')}"
    text += f", {show_count(len(asked.settings), 'setting')}" if len(asked.settings) != machines else ""
    text += f", {show_count(len({one.policy for one in every}), 'policy').replace('policys', 'policies')}"
    text += f"; {ready:,} can be set up" if ready != len(every) else ""
    ruled_out = sum(one.state == EXCLUDED for one in every)
    text += f"; {show_count(work['lower_bounds'], 'lower bound')} ruled out {ruled_out:,}"
    if not n_runs:
        return f"{text}; no replay"
    kinds = (n_whole, f"of all {asked.replays.n_requests} requests"), (n_runs - n_whole, "of the first few")
    parts = " and ".join(f"{show_count(n, 'replay')} {of}" for n, of in kinds if n)
    return f"{text}; {parts}, {work['whole_replays']:.3g} times all requests, where brute force takes {ready:,}"


def _of(goal: Goal, some: Sequence[Reading]) -> Reading | None:
    return next((told for told in some if told.goal == goal.said), None)


def _value(goal: Goal, one: Candidate) -> str | None:
    """The figure of a goal, `~` of few requests."""
    told = _of(goal, one.known)
    return None if told is None else f"{'' if one.figures else '~'}{told.shown}"


def _band(goal: Goal, one: Candidate) -> str | None:
    told = _of(goal, one.figures)
    return None if told is None else told.band or None


def _bound(least: dict[str, Reading | None], one: Candidate) -> str | None:
    told = least[one.machine]
    return None if told is None else told.shown


def _with_less(goal: Goal, one: Candidate) -> str | None:
    told = _of(goal, one.figures_with_one_expert_less or ())
    return None if told is None else told.shown


def _least(own: Sequence[Candidate], goal: Goal) -> Reading | None:
    """The bound that holds for every lossless policy of a machine: the one that leaves most of the goal."""
    found = [told for one in own if (told := _of(goal, one.bounds)) is not None]
    return max(found, key=lambda told: told.margin, default=None)


def _begins_below(told: Reading | None, least: Reading | None) -> bool:
    """Whether a band begins on the far side of what no lossless policy can beat."""
    if told is None or least is None or told.low is None or told.high is None:
        return False
    return told.low < least.value if "<" in told.goal else told.high > least.value


def _with_more(one: Candidate, some: Sequence[Candidate]) -> str:
    """`3 to 8 replicas of rtx3090`, where there are several numbers of them."""
    alike = sorted((other for other in some if (other.hw, other.gpus) == (one.hw, one.gpus)), key=lambda o: o.replicas)
    first, last = alike[0].replicas, alike[-1].machine
    return last if first == alike[-1].replicas else f"{first} to {last}"
