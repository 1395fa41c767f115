"""What a policy sees and says: `from sim.policy import Policy, Fetch, View` is all that a policy file imports."""

from typing import TYPE_CHECKING

from sim.base.errors import BadInput, DoesNotFit, IllegalDecision
from sim.base.files import bundled, replacing
from sim.policy.api import TRAITS, Assignment, Decisions, ParamValue, Policy, Steps, overrides, param
from sim.policy.decisions import (
    Cancel,
    Decision,
    DropQueue,
    Evict,
    Fetch,
    Foresee,
    Predict,
    Prefetch,
    Requeue,
    RequeueFrom,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    Wanted,
    WriteBack,
)
from sim.policy.likeness import Likeness, inverse_norm, most_alike, replaced_in_turn
from sim.policy.order import FREE, LAST, NEVER, NOT_FOR_PREFETCH, Insertion, Order, Rank, Recency
from sim.policy.outlook import Outlook
from sim.policy.path_search import EXACT_IN_SINGLE, PathSearch
from sim.policy.pieces import Piece, Pieces
from sim.policy.routed_counts import routed_counts
from sim.policy.score_window import ScoreWindow
from sim.policy.segments import Buffer, Segment, SplitExpert, lowest
from sim.policy.spared import Spared
from sim.policy.standings import Counts, Keys, follow, follow_and_count
from sim.policy.tickets import Ticket
from sim.policy.vector_search import VectorSearch, scaled
from sim.policy.view import Prices, View
from sim.policy.wishes import Wishes
from sim.profiles.precisions import BITS_PER_PARAM
from sim.workload.fewest_copies import kept
from sim.workload.gate import Gate
from sim.workload.iterations import DECODE, PREFILL, Iteration, Range, RequestInfo
from sim.workload.learn_split import MAKE_ONE, StoreSplit, TrainingTrace, no_store, requests_of
from sim.workload.learned import keep, origin, recalled
from sim.workload.surrogate import SURROGATE, Surrogate, draws_of, shares_of, take
from sim.workload.token_paths import TokenPaths

if TYPE_CHECKING:
    from traces.format.reader import Trace as Trace

__all__ = [
    "BITS_PER_PARAM",
    "DECODE",
    "EXACT_IN_SINGLE",
    "FREE",
    "LAST",
    "MAKE_ONE",
    "NEVER",
    "NOT_FOR_PREFETCH",
    "PREFILL",
    "SURROGATE",
    "TRAITS",
    "Assignment",
    "BadInput",
    "Buffer",
    "Cancel",
    "Counts",
    "Decision",
    "Decisions",
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
    "Likeness",
    "Order",
    "Outlook",
    "ParamValue",
    "PathSearch",
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
    "RunCpu",
    "RunCpuAhead",
    "RunGpu",
    "RunPart",
    "ScoreWindow",
    "Segment",
    "Serve",
    "Spared",
    "SplitExpert",
    "Steps",
    "StoreSplit",
    "Surrogate",
    "Ticket",
    "TokenPaths",
    "TrainingTrace",
    "VectorSearch",
    "View",
    "Wait",
    "Wanted",
    "Wishes",
    "WriteBack",
    "bundled",
    "draws_of",
    "follow",
    "follow_and_count",
    "inverse_norm",
    "keep",
    "kept",
    "lowest",
    "most_alike",
    "no_store",
    "origin",
    "overrides",
    "param",
    "recalled",
    "replaced_in_turn",
    "replacing",
    "requests_of",
    "routed_counts",
    "scaled",
    "shares_of",
    "take",
]
