"""A load: which requests come, and when, where they are not simply the trace's at its own times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from sim.base.errors import BadInput
from sim.workload.iterations import RequestInfo

NONE = "none"
PROCESSES = ("poisson:", "gamma:", "closed:")
MOST_REQUESTS = 1_000_000
DRAWN = "requests drawn with replacement"
_CLOSED = re.compile(r"closed:(.*)")
_STREAM = 1  # of random numbers, beside that of the arrivals


class Load(msgspec.Struct, frozen=True):
    """Requests in order of arrival.

    clients: of a closed loop, in which each asks again when it has been answered; 0: they come by themselves.
    labels: what every result on it has to say.
    """

    requests: list[RequestInfo]
    clients: int = 0
    labels: tuple[str, ...] = ()

    @property
    def open_loop(self) -> bool:
        """Whether any request has a time to come."""
        return self.clients > 0 or any(request.arrival_s is not None for request in self.requests)


def load_of(
    recorded: Sequence[RequestInfo], source: str | None, n: int | None, seed: int, rate_scale: float = 1.0
) -> Load:
    """The load that a run is asked for.

    Args:
        recorded: requests of the split, at least one. source: `poisson:RATE`, `gamma:RATE,CV`, `closed:CLIENTS`, an
            Azure, Mooncake or BurstGPT log, `none` for back to back; None: as the trace has it.
        n: how many; None: as many as are recorded. Where more come than were recorded, each is drawn from all of them.
        rate_scale: how many times as many per second as the source has.

    Raises:
        BadInput: naming the option, or file, line and field of a log.
    """
    if source is None or source == NONE:
        if rate_scale != 1.0:
            raise BadInput(f"--set arrivals.scale, got {rate_scale:g} without a rate: add --arrivals, or leave it out")
        taken = recorded[:n]
        return Load([r._replace(arrival_s=None) for r in taken] if source == NONE else list(taken))
    wanted = len(recorded) if n is None else n
    if wanted > MOST_REQUESTS:
        raise BadInput(f"--requests, got {wanted}: at most {MOST_REQUESTS} under --arrivals; lower it")
    chosen, labels = _drawn(recorded, wanted, seed)
    if match := _CLOSED.fullmatch(source):
        if rate_scale != 1.0:
            raise BadInput(
                f"--set arrivals.scale, got {rate_scale:g} with --arrivals {source}: a closed loop has no rate"
            )
        clients = _clients(match[1])
        return Load([r._replace(arrival_s=0.0 if i < clients else None) for i, r in enumerate(chosen)], clients, labels)
    from traces.synth.arrivals import arrivals

    times = arrivals(source, wanted, seed, rate_scale)
    if len(times) < wanted:
        raise BadInput(
            f"--arrivals, got {Path(source).name!r} with {len(times)} requests: fewer than the {wanted} asked for; "
            f"give --requests {len(times)}"
        )
    return Load([r._replace(arrival_s=time.at_s) for r, time in zip(chosen, times, strict=True)], 0, labels)


def _drawn(recorded: Sequence[RequestInfo], n: int, seed: int) -> tuple[list[RequestInfo], tuple[str, ...]]:
    """The first n, or n of all of them with replacement where there are not as many; numbered as they come."""
    if n <= len(recorded):
        return list(recorded[:n]), ()
    at = np.random.default_rng((seed, _STREAM)).integers(0, len(recorded), n).tolist()
    return [recorded[one]._replace(index=i) for i, one in enumerate(at)], (f"{DRAWN} from {len(recorded)} recorded",)


def _clients(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MOST_REQUESTS)) or not 1 <= int(text) <= MOST_REQUESTS:
        raise BadInput(f"--arrivals, got 'closed:{text}': a number of clients, such as closed:8; correct it")
    return int(text)
