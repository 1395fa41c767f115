"""Operations timed where they will run: on the lanes and threads of the real machine, driven by a seeded trace.

Kernels timed alone and back to back promise more than a run keeps: work is handed to threads that have to wake up, the
interpreter is shared, caches are cold after the copy of another expert, copies run beside. So this calibration runs the
machine itself under a few plain policies and takes each operation's time from when it could have started to its end.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from calibrate import duplex
from calibrate.in_situ_file import PER_POINT, Samples
from sim.base.device_faults import DeviceFault
from sim.real.devices.work import LANES

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.profiles.models import Model
    from sim.real.devices.lanes import Lanes
    from sim.real.devices.work import Work
    from sim.real.run import Measured

PROMPTS = (1, 256, 16, 64, 4, 128, 2, 32, 8)  # a run cut short has seen short and long ones
OUTPUTS = 9
SWAPS = "mixtral_offloading"
CASES = (("lru", 1.0), ("lru", 0.25), ("perfect_prefetch", 0.25), ("lru", 1.0), ("llama_cpp", 0.5), (SWAPS, 0.25))
"""Policy and share of experts resident: nothing copied, demand copies, copies beside compute, experts on the CPU, and
copies beside write-backs, whose times serve for what both ways cost each other alone."""


def script(path: Path, model: Model, seed: int, prompts: Iterable[int] = PROMPTS) -> Path:
    """A seeded uniform trace of the model's routing shape: one request per prompt length, `OUTPUTS` tokens each."""
    from traces.synth.bare import bare_trace

    lengths = list(prompts)
    n_rows = sum(prompt + OUTPUTS - 1 for prompt in lengths)
    drawn = np.random.default_rng(seed).random((n_rows, model.n_moe_layers, model.n_experts))
    experts = np.argsort(drawn, axis=-1)[..., : model.top_k]
    return bare_trace(path, model.id, model.n_experts, experts, lengths, OUTPUTS, "calibrate/in_situ.py", "calibrate")


def run(
    device: str,
    model_name: str,
    precision: str,
    folder: Path,
    *,
    rounds: int = 2,
    seed: int = 0,
    tell: Callable[[str], object] = lambda _: None,
    prompts: Iterable[int] = PROMPTS,
    cases: Iterable[tuple[str, float]] = CASES,
    lanes: Lanes | None = None,
    budget_s: float = math.inf,
) -> Samples:
    """Measure every case `rounds` times on one set of weights. `folder` takes the temporary trace.

    Args:
        budget_s: seconds for all runs, loading apart; each case has an equal share of what is left, and is cut short.

    Raises:
        BadInput: a geometry that does not fit or cannot be carried out.
    """
    from sim.options import RunSpec
    from sim.profiles.models import load_model
    from sim.real.devices import environment
    from sim.real.devices.lanes import cores
    from sim.real.devices.open import open_lanes
    from sim.real.machine.decoder import Decoder
    from sim.real.requirements import check, check_memory, free_bytes
    from sim.real.run import measure
    from sim.real.weights.random_weights import random_weights
    from sim.run import prepare

    samples = Samples()
    cases, own = list(cases), lanes is None
    with ExitStack() as stack:
        lanes = lanes or open_lanes(device, precision=precision)
        if own:
            stack.callback(lanes.close)
        model = load_model(model_name)
        path = script(folder / "in_situ.safetensors", model, seed, prompts)
        stack.callback(path.unlink, missing_ok=True)
        n_all = model.n_moe_layers * model.n_experts
        asked = RunSpec(
            policy="lru", hw="rtx3090", model=model_name, trace=str(path), precision=precision, cache="1experts"
        )
        device_of, most = room_for(lanes, asked, n_all)
        n_runs, weights, timer = 0, None, Timer(budget_s, rounds * len(cases))
        for number in range(rounds):
            for policy, frac in cases:
                swapping = policy == SWAPS
                # It keeps an expert of every layer and four buffers; its guesses would need scores.
                least, settings = (model.n_moe_layers + 4, {"guesses": 0}) if swapping else (1, {})
                if least > most:
                    continue
                resident = min(most, max(least, int(frac * n_all)))
                spec = msgspec.structs.replace(
                    asked, policy=policy, cache=f"{resident}experts", set={**device_of, **settings}
                )
                setup = prepare(spec)
                try:
                    if weights is None:
                        check(setup)
                        host_bytes = check_memory(setup, lanes.device, free_bytes(lanes.device))
                        weights = random_weights(setup.model, precision, lanes.device, seed, host_bytes)
                    tell(f"{policy}, {resident / n_all:.0%} resident, round {number + 1}")
                    timer.start()
                    done = measure(setup, lanes, weights, keep=True, on_step=timer.check)
                    if done.fault == "interrupted":
                        raise KeyboardInterrupt
                    done.machine.drain()  # of a run cut short, copies are still queued
                    if not done.fault:
                        samples.policy.append((done.machine.ledger.policy_s, _policy_alone_s(spec)))
                    if swapping:
                        _collect_swaps(samples, done)
                    else:
                        n_runs += 1
                        _collect(samples, done, f"{policy}@{resident / n_all:.3g}", number, n_runs)
                    del done  # its arena, before the next one is asked for
                finally:
                    setup.close()
                    timer.stop()
        if weights is not None:
            tell("copies both ways")
            decoder = Decoder(model, weights, lanes.torch, lanes.device.place, 1)
            samples.alone = duplex.alone(lanes, weights, decoder)
            for bits, seconds in duplex.unpacking(lanes, weights):
                samples.add("unpack", bits, "alone", seconds)
        samples.environment = {
            "device": lanes.title,
            "cores": cores(),
            "machine": environment.machine(),
            "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "rounds": rounds,
            "model": model.id,
            "precision": precision,
        }
    return samples


class Timer:
    """Shares a budget of seconds out among cases: each has an equal part of what those before it have left."""

    def __init__(self, budget_s: float, n_cases: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._left_s, self._n_left, self._now = budget_s, n_cases, now
        self._began_s = now()

    def start(self) -> None:
        self._began_s = self._now()

    def check(self, _step: object) -> None:
        """Raises TimeUp when the case has had its part."""
        if self._now() - self._began_s > self._left_s / max(1, self._n_left):
            raise TimeUp("its part of the time is over")

    def stop(self) -> None:
        self._left_s, self._n_left = self._left_s - (self._now() - self._began_s), self._n_left - 1


class TimeUp(DeviceFault):
    """Ends a run early, as a fault of the device would: what was measured until then is kept."""


def room_for(lanes: Lanes, spec: RunSpec, n_all: int) -> tuple[dict[str, float], int]:
    """Settings that give the described GPU the memory of this device, and how many of the experts it holds."""
    from sim.real.requirements import SLACK_FRAC, free_bytes
    from sim.run import prepare

    settings: dict[str, float] = {}
    if lanes.device.facts.kind == "cuda":
        settings["hw.vram_bytes"] = float(lanes.device.facts.total_bytes)
    setup = prepare(msgspec.structs.replace(spec, set=settings))
    try:
        size = setup.model.expert_bytes(spec.precision)
        room = min(int(setup.hw.vram_bytes.value), int(SLACK_FRAC * free_bytes(lanes.device)[0]))
        room -= setup.memory.parts.all_bytes
        return settings, max(1, min(n_all, room // size))
    finally:
        setup.close()


def _collect(samples: Samples, done: Measured, case: str, number: int, run: int) -> None:
    """Sort a run's work into samples, but for the start of the first round, which warms up threads and caches."""
    machine = done.machine
    kept = machine.ledger.kept
    copies = Busy(w for w in kept if LANES[w.lane] == "h2d" and w.piece is not None)
    free_s = dict.fromkeys(LANES, 0.0)
    skip_s = 0.05 * done.result.simulated_s if number == 0 else 0.0
    for work in sorted(kept, key=lambda w: w.start_s):
        lane = LANES[work.lane]
        seconds = work.end_s - max(work.ready_s, free_s[lane])
        free_s[lane] = work.end_s
        if work.start_s < skip_s:
            continue
        if lane == "gpu":
            name, at = _abscissa(work)
            samples.add(name, at, case, seconds)
            if name == "expert" and at == 1:
                took_s = work.end_s - work.start_s
                beside = copies.beside_s(work) / max(took_s, 1e-9)
                samples.overlap.setdefault(case, []).append((round(beside, 3), took_s))
        elif lane == "cpu":
            # From the rows' arrival to the result's being ready, on the pool.
            samples.add("cpu_expert", work.n_tokens, case, seconds)
        else:
            where = samples.copies if lane == "h2d" else samples.sends
            where.setdefault(work.n_bytes, []).append(seconds)
    for verb, cost in machine.ledger.host_by.items():
        samples.verbs.setdefault(verb, {})[f"{run}: {case}"] = cost.samples_s[:PER_POINT]


def _policy_alone_s(spec: RunSpec) -> float:
    """Seconds of policy code of the same run in a simulation, where no other thread wants the interpreter."""
    from sim.real.validate import simulated
    from sim.run import prepare

    setup = prepare(spec)
    try:
        return simulated(setup).policy_code_s
    finally:
        setup.close()


def _collect_swaps(samples: Samples, done: Measured) -> None:
    """Copies of whole experts, up and down: what each took, and how much of that while the other way was busy. And
    experts of one token, and how much of their time was beside write-backs.
    """
    works: dict[str, list[Work]] = {"up": [], "down": []}
    for work in done.machine.ledger.kept:
        if work.op != "activations" and LANES[work.lane] in ("h2d", "d2h"):
            works["up" if LANES[work.lane] == "h2d" else "down"].append(work)
    works["expert"] = [
        w for w in done.machine.ledger.kept if w.op == "expert" and LANES[w.lane] == "gpu" and w.n_tokens == 1
    ]
    for way, other in (("up", "down"), ("down", "up"), ("expert", "down")):
        busy, free_s = Busy(works[other]), 0.0
        for work in works[way]:
            # Of experts, other work of the stream lies in between: they count from their own start.
            began_s = work.start_s if way == "expert" else max(work.ready_s, free_s)
            took_s, free_s = work.end_s - began_s, work.end_s
            samples.swaps.setdefault(way, []).append((took_s, min(took_s, busy.beside_s(work))))


class Busy:
    """When a lane worked, asked in order of time."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._spans, self._first = [(work.start_s, work.end_s) for work in works], 0

    def beside_s(self, work: Work) -> float:
        """Seconds of a piece of work during which the lane was busy."""
        while self._first < len(self._spans) and self._spans[self._first][1] < work.start_s:
            self._first += 1
        total_s = 0.0
        for start_s, end_s in self._spans[self._first :]:
            if start_s >= work.end_s:
                break
            total_s += max(0.0, min(end_s, work.end_s) - max(start_s, work.start_s))
        return total_s


def _abscissa(work: Work) -> tuple[str, float]:
    """Curve and place on it."""
    if work.op == "attention" and work.n_tokens == 1:
        return "attention_decode", float(work.context)
    return work.op, float(work.n_tokens)
