"""`moesim compare`: several policies on the same trace, hardware and memory, ranked."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click
import msgspec

from sim.base.errors import BadInput, IllegalDecision, MoesimError
from sim.cli.once import OnceEach
from sim.cli.progress import Bar
from sim.cli.spec_options import notes, spec_options, specify
from sim.studies.ranking import Row, ranked, ranks_of, speed

if TYPE_CHECKING:
    from sim.setup.prepare import Setup
    from sim.setup.spec import RunSpec
    from sim.studies.pool import Call
    from sim.studies.ranking import Rank

# Below so many layers of output tokens over all policies, starting processes takes longer than the work.
FEW_LAYERS = 20_000


class Missing(NamedTuple):
    """A policy that cannot run here."""

    label: str
    reason: str
    status: int


@dataclass
class Candidate:
    """A policy to compare. `named`: the user asked for it by name, so that it has to run."""

    label: str
    spec: RunSpec
    named: bool
    run_id: str = ""
    bounded_by: tuple[Any, ...] = ()  # all that its lower bound depends on; the second item: experts on the CPU or not


@click.command(
    cls=OnceEach,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim compare --hw rtx3090 --policy lru --policy 'lfu scope=layer' --policy fine_moe",
)
@click.option("--policy", "policies", multiple=True, metavar="'NAME KEY=VALUE ...'",
              help="A policy, with parameters of its own after its name; repeat it, or `all`.")  # fmt: skip
@spec_options
@click.option("--workers", type=click.IntRange(min=1), metavar="N",
              help="Policies replayed at the same time; default: the cores. The output is the same.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    policies: tuple[str, ...], settings: tuple[str, ...], workers: int | None, as_json: bool, **given: Any
) -> None:
    """Rank policies by time per output token on one trace, GPU and expert budget; bounds are listed beside them.

    A policy that `all` stands for and that cannot run here is listed at the end; one that is named has to run.
    """
    candidates = [specified(given, settings, item, named) for item, named in expanded(policies)]
    rows, missing = run_all(candidates, workers)
    rows.sort(key=lambda row: speed(row.result))
    found = ranks_of(rows)
    if as_json:
        from sim.base.json import to_json

        not_run = [{"as": label, "reason": reason} for label, reason, _ in missing]
        runs = [{"as": row.label, **row.result, **_standing(found.get(row.label))} for row in rows]
        click.echo(to_json({"schema": 1, "runs": runs, "not_run": not_run}))
    else:
        from sim.studies.compare_text import served, table_of, verdict

        click.echo(verdict(rows, found))
        click.echo(served(rows))
        click.echo()
        click.echo(table_of(rows, found), nl=False)
        if missing:
            click.echo()
        for label, reason, _ in missing:
            click.echo(f"not run: {label}: {reason}")
    if any(status == 1 for *_, status in missing):
        sys.exit(1)  # a policy broke a rule: that is a fault of its own, not of what it was asked


def _standing(rank: Rank | None) -> dict[str, Any]:
    return {"rank": None if rank is None else [rank.best, rank.worst],
            "not_told_apart": None if rank is None else rank.tied}  # fmt: skip


def expanded(policies: tuple[str, ...]) -> list[tuple[str, bool]]:
    """(policy, whether it was named) of all asked for; `all` stands for every one known. Raises BadInput for none."""
    if not policies:
        raise BadInput("--policy is missing: name at least one, e.g. --policy fine_moe --policy lru, or --policy all")
    named = [(item, True) for item in policies if item.lower() != "all"]
    if len(named) == len(policies):
        return named
    from sim.policy.registry import policies as known
    from sim.policy.registry import unusable

    return [*named, *((name, False) for name in (*known(), *unusable()))]


def specified(given: dict[str, Any], settings: tuple[str, ...], item: str, named: bool) -> Candidate:
    """`fine_moe variant=code` as a run. Raises BadInput."""
    from sim.policy.policy_file import split

    if not item.split():
        raise BadInput("--policy, got an empty name: name a policy, or `all`; `moesim policies` lists them")
    name, *own = split(item)
    # Parameters of one policy are no business of the others: only shared groups pass through --set.
    bare = [pair for pair in settings if "." not in pair.partition("=")[0]]
    if bare:
        raise BadInput(f"--set, got {bare[0]!r}: which policy's? write it behind the name, --policy 'NAME {bare[0]}'")
    spec, _ = specify({**given, "policy": name}, (*settings, *own), None)
    return Candidate(item, spec, named)


def run_all(candidates: list[Candidate], workers: int | None) -> tuple[list[Row], list[Missing]]:
    """Every run's result, in the order asked for, and what could not run.

    The inputs of all are checked before the first starts. A lower bound is worked out once for all runs on equal terms:
    the same lanes and room (bounds in hypothetical memory have more), machine, stack and model.

    Raises:
        BadInput: a policy that was named cannot run, or none can.
    """
    from sim.bounds.time_bound import beside
    from sim.studies.pool import answers, bound_of, n_cores, replay

    ready, failed, n_layers = checked(candidates)
    if not ready:
        _none_ran(candidates, failed)
    terms: dict[tuple[Any, ...], RunSpec] = {}
    for candidate in ready:
        terms.setdefault(candidate.bounded_by, candidate.spec)
    calls: list[Call] = [(replay, (candidate.spec,)) for candidate in ready]
    calls += [(bound_of, (spec, key[1])) for key, spec in terms.items()]
    if workers is None:
        workers = n_cores() if n_layers >= FEW_LAYERS else 1
    found: dict[int, Any] = {}
    with Bar("comparing policies") as shown, closing(answers(calls, workers)) as stream:
        for index, answer in stream:
            found[index] = answer
            if isinstance(answer, MoesimError):
                if ready[index].named:
                    if isinstance(answer, IllegalDecision):  # it tells of a decision, not of whose it was
                        raise IllegalDecision(f"policy {ready[index].label}: {answer}")
                    raise answer
                failed[ready[index].label] = answer
            shown.update(len(found), len(calls))
    bounds = dict(zip(terms, (found[len(ready) + i] for i in range(len(terms))), strict=True))
    rows = []
    for index, candidate in enumerate(ready):
        if not isinstance(answer := found[index], MoesimError):
            result, sample = answer
            result["bound"] = beside(bounds[candidate.bounded_by], result)
            rows.append(Row(candidate.label, result, sample[ranked(result)]))
    if not rows:
        _none_ran(candidates, failed)
    missing = [Missing(c.label, str(failed[c.label]), failed[c.label].exit_code)
               for c in candidates if c.label in failed]  # fmt: skip
    return rows, missing


def checked(candidates: list[Candidate]) -> tuple[list[Candidate], dict[str, MoesimError], int]:
    """Candidates that can be set up, each run once; why the others cannot; layers of output tokens in all of them.

    Raises:
        BadInput: a policy that was named cannot be set up.
    """
    from sim.run import prepare

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
                raise
            failed[candidate.label] = error
            continue
        try:
            if not seen:
                for note in notes(setup):
                    click.echo(note, err=True)
            model = setup.model.id if candidate.spec.model is None else model
            candidate.run_id, candidate.bounded_by = setup.run_id, _terms(setup)
            n_layers += setup.model.n_moe_layers * sum(request.outputs for request in setup.requests)
        finally:
            setup.close()
        if (first := seen.get(candidate.run_id)) is None:
            seen[candidate.run_id] = candidate
            ready.append(candidate)
        elif candidate.named:
            click.echo(f"note: {candidate.label} is the same run as {first.label}; it is shown once", err=True)
    return ready, failed, n_layers


def _terms(setup: Setup) -> tuple[Any, ...]:
    """What a lower bound depends on, of all that may differ between runs of one comparison."""
    from sim.policy.api import overrides

    meant = setup.resolved()
    split = setup.run_id if setup.spec.batch > 1 and overrides(setup.policy, "split_step") else ""
    digests = (meant[f"{what}_sha256"] for what in ("hw", "model", "stack", "trace"))
    return setup.memory.expert_bytes, "cpu" in setup.policy.traits, split, *digests


def _none_ran(candidates: list[Candidate], failed: dict[str, MoesimError]) -> NoReturn:
    """Say why: the one reason there is, or each policy's."""
    first = next(failed[c.label] for c in candidates if c.label in failed)
    if len({str(error) for error in failed.values()}) == 1:
        raise first
    for candidate in candidates:
        if candidate.label in failed:
            click.echo(f"not run: {candidate.label}: {failed[candidate.label]}", err=True)
    raise BadInput(f"--policy, got {len(failed)} policies: none of them can run here; the lines above say why")
