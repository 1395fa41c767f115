"""One request, as one of two runs served it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput

if TYPE_CHECKING:
    from sim.engine.run_loop import RequestTimes
    from sim.studies.diff.spent import Shares, Spent


@dataclass
class OneRequest:
    """A request as one run served it. `ttft`, `tpot`: with their parts, where the run was replayed."""

    request: int
    task: str
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float
    tpot_s: float | None
    start_s: float | None = None
    last_token_s: float | None = None
    ttft: Shares | None = None
    tpot: Shares | None = None


def served(times: RequestTimes, spent: Spent) -> OneRequest:
    """A request of a replay, with the parts of its times."""
    request, ttft, tpot = times.request, spent.ttft(times), spent.tpot(times)
    return OneRequest(
        request.index,
        request.task,
        request.prompt_len,
        request.outputs,
        ttft.time_s,
        None if tpot is None else tpot.time_s,
        times.start_s,
        times.last_token_s,
        ttft,
        tpot,
    )


def of_sweep(times: list[Any], where: str) -> dict[int, OneRequest]:
    """Requests as the record of a sweep's point has them. Raises BadInput."""
    found: dict[int, OneRequest] = {}
    for at, one in enumerate(times):
        match one:
            case [int(request), float() | int() as ttft_s, (float() | int() | None) as tpot_s]:
                found[request] = OneRequest(request, "", None, None, ttft_s, tpot_s)
            case _:
                raise BadInput(f"{where}: requests[{at}]: not [request, TTFT, TPOT]; is it a sweep's point?")
    return found
