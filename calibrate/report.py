"""A calibration as one self-contained HTML page: every curve with its samples, their spread and the fit over them."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate import derive, in_situ_file
from calibrate.derive import MeasuredPoint, Table
from calibrate.store import Store
from sim.base.errors import BadInput
from sim.base.files import replacing
from sim.profiles.hardware import Hardware, load_hardware

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = ("#3366aa", "#cc6633", "#338866", "#884499", "#aa8833", "#555555", "#bb4455", "#22889a")
Series = tuple[str, list[float], list[float], list[float], list[float]]  # name, x, median, low, high


def write(profile: Path, out: Path | None = None) -> Path:
    """Draw the calibration of `profile` (NAME.yaml with NAME.samples.jsonl.gz and, it may be, NAME.lanes.json.gz).

    Raises:
        BadInput: no samples beside the profile, or nothing in them.
    """
    hw = load_hardware(profile)
    base = profile.with_suffix("")
    samples, lanes = Path(f"{base}.samples.jsonl.gz"), in_situ_file.beside(base)
    if not samples.is_file() and not lanes:
        raise BadInput(f"{profile}: no {samples.name} beside it, so there is nothing to draw; `calibrate` writes both")
    figures: list[tuple[str, Any]] = []
    if samples.is_file():
        figures += _of_probes(Table(Store.load(samples)), hw)
    for path in lanes:
        figures += _of_lanes(in_situ_file.load(path), hw)
    if not figures:
        raise BadInput(f"{samples}: no measured curves in it; calibrate with more --minutes")
    out = out or Path(f"{base}.html")
    with replacing(out) as part:
        part.write_text(_page(hw, figures), encoding="utf-8")
    return out


def _of_probes(table: Table, hw: Hardware) -> list[tuple[str, Any]]:
    """Copies by direction and memory, experts on the device and on the CPU, attention; with their fits."""
    figures = []
    series, lines = [], []
    for name, memory, pattern, fitted in (
        ("h2d", "pinned", "queued", hw.h2d),
        ("d2h", "pinned", "queued", hw.d2h),
        ("h2d", "pageable", "wall", hw.h2d_pageable),
        ("d2h", "pageable", "wall", hw.d2h_pageable),
    ):
        points = table.find("copy", direction=name, memory=memory, pattern=pattern)
        if points:
            series.append(_series(f"{name} {memory}", points, "n_bytes"))
            fit = derive.link(table, name, memory)
            latency_s, rate = fitted.latency_s.value, fitted.bandwidth_bytes_per_s.value
            if fit is not None:
                latency_s, rate = fit.fit.params["latency_s"], fit.fit.params["bandwidth_bytes_per_s"]
            xs = series[-1][1]
            lines.append((f"{name} {memory}, fit", xs, [latency_s + x / rate for x in xs]))
    if series:
        figures.append(("Copies", _figure(series, lines, "bytes")))
    for title, probe, key in (
        ("Experts on the device", "expert", "n_tokens"),
        ("Experts on the CPU", "cpu_expert", "n_tokens"),
        ("Attention, decode", "attention", "context"),
    ):
        groups: dict[str, list[MeasuredPoint]] = {}
        for point in table.find(probe):
            if probe == "attention" and point.key.get("phase") != "decode":
                continue
            label = ", ".join(f"{k} {v}" for k, v in point.key.items() if k not in (key, "phase", "n_new"))
            groups.setdefault(label, []).append(point)
        found = [_series(label, points, key) for label, points in groups.items()]
        if found:
            figures.append((title, _figure(found, _fit_lines(table, probe, hw), key.replace("_", " "))))
    return figures


def _fit_lines(table: Table, probe: str, hw: Hardware) -> list[tuple[str, list[float], list[float]]]:
    """The roofline over plain experts, at the points it was fitted to."""
    if probe != "expert":
        return []
    dtype = {"fp32": "float32", "fp16": "float16"}.get(next(iter(hw.gpu.flops_per_s)), "bfloat16")
    fit = derive.gpu_experts(table, dtype, hw.gpu.kernel_floor_s.value)
    if fit is None:
        return []
    by_shape: dict[str, list[tuple[float, float]]] = {}
    for point, residual in zip(fit.points, fit.fit.residuals, strict=True):
        label = f"fit, hidden {point.key['hidden']}, intermediate {point.key['intermediate']}"
        by_shape.setdefault(label, []).append((float(point.key["n_tokens"]), point.summary.median * (1.0 + residual)))
    return [(label, [x for x, _ in sorted(pairs)], [y for _, y in sorted(pairs)]) for label, pairs in by_shape.items()]


def _of_lanes(samples: in_situ_file.Samples, hw: Hardware) -> list[tuple[str, Any]]:
    """Operations on the real machine's lanes: samples by case, and the curve that prices them."""
    figures = []
    model, precision = samples.environment["model"], samples.environment["precision"]
    curves = hw.curves_of(model, precision)
    for op, curve in (curves.operations if curves is not None else {}).items():
        series: list[Series] = []
        for case in sorted({case for (name, _), cases in samples.operations.items() if name == op for case in cases}):
            points = [
                MeasuredPoint({"at": int(at)}, cases[case])
                for (name, at), cases in sorted(samples.operations.items())
                if name == op and case in cases
            ]
            series.append(_series(case, points, "at"))
        line = (f"{op}, priced", list(curve.at), list(curve.seconds))
        title = f"On the real machine's lanes, {model} in {precision}: {op.replace('_', ' ')}"
        figures.append((title, _figure(series, [line], "tokens")))
    return figures


def _series(name: str, points: Sequence[MeasuredPoint], key: str) -> Series:
    rows = sorted((float(point.key[key]), point.summary) for point in points)
    medians, lows, highs = ([getattr(s, part) for _, s in rows] for part in ("median", "low", "high"))
    return name, [x for x, _ in rows], medians, lows, highs


def _figure(series: Sequence[Series], lines: Sequence[tuple[str, list[float], list[float]]], x_title: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for index, (name, xs, medians, lows, highs) in enumerate(series):
        above, below = ([abs(a - b) for a, b in zip(side, medians, strict=True)] for side in (highs, lows))
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=medians,
                mode="markers",
                name=name,
                marker={"color": COLOURS[index % len(COLOURS)], "size": 6},
                error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1},
            )
        )
    for index, (name, xs, ys) in enumerate(lines):
        style = {"color": COLOURS[index % len(COLOURS)], "width": 1.5}
        figure.add_trace(go.Scatter(x=xs, y=ys, mode="lines", name=name, line=style))
    figure.update_layout(height=440, margin={"t": 20}, template="plotly_white", legend={"font": {"size": 11}})
    figure.update_xaxes(type="log", title=x_title)
    figure.update_yaxes(type="log", title="seconds (median, quartiles)")
    return figure


def _page(hw: Hardware, figures: Sequence[tuple[str, Any]]) -> str:
    import plotly.io

    sources = "".join(f"<li>{html.escape(key)}: {html.escape(text)}</li>" for key, text in hw.sources.items())
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(hw.id)}</title>",
        "<style>body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}</style>",
        f"<h1>{html.escape(hw.name)}</h1><p>{html.escape(hw.note)}</p><ul>{sources}</ul>",
    ]
    for index, (title, figure) in enumerate(figures):
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(plotly.io.to_html(figure, full_html=False, include_plotlyjs=index == 0))
    return "\n".join(parts) + "</html>\n"
