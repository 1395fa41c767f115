"""`moesim.plan`: the candidates of a plan as a DataFrame, the answer beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from sim.base.extras import need
from sim.studies.keywords import with_options
from sim.studies.plan.goal import goals_of
from sim.studies.plan.plan import ask
from sim.studies.plan.request import PlanRequest
from sim.studies.python_api import Who, block_of
from sim.studies.runner.cluster import answers_of
from sim.studies.runner.pool import answers
from sim.studies.runner.records import PLAN, Records

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.studies.answer import Answer
    from sim.studies.option_types import Axes, Name


@with_options
def plan(
    goal: str | Iterable[str] = (),
    policy: Who | Iterable[Who] = (),
    hw: Name | Iterable[Name] = (),
    *,
    prices: Name | None = None,
    all_machines: bool = False,
    no_suggestions: bool = False,
    least_memory: bool = False,
    out: Name | None = None,
    resume: bool = False,
    workers: int | None = None,
    cluster: str | None = None,
    **axes: Unpack[Axes],
) -> DataFrame:
    """The cheapest machine and policy that reach a goal: what `moesim plan` does on the command line.

    Args:
        goal: `"tpot_s.mean <= 100ms"`, or several, all of which have to be reached.
        policy: names, files or classes; none: every installed one that leaves what the model computes as it is.
        hw: names or files; none: every bundled GPU. prices: a YAML file. all_machines: settle dearer ones, too.
        no_suggestions: leave out what would have to be true of the machines that fail.
        least_memory: how little each machine needs. Without a goal: streaming, caching and the CPU on one machine.
        out: a folder for records of replays; resume: go on with those there, for this plan or another.
        workers: processes; None: the cores, if it is worth it. cluster: `tcp://HOST:PORT` of a Dask scheduler.
        axes: the other fields of a run's configuration; capacities may have several values.

    Returns:
        A row per candidate, the cheapest setting first (docs/plan.md); of the other questions one per machine or way.
        `attrs["answer"]` is the first line that the command prints, `attrs["plan"]` the object of its `--json`.

    Warns:
        UserWarning: of requests or a batch there are fewer than was asked for.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    need("plan()", "pandas")
    request = PlanRequest(
        goals_of([goal] if isinstance(goal, str) else list(goal), "goal"),
        block_of(policy, hw, axes, "plan"),
        None if prices is None else Path(prices),
        all_machines,
        not no_suggestions,
        workers,
        answers if cluster is None else answers_of(cluster),
        Records(None if out is None else Path(out)),
        note=_warn,
    )
    request.records.begin(PLAN, resume)
    return _framed(ask(request, least_memory), "plan")


def explain(
    measured: str,
    policy: Who,
    hw: Name,
    *,
    workers: int | None = None,
    **axes: Unpack[Axes],
) -> DataFrame:
    """Which input is off: what `moesim explain` does on the command line.

    Args:
        measured: `"12.5tok/s"` of decoding, or `"80ms"` a token. policy: the one that does what your engine does.
        hw: the machine that was measured. workers: processes; None: the cores, if it is worth it.
        axes: the other fields of a run's configuration, one value each.

    Returns:
        A row per input that, changed alone, would explain the measurement (docs/explain.md). `attrs["answer"]` is the
        first line that the command prints, `attrs["explanation"]` the object of its `--json`.

    Raises:
        BadInput: whatever has to be changed, in one line.
    """
    from sim.studies.explain import explain as hold

    need("explain()", "pandas")
    return _framed(
        hold(block_of(policy, hw, axes, "explain"), measured, workers, lambda *_: None, _warn), "explanation"
    )


def _framed(found: Answer, name: str) -> DataFrame:
    import pandas as pd

    frame = pd.DataFrame(found.rows())
    frame.attrs["answer"], frame.attrs[name] = found.answer(), found.to_dict()
    return frame


def _warn(text: str) -> None:
    warnings.warn(text.removeprefix("note: "), stacklevel=3)
