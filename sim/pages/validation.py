"""The page of a validation: what was predicted beside what was measured, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.pages.page import Column, Note, Page, Plot, Section, Table
from sim.pages.plots import axis, bars, line, points
from sim.real.validate_text import (
    CASE,
    LANE,
    POLICY,
    case_of,
    furthest,
    headline,
    lanes_of,
    machine_of,
    orders_of,
    remarks_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.real.comparison import Comparison, Report, Talk
    from sim.real.validate_text import Shown

TIMES = (("tpot_s", "TPOT"), ("ttft_s", "TTFT"))
DOWN = {"autorange": "reversed", "type": "category", "fixedrange": True}  # names from the top


def of_validation(data: Report | Talk) -> Page:
    """Of what `moesim validate --out` kept."""
    if "policies" in data:
        return Page("validation", headline(data), headline(data), (), [_said(data)])
    return Page("validation", f"Validation on {data['device']}", headline(data), [f"{machine_of(data)}."], _parts(data))


def _parts(data: Report) -> list[Section]:
    compared = data["comparisons"]
    names = [case_of(one) for one in compared]
    order = "Whether policies come out in the order that was predicted, which is what a comparison needs."
    return [
        _times(compared, names),
        _errors(compared, names, data["tolerance_frac"]),
        _hits(compared, names),
        _lanes(furthest(data)),
        Section("order", "Order of policies", order, [Note(orders_of(data))]),
        _rest(data),
    ]


def _table(caption: str, columns: Sequence[Shown], rows: Sequence[Any]) -> Table:
    cells = [[one.read(row) for one in columns] for row in rows]
    return Table(caption, [Column(one.title, one.unit) for one in columns], cells)


def _times(compared: list[Comparison], names: list[str]) -> Section:
    plots = []
    for key, title in TIMES:
        both = [
            (one["policy"], pair["measured"], pair["predicted"], name)
            for one, name in zip(compared, names, strict=True)
            if (pair := one[key])["measured"] and pair["predicted"]  # type: ignore[literal-required]
        ]
        if not both:
            continue
        ends = [min(min(x, y) for _, x, y, _ in both) * 0.9, max(max(x, y) for _, x, y, _ in both) * 1.1]
        traces = [line("as measured", ends, ends, 6, hoverinfo="skip")]
        hover = "%{text}<br>measured %{x:.3~s}s<br>predicted %{y:.3~s}s"
        for at, policy in enumerate(dict.fromkeys(policy for policy, *_ in both)):
            xs, ys, texts = zip(*(of for own, *of in both if own == policy), strict=True)
            traces.append(points(policy, xs, ys, at, text=list(texts), hovertemplate=hover))
        layout = {"xaxis": axis(f"{title} measured", "s", type="log"), "yaxis": axis("predicted", "s", type="log")}
        said = f"{title} predicted against measured; the line is where they agree."
        plots.append(Plot(key[:4], said, traces, layout, 420))
    sentence = "A point is one policy with one capacity: on the line the prediction is right, above it is too slow."
    return Section("times", "Predicted against measured", sentence, [*plots])


def _errors(compared: list[Comparison], names: list[str], tolerance: float) -> Section:
    traces = [
        bars(title, names, [one[key]["error_frac"] for one in compared], at, across=True)  # type: ignore[literal-required]
        for at, (key, title) in enumerate(TIMES)
    ]
    ends = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "#7F7F7F", "dash": "dash"}}
    layout = {
        "xaxis": axis("error, as a share of what was measured", "frac"),
        "yaxis": DOWN,
        "shapes": [{**ends, "x0": at, "x1": at} for at in (-tolerance, tolerance)],
    }
    plot = Plot("errors", "Errors of TPOT and TTFT, case by case.", traces, layout, 160 + 26 * len(names))
    sentence = (
        f"Dashed lines stand at the tolerance that was asked for, {100 * tolerance:g} %; left of zero the prediction "
        "is too fast."
    )
    return Section("errors", "How far off", sentence, [plot, _table("Every case.", CASE, compared)])


def _hits(compared: list[Comparison], names: list[str]) -> Section:
    classes = [key for key in compared[0]["classes"] if any(_class(one, key, "measured") for one in compared)]
    both = [(key, which) for key in classes for which in ("predicted", "measured")]
    rows = [[name, *(_class(one, *of) for of in both)] for one, name in zip(compared, names, strict=True)]
    columns = [Column(f"{key.removesuffix('_rate').replace('_', ' ')} {which}", "frac") for key, which in both]
    table = Table("Shares of the experts asked for.", [Column("case"), *columns], rows)
    sentence = "Classes of decode in both worlds; where decisions are identical, only late hits may differ."
    return Section("hits", "What was found", sentence, [table])


def _class(one: Comparison, key: str, which: str) -> Any:
    return one["classes"].get(key, {}).get(which)  # type: ignore[call-overload]


def _lanes(one: Comparison) -> Section:
    shown = lanes_of(one)
    names = [name for name, _ in shown]
    traces = [
        bars(which, names, [row[f"{which}_s"] for _, row in shown], hue, across=True)  # type: ignore[literal-required]
        for hue, which in enumerate(("predicted", "measured"))
    ]
    layout = {"xaxis": axis("busy per iteration", "s"), "yaxis": DOWN}
    says = "Busy time per iteration of lanes and operations, predicted and measured."
    plot = Plot("lanes", says, traces, layout, 150 + 30 * len(shown))
    sentence = f"The case that is furthest off, {case_of(one)}: which lane, and which work on it."
    return Section("lanes", "Where they part", sentence, [plot, _table("The same, per iteration.", LANE, shown)])


def _rest(data: Report) -> Section:
    machine = [[key, str(value)] for key, value in sorted(data["machine"].items())]
    machine.append(["runs of each case", str(data["repeats"])])
    table = Table("The machine.", [Column("what"), Column("value")], machine, folded=True)
    lines = remarks_of(data) or ["Nothing was beyond the tolerance."]
    return Section("grounds", "What this rests on", "", [Note(lines), table])


def _said(data: Talk) -> Section:
    rows = data["policies"]
    names, same = [row["policy"] for row in rows], [row["tokens_same_frac"] for row in rows]
    traces = [bars("tokens as the resident model's", names, same, 0, across=True)]
    layout = {"xaxis": axis("share of tokens", "frac", range=[0, 1.02]), "yaxis": DOWN}
    plot = Plot("tokens", "Tokens that the resident model generates too.", traces, layout, 140 + 30 * len(names))
    wrong = [Note(lines)] if (lines := remarks_of(data)) else []
    sentence = "A lossless policy has to say what the model says; a lossy one may not."
    return Section("tokens", "What the model said", sentence, [plot, _table("Every policy.", POLICY, rows), *wrong])
