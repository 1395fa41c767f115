"""One side of a comparison, opened: its result, its tables, and where every request's time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import __version__
from sim.base.errors import MoesimError
from sim.engine.run_loop import Clockwork, Loop, drive
from sim.figures import numbers
from sim.policy.mistakes import blamed
from sim.policy.watchdog import watched
from sim.results.keep import Keep
from sim.run import Outcome, assemble, execute, finished, prepare, report_of
from sim.studies.diff.request import OneRequest, of_sweep, served
from sim.studies.diff.spent import Spent
from sim.studies.diff.tables import CORE, requests_of
from sim.studies.diff.told import Told, told_of

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.policy.api import Policy
    from sim.setup.setup import Setup
    from sim.studies.diff.named import Named

NOT_COMPARED = ("wall_s", "lower_bound", "simulator", "run_id", "name", "schema")
"""Keys of a result in which equal runs may differ: how long the simulation took, and what only names the run."""
REPLICAS = "replicas"
SEVERAL = "it has several replicas, whose requests, layers and decisions are not taken apart"
Progress = Callable[[int, int], None]


@dataclass
class Side:
    """One run.

    Attributes:
        label: as it was called. facts, told: its result, and the part of it that is typed.
        meant: digests of what its names stand for. spec: what was asked for, with the policy where it is a class.
        figures: those of its machine, model and stack, by dotted names.
        tables: a folder with its tables, as far as there are any. replayed: its times are from a replay.
        notes: what cannot be said of it, and why.
    """

    label: str
    facts: dict[str, Any]
    told: Told
    meant: dict[str, Any]
    spec: RunSpec | None
    tables: Path | None
    requests: dict[int, OneRequest] | None
    replayed: bool = False
    kind: type[Policy] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def opened(named: Named, scratch: Path, replay: bool, progress: Progress | None) -> Side:
    """Read what is recorded, and replay what is not, or what only a replay can tell.

    Args:
        scratch: an empty folder for tables that are nowhere yet. replay: whether a recorded run may be replayed.

    Raises:
        BadInput: a run that is to be replayed cannot be set up, or a record that is not what it says.
    """
    if named.facts is None:
        assert named.spec is not None
        setup = prepare(named.spec, named.kind)
        try:
            if setup.spec.replicas > 1:
                return _of_replicas(named, setup, progress)
            return _carried_out(named, setup, scratch, progress)
        finally:
            setup.close()
    told = told_of(named.facts, _result_of(named))
    side = Side(named.label, named.facts, told, named.meant, named.spec, None, None)
    if named.folder is not None:
        side.tables = None if REPLICAS in named.facts else named.folder
        side.requests = requests_of(named.folder, told)
    elif named.times is not None:
        side.requests = of_sweep(named.times, named.label)
    setup_or_reason = _same_run(named, told) if replay else "replays were not asked for"
    if isinstance(setup_or_reason, str):
        side.notes.append(f"as recorded, not replayed: {setup_or_reason}")
        return side
    try:
        return _again(named, side, setup_or_reason, scratch, progress)
    finally:
        setup_or_reason.close()


def _result_of(named: Named) -> str:
    return str(named.folder / "result.json") if named.folder is not None else named.label


def _same_run(named: Named, told: Told) -> Setup | str:
    """The run that is recorded, set up again; or why it cannot be had."""
    if told.simulator == "real":
        return "it was measured on hardware"
    if named.facts is not None and REPLICAS in named.facts:
        return SEVERAL
    if named.spec is None:
        return "its configuration is not beside it (config.yaml)"
    if told.version != __version__:
        return f"it was made by version {told.version}, this is {__version__}"
    try:
        setup = prepare(named.spec, named.kind)
    except MoesimError as error:
        return f"what it was made of cannot be had: {error}"
    if setup.run_id == told.run_id:
        return setup
    now = setup.resolved()
    setup.close()
    changed = [
        f"{what} {now[what]}"
        for what in ("policy", "trace", "hw", "model", "engine")
        if named.meant.get(f"{what}_sha256") != now.get(f"{what}_sha256")
    ]
    said = f"; changed since: {', '.join(changed)}" if changed else ""
    return f"its inputs are no longer those it was made of (run_id {told.run_id}, now {setup.run_id}){said}"


def _of_replicas(named: Named, setup: Setup, progress: Progress | None) -> Side:
    facts = execute(setup, progress=progress).result.to_dict()
    told, figures = told_of(facts, named.label), _figures_of(setup)
    notes = [*setup.notes(), SEVERAL]
    meant, spec = setup.resolved(), setup.explicit()
    return Side(named.label, facts, told, meant, spec, None, None, kind=named.kind, notes=notes, figures=figures)


def _again(named: Named, side: Side, setup: Setup, scratch: Path, progress: Progress | None) -> Side:
    """A recorded run, replayed; as it is recorded where the replay gives something else."""
    has_tables = side.tables is not None and all((side.tables / f"{name}.parquet").is_file() for name in CORE)
    fresh = _carried_out(named, setup, scratch, progress, tables=not has_tables)
    recorded, found = compared(side.facts), compared(fresh.facts)
    differing = [key for key in recorded if key in found and recorded[key] != found[key]]
    if differing:
        key = differing[0]
        side.notes.append(
            f"as recorded: a replay gives other figures, the first {key} {found[key]!r} for {recorded[key]!r}"
        )
        return side
    fresh.facts, fresh.told = side.facts | {"by_layer": fresh.facts.get("by_layer", [])}, fresh.told
    if has_tables:
        fresh.tables = side.tables
    return fresh


def compared(facts: dict[str, Any]) -> dict[str, float | None]:
    """All figures in which equal runs agree, by their dotted names."""
    return dict(numbers({key: value for key, value in facts.items() if key not in NOT_COMPARED}))


def _carried_out(named: Named, setup: Setup, scratch: Path, progress: Progress | None, tables: bool = True) -> Side:
    from sim.results.sinks import recorded

    found: list[Spent] = []

    def run(setup: Setup, log: Any = None, progress: Progress | None = None, on_step: Any = None, **_: Any) -> Outcome:
        with blamed(setup.policy), watched():
            engine, machine = assemble(setup, log=log)
            clockwork = Clockwork()
            spent = Spent(clockwork, machine.waiting)
            found.append(spent)
            total = sum(request.outputs for request in setup.requests)

            def step(done: Any) -> None:
                spent.take(done)
                if on_step is not None:
                    on_step(done)
                if progress is not None:
                    progress(clockwork.n_put_out, total)

            began_s = time.perf_counter()
            batching = setup.batching()
            drive(Loop(engine, machine, batching, setup.trace, clockwork, setup.open_loop, on_step=step))
            return finished(setup, report_of(engine, machine, clockwork, began_s))

    folder = scratch / "run" if tables else None
    outcome = run(setup, progress=progress) if folder is None else recorded(run, setup, progress, Keep(folder))
    facts = outcome.result.to_dict()
    requests = {times.request.index: served(times, found[0]) for times in outcome.report.requests}
    return Side(
        named.label,
        facts,
        told_of(facts, named.label),
        setup.resolved(),
        setup.explicit(),
        folder,
        requests,
        replayed=True,
        kind=named.kind,
        notes=setup.notes(),
        figures=_figures_of(setup),
    )


def _figures_of(setup: Setup) -> dict[str, Any]:
    """Every figure of machine, model and stack, by its dotted name."""
    import msgspec

    found: dict[str, Any] = {}
    for group, described in (("hw", setup.hw), ("model", setup.model), ("engine", setup.stack)):
        found |= flat(msgspec.to_builtins(described), f"{group}.")
    return found


def flat(value: Any, prefix: str) -> dict[str, Any]:
    """Nested data with dotted names; a figure with its source is the figure."""
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    if "value" in value and "source" in value:
        return {prefix.removesuffix("."): value["value"]}
    return {name: found for key, child in value.items() for name, found in flat(child, f"{prefix}{key}.").items()}
