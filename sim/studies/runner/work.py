"""What the runner hands to its workers: what a point means, its run, and the lower bound it shares with others.

Points that differ in nothing that decides are a family: one is run and what it decided recorded, and the others are
that recording, timed by their own prices. Where a price or time had a part in a decision, each runs by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim import __version__
from sim.base.digests import of_text
from sim.base.errors import BadInput, CheckFailed, DoesNotFit, IllegalDecision, MoesimError
from sim.base.json import to_json
from sim.engine.recording import Recording
from sim.figures import SCHEMA
from sim.options import VALUE, RunSpec, unusual
from sim.policy.mistakes import told
from sim.policy.registry import find
from sim.run import Outcome, execute, record, tellable, timed
from sim.setup.prepare import prepare

if TYPE_CHECKING:
    from sim.setup.setup import Setup

OK, DOES_NOT_FIT, REFUSED, BROKE_A_RULE, FAILED = "ok", "does_not_fit", "refused", "broke_a_rule", "failed"
MOST_READY = 256
"""Points kept as they were set up to be resolved, by a process that then runs them itself."""

_READY: dict[str, Setup] = {}
MOST_KEPT = 4
"""Recordings of a process; points of one family follow one another."""
_KEPT: dict[str, Recording | None] = {}  # by family; None: its decisions are not to be told from one run


class Resolved(msgspec.Struct, frozen=True):
    """What a point's names mean here and now.

    Attributes:
        id: of everything that decides the point's numbers; of one that cannot be set up, of all that was asked.
        spec: with no default left that may change. meant: ids and digests (`Setup.resolved`); empty when it is refused.
        bound: the id of what its lower bound depends on. cpu: whether that may run experts on the CPU.
        family: the id of all but its hardware, where its decisions may be those of its family .
        status, reason: `ok`, or why it cannot be set up.
        notes: what was asked for and cannot be had in full.
        n_layers: layers of output tokens, by which work is estimated.
        drive: which terms of its drive nobody gave, what they are and why.
    """

    id: str
    spec: RunSpec
    status: str = OK
    reason: str = ""
    meant: dict[str, Any] = {}
    bound: str = ""
    cpu: bool = False
    family: str = ""
    notes: tuple[str, ...] = ()
    n_layers: int = 0
    drive: str = ""


def resolve(specs: tuple[RunSpec, ...]) -> list[Resolved]:
    """What each of them means."""
    return [_resolve(spec) for spec in specs]


def _resolve(spec: RunSpec) -> Resolved:
    asked: dict[str, Any] = {"version": __version__, "spec": msgspec.to_builtins(spec)}
    try:
        spec = _with_model(spec)
        setup = prepare(spec)
    except MoesimError as error:
        asked["reason"] = str(error)
        return Resolved(_digest(asked), spec, status_of(error), str(error))
    except Exception as error:  # of a policy's constructor
        asked["reason"] = reason = _mistake(error, spec)
        return Resolved(_digest(asked), spec, FAILED, reason)
    return meaning(setup)


def meaning(setup: Setup) -> Resolved:
    """What a run that is set up means; kept as it is, to be run by this process, or closed."""
    n_layers = setup.model.n_moe_layers * sum(request.outputs for request in setup.requests)
    found = Resolved(
        setup.run_id,
        setup.explicit(),
        meant=setup.resolved(),
        bound=_digest(bound_terms(setup)) if setup.timeless else "",
        cpu="cpu" in setup.policy.traits,
        family="" if (terms := family_terms(setup)) is None else _digest(terms),
        notes=tuple(setup.notes()),
        n_layers=n_layers,
        drive="" if setup.tier is None else setup.tier.why,
    )
    if found.id not in _READY and len(_READY) < MOST_READY and not _in_pool():
        _READY[found.id] = replace(setup, spec=found.spec)
    else:
        setup.close()
    return found


def _in_pool() -> bool:
    """Whether this process answers another's calls."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _mistake(error: Exception, spec: RunSpec) -> str:
    """A mistake of a policy's own in a line, with its file and line."""
    try:
        kind = find(spec.policy)
    except MoesimError:
        kind = None
    return told(error, kind)


@contextmanager
def closing_ready() -> Iterator[None]:
    """Close what was set up and never run, however a study ends: each holds its trace open."""
    try:
        yield
    finally:
        while _READY:
            _READY.popitem()[1].close()


def _set_up(spec: RunSpec, id_: str) -> Setup:
    """A point set up: as it was resolved, where this process has done that."""
    ready = _READY.pop(id_, None)
    if ready is not None and ready.spec == spec:
        return ready
    if ready is not None:
        ready.close()
    return prepare(spec)


def _with_model(spec: RunSpec) -> RunSpec:
    """The specification with its trace's model named: finding it takes opening that."""
    from traces.format.bundled import DEFAULT

    if spec.model is not None:
        return spec
    trace = DEFAULT if spec.trace is None else spec.trace
    return msgspec.structs.replace(spec, model=_model_of(trace), trace=trace)


@lru_cache(maxsize=64)
def _model_of(trace: str) -> str:
    from sim.setup.pairing import default_model
    from traces.format.catalogue import open_trace

    with open_trace(trace) as opened:
        return default_model(opened)


def bound_terms(setup: Setup) -> dict[str, Any]:
    """All that the lower bound of a run depends on."""
    spec, meant = setup.spec, setup.resolved()
    return {
        "version": __version__,
        "expert_bytes": setup.memory.expert_bytes,
        "cpu": "cpu" in setup.policy.traits,
        **{f"{what}_sha256": meant[f"{what}_sha256"] for what in ("hw", "model", "engine", "trace")},
        "scheduler_sha256": meant.get("scheduler_sha256"),
        "map_sha256": meant.get("map_sha256"),
        **({"unread": True} if setup.leaves_unread else {}),
        **{row.field: value for row, value in unusual(spec) if row.bound and row.identity == VALUE},
        "parallel": spec.parallel,
        **setup.batch_terms,
        **setup.load_terms,
        **_drive_terms(setup),
    }


def _drive_terms(setup: Setup) -> dict[str, Any]:
    tier = setup.tier
    return {} if tier is None else {"above": [setup.host_bytes, tier.drive, tier.depth, tier.block_bytes, tier.reads]}


def family_terms(setup: Setup) -> dict[str, Any] | None:
    """All that decides a run's decisions where prices and times do not; None where they are known to."""
    if not tellable(setup) or setup.leaves_unread:
        return None
    spec, meant = setup.spec, setup.resolved()
    return {
        **{row.field: value for row, value in unusual(spec) if row.decides and row.identity == VALUE},
        "expert_bytes": setup.memory.expert_bytes,
        **{
            name: meant.get(name)
            for name in ("version", "policy", "policy_sha256", "params", "drawn", "scheduler_sha256")
        },
        **{f"{what}_sha256": meant[f"{what}_sha256"] for what in ("model", "trace")},
        **setup.batch_terms,
    }


class Answer(NamedTuple):
    """What a worker answers of one call.

    Attributes:
        point, bound: records, None where it was not asked for one. by_recording: another's decisions timed the point.
        recorded: what other workers need of its decisions, where they ask for it: empty where they have
            to decide for themselves. wall_s: of the point.
    """

    point: dict[str, Any] | None
    bound: dict[str, Any] | None = None
    by_recording: bool = False
    recorded: bytes | None = None
    wall_s: float = 0.0


def carried_out(
    spec: RunSpec,
    id_: str,
    cpu: bool = False,
    bound: str = "",
    family: str = "",
    shared: bool = False,
    by_layer: bool = False,
    recorded: bytes | None = None,
) -> Answer:
    """One run as plain data: its result without the time that it took, and what is ranked of every request.

    A run that cannot be carried out is a record, too: its status, and the reason in a line. `kept` is false where
    nobody can say that it would end in the same way once more.

    Args:
        cpu, bound: the lower bound by that id, which others share, is answered, too; none where the id is empty.
        family: of points that may be timed by one another's decisions; '': it has none. shared: others ask what this
            one finds out. by_layer: keep `by_layer` too, a hundred times the rest.
        recorded: what another process found out; None: nothing.
    """
    from sim.results.sampling import times_of

    found: dict[str, Any] = {"schema": SCHEMA, "id": id_, "status": OK, "reason": "", "kept": True}
    least, by_recording, wall_s, tells = None, False, 0.0, None
    try:
        with closing(_set_up(spec, id_)) as setup:
            if setup.run_id != id_:
                raise CheckFailed(
                    f"point {id_}, got run_id {setup.run_id}: what it is made of has changed since the sweep began, or "
                    "is another on this worker; begin a new sweep"
                )
            least = _bound_of(setup, cpu, bound) if bound else None
            outcome, by_recording = _outcome(setup, family, recorded, by_layer)
    except CheckFailed:
        raise
    except MoesimError as error:
        found |= {"status": status_of(error), "reason": str(error)}
    except Exception as error:  # a mistake of a policy's own: the other points are none the worse for it
        found |= {"status": FAILED, "reason": _mistake(error, spec), "kept": False}
    else:
        wall_s = outcome.result.wall_s  # not recorded: equal points are equal bytes
        result = outcome.result.to_dict() | {"wall_s": 0.0}
        if not by_layer:
            del result["by_layer"]
        found |= {"result": result, "requests": [list(one) for one in times_of(outcome.report)]}
    if shared and recorded is None and family in _KEPT:
        tells = b"" if (kept := _KEPT[family]) is None else kept.to_bytes()
    return Answer(found, least, by_recording, tells, wall_s)


def _outcome(setup: Setup, family: str, recorded: bytes | None, by_layer: bool) -> tuple[Outcome, bool]:
    """The outcome of a point without its bound, equal to a run of its own; and whether another's decisions timed it."""
    if family and family not in _KEPT:
        outcome, found = None, None
        if recorded is None:
            outcome, found = record(setup, by_layer)
        elif recorded:
            shape = setup.model.n_moe_layers, setup.model.n_experts
            found = Recording.from_bytes(recorded, setup.trace, setup.requests, setup.pieces, shape)
        while len(_KEPT) >= MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[family] = found
        if outcome is not None:
            return outcome, False
    recording = _KEPT[family] if family else None
    if recording is None:
        return execute(setup, bounds=False, by_layer=by_layer), False
    return timed(setup, recording, by_layer), True


def only_bound(spec: RunSpec, cpu: bool, bound: str) -> Answer:
    """The same of a point that is recorded while its bound is not."""
    return Answer(None, bound_record(spec, cpu, bound))


def bound_record(spec: RunSpec, cpu: bool, id_: str) -> dict[str, Any]:
    """The lower bound of one run (`sim.bounds.time_bound.lower_bound`) as plain data."""
    with closing(prepare(spec)) as setup:
        return _bound_of(setup, cpu, id_)


def _bound_of(setup: Setup, cpu: bool, id_: str) -> dict[str, Any]:
    from sim.bounds.time_bound import lower_bound

    least = lower_bound(setup, cpu)
    return {"schema": SCHEMA, "id": id_, "bound": None if least is None else least._asdict()}


ERRORS: dict[str, type[MoesimError]] = {
    DOES_NOT_FIT: DoesNotFit,
    REFUSED: BadInput,
    BROKE_A_RULE: IllegalDecision,
    FAILED: CheckFailed,
}
"""What ended a point of that status, the narrower first."""


def status_of(error: MoesimError) -> str:
    """What a point is called that ended so."""
    return next((status for status, kind in ERRORS.items() if isinstance(error, kind)), FAILED)


def _digest(data: dict[str, Any]) -> str:
    return of_text(to_json(data))[:12]
