"""Runs beside one another: what their requests waited, which kept to their SLO, who keeps it best, and joules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from sim.base.units import show_count, show_frac, show_fracs, show_joules, show_number, show_seconds
from sim.results.energy_text import unknown

if TYPE_CHECKING:
    from sim.results.record import Result

Run = TypeVar("Run")


class Columns:
    """What a table of runs says of their load and joules: nothing where none has any, nor an SLO."""

    def __init__(self, results: Iterable[Result]) -> None:
        every = list(results)
        self._load = any(result.load is not None for result in every)
        self._slo = any(result.slo is not None for result in every)
        self._energy = any(result.energy is not None for result in every)
        self.notes = [f"energy {why}\n" for why in dict.fromkeys(map(unknown, every)) if why]

    @property
    def below(self) -> str:
        """What stands below the table: whose joules are not known, and why."""
        return "".join(["\n", *self.notes]) if self.notes else ""

    @property
    def titles(self) -> list[str]:
        """Of the columns."""
        load, slo = ["queue"] if self._load else [], ["keep SLO", "goodput/s"] if self._slo else []
        return [*load, *slo, *(["energy per token"] if self._energy else [])]

    def cells(self, result: Result) -> list[str]:
        """Of one run: the mean wait in its queue; the share that kept its SLO, how many of them per second; joules."""
        found, load, slo = [], result.load, result.slo
        if self._load:
            mean_s = result.queue_s.mean
            grows = ", grows" if load is not None and not load.stable else ""
            found.append("-" if load is None or mean_s is None else show_seconds(mean_s) + grows)
        if self._slo:
            good = None if slo is None else slo.goodput_requests_per_s
            found.append("-" if slo is None else show_frac(slo.attained_frac))
            found.append("-" if good is None else show_number(good))
        if self._energy:
            each_j = None if result.energy is None else result.energy.joules_per_token
            found.append("-" if each_j is None else show_joules(each_j))
        return found


def keeps_most(runs: Sequence[Run], result_of: Callable[[Run], Result]) -> Run | None:
    """The one with the largest share of requests that kept their SLO, of equals the one with more of them per second;
    None where nothing was promised."""
    slos = [(run, result_of(run).slo) for run in runs]
    known = [(run, slo) for run, slo in slos if slo is not None and slo.attained_frac is not None]
    if not known:
        return None
    return max(known, key=lambda one: (one[1].attained_frac or 0.0, one[1].goodput_requests_per_s or 0.0))[0]


def draws_least(runs: Iterable[Run], result_of: Callable[[Run], Result]) -> tuple[Run, str] | None:
    """The one with the fewest joules per token, and these; None where nobody counts them, or not all the same parts."""
    found = [(run, energy) for run in runs if (energy := result_of(run).energy) is not None]
    known = [(energy.joules_per_token, run) for run, energy in found if energy.joules_per_token is not None]
    if not known or len({energy.counted for _, energy in found}) > 1:
        return None
    each_j, run = min(known, key=lambda one: one[0])
    return run, show_joules(each_j)


def kept_by(result: Result, others: Iterable[Result] = ()) -> str:
    """`70.0 % (48.1 to 85.5 % at 95 %, as 2 others; goodput 0.0042 requests/s)`: others whose share lies there, too."""
    slo = result.slo
    assert slo is not None
    good = slo.goodput_requests_per_s
    more = []
    if slo.attained_ends is not None:
        least = slo.attained_ends[0]
        n = sum(other.slo is not None and (other.slo.attained_frac or 0.0) >= least for other in others)
        beside = f", as {show_count(n, 'other')}" if n else ""
        more.append(f"{show_fracs(slo.attained_ends)} at 95 %{beside}")
    more += [] if good is None else [f"goodput {show_number(good)} requests/s"]
    return show_frac(slo.attained_frac) + (f" ({'; '.join(more)})" if more else "")
