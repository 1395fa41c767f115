"""Run probes in rounds within a time budget: every fault is a record, every probe is saved before the next begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from calibrate import probes_compute, probes_contention, probes_copy
from calibrate.bench import Bench, Point, Probe
from calibrate.clock import BusyLaneClock, LaneClock, OverlapClock
from calibrate.ops import random_tensor
from calibrate.stats import measure
from calibrate.store import Record, Store
from sim.base.interrupts import heard

PROBES: tuple[Probe, ...] = (
    Probe("host", 0.06, probes_copy.host),
    Probe("anchor", 0.05, probes_copy.anchors),
    Probe("copy", 0.24, probes_copy.sizes),
    Probe("expert", 0.20, probes_compute.experts),
    Probe("copy_enqueue", 0.03, probes_copy.enqueue),
    Probe("cpu_expert", 0.16, probes_compute.on_cpu),
    Probe("contention", 0.14, probes_contention.points),
    Probe("attention", 0.16, probes_compute.attention),
    Probe("dense", 0.10, probes_compute.dense),
    Probe("copy_shape", 0.08, probes_copy.shapes_of_copy),
)


@dataclass(frozen=True)
class Progress:
    """What a progress display is told; both default to nothing."""

    probe: Callable[[str, int], object] = lambda *_: None
    point: Callable[[str, Mapping[str, str | int], float], object] = lambda *_: None


@dataclass
class Health:
    """Readings of the card taken around probes, in order: (when, what) beside NVML's dictionary."""

    read: Callable[[], dict[str, Any]]
    readings: list[dict[str, Any]] = field(default_factory=list)

    def take(self, when: str) -> None:
        """A reading that fails is a reading that says so; calibration goes on."""
        try:
            if found := self.read():
                self.readings.append({"when": when, **found})
        except Exception as error:
            self.readings.append({"when": when, "error": _short(error)})


def run(
    bench: Bench,
    store: Store,
    budget_s: float,
    health: Health,
    *,
    probes: Sequence[Probe] = PROBES,
    max_rounds: int = 3,
    progress: Progress | None = None,
    saved: Callable[[], None] = lambda: None,
) -> None:
    """Measure all probes once, then again while the budget lasts: rounds apart in time show drift that blocks cannot.

    Args:
        budget_s: seconds for everything; in the first round each probe has its share and what earlier ones left over.
        saved: called after each probe's records are on disk.
    """
    progress = progress or Progress()
    start_s = bench.now()
    _warm_up(bench, min(1.5, 0.01 * budget_s))
    haste = min(1.0, max(0.05, budget_s / 150.0))  # a short budget thins every point out instead of dropping most
    total_share = sum(probe.share for probe in probes)
    cost_s: dict[str, float] = {}
    for n_round in range(max_rounds):
        share_before = 0.0
        for probe in probes:
            probe_start_s = bench.now()
            used_s = probe_start_s - start_s
            share_before += probe.share
            if n_round == 0:
                deadline_s = start_s + budget_s * share_before / total_share
                # A probe that comes late still gets half its share: each must leave some points behind.
                deadline_s = max(deadline_s, probe_start_s + 0.5 * budget_s * probe.share / total_share)
            elif used_s + cost_s.get(probe.name, 0.0) > budget_s:
                continue
            else:
                deadline_s = start_s + budget_s
            progress.probe(probe.name, n_round)
            health.take(f"before {probe.name}, round {n_round}")
            if probe.name == "copy" and n_round == 0 and bench.device.facts.kind == "cuda":
                _read_under_load(bench, health)

            def tell(key: Mapping[str, str | int], name: str = probe.name) -> None:
                progress.point(name, key, (bench.now() - start_s) / budget_s)

            _run_probe(bench, store, probe, n_round, deadline_s, haste, tell)
            health.take(f"after {probe.name}, round {n_round}")
            cost_s[probe.name] = max(cost_s.get(probe.name, 0.0), bench.now() - probe_start_s)
            store.save()
            saved()
        if bench.now() - start_s >= budget_s:
            break


def _warm_up(bench: Bench, duration_s: float) -> None:
    """A second or so of matmuls: clocks ramp, libraries load, and the first probe does not pay for either."""
    if bench.device.facts.kind != "cuda":
        return
    with contextlib.suppress(Exception):  # a fault here shows in every probe that follows
        device = bench.device
        a, b = (random_tensor(device, (bench.matmul_sizes[-1],) * 2, bench.dtype) for _ in range(2))
        end_s = bench.now() + duration_s
        while bench.now() < end_s:
            bench.compute.enqueue(lambda: device.torch.matmul(a, b), 50)
            device.settle()


def _read_under_load(bench: Bench, health: Health) -> None:
    """PCIe generation and width drop on an idle link, so they are read while copies are in flight."""
    with contextlib.suppress(Exception):  # the copy probe meets the same fault and records it
        device = bench.device
        call = bench.copy_call("h2d", "pinned", bench.max_copy_bytes // 4)
        LaneClock(device, bench.h2d).total_s(call, 4)
        bench.h2d.enqueue(call, 24)
        health.take("copying")
        device.settle()


def _run_probe(
    bench: Bench, store: Store, probe: Probe, n_round: int, deadline_s: float, haste: float, tell: Callable[..., None]
) -> None:
    points: Iterator[Point] = probe.points(bench)
    while True:
        try:
            point = next(points)
        except StopIteration:
            break
        except Exception as error:  # the probe's own set-up failed: what it has not yielded is lost, the rest is not
            store.add(Record(probe.name, {"what": "set-up"}, n_round, "failed", why=_short(error)))
            break
        if store.has(probe.name, point.key, n_round):
            continue
        if bench.now() >= deadline_s:
            why = "over the time budget: extrapolated; repeat with --resume and more --minutes"
            store.add(Record(probe.name, dict(point.key), n_round, "skipped", why=why))
            continue
        store.add(_measure(bench, probe.name, point, n_round, deadline_s, haste))
        tell(point.key)
        heard()
    points.close()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        bench.device.settle()
        bench.device.free()


def _measure(bench: Bench, probe: str, point: Point, n_round: int, deadline_s: float, haste: float) -> Record:
    try:
        call, clock = point.prepare()
        left_s = max(0.05, deadline_s - bench.now())
        effort = replace(point.effort, max_s=min(point.effort.max_s * haste, left_s))
        samples = measure(call, clock, effort, bench.now)
        bench.device.settle()
        extra = dict(point.extra())
        if isinstance(clock, LaneClock) and clock.enqueue_s:
            extra["enqueue_s"] = [round(value, 9) for value in clock.enqueue_s[-len(samples.samples_s) :]]
        if isinstance(clock, OverlapClock | BusyLaneClock):
            extra["covered"] = clock.covered[-effort.n_samples :]
        return Record(probe, dict(point.key), n_round, "ok", clock.name, samples.calls, samples.samples_s, extra)
    except Exception as error:
        with contextlib.suppress(Exception):  # after an out-of-memory fault the next point may still fit
            bench.device.settle()
        with contextlib.suppress(Exception):
            bench.device.free()
        return Record(probe, dict(point.key), n_round, "failed", why=_short(error))


def _short(error: BaseException) -> str:
    """Type and first line, without the paths and addresses of a long CUDA report."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:240]
