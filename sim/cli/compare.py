"""`moesim compare`: several policies on the same trace, hardware and memory, ranked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from sim.cli.run import SHOW_BAR_AFTER_S, spec_options, specify
from sim.errors import BadInput

if TYPE_CHECKING:
    from sim.spec import RunSpec


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim compare --hw rtx3090 --policy lru --policy 'lfu scope=layer' --policy fine_moe",
)
@click.option("--policy", "policies", multiple=True, metavar="'NAME KEY=VALUE ...'",
              help="A policy, with parameters of its own after its name; repeat it, or `all`.")  # fmt: skip
@spec_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(policies: tuple[str, ...], settings: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Rank policies by time per output token on one trace, GPU and expert budget; bounds are listed beside them."""
    results = run_all([specified(given, settings, item) for item in expanded(policies)], quiet=as_json)
    results.sort(key=lambda found: _speed(found[1]))
    if as_json:
        from sim.output import to_json

        click.echo(to_json({"schema": 1, "runs": [{"as": label, **result} for label, result in results]}))
        return
    click.echo(verdict(results))
    click.echo()
    click.echo(table_of(results), nl=False)


def expanded(policies: tuple[str, ...]) -> list[str]:
    """The policies asked for; `all` stands for every one known. Raises BadInput when none is named."""
    if not policies:
        raise BadInput("--policy is missing: name at least one, e.g. --policy fine_moe --policy lru, or --policy all")
    if "all" not in policies:
        return list(policies)
    from sim.registry import policies as known

    return [*known(), *(item for item in policies if item != "all" and item not in known())]


def specified(given: dict[str, Any], settings: tuple[str, ...], item: str) -> tuple[str, RunSpec]:
    """`fine_moe variant=code` as a label and a run. Raises BadInput."""
    name, *own = item.split()
    # Parameters of one policy are no business of the others: only shared groups pass through --set.
    bare = [pair for pair in settings if "." not in pair.partition("=")[0]]
    if bare:
        raise BadInput(f"--set, got {bare[0]!r}: which policy's? write it behind the name, --policy 'NAME {bare[0]}'")
    spec, _ = specify({**given, "policy": name}, (*settings, *own), None)
    return item, spec


def run_all(runs: list[tuple[str, RunSpec]], quiet: bool) -> list[tuple[str, dict[str, Any]]]:
    """Every run's result, in order; the inputs of all are checked before the first starts."""
    from sim.run import execute, prepare

    setups = []
    try:
        for label, spec in runs:
            setups.append((label, prepare(spec)))
        done = []
        for index, (label, setup) in enumerate(setups, 1):
            began_s = time.monotonic()
            done.append((label, execute(setup).result))
            if not quiet and time.monotonic() - began_s > SHOW_BAR_AFTER_S:
                click.echo(f"{index} of {len(setups)}: {label}", err=True)
        return done
    finally:
        for _, setup in setups:
            setup.close()


def _speed(result: dict[str, Any]) -> float:
    tpot_s = result["tpot_s"]["mean"]
    return float(tpot_s if tpot_s is not None else result["ttft_s"]["mean"])


def _is_bound(result: dict[str, Any]) -> bool:
    return "oracle" in result["labels"] or any(label.startswith("does not fit") for label in result["labels"])


def verdict(results: list[tuple[str, dict[str, Any]]]) -> str:
    """The fastest system, and by how much the next one is slower."""
    from sim.units import show_seconds

    systems = [(label, result) for label, result in results if not _is_bound(result)]
    if not systems:
        return "only bounds were compared"
    best, first = systems[0]
    text = f"{best}: {show_seconds(_speed(first))} per token on {first['hw']}"
    if len(systems) > 1 and _speed(first) > 0:
        next_label, second = systems[1]
        text += f", {_speed(second) / _speed(first):.2f}x faster than {next_label}"
    return text


def table_of(results: list[tuple[str, dict[str, Any]]]) -> str:
    """One row per run, fastest first."""
    from sim.cli.tables import render, table
    from sim.units import show_bytes, show_frac, show_seconds

    rows = table("policy", "TPOT", "TTFT", "hit", "late hit", "to the GPU per token", "copies wait", "bound by", "note")
    for label, result in results:
        outputs = result["decode_tokens"] + result["requests"]
        notes = [label_ for label_ in result["labels"] if label_ != "oracle"]
        notes = ["oracle", *notes] if "oracle" in result["labels"] else notes
        tpot_s = result["tpot_s"]["mean"]
        rows.add_row(
            label, "-" if tpot_s is None else show_seconds(tpot_s), show_seconds(result["ttft_s"]["mean"]),
            show_frac(result["hit_rate"]), show_frac(result["late_hit_rate"]),
            show_bytes(result["h2d_bytes"] / outputs), show_frac(result["bound_by"]["decode"]["copy"]),
            str(result["bound_by"]["resource"]), ", ".join(notes),
        )  # fmt: skip
    return render(rows)
