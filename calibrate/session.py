"""One calibration from open device to written profile: what `calibrate` does between its options and its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from calibrate import in_situ, in_situ_file, in_situ_fit, profile
from calibrate.bench import Bench
from calibrate.derive import Table
from calibrate.ops import AttentionShape, ExpertShape, MeasuredGeometry
from calibrate.runner import PROBES, Health, Progress, run
from calibrate.store import Count, MachineFacts, Store
from sim.base.errors import BadInput
from sim.base.files import must_be_writable, read_object, to_struct, write_json
from sim.profiles.models import Model, load_model
from sim.real.devices import environment
from sim.real.devices.open import open_device, usable_device
from sim.real.devices.protocol import Device

MAX_ENVIRONMENT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class CalibrationRequest:
    """What the user asked for."""

    device: str
    models: Sequence[str]
    name: str
    folder: Path
    budget_s: float
    resume: bool = False
    max_rounds: int = 3
    probes: Sequence[str] = ()

    @property
    def samples_path(self) -> Path:
        return self.folder / f"{self.name}.samples.jsonl.gz"

    @property
    def environment_path(self) -> Path:
        return self.folder / f"{self.name}.environment.json"

    def lanes_path(self, model: str) -> Path:
        """Where a model's samples from the real machine's lanes lie: the first one measured has no name in it."""
        first = self.folder / f"{self.name}.lanes.json.gz"
        if not first.is_file() or in_situ_file.load(first).environment.get("model") == model:
            return first
        return self.folder / f"{self.name}@{model}.lanes.json.gz"

    @property
    def profile_path(self) -> Path:
        return self.folder / f"{self.name}.yaml"


@dataclass(frozen=True)
class Calibration:
    """What was written, and what to tell the user."""

    data: dict[str, Any]
    table: Table
    files: tuple[Path, ...]
    warnings: list[str] = field(default_factory=list)


def geometry_of(model: Model) -> MeasuredGeometry:
    """The shapes of one model's layers."""
    shared = model.shared_intermediate_size
    return MeasuredGeometry(
        model=model.id,
        expert=ExpertShape(model.hidden_size, model.expert_intermediate_size),
        shared=ExpertShape(model.hidden_size, shared) if shared else None,
        attention=AttentionShape(model.hidden_size, model.n_heads, model.n_kv_heads, model.head_dim),
        n_experts=model.n_experts,
        top_k=model.top_k,
        vocab=model.vocab_size,
    )


def make_bench(device: Device, geometries: Sequence[MeasuredGeometry], now: Callable[[], float], bf16: str) -> Bench:
    """Limits that suit the device: the CPU stand-in computes in fp32 and is spared long contexts."""
    cuda = device.facts.kind == "cuda"
    cores = environment.physical_cores()
    threads = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores} | {cores})
    return Bench(
        device=device,
        geometries=geometries,
        dtype=device.facts.dtype,
        cpu_dtypes=("bfloat16", "float32") if cuda and bf16 != "none" else ("float32",),
        threads=threads,
        llc_bytes=environment.llc_bytes(),
        host_bytes=environment.host_memory_bytes(),
        matmul_sizes=(8192, 4096) if cuda else (512,),
        max_copy_bytes=1 << (30 if cuda else 26),
        device_bytes=int(0.9 * device.free_bytes()) if cuda else 1 << 30,
        max_tokens=4096 if cuda else 256,
        max_context=32768 if cuda else 2048,
        now=now,
    )


def calibrate(
    request: CalibrationRequest,
    *,
    device: Device | None = None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure, save after every probe, fit and write the profile. Ctrl-C keeps what was saved.

    Raises:
        BadInput: unknown device, model or probe; samples of another device under --resume.
    """
    check_place(request)
    geometries = [geometry_of(load_model(name)) for name in request.models]
    probes = [p for p in PROBES if not request.probes or p.name in request.probes]
    own = device is None
    device = device or open_device(usable_device(request.device, "calibrate"))
    facts = device.facts
    try:
        index = int(request.device.partition(":")[2] or 0)
        nvml = environment.Nvml.open(index, facts.uuid or None) if facts.kind == "cuda" else None
        card = nvml.card() if nvml else {}
        old = _earlier(request, facts.title)
        store = Store.load(request.samples_path) if old else Store(request.samples_path)
        health = Health(nvml.now if nvml else dict, list(old.get("readings", [])))
        models = list(dict.fromkeys((*old.get("models", []), *request.models)))  # a model may be added to a profile
        bf16 = environment.bf16_on_cpu() if facts.kind == "cuda" else "not tried"
        bench = make_bench(device, geometries, now, bf16)
        state = {
            **{name: getattr(facts, name) for name in ("title", "kind", "total_bytes", "n_sms", "l2_bytes")},
            "device": request.device,
            "models": models,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": environment.machine(),
            "card": card,
            "cuda": getattr(device.torch.version, "cuda", None),
            "earlier": old.get("started", ""),
            "dtype": bench.dtype,
            "cpu_dtype": bench.cpu_dtypes[0],
            "threads": list(bench.threads),
            "bf16_on_cpu": bf16,
        }

        def saved() -> None:
            state["warnings"] = environment.warnings(card, health.readings)
            write_json(request.environment_path, {**state, "readings": health.readings})

        saved()
        run(
            bench,
            store,
            request.budget_s,
            health,
            probes=probes,
            max_rounds=request.max_rounds,
            progress=progress,
            saved=saved,
        )
        if not request.samples_path.exists():
            store.save()
        if _wants_lanes(request) and (facts.kind == "cpu" or device.torch.cuda.is_available()):
            for kind in ("pinned", "pageable", "device"):
                bench.drop(kind)  # the lanes need the memory for experts
            _measure_lanes(request, bench.dtype, progress)
        return finish(request)
    finally:
        if own:
            device.close()


def check_place(request: CalibrationRequest) -> None:
    """Find out before anything is measured whether its files can be written. Raises BadInput; changes nothing."""
    for path in (request.profile_path, request.samples_path, request.environment_path):
        must_be_writable(path)
    if request.profile_path.exists() and not request.samples_path.exists():
        raise BadInput(
            f"{request.profile_path}: it is there, and no samples of a calibration beside it: somebody wrote it; give "
            "another --name"
        )


LANES = "lanes"
LANES_FROM_S = 150.0
"""Budget from which operations are timed on the real machine's lanes too."""
LANES_AT_LEAST_S = 60.0


def _wants_lanes(request: CalibrationRequest) -> bool:
    return LANES in request.probes or (not request.probes and request.budget_s >= LANES_FROM_S)


def _measure_lanes(request: CalibrationRequest, dtype: str, progress: Progress | None) -> None:
    """Operations of each model on the lanes of the real machine, saved model by model.

    It takes half as long as the probes, but a minute at least; asked for by name, it has all the time.
    """
    said = progress.probe if progress is not None else Progress().probe
    precision = profile.DTYPES[dtype]
    rounds = 1 if request.budget_s < 2 * LANES_FROM_S else 2
    each_s = request.budget_s / len(request.models)
    budget_s = each_s if LANES in request.probes else max(LANES_AT_LEAST_S, 0.5 * each_s)
    if not request.resume:
        for path in in_situ_file.beside(request.folder / request.name):
            path.unlink()
    for model in request.models:
        path = request.lanes_path(load_model(model).id)
        if path.is_file():
            continue
        samples = in_situ.run(
            request.device,
            model,
            precision,
            request.folder,
            rounds=rounds,
            budget_s=budget_s,
            tell=lambda what, model=model: said(f"lanes, {model}: {what}", 0),  # type: ignore[misc]
        )
        in_situ_file.save(samples, path)


def finish(request: CalibrationRequest) -> Calibration:
    """Fit saved samples and write the profile; needs no device. Raises BadInput when there are no usable samples."""
    must_be_writable(request.profile_path)
    store = Store.load(request.samples_path)
    state = _read_environment(request.environment_path)
    table = Table(store)
    copying: dict[str, Any] = next((r for r in state.get("readings", []) if r.get("when") == "copying"), {})
    card = state["card"]
    generation, lanes = (copying.get(f"pcie_{part}") or card.get(f"pcie_{part}_max") for part in ("gen", "width"))
    models = " ".join(f"--model {name}" for name in state["models"])
    facts = {
        **{key: state[key] for key in ("kind", "dtype", "cpu_dtype", "threads", "n_sms", "l2_bytes", "machine")},
        "id": request.name,
        "name": state["title"],
        "vram_bytes": state["total_bytes"],
        "command": f"calibrate --device {state['device']} {models} --name {request.name}",
        "bus": (generation, lanes) if generation and lanes else None,
    }
    data = profile.build(table, facts)
    paths = in_situ_file.beside(request.folder / request.name)
    if paths:
        first, *others = (in_situ_file.load(path) for path in paths)
        data = in_situ_fit.apply(data, first, request.name, others)
    profile.write(request.profile_path, data)
    files = (request.profile_path, request.samples_path, request.environment_path, *paths)
    doubts = profile.doubts(data, facts["command"])
    return Calibration(data, table, files, [*doubts, *state.get("warnings", []), *table.noise()])


def _earlier(request: CalibrationRequest, title: str) -> dict[str, Any]:
    """The environment of the run to resume; empty when there is none to resume."""
    if not request.resume or not request.samples_path.is_file() or not request.environment_path.is_file():
        return {}
    old = _read_environment(request.environment_path)
    if old["title"] != title:
        raise BadInput(f"--resume, got samples of {old['title']!r}: this device is {title!r}; choose another --name")
    return old


class _Link(msgspec.Struct):
    """Of the card, or of a reading of it."""

    when: str = ""
    pcie_gen: Count | None = None
    pcie_width: Count | None = None
    pcie_gen_max: Count | None = None
    pcie_width_max: Count | None = None


class _Environment(msgspec.Struct):
    """What is read of an environment file; the rest is for people."""

    title: str
    kind: Literal["cuda", "cpu"]
    device: str
    models: list[str]
    machine: MachineFacts
    card: _Link
    threads: Annotated[list[Count], msgspec.Meta(min_length=1)]
    dtype: Literal["bfloat16", "float16", "float32"]
    cpu_dtype: Literal["bfloat16", "float16", "float32"]
    n_sms: Count
    l2_bytes: Count
    total_bytes: Annotated[float, msgspec.Meta(ge=1)]
    readings: list[_Link] = []
    warnings: list[str] = []


def _read_environment(path: Path) -> dict[str, Any]:
    old = read_object(path, MAX_ENVIRONMENT_BYTES, "it is no environment file of calibrate: run without --resume")
    to_struct(old, _Environment, str(path))
    return old
