"""Operations timed where they will run: on the lanes and threads of the real machine, driven by a seeded trace.

Kernels timed alone and back to back promise more than a run keeps: work is handed to threads that have to wake up, the
interpreter is shared, caches are cold after the copy of another expert, copies run beside. So this calibration runs the
machine itself under a few plain policies and takes each operation's time from when it could have started to its end.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from calibrate import duplex, unpack
from calibrate.stats import summarise
from calibrate.store import unpacked
from sim.data import replacing
from sim.errors import BadInput
from sim.real.faults import DeviceFault
from sim.real.work import LANES

if TYPE_CHECKING:
    from sim.models import Model
    from sim.real.run import Measured
    from sim.real.work import Lanes, Work
    from sim.spec import RunSpec

FORMAT = 1
MAX_S = 1e6  # no operation takes longer, and no file of samples says so
PROMPTS = (1, 256, 16, 64, 4, 128, 2, 32, 8)  # a run cut short has seen short and long ones
OUTPUTS = 9
SWAPS = "mixtral_offloading"
CASES = (("lru", 1.0), ("lru", 0.25), ("perfect_prefetch", 0.25), ("lru", 1.0), ("llama_cpp", 0.5), (SWAPS, 0.25))
"""Policy and share of experts resident: nothing copied, demand copies, copies beside compute, experts on the CPU, and
copies beside write-backs, whose times serve for what both ways cost each other alone."""
POOLED = ("attention_decode", "expert", "cpu_expert")  # abscissas that routing decides, many and each rarely
PER_POINT = 4000  # samples kept of one point and case


@dataclass
class Samples:
    """Seconds by (operation, abscissa), by case; and the host's by verb."""

    operations: dict[tuple[str, float], dict[str, list[float]]] = field(default_factory=dict)
    copies: dict[int, list[float]] = field(default_factory=dict)  # by bytes
    sends: dict[int, list[float]] = field(default_factory=dict)  # activations to the host, by bytes
    verbs: dict[str, list[float]] = field(default_factory=dict)
    overlap: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # (share beside copies, seconds)
    alone: dict[str, list[float]] = field(default_factory=dict)  # see `calibrate.duplex`
    swaps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # way: (seconds, beside the other way)
    policy: list[tuple[float, float]] = field(default_factory=list)  # seconds of policy code: in a run, and simulated
    environment: dict[str, Any] = field(default_factory=dict)

    def add(self, op: str, at: float, case: str, seconds: float) -> None:
        kept = self.operations.setdefault((op, at), {}).setdefault(case, [])
        if len(kept) < PER_POINT:
            kept.append(seconds)


def script(path: Path, model: Model, seed: int, prompts: Iterable[int] = PROMPTS) -> Path:
    """A seeded uniform trace of the model's routing shape: one request per prompt length, `OUTPUTS` tokens each."""
    from traces.header import Gate, Header
    from traces.requests import Request
    from traces.writer import write_trace

    rng = np.random.default_rng(seed)
    made, first = [], 0
    for index, prompt in enumerate(prompts):
        made.append(Request(index, first, prompt, prompt + OUTPUTS - 1, "", None, "test"))
        first += prompt + OUTPUTS - 1
    experts = np.argsort(rng.random((first, model.n_moe_layers, model.n_experts)), axis=-1)[..., : model.top_k]
    header = Header(n_layers=model.n_moe_layers, n_experts=model.n_experts, top_k=model.top_k, model=model.id,
                    model_source="calibrate/in_situ.py", gate=Gate(), labels=("synthetic",), created_by="calibrate",
                    text_licence="none")  # fmt: skip
    return write_trace(path, header, made, None, experts=experts)


def run(
    device: str, model_name: str, precision: str, folder: Path, *, rounds: int = 2, seed: int = 0,
    tell: Callable[[str], object] = lambda _: None, prompts: Iterable[int] = PROMPTS,
    cases: Iterable[tuple[str, float]] = CASES, lanes: Lanes | None = None, budget_s: float = math.inf,
) -> Samples:  # fmt: skip
    """Measure every case `rounds` times on one set of weights. `folder` takes the temporary trace.

    Args:
        budget_s: seconds for all runs, loading apart; each case has an equal share of what is left, and is cut short.

    Raises:
        BadInput: a geometry that does not fit or cannot be carried out.
    """
    from calibrate import environment
    from sim.models import load_model
    from sim.real.cpu_lanes import cores
    from sim.real.decoder import Decoder
    from sim.real.run import check, check_memory, free_bytes, measure, open_lanes
    from sim.real.weights import random_weights
    from sim.run import prepare
    from sim.spec import RunSpec

    samples = Samples()
    cases, own = list(cases), lanes is None
    with ExitStack() as stack:
        lanes = lanes or open_lanes(device)
        if own:
            stack.callback(lanes.close)
        model = load_model(model_name)
        path = script(folder / "in_situ.safetensors", model, seed, prompts)
        stack.callback(path.unlink, missing_ok=True)
        n_all = model.n_moe_layers * model.n_experts
        device_of, most = _room(lanes, RunSpec(policy="lru", hw="rtx3090", model=model_name, trace=str(path),
                                               precision=precision, experts=1), n_all)  # fmt: skip
        weights, timer = None, Timer(budget_s, rounds * len(cases))
        for number in range(rounds):
            for policy, frac in cases:
                swapping = policy == SWAPS
                # It keeps an expert of every layer and four buffers; its guesses would need scores.
                least, settings = (model.n_moe_layers + 4, {"guesses": 0}) if swapping else (1, {})
                if least > most:
                    continue
                resident = min(most, max(least, int(frac * n_all)))
                spec = RunSpec(policy=policy, hw="rtx3090", model=model_name, trace=str(path), precision=precision,
                               experts=resident, set={**device_of, **settings})  # fmt: skip
                setup = prepare(spec)
                try:
                    if weights is None:
                        check(setup)
                        host_bytes = check_memory(setup, lanes, free_bytes(lanes))
                        weights = random_weights(setup.model, precision, lanes, seed, host_bytes)
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
                        _collect(samples, done, f"{policy}@{resident / n_all:.3g}", number)
                finally:
                    setup.close()
                    timer.stop()
        if weights is not None:
            tell("copies both ways")
            decoder = Decoder(model, weights, lanes.torch, lanes.device, 1)
            samples.alone = duplex.alone(lanes, weights, decoder)
            for bits, seconds in unpack.measure(lanes, weights):
                samples.add("unpack", bits, "alone", seconds)
        samples.environment = {
            "device": lanes.title, "cores": cores(), "machine": environment.machine(), "load": _load(),
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rounds": rounds,
            "model": model.id, "precision": precision,
        }  # fmt: skip
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


def _room(lanes: Lanes, spec: RunSpec, n_all: int) -> tuple[dict[str, float], int]:
    """Settings that give the described GPU the memory of this device, and how many of the experts it holds."""
    from sim.real.run import SLACK_FRAC, free_bytes
    from sim.run import prepare
    from sim.spec import RunSpec

    settings: dict[str, float] = {}
    if lanes.device.startswith("cuda"):
        settings["hw.vram_bytes"] = float(lanes.torch.cuda.mem_get_info(lanes.device)[1])
    setup = prepare(RunSpec(**{**msgspec.structs.asdict(spec), "set": settings}))
    try:
        size = setup.model.expert_bytes(spec.precision)
        fixed = sum(n_bytes for _, n_bytes in setup.memory.rows) - setup.memory.expert_bytes[0]
        room = min(int(setup.hw.vram_bytes.value), int(SLACK_FRAC * free_bytes(lanes)[0])) - fixed
        return settings, max(1, min(n_all, room // size))
    finally:
        setup.close()


def _load() -> list[float]:
    import os

    return list(os.getloadavg()) if hasattr(os, "getloadavg") else []


def _collect(samples: Samples, done: Measured, case: str, number: int) -> None:
    """Sort a run's work into samples, but for the start of the first round, which warms up threads and caches."""
    machine = done.machine
    kept = machine.ledger.kept
    copies = [(w.start_s, w.end_s) for w in kept if LANES[w.lane] == "h2d" and w.piece is not None]
    free_s = dict.fromkeys(LANES, 0.0)
    skip_s = 0.05 * done.result["simulated_s"] if number == 0 else 0.0
    at_copy = 0
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
                while at_copy < len(copies) and copies[at_copy][1] < work.start_s:
                    at_copy += 1
                beside = _beside(copies, at_copy, work) / max(work.end_s - work.start_s, 1e-9)
                samples.overlap.setdefault(case, []).append((round(beside, 3), work.end_s - work.start_s))
        elif lane == "cpu":
            # From the rows' arrival to the result's being ready, on the pool.
            samples.add("cpu_expert", work.n_tokens, case, seconds)
        else:
            where = samples.copies if lane == "h2d" else samples.sends
            where.setdefault(work.n_bytes, []).append(seconds)
    for verb, cost in machine.ledger.host_by.items():
        samples.verbs.setdefault(verb, []).extend(cost.samples_s[:PER_POINT])


def _policy_alone_s(spec: RunSpec) -> float:
    """Seconds of policy code of the same run in a simulation, where no other thread wants the interpreter."""
    from sim.real.validate import simulated
    from sim.run import prepare

    setup = prepare(spec)
    try:
        return float(simulated(setup).result["policy_code_s"])
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
    works["expert"] = [w for w in done.machine.ledger.kept if w.op == "expert" and LANES[w.lane] == "gpu"
                       and w.n_tokens == 1]  # fmt: skip
    for way, other in (("up", "down"), ("down", "up"), ("expert", "down")):
        busy, first, free_s = [(w.start_s, w.end_s) for w in works[other]], 0, 0.0
        for work in works[way]:
            # Of experts, other work of the stream lies in between: they count from their own start.
            began_s = work.start_s if way == "expert" else max(work.ready_s, free_s)
            took_s, free_s = work.end_s - began_s, work.end_s
            while first < len(busy) and busy[first][1] < work.start_s:
                first += 1
            samples.swaps.setdefault(way, []).append((took_s, min(took_s, _beside(busy, first, work))))


def _beside(copies: list[tuple[float, float]], first: int, work: Work) -> float:
    """Seconds of a piece of work during which a copy was under way."""
    total_s = 0.0
    for start_s, end_s in copies[first:]:
        if start_s >= work.end_s:
            break
        total_s += max(0.0, min(end_s, work.end_s) - max(start_s, work.start_s))
    return total_s


def _abscissa(work: Work) -> tuple[str, float]:
    """Curve and place on it."""
    if work.op == "attention" and work.n_tokens == 1:
        return "attention_decode", float(work.context)
    return work.op, float(work.n_tokens)


def save(samples: Samples, path: Path) -> None:
    """Write the samples beside the profile, whole or not at all."""
    rows = [{"op": op, "at": at, "case": case, "seconds": [round(s, 8) for s in seconds]}
            for (op, at), cases in sorted(samples.operations.items()) for case, seconds in cases.items()]  # fmt: skip
    plain = {
        "format": FORMAT, "environment": samples.environment, "operations": rows,
        "copies": {str(n): _rounded(s) for n, s in sorted(samples.copies.items())},
        "sends": {str(n): _rounded(s) for n, s in sorted(samples.sends.items())},
        "verbs": {verb: _rounded(s[:PER_POINT]) for verb, s in sorted(samples.verbs.items())},
        "overlap": {case: [[f, round(s, 8)] for f, s in pairs[:PER_POINT]] for case, pairs in samples.overlap.items()},
        "policy": [[round(a, 8), round(b, 8)] for a, b in samples.policy],
        "alone": {way: _rounded(s) for way, s in samples.alone.items()},
        "swaps": {way: [[round(a, 8), round(b, 8)] for a, b in pairs[:PER_POINT]]
                  for way, pairs in samples.swaps.items()},
    }  # fmt: skip
    with replacing(path) as part:
        import gzip

        part.write_bytes(gzip.compress(json.dumps(plain, separators=(",", ":")).encode(), 6, mtime=0))


def _rounded(seconds: list[float]) -> list[float]:
    return [round(s, 8) for s in seconds]


def beside(base: Path) -> list[Path]:
    """Files of samples of the profile `base`.yaml: NAME.lanes.json.gz first, then NAME@MODEL.lanes.json.gz."""
    first = base.with_name(f"{base.name}.lanes.json.gz")
    rest = (path for path in base.parent.glob("*.lanes.json.gz") if path.name.startswith(f"{base.name}@"))
    return [path for path in (first, *sorted(rest)) if path.is_file()]


def load(path: Path) -> Samples:
    """Read samples back. Raises BadInput."""
    try:
        plain = msgspec.json.decode(unpacked(path), type=_File)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not the samples of a calibration on the real machine ({error}); calibrate again"
                       ) from None  # fmt: skip
    samples = Samples(environment=plain.environment, copies=plain.copies, sends=plain.sends, verbs=plain.verbs,
                      overlap=plain.overlap, alone=plain.alone, swaps=plain.swaps,
                      policy=plain.policy)  # fmt: skip
    for row in plain.operations:
        samples.operations.setdefault((row.op, row.at), {})[row.case] = row.seconds
    return samples


Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]


class _Operation(msgspec.Struct):
    op: str
    at: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    case: str
    seconds: list[Seconds]


class _File(msgspec.Struct):
    """What `save` writes."""

    format: Literal[1]
    environment: dict[str, Any]
    operations: list[_Operation]
    copies: dict[Annotated[int, msgspec.Meta(ge=1)], list[Seconds]]
    sends: dict[Annotated[int, msgspec.Meta(ge=1)], list[Seconds]]
    verbs: dict[str, list[Seconds]]
    overlap: dict[str, list[tuple[float, Seconds]]]
    policy: list[tuple[Seconds, Seconds]] = []
    alone: dict[str, list[Seconds]] = {}
    swaps: dict[str, list[tuple[Seconds, Seconds]]] = {}


# -- from samples to figures -------------------------------------------------------------------------------------


def curve(samples: Samples, op: str) -> dict[str, Any] | None:
    """One operation's curve as plain data; points of fewer than three samples are left out, near ones are pooled."""
    points: dict[float, list[float]] = {}
    for (name, at), cases in samples.operations.items():
        if name == op:
            key = float(_bucket(at)) if op in POOLED else at
            for seconds in cases.values():
                points.setdefault(key, []).extend(seconds)
    found = [(at, typical(seconds), summarise(seconds)) for at, seconds in sorted(points.items()) if len(seconds) >= 3]
    if not found:
        return None
    return {"at": [at for at, _, _ in found], "seconds": [value for _, value, _ in found],
            "iqr_s": [s.iqr for _, _, s in found], "n": [s.n for _, _, s in found]}  # fmt: skip


def typical(seconds: list[float]) -> float:
    """Mean of the samples but for the lowest and highest 2.5 %.

    A token's time is a sum of thousands of operations, and only means add up: the sum of medians of skewed times falls
    short. What is cut off are pauses of the machine that no two runs share.
    """
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    cut = int(0.025 * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def _bucket(context: float) -> int:
    """Contexts pooled into steps of about a quarter."""
    step = max(1, 2 ** max(0, int(np.log2(max(context, 1.0))) - 2))
    return int(context // step * step + step // 2)


def curves(samples: Samples) -> dict[str, Any]:
    """The block `curves` of a profile."""
    from sim.curves import AGAINST

    operations = {op: found for op in AGAINST if (found := curve(samples, op)) is not None}
    launches = {}
    for verb, seconds in samples.verbs.items():
        name = verb.removeprefix("launch ")
        if verb != "sync" and verb != "before sync" and name != "copy":
            launches[name] = figure(seconds)
    found = {"model": samples.environment["model"], "precision": samples.environment["precision"],
             "operations": operations, "launches": launches}  # fmt: skip
    slowdown = policy_slowdown(samples)
    return found if slowdown is None else {**found, "policy_slowdown": slowdown}


def policy_slowdown(samples: Samples) -> dict[str, Any] | None:
    """Extra time of policy code in runs, where threads of lanes want the interpreter too; None without whole runs."""
    alone_s = math.fsum(alone for _, alone in samples.policy)
    if alone_s <= 0.0:
        return None
    ratios = [run_s / alone for run_s, alone in samples.policy if alone > 0.0]
    value = min(10.0, max(0.0, math.fsum(run_s for run_s, _ in samples.policy) / alone_s - 1.0))
    return {"value": value, "source": "measured", "ref": "lanes", "iqr": summarise(ratios).iqr, "n": len(ratios),
            "note": "all cases together, against the same hooks in a simulation"}  # fmt: skip


def figure(seconds: list[float], note: str = "") -> dict[str, Any]:
    """A measured figure of a profile."""
    found = summarise(seconds)
    plain: dict[str, Any] = {"value": typical(seconds), "source": "measured", "ref": "lanes", "iqr": found.iqr,
                             "n": found.n}  # fmt: skip
    return {**plain, "note": note} if note else plain


def link(by_bytes: Mapping[int, list[float]]) -> dict[str, Any] | None:
    """Latency and bandwidth through the smallest and the largest copies; None with one size alone."""
    sizes = sorted(n for n, seconds in by_bytes.items() if len(seconds) >= 3)
    if len(sizes) < 2 or sizes[-1] < 256 * sizes[0]:
        return None
    small, large = (summarise(by_bytes[n]) for n in (sizes[0], sizes[-1]))
    small_s, large_s = (typical(by_bytes[n]) for n in (sizes[0], sizes[-1]))
    rate = (sizes[-1] - sizes[0]) / max(large_s - small_s, 1e-9)
    latency_s = max(0.0, large_s - sizes[-1] / rate)
    spread = large.noise_frac
    note = f"whole experts and {sizes[0]} bytes of hidden state, on the real machine's copy lane"
    return {"latency_s": {"value": latency_s, "source": "measured", "ref": "lanes", "iqr": small.iqr, "n": small.n,
                          "note": note},
            "bandwidth_bytes_per_s": {"value": rate, "source": "measured", "ref": "lanes", "iqr": rate * spread,
                                      "n": large.n}}  # fmt: skip


def _both_ways(samples: Samples) -> dict[str, Any]:
    """What copies up and write-backs cost each other; empty where swaps were not seen."""
    sizes, ratio = [n for n, seconds in samples.copies.items() if len(seconds) >= 3], duplex.ratio_down(samples.alone)
    if not sizes or ratio is None:
        return {}
    up_s = typical(samples.copies[max(sizes)])
    found = {"h2d_slowdown_by_d2h": duplex.slowdown(samples.swaps.get("up", []), up_s),
             "d2h_slowdown_by_h2d": duplex.slowdown(samples.swaps.get("down", []), ratio * up_s)}  # fmt: skip
    experts = [seconds for pairs in samples.overlap.values() for _, seconds in pairs]
    if experts:
        found["gpu_slowdown_by_d2h"] = duplex.slowdown(samples.swaps.get("expert", []), typical(experts))
    return {name: term for name, term in found.items() if term is not None}


def apply(data: dict[str, Any], samples: Samples, name: str, others: Sequence[Samples] = ()) -> dict[str, Any]:
    """A profile's plain data with what was measured on the real machine's lanes in place of what was measured alone.

    `others` are samples of further models: they give curves of their own, and sizes of copies.
    """
    every = (*others, samples)  # where two measured one size, the first model's samples count
    up = link({n: seconds for one in every for n, seconds in one.copies.items()})
    down = link({n: seconds for one in every for n, seconds in one.sends.items()})
    sizes = [float(n) for one in every for n, seconds in one.copies.items() if len(seconds) >= 3]
    ranges = {**data.get("ranges", {}), **({"copy_bytes": [min(sizes), max(sizes)]} if up is not None else {})}
    on_cpu = samples.environment["device"] == "CPU backend"
    data = {**data, "curves": curves(samples), **({"more_curves": [curves(s) for s in others]} if others else {})}
    if up is not None:  # pageable copies are another matter on a GPU, and were measured alone
        data |= {"h2d": up, "h2d_pageable": up} if on_cpu else {"h2d": up}
    if down is None and samples.sends:
        smallest = samples.sends[min(samples.sends)]
        rate = (up or data["d2h"])["bandwidth_bytes_per_s"]
        assumed = {"value": rate["value"], "source": "assumed", "note": "as to the device; only tokens came back"}
        down = {"latency_s": figure(smallest),
                "bandwidth_bytes_per_s": duplex.rate_down(samples.alone, rate) or assumed}  # fmt: skip
    if down is not None:
        data |= {"d2h": down, "d2h_pageable": down} if on_cpu else {"d2h": down}
    syncs, before = samples.verbs["sync"], samples.verbs["before sync"]
    copies = samples.verbs.get("launch copy")
    host = {**data["host"], "sync_s": {**figure(syncs), "value": typical(syncs) + typical(before)}}
    if copies:
        host["copy_launch_s"] = figure(copies)
    # Slow-downs by copies are inside the medians above; counting them again would bill them twice.
    none = {"value": 0.0, "source": "measured", "ref": "lanes", "note": "inside the curves, measured beside copies"}
    machine = samples.environment["machine"]
    lanes = (f"{name}.lanes.json.gz ({machine['cpu']}, {samples.environment['cores']} cores, torch "
             f"{machine['versions']['torch']}, {samples.environment['measured']}, load "
             f"{', '.join(f'{x:.1f}' for x in samples.environment['load'])})")  # fmt: skip
    if on_cpu:
        data["vram_bytes"] = {"value": float(machine["memory_bytes"]), "source": "measured", "ref": "lanes",
                              "note": "the arena that stands for device memory lies in host memory"}  # fmt: skip
    terms = {**dict.fromkeys(data["contention"], none), **_both_ways(samples)}
    return {**data, "host": host, "contention": terms, "ranges": ranges,
            "sources": {**data["sources"], "lanes": lanes}}  # fmt: skip
