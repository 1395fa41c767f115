"""`moesim compare`: several policies on the same trace, hardware and memory, ranked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import note, say
from sim.cli.spec_options import spec_options, specify, tell_drawing
from sim.cli.unique_options import UniqueOptions
from sim.figures import SCHEMA

if TYPE_CHECKING:
    from sim.setup.setup import Setup
    from sim.studies.compare import Candidate


@click.command(
    cls=UniqueOptions,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim compare --hw rtx3090 --policy lru --policy 'lfu scope=layer' --policy fine_moe",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=VALUE ...'",
    help="A policy, with parameters of its own, engine= or predictor= after its name; repeat it, or `all`.",
)
@spec_options
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Policies replayed at the same time; default: the cores. The output is the same.",
)
@click.option(
    "--against",
    metavar="NAME",
    help="Put this policy at 1.00x and say the others relative to it; it is compared if --policy does not name it.",
)
@click.option(
    "--out",
    type=OutputFolder(),
    metavar="DIR",
    help="Keep what --json prints in a new folder, for `moesim report`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    workers: int | None,
    against: str | None,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Rank policies by time per output token on one trace, GPU and expert budget; bounds are listed beside them.

    A policy that cannot run here is listed at the end with its reason; the others are ranked.
    """
    from sim.studies.against import baseline, with_baseline
    from sim.studies.answer_file import begin, keep
    from sim.studies.common_bound import common_bound, facts_of
    from sim.studies.compare import by_scheduler, expanded, run_all
    from sim.studies.compare_text import verdict
    from sim.studies.ranking import ranks_of, row_facts, speed
    from traces.stats.realism import judge

    schedulers = by_scheduler(given["scheduler"])
    items = with_baseline(expanded(policies, "--policy"), against, [said for _, said in schedulers])
    candidates = [
        specified({**given, "scheduler": scheduler}, settings, item, named, said)
        for scheduler, said in schedulers
        for item, named in items
    ]
    if out is not None:
        begin(out)
    realism: list[str] = []

    def first(setup: Setup) -> None:
        """What holds for all runs is said once."""
        for text in setup.notes():
            note(text)
        realism.append(judge(setup.trace, quick=True).line)

    tell_drawing(candidates[0].spec)
    with Bar("comparing policies") as bar:
        rows, missing = run_all(candidates, workers, note, first, bar.update)
    rows.sort(key=lambda row: speed(row.result))
    found, base = ranks_of(rows), baseline(rows, candidates, against)
    least = common_bound(row.result for row in rows)
    bound = None if least is None else least[0]
    not_run = [{"applied_as": label, "reason": reason} for label, reason, _ in missing]
    runs = [row_facts(row, found.get(row.label), bound, base) for row in rows]
    answer = {
        "schema": SCHEMA,
        "answer": verdict(rows, found, base),
        "realism": realism[0],
        "common_bound": facts_of(bound),
        **({} if base is None else {"against": base.label}),
        "runs": runs,
        "not_run": not_run,
    }
    kept = None if out is None else keep(out, answer)
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(answer))
    else:
        from sim.studies.compare_text import served, table_of

        say(verdict(rows, found, base))
        say(served(rows))
        say(realism[0])
        say()
        say(table_of(rows, found, base, [label for label, *_ in missing]), nl=False)
        if missing:
            say()
        for label, reason, _ in missing:
            say(f"not run: {label}: {reason}")
        if kept is not None:
            say()
            say(f"written: {kept} (moesim report {out} makes a page of it)")
    if any(status == 1 for *_, status in missing):
        sys.exit(1)  # a policy broke a rule: that is a fault of its own, not of what it was asked


def specified(given: dict[str, Any], settings: tuple[str, ...], item: str, named: bool, said: str = "") -> Candidate:
    """`fine_moe variant=code` as a run; `said` tells it from others of that policy. Raises BadInput."""
    from sim.options import option_meant
    from sim.policy.policy_file import split
    from sim.setup.naming import for_one
    from sim.studies.compare import Candidate

    if not item.split():
        raise BadInput("--policy, got an empty name: name a policy, or `all`; `moesim policies` lists them")
    name, *own = split(item)
    # Parameters of one policy are no business of the others: only dotted names pass through --set.
    bare = [pair for pair in settings if "." not in pair.partition("=")[0]]
    if bare:
        key, _, value = bare[0].partition("=")
        of_all = f"; of all, {way_out}" if (way_out := option_meant(key, value)) else ""
        raise BadInput(
            f"--set, got {bare[0]!r}: which policy's? write it behind the name, --policy 'NAME {bare[0]}'{of_all}"
        )
    for_one(name, own)
    spec, _ = specify({**given, "policy": item}, settings, None)
    return Candidate(item + said, spec, named)
