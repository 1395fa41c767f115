"""`moesim.plan`: the candidates of a plan as a DataFrame, the answer beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sim.base.errors import BadInput
from sim.studies.plan.goal import goals_of
from sim.studies.plan.plan import Asked
from sim.studies.plan.plan import plan as make
from sim.studies.plan.text import answer
from sim.studies.sweep.face import Axes, Kind, block_of

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.studies.plan.candidate import Candidate
    from sim.studies.plan.goal import Goal
    from sim.studies.simulate import Name


def plan(
    goal: str | Iterable[str],
    policy: Kind | Iterable[Kind] = (),
    hw: Name | Iterable[Name] = (),
    *,
    prices: Name | None = None,
    every: bool = False,
    quick: bool = False,
    workers: int | None = None,
    **axes: Unpack[Axes],
) -> DataFrame:
    """The cheapest machine and policy that reach a goal: what `moesim plan` does on the command line.

    Args:
        goal: `"tpot_s.mean <= 100ms"`, or several, all of which have to be reached.
        policy: names, files or classes; none: every installed one that leaves what the model computes as it is.
        hw: names or files; none: every bundled GPU. prices: a YAML file. every: settle dearer machines, too.
        quick: leave out what would have to be true of the machines that fail.
        workers: processes; None: the cores, if it is worth it.
        axes: the other fields of a run's configuration; budgets may have several values.

    Returns:
        A row per candidate, the cheapest setting first (docs/plan.md). `attrs["answer"]` is the first line that the
        command prints, `attrs["plan"]` the object of its `--json`.

    Warns:
        UserWarning: of requests or a batch there are fewer than was asked for.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    import pandas as pd

    texts = [goal] if isinstance(goal, str) else list(goal)
    if not texts:
        raise BadInput("plan(): goal, got none: say what is to be reached, e.g. 'tpot_s.mean <= 100ms'")
    asked = Asked(
        goals_of(texts, "goal"),
        block_of(policy, hw, axes, "plan"),
        None if prices is None else Path(prices),
        every,
        not quick,
        workers,
    )
    found = make(asked, lambda *_: None, _warn)
    frame = pd.DataFrame([_row(one, asked.goals) for one in found.candidates])
    frame.attrs["answer"] = answer(found)
    frame.attrs["plan"] = found.to_dict()
    return frame


def _row(one: Candidate, goals: list[Goal]) -> dict[str, Any]:
    plain = {name: value for name, value in one.to_dict().items() if not isinstance(value, list)}
    for goal in goals:
        told = next((told for told in one.found if told.goal == goal), None)
        least = next((told for told in one.bounds if told.goal == goal), None)
        low, high = (None, None) if told is None or told.band is None else told.band
        plain |= {goal.key: None if told is None else told.value, f"{goal.key}.low": low, f"{goal.key}.high": high}
        plain |= {f"{goal.key}.margin_frac": None if told is None else told.margin_frac}
        plain |= {f"{goal.key}.bound": None if least is None else least.value}
    return plain


def _warn(text: str) -> None:
    warnings.warn(text.removeprefix("note: "), stacklevel=3)
