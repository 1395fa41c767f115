"""Replay the runs of a baseline and judge every figure: the same, better, worse, or changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.errors import BadInput
from sim.figures import SCHEMA, numbers
from sim.results.expectations import misspelt, unknown
from sim.results.figure import better
from sim.studies.runner.points import resolved, run_points
from sim.studies.runner.pool import n_cores
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Progress
from sim.studies.runner.work import OK, Resolved, closing_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.check.baseline import Expected, Held, Tolerance

SAME, BETTER, WORSE, CHANGED, NEW = "same", "better", "worse", "changed", "new"
MISSPELT = "no such figure"
ALWAYS = (WORSE, CHANGED, NEW, MISSPELT)
DIGITS = 12  # of a digest: enough to tell inputs apart


@dataclass(frozen=True)
class Judged:
    """A figure beside what was expected of it.

    `verdict`: same; better or worse, beyond its tolerance; changed, where neither way is better, or it is null in one
    of the two; new, where nothing is recorded yet; no such figure, where the file has to be mended, and `why`.
    """

    key: str
    expected: float | None
    value: float | None
    tolerance: Tolerance
    verdict: str
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
        figures = [{**vars(one), "tolerance": one.tolerance.text} for one in run.figures]
        for one in figures:
            if not one["why"]:
                del one["why"]
        told = {"name": run.name, "status": run.status, "reason": run.reason or None}
        return {**told, "met": self.met(run), "figures": figures}


@closing_ready()
def check(held: Held, workers: int | None, strict: bool, progress: Progress) -> Verdict:
    """Replay and judge.

    Args:
        workers: processes; None: the cores, if it is worth it. progress: told of (done, in all, what is done).

    Raises:
        BadInput: a figure that no result has where all else runs, or a value that is wrong wherever it stands.
    """
    points = [run.point for run in held.runs]
    asks_bound = any(key.startswith("bound.") for run in held.runs for key in run.figures)
    try:
        means = resolved(points, workers or n_cores(), progress)
        asked = means if asks_bound else [msgspec.structs.replace(one, bound="") for one in means]
        ran, _ = run_points(points, asked, Records(None), workers, progress)
        rows = {row.asked.id: row for row in ran}
    except BadInput as error:
        more = "".join(f"; and {text}" for text in _mistakes(held))
        raise BadInput(f"{held.path}: {error}{more}") from None
    runs = []
    for run, meant in zip(held.runs, means, strict=True):
        row = rows[meant.id]
        result = None if row.result is None else dict(numbers(row.result.to_dict()))
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
        if why:
            found.append(Judged(key, expected, None, tolerance, MISSPELT, why))
        elif result is not None:
            value = result[key]
            found.append(Judged(key, expected, value, tolerance, verdict_of(key, expected, value, tolerance)))
    return found


def _mistakes(held: Held) -> list[str]:
    """What is said of misspelt figures where no run tells more of them."""
    return [_said(run.name, one) for run in held.runs for one in _judged(run, None)]


def _said(name: str, one: Judged) -> str:
    return f"{name}: figures, got {one.key!r}: {one.why}"


def verdict_of(key: str, expected: float | None, value: float | None, tolerance: Tolerance) -> str:
    """How a figure stands beside what was expected of it."""
    if expected is None:
        return SAME if value is None else NEW
    if value is None:
        return CHANGED
    if value == expected or abs(value - expected) <= tolerance.of(expected):
        return SAME
    way = better(key)
    if not way:
        return CHANGED
    return BETTER if (value > expected) == (way > 0) else WORSE


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
