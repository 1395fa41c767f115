"""The page of rates: how many requests per second policies take, and how latency and goodput go with the rate."""

from __future__ import annotations

from typing import Any

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_count, show_frac
from sim.pages.page import Facts, Note, Page, Plot, Section, filled
from sim.pages.plots import axis, line, said
from sim.results.figure import label_of, plot_unit
from sim.studies.saturate import FIGURES, RATE, Rates
from sim.workload.slo import slo_text

MOST_POLICIES = 100
MOST_POINTS = 1_000


def of_rates(data: dict[str, Any]) -> Page:
    """Of what `moesim saturate --json` printed, or `--out` kept. Raises BadInput for anything else."""
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
    asked = f"{show_count(found.requests, 'request')} a replay, {show_count(found.draws, 'draw')} of requests and gaps"
    lines = [", ".join(part for part in (found.hw, found.trace or "", asked) if part)]
    lines += [f"SLO {slo_text(found.slo)}, to be kept by {show_frac(found.attain_frac)}"] if found.slo else []
    most, rates = (Section(one.name, one.title, one.sentence, [filled(one)]) for one in found.tables())
    most.blocks.insert(0, _best(found))
    sections = [most, *_curves(found), rates]
    if labels := list(dict.fromkeys(label for one in found.policies for label in one.caveats)):
        sections.append(Section("labels", "What this rests on", "", [Note(labels)]))
    return Page("saturation", "Rates", found.answer(), lines, sections)


def _best(found: Rates) -> Facts:
    best = found.policies[0]
    items: list[tuple[str, Any, str, str]] = [("policy", best.name, "", "the one that serves most")]
    if best.kept_per_s is not None:
        items.append(("requests/s that keep the SLO", best.kept_per_s.mean, "x", "mean over draws"))
    items.append(("requests/s at all", best.capacity_per_s.mean, "x", "the queue of any lower rate is stable"))
    return Facts([*items, ("output tokens/s at all", best.capacity_tokens_per_s.mean, "x", "")])


def _curves(found: Rates) -> list[Section]:
    """Every policy in one picture, figure by figure: latencies, and with an SLO how it is kept."""
    sections = {
        False: Section("latency", "Latency", "A line is a policy; it ends at nine tenths of what that one serves."),
        True: Section("kept", "Kept promises", "Of requests, and of tokens per second, by rate."),
    }
    for key in FIGURES:
        title, unit, traces = label_of(key), plot_unit(key), []
        for hue, one in enumerate(found.policies):
            points = [(at.get(RATE), value) for at in one.curve if (value := at.get(key)) is not None]
            if points:
                hover = said("requests/s", title, "x", unit)
                xs, ys = zip(*points, strict=True)
                traces.append(line(one.name, xs, ys, hue, mode="lines+markers", **hover))
        if traces:
            log = unit == "s" and all(y > 0 for trace in traces for y in trace["y"])
            scale: dict[str, Any] = {"type": "log"} if log else {"rangemode": "tozero"}
            layout = {"xaxis": axis("requests/s", "x", rangemode="tozero"), "yaxis": axis(title, unit, **scale)}
            plot = Plot(key, f"{title} by requests per second.", traces, layout, 380)
            sections[key.startswith("slo.")].blocks.append(plot)
    return [section for section in sections.values() if section.blocks]
