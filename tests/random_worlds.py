"""Small worlds drawn from a seed, each run by the engine and held to the references: of time (SimPy), of residency.

    python tests/random_worlds.py N [SEED]      # worlds SEED to SEED + N - 1; stops at the first difference
    python tests/random_worlds.py --digests N SEED     # compiled modules in use, then a digest per world

A world is hardware, model, stack, trace, budget and policy; one number draws all of it. Times are round in many worlds,
so that things happen at the same moment.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ExtensionFileLoader
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from easy_numbers import Run, figure, hardware, stack
from following import Followed, Today, difference_from_reference
from random_policy import random_policy
from tiny_traces import TASKS, WIDTH, tiny_arrays, tiny_header
from tiny_traces import requests_of as made_requests
from untaught import UNTAUGHT

from sim.base.errors import MoesimError
from sim.engine.engine import Engine
from sim.engine.residency import Residency
from sim.machine.several import LAYERS, homes_by_layer
from sim.machine.simulated import SimulatedMachine
from sim.options import RunSpec
from sim.policy.pieces import Pieces
from sim.policy.registry import find, policies
from sim.profiles.curves import AGAINST, Curve, Curves
from sim.profiles.geometry import Window
from sim.profiles.models import Model, ModelGate
from sim.profiles.stack import load_stack
from sim.results.record import plain
from sim.run import execute
from sim.setup.memory import DenseParts, MemoryPlan
from sim.setup.setup import Setup
from sim.workload.gate import Arrays
from sim.workload.learn_split import requests_of
from traces.format.reader import Trace
from traces.format.writer import write_trace

IN_TURNS = Path(__file__).with_name("in_turns.py")
TIMES_S = (0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0, 0.1, 0.3)
NOT_COMPARED = {"simulator", "wall_s", "by_layer"}
"""Keys of a result that differ between machines; of `by_layer` the last digits of waits."""


@dataclass
class World:
    """Everything but the policy's instance, which each run makes anew."""

    seed: int
    make_policy: Callable[[], Any]
    facts: dict[str, Any]
    trace: Path
    host_bytes: int = 0

    def __str__(self) -> str:
        spec, model, memory = (self.facts[name] for name in ("spec", "model", "memory"))
        stack, policy = self.facts["stack"], self.make_policy()
        told = {name: value for name, value in msgspec.to_builtins(spec).items() if value not in (None, {}, "easy")}
        shape = f"{model.n_moe_layers} x {model.n_experts}, k={model.top_k}, dense layers {model.dense_layers}"
        budgets = [round(n_bytes / model.expert_bytes(spec.precision), 2) for n_bytes in memory.expert_bytes]
        drawn = getattr(policy, "options", {}) | {"prefetch_depth": policy.prefetch_depth}
        return (
            f"world {self.seed}: policy {policy.name} {drawn}\n  {shape}; experts' room {budgets}; open loop "
            f"{self.facts['open_loop']}; grouped {stack.grouped}, graphs {stack.graphs}\n  {told}"
        )


@dataclass
class Seen:
    """What a run showed: the figures, the state at the end, every decision, every span, every call of a policy."""

    error: str = ""
    crash: str = ""  # the traceback, where it was no refusal: a policy's mistake where both have it
    result: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)

    def digest(self) -> str:
        """Of all of it; floats by their shortest exact decimals."""
        text = repr((self.error, self.result, self.end, self.log, self.spans, self.calls))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- drawing --------------------------------------------------------------------------------------------------------


def world(seed: int, folder: Path, policy: str | None = None) -> World:
    """The world of a seed, with its policy or another; its trace is written to the folder."""
    rng = Random(seed)
    n_layers, n_experts = rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 3, 4, 8, 16))
    top_k = rng.randint(1, min(4, n_experts))
    gpus, batch, open_loop = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.random() < 0.3
    precision = rng.choice(("bf16", "bf16", "fp32", "fp8", "int4_g128"))
    hw, unit_s = drawn_hardware(rng)
    gpus = min(gpus, n_experts)  # with fewer experts in a layer than GPUs some would have nothing to do
    n_dense = rng.choice((0, 0, 1, 2))
    dense = tuple(sorted(rng.sample(range(n_layers + n_dense), n_dense)))
    model = drawn_model(rng, n_layers, n_experts, top_k, dense)
    size, total = model.expert_bytes(precision), n_layers * n_experts
    least, budgets = rng.choice((1, top_k + 1, n_experts)), []
    for gpu in range(gpus):
        share = total // gpus + (gpu < total % gpus)
        room = rng.randint(min(least, share), share)
        budgets.append(room * size + (rng.choice((0, 0, size // 2)) if room < share else 0))
    names = [name for name, kind in policies().items() if "oracle" not in kind.traits or batch == 1 or not open_loop]
    name = rng.choice((*names, *["drawn"] * len(names))) if policy is None else policy
    open_loop = open_loop and name in (*names, "drawn")
    settings = {} if name == "drawn" else drawn_settings(rng, name)
    spec = RunSpec(
        policy=name,
        hw=hw.id,
        gpus=gpus,
        batch=batch,
        precision=precision,
        set=settings,
        sim_hit=rng.choice(("gate", "slot", "cached", "token")),
        sim_contention=False,
    )
    facts = {
        "spec": spec,
        "hw": hw,
        "model": model,
        "stack": drawn_stack(rng),
        "memory": planned(budgets),
        "open_loop": open_loop,
    }
    path = drawn_trace(rng, folder / f"{seed}.safetensors", n_layers, n_experts, top_k, open_loop, unit_s)
    policy_seed = rng.getrandbits(32)

    def make() -> Any:
        if name == "drawn":
            return random_policy(Random(policy_seed), unit_s, not open_loop or batch == 1, size)
        return policies()[name](**settings)

    made = World(seed, make, facts, path)
    if rng.random() < 0.95:
        facts["memory"] = planned(enough(made))
    return made


def planned(budgets: Sequence[int]) -> MemoryPlan:
    return MemoryPlan(DenseParts(0, 0, 0, 0, 0, reserve_bytes=0), budgets[0], tuple(budgets), False, sum(budgets))


def enough(of: World) -> list[int]:
    """The drawn budgets, raised to the fewest experts the policy can work with, and room for its predictor."""
    budgets, model, spec = list(of.facts["memory"].expert_bytes), of.facts["model"], of.facts["spec"]
    with Trace(of.trace) as trace:
        try:
            setup = setup_of(of, trace)
        except MoesimError:
            return budgets
        policy, view = setup.policy, view_of(setup)
        size, share = view.expert_bytes, -(-model.n_moe_layers * model.n_experts // spec.gpus)
        shares = [share] * spec.gpus if setup.homes is None else [setup.homes.count(gpu) for gpu in range(spec.gpus)]
        needs = [share if policy.keeps_all else min(share, policy.min_experts(view)) for share in shares]
        # Of what does not divide the last GPUs have less.
        budgets = [max(budget, need * size) for budget, need in zip(budgets, needs, strict=True)]
        budgets[0] += policy.predictor_bytes(view)
    return budgets


def view_of(setup: Setup) -> Any:
    """What a policy sees before it is bound."""
    cost, policy = setup.cost(), setup.policy
    residency, machine = Residency(setup.pieces, setup.memory.expert_bytes), SimulatedMachine(cost, setup.spec.gpus)
    return Engine(policy, machine, residency, cost, Arrays(setup.trace, policy.needs), setup.model.top_k).view


def drawn_hardware(rng: Random) -> tuple[Any, float]:
    """A machine and its unit of time: round numbers, or the scale of a real one."""
    unit_s = rng.choice((1.0, 1.0, 1e-4))
    times = {
        name: rng.choice(TIMES_S) * unit_s
        for name in ("copy_s", "kernel_s", "launch_s", "sync_s", "copy_launch_s", "cpu_s", "peer_s")
    }
    times["launch_s"] /= rng.choice((1.0, 8.0, 100.0))
    hw = hardware(**times)
    if rng.random() < 0.5:  # what depends on sizes, instead of floors alone
        rate = rng.choice((100.0, 1000.0, 3000.0)) / unit_s
        gpu = msgspec.structs.replace(hw.gpu, memory_bandwidth_bytes_per_s=figure(rate))
        cpu = msgspec.structs.replace(hw.cpu, memory_bandwidth_bytes_per_s=figure(rate / 3))
        link = msgspec.structs.replace(hw.h2d, latency_s=figure(rng.choice(TIMES_S) * unit_s))
        back = msgspec.structs.replace(hw.d2h, latency_s=figure(rng.choice(TIMES_S) * unit_s))
        hw = msgspec.structs.replace(hw, gpu=gpu, cpu=cpu, h2d=link, d2h=back)
    if rng.random() < 0.15:
        hw = msgspec.structs.replace(hw, curves=drawn_curves(rng, unit_s))
    return hw, unit_s


def drawn_curves(rng: Random, unit_s: float) -> Curves:
    """Some operations as measured, none of them known beyond two tokens."""

    def lasts_s() -> float:
        return rng.choice((0.5, 1.0, 2.0, 0.3)) * unit_s

    curves = {}
    for name in AGAINST:
        if rng.random() < 0.6:
            seconds = (lasts_s(), lasts_s())
            curves[name] = Curve(at=(1.0, 2.0), seconds=seconds, iqr_s=(0.0, 0.0), n=(3, 3))
    launched = rng.sample(("attention", "dense_layer", "gate", "shared_expert", "expert", "head", "begin"), 4)
    launches = {name: figure(lasts_s() / 8) for name in launched}
    return Curves(model="drawn", precision="bf16", operations=curves, launches=launches)


def drawn_model(rng: Random, n_layers: int, n_experts: int, top_k: int, dense: tuple[int, ...]) -> Model:
    shared = rng.choice((0, 0, 1, 2))
    apart = Random()
    apart.setstate(rng.getstate())  # so that what is drawn afterwards stays what it was
    behind = tuple(layer for layer in range(n_layers + len(dense)) if apart.random() < 0.5)
    window = Window(tokens=apart.randint(1, 6), layers=behind) if apart.random() < 0.3 else None
    return Model(
        schema=1,
        id="drawn",
        name="drawn",
        source="tests",
        gate=ModelGate(score="softmax", renormalised=True),
        hidden_size=WIDTH,
        n_layers=n_layers + len(dense),
        dense_layers=dense,
        dense_intermediate_size=5 if dense else 0,
        n_experts=n_experts,
        top_k=top_k,
        expert_intermediate_size=5,
        matrices_per_expert=rng.choice((2, 3)),
        n_shared_experts=shared,
        shared_intermediate_size=5 if shared else 0,
        n_heads=1,
        n_kv_heads=1,
        head_dim=1,
        vocab_size=16,
        window=window,
    )


def drawn_stack(rng: Random) -> Any:
    """Kernels one by one, grouped, or replayed as graphs, with or without what a framework adds; or a known one."""
    if rng.random() < 0.2:
        return load_stack(rng.choice(("bare", "separate", "hf")))
    drawn = stack(gate=rng.choice((0, 1)), expert=rng.choice((1, 2, 4)), attention=rng.choice((1, 3)))
    extra = {
        name: figure(rng.choice(TIMES_S) / 8)
        for name in ("per_layer_s", "per_expert_s", "per_copy_s", "per_iteration_s")
    }
    changes = {"grouped": rng.random() < 0.4, "graphs": rng.random() < 0.3, "pinned": rng.random() < 0.8}
    return msgspec.structs.replace(drawn, **changes, **(extra if rng.random() < 0.3 else {}))


def drawn_trace(
    rng: Random, path: Path, n_layers: int, n_experts: int, top_k: int, open_loop: bool, unit_s: float
) -> Path:
    """Every level of a trace, two to five requests of one to six tokens."""
    lengths = [(rng.randint(1, 4), rng.randint(1, 6)) for _ in range(rng.randint(2, 5))]
    requests = made_requests(lengths, True, False)
    if open_loop:
        at_s, arrivals = 0.0, []
        for request in requests:
            at_s += rng.choice((0.0, 1.0, 5.0, 50.0)) * unit_s
            arrivals.append(replace(request, arrival_s=at_s))
        requests = arrivals
    arrays = tiny_arrays(requests[-1].end_row, n_layers, n_experts, top_k, rng.randrange(1000))
    del arrays["iterations"]
    return write_trace(path, tiny_header(n_layers, n_experts, top_k, tasks=TASKS), requests, None, **arrays)


def drawn_settings(rng: Random, name: str) -> dict[str, Any]:
    """Some parameters with a choice moved off their defaults."""
    settings = dict(UNTAUGHT.get(name, {}))
    for param in policies()[name].params:
        if rng.random() < 0.3:
            if param.choices:
                settings[param.name] = rng.choice(param.choices)
            elif isinstance(param.default, bool):
                settings[param.name] = not param.default
    return settings


def is_bounded(of: World) -> bool:
    """Whether a world has a lower bound; it is to be one."""
    with Trace(of.trace) as trace:
        result = execute(setup_of(of, trace)).result
    if result.lower_bound is None or "lossy" in find(result.policy).traits:
        return False
    for least_s, found in ((result.lower_bound.ttft_s, result.ttft_s), (result.lower_bound.tpot_s, result.tpot_s)):
        if least_s is not None and found.mean is not None:
            assert least_s <= found.mean * (1 + 1e-9), f"{of}: bound {least_s} s, took {found.mean} s"
    return True


# -- running --------------------------------------------------------------------------------------------------------


def setup_of(of: World, trace: Trace) -> Setup:
    """A fresh setup: no run leaves anything behind in it."""
    policy, model, spec = of.make_policy(), of.facts["model"], of.facts["spec"]
    trace.require_all(policy.needs, policy.name)
    if getattr(policy, "options", {}).get("split"):
        spec = msgspec.structs.replace(spec, scheduler=str(IN_TURNS))
    several = spec.several
    homes = homes_by_layer(model, several.stages_of(model.n_layers)) if several.dense == LAYERS else None
    return Setup(
        **{**of.facts, "spec": spec},
        policy=policy,
        trace=trace,
        requests=requests_of(trace, "test"),
        store=requests_of(trace, "store"),
        host_bytes=of.host_bytes,
        pieces=Pieces(model.n_moe_layers, model.n_experts, spec.precision, spec.gpus, model.expert_bytes, homes),
        homes=homes,
    )


def run(of: World, loop: Callable[..., Any], watched: bool = True) -> Seen:
    """What a loop makes of a world; whatever it raises is part of it."""
    seen = Seen()
    log = (lambda *entry: seen.log.append(entry)) if watched else None
    spans = (lambda *span: seen.spans.append(span)) if watched else None
    with Trace(of.trace) as trace:
        try:
            setup = setup_of(of, trace)
        except MoesimError as error:
            seen.error = type(error).__name__
            return seen
        try:
            outcome = loop(setup, spans, log)
            result = plain(outcome.result)
            seen.result = {name: result[name] for name in sorted(result) if name not in NOT_COMPARED}
            seen.end = outcome.end_state()
        except Exception as error:
            seen.error = type(error).__name__
            seen.crash = "" if isinstance(error, MoesimError) else traceback.format_exc()
        seen.calls = getattr(setup.policy, "calls", [])
    return seen


def by_engine(setup: Setup, spans: Any, log: Any) -> Run:
    return Today(setup).run(spans, log)


def by_simpy(setup: Setup, spans: Any, log: Any) -> Run:
    return by_engine(replace(setup, spec=msgspec.structs.replace(setup.spec, sim_simulator="simpy")), spans, log)


# -- comparing ------------------------------------------------------------------------------------------------------


def difference(want: Any, got: Any, where: str) -> str | None:
    """The first place where two values differ, to the bit, or None."""
    if isinstance(want, dict) and isinstance(got, dict):
        for name in sorted(want.keys() | got.keys(), key=str):
            if name not in want or name not in got:
                return f"{where}.{name}: only in {'the reference' if name in want else 'the engine'}"
            found = difference(want[name], got[name], f"{where}.{name}")
            if found:
                return found
        return None
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        for index, (one, other) in enumerate(zip_longest(want, got, fillvalue="nothing more")):
            found = difference(one, other, f"{where}[{index}]")
            if found:
                before = "".join(f"\n    same before: {want[i]!r}" for i in range(max(0, index - 3), index))
                whole = f"\n    reference {one!r}\n    engine {other!r}" if isinstance(one, tuple) else ""
                return f"{found}{whole if '[' not in where else ''}{before if '[' not in where else ''}"
        return None
    return None if repr(want) == repr(got) else f"{where}: expected {want!r}, got {got!r}"


def told_apart(of: World, kind: Callable[[Setup], Any] = Today, time: bool = True) -> tuple[str | None, Seen]:
    """Where an engine first differs from a reference, or from itself when nobody looks; and what it showed.

    Args:
        time: hold it to the reference of time, too, to the bit: SimPy's machine.
    """

    def engine(setup: Setup, spans: Any, log: Any) -> Run:
        return kind(setup).run(spans, log)

    def follow(setup: Setup, spans: Any, log: Any) -> Run:
        followed.append(Followed(setup))
        runs.append(followed[0].follow(kind, spans, log))
        return runs[0]

    followed: list[Followed] = []
    runs: list[Run] = []
    seen, watched, alone = run(of, engine), run(of, follow), run(of, engine, watched=False)
    if time:
        found = times_disagree(seen, run(of, by_simpy), of)
        if found:
            return f"time: {found}", seen
    found = disagreement(seen, watched)
    if found:
        return f"when its policy is watched: {found}", seen
    found = disagreement(replace(seen, log=[], spans=[]), alone)
    if found:
        return f"when nobody looks: {found}", seen
    for one in followed:
        found = difference_from_reference(one, runs[0] if runs else None, watched.spans)
    return found and f"residency: {found}", seen


def disagreement(want: Seen, got: Seen) -> str | None:
    """The earliest kind of difference first: what was called and decided, then when, then what it came to."""
    for part in ("log", "calls", "spans", "error", "result", "end"):
        one, other = getattr(want, part), getattr(got, part)
        found = None if repr(one) == repr(other) else difference(one, other, part)  # all at once first: it is quick
        if found:
            return found
    return None


def engines_disagree(of: World) -> tuple[str | None, Seen]:
    """The first difference between arithmetic and SimPy in a world, and what the arithmetic showed."""
    seen = run(of, by_engine)
    return times_disagree(seen, run(of, by_simpy), of), seen


def times_disagree(seen: Seen, other: Seen, of: World) -> str | None:
    """The first difference between arithmetic and SimPy."""
    pair = []
    for one in (other, seen):
        spans = [] if seen.error else sorted(one.spans)  # told when work ends there, when its end is known here
        end = dict(one.end)
        if of.host_bytes:  # above a drive each machine charges a gap of GPU 0 by what is settled when it places what
            end.pop("parts_s", None)  # follows; the critical path, which results rest on, is compared
        pair.append(replace(one, spans=spans, end=end))
    return disagreement(*pair)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def hunt(n: int, seed: int) -> int:
    """Hold worlds to the references until one differs; the exit code."""
    began_s, refused, drawn = time.perf_counter(), 0, 0
    with tempfile.TemporaryDirectory() as name:
        for at in range(seed, seed + n):
            of = world(at, Path(name))
            found, seen = told_apart(of)
            of.trace.unlink()
            refused += bool(seen.error)
            drawn += of.facts["spec"].policy == "drawn"
            if found or seen.crash:
                say(f"{of}\n  {found or seen.crash}")
                return 1
    took_s = time.perf_counter() - began_s
    say(f"{n} worlds equal, {drawn} with drawn policies, {refused} refused; {took_s:.1f} s")
    return 0


def hunt_engines(make: Callable[[int, Path], World]) -> int:
    """Compare the engines in worlds that a script's arguments number, N [SEED], and tell differences; the exit code."""
    n, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    n_ran = n_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + n):
            of = make(seed, Path(folder))
            told, seen = engines_disagree(of)
            of.trace.unlink()
            n_ran += not seen.error
            if told or seen.crash:
                n_failed += 1
                say(f"{of}\n  {of.facts.get('tier', '')} {of.host_bytes}\n  {told}\n{seen.crash}")
                if n_failed == 3:
                    break
    say(f"{n} worlds, {n_ran} ran, {n_failed} failed")
    return int(n_failed > 0)


def digests(n: int, seed: int) -> list[str]:
    """One digest per world of what the engine makes of it."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for at in range(seed, seed + n):
            of = world(at, Path(name))
            found.append(run(of, by_engine).digest())
            of.trace.unlink()
    return found


def n_compiled() -> int:
    """Modules of `sim` and `policies` that are in use as machine code."""
    return sum(
        name.startswith(("sim.", "policies.")) and isinstance(getattr(module, "__loader__", None), ExtensionFileLoader)
        for name, module in sys.modules.items()
    )


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--digests"]
    n_worlds, first = int(words[0]), int(words[1]) if len(words) > 1 else 0
    if "--digests" in sys.argv:
        found = digests(n_worlds, first)
        say("\n".join([str(n_compiled()), *found]))
        sys.exit(0)
    sys.exit(hunt(n_worlds, first))
