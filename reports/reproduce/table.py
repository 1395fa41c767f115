"""Answer the chosen rows: closed forms at once, experiments through the simulator, on every kind of trace asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reports.reproduce import inputs, judge, work
from reports.reproduce.closed import METHODS, model_of
from reports.reproduce.constants import Fitted, fit
from reports.reproduce.rows import (
    FLAGS,
    SCORED,
    Constant,
    Experiment,
    Figure,
    Row,
    TraceKind,
    load_constants,
    load_experiments,
    load_rows,
)
from sim import __version__
from sim.errors import BadInput
from sim.models import Model
from sim.setup import shape_of
from sim.spec import RunSpec

SCHEMA = "moesim.reproduce/1"
Steps = Callable[[str], Any]  # a title -> a context that yields progress(done, total)


class Unit(NamedTuple):
    """One run a row asks for."""

    row: str
    kind: TraceKind
    case: int
    system: str


def reproduce(
    chosen: list[Row], kinds: tuple[TraceKind, ...], folder: Path | None, workers: int, steps: Steps,
    stack: str = "bare",
) -> dict[str, Any]:  # fmt: skip
    """The table as one object: what was published, simulated and judged per row, constants, traces and totals.

    Args:
        kinds: traces to run experiments on. folder: keeps traces and results of runs for the next time.
        steps: opens a progress bar. stack: what runs the kernels in experiments whose row has no constant.

    Raises:
        BadInput: a file that contradicts itself, or a folder that cannot be used.
    """
    rows, experiments, constants = load_rows(), load_experiments(), load_constants()
    asked = [row for row in chosen if row.experiment]
    for row in chosen:
        _known(row, experiments, constants)
    names = {row.constant for row in chosen if row.constant}
    simulated: dict[str, dict[TraceKind, dict[str, Any]]] = {row.id: {} for row in asked}
    fitted: dict[str, Fitted] = {}
    told: dict[str, Any] = {}
    if asked or any(constants[name].form == "per_layer" for name in names):
        folder = folder or inputs.scratch()
        with work.pool(workers) as executor:
            wanted = {(str(case["model"]), experiments[row.experiment].prompt_tokens)
                      for row in asked for case in _cases(row, experiments)}  # fmt: skip
            wanted |= {(constants[name].model, 0) for name in names if constants[name].form == "per_layer"}
            traces = _traces(sorted(wanted), kinds, folder, executor, steps)
            told = _told(traces)
            for name in sorted(names):
                fitted[name] = fit(constants[name], rows, _resident(constants[name], traces))
            simulated = _simulate(asked, experiments, fitted, traces, folder, executor, steps, stack)
    else:
        fitted = {name: fit(constants[name], rows) for name in sorted(names)}
    answered = [_answer(row, fitted, simulated.get(row.id, {}), experiments) for row in chosen]
    return {"schema": SCHEMA, "version": __version__, "stack": stack, "traces": told,
            "constants": [_told_constant(found) for found in fitted.values()],
            "rows": answered, "totals": totals(answered)}  # fmt: skip


def _known(row: Row, experiments: dict[str, Experiment], constants: dict[str, Constant]) -> None:
    for name, known, what in ((row.method, METHODS, "method"), (row.experiment, experiments, "experiment"),
                              (row.constant, constants, "constant")):  # fmt: skip
        if name and name not in known:
            raise BadInput(f"row {row.id}, got {what} {name!r}: there is none of that name; correct the row")
    if row.constant and constants[row.constant].row == row.id:
        raise BadInput(f"row {row.id}, got constant {row.constant!r}: it is fitted to this row; use check: fit")


def _cases(row: Row, experiments: dict[str, Experiment]) -> list[dict[str, Any]]:
    cases = experiments[row.experiment].cases
    return [cases[i] for i in row.cases] if row.cases else list(cases)


Traces = dict[TraceKind, dict[str, Path]]


def _key(name: str, kind: TraceKind, prompt_tokens: int) -> str:
    """What a trace is known by: its model, and the length of its prompts where that is the paper's own."""
    return f"{name}, prompts of {prompt_tokens} tokens" if kind == "b" and prompt_tokens else name


def _traces(
    wanted: list[tuple[str, int]], kinds: tuple[TraceKind, ...], folder: Path, executor: Any, steps: Steps
) -> Traces:
    """Kind -> model -> trace, for the models that have one of the kind. (b) is always made: constants may need it.

    Args:
        wanted: models, each with the mean length of its prompts on a synthetic trace (0: the default's).
    """
    found: Traces = {kind: {} for kind in kinds}
    with steps("drawing synthetic traces") as done:
        paths = work.each(executor, inputs.synthesise, [(name, str(folder), n) for name, n in wanted], done)
    found["b"] = {_key(name, "b", n): Path(path) for (name, n), path in zip(wanted, paths, strict=True)}
    public = inputs.public_traces(folder) if "c" in kinds else {}
    for name in sorted({name for name, _ in wanted}):
        model: Model = model_of(name)
        bundled = inputs.bundled_for(model) if "a" in kinds else None
        if bundled is not None:
            found["a"][name] = bundled
        if shape_of(model) in public:
            found["c"][name] = public[shape_of(model)]
    return found


def _told(traces: Traces) -> dict[str, Any]:
    """What every trace is, with its labels, for the reader of the table."""
    from traces.reader import Trace

    told: dict[str, Any] = {}
    for kind, by_model in traces.items():
        told[kind] = {"is": inputs.TITLES[kind], "of": {}}
        for name, path in by_model.items():
            with Trace(path) as trace:
                told[kind]["of"][name] = {
                    "trace": path.name, "recorded_model": trace.header.model, "requests": trace.n_requests,
                    "tokens": trace.n_tokens, "labels": list(trace.header.labels),
                }  # fmt: skip
    return told


def _resident(constant: Constant, traces: Traces) -> Callable[[float], float] | None:
    """Seconds per token with everything on the GPU and a value of the constant."""
    if constant.form != "per_layer":
        return None
    case = {"model": constant.model, "hw": constant.hw, "precision": constant.precision}
    experiment = Experiment(why="", cases=[dict(case)], systems={"all": "gpu_only"})

    def tpot_s(value: float) -> float:
        spec = work.spec_of(experiment, 0, "all", traces["b"][constant.model], {"stack.per_layer_s": value})
        return float(work.simulate(msgspec.json.encode(spec).decode())["tpot_s"])

    return tpot_s


def _simulate(
    asked: list[Row], experiments: dict[str, Experiment], fitted: dict[str, Fitted], traces: Traces, folder: Path,
    executor: Any, steps: Steps, stack: str,
) -> dict[str, dict[TraceKind, dict[str, Any]]]:  # fmt: skip
    """Row -> trace kind -> {"values": label -> mean, "cases": those by case, "left_out": system -> why}."""
    units: list[Unit] = []
    specs: list[RunSpec] = []
    for row in asked:
        experiment = experiments[row.experiment]
        for kind, by_model in traces.items():
            for case in row.cases or range(len(experiment.cases)):
                of = {"precision": "bf16", **experiment.cases[case]}
                trace = by_model.get(_key(str(of["model"]), kind, experiment.prompt_tokens))
                settings = (fitted[row.constant].settings(str(of["hw"]), str(of["model"]), str(of["precision"]))
                            if row.constant and of["hw"] == fitted[row.constant].constant.hw else {})  # fmt: skip
                for system in _systems(row, experiment) if trace is not None else ():
                    assert trace is not None
                    units.append(Unit(row.id, kind, case, system))
                    on = "bare" if settings else stack  # a constant stands for the stack it was fitted on
                    specs.append(work.spec_of(experiment, case, system, trace, settings, on))
    with steps("simulating") as done:
        results = work.run_all(specs, folder, executor, done)
    raw = dict(zip(units, results, strict=True))
    return {row.id: {kind: _combine(row, experiments[row.experiment], raw, kind) for kind in traces} for row in asked}


def _systems(row: Row, experiment: Experiment) -> list[str]:
    """Systems a row needs: those it prints, and the one they are compared with; all for the best of them."""
    if judge.BEST in row.published:
        return list(experiment.systems)
    wanted = [*row.published, *([row.own] if row.own else [])]
    unknown = [name for name in wanted if name not in experiment.systems]
    if unknown:
        raise BadInput(f"row {row.id}, got system {unknown[0]!r}: experiment {row.experiment} has no such system")
    return list(dict.fromkeys(wanted))


def _combine(row: Row, experiment: Experiment, raw: dict[Unit, dict[str, Any]], kind: TraceKind) -> dict[str, Any]:
    """Per case the figures of the systems that ran, and their means; a case needs the system it compares with."""
    cases: list[dict[str, float]] = []
    left_out: dict[str, str] = {}
    for case in row.cases or range(len(experiment.cases)):
        seen: dict[str, float] = {}
        for system in _systems(row, experiment):
            result = raw.get(Unit(row.id, kind, case, system))
            if result is None:
                continue
            if "error" in result or result[row.value] is None:
                left_out[f"{system}, {experiment.cases[case]['model']}"] = result.get("error", "no such figure")
            else:
                seen[system] = float(result[row.value])
        if not seen or (row.own and row.own not in seen):
            continue
        own = seen.get(row.own, 0.0)
        figures = {label: judge.related(row.relation, own, value) for label, value in _compared(row, seen).items()}
        cases.append(_scaled(row, figures) if row.relation == "ratio" else figures)
    columns = {label: [case[label] for case in cases if label in case] for label in row.published}
    values = {label: sum(column) / len(column) for label, column in columns.items() if column}
    return {"values": values, "cases": cases, "left_out": left_out}


def _compared(row: Row, seen: dict[str, float]) -> dict[str, float]:
    others = {label: value for label, value in seen.items() if label != row.own or label in row.published}
    if judge.BEST not in row.published:
        return others
    if not others:
        return {}
    return {judge.BEST: min(others.values()) if row.better == "low" else max(others.values())}


def _scaled(row: Row, values: dict[str, float]) -> dict[str, float]:
    """Values relative to the first published system, which stands at its published figure."""
    first, figure = next(iter(row.published.items()))
    assert not isinstance(figure, list)
    return {label: value / values[first] * figure for label, value in values.items()} if first in values else {}


def _answer(
    row: Row, fitted: dict[str, Fitted], on: dict[TraceKind, dict[str, Any]], experiments: dict[str, Experiment]
) -> dict[str, Any]:
    """One row of the result."""
    told: dict[str, Any] = {
        name: getattr(row, name) for name in ("id", "flag", "source", "where", "model", "testbed", "setting", "metric",
                                              "unit", "published", "check", "note", "reason", "unknown", "constant")
    }  # fmt: skip
    if row.method:
        # A closed form with a constant is about the machine the constant was fitted on.
        found_on = fitted.get(row.constant)
        settings = found_on.settings(found_on.constant.hw, row.model, "bf16") if found_on else {}
        values: dict[str, Figure] = METHODS[row.method](row, settings)
        told["simulated"] = {label: values[label] for label in row.published}
        told["ratio"] = {label: judge.ratio(figure, values[label]) for label, figure in row.published.items()}
    elif row.experiment:
        told["experiment"] = {"name": row.experiment, "why": experiments[row.experiment].why}
        told["traces"] = {kind: _judged(row, kind, found) for kind, found in on.items() if found["values"]}
        told["left_out"] = {kind: found["left_out"] for kind, found in on.items() if found["left_out"]}
    told["status"] = _status(row, told)
    return told


def _judged(row: Row, kind: TraceKind, found: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Figure] = found["values"]
    told: dict[str, Any] = {"simulated": {label: values[label] for label in row.published if label in values}}
    if not row.other_quantity:
        told["ratio"] = {label: judge.ratio(row.published[label], value) for label, value in told["simulated"].items()}
    if row.check == "order":
        told["pairs"] = [pair._asdict() for pair in judge.pairs(row, found["cases"])]
        told["counted"] = kind not in row.fitted_traces
    told["cases"] = {label: sum(label in case for case in found["cases"]) for label in told["simulated"]}
    return told


def _status(row: Row, told: dict[str, Any]) -> str:
    """reached, missed, shown, fitted, not applicable or not run; an order is reached when all its pairs are right."""
    if row.check in ("none", "fit", "shown"):
        return {"none": "not applicable", "fit": "fitted", "shown": "shown"}[row.check]
    if row.method:
        return "reached" if judge.reached(row, told["simulated"]) else "missed"
    on = told["traces"].get(SCORED)
    if on is None:
        return "not run"
    if row.check == "order":
        if not on["counted"]:
            return "shown"
        if not on["pairs"]:
            return "not run"
        return "reached" if all(pair["right"] for pair in on["pairs"]) else "missed"
    return "reached" if judge.reached(row, on["simulated"]) else "missed"


def totals(answered: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts per flag and status, and right pairs of the orders per kind of trace."""
    flags = {flag: {"rows": 0} for flag in FLAGS}
    orders: dict[str, dict[str, int]] = {}
    for row in answered:
        count = flags[row["flag"]]
        count["rows"] += 1
        count[row["status"]] = count.get(row["status"], 0) + 1
        for kind, on in row.get("traces", {}).items():
            if row["check"] == "order" and on["counted"]:
                order = orders.setdefault(kind, {"right": 0, "pairs": 0})
                order["pairs"] += len(on["pairs"])
                order["right"] += sum(pair["right"] for pair in on["pairs"])
    return {"flags": {flag: count for flag, count in flags.items() if count["rows"]}, "orders": orders}


def _told_constant(found: Fitted) -> dict[str, Any]:
    constant = found.constant
    return {"id": constant.id, "testbed": constant.testbed, "seconds": found.value_s,
            "form": constant.form, "row": constant.row, "label": constant.label}  # fmt: skip
