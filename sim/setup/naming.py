"""What a run is called: policy, machine and model with everything that was set on top of their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.own_file import read_from
from sim.base.units import GIB, RAM, show_count
from sim.policy.policy_file import file_of
from sim.profiles.power import GPU

if TYPE_CHECKING:
    from sim.setup.setup import Setup
    from sim.setup.spec import RunSpec

Value = bool | int | float | str | None
Overrides = Mapping[str, Value]
"""What was set -> to what."""

GROUPS = ("hw", "model", "stack")
USUAL = {"peer": "per-expert", "dense": "gpu0", "host_links": "apart", "contention": "on"}
OPTIONS = ("link", "vram_bytes", "expert_cache_bytes", "experts", "cache_frac")  # of the machine and its expert part


def overrides_of(spec: RunSpec) -> dict[str, Value]:
    """All that was set on top of what the names stand for: options that replace figures, then `--set` as given."""
    options = {name: getattr(spec, name) for name in (*OPTIONS, "predictor") if getattr(spec, name) is not None}
    return {**options, **spec.set}


def title_of(setup: Setup) -> str:
    """One line that tells this run from others: `lfu scope=layer on rtx3090 with experts=40 (mixtral-8x7b bf16, T)`."""
    spec, own, file = setup.spec, overrides_of(setup.spec), file_of(type(setup.policy))
    who = policy_of(setup.policy.name, None if file is None else file.path.name, own)
    model = f"{setup.model.id} {spec.precision}"
    if changed := words(own, "model"):
        model += f" with {changed}"
    rest = [model, setup.trace.name]
    rest += [f"split {spec.split}"] * (spec.split != "test")
    which = "first " if spec.arrivals is None else ""
    rest += [f"{which}{show_count(spec.requests or 0, 'request')}"] * (spec.requests is not None)
    rest += [f"arrivals {spec.arrivals}"] * (spec.arrivals is not None)
    rest += [f"at {spec.rate_scale:g} times the rate"] * (spec.rate_scale != 1.0)
    rest += [f"{spec.gpus} GPUs"] * (spec.gpus > 1) + [f"batch {spec.batch}"] * (spec.batch > 1)
    if spec.replicas > 1:
        own_file = read_from(setup.router)
        by = setup.router.name + (f" of {own_file.path.name}" if own_file else "")
        rest.append(f"{spec.replicas} replicas by {by}")
    if spec.scheduler is not None:
        own_file = read_from(setup.scheduler)
        rest.append(f"scheduler {setup.scheduler.name}" + (f" of {own_file.path.name}" if own_file else ""))
    if spec.kv_memory_bytes is not None:
        rest += [f"KV memory {show('vram_bytes', spec.kv_memory_bytes)} in pages of {spec.kv_page}, {spec.preempt}"]
    if spec.host_memory_bytes is not None:
        rest.append(f"host memory {show('host_memory_bytes', spec.host_memory_bytes)}")
    rest += [f"drive {spec.nvme}"] * (spec.nvme is not None)
    rest += [f"host memory by {spec.ram_policy}"] * (spec.ram_policy is not None)
    rest += [f"batching {spec.batching}"] * (spec.batching is not None)
    rest += [f"at most {show_count(spec.prefill_chunk or 0, 'token')} an iteration"] * (spec.prefill_chunk is not None)
    if setup.drafter is not None:
        rest.append(f"drafts {setup.drafter.draft.title}")
    rest += [f"SLO {said}" for said in sorted(_slos(spec))]
    rest += [f"stack {setup.stack.id}"] * (setup.stack.id != "bare") + [f"seed {spec.seed}"] * (spec.seed != 0)
    rest += [
        f"{key.replace('_', ' ')} {said}"
        for key, usual in USUAL.items()
        if (said := getattr(spec, key)) not in (usual, None)
    ]
    if spec.placement is not None:
        rest.append(f"placement {Path(spec.placement).name}")
    rest += [f"energy of the {'GPU' if spec.energy == GPU else spec.energy}"] * (spec.energy is not None)
    rest += [f"hits by {spec.hit_definition}"] * (spec.hit_definition != "gate")
    return f"{who} on {machine_of(setup.hw.id, own)} ({', '.join(rest)})"


def _slos(spec: RunSpec) -> list[str]:
    """`code ttft_s <= 2` for every limit, without the task where it is for all."""
    return [
        f"{'' if task == '*' else f'{task} '}{name} <= {limit_s:g}"
        for task, limits in spec.slo.items()
        for name, limit_s in limits.items()
    ]


def policy_of(policy: str, file: str | None, overrides: Overrides) -> str:
    """The policy, the file it is in where that was named, and what was set of its parameters."""
    of = [] if file is None else [f"of {file}"]
    return " ".join([policy, *of, *filter(None, [words(overrides, "", " ")])])


def machine_of(hw: str, own: Overrides) -> str:
    """`rtx3090 with h2d.bandwidth_bytes_per_s=5e10, experts=40`: the profile, and what was set of it and around it."""
    stack = {key: value for key, value in own.items() if key.startswith("stack.")}
    said = [words(own, "options"), words(own, "hw"), ", ".join(f"{k}={show(k, v)}" for k, v in stack.items())]
    return " with ".join([hw, *filter(None, [", ".join(filter(None, said))])])


def words(overrides: Overrides, group: str, between: str = ", ") -> str:
    """`key=value, ...` of one group, without its prefix. "options": what options replaced; "": the policy's own."""
    chosen = {key.removeprefix(f"{group}."): value for key, value in overrides.items() if _group(key) == group}
    return between.join(
        f"{key.removesuffix('_bytes') if group == 'options' else key}={show(key, value)}"
        for key, value in chosen.items()
    )


def _group(key: str) -> str:
    prefix, dot, _ = key.partition(".")
    return prefix if dot and prefix in GROUPS else "options" if key in OPTIONS else ""


def show(key: str, value: Any) -> str:
    """A value as it can be typed again; never rounded, so that names of different runs differ."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float) and key in RAM:
        return f"{value / GIB:g}GiB" if float(f"{value / GIB:g}") * GIB == value else str(value)
    if isinstance(value, int | float) and key in OPTIONS and key.endswith("_bytes"):
        return f"{value / 1e9:g}GB" if float(f"{value / 1e9:g}") * 1e9 == value else str(value)
    if isinstance(value, float):
        short = f"{value:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        return short if float(short) == value else repr(value)
    return str(value)
