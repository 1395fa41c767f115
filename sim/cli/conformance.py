"""`moesim conformance`: does a policy, or a scheduler, keep the rules every one must keep?"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions


@click.command(cls=UniqueOptions)
@click.argument("name", required=False)
@click.option("--scheduler", metavar="NAME|FILE", help="Of this scheduler instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str | None, scheduler: str | None, as_json: bool) -> int:
    """Run every conformance rule on the policy NAME (or an alias, or a file); exit 1 when one does not hold."""
    if (name is None) == (scheduler is None):
        raise click.UsageError("name a policy, as in moesim conformance lru; or a scheduler, by --scheduler fcfs")
    from sim.conformance.suite import ADVICE, FAIL, PASS, SAME, SKIP, conform, conform_scheduler

    if scheduler is not None:
        from sim.workload.schedulers import find as find_scheduler

        what, verdicts = "scheduler", list(conform_scheduler(find_scheduler(scheduler)))
    else:
        from sim.policy.registry import find

        assert name is not None
        what, verdicts = "policy", list(conform(find(name)))
    who = verdicts[0].policy
    counts = {word: sum(v.verdict == word for v in verdicts) for word in (PASS, FAIL, SKIP, ADVICE, SAME)}
    if as_json:
        hidden = ("policy", "cause")
        checks = [{key: value for key, value in asdict(v).items() if key not in hidden} for v in verdicts]
        click.echo(json.dumps({"schema": 1, what: who, **counts, "checks": checks}, indent=2))
    else:
        from sim.base.tables import render, table

        verdict = "keeps every rule that applies" if not counts[FAIL] else f"breaks {counts[FAIL]} of its rules"
        told = [f"{n} {word}" for word, n in counts.items() if n or word in (PASS, FAIL, SKIP)]
        say(f"{who} {verdict}: {', '.join(told)}\n")
        rows = table("rule", "verdict", "why", numbers=False)
        for v in verdicts:
            rows.add_row(v.check, v.verdict, v.reason if v.verdict != PASS else "")
        say(render(rows), nl=False)
    return 1 if counts[FAIL] else 0
