"""Answer the chosen rows: closed forms at once, experiments through the simulator, on every kind of trace asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from reports.reproduce import inputs, judge, work
from reports.reproduce.closed import METHODS, model_of
from reports.reproduce.constants import Fitted, fit, solve
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
    """One run a row asks for; `bare`: without the constant that is the system's own."""

    row: str
    kind: TraceKind
    case: int
    system: str
    bare: bool = False


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
    asked = [row for row in chosen if row.experiment and row.check != "fit"]
    for row in chosen:
        _known(row, experiments, constants)
    used = [constants[name] for name in sorted(_names(chosen, experiments))]
    simulated: dict[str, dict[TraceKind, dict[str, Any]]] = {row.id: {} for row in asked}
    fitted = {one.id: fit(one, rows) for one in used if not one.solved}
    told: dict[str, Any] = {}
    solved = [one for one in used if one.solved]
    if asked or solved:
        folder = folder or inputs.scratch()
        rest = [rows[one.row] for one in solved]
        with work.pool(workers) as executor:
            wanted = sorted({(str(case["model"]), experiments[row.experiment].prompt_tokens)
                             for row in (*asked, *rest) for case in _cases(row, experiments)})  # fmt: skip
            traces = _traces(wanted, kinds, folder, executor, steps)
            told = _told(traces)
            runs = Runs(experiments, traces, folder, executor, stack)
            if solved:
                with steps("fitting constants") as done:
                    fitted |= solve(solved, rows, _figures_of(solved, rows, runs, done))
            with steps("simulating") as done:
                simulated = _simulate(asked, fitted, runs, done)
    answered = [_answer(row, fitted, simulated.get(row.id, {}), experiments) for row in chosen]
    return {"schema": SCHEMA, "version": __version__, "stack": stack, "traces": told,
            "constants": [_told_constant(fitted[one.id]) for one in used],
            "rows": answered, "totals": totals(answered)}  # fmt: skip


def _names(chosen: list[Row], experiments: dict[str, Experiment]) -> set[str]:
    """Ids of the constants that rows rest on: their own, and those of the systems they compare."""
    judged = [row for row in chosen if row.experiment and row.check != "fit"]
    of_systems = {experiments[row.experiment].constants.get(system)
                  for row in judged for system in _systems(row, experiments[row.experiment])}  # fmt: skip
    return {row.constant for row in chosen if row.constant} | {name for name in of_systems if name}


def _known(row: Row, experiments: dict[str, Experiment], constants: dict[str, Constant]) -> None:
    for name, known, what in ((row.method, METHODS, "method"), (row.experiment, experiments, "experiment"),
                              (row.constant, constants, "constant")):  # fmt: skip
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


class Runs(NamedTuple):
    """What runs of the simulator are made with."""

    experiments: dict[str, Experiment]
    traces: Traces
    folder: Path
    executor: Any
    stack: str

    def spec(self, row: Row, kind: TraceKind, case: int, system: str, constant: Fitted | None) -> RunSpec | None:
        """The run of a system in a case of a row; None where there is no trace, or the paper's could not run it."""
        experiment = self.experiments[row.experiment]
        of = {"precision": "bf16", **experiment.cases[case]}
        hw, model, precision = str(of["hw"]), str(of["model"]), str(of["precision"])
        trace = self.traces[kind].get(_key(model, kind, experiment.prompt_tokens))
        if trace is None or model in experiment.could_not.get(system, ()):
            return None
        settings: dict[str, float] = {}
        if constant is not None and constant.constant.hw in ("", hw):
            pinned = "stack.pinned=false" not in experiment.systems[system].split()
            settings = constant.settings(hw, model, precision, pinned)
        on = "bare" if settings else self.stack  # a constant stands for the stack it was fitted on
        return work.spec_of(experiment, case, system, trace, settings, on)


def _figures_of(
    solved: list[Constant], rows: dict[str, Row], runs: Runs, done: work.Progress
) -> Callable[[dict[str, float]], dict[str, float]]:
    """Seconds of constants -> the figures of the rows they come from, on the trace that is judged."""

    def figures(values: dict[str, float]) -> dict[str, float]:
        units: list[tuple[str, Unit]] = []
        specs: list[RunSpec] = []
        for one in solved:
            row = rows[one.row]
            own = [row.own] if row.own else []
            for case in row.cases or range(len(runs.experiments[row.experiment].cases)):
                for system in (one.label, *own):
                    found = Fitted(one, values[one.id]) if system == one.label and values[one.id] else None
                    spec = runs.spec(row, SCORED, case, system, found)
                    if spec is not None:
                        units.append((one.id, Unit(row.id, SCORED, case, system)))
                        specs.append(spec)
        results = work.run_all(specs, runs.folder, runs.executor, done)
        told: dict[str, float] = {}
        for one in solved:
            row = rows[one.row]
            raw = {unit: result for (name, unit), result in zip(units, results, strict=True) if name == one.id}
            found_of = _combine(row, runs.experiments[row.experiment], raw, SCORED)
            if one.label not in found_of["values"]:
                raise BadInput(f"constant {one.id}: {one.label} of row {row.id} could not run: {found_of['left_out']}")
            told[one.id] = found_of["values"][one.label]
        return told

    return figures


def _simulate(
    asked: list[Row], fitted: dict[str, Fitted], runs: Runs, done: work.Progress
) -> dict[str, dict[TraceKind, dict[str, Any]]]:
    """Row -> trace kind -> {"values": label -> mean, "cases": those by case, "left_out": system -> why, "bare": cases
    without the constants of single systems}."""
    units: list[Unit] = []
    specs: list[RunSpec] = []
    for row in asked:
        experiment = runs.experiments[row.experiment]
        for kind in runs.traces:
            for case in row.cases or range(len(experiment.cases)):
                for system in _systems(row, experiment):
                    own = experiment.constants.get(system)
                    names = [row.constant] if own is None else [own, ""]
                    for name in names:
                        spec = runs.spec(row, kind, case, system, fitted.get(name))
                        if spec is not None:
                            units.append(Unit(row.id, kind, case, system, bare=own is not None and not name))
                            specs.append(spec)
    raw = dict(zip(units, work.run_all(specs, runs.folder, runs.executor, done), strict=True))
    found: dict[str, dict[TraceKind, dict[str, Any]]] = {}
    for row in asked:
        experiment = runs.experiments[row.experiment]
        found[row.id] = {kind: _combine(row, experiment, raw, kind) for kind in runs.traces}
        for kind, of in found[row.id].items():
            of["bare"] = _combine(row, experiment, raw, kind, bare=True)["cases"]
    return found


def _systems(row: Row, experiment: Experiment) -> list[str]:
    """Systems a row needs: those it prints, and the one they are compared with; all for the best of them."""
    if judge.BEST in row.published:
        return list(experiment.systems)
    wanted = [*row.published, *([row.own] if row.own else [])]
    unknown = [name for name in wanted if name not in experiment.systems]
    if unknown:
        raise BadInput(f"row {row.id}, got system {unknown[0]!r}: experiment {row.experiment} has no such system")
    return list(dict.fromkeys(wanted))


def _combine(
    row: Row, experiment: Experiment, raw: dict[Unit, dict[str, Any]], kind: TraceKind, *, bare: bool = False
) -> dict[str, Any]:
    """Per case the figures of the systems that ran, and their means; a case needs the system it compares with."""
    cases: list[dict[str, float]] = []
    left_out: dict[str, str] = {}
    for case in row.cases or range(len(experiment.cases)):
        seen: dict[str, float] = {}
        for system in _systems(row, experiment):
            model = str(experiment.cases[case]["model"])
            if model in experiment.could_not.get(system, ()):
                left_out[f"{system}, {model}"] = "it could not run there, says the paper"
                continue
            result = raw.get(Unit(row.id, kind, case, system, bare and system in experiment.constants))
            if result is None:
                continue
            if "error" in result or result[row.value] is None:
                left_out[f"{system}, {model}"] = result.get("error", "no such figure")
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
    elif row.experiment and row.check != "fit":
        experiment = experiments[row.experiment]
        told["experiment"] = {"name": row.experiment, "why": experiment.why}
        told["constants"] = {system: name for system, name in experiment.constants.items() if system in row.published}
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
        told["right_bare"] = sum(pair.right for pair in judge.pairs(row, found["bare"]))
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
                order = orders.setdefault(kind, {"right": 0, "right_bare": 0, "pairs": 0})
                order["pairs"] += len(on["pairs"])
                order["right_bare"] += on["right_bare"]
                order["right"] += sum(pair["right"] for pair in on["pairs"])
    return {"flags": {flag: count for flag, count in flags.items() if count["rows"]}, "orders": orders}


def _told_constant(found: Fitted) -> dict[str, Any]:
    constant = found.constant
    return {"id": constant.id, "testbed": constant.testbed, "seconds": found.value_s,
            "form": constant.form, "row": constant.row, "label": constant.label}  # fmt: skip
