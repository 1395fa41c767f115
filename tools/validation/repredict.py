"""Predict kept comparisons anew: `python -m tools.validation.repredict [NAME...]`, a minute; nothing is measured.

Every case of NAME.json (cpu-backend, where none is named) is simulated by today's engine on the profile that was
measured then, fitted as it lies here, and set beside what was measured and predicted then. Policy code is charged what
the kept prediction charged for it, in equal parts to the calls of its hooks, since what it takes now is that of another
day.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import click

from sim.base.errors import BadInput
from tools.validation.remeasure import HERE, NAME
from traces.format.layout import SUFFIX

# The trace, with DuoServe's predictor for it, on which files were measured whose model has another bundled one by now.
# They are in the repository, and in no wheel or source archive.
FORMER = dict.fromkeys(("h200-deepseek", "h200-deepseek-half"), "deepseek-moe-16b-small")


class Again(NamedTuple):
    """Seconds per token of a case, as measured and predicted then, and as predicted now; and to the first token."""

    policy: str
    model: str
    experts: int
    measured_s: float
    then_s: float
    now_s: float
    ttft_measured_s: float
    ttft_now_s: float

    @property
    def error_frac(self) -> float:
        """Of today's prediction."""
        return self.now_s / self.measured_s - 1.0


def kept_cases(name: str = NAME) -> list[dict[str, Any]]:
    """What was compared; `trace` is the one that it ran on, None where that is its model's bundled one to this day."""
    found: list[dict[str, Any]] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))["comparisons"]
    return [{"trace": FORMER.get(name), **case} for case in found]


def ran_on(case: dict[str, Any]) -> tuple[str | None, str | None]:
    """Trace and predictor of a case: files kept here where its trace is bundled no more, else its name and none.

    Raises:
        BadInput: they are not here.
    """
    name = case["trace"]
    if name not in FORMER.values():
        return name, None
    trace, predictor = (HERE / f"{name}{end}" for end in (SUFFIX, f".{case['policy']}{SUFFIX}"))
    if not trace.is_file():
        raise BadInput(f"trace of the case, got no {trace}: it is in the repository alone; run this in a clone")
    return str(trace), str(predictor) if predictor.is_file() else None


def again(case: dict[str, Any], contention: bool = True) -> Again:
    """Predict one case anew, with the parameters that it ran with, whatever their defaults are today."""
    from sim.options import RunSpec
    from sim.real.validate import Case

    trace, predictor = ran_on(case)
    spec = RunSpec(
        policy=case["policy"],
        hw=str(HERE / f"{case['hw']}.yaml"),
        model=case["model"],
        trace=trace,
        predictor=predictor,
        precision=case["precision"],
        requests=case["requests"],
        cache=None if case["experts"] is None else f"{case['experts']}experts",
        sim_contention=contention,
        set={name: value for name, value in case["params"].items() if name != "predictor"},
    )
    run = Case(spec, case["outputs"])
    n_calls = run.predict(each_s=0.0).n_policy_calls
    result = run.predict(case["policy_code_s"]["predicted"] / max(n_calls, 1)).result
    now_s, ttft_s = result.tpot_s.mean, result.ttft_s.mean
    assert now_s is not None
    assert ttft_s is not None
    then, first = case["tpot_s"], case["ttft_s"]["measured"]
    return Again(
        case["policy"], case["model"], case["experts"], then["measured"], then["predicted"], now_s, first, ttft_s
    )


def errors(rows: Iterable[Again]) -> tuple[float, float]:
    """Median and worst of today's errors, as shares."""
    found = [abs(row.error_frac) for row in rows]
    return statistics.median(found), max(found)


def off_by(predicted_s: float, measured_s: float) -> str:
    """A prediction's error, as it is printed."""
    return f"{100 * (predicted_s / measured_s - 1):+.1f}%"


LINE = "{:<18}{:<20}{:>8}{:>13}{:>9}{:>9}{:>10}{:>9}"


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME]...")
def command(names: tuple[str, ...]) -> None:
    """Predict and print."""
    cases = [case for name in names or (NAME,) for case in kept_cases(name)]
    found: dict[str, tuple[float, float]] = {}
    for contention in ("on", "off"):
        rows = [again(case, contention == "on") for case in cases]
        found[contention] = errors(rows)
        if contention == "on":
            click.echo(LINE.format("model", "policy", "experts", "measured ms", "then", "now", "TTFT ms", "now"))
            for row in rows:
                off = (off_by(s, row.measured_s) for s in (row.then_s, row.now_s))
                first = f"{1e3 * row.ttft_measured_s:.0f}", off_by(row.ttft_now_s, row.ttft_measured_s)
                click.echo(LINE.format(row.model, row.policy, row.experts, f"{1e3 * row.measured_s:.1f}", *off, *first))
    for contention, (median, worst) in found.items():
        said = f"TPOT off by {100 * median:.1f}% (median), {100 * worst:.1f}% (worst)"
        click.echo(f"--set sim.contention={contention}: {said} of {len(cases)} cases")


if __name__ == "__main__":
    command()
