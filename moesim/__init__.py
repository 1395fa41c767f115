"""Mixture-of-Experts offloading policies, replayed on described GPUs.

    import moesim
    result = moesim.simulate(policy="lfu", hw="rtx3090", requests=4)
    print(result.tpot_s.mean, result.hit_rate)

A policy of one's own derives from `moesim.Policy` and yields decisions, which are here too. Nothing is imported before
it is used. docs/python.md has the rest.
"""

from __future__ import annotations

import importlib

from moesim._names import claim

claim()  # before anything imports `sim`

TYPE_CHECKING = False  # `typing` takes as long as all else here; a command hears Ctrl-C only after it
if TYPE_CHECKING:
    from sim import __version__
    from sim.base.errors import CheckFailed, MoesimError
    from sim.figures import Statistic
    from sim.policy import (
        DECODE,
        FREE,
        LAST,
        NEVER,
        NOT_FOR_PREFETCH,
        PREFILL,
        Assignment,
        BadInput,
        Buffer,
        Cancel,
        Counts,
        Decision,
        Decisions,
        DoesNotFit,
        DropQueue,
        Evict,
        Fetch,
        Foresee,
        Gate,
        IllegalDecision,
        Insertion,
        Iteration,
        Keys,
        Order,
        Outlook,
        Piece,
        Pieces,
        Policy,
        Predict,
        Prefetch,
        Prices,
        Range,
        Rank,
        Recency,
        RequestInfo,
        Requeue,
        RequeueFrom,
        RunCpu,
        RunCpuAhead,
        RunGpu,
        RunPart,
        Segment,
        Serve,
        Spared,
        SplitExpert,
        Steps,
        StoreSplit,
        Ticket,
        TrainingTrace,
        View,
        Wait,
        Wanted,
        Wishes,
        WriteBack,
        follow_and_count,
        no_store,
        param,
    )
    from sim.results.record import Result
    from sim.studies.diff.diff import Diff, diff
    from sim.studies.option_types import Axes, Options
    from sim.studies.plan.python_api import explain, plan
    from sim.studies.python_api import compare, curve, sweep
    from sim.studies.simulate import simulate

__all__ = [
    "DECODE",
    "FREE",
    "LAST",
    "NEVER",
    "NOT_FOR_PREFETCH",
    "PREFILL",
    "Assignment",
    "Axes",
    "BadInput",
    "Buffer",
    "Cancel",
    "CheckFailed",
    "Counts",
    "Decision",
    "Decisions",
    "Diff",
    "DoesNotFit",
    "DropQueue",
    "Evict",
    "Fetch",
    "Foresee",
    "Gate",
    "IllegalDecision",
    "Insertion",
    "Iteration",
    "Keys",
    "MoesimError",
    "Options",
    "Order",
    "Outlook",
    "Piece",
    "Pieces",
    "Policy",
    "Predict",
    "Prefetch",
    "Prices",
    "Range",
    "Rank",
    "Recency",
    "RequestInfo",
    "Requeue",
    "RequeueFrom",
    "Result",
    "RunCpu",
    "RunCpuAhead",
    "RunGpu",
    "RunPart",
    "Segment",
    "Serve",
    "Spared",
    "SplitExpert",
    "Statistic",
    "Steps",
    "StoreSplit",
    "Ticket",
    "TrainingTrace",
    "View",
    "Wait",
    "Wanted",
    "Wishes",
    "WriteBack",
    "__version__",
    "compare",
    "curve",
    "diff",
    "explain",
    "follow_and_count",
    "no_store",
    "param",
    "plan",
    "simulate",
    "sweep",
]

_ELSEWHERE = {
    "Axes": "sim.studies.option_types",
    "__version__": "sim",
    "CheckFailed": "sim.base.errors",
    "Diff": "sim.studies.diff.diff",
    "MoesimError": "sim.base.errors",
    "Options": "sim.studies.option_types",
    "Result": "sim.results.record",
    "Statistic": "sim.figures",
    "compare": "sim.studies.python_api",
    "curve": "sim.studies.python_api",
    "explain": "sim.studies.plan.python_api",
    "plan": "sim.studies.plan.python_api",
    "diff": "sim.studies.diff.diff",
    "simulate": "sim.studies.simulate",
    "sweep": "sim.studies.python_api",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_ELSEWHERE.get(name, "sim.policy")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
