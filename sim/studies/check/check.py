"""Replay the runs of a baseline and judge every figure: the same, better, worse, or changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.errors import BadInput
from sim.figures import SCHEMA
from sim.results.compared import BETTER, CHANGED, NEW, WORSE, Compared, facts_of, verdict_of
from sim.results.expectations import misspelt, unknown
from sim.studies.runner.points import resolved, run_points
from sim.studies.runner.pool import n_cores
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Progress
from sim.studies.runner.work import OK, Resolved, closing_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.check.baseline import Expected, Held

MISSPELT = "no such figure"
ALWAYS = (WORSE, CHANGED, NEW, MISSPELT)
DIGITS = 12  # of a digest: enough to tell inputs apart


class Judged(Compared, frozen=True, kw_only=True):
    """A figure beside what was expected of it. `verdict`: also `no such figure`, where the file has to be mended."""

    tolerance: str
    why: str = ""


@dataclass
class Checked:
    """A run of the baseline, and what became of it. `reason`: why it did not run."""

    name: str
    status: str
    reason: str
    figures: list[Judged] = field(default_factory=list)


@dataclass
class Verdict:
    """A baseline that was checked.

    `inputs`: digests of what names mean now. `changed_inputs`: names that meant something else when it was recorded.
    `strict`: whether a figure that became better fails, too.
    """

    held: Held
    runs: list[Checked]
    inputs: dict[str, str]
    changed_inputs: list[str]
    strict: bool

    @property
    def failing(self) -> tuple[str, ...]:
        """The verdicts that fail a check."""
        return (*ALWAYS, BETTER) if self.strict else ALWAYS

    @property
    def misspelt(self) -> bool:
        """Whether the file names a figure that no result has, so that it has to be mended."""
        return any(one.verdict == MISSPELT for run in self.runs for one in run.figures)

    @property
    def failed(self) -> list[Checked]:
        """Runs that did not run, or of which a figure fails."""
        return [run for run in self.runs if not self.met(run)]

    def met(self, run: Checked) -> bool:
        """Whether a run did run, and none of its figures fails."""
        return run.status == OK and not self.failures(run)

    def failures(self, run: Checked) -> list[Judged]:
        """The figures of a run that fail the check."""
        return [one for one in run.figures if one.verdict in self.failing]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        from sim.studies.check.text import answer

        return {
            "schema": SCHEMA,
            "answer": answer(self),
            "met": not self.failed,
            "changed_inputs": self.changed_inputs,
            "runs": [self._of_run(run) for run in self.runs],
        }

    def _of_run(self, run: Checked) -> dict[str, Any]:
        told = {"name": run.name, "status": run.status, "reason": run.reason or None, "met": self.met(run)}
        names = {"a": "expected", "b": "value"}
        figures = [
            {names.get(name, name): value for name, value in msgspec.to_builtins(one).items()} for one in run.figures
        ]
        return {**told, "figures": figures}


@closing_ready()
def check(held: Held, workers: int | None, strict: bool, progress: Progress) -> Verdict:
    """Replay and judge.

    Args:
        workers: processes; None: the cores, if it is worth it. progress: told of (done, in all, what is done).

    Raises:
        BadInput: a figure that no result has where all else runs, or a value that is wrong wherever it stands.
    """
    points = [run.point for run in held.runs]
    asks_bound = any(key.startswith("lower_bound.") for run in held.runs for key in run.figures)
    try:
        means = resolved(points, workers or n_cores(), progress)
        asked = means if asks_bound else [msgspec.structs.replace(one, bound="") for one in means]
        ran, _ = run_points(points, asked, Records(None), workers, progress)
        rows = {row.asked.id: row for row in ran}
    except BadInput as error:
        more = "".join(f"; and {_said(run.name, one)}" for run in held.runs for one in _judged(run, None))
        raise BadInput(f"{held.path}: {error}{more}") from None
    runs = []
    for run, meant in zip(held.runs, means, strict=True):
        row = rows[meant.id]
        result = None if row.result is None else facts_of(row.result)
        runs.append(Checked(run.name, row.status, row.reason, _judged(run, result)))
    wrong = [_said(run.name, one) for run in runs for one in run.figures if one.verdict == MISSPELT]
    if wrong and all(run.status == OK for run in runs):
        raise BadInput(f"{held.path}: {'; and '.join(wrong)}")
    inputs = inputs_of(means)
    changed = [name for name, digest in held.inputs.items() if inputs.get(name, digest) != digest]
    return Verdict(held, runs, inputs, changed, strict)


def _judged(run: Expected, result: dict[str, float | None] | None) -> list[Judged]:
    """The figures of a run; of one without a result those that are misspelt."""
    found = []
    for key, expected in run.figures.items():
        why, tolerance = misspelt(key) if result is None else unknown(key, result), run.tolerances[key]
        value = None if why or result is None else result[key]
        verdict = MISSPELT if why else verdict_of(key, expected, value, tolerance)
        if why or result is not None:
            found.append(Judged(key, expected, value, verdict, tolerance=tolerance.text, why=why))
    return found


def _said(name: str, one: Judged) -> str:
    return f"{name}: figures, got {one.key!r}: {one.why}"


def inputs_of(means: Sequence[Resolved]) -> dict[str, str]:
    """By name, digests of the traces, profiles, models and stacks that the runs rest on, and of policies in files."""
    found: dict[str, str] = {}
    for kind in ("trace", "hw", "model", "engine", "policy"):
        for one in means:
            digest = one.meant.get(f"{kind}_sha256")
            if digest is not None:
                changes = sorted(key for key in one.spec.set if key.startswith(f"{kind}."))
                name = " ".join([kind, str(one.meant[kind]), *(f"{key}={one.spec.set[key]}" for key in changes)])
                link = f" link {one.spec.pcie}" if kind == "hw" and one.spec.pcie else ""
                found[name + link] = digest[:DIGITS]
    return found
