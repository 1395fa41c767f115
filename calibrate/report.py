"""A calibration as a page: every curve with its samples, their spread and the fit over them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate import derive, in_situ_file
from calibrate.derive import MeasuredPoint, Table
from calibrate.store import KINDS, Store
from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.pages.page import Column, Note, Page, Plot, Section
from sim.pages.page import Table as Rows
from sim.pages.plots import axis, line, points
from sim.profiles.hardware import Hardware, load_hardware

if TYPE_CHECKING:
    from collections.abc import Sequence

Series = tuple[str, list[float], list[float], list[float], list[float]]  # name, x, median, low, high
Line = tuple[str, list[float], list[float]]


def page_of(profile: Path) -> Page:
    """The calibration of `profile` (NAME.yaml with NAME.samples.jsonl.gz and, it may be, NAME.lanes.json.gz).

    Raises:
        BadInput: no samples beside the profile, or nothing in them.
    """
    hw = load_hardware(profile)
    base = profile.with_suffix("")
    samples, lanes = Path(f"{base}.samples.jsonl.gz"), in_situ_file.beside(base)
    if not samples.is_file() and not lanes:
        raise BadInput(f"{profile}: no {samples.name} beside it, so there is nothing to draw; `calibrate` writes both")
    sections: list[Section] = []
    if samples.is_file():
        sections += _of_probes(Table(Store.load(samples)), hw)
    for path in lanes:
        sections += _of_lanes(in_situ_file.load(path), hw)
    if not sections:
        raise BadInput(f"{samples}: no measured curves in it; calibrate with more --minutes")
    for at, section in enumerate(sections):  # names tell plots apart, titles need not
        section.name = f"curve-{at + 1}"
        for block in section.blocks:
            if isinstance(block, Plot):
                block.name = section.name
    sources: list[list[Any]] = [[key, text] for key, text in hw.sources.items()]
    told = Rows("What the profile's figures are from.", [Column("block"), Column("source")], sources)
    sections.append(
        Section("sources", "Where the figures are from", "", [told] if sources else [Note(["It says nothing."])])
    )
    said = f"{hw.name}: {show_count(len(sections) - 1, 'measured curve')}, with the samples behind each"
    return Page("calibration", hw.id, said, [hw.note] if hw.note else [], sections)


def _of_probes(table: Table, hw: Hardware) -> list[Section]:
    """Copies by direction and memory, experts on the device and on the CPU, attention; with their fits."""
    figures = []
    series, lines = [], []
    for memory, pattern, links in (
        ("pinned", "queued", (("h2d", hw.h2d), ("d2h", hw.d2h))),
        ("pageable", "wall", (("h2d", hw.h2d_pageable), ("d2h", hw.d2h_pageable))),
    ):
        for name, priced in links:
            if not (points := table.find("copy", direction=name, memory=memory, pattern=pattern)):
                continue
            series.append(_series(f"{name} {memory}", points, "n_bytes"))
            latency_s, rate = priced.latency_s.value, priced.bandwidth_bytes_per_s.value
            if (fit := derive.link(table, name, memory)) is not None:
                latency_s, rate = (fit.fit.params[key] for key in ("latency_s", "bandwidth_bytes_per_s"))
            xs = series[-1][1]
            lines.append((f"{name} {memory}, fit", xs, [latency_s + x / rate for x in xs]))
    if series:
        figures.append(_section("Copies", series, lines, "bytes"))
    for probe, kind in KINDS.items():
        groups: dict[str, list[MeasuredPoint]] = {}
        for point in table.find(probe) if kind.title else ():
            if point.key.get("phase", "decode") == "decode":
                label = ", ".join(f"{k} {v}" for k, v in point.key.items() if k not in (kind.at, "phase", "n_new"))
                groups.setdefault(label, []).append(point)
        if groups:
            found = [_series(label, points, kind.at) for label, points in groups.items()]
            figures.append(_section(kind.title, found, _fit_lines(table, probe, hw), kind.at.replace("_", " ")))
    return figures


def _fit_lines(table: Table, probe: str, hw: Hardware) -> list[Line]:
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


def _of_lanes(samples: in_situ_file.Samples, hw: Hardware) -> list[Section]:
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
        priced = (f"{op}, priced", list(curve.at), list(curve.seconds))
        title = f"On the real machine's lanes, {model} in {precision}: {op.replace('_', ' ')}"
        figures.append(_section(title, series, [priced], "tokens"))
    return figures


def _series(name: str, points: Sequence[MeasuredPoint], key: str) -> Series:
    rows = sorted((float(point.key[key]), point.summary) for point in points)
    medians, lows, highs = ([getattr(s, part) for _, s in rows] for part in ("median", "low", "high"))
    return name, [x for x, _ in rows], medians, lows, highs


def _section(title: str, series: Sequence[Series], lines: Sequence[Line], x_title: str) -> Section:
    traces = []
    for at, (name, xs, medians, lows, highs) in enumerate(series):
        above, below = ([abs(a - b) for a, b in zip(side, medians, strict=True)] for side in (highs, lows))
        error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
        traces.append(points(name, xs, medians, at, marker={"size": 6}, error_y=error))
    traces += [line(name, xs, ys, at, line={"width": 1.5}) for at, (name, xs, ys) in enumerate(lines)]
    layout = {
        "xaxis": axis(x_title, "bytes" if x_title == "bytes" else "", type="log"),
        "yaxis": axis("median, quartiles", "s", type="log"),
    }
    unit = "bytes" if x_title == "bytes" else "n"
    rows = [[name, int(x), *ends] for name, *of in series for x, *ends in zip(*of, strict=True)]
    columns = [Column("series"), Column(x_title, unit), Column("median", "s"), Column("lower quartile", "s")]
    table = Rows("The samples, in figures.", [*columns, Column("upper quartile", "s")], rows, folded=True)
    sentence = "Points are medians of samples with their quartiles; lines are what was fitted, or what prices a run."
    return Section("", title, sentence, [Plot("", f"{title}: seconds by {x_title}.", traces, layout, 460), table])
