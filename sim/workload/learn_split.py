"""The store split: what a policy may learn from before anything is scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo

if TYPE_CHECKING:
    from traces.format.reader import Trace
    from traces.format.requests import RequestTable


MAKE_ONE = "make one with --store-frac 0.7 (`moesim traces convert`, `moesim record`)"


def no_store(trace: Trace, who: str, rest: str = "") -> BadInput:
    """The refusal of a trace whose requests are all scored.

    Args:
        who: who learns what there. rest: another way out, after a comma.
    """
    return BadInput(
        f"{trace.path}: split 'store' has no requests: {who}; take a trace with a store split, {MAKE_ONE}{rest}"
    )


class StoreSplit:
    """Requests set aside for learning, with their trace rows; empty when the trace has none."""

    def __init__(self, trace: Trace, requests: Sequence[RequestInfo]) -> None:
        self.trace = trace
        self.requests = list(requests)

    def __bool__(self) -> bool:
        return bool(self.requests)

    def iterations(self) -> Iterator[Range]:
        """Every iteration the requests would run one at a time: a prefill, then one decode token each."""
        for request in self.requests:
            prompt_end = request.first_row + request.prompt_len
            yield Range(request, request.first_row, prompt_end, PREFILL, 0)
            for done in range(request.outputs - 1):
                yield Range(request, prompt_end + done, prompt_end + done + 1, DECODE, request.prompt_len + done)


def requests_of(trace: Trace, split: str) -> list[RequestInfo]:
    """Requests of one split ("store", "test") or of both ("all"), in trace order."""
    return list(_requests_of(trace.requests, split))


@lru_cache(maxsize=8)
def _requests_of(table: RequestTable, split: str) -> tuple[RequestInfo, ...]:
    """Kept, since the points of a sweep ask for the same."""
    found = table if split == "all" else table.in_split(split)
    return tuple(RequestInfo(r.index, r.first_row, r.prompt_len, r.outputs, r.task, r.arrival_s) for r in found)
