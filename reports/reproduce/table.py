"""Answer the chosen rows: closed forms at once, experiments through the simulator, on every kind of trace asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reports.reproduce import inputs, judge
from reports.reproduce.answer import Answer, OnTrace, Orders, Reproduction, ToldTraces, Totals
from reports.reproduce.constants import Fitted, NotFitted, fit, solve
from reports.reproduce.engine_forms import METHODS
from reports.reproduce.rows import (
    FLAGS,
    SCORED,
    Constant,
    Experiment,
    Figure,
    Flag,
    Row,
    TraceKind,
    load_constants,
    load_experiments,
    load_rows,
)
from reports.reproduce.runs import (
    Runs,
    Steps,
    cases_of,
    drawn,
    figures_of,
    own_constants,
    simulate,
    systems_of,
    told_of,
    traces_of,
)
from sim import __version__
from sim.base.errors import BadInput

SCHEMA = "moesim.reproduce/2"
TOLD = (
    *("id", "flag", "source", "where", "model", "testbed", "setting", "metric", "unit", "published", "check", "note"),
    *("reason", "unknown"),
)
"""Of a row, what its answer repeats."""


def reproduce(
    chosen: list[Row],
    kinds: tuple[TraceKind, ...],
    folder: Path | None,
    workers: int,
    steps: Steps,
    stack: str = "bare",
) -> Reproduction:
    """The table as one object: what was published, simulated and judged per row, constants, traces and totals.

    Args:
        kinds: traces to run experiments on; (): each on the one it is scored on.
        folder: keeps traces and results of runs for the next time.
        steps: opens a progress bar. stack: what runs the kernels in experiments whose row has no constant.

    Raises:
        BadInput: a file that contradicts itself, or a folder that cannot be used.
    """
    rows, experiments, constants = load_rows(), load_experiments(), load_constants()
    asked = [row for row in chosen if row.experiment and row.check != "fit"]
    for row in chosen:
        check_names(row, experiments, constants)
    used = [constants[name] for name in sorted(_names(chosen, experiments))]
    simulated: dict[str, dict[TraceKind, dict[str, Any]]] = {row.id: {} for row in asked}
    fitted: dict[str, Fitted] = {}
    lost: dict[str, str] = {}
    for one in used:
        if not one.solved:
            try:
                fitted[one.id] = fit(one, rows)
            except NotFitted as error:
                lost[one.id] = str(error)
    told: dict[TraceKind, ToldTraces] = {}
    solved = [one for one in used if one.solved]
    if asked or solved:
        folder = folder or inputs.scratch()
        rest = [rows[one.row] for one in solved]
        wanted = {
            drawn(experiments[row.experiment], str(case["model"]))
            for row in (*asked, *rest)
            for case in cases_of(row, experiments)
        }
        longest_first = sorted(wanted, key=lambda one: (-one.n_requests, -one.prompt_tokens, one))
        traces = traces_of(longest_first, kinds, folder, workers, steps)
        told = told_of(traces)
        runs = Runs(experiments, traces, folder, workers, stack)
        if solved:
            with steps("fitting constants") as done:
                found, why = solve(solved, rows, figures_of(solved, rows, runs, done))
                fitted, lost = fitted | found, lost | why
        with steps("simulating") as done:
            simulated = simulate(asked, kinds, fitted, runs, done)
    answered = [answer_of(row, fitted, simulated.get(row.id, {}), experiments) for row in chosen]
    for row, answer in zip(chosen, answered, strict=True):
        if answer["constant"]:
            answer["carried"] = is_carried(row, constants[row.constant], rows, experiments)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "engine": stack,
        "traces": told,
        "constants": [
            {
                "id": one.id,
                "testbed": one.testbed,
                "seconds": fitted[one.id].value_s,
                "form": one.form,
                "row": one.row,
                "label": one.label,
            }
            for one in used
            if one.id in fitted
        ],
        "not_fitted": lost,
        "rows": answered,
        "totals": totals(answered),
    }


def _names(chosen: list[Row], experiments: dict[str, Experiment]) -> set[str]:
    """Ids of the constants that rows rest on: their own, and those of the systems they compare."""
    judged = [row for row in chosen if row.experiment and row.check != "fit"]
    of_systems = {
        experiments[row.experiment].constants.get(system)
        for row in judged
        for system in systems_of(row, experiments[row.experiment])
    }
    return {row.constant for row in chosen if row.constant} | {name for name in of_systems if name}


def check_names(row: Row, experiments: dict[str, Experiment], constants: dict[str, Constant]) -> None:
    for name, known, what in (
        (row.method, METHODS, "method"),
        (row.experiment, experiments, "experiment"),
        (row.constant, constants, "constant"),
    ):
        if name and name not in known:
            raise BadInput(f"row {row.id}, got {what} {name!r}: there is none of that name; correct the row")
    of_systems = set(experiments[row.experiment].constants.values()) if row.experiment else set()
    for name in sorted(of_systems | ({row.constant} if row.constant else set())):
        if name not in constants:
            raise BadInput(f"experiment {row.experiment}, got constant {name!r}: none of that name; correct it")
        if constants[name].row == row.id and row.check != "fit":
            raise BadInput(f"row {row.id}, got constant {name!r}: it is fitted to this row; use check: fit")
    if row.constant and of_systems:
        raise BadInput(f"row {row.id}, got a constant beside those of its systems: a system has one at most; drop one")


def answer_of(
    row: Row, fitted: dict[str, Fitted], on: dict[TraceKind, dict[str, Any]], experiments: dict[str, Experiment]
) -> Answer:
    """One row of the result."""
    told: Answer = {name: getattr(row, name) for name in TOLD}  # type: ignore[assignment]
    told["constant"] = row.constant if row.constant in fitted else ""
    if row.added:
        told["added"] = True
    if row.method:
        # A closed form with a constant is about the machine the constant was fitted on.
        found_on = fitted.get(row.constant)
        settings = found_on.settings(found_on.constant.hw, row.model, "bf16") if found_on else {}
        values: dict[str, Figure] = METHODS[row.method](row, settings)
        told["simulated"] = {label: values[label] for label in row.published}
        told["ratio"] = {label: judge.ratio(figure, values[label]) for label, figure in row.published.items()}
        if row.check == "ladder":
            told["slope"] = judge.slope(row, values)
    elif row.experiment and row.check != "fit":
        experiment = experiments[row.experiment]
        told["experiment"] = {"name": row.experiment, "why": experiment.why}
        told["scored"] = experiment.scored
        told["not_sized"] = inputs_not_sized(row)
        own = own_constants(row, experiment)
        told["constants"] = {system: name for system, name in own.items() if name in fitted}
        told["traces"] = {
            kind: _judged(row, kind, found, told["constants"]) for kind, found in on.items() if found["values"]
        }
        told["left_out"] = {kind: found["left_out"] for kind, found in on.items() if found["left_out"]}
    told["status"] = _status(row, told)
    return told


def _judged(row: Row, kind: TraceKind, found: dict[str, Any], constants: dict[str, str]) -> OnTrace:
    values: dict[str, Figure] = found["values"]
    labels = [*row.published, *row.beside]
    told: OnTrace = {"simulated": {label: values[label] for label in labels if label in values}}
    if not row.other_quantity:
        told["ratio"] = {
            label: judge.ratio(figure, values[label]) for label, figure in row.published.items() if label in values
        }
    if found["did_not_run"]:
        told["did_not_run"] = found["did_not_run"]
    if row.check == "order":
        told["pairs"] = [pair._asdict() for pair in judge.pairs(row, found["cases"])]  # type: ignore[misc]
        told["counted"] = kind not in row.fitted_traces and not found["did_not_run"]
    if "fitted" in found and constants:
        with_it = found["fitted"]
        told["fitted"] = {
            "simulated": with_it["values"],
            "right": sum(pair.right for pair in judge.pairs(row, with_it["cases"])),
        }
    told["cases"] = {label: sum(label in case for case in found["cases"]) for label in told["simulated"]}
    return told


def _status(row: Row, told: Answer) -> str:
    """reached, order only, missed, shown, fitted, not applicable or not run.

    An order is reached when all its pairs are right and its magnitudes are within `judge.FACTOR`; without these it is
    `order only`, also where another quantity was simulated, which has no magnitude to compare.
    """
    if row.check in ("none", "fit", "shown"):
        return {"none": "not applicable", "fit": "fitted", "shown": "shown"}[row.check]
    if row.method:
        return "reached" if judge.reached(row, told["simulated"]) else "missed"
    on = told["traces"].get(told["scored"])
    if on is None or "did_not_run" in on:
        return "not run"
    if row.check == "order":
        if not on["counted"]:
            return "shown"
        if not on["pairs"]:
            return "not run"
        if not all(pair["right"] for pair in on["pairs"]):
            return "missed"
        sized = [] if row.other_quantity else magnitudes(told, on)
        return "reached" if sized and all(judge.factor(one) <= judge.FACTOR for one in sized) else "order only"
    return "reached" if judge.reached(row, on["simulated"]) else "missed"


def magnitudes(row: Answer, on: OnTrace) -> list[float]:
    """Ratios of an order on one kind of trace, of the systems that are judged."""
    left_away = row.get("not_sized", ())
    return [one for label, one in on.get("ratio", {}).items() if one is not None and label not in left_away]


def inputs_not_sized(row: Row) -> list[str]:
    """Systems whose magnitudes are not judged: the first of a scaled row stands at its printed figure by construction,
    and where only pairs with one system are judged, the others' are none of them."""
    if row.pairs_of:
        return [label for label in row.published if label not in (row.pairs_of, row.own)]
    return list(row.published)[:1] if row.relation == "ratio" else []


def totals(answered: list[Answer]) -> Totals:
    """Counts per flag and status; right pairs of orders, and how far magnitudes are off, on the traces that are scored
    and per kind of trace; ids of the rows that rest on a constant, or whose mechanism did not run."""
    flags: dict[Flag, dict[str, int]] = {flag: {"rows": 0} for flag in FLAGS}
    counted: dict[str, list[tuple[Answer, OnTrace]]] = {"scored": []}
    idle: list[str] = []
    for row in answered:
        count = flags[row["flag"]]
        count["rows"] += 1
        count[row["status"]] = count.get(row["status"], 0) + 1
        scored = row.get("scored", SCORED)
        for kind, on in row.get("traces", {}).items():
            if kind == scored and "did_not_run" in on:
                idle.append(row["id"])
            if row["check"] == "order" and on["counted"]:
                for name in (kind, "scored") if kind == scored else (kind,):
                    counted.setdefault(name, []).append((row, on))
    apart = {name: [one for one in counted["scored"] if _rests_on(one[0]) == name] for name in RESTS}
    return {
        "flags": {flag: count for flag, count in flags.items() if count["rows"]},
        "scored": _orders(counted.pop("scored")),
        "apart": {name: {**_orders(of), "ids": [row["id"] for row, _ in of]} for name, of in apart.items() if of},
        "did_not_run": idle,
        "orders": {kind: _orders(of) for kind, of in sorted(counted.items())},
    }


RESTS = (
    "no constant",
    "a constant of its testbed",
    "a constant of its testbed, fitted to another model",
    "a constant of a single system",
)


def _rests_on(row: Answer) -> str:
    if row.get("constants"):
        return RESTS[3]
    return RESTS[1 + row.get("carried", False)] if row["constant"] else RESTS[0]


def is_carried(row: Row, constant: Constant, rows: dict[str, Row], experiments: dict[str, Experiment]) -> bool:
    """Whether a row is about a model that its constant was not fitted to."""
    source = rows[constant.row]
    known = {constant.model} if constant.model else {str(case["model"]) for case in cases_of(source, experiments)}
    asked = {str(case["model"]) for case in cases_of(row, experiments)} if row.experiment else {row.model}
    return not asked <= known


def _orders(counted: list[tuple[Answer, OnTrace]]) -> Orders:
    """Pairs that are right, as judged and with the constants of single systems, and the spread of magnitudes."""
    right = [sum(pair["right"] for pair in on["pairs"]) for _, on in counted]
    fitted = [on["fitted"]["right"] if "fitted" in on else n for (_, on), n in zip(counted, right, strict=True)]
    ratios = [one for row, on in counted for one in magnitudes(row, on)]
    return {
        "right": sum(right),
        "right_fitted": sum(fitted),
        "pairs": sum(len(on["pairs"]) for _, on in counted),
        "magnitudes": judge.spread(ratios),
    }
