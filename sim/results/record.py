"""A result as a typed record: the JSON object's keys as attributes, the tables of the run as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
from msgspec import UNSET

from sim.base.json import finite, to_json
from sim.figures import Bound, Figures, HitRates, Phased, Statistic, Timed, names_of

if TYPE_CHECKING:
    from pandas import DataFrame


def plain(value: Any) -> Any:
    """Records as dictionaries, in the order of their fields; everything else as it is. A key that has None where
    nobody says otherwise is one that only some runs have, and is left out of others."""
    if isinstance(value, msgspec.Struct):
        pairs = ((key, getattr(value, name), default) for key, name, default in names_of(type(value)))
        return {
            key: plain(child)
            for key, child, default in pairs
            if child is not UNSET and (child, default) != (None, None)
        }
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list | tuple) else value


def of_bound(caveat: str) -> bool:
    """Whether a caveat makes a run a bound rather than a system: it knows the future, or has memory that the card has
    not."""
    return caveat == "oracle" or caveat.startswith("does not fit") or "not applied" in caveat


class Kept(Protocol):
    """Where the tables of a run come from."""

    def table(self, name: str) -> DataFrame: ...


class Result(Figures, kw_only=True, eq=False):
    """What a run gave. Attributes are the keys of `simulate --json` (docs/output.md), with their units in their names.

    `requests`, `layers`, `experts`, `iterations`, `decisions` and `spans` are DataFrames, columns as in docs/output.md;
    the number of requests is `n_requests`. The last three come from a second replay, made when one of them is first
    asked for and equal to the first, so that a run that nobody looks into costs no more and takes no more memory.
    """

    _trace_kind: str = ""
    _kept: Any = None  # a `Kept`, once there are tables

    def with_tables(self, kept: Kept) -> Self:
        """The same, with somewhere to take its tables from."""
        self._kept = kept
        return self

    @property
    def kept(self) -> Kept | None:
        """Where its tables are taken from, if there is anything."""
        found: Kept | None = self._kept
        return found

    def set_beside(self, least: tuple[float | None, float | None, str] | None) -> None:
        """Say what no lossless policy can beat (`sim.bounds.time_bound.LowerBound`), and how far this one lies above
        it."""
        self.lower_bound = None
        if least is not None:
            tpot_s, ttft_s, lanes = least
            self.lower_bound = Bound(tpot_s, ttft_s, lanes, self.above_frac(tpot_s))

    def above_frac(self, least_s: float | None) -> float | None:
        """How far the mean TPOT lies above a bound, as a share of the bound."""
        measured_s = self.tpot_s.mean
        return measured_s / least_s - 1 if measured_s is not None and least_s else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object as plain data: the one place where a record becomes that."""
        found: dict[str, Any] = finite(plain(self))
        return found

    def to_json(self, indent: int | None = None) -> str:
        """The JSON object as text: what `simulate --json` prints."""
        return to_json(self.to_dict(), indent)

    @property
    def hit_rates(self) -> HitRates:
        """Of decode, under `hit_definition`."""
        return HitRates(**{name: getattr(self, f"{name}_rate") for name in HitRates.__struct_fields__})

    @property
    def n_outputs(self) -> int:
        """Tokens put out: the first of every request, and those that were decoded."""
        return self.decode_tokens + self.n_requests

    @property
    def hit_rates_by_phase(self) -> dict[Phased, HitRates]:
        """Of the phases that there are: of decode under `hit_definition`, of others as their gates found experts."""
        found: dict[Phased, HitRates] = {"decode": self.hit_rates, "prefill": self.prefill_hit_rates}
        return found if self.mixed_hit_rates is None else {**found, "mixed": self.mixed_hit_rates}

    @property
    def trace_line(self) -> str:
        """What the figures rest on: the trace and its kind, in a line."""
        return f"trace {self.trace}: {self._trace_kind}"

    def time_s(self, time: Timed) -> Statistic:
        """One of the times per token."""
        return self.tpot_s if time == "tpot_s" else self.ttft_s

    @property
    def requests(self) -> DataFrame:
        """One row per request: tokens, and its times in seconds."""
        return self._table("requests")

    @property
    def iterations(self) -> DataFrame:
        """One row per iteration, in order. Replays the run once more."""
        return self._table("iterations")

    @property
    def layers(self) -> DataFrame:
        """One row per phase and MoE layer: how experts were found and why not, copies, evictions, waiting by cause."""
        return self._table("layers")

    @property
    def experts(self) -> DataFrame:
        """One row per phase, MoE layer and expert: the same counts."""
        return self._table("experts")

    @property
    def decisions(self) -> DataFrame:
        """One row per decision of the policy, in order. Replays the run once more."""
        return self._table("decisions")

    @property
    def spans(self) -> DataFrame:
        """One row per piece of work on a lane, some hundred a token. Replays the run once more."""
        return self._table("spans")

    def _table(self, name: str) -> DataFrame:
        found: DataFrame = self._kept.table(name)
        return found

    def __str__(self) -> str:
        from sim.base.tables import fold
        from sim.results.text import render, verdict

        return f"{fold(verdict(self))}\n{fold(self.trace_line)}\n\n{render(self)}"

    def __repr__(self) -> str:
        from sim.results.text import verdict

        return f"<moesim.Result {self.run_id}: {verdict(self)}>"
