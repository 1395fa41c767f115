"""The page of rates: how many requests per second policies take, and how latency and goodput go with the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_count, show_frac
from sim.pages.page import Column, Facts, Note, Page, Plot, Section, Table
from sim.pages.plots import axis, line, said
from sim.studies.saturate.search import AtRate, Range, Saturation

MOST_POLICIES = 100
MOST_POINTS = 1_000


class Rates(msgspec.Struct):
    answer: str
    attain_frac: float
    draws: int
    requests: int
    policies: list[Saturation]
    slo: dict[str, dict[str, float]] = {}
    hw: str = ""
    trace: str | None = None


def of_rates(data: dict[str, Any]) -> Page:
    """Of what `moesim saturate --json` printed, or `--out` wrote. Raises BadInput for anything else."""
    try:
        found = msgspec.convert(data, Rates)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"saturate: not as `moesim saturate --json` prints it ({error}); run it again") from None
    n_points = sum(len(one.curve) for one in found.policies)
    if not 1 <= len(found.policies) <= MOST_POLICIES or not 1 <= n_points <= MOST_POINTS:
        raise BadInput(
            f"saturate, got {len(found.policies)} policies with {n_points} rates: 1 to {MOST_POLICIES} with at most "
            f"{MOST_POINTS} make a page; name fewer policies"
        )
    best = found.policies[0]
    asked = f"{show_count(found.requests, 'request')} a replay, {show_count(found.draws, 'draw')} of requests and gaps"
    lines = [", ".join(part for part in (found.hw, found.trace or "", asked) if part), *_promises(found)]
    sections = [_most(found, best), *_curves(found), _table(found)]
    if labels := list(dict.fromkeys(label for one in found.policies for label in one.caveats)):
        sections.append(Section("labels", "What this rests on", "", [Note(labels)]))
    return Page("saturation", "Rates", found.answer, lines, sections)


def _promises(found: Rates) -> list[str]:
    from sim.workload.slo import slo_text

    kept = f"to be kept by {show_frac(found.attain_frac)}"
    return [f"SLO {slo_text(found.slo)}, {kept}"] if found.slo else []


def _most(found: Rates, best: Saturation) -> Section:
    items: list[tuple[str, Any, str, str]] = [("policy", best.name, "", "the one that serves most")]
    if best.kept_per_s is not None:
        items.append(("requests/s that keep the SLO", best.kept_per_s.mean, "x", "mean over draws"))
    items.append(("requests/s at all", best.capacity_per_s.mean, "x", "the queue of any lower rate is stable"))
    items.append(("output tokens/s at all", best.capacity_tokens_per_s.mean, "x", ""))
    columns = [Column("policy")]
    titles = [
        "requests/s",
        "output tokens/s",
        *(["requests/s that keep the SLO"] if best.kept_per_s is not None else []),
    ]
    columns += [Column(f"{title}{end}", "x") for title in titles for end in ("", ", least", ", most")]
    rows: list[list[Any]] = []
    for one in found.policies:
        rates = [one.capacity_per_s, one.capacity_tokens_per_s]
        rates += [one.kept_per_s or Range(0.0, 0.0, 0.0)] if best.kept_per_s is not None else []
        rows.append([one.name, *(value for rate in rates for value in (rate.mean, rate.least, rate.most))])
    table = Table("Rates of every policy: mean, least and most over the draws.", columns, rows)
    return Section("most", "How much is served", "", [Facts(items), table])


class Curve(NamedTuple):
    """A plot: `title` begins a section, and without one it stands below the one before."""

    name: str
    title: str
    figure: str
    unit: str
    says: str
    read: Callable[[AtRate], float | None]


CURVES = (
    Curve("ttft", "Latency", "TTFT", "s", "Mean time to the first token, by rate.", lambda at: at.ttft_mean_s),
    Curve("ttft-p95", "", "TTFT, p95", "s", "The 95th percentile of it, by rate.", lambda at: at.ttft_p95_s),
    Curve("tpot", "", "TPOT", "s", "Mean time per further token, by rate.", lambda at: at.tpot_mean_s),
    Curve(
        *("goodput", "Goodput", "tokens/s", "x", "Tokens per second of requests that kept their SLO, by rate."),
        lambda at: at.goodput_tokens_per_s,
    ),
    Curve("kept", "", "kept", "frac", "Share of requests that kept their SLO, by rate.", lambda at: at.attained_frac),
)


def _curves(found: Rates) -> list[Section]:
    """Every policy in one picture, figure by figure."""
    sections: list[Section] = []
    for name, title, figure, unit, says, read in CURVES:
        traces = []
        for hue, one in enumerate(found.policies):
            points = [(at.arrivals_per_s, value) for at in one.curve if (value := read(at)) is not None]
            if points:
                xs, ys = [x for x, _ in points], [y for _, y in points]
                hover = said("requests/s", figure, "x", unit)
                traces.append(line(one.name, xs, ys, hue, mode="lines+markers", **hover))
        if not traces:
            continue
        log = unit == "s" and all(y > 0 for trace in traces for y in trace["y"])
        scale: dict[str, Any] = {"type": "log"} if log else {"rangemode": "tozero"}
        layout = {"xaxis": axis("requests/s", "x", rangemode="tozero"), "yaxis": axis(figure, unit, **scale)}
        plot = Plot(name, says, traces, layout, 380)
        if title:
            sentence = "A line is a policy; it ends at nine tenths of what that one serves."
            sections.append(Section(name, title, sentence, [plot]))
        elif sections:
            sections[-1].blocks.append(plot)
    return sections


def _table(found: Rates) -> Section:
    columns = [Column("policy"), Column("requests/s", "x"), Column("of most", "frac"), Column("queue", "s")]
    columns += [Column("TTFT", "s"), Column("TTFT, p95", "s"), Column("TPOT", "s")]
    columns += [Column("keep their SLO", "frac"), Column("goodput, tokens/s", "x")] if found.slo else []
    rows: list[list[Any]] = []
    for one in found.policies:
        for at in one.curve:
            most = one.capacity_per_s.mean
            share = at.arrivals_per_s / most if most else None
            cells = [one.name, at.arrivals_per_s, share, at.queue_mean_s, at.ttft_mean_s, at.ttft_p95_s, at.tpot_mean_s]
            rows.append([*cells, *([at.attained_frac, at.goodput_tokens_per_s] if found.slo else [])])
    table = Table("How requests fare at each rate, mean over the draws.", columns, rows)
    return Section("rates", "Rate by rate", "", [table])
