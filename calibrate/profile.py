"""Write the hardware profile: the summary that a simulation reads, every figure with its origin, spread and count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from calibrate import derive
from calibrate.derive import Fit, Fitted, MeasuredPoint, Table, Together
from calibrate.stats import NO_MEASUREMENT, assumed, doubted, measured, range_of
from calibrate.store import KINDS
from sim.base.files import replacing
from sim.results.provenance import SPREAD

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LANE_BYTES_PER_S = {
    1: 2.5e9 / 10,
    2: 5e9 / 10,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 / 8,
}
_GATHERED = "experts gathered matrix by matrix from all over host memory"

Facts = Mapping[str, Any]
"""id, name, kind (cuda or cpu), dtype, cpu_dtype, threads, vram_bytes, n_sms, l2_bytes, bus, machine, command."""


def build(table: Table, facts: Facts) -> dict[str, Any]:
    """Plain data of a `sim.profiles.hardware.Hardware`; what could not be measured is assumed and says so."""
    h2d, d2h = (derive.link(table, way, "pinned") for way in ("h2d", "d2h"))
    up, down = _link(h2d), _link(d2h)
    machine = facts["machine"]
    return {
        "schema": 1,
        "id": facts["id"],
        "name": facts["name"],
        "note": f"measured by `{facts['command']}`; raw samples and environment lie beside this file",
        "vram_bytes": measured(facts["vram_bytes"]),
        "h2d": up,
        "d2h": down,
        "h2d_pageable": _link(derive.link(table, "h2d", "pageable"), fallback=up),
        "d2h_pageable": _link(derive.link(table, "d2h", "pageable"), fallback=down),
        "p2p": _through_host(up, down),
        "gpu": _gpu(table, facts),
        "host": _host(table, facts["kind"]),
        "cpu": _cpu(table, facts),
        "contention": contention(table, facts["threads"][-1]),
        "ranges": _ranges(table),
        "sources": {
            "samples": f"{facts['id']}.samples.jsonl.gz, {facts['id']}.environment.json "
            f"({machine['cpu']}, torch {machine['versions']['torch']})"
        },
    }


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write YAML whose numbers every YAML 1.2 reader reads as numbers."""
    with replacing(path) as part:
        part.write_text(
            yaml.dump(
                dict(data), Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True, default_flow_style=None
            ),
            encoding="utf-8",
        )


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    # Six significant digits; a sign in the exponent and a point in the mantissa, or PyYAML reads text.
    text = f"{value:.6g}"
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    elif "e" not in text and "." not in text:
        text += ".0"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _float)


def _judged(figure: dict[str, Any], probe: str, fit: Fit | None = None) -> dict[str, Any]:
    """A figure with the range that its samples and its fit leave open, where that is wider than the one of every
    measurement; assumed, where they are too bad to call it one."""
    off_frac = 0.0 if fit is None else fit.median_off_frac
    ends = range_of(figure["value"], figure["iqr"], off_frac)
    wide = ends["high"] > figure["value"] * (1 + SPREAD["measured"])
    return doubted({**figure, **ends} if wide else figure, probe, off_frac)


def doubts(data: Mapping[str, Any], command: str) -> Iterator[str]:
    """A line for each figure that is no measurement: what it is instead, and how to measure it after all."""
    for path, figure in _figures(data, ""):
        note = str(figure.get("note", ""))
        if note.startswith(NO_MEASUREMENT):
            probe = note.partition("(probe ")[2].partition(")")[0]
            ends = f", from {figure['low']:.3g} to {figure['high']:.3g}" if "low" in figure else ""
            again = f"{command} --resume --probe {probe} --rounds 12 --minutes 15"
            yield (
                f"{path}: {note}; taken as assumed{ends}. Repeat it on a quiet machine with `{again}`: end other "
                "programs that compute or copy, let nobody else use the machine, plug it in and fix its clocks "
                "(power mode performance)"
            )


def _figures(node: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping):
        if "value" in node and "source" in node:
            yield path, node
        else:
            for name, child in node.items():
                yield from _figures(child, f"{path}.{name}".lstrip("."))


def _fitted(what: str, found: Fitted | None) -> str:
    if found is None:
        return ""
    off = found.fit
    return f"fit over {len(found.points)} {what}, off by {off.median_frac:.1%} (median), {off.worst_frac:.1%} (worst)"


def _of_fit(
    found: Fitted | None, name: str, default: float, probe: str, noise_frac: float, note: str = ""
) -> dict[str, Any]:
    """A parameter of a fit, with the relative IQR of samples under it; assumed where nothing was measured."""
    if found is None:
        return assumed(default)
    value = found.fit.params[name]
    return _judged(measured(value, noise_frac * value, found.n, note), probe, found.fit)


def _link(found: Fitted | None, fallback: dict[str, Any] | None = None) -> dict[str, Any]:
    if found is None and fallback is not None:
        note = "not measured in this run; as page-locked"
        return {name: assumed(figure["value"], note) for name, figure in fallback.items()}
    small, large = (0.0, 0.0) if found is None else (found.points[at].summary.noise_frac for at in (0, -1))
    return {
        "latency_s": _of_fit(found, "latency_s", 1e-5, "copy", small, _fitted("sizes", found)),
        "bandwidth_bytes_per_s": _of_fit(found, "bandwidth_bytes_per_s", 2e10, "copy", large),
    }


def _through_host(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    note = "two copies through the host, one after the other; no second device was measured"
    rate = 1.0 / sum(1.0 / way["bandwidth_bytes_per_s"]["value"] for way in (up, down))
    latency_s = up["latency_s"]["value"] + down["latency_s"]["value"]
    return {"latency_s": assumed(latency_s, note), "bandwidth_bytes_per_s": assumed(rate, note)}


def _point(point: MeasuredPoint | None, default: float, probe: str, note: str = "") -> dict[str, Any]:
    if point is None:
        return assumed(default)
    summary = point.summary
    return _judged(measured(summary.median, summary.iqr, summary.n, note), probe)


def _gpu(table: Table, facts: Facts) -> dict[str, Any]:
    floor = _point(table.one("host", what="kernel_floor"), 2e-6, "host")
    found = derive.gpu_experts(table, facts["dtype"], floor["value"])
    name = DTYPES[facts["dtype"]]
    by_tokens = [] if found is None else sorted(found.points, key=lambda p: int(p.key["n_tokens"]))
    few, many = (by_tokens[at].summary.noise_frac if by_tokens else 0.0 for at in (0, -1))
    note = _fitted("expert timings", found)
    bandwidth = _of_fit(found, "bandwidth_bytes_per_s", 1e12, "expert", few, note)
    rate = _of_fit(found, "flops_per_s", 1e14, "expert", many, note)
    rates = {name: rate}
    if name == "bf16":
        rates["fp16"] = assumed(rate["value"], "as bf16")
    generation, lanes = facts["bus"] or (0, 0)
    peak = lanes * _LANE_BYTES_PER_S.get(generation, 0.0)
    link = {"generation": generation, "lanes": lanes, "theoretical_bytes_per_s": peak}
    return {
        "memory_bandwidth_bytes_per_s": bandwidth,
        "flops_per_s": rates,
        "kernel_floor_s": floor,
        "n_sms": facts["n_sms"],
        "l2_bytes": facts["l2_bytes"],
        **({"link": link} if lanes else {}),
    }


def _host(table: Table, kind: str) -> dict[str, Any]:
    single = [] if kind == "cpu" else [p for p in table.find("expert", variant="plain", n_tokens=1) if p.enqueue_s]
    launch = _point(table.one("host", what="launch"), 5e-6, "host")
    if single:
        # A matmul's launch is dearer than an empty kernel's; what an expert really costs the thread is what counts.
        each = MeasuredPoint({}, [s / derive.EXPERT_KERNELS for p in single for s in p.enqueue_s])
        launch = _point(
            each,
            5e-6,
            "expert",
            f"host seconds of one expert by its {derive.EXPERT_KERNELS} launches; "
            f"the smallest kernel alone: {launch['value'] * 1e6:.1f} us",
        )
    copies = table.find("copy_enqueue")
    middle = min(copies, key=lambda p: abs(int(p.key["n_bytes"]) - (16 << 20))) if copies else None
    return {
        "launch_s": launch,
        "sync_s": _point(table.one("host", what="readback"), 2e-5, "host"),
        "copy_launch_s": _point(middle, 5e-6, "copy_enqueue"),
    }


def _cpu(table: Table, facts: Facts) -> dict[str, Any]:
    machine, threads = facts["machine"], facts["threads"][-1]
    found = derive.cpu_experts(table, facts["cpu_dtype"], threads)
    noise_frac = 0.0 if found is None else max(point.summary.noise_frac for point in found.points)
    note = f"{DTYPES[facts['cpu_dtype']]}, {threads} threads; {_fitted('timings', found)}"
    bandwidth, rate, overhead = (
        _of_fit(found, key, default, "cpu_expert", noise_frac, note)
        for key, default in (("bandwidth_bytes_per_s", 2e10), ("flops_per_s", 1e11), ("overhead_s", 2e-5))
    )
    pair = derive.together(table, threads)
    return {
        "id": "host",
        "name": machine["cpu"],
        "n_cores": machine["cores"]["physical"],
        "memory_bandwidth_bytes_per_s": bandwidth,
        "flops_per_s": rate,
        "expert_overhead_s": overhead,
        "memory_bytes": measured(machine["memory_bytes"]),
        **({} if pair is None else {"total_bandwidth_bytes_per_s": _total(pair)}),
    }


def _total(pair: Together) -> dict[str, Any]:
    """What host memory gives to experts on the CPU and copies at once, as far as the two showed it."""
    alone, both = (f"{cpu / 1e9:.1f} and {copies / 1e9:.1f}" for cpu, copies in pair.rates)
    note = f"experts on the CPU and gathered copies, GB/s: alone {alone}, together {both}"
    return _judged(measured(pair.most, pair.noise_frac * pair.most, pair.n, note), "contention")


def _ranges(table: Table) -> dict[str, list[float]]:
    """Least and largest of what each kind of fit rests on; kinds that were not measured are left out."""
    found = {}
    for probe, kind in KINDS.items():
        at = [float(point.key[kind.at]) for point in table.find(probe) if kind.range and kind.at in point.key]
        if at:
            found[kind.range] = [min(at), max(at)]
    return found


def contention(table: Table, threads: int) -> dict[str, Any]:
    """Terms that were measured; of the others the simulator's law of shared memory is the better guess.

    Experts on the CPU beside experts gathered from all over memory, as engines copy them; else beside large copies.
    """
    device: dict[str, str | int] = {"work": "expert", "n_tokens": 1}
    host: dict[str, str | int] = {"work": "cpu_expert", "n_tokens": 1, "threads": threads}
    terms = {}
    for term, key, ways in (
        ("gpu_slowdown_by_h2d", device, (("gpu_by_h2d", ""),)),
        ("h2d_slowdown_by_gpu", device, (("h2d_by_gpu", ""),)),
        ("cpu_slowdown_by_h2d", host, (("cpu_by_gather", _GATHERED), ("cpu_by_h2d", ""))),
        ("h2d_slowdown_by_cpu", host, (("gather_by_cpu", _GATHERED), ("h2d_by_cpu", ""))),
    ):
        for what, note in ways:
            if (found := derive.slowdown(table, what, note, **key)) is not None:
                terms[term] = found
                break
    return terms
