"""The page of a validation: what was predicted beside what was measured, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.pages.page import Column, Note, Page, Plot, Section, Table
from sim.pages.plots import axis, bars, line, points

if TYPE_CHECKING:
    from sim.real.comparison import Comparison, Report, Talk

TIMES = (("tpot_s", "TPOT"), ("ttft_s", "TTFT"))
MOST_OPERATIONS = 12


def of_validation(data: Report | Talk) -> Page:
    """Of what `moesim validate --out` kept."""
    return _of_talk(data) if "policies" in data else _of_report(data)


def _of_report(data: Report) -> Page:
    from sim.real.order import order, told
    from sim.real.validate_text import headline

    compared, machine = data["comparisons"], data["machine"]
    names = [_name(one) for one in compared]
    under = [
        f"{machine['cpu']}, {data['cores']} cores, torch {machine['versions']['torch']}, {data['date']}, "
        f"profile {data['profile']}.",
    ]
    sections = [
        _times(compared, names),
        _errors(compared, names, data["tolerance_frac"]),
        _hits(compared, names),
        _lanes(compared, names),
        Section(
            "order",
            "Order of policies",
            "Whether policies come out in the order that was predicted, which is what a comparison needs.",
            [Note([f"{told(where, row)}." for where, row in order(compared).items()])],
        ),
        _rest(data),
    ]
    return Page("validation", f"Validation on {data['device']}", headline(data), under, sections)


def _name(one: Comparison) -> str:
    room = str(one["experts"]) if one["experts"] else f"{one['cache_capacity_bytes'] / 1e6:.0f} MB"
    return f"{one['policy']}, {room} experts, {one['model']}"


def _times(compared: list[Any], names: list[str]) -> Section:
    plots = []
    for key, title in TIMES:
        pairs = [(one[key], name) for one, name in zip(compared, names, strict=True)]
        both = [
            (pair["measured"], pair["predicted"], name)
            for pair, name in pairs
            if pair["measured"] and pair["predicted"]
        ]
        if not both:
            continue
        low = min(min(x, y) for x, y, _ in both) * 0.9
        high = max(max(x, y) for x, y, _ in both) * 1.1
        traces = [line("as measured", [low, high], [low, high], 6, hoverinfo="skip")]
        for at, policy in enumerate(dict.fromkeys(name.split(",")[0] for _, _, name in both)):
            own = [one for one in both if one[2].split(",")[0] == policy]
            xs, ys, texts = zip(*own, strict=True)
            traces.append(
                points(
                    policy,
                    xs,
                    ys,
                    at,
                    text=list(texts),
                    hovertemplate="%{text}<br>measured %{x:.3~s}s<br>predicted %{y:.3~s}s",
                )
            )
        layout = {"xaxis": axis(f"{title} measured", "s", type="log"), "yaxis": axis("predicted", "s", type="log")}
        plots.append(
            Plot(key[:4], f"{title} predicted against measured; the line is where they agree.", traces, layout, 420)
        )
    sentence = "A point is one policy at one budget: on the line the prediction is right, above it is too slow."
    return Section("times", "Predicted against measured", sentence, [*plots])


def _errors(compared: list[Any], names: list[str], tolerance: float) -> Section:
    traces = [
        bars(title, names, [one[key]["error_frac"] for one in compared], at, across=True)
        for at, (key, title) in enumerate(TIMES)
    ]
    shapes = [
        {
            "type": "line",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "x0": at,
            "x1": at,
            "line": {"color": "#7F7F7F", "dash": "dash"},
        }
        for at in (-tolerance, tolerance)
    ]
    layout = {
        "xaxis": axis("error, as a share of what was measured", "frac"),
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
        "shapes": shapes,
    }
    rows: list[list[Any]] = [
        [
            name,
            *(one[key][which] for key, _ in TIMES for which in ("predicted", "measured", "error_frac")),
            one["decode_iqr_frac"],
            "identical" if one["decisions"]["identical"] else "differ",
            one["worst_lane"],
        ]
        for one, name in zip(compared, names, strict=True)
    ]
    columns = [Column("case")]
    for _, title in TIMES:
        columns += [Column(f"{title} predicted", "s"), Column("measured", "s"), Column("error", "frac")]
    columns += [Column("IQR of iterations", "frac"), Column("decisions"), Column("worst lane")]
    plot = Plot("errors", "Errors of TPOT and TTFT, case by case.", traces, layout, 160 + 26 * len(names))
    sentence = (
        f"Dashed lines stand at the tolerance that was asked for, {100 * tolerance:g} %; left of zero the prediction "
        "is too fast."
    )
    return Section("errors", "How far off", sentence, [plot, Table("Every case.", columns, rows)])


def _hits(compared: list[Any], names: list[str]) -> Section:
    classes = [
        key for key in compared[0]["classes"] if any(one["classes"].get(key, {}).get("measured") for one in compared)
    ]
    rows: list[list[Any]] = [
        [name, *(one["classes"].get(key, {}).get(which) for key in classes for which in ("predicted", "measured"))]
        for one, name in zip(compared, names, strict=True)
    ]
    columns = [Column("case")]
    for key in classes:
        columns += [
            Column(f"{key.removesuffix('_rate').replace('_', ' ')} predicted", "frac"),
            Column("measured", "frac"),
        ]
    sentence = "Classes of decode in both worlds; where decisions are identical, only late hits may differ."
    return Section("hits", "What was found", sentence, [Table("Shares of the experts asked for.", columns, rows)])


def _lanes(compared: list[Any], names: list[str]) -> Section:
    at = max(range(len(compared)), key=lambda i: abs(compared[i]["tpot_s"]["error_frac"] or 0.0))
    one = compared[at]
    operations = sorted(one["operations"].items(), key=lambda item: -abs(item[1]["off_s"]))[:MOST_OPERATIONS]
    shown: dict[str, Any] = {**one["lanes"], **dict(operations)}
    traces = [
        bars(which, list(shown), [row[f"{which}_s"] for row in shown.values()], hue, across=True)
        for hue, which in enumerate(("predicted", "measured"))
    ]
    layout = {
        "xaxis": axis("busy per iteration", "s"),
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    says = "Busy time per iteration of lanes and operations, predicted and measured."
    rows: list[list[Any]] = [[name, row["predicted_s"], row["measured_s"], row["off_s"]] for name, row in shown.items()]
    columns = [Column("lane or operation"), Column("predicted", "s"), Column("measured", "s"), Column("off", "s")]
    blocks: list[Plot | Table] = [
        Plot("lanes", says, traces, layout, 150 + 30 * len(shown)),
        Table("The same, per iteration.", columns, rows),
    ]
    sentence = f"The case that is furthest off, {names[at]}: which lane, and which work on it."
    return Section("lanes", "Where they part", sentence, [*blocks])


def _rest(data: Report) -> Section:
    notes = sorted({label for one in data["comparisons"] for label in one["caveats"]})
    wrong = [f"Wrong: {text}." for text in data["wrong"]]
    machine: list[list[Any]] = [[key, str(value)] for key, value in sorted(data["machine"].items())]
    load = ", ".join(f"{x:.1f}" for x in data["load"])
    machine += [["load average", load], ["runs of each case", str(data["repeats"])]]
    table = Table("The machine.", [Column("what"), Column("value")], machine, folded=True)
    lines = [*wrong, *(f"Note: {text}." for text in notes)] or ["Nothing was beyond the tolerance."]
    return Section("grounds", "What this rests on", "", [Note(lines), table])


def _of_talk(data: Talk) -> Page:
    columns = [
        Column("policy"),
        Column("lossy"),
        Column("tokens", "n"),
        Column("as the resident model", "frac"),
        Column("perplexity", "x"),
        Column("of the resident model", "x"),
        Column("change", "frac"),
        Column("activations changed, closed loop", "frac"),
        Column("open loop", "frac"),
        Column("gate mass kept, open loop", "frac"),
    ]
    rows: list[list[Any]] = [
        [
            row["policy"],
            row["lossy"],
            row["tokens"],
            row["tokens_same_frac"],
            row["perplexity"],
            row["perplexity_resident"],
            row["perplexity_change_frac"],
            row["closed_loop_activations_changed_frac"],
            row["open_loop_activations_changed_frac"],
            row["open_loop_gate_mass_kept"],
        ]
        for row in data["policies"]
    ]
    names = [row["policy"] for row in data["policies"]]
    traces = [
        bars(
            "tokens as the resident model's",
            names,
            [row["tokens_same_frac"] for row in data["policies"]],
            0,
            across=True,
        )
    ]
    layout = {
        "xaxis": axis("share of tokens", "frac", range=[0, 1.02]),
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    plot = Plot("tokens", "Tokens that the resident model generates too.", traces, layout, 140 + 30 * len(names))
    wrong = [Note([f"Wrong: {text}." for text in data["wrong"]])] if data["wrong"] else []
    sentence = "A lossless policy has to say what the model says; a lossy one may not."
    section = Section("tokens", "What the model said", sentence, [plot, Table("Every policy.", columns, rows), *wrong])
    said = f"{data['checkpoint']} generates under {len(data['policies'])} policies, routing itself"
    return Page("validation", said, said, (), [section])
