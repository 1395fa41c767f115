"""Several policies on the same trace, hardware and memory: what each run gave, ranked, and what could not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

from sim.base.errors import BadInput, IllegalDecision, MoesimError
from sim.options import RunSpec
from sim.studies.ranking import Row
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Runner
from sim.studies.runner.work import ERRORS, Resolved, closing_ready, meaning

if TYPE_CHECKING:
    from sim.setup.setup import Setup

NOT_YET = Resolved("", RunSpec(policy="", hw=""))
Note = Callable[[str], None]


class Missing(NamedTuple):
    """A policy that cannot run here."""

    label: str
    reason: str
    status: int


@dataclass
class Candidate:
    """A policy to compare. `named`: the user asked for it by name, so that its words have to be right. `asked`: what it
    means, once it is checked."""

    label: str
    spec: RunSpec
    named: bool
    asked: Resolved = NOT_YET


@closing_ready()
def run_all(
    candidates: list[Candidate],
    workers: int | None,
    note: Note,
    first: Callable[[Setup], None],
    progress: Callable[[int, int], None],
) -> tuple[list[Row], list[Missing]]:
    """Every run's result, in the order asked for, and what could not run.

    The inputs of all are checked before the first starts. A lower bound is worked out once for all runs on equal terms:
    the same lanes and room (bounds in hypothetical memory have more), machine, engine and model.

    Args:
        note: told of runs that are the same, and why none can run. first: told of the first run that is set up.
        progress: told of (calls answered, in all).

    Raises:
        BadInput: the words of a policy that was named are wrong, or none can run.
    """
    ready, failed = checked(candidates, note, first)
    if not ready:
        none_ran(candidates, failed, note)
    runner = Runner(Records(), workers, lambda n, n_all, _title: progress(n, n_all), by_layer=True)
    runner.run([candidate.asked for candidate in ready], lambda _n, _all: "", bounds=True)
    rows = []
    for candidate in ready:
        outcome = runner.outcome(candidate.asked, True)
        if outcome.result is None:
            failed[candidate.label] = ERRORS[outcome.status](outcome.reason)
            continue
        assert outcome.sample is not None
        rows.append(Row(candidate.label, outcome.result, outcome.sample))
    if not rows:
        none_ran(candidates, failed, note)
    missing = [
        Missing(c.label, str(failed[c.label]), failed[c.label].exit_code) for c in candidates if c.label in failed
    ]
    return rows, missing


def checked(
    candidates: list[Candidate], note: Note, first: Callable[[Setup], None]
) -> tuple[list[Candidate], dict[str, MoesimError]]:
    """Candidates that can be set up, each run once, and why the others cannot.

    Raises:
        BadInput: the words of a policy that was named are wrong.
    """
    from sim.run import prepare
    from sim.setup.prepare import check_words

    ready: list[Candidate] = []
    failed: dict[str, MoesimError] = {}
    seen: dict[str, Candidate] = {}
    model = None
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
        if not seen:
            first(setup)
        model = setup.model.id if candidate.spec.model is None else model
        candidate.asked = meaning(setup)
        if (same := seen.get(candidate.asked.id)) is None:
            seen[candidate.asked.id] = candidate
            ready.append(candidate)
        elif candidate.named:
            note(f"note: {candidate.label} is the same run as {same.label}; it is shown once")
    return ready, failed


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
