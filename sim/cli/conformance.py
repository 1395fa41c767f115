"""`moesim conformance`: does a policy keep the rules every policy must keep?"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from sim.cli.say import say


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str, as_json: bool) -> int:
    """Run every conformance rule on the policy NAME (or an alias); exit 1 when one does not hold."""
    from sim.conformance.suite import FAIL, PASS, conform
    from sim.policy.registry import find

    kind = find(name)
    verdicts = list(conform(kind))
    counts = {word: sum(v.verdict == word for v in verdicts) for word in ("pass", "fail", "not applicable")}
    if as_json:
        checks = [{key: value for key, value in asdict(v).items() if key != "policy"} for v in verdicts]
        click.echo(json.dumps({"schema": 1, "policy": kind.name, **counts, "checks": checks}, indent=2))
    else:
        from sim.base.tables import render, table

        verdict = "keeps every rule that applies" if not counts[FAIL] else f"breaks {counts[FAIL]} of its rules"
        say(
            f"{kind.name} {verdict}: {counts[PASS]} pass, {counts[FAIL]} fail, "
            f"{counts['not applicable']} not applicable\n"
        )
        rows = table("rule", "verdict", "why", numbers=False)
        for v in verdicts:
            rows.add_row(v.check, v.verdict, v.reason if v.verdict != PASS else "")
        say(render(rows), nl=False)
    return 1 if counts[FAIL] else 0
