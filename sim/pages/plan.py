"""The page of a plan: goals, the machine and policy that reach them for least, and what became of every candidate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_count, show_frac, show_rate
from sim.pages.page import Column, Facts, Note, Page, Plot, Section, Table
from sim.pages.plots import axis, bars, points
from sim.results.figure import plot_unit, show_figure

MOST_CANDIDATES = 2_000
MARGIN = "margin"


class Goal(msgspec.Struct):
    key: str
    sign: str
    bound: float
    written: str


class Reading(msgspec.Struct):
    key: str
    value: float | None
    low: float | None = None
    high: float | None = None
    margin_frac: float | None = None
    met: bool | None = None


class Candidate(msgspec.Struct):
    policy: str
    hw: str
    state: str
    gpus: int = 1
    replicas: int = 1
    price: float | None = None
    reason: str | None = None
    figures: list[Reading] = []
    figures_of_few_requests: list[Reading] = []
    bounds: list[Reading] = []
    hit_rate: float | None = None
    peak_vram_bytes: int | None = None
    bottleneck: str | None = None
    labels: list[str] | None = None

    @property
    def cards(self) -> str:
        """`3 replicas of rtx3090 x 2`."""
        one = f"{self.hw}{f' x {self.gpus}' if self.gpus > 1 else ''}"
        return one if self.replicas == 1 else f"{self.replicas} replicas of {one}"


class UpTo(msgspec.Struct):
    times: float
    per_s: float
    lost_at: float | None


class Prices(msgspec.Struct):
    file: str
    unit: str


class Plan(msgspec.Struct):
    answer: str
    reached: bool
    goals: list[Goal]
    trace: str
    candidates: list[Candidate]
    work: dict[str, float]
    hosts: str | None = None
    prices: Prices | None = None
    suggestions: dict[str, list[dict[str, Any]]] = {}
    best: Candidate | None = None
    up_to_rate: UpTo | None = None


class Answer(msgspec.Struct):
    """Other answers: least memory, or ways of one machine (`plan`); a measurement beside the prediction (`explain`)."""

    answer: str
    trace: str
    hosts: str | None = None
    machines: list[dict[str, Any]] = []
    failing: list[str] = []
    ways: list[dict[str, Any]] = []
    crossovers: list[dict[str, Any]] = []
    explanations: list[dict[str, Any]] = []
    measured_tpot_s: float | None = None
    predicted: Reading | None = None
    bound_tpot_s: float | None = msgspec.field(name="lower_bound.tpot_s", default=None)


LISTS = {
    "machines": ("Machines", "The least memory with which each machine reaches the goals."),
    "ways": ("Ways", "What one machine can do with experts that are not there, fastest first."),
    "crossovers": ("Where they cross", "At which figure of the machine one way overtakes the other."),
    "explanations": ("What the difference could be", "What would have to be so for the simulation to give the time."),
}


def of_plan(data: dict[str, Any]) -> Page:
    """Of what `moesim plan --json` printed. Raises BadInput for anything else."""
    try:
        if "candidates" not in data:
            return _of_answer(msgspec.convert(data, Answer))
        plan = msgspec.convert(data, Plan)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"plan: not as `moesim plan --json` prints it ({error}); plan again with this version") from None
    if not plan.goals or not plan.candidates or len(plan.candidates) > MOST_CANDIDATES:
        n = len(plan.candidates)
        raise BadInput(f"plan, got {n} candidates: 1 to {MOST_CANDIDATES} and a goal make a page; plan for fewer cards")
    goals = [_goal(plan, goal, at) for at, goal in enumerate(plan.goals)]
    sections = [*_best(plan), *goals, *_suggestions(plan), _all(plan), _work(plan)]
    return Page("plan", "A plan", plan.answer, [*([plan.hosts] if plan.hosts else []), plan.trace], sections)


def _of_answer(found: Answer) -> Page:
    sections: list[Section] = []
    if found.measured_tpot_s is not None and found.predicted is not None:
        rows: list[list[Any]] = [["measured", found.measured_tpot_s], ["predicted", found.predicted.value]]
        rows += [["predicted, from", found.predicted.low], ["predicted, to", found.predicted.high]]
        rows.append(["lower bound of any lossless policy", found.bound_tpot_s])
        times = [row for row in rows if row[1] is not None]
        trace = bars("time per token", [str(name) for name, _ in times], [value for _, value in times], 0, across=True)
        layout = {
            "xaxis": axis("TPOT", "s", rangemode="tozero"),
            "yaxis": {"type": "category", "autorange": "reversed"},
        }
        plot = Plot("times", "Measured, predicted and the bound.", [trace], layout, 260)
        table = Table("Times per token.", [Column("what"), Column("TPOT", "s")], times)
        sentence = "Where the measurement lies inside the band, there is nothing to explain."
        sections.append(Section("times", "Measured beside predicted", sentence, [plot, table]))
    for name, (title, sentence) in LISTS.items():
        if of := getattr(found, name):
            sections.append(Section(name, title, sentence, [_flat(f"{title}.", of)]))
    if found.failing:
        sections.append(Section("failing", "Not with all their memory", "", [Note(found.failing)]))
    if not sections:
        raise BadInput("plan, got an answer without a list: nothing was found; plan for other machines or goals")
    return Page("plan", "A plan", found.answer, [*([found.hosts] if found.hosts else []), found.trace], sections)


def _flat(caption: str, rows: list[dict[str, Any]]) -> Table:
    """A list of objects as rows; what lies deeper is written out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = []
    for name in names:
        numbers = all(isinstance(row.get(name), int | float | None) for row in rows)
        columns.append(Column(name.replace("_", " "), plot_unit(name) if numbers else ""))
    return Table(caption, columns, [[_cell(row.get(name)) for name in names] for row in rows])


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(child)}" for key, child in value.items() if child is not None)
    if isinstance(value, list):
        return "; ".join(str(_cell(child)) for child in value)
    return value


def _best(plan: Plan) -> list[Section]:
    best = plan.best
    if best is None:
        return []
    named = [("machine", best.hw, "", show_count(best.gpus, "GPU")), ("policy", best.policy, "", "")]
    items: list[tuple[str, Any, str, str]] = [*named]
    if best.price is not None and plan.prices is not None:
        items.append(("price", best.price, "x", plan.prices.unit))
    for one in best.figures:
        band = (
            ""
            if one.low is None or one.high is None
            else f"{show_figure(one.key, one.low)} to {show_figure(one.key, one.high)}"
        )
        items.append((one.key, one.value, plot_unit(one.key), band))
        items.append((f"{MARGIN} of {one.key}", one.margin_frac, "frac", "on the right side of the goal"))
    if best.replicas > 1:
        items.append(("replicas", best.replicas, "n", ""))
    if (rate := plan.up_to_rate) is not None:
        items.append(("reached up to, requests/s", rate.per_s, "x", "by bisection"))
        items.append(("times the rate asked for", rate.times, "x", ""))
    if best.peak_vram_bytes is not None:
        items.append(("peak VRAM", best.peak_vram_bytes, "bytes", ""))
    return [Section("best", "The cheapest that reaches it", "", [Facts(items)])]


def _goal(plan: Plan, goal: Goal, at: int) -> Section:
    """Every candidate's figure, as it was found: from all requests, from few, or its bound."""
    kinds = (("all requests", "figures"), ("few requests", "figures_of_few_requests"), ("lower bound alone", "bounds"))
    traces = []
    done: set[int] = set()
    for hue, (said, where) in enumerate(kinds):
        found = [
            (one.cards, reading.value, one.policy, i)
            for i, one in enumerate(plan.candidates)
            for reading in getattr(one, where)
            if reading.key == goal.key and reading.value is not None and i not in done
        ]
        done |= {i for *_, i in found}
        if found:
            names, values, policies = ([one[k] for one in found] for k in range(3))
            traces.append(points(said, names, values, hue, text=policies, hoverinfo="x+y+text"))
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal.bound, "y1": goal.bound}
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": axis(goal.key, plot_unit(goal.key), type="log" if goal.bound > 0 else "linear"),
        "shapes": [across | {"line": {"color": "#7F7F7F", "width": 1.5, "dash": "dash"}}],
    }
    plot = Plot(f"goal-{at + 1}", f"{goal.key} of every candidate, by machine.", traces, layout, 420)
    sentence = (
        f"The dashed line is the goal, {goal.key} {goal.sign} {goal.written}; a point is a policy on that machine, "
        "from all requests, from few of them, or by its lower bound where that was enough to rule it out."
    )
    return Section(f"goal-{at + 1}", f"Goal: {goal.key} {goal.sign} {goal.written}", sentence, [plot])


def _all(plan: Plan) -> Section:
    keys = [goal.key for goal in plan.goals]
    price = [Column(f"price, {plan.prices.unit}", "x")] if plan.prices is not None else []
    several = any(one.replicas > 1 for one in plan.candidates)
    columns = [Column("policy"), Column("machine"), Column("GPUs", "n")]
    columns += [*([Column("replicas", "n")] if several else []), *price, Column("outcome")]
    columns += [Column(key, plot_unit(key)) for key in keys]
    columns += [Column("hits", "frac"), Column("peak VRAM", "bytes"), Column("bound by"), Column("reason")]
    rows: list[list[Any]] = []
    for one in plan.candidates:
        found = {reading.key: reading.value for reading in (*one.bounds, *one.figures_of_few_requests, *one.figures)}
        cells = [one.policy, one.hw, one.gpus, *([one.replicas] if several else [])]
        cells += [*([one.price] if price else []), one.state.replace("_", " ")]
        cells += [found.get(key) for key in keys]
        rows.append([*cells, one.hit_rate, one.peak_vram_bytes, one.bottleneck, one.reason])
    counted = Counter(one.state.replace("_", " ") for one in plan.candidates)
    sentence = f"{show_count(len(rows), 'candidate')}: {', '.join(f'{n:,} {state}' for state, n in counted.items())}."
    caption = "Every candidate, cheapest machine first; figures of all requests, else of few, else the bound."
    return Section("candidates", "What became of each", sentence, [Table(caption, columns, rows)])


def _suggestions(plan: Plan) -> list[Section]:
    rows = [
        {"machine": name, **one, "now": _needed(one, "now"), "need": _needed(one, "need")}
        for name, some in plan.suggestions.items()
        for one in some
    ]
    if not rows:
        return []
    sentence = "What a machine that fails would need, one figure at a time."
    return [
        Section(
            "suggestions",
            "What would have to be true",
            sentence,
            [_flat("What there is now, and what it would take.", rows)],
        )
    ]


def _needed(suggestion: dict[str, Any], which: str) -> Any:
    """A figure of a suggestion in its unit."""
    value, what = suggestion.get(which), suggestion.get("what")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if what == "bandwidth":
        return show_rate(value)
    if what == "vram":
        return show_count(int(value), "expert")
    return show_frac(value) if what == "hit_rate" else value


def _work(plan: Plan) -> Section:
    rows: list[list[Any]] = [[key.replace("_", " "), value] for key, value in plan.work.items()]
    prices = [Note([f"Prices: {plan.prices.file}, in {plan.prices.unit}."])] if plan.prices else []
    table = Table("What was replayed to find out.", [Column("what"), Column("number", "x")], rows)
    return Section("work", "How it was found", "", [*prices, table])
