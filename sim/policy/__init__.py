"""What a policy sees and says: `from sim.policy import Policy, Fetch, View` is all that a policy file imports."""

from sim.base.errors import BadInput, DoesNotFit, IllegalDecision
from sim.machine.protocol import Ticket
from sim.policy.api import TRAITS, Assignment, Decisions, Param, ParamValue, Policy, Steps, overrides
from sim.policy.decisions import (
    Cancel,
    Decision,
    DropQueue,
    Evict,
    Fetch,
    Predict,
    Prefetch,
    Requeue,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    Wanted,
    WriteBack,
)
from sim.policy.pieces import Piece, Pieces
from sim.policy.view import Prices, View
from sim.workload.iterations import DECODE, PREFILL, Gate, Iteration, Range, RequestInfo
from sim.workload.learn_split import MAKE_ONE, StoreSplit, no_store, requests_of

__all__ = [
    "DECODE", "MAKE_ONE", "PREFILL", "TRAITS", "Assignment", "BadInput", "Cancel", "Decision", "Decisions",
    "DoesNotFit",
    "DropQueue", "Evict", "Fetch", "Gate", "IllegalDecision", "Iteration", "Param", "ParamValue", "Piece", "Pieces",
    "Policy", "Predict", "Prefetch", "Prices", "Range", "RequestInfo", "Requeue", "RunCpu", "RunCpuAhead", "RunGpu",
    "RunPart", "Serve", "Steps", "StoreSplit", "Ticket", "View", "Wait", "Wanted", "WriteBack", "no_store", "overrides",
    "requests_of",
]  # fmt: skip
