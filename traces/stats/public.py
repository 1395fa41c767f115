"""Figures of routing of large models that others published: the figures only, with their sources.

The traces themselves are not part of this project. Each entry under `traces` of `public.yaml` is what `measured` makes
of a trace that `moesim traces convert` made of the published files; a test recomputes them where it has the files.
What others print of traces that nobody can have is beside it: `accuracies`, `unions`, `reuse`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sim.base.files import read_yaml, to_struct
from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.cuts import CUTS, cut_figures, definitions, gate_mass, of_one_request, unions
from traces.stats.summary import Summary, summarise

Figure = Annotated[float, Meta(ge=0, le=1)]
SCHEMA = "moesim.public-stats/2"


class PublicTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one published trace; `files` is what was converted, `figures` as in `summary.Summary`.

    cuts: rows of a stretch -> its figures (`cuts.cut_figures`). cuts_of_one: the same of stretches of one request each,
    left out of a trace of a single request, where all are. unions: batch -> experts asked for together. reuse:
    how much tokens in a row share, by definition (`cuts.definitions`). gate_mass: share of a token's weight that its
    first, second, ... expert has (`cuts.gate_mass`); empty without weights.
    """

    name: str
    model: str
    files: str
    source: str
    licence: str
    shape: str
    n_experts: int
    top_k: int
    rows: int
    requests: int
    curve_rows: int
    curve_phase: str
    figures: dict[str, Figure | None]
    cuts: dict[int, dict[str, Figure]]
    unions: dict[int, float]
    reuse: dict[str, Figure]
    gate_mass: list[Figure]
    cuts_of_one: dict[int, dict[str, Figure]] = {}

    @property
    def of_one(self) -> dict[int, dict[str, Figure]]:
        """`cuts` of stretches of one request each."""
        return self.cuts if self.requests == 1 else self.cuts_of_one

    def summary(self) -> Summary:
        """The same as a summary."""
        return Summary(self.name, self.shape, self.rows, self.requests, self.curve_rows, self.curve_phase, self.figures)


class Printed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure that somebody prints of a model's routing: `low` to `high`, by layer or by prompt, and its mean.

    by_layer: by the layer that is predicted, null where none is printed.
    """

    model: str
    n_experts: int
    top_k: int
    what: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    batch: int | None = None
    by_layer: list[Figure | None] | None = None
    source: str

    @property
    def span(self) -> tuple[float, float]:
        """The mean, where there is one, else the lowest and the highest."""
        known = [value for value in (self.low, self.high) if value is not None] if self.mean is None else [self.mean]
        return min(known), max(known)


class Public(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of `public.yaml`.

    accuracies: share of a layer's experts that its gate names one layer ahead. predictors: what other predictors reach,
    each by its own measure. unions: distinct experts of a layer that a batch asks for. reuse: share of a token's
    experts that the token before chose.
    """

    schema: Literal["moesim.public-stats/2"]
    traces: list[PublicTrace]
    accuracies: list[Printed]
    predictors: list[Printed]
    unions: list[Printed]
    reuse: list[Printed]


@cache
def public() -> Public:
    """Everything published that is known here."""
    path = Path(str(resources.files("traces"))) / "stats" / "public.yaml"
    return to_struct(read_yaml(path), Public, str(path))


def public_traces() -> list[PublicTrace]:
    """All published traces whose figures are known, by name."""
    return public().traces


def measured(trace: Trace) -> dict[str, Any]:
    """The figures of a published trace, as `public.yaml` keeps them."""
    summary, rows = summarise(trace), observe.sample(trace, max_rows=12_000)
    cuts = {n: cut_figures(rows, n) for n in CUTS}
    of_one = {n: of_one_request(trace, n) for n in CUTS} if summary.requests > 1 else {}
    return {
        "shape": summary.shape,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        **{name: getattr(summary, name) for name in ("rows", "requests", "curve_rows", "curve_phase")},
        "figures": _rounded(summary.figures),
        "cuts": _rounded({n: found for n, found in cuts.items() if found}),
        "cuts_of_one": _rounded({n: found for n, found in of_one.items() if found}),
        "unions": {batch: round(value, 2) for batch, value in unions(rows).items()},
        "reuse": _rounded(definitions(rows)),
        "gate_mass": _rounded(gate_mass(rows)),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return list(map(_rounded, value)) if isinstance(value, list) else value and round(value, 4)
