"""Write the hardware profile: the summary that a simulation reads, every figure with its origin, spread and count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from calibrate import derive
from calibrate.derive import Fitted, MeasuredPoint, Table, Together
from calibrate.fit import Fit
from calibrate.stats import NO_MEASUREMENT, Summary, assumed, doubted, measured, range_of
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


def _spread(summary: Summary, value: float) -> float:
    """The samples' relative IQR carried over to a figure fitted to them."""
    return summary.noise_frac * value


def _fitted(what: str, found: Fitted) -> str:
    off = found.fit
    return f"fit over {len(found.points)} {what}, off by {off.median_frac:.1%} (median), {off.worst_frac:.1%} (worst)"


def _link(found: Fitted | None, fallback: dict[str, Any] | None = None) -> dict[str, Any]:
    if found is None:
        if fallback is not None:
            note = "not measured in this run; as page-locked"
            return {name: assumed(figure["value"], note) for name, figure in fallback.items()}
        return {"latency_s": assumed(1e-5), "bandwidth_bytes_per_s": assumed(2e10)}
    small, large = found.points[0].summary, found.points[-1].summary
    n, note = found.n, _fitted("sizes", found)
    latency_s, rate = (found.fit.params[name] for name in ("latency_s", "bandwidth_bytes_per_s"))
    return {
        "latency_s": _judged(measured(latency_s, _spread(small, latency_s), n, note), "copy", found.fit),
        "bandwidth_bytes_per_s": _judged(measured(rate, _spread(large, rate), n), "copy", found.fit),
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
    if found is None:
        bandwidth, rate = assumed(1e12), assumed(1e14)
    else:
        n, note = found.n, _fitted("expert timings", found)
        by_tokens = sorted(found.points, key=lambda p: int(p.key["n_tokens"]))
        bytes_per_s, flops = (found.fit.params[key] for key in ("bandwidth_bytes_per_s", "flops_per_s"))
        few, many = by_tokens[0].summary, by_tokens[-1].summary
        bandwidth = _judged(measured(bytes_per_s, _spread(few, bytes_per_s), n, note), "expert", found.fit)
        rate = _judged(measured(flops, _spread(many, flops), n, note), "expert", found.fit)
    rates = {name: rate}
    if name == "bf16":
        rates["fp16"] = assumed(rate["value"], "as bf16")
    bus = {}
    if facts["bus"] is not None:
        generation, lanes = facts["bus"]
        bus = {
            "link": {
                "generation": generation,
                "lanes": lanes,
                "theoretical_bytes_per_s": lanes * _LANE_BYTES_PER_S.get(generation, 0.0),
            }
        }
    return {
        "memory_bandwidth_bytes_per_s": bandwidth,
        "flops_per_s": rates,
        "kernel_floor_s": floor,
        "n_sms": facts["n_sms"],
        "l2_bytes": facts["l2_bytes"],
        **bus,
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
    if found is None:
        bandwidth, rate, overhead = assumed(2e10), assumed(1e11), assumed(2e-5)
    else:
        spread = max(point.summary.noise_frac for point in found.points)
        n, note = found.n, f"{DTYPES[facts['cpu_dtype']]}, {threads} threads; {_fitted('timings', found)}"
        bandwidth, rate, overhead = (
            _judged(measured(found.fit.params[key], found.fit.params[key] * spread, n, note), "cpu_expert", found.fit)
            for key in ("bandwidth_bytes_per_s", "flops_per_s", "overhead_s")
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
    for name, probe, key in (
        ("copy_bytes", "copy", "n_bytes"),
        ("expert_tokens", "expert", "n_tokens"),
        ("cpu_expert_tokens", "cpu_expert", "n_tokens"),
        ("context_tokens", "attention", "context"),
    ):
        measured = [float(point.key[key]) for point in table.find(probe) if key in point.key]
        if measured:
            found[name] = [min(measured), max(measured)]
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
