"""What `moesim plan` prints: the answer first, then how it was found, a row per machine, and what failing ones lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sim.base.units import show_bytes, show_count, show_number, show_ram, show_rate
from sim.results.figure import show_figure, unit_of
from sim.results.text import BOUND_IS_OF
from sim.studies.plan.candidate import (
    DEARER,
    EXCLUDED,
    MISSES,
    NOT_RUN,
    REACHES,
    Candidate,
    Machine,
    budget_of,
    routing_of,
)
from sim.studies.plan.goal import Goal, Reading
from sim.studies.plan.remedy import BOUND, Remedy

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.plan.plan import Planned

MOST_REASONS = 5
WORDS = ("CPU", "verdict", "policy", "precision", "budget", "bound by")
VERDICTS = {
    REACHES: "reaches",
    EXCLUDED: "ruled out by the bound",
    NOT_RUN: "does not run",
}


def _shown(key: str, value: float | None) -> str:
    """A figure as people read it: three digits where it has no unit."""
    return show_number(value) if isinstance(value, float) and not unit_of(key) else show_figure(key, value)


def answer(planned: Planned) -> str:
    """The first line."""
    return _answer(planned) + routing_of(next(one.spec for one in planned.candidates if one.ready))


def _answer(planned: Planned) -> str:
    goals, best = goals_text(planned.asked.goals), planned.best
    if best is None:
        return _no_answer(planned)
    what = "cheapest" if planned.prices is not None else "smallest"
    cost = (
        "" if best.machine.price is None or planned.prices is None else f" ({planned.prices.show(best.machine.price)})"
    )
    where = f"{best.machine.name}{cost}{_budget(best.spec)}"
    told = ", ".join(reading_text(one) for one in best.found)
    with_ = f"{best.label}" + (f" on its {best.machine.cpu}" if best.asked.cpu else "")
    of = f"{best.asked.meant['model']} in {best.spec.precision}"
    text = f"{what} machine for {goals} of {of}: {where} with {with_}: {told}"
    text += f"; bound by the {best.bottleneck}" if best.bottleneck else ""
    text += _undecided(best)
    less = {one.machine for one in planned.candidates if one.machine.cost < best.machine.cost}
    n = len(less - {one.machine for one in planned.candidates if one.state != NOT_RUN})
    text += f"; {n} {what.replace('est', 'er')} {'one does' if n == 1 else 'ones do'} not run, see below" if n else ""
    return text


def _undecided(best: Candidate) -> str:
    """What decides where a goal lies inside the band; nothing where it does not."""
    open_ = [one for one in best.found if not one.sure]
    for one in open_:
        if one.by_requests is not None and not all(one.goal.met(end) for end in one.by_requests[0]):
            n = one.by_requests[1]
            return f"; the goal lies inside what so few requests leave open (n = {n}): replay more"
    return "; the goal lies inside the band, so the figures behind it decide" if open_ else ""


def _no_answer(planned: Planned) -> str:
    goals, tried = goals_text(planned.asked.goals), [one for one in planned.candidates if one.ready]
    of = "no machine reaches" if len({one.machine for one in tried}) > 1 else f"{tried[0].machine.name} does not reach"
    near = closest(tried)
    several = len({one.spec.precision for one in tried}) > 1
    if near is None:
        return f"{of} {goals}"
    in_ = f" in {near.spec.precision}" if several else ""
    if near.state == MISSES and near.reason:
        return f"{of} {goals}: requests come faster than they are served, nearest {near.label} on {near.machine.name}"
    if not planned.replays.n_runs:
        told = ", ".join(
            f"{one.goal.key} no {'better' if one.goal.at_most else 'more'} than {_shown(one.goal.key, one.value)}"
            for one in near.bounds
            if not one.met
        )
        where = f"{near.machine.name}{in_}{_budget(near.spec)}"
        return f"{of} {goals}: ruled out by lower bounds alone, without a replay; nearest: {where}, {told}"
    known = near.found or near.few
    told = ", ".join(reading_text(one) for one in known)
    few = "" if near.found else " (from few requests)"
    return f"{of} {goals}; nearest: {near.label} on {near.machine.name}{in_}{_budget(near.spec)}: {told}{few}"


def closest(some: Sequence[Candidate]) -> Candidate | None:
    """The one that is nearest to the goals: by a replay, else by its bound."""
    replayed = [one for one in some if one.found] or [one for one in some if one.few]
    if replayed:
        return max(replayed, key=lambda one: one.margin_frac)
    bounded = [one for one in some if one.bounds]
    return max(bounded, key=lambda one: min(told.margin_frac for told in one.bounds), default=None)


def goals_text(goals: Sequence[Goal]) -> str:
    """All of them in a sentence."""
    return " and ".join(goal.text for goal in goals)


def reading_text(one: Reading) -> str:
    """`tpot_s.mean 92 ms (88 ms to 110 ms), 8 % to spare`."""
    text = f"{one.goal.key} {_shown(one.goal.key, one.value)}"
    if one.band is not None:
        low, high = (_shown(one.goal.key, end) for end in one.band)
        text += f" ({low} to {high})"
    side = "to spare" if one.met else "too much" if one.goal.at_most else "too little"
    share = 100 * abs(one.margin_frac)
    return f"{text}, {share:,.0f} % {side}" if share >= 99.5 else f"{text}, {share:.2g} % {side}"


def _budget(spec: RunSpec) -> str:
    said = budget_text(spec)
    return f" and {said}" if said else ""


def budget_text(spec: RunSpec) -> str:
    """Host memory, drive and cap as people write them; nothing where all that is left may be used."""
    above = "" if spec.drive is None else f" above {spec.drive}"
    host = "" if spec.ram is None else f"{show_ram(spec.ram)} of host memory"
    if above and not host:
        host = "host memory"
    return ", ".join(text for text in (f"{host}{above}", _cap_text(spec)) if text)


def _cap_text(spec: RunSpec) -> str:
    if spec.capacity is not None:
        return f"room for {spec.capacity.words}"
    return "" if spec.vram is None else f"{show_bytes(spec.vram)} of VRAM"


def order_line(planned: Planned) -> str:
    """By what machines are ordered."""
    several = len({one.spec.precision for one in planned.candidates}) > 1
    finest = "; on each the finest precision first, whose quality is not looked at" if several else ""
    if planned.prices is None:
        return (
            "no prices (--prices FILE): machines are ordered by nominal VRAM, then link, then GPU memory bandwidth"
            + finest
        )
    without = sorted({one.machine.name for one in planned.candidates if one.machine.price is None})
    text = f"prices from {planned.prices.path}"
    return f"{text}; none for {', '.join(without)}: they come last{finest}" if without else text + finest


def counts_line(planned: Planned) -> str:
    """What was worked out, and what trying everything would have taken."""
    found, replays = planned.candidates, planned.replays
    ready = sum(one.ready for one in found)
    ruled_out = sum(one.state == EXCLUDED for one in found)
    machines = len({one.machine for one in found})
    settings = len(planned.levels)
    text = f"{show_count(len(found), 'candidate')}: {show_count(machines, 'machine')}"
    text += f", {show_count(settings, 'setting')}" if settings != machines else ""
    text += f", {show_count(len({one.label for one in found}), 'policy').replace('policys', 'policies')}"
    text += f"; {ready:,} can be set up" if ready != len(found) else ""
    text += f"; {show_count(planned.n_bounds, 'lower bound')} ruled out {ruled_out:,}"
    few = replays.n_runs - replays.n_whole
    if not replays.n_runs:
        return f"{text}; no replay"
    parts = (
        [show_count(replays.n_whole, "replay") + f" of all {replays.n_requests} requests"] if replays.n_whole else []
    )
    parts += [show_count(few, "replay") + " of the first few"] if few else []
    return f"{text}; {' and '.join(parts)}, {replays.share:.3g} times all requests, where brute force takes {ready:,}"


def drive_lines(some: Sequence[Candidate]) -> list[str]:
    """How drives are read where nobody said it, and why so."""
    return [f"drives: {told}" for told in dict.fromkeys(one.asked.drive for one in some if one.asked.drive)]


def machines_table(planned: Planned) -> str:
    """One row per machine: the setting that reaches the goals, or the policy that comes nearest."""
    from sim.base.tables import prose, render, table

    goals, below = planned.asked.goals, False
    priced = planned.prices is not None
    titles = ["machine", *(["price"] if priced else []), "VRAM", "link", "CPU", "verdict", "policy"]
    budgets = any(budget_text(one.spec) for one in planned.candidates)
    precisions = len({one.spec.precision for one in planned.candidates}) > 1
    titles += ["precision"] if precisions else []
    titles += ["budget"] if budgets else []
    for goal in goals:
        titles += [goal.key, "band", "bound"]
    shown = table(*titles, "bound by")
    words = [at for at, title in enumerate((*titles, "bound by")) if title in WORDS]
    prose(shown, *words)
    for machine, own in by_machine(planned.candidates):
        one = spokesman(own)
        if one.state == DEARER:
            continue  # `dearer_line` names it
        cells = [machine.name, *([_price(machine)] if priced else [])]
        link = show_rate(machine.h2d_bytes_per_s) if machine.h2d_bytes_per_s else "-"  # one memory has none
        cells += [show_bytes(machine.n_cards * machine.vram_bytes), link, machine.cpu]
        cells += [verdict(one), one.label if one.found or one.few else "-"]
        cells += [one.spec.precision] if precisions else []
        cells += [budget_text(one.spec) or "all"] if budgets else []
        for goal in goals:
            cells += _figures(one, goal, _least(own, goal))
        shown.add_row(*cells, one.bottleneck or "-")
        below = below or _below_bound(one, [_least(own, goal) for goal in goals])
    spare = ("link", "VRAM", "band", "budget", "CPU", "bound by")
    return render(shown, spare=spare) + (f"a band that begins below the bound: that {BOUND_IS_OF}\n" if below else "")


def _least(own: Sequence[Candidate], goal: Goal) -> Reading | None:
    """The bound that holds for every lossless policy of a machine: the one that leaves most of the goal."""
    found = [told for one in own for told in one.bounds if told.goal == goal]
    return max(found, key=lambda told: told.margin_frac, default=None)


def _below_bound(one: Candidate, bounds: Sequence[Reading | None]) -> bool:
    """Whether a band of its figures begins on the far side of what no lossless policy can beat."""
    least = {told.goal: told.value for told in bounds if told is not None}
    bands = [(told.goal, told.band) for told in one.found if told.band is not None and told.goal in least]
    return any((low < least[goal]) if goal.at_most else (high > least[goal]) for goal, (low, high) in bands)


def dearer_line(planned: Planned) -> str:
    """Machines that were not replayed, since a cheaper one reaches the goals."""
    left = [machine for machine, own in by_machine(planned.candidates) if spokesman(own).state == DEARER]
    names = list(dict.fromkeys(_with_more(machine, left) for machine in left))
    which = "dearer" if planned.prices is not None else "larger"
    return (
        f"not replayed, since {which} than the answer (--all-machines settles them): {', '.join(names)}"
        if names
        else ""
    )


def _with_more(machine: Machine, some: Sequence[Machine]) -> str:
    """`3 to 8 replicas of rtx3090`, where there are several numbers of them."""
    counts = [one.n_replicas for one in some if (one.id, one.n_gpus) == (machine.id, machine.n_gpus)]
    if min(counts) == max(counts):
        return machine.name
    return f"{min(counts)} to {max(counts)} replicas of {machine._replace(n_replicas=1).name}"


def _price(machine: Machine) -> str:
    return "-" if machine.price is None else f"{machine.price:,.10g}"


def _figures(one: Candidate, goal: Goal, least: Reading | None) -> list[str]:
    told = next((told for told in one.found or one.few if told.goal == goal), None)
    value = "-" if told is None else ("" if one.found else "~") + _shown(goal.key, told.value)
    ends = None if told is None or not one.found else told.band
    band = "-" if ends is None else " to ".join(_shown(goal.key, end) for end in ends)
    return [value, band, "-" if least is None else _shown(goal.key, least.value)]


def by_machine(some: Sequence[Candidate]) -> list[tuple[Machine, list[Candidate]]]:
    """Candidates by machine, in order."""
    found: dict[Machine, list[Candidate]] = {}
    for one in some:
        found.setdefault(one.machine, []).append(one)
    return list(found.items())


def spokesman(own: Sequence[Candidate]) -> Candidate:
    """The candidate that tells most of a machine: the first setting's best that reaches, else the nearest."""
    reaching = [one for one in own if one.state == REACHES]
    if reaching:
        first = reaching[0].spec
        same = [one for one in reaching if budget_of(one.spec) == budget_of(first)]
        return min(same, key=lambda one: (-one.margin_frac, one.label))
    return closest(own) or next((one for one in own if one.ready), own[0])


def verdict(one: Candidate) -> str:
    """In a few words."""
    if one.state == REACHES and not all(told.sure for told in one.found):
        return "reaches, inside the band"
    if one.state == MISSES and one.reason:
        return "misses: the queue grows"
    if one.state in VERDICTS:
        return VERDICTS[one.state]
    return (
        "misses"
        if one.found and any(told.sure and not told.met for told in one.found)
        else ("misses, inside the band" if one.found else "misses on few requests")
    )


def not_run(planned: Planned) -> list[str]:
    """A line for each reason, with the machines it holds for."""
    by_reason: dict[str, list[Candidate]] = {}
    for one in planned.candidates:
        if one.state == NOT_RUN:
            by_reason.setdefault(one.reason, []).append(one)
    lines = []
    for reason, some in list(by_reason.items())[:MOST_REASONS]:
        who = f"{some[0].label} on {some[0].machine.name}" if len(some) == 1 else show_count(len(some), "candidate")
        lines.append(f"not run: {who}: {reason}")
    left = sum(len(some) for some in list(by_reason.values())[MOST_REASONS:])
    return [*lines, *([f"not run: {show_count(left, 'candidate')} more; --json says why"] if left else [])]


def remedy_table(remedies: Mapping[str, Sequence[Remedy]]) -> str:
    """What would have to be true of the machines that fail, by their names, one figure changed at a time."""
    from sim.base.tables import prose, render, table

    shown = table("to reach it", "changed alone", "is", "would have to be", "found by")
    prose(shown, 1, 2, 3, 4)
    lost = []
    for name, found in remedies.items():
        if all(one.need is None for one in found):
            lost.append(name)
            continue
        for at, one in enumerate(found):
            shown.add_row("" if at else name, *one.said, one.found_by)
    text = render(shown) if shown.row_count else ""
    told = [one for found in remedies.values() for one in found if one.need is not None]
    if any(one.how == BOUND for one in told):
        text += "the bound: needed whatever the policy, and perhaps not enough for any\n"
    if any(one.what == "precision" for one in told):
        text += "precision: routing is taken as it is, quality is not looked at\n"
    if lost:
        figures = dict.fromkeys(one.said[0] for name in lost for one in remedies[name])
        text += f"no change of one figure alone would do ({', '.join(figures)}): {', '.join(lost)}\n"
    return text
