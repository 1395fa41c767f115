"""Runs that rows ask for: on which traces, with which constants, and what systems' results come to per case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from reports.reproduce import inputs, judge, work
from reports.reproduce.closed import model_of
from reports.reproduce.constants import Fitted
from reports.reproduce.rows import SCORED, Constant, Experiment, Row, TraceKind
from sim.errors import BadInput
from sim.models import Model
from sim.setup import shape_of
from sim.spec import RunSpec

Steps = Callable[[str], Any]  # a title -> a context that yields progress(done, total)


class Unit(NamedTuple):
    """One run a row asks for; `bare`: without the constant that is the system's own."""

    row: str
    kind: TraceKind
    case: int
    system: str
    bare: bool = False


def cases_of(row: Row, experiments: dict[str, Experiment]) -> list[dict[str, Any]]:
    cases = experiments[row.experiment].cases
    return [cases[i] for i in row.cases] if row.cases else list(cases)


Traces = dict[TraceKind, dict[str, Path]]


def trace_key(name: str, kind: TraceKind, prompt_tokens: int) -> str:
    """What a trace is known by: its model, and the length of its prompts where that is the paper's own."""
    return f"{name}, prompts of {prompt_tokens} tokens" if kind == "b" and prompt_tokens else name


def traces_of(
    wanted: list[tuple[str, int]], kinds: tuple[TraceKind, ...], folder: Path, executor: Any, steps: Steps
) -> Traces:
    """Kind -> model -> trace, for the models that have one of the kind. (b) is always made: constants may need it.

    Args:
        wanted: models, each with the mean length of its prompts on a synthetic trace (0: the default's).
    """
    found: Traces = {kind: {} for kind in kinds}
    with steps("drawing synthetic traces") as done:
        paths = work.each(executor, inputs.synthesise, [(name, str(folder), n) for name, n in wanted], done)
    found["b"] = {trace_key(name, "b", n): Path(path) for (name, n), path in zip(wanted, paths, strict=True)}
    public = inputs.public_traces(folder) if "c" in kinds else {}
    for name in sorted({name for name, _ in wanted}):
        model: Model = model_of(name)
        bundled = inputs.bundled_for(model) if "a" in kinds else None
        if bundled is not None:
            found["a"][name] = bundled
        if shape_of(model) in public:
            found["c"][name] = public[shape_of(model)]
    return found


def told_of(traces: Traces) -> dict[str, Any]:
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
        trace = self.traces[kind].get(trace_key(model, kind, experiment.prompt_tokens))
        if trace is None or model in experiment.could_not.get(system, ()):
            return None
        settings: dict[str, float] = {}
        if constant is not None and constant.constant.hw in ("", hw):
            pinned = "stack.pinned=false" not in experiment.systems[system].split()
            settings = constant.settings(hw, model, precision, pinned)
        # A constant stands for the stack it was fitted on, also beside systems that have none.
        on = "bare" if settings or experiment.constants else self.stack
        return work.spec_of(experiment, case, system, trace, settings, on)


def figures_of(
    solved: list[Constant], rows: dict[str, Row], runs: Runs, done: work.Progress
) -> Callable[[dict[str, float]], dict[str, float]]:
    """Seconds of constants -> figures of the rows they come from, with bare kernels, on the trace that is judged."""
    runs = runs._replace(stack="bare")

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
            found_of = combine(row, runs.experiments[row.experiment], raw, SCORED)
            if one.label not in found_of["values"]:
                raise BadInput(f"constant {one.id}: {one.label} of row {row.id} could not run: {found_of['left_out']}")
            told[one.id] = found_of["values"][one.label]
        return told

    return figures


def simulate(
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
                for system in systems_of(row, experiment):
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
        found[row.id] = {kind: combine(row, experiment, raw, kind) for kind in runs.traces}
        for kind, of in found[row.id].items():
            of["bare"] = combine(row, experiment, raw, kind, bare=True)["cases"]
    return found


def systems_of(row: Row, experiment: Experiment) -> list[str]:
    """Systems a row needs: those it prints, and the one they are compared with; all for the best of them."""
    if judge.BEST in row.published:
        return list(experiment.systems)
    wanted = [*row.published, *([row.own] if row.own else [])]
    unknown = [name for name in wanted if name not in experiment.systems]
    if unknown:
        raise BadInput(f"row {row.id}, got system {unknown[0]!r}: experiment {row.experiment} has no such system")
    return list(dict.fromkeys(wanted))


def combine(
    row: Row, experiment: Experiment, raw: dict[Unit, dict[str, Any]], kind: TraceKind, *, bare: bool = False
) -> dict[str, Any]:
    """Per case the figures of the systems that ran, and their means; a case needs the system it compares with."""
    cases: list[dict[str, float]] = []
    left_out: dict[str, str] = {}
    for case in row.cases or range(len(experiment.cases)):
        seen: dict[str, float] = {}
        for system in systems_of(row, experiment):
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
