"""Runs that rows ask for: on which traces, with which constants, and what systems' results come to per case."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reports.reproduce import inputs, judge, work
from reports.reproduce.answer import ToldTraces
from reports.reproduce.closed_form import model_of
from reports.reproduce.constants import Fitted
from reports.reproduce.inputs import Drawn
from reports.reproduce.rows import Constant, Experiment, Row, TraceKind
from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.profiles.models import Model
from sim.results.expectations import judged, parsed
from sim.setup.pairing import shape_of
from sim.studies.runner.pool import in_order

Steps = Callable[[str], Any]  # a title -> a context that yields progress(done, total)


class Unit(NamedTuple):
    """One run a row asks for; `fitted`: with the constant that is the system's own."""

    row: str
    kind: TraceKind
    case: int
    system: str
    fitted: bool = False


def numbers_of(row: Row, experiment: Experiment) -> Sequence[int]:
    """Which of its experiment's cases a row is about."""
    return row.cases or range(len(experiment.cases))


def cases_of(row: Row, experiments: dict[str, Experiment]) -> list[dict[str, Any]]:
    experiment = experiments[row.experiment]
    return [experiment.cases[number] for number in numbers_of(row, experiment)]


Traces = dict[TraceKind, dict[str, Path]]


def drawn(experiment: Experiment, model: str) -> Drawn:
    """The synthetic trace that an experiment asks for."""
    output_tokens = experiment.output_tokens_of.get(model, experiment.output_tokens)
    return Drawn(model, experiment.synth_requests, experiment.prompt_tokens, output_tokens, experiment.fit)


def traces_of(wanted: list[Drawn], kinds: tuple[TraceKind, ...], folder: Path, workers: int, steps: Steps) -> Traces:
    """Kind -> title -> trace, of the models that have one; a synthetic one is called by all it was asked for.

    (a) and (b) are always there: constants may need them.
    """
    found: Traces = {kind: {} for kind in dict.fromkeys(("a", "b", *kinds))}
    with steps("drawing synthetic traces") as done:
        paths = in_order([(inputs.synthesise, (asked, str(folder))) for asked in wanted], workers, done)
    found["b"] = {asked.title: Path(path) for asked, path in zip(wanted, paths, strict=True)}
    public = inputs.public_traces(folder) if "c" in kinds else {}
    for name in sorted({asked.model for asked in wanted}):
        model: Model = model_of(name)
        bundled = inputs.bundled_for(model)
        if bundled is not None:
            found["a"][name] = bundled
        if shape_of(model) in public:
            found["c"][name] = public[shape_of(model)]
    return found


def told_of(traces: Traces) -> dict[TraceKind, ToldTraces]:
    """What every trace is, with its labels, for the reader of the table."""
    from traces.format.reader import Trace

    told: dict[TraceKind, ToldTraces] = {}
    for kind, by_model in traces.items():
        told[kind] = {"is": inputs.TITLES[kind], "of": {}}
        for name, path in by_model.items():
            with Trace(path) as trace:
                told[kind]["of"][name] = {
                    "trace": path.name,
                    "recorded_model": trace.header.model,
                    "requests": trace.n_requests,
                    "tokens": trace.n_tokens,
                    "labels": list(trace.header.labels),
                }
    return told


class Runs(NamedTuple):
    """What runs of the simulator are made with."""

    experiments: dict[str, Experiment]
    traces: Traces
    folder: Path
    workers: int
    stack: str

    def spec(self, row: Row, kind: TraceKind, case: int, system: str, constant: Fitted | None) -> RunSpec | None:
        """The run of a system in a case of a row; None where there is no trace, or the paper's could not run it."""
        experiment = self.experiments[row.experiment]
        of = {"precision": "bf16", **experiment.cases[case]}
        hw, model, precision = str(of["hw"]), str(of["model"]), str(of["precision"])
        trace = self.traces[kind].get(drawn(experiment, model).title if kind == "b" else model)
        if trace is None or model in experiment.could_not.get(system, ()):
            return None
        settings: dict[str, float] = {}
        if constant is not None and constant.constant.hw in ("", hw):
            pinned = "engine.pinned=false" not in experiment.systems[system].split()
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
        units: dict[str, dict[Unit, RunSpec]] = {one.id: {} for one in solved}
        for one in solved:
            row, value_s = rows[one.row], values[one.id]
            experiment = runs.experiments[row.experiment]
            for case in numbers_of(row, experiment):
                for system in filter(None, (one.label, row.own)):
                    found = Fitted(one, value_s) if system == one.label and value_s else None
                    if (spec := runs.spec(row, experiment.scored, case, system, found)) is not None:
                        units[one.id][Unit(row.id, experiment.scored, case, system)] = spec
        specs = [spec for of in units.values() for spec in of.values()]
        results = iter(work.run_all(specs, runs.folder, runs.workers, done))
        told: dict[str, float] = {}
        for one in solved:
            row = rows[one.row]
            raw = {unit: next(results) for unit in units[one.id]}
            experiment = runs.experiments[row.experiment]
            found_of = combine(row, experiment, raw, experiment.scored)
            if one.label not in found_of["values"]:
                raise BadInput(f"constant {one.id}: {one.label} of row {row.id} could not run: {found_of['left_out']}")
            told[one.id] = found_of["values"][one.label]
        return told

    return figures


def simulate(
    asked: list[Row], kinds: tuple[TraceKind, ...], fitted: dict[str, Fitted], runs: Runs, done: work.Progress
) -> dict[str, dict[TraceKind, dict[str, Any]]]:
    """Row -> trace kind -> what `combine` found; under "fitted" the same with the constants of single systems.

    Args:
        kinds: traces to run all rows on; none: each on the one it is scored on.
    """
    specs: dict[Unit, RunSpec] = {}
    for row in asked:
        experiment = runs.experiments[row.experiment]
        for kind in kinds or (experiment.scored,):
            for case in numbers_of(row, experiment):
                for system in systems_of(row, experiment):
                    own = experiment.constants.get(system)
                    for name in [row.constant] if own is None else ["", own]:
                        if (spec := runs.spec(row, kind, case, system, fitted.get(name))) is not None:
                            specs[Unit(row.id, kind, case, system, own is not None and name == own)] = spec
    raw = dict(zip(specs, work.run_all([*specs.values()], runs.folder, runs.workers, done), strict=True))
    found: dict[str, dict[TraceKind, dict[str, Any]]] = {}
    for row in asked:
        experiment = runs.experiments[row.experiment]
        found[row.id] = {kind: combine(row, experiment, raw, kind) for kind in kinds or (experiment.scored,)}
        for kind, of in found[row.id].items():
            if own_constants(row, experiment):
                of["fitted"] = combine(row, experiment, raw, kind, fitted=True)
    return found


def own_constants(row: Row, experiment: Experiment) -> dict[str, str]:
    """System -> constant, of the systems a row compares that have one of their own."""
    return {name: experiment.constants[name] for name in systems_of(row, experiment) if name in experiment.constants}


def systems_of(row: Row, experiment: Experiment) -> list[str]:
    """Systems a row needs: those it prints, and the one they are compared with; all for the best of them."""
    if judge.BEST in row.published or judge.is_of_cells(row):
        return list(experiment.systems)
    wanted = [*row.published, *([row.own] if row.own else []), *row.beside]
    unknown = [name for name in wanted if name not in experiment.systems]
    if unknown:
        raise BadInput(f"row {row.id}, got system {unknown[0]!r}: experiment {row.experiment} has no such system")
    return list(dict.fromkeys(wanted))


def combine(
    row: Row, experiment: Experiment, raw: dict[Unit, dict[str, Any]], kind: TraceKind, *, fitted: bool = False
) -> dict[str, Any]:
    """What the runs of a row on one kind of trace come to; a case needs the system it compares with.

    Returns {"values": label -> mean over cases, "cases": those by case, "left_out": system -> why, "did_not_run":
    system -> which condition its mechanism did not meet}.
    """
    cases: list[dict[str, float]] = []
    rooms: list[float] = []
    left_out: dict[str, str] = {}
    did_not_run: dict[str, str] = {}
    for case in numbers_of(row, experiment):
        seen: dict[str, float] = {}
        model = str(experiment.cases[case]["model"])
        for system in systems_of(row, experiment):
            if model in experiment.could_not.get(system, ()):
                left_out[f"{system}, {model}"] = "it could not run there, says the paper"
                continue
            result = raw.get(Unit(row.id, kind, case, system, fitted and system in experiment.constants))
            if result is None:
                continue
            if "error" in result:
                left_out[f"{system}, {model}"] = result["error"]
                continue
            key = row.value_of.get(system, row.value)
            value = work.figure_of(result, key)
            if value is None:
                left_out[f"{system}, {model}"] = f"it has no figure {key}"
                continue
            seen[system] = value
            idle = _idle(experiment.mechanism.get(system, ""), result)
            if idle:
                did_not_run[f"{system}, {model}"] = idle
        if not seen or (row.own and row.own not in seen):
            continue
        own = seen.get(row.own, 0.0)
        figures = {label: judge.related(row.relation, own, value) for label, value in _compared(row, seen).items()}
        for label in [label for label, value in figures.items() if not math.isfinite(value)]:
            left_out[f"{label}, {model}"] = f"no {row.relation} over nothing"
            del figures[label]
        cases.append(_scaled(row, figures) if row.relation == "ratio" else figures)
        rooms.append(float(experiment.cases[case].get("vram") or 0))
    labels = [*row.published, *row.beside]
    if row.relation == "memory":
        sizes = [(label, [(n, case.get(label)) for n, case in zip(rooms, cases, strict=True)]) for label in labels]
        reached = {label: judge.memory_gb(row.target, of) for label, of in sizes}
        cases = [{label: gb for label, gb in reached.items() if gb is not None}]
        never = f"{row.value} does not pass {row.target:g} between any two cases"
        left_out |= {label: never for label, gb in reached.items() if gb is None}
    elif judge.is_of_cells(row):
        cells = [figure for case in cases for figure in case.values()]
        cases = [dict(zip(judge.ENDS, (min(cells), max(cells)), strict=True))] if cells else []
    columns = {label: [case[label] for case in cases if label in case] for label in labels}
    values = {label: sum(column) / len(column) for label, column in columns.items() if column}
    return {"values": values, "cases": cases, "left_out": left_out, "did_not_run": did_not_run}


def _idle(condition: str, result: work.Result) -> str:
    """How a run does not meet the condition under which its mechanism ran; "" where it does, or there is none."""
    if not condition:
        return ""
    (expected,) = parsed((condition,))
    if expected.key not in result:
        return f"{condition}: it has no such figure"
    (found,) = judged([expected], result)
    return "" if found.held else found.line.removeprefix("not met: ")


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
