"""Several policies on the same trace, hardware and memory: what each run gave, ranked, and what could not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from sim.base.errors import BadInput, IllegalDecision, MoesimError
from sim.studies.ranking import Row, ranked

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.setup.setup import Setup
    from sim.studies.pool import Call

# Below so many layers of output tokens over all policies, starting processes takes longer than the work.
FEW_LAYERS = 20_000

Note = Callable[[str], None]


class Missing(NamedTuple):
    """A policy that cannot run here."""

    label: str
    reason: str
    status: int


@dataclass
class Candidate:
    """A policy to compare. `named`: the user asked for it by name, so that its words have to be right."""

    label: str
    spec: RunSpec
    named: bool
    run_id: str = ""
    bounded_by: tuple[Any, ...] = ()  # all that its lower bound depends on; the second item: experts on the CPU or not


def run_all(
    candidates: list[Candidate],
    workers: int | None,
    note: Note,
    first: Callable[[Setup], None],
    progress: Callable[[int, int], None],
) -> tuple[list[Row], list[Missing]]:
    """Every run's result, in the order asked for, and what could not run.

    The inputs of all are checked before the first starts. A lower bound is worked out once for all runs on equal terms:
    the same lanes and room (bounds in hypothetical memory have more), machine, stack and model.

    Args:
        note: told of runs that are the same, and why none can run. first: told of the first run that is set up.
        progress: told of (calls answered, in all).

    Raises:
        BadInput: the words of a policy that was named are wrong, or none can run.
    """
    from sim.studies.pool import answers, bound_of, n_cores, replay

    ready, failed, n_layers = checked(candidates, note, first)
    if not ready:
        none_ran(candidates, failed, note)
    terms: dict[tuple[Any, ...], RunSpec] = {}
    for candidate in ready:
        terms.setdefault(candidate.bounded_by, candidate.spec)
    calls: list[Call] = [(replay, (candidate.spec,)) for candidate in ready]
    calls += [(bound_of, (spec, key[1])) for key, spec in terms.items()]
    if workers is None:
        workers = n_cores() if n_layers >= FEW_LAYERS else 1
    found: dict[int, Any] = {}
    with closing(answers(calls, workers)) as stream:
        for index, answer in stream:
            found[index] = answer
            if isinstance(answer, MoesimError):
                failed[ready[index].label] = answer
            progress(len(found), len(calls))
    bounds = dict(zip(terms, (found[len(ready) + i] for i in range(len(terms))), strict=True))
    rows = []
    for index, candidate in enumerate(ready):
        if not isinstance(answer := found[index], MoesimError):
            result, sample = answer
            result.set_beside(bounds[candidate.bounded_by])
            rows.append(Row(candidate.label, result, sample[ranked(result)]))
    if not rows:
        none_ran(candidates, failed, note)
    missing = [
        Missing(c.label, str(failed[c.label]), failed[c.label].exit_code) for c in candidates if c.label in failed
    ]
    return rows, missing


def checked(
    candidates: list[Candidate], note: Note, first: Callable[[Setup], None]
) -> tuple[list[Candidate], dict[str, MoesimError], int]:
    """Candidates that can be set up, each run once; why the others cannot; layers of output tokens in all of them.

    Raises:
        BadInput: the words of a policy that was named are wrong.
    """
    from sim.run import prepare
    from sim.setup.prepare import check_words

    ready: list[Candidate] = []
    failed: dict[str, MoesimError] = {}
    seen: dict[str, Candidate] = {}
    model, n_layers = None, 0
    for candidate in candidates:
        if candidate.spec.model is None and model is not None:
            # Which model has the trace's shape is looked up once: it takes reading the whole catalogue.
            candidate.spec = msgspec.structs.replace(candidate.spec, model=model)
        try:
            setup = prepare(candidate.spec)
        except MoesimError as error:
            if candidate.named:
                check_words(candidate.spec)
            failed[candidate.label] = error
            continue
        try:
            if not seen:
                first(setup)
            model = setup.model.id if candidate.spec.model is None else model
            candidate.run_id, candidate.bounded_by = setup.run_id, _terms(setup)
            n_layers += setup.model.n_moe_layers * sum(request.outputs for request in setup.requests)
        finally:
            setup.close()
        if (same := seen.get(candidate.run_id)) is None:
            seen[candidate.run_id] = candidate
            ready.append(candidate)
        elif candidate.named:
            note(f"note: {candidate.label} is the same run as {same.label}; it is shown once")
    return ready, failed, n_layers


def _terms(setup: Setup) -> tuple[Any, ...]:
    """What a lower bound depends on, of all that may differ between runs of one comparison."""
    meant = setup.resolved()
    digests = (meant[f"{what}_sha256"] for what in ("hw", "model", "engine", "trace"))
    scheduler = setup.scheduler.name, meant.get("scheduler_sha256")
    return setup.memory.expert_bytes, "cpu" in setup.policy.traits, setup.leaves_unread, *scheduler, *digests


def by_scheduler(named: str | None) -> list[tuple[str | None, str]]:
    """`--scheduler fcfs,sjf` as (scheduler, what a label says of it): each policy runs under each of them. Raises
    BadInput."""
    names = [] if named is None else [name.strip() for name in named.split(",")]
    if not all(names):
        raise BadInput(f"--scheduler, got {named!r}: an empty name in the list; write e.g. --scheduler fcfs,sjf")
    if len(names) < 2:
        return [(named, "")]
    return [(name, f", {name}") for name in dict.fromkeys(names)]


def expanded(policies: Sequence[str], what: str) -> list[tuple[str, bool]]:
    """(policy, whether it was named) of all asked for; `all` stands for every one known. Raises BadInput for none."""
    if not policies:
        raise BadInput(f"{what} is missing: name at least one, e.g. --policy fine_moe --policy lru, or --policy all")
    named = [(item, True) for item in policies if item.lower() != "all"]
    if len(named) == len(policies):
        return named
    from sim.policy.registry import policies as known
    from sim.policy.registry import unusable

    return [*named, *((name, False) for name in (*known(), *unusable()))]


def none_ran(candidates: list[Candidate], failed: dict[str, MoesimError], note: Note) -> NoReturn:
    """Say why: the one reason there is, or each policy's."""
    first = next(failed[c.label] for c in candidates if c.label in failed)
    if len({str(error) for error in failed.values()}) == 1:
        if isinstance(first, IllegalDecision):  # it tells of a decision, not of whose it was
            raise IllegalDecision(f"policy {next(iter(failed))}: {first}")
        raise first
    for candidate in candidates:
        if candidate.label in failed:
            note(f"not run: {candidate.label}: {failed[candidate.label]}")
    raise BadInput(f"--policy, got {len(failed)} policies: none of them can run here; the lines above say why")
