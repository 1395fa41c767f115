"""The page of a plan: goals, the machine and policy that reach them for least, and what became of every candidate."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.pages.page import Column as PageColumn
from sim.pages.page import Facts, Note, Page, Plot, Section, Table, filled
from sim.pages.plots import axis, bars, points
from sim.results.figure import label_of, plot_unit
from sim.studies.answer import Answer, Column, Shown
from sim.studies.explain import Explained
from sim.studies.plan.candidate import Candidate
from sim.studies.plan.goal import Goal
from sim.studies.plan.plan import Plan
from sim.studies.plan.ways import ComparedWays

MOST_CANDIDATES = 2_000
KINDS: tuple[type[Answer], ...] = (Plan, ComparedWays, Explained)


def of_plan(data: dict[str, Any]) -> Page:
    """Of what `moesim plan --json`, or `moesim explain --json`, printed. Raises BadInput for anything else."""
    try:
        found = msgspec.convert(data, next(kind for kind in KINDS if kind.ROWS in data))
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"plan: not as `moesim plan --json` prints it ({error}); plan again with this version") from None
    if isinstance(found, Plan):
        sections = _of_plan(found)
    else:
        sections = [*(_measured(found) if isinstance(found, Explained) else []), *_sections(found)]
    if not sections:
        raise BadInput("plan, got an answer without a list: nothing was found; plan for other machines or goals")
    return Page("plan", "A plan", found.answer(), [line for line in (found.hosts, found.trace) if line], sections)


def _sections(found: Answer) -> list[Section]:
    return [section for one in found.tables() if (section := _section(one)).blocks]


def _section(shown: Shown) -> Section:
    section = Section(shown.name, shown.title, shown.sentence)
    section.blocks += [filled(shown)] if shown.rows else []
    section.blocks += [Note(shown.notes)] if shown.notes else []
    return section


def _measured(found: Explained) -> list[Section]:
    rows = {
        "measured": found.measured_tpot_s,
        "predicted": found.predicted.value,
        "predicted, from": found.predicted.low,
        "predicted, to": found.predicted.high,
        "lower bound of any lossless policy": found.bound_tpot_s,
    }
    times = [(name, time_s) for name, time_s in rows.items() if time_s is not None]
    trace = bars("time per token", [name for name, _ in times], [value for _, value in times], 0, across=True)
    layout = {"xaxis": axis("TPOT", "s", rangemode="tozero"), "yaxis": {"type": "category", "autorange": "reversed"}}
    plot = Plot("times", "Measured, predicted and the bound.", [trace], layout, 260)
    table = Table("Times per token.", [PageColumn("what"), PageColumn("TPOT", "s")], times)
    sentence = "Where the measurement lies inside the band, there is nothing to explain."
    return [Section("times", "Measured beside predicted", sentence, [plot, table])]


def _of_plan(plan: Plan) -> list[Section]:
    if not plan.goals or not plan.candidates or len(plan.candidates) > MOST_CANDIDATES:
        n = len(plan.candidates)
        raise BadInput(f"plan, got {n} candidates: 1 to {MOST_CANDIDATES} and a goal make a page; plan for fewer cards")
    counts = Counter(one.state.replace("_", " ") for one in plan.candidates)
    counted = ", ".join(f"{n:,} {state}" for state, n in counts.items())
    every = Shown(
        *("candidates", "What became of each", f"{show_count(len(plan.candidates), 'candidate')}: {counted}."),
        _columns(plan),
        plan.candidates,
    )
    work = [(key.replace("_", " "), value) for key, value in plan.work.items()]
    table = Table("What was replayed to find out.", [PageColumn("what"), PageColumn("number", "x")], work)
    prices = [Note([f"Prices: {plan.prices.file}, in {plan.prices.unit}."])] if plan.prices else []
    goals = [_goal(plan, goal, at) for at, goal in enumerate(plan.goals, 1)]
    sections = [*_best(plan), *goals, *_sections(plan), _section(every)]
    return [*sections, Section("work", "How it was found", "", [*prices, table])]


def _columns(plan: Plan) -> list[Column]:
    """Of every candidate, the cheapest machine first."""
    several = any(one.replicas > 1 for one in plan.candidates)
    price = [] if plan.prices is None else [Column(f"price, {plan.prices.unit}", lambda one: one.price, "x")]

    def value(key: str, one: Candidate) -> float | None:
        """Of all requests, else of few, else the bound."""
        every = (*one.bounds, *one.figures_of_few_requests, *one.figures)
        return {told.key: told.value for told in every}.get(key)

    return [
        Column("policy", lambda one: one.policy),
        Column("machine", lambda one: one.hw),
        Column("GPUs", lambda one: one.gpus, "n"),
        *([Column("replicas", lambda one: one.replicas, "n")] if several else []),
        *price,
        Column("outcome", lambda one: one.state.replace("_", " ")),
        *(Column(goal.key, partial(value, goal.key), plot_unit(goal.key)) for goal in plan.goals),
        Column(label_of("hit_rate"), lambda one: one.hit_rate, "frac"),
        Column(label_of("peak_vram_bytes"), lambda one: one.peak_vram_bytes, "bytes"),
        Column("bound by", lambda one: one.bottleneck),
        Column("reason", lambda one: one.reason),
    ]


def _best(plan: Plan) -> list[Section]:
    best = plan.best
    if best is None:
        return []
    items: list[tuple[str, Any, str, str]] = [("machine", best.machine, "", ""), ("policy", best.policy, "", "")]
    items.append(("replicas", best.replicas if best.replicas > 1 else None, "n", ""))
    items.append(("price", best.price, "x", "" if plan.prices is None else plan.prices.unit))
    for one in best.figures:
        items.append((one.key, one.value, plot_unit(one.key), one.band))
        items.append((f"margin of {one.key}", one.margin_frac, "frac", "on the right side of the goal"))
    if (rate := plan.up_to_rate) is not None:
        items.append(("reached up to, requests/s", rate.per_s, "x", "by bisection"))
        items.append(("times the rate asked for", rate.times, "x", ""))
    items.append(("peak VRAM", best.peak_vram_bytes, "bytes", ""))
    return [Section("best", "The cheapest that reaches it", "", [Facts([one for one in items if one[1] is not None])])]


def _goal(plan: Plan, goal: Goal, at: int) -> Section:
    """Every candidate's figure, as it was found: from all requests, from few, or its bound."""
    kinds = {"all requests": "figures", "few requests": "figures_of_few_requests", "lower bound alone": "bounds"}
    found: dict[str, list[tuple[str, float, str]]] = {said: [] for said in kinds}
    for one in plan.candidates:
        readings = ((said, told) for said, where in kinds.items() for told in getattr(one, where))
        if first := next(((said, told) for said, told in readings if told.key == goal.key), None):
            found[first[0]].append((one.machine, first[1].value, one.policy))
    traces = [
        points(said, names, values, hue, text=[policy for *_, policy in some], hoverinfo="x+y+text")
        for hue, (said, some) in enumerate(found.items())
        if (names := [name for name, *_ in some]) and (values := [value for _, value, _ in some])
    ]
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal.bound, "y1": goal.bound}
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": axis(goal.key, plot_unit(goal.key), type="log" if goal.bound > 0 else "linear"),
        "shapes": [across | {"line": {"color": "#7F7F7F", "width": 1.5, "dash": "dash"}}],
    }
    plot = Plot(f"goal-{at}", f"{goal.key} of every candidate, by machine.", traces, layout, 420)
    said = f"{goal.key} {goal.sign} {goal.written}"
    sentence = (
        f"The dashed line is the goal, {said}; a point is a policy on that machine, from all requests, from few of "
        "them, or by its lower bound where that was enough to rule it out."
    )
    return Section(f"goal-{at}", f"Goal: {said}", sentence, [plot])
