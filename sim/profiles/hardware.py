"""Hardware profiles as data: one YAML file per GPU and per CPU, every figure with its origin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from sim.base.errors import BadInput
from sim.base.quantities import USER_REF as USER_REF
from sim.base.quantities import Quantity as Quantity
from sim.base.quantities import check_quantities, quantities
from sim.profiles import find as profiles
from sim.profiles import overrides as sets
from sim.profiles.curves import Curves
from sim.profiles.drives import OWN, SOURCES, Drive, DrivePower, drive_of

GPUS, CPUS = "hwprofiles.gpus", "hwprofiles.cpus"
READ, TOTAL = "cpu.memory_bandwidth_bytes_per_s", "cpu.total_bandwidth_bytes_per_s"

SHARED = ("cpu.copies_bandwidth_bytes_per_s",)
"""What copies to several GPUs share of host memory."""
ASKED_FOR = ("gpu.quantised_flops_per_s", "gpu.quantised_bytes_per_s", "gpu.compute_capability")
"""What only stacks of engines ask for."""
WATTS = ("gpu.power", "cpu.power", "drive.power")
Dtype = Literal["fp32", "fp16", "bf16", "fp8"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
COUNTED = GPU, MACHINE = "gpu", "machine"
"""What `--set sim.energy` counts: the boards alone, as their own counters do, or also CPU, host memory and drive."""


class GpuPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One board.

    waiting_w: the program's context is alive and clocks are up, and no kernel runs; copies may. memory_bound_w,
    compute_bound_w: kernels run, and their bytes or their arithmetic take longest.
    """

    waiting_w: Quantity
    memory_bound_w: Quantity
    compute_bound_w: Quantity


class CpuPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processor's package and the modules of host memory.

    waiting_w: one thread drives the GPU. busy_w: all cores compute experts. memory_waiting_w, memory_busy_w: nothing is
    read; read at all that memory gives. rest_w: what else a meter at the wall would see (board, fans, losses).
    """

    waiting_w: Quantity
    busy_w: Quantity
    memory_waiting_w: Quantity
    memory_busy_w: Quantity
    rest_w: Quantity | msgspec.UnsetType = msgspec.UNSET


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a copy path: a copy takes latency + bytes / bandwidth."""

    latency_s: Quantity
    bandwidth_bytes_per_s: Quantity


class Bus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The PCIe slot the GPU sits in."""

    generation: Positive
    lanes: Positive
    theoretical_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]  # each way, after 128b/130b encoding


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the device computes with."""

    memory_bandwidth_bytes_per_s: Quantity  # effective, streaming weights once
    flops_per_s: dict[Dtype, Quantity]  # effective, large matrix products with fp32 accumulation
    kernel_floor_s: Quantity  # device time of the smallest kernel
    n_sms: Positive
    l2_bytes: Positive
    link: Bus | None = None  # shown, never computed with; None where there is no bus, or none was read
    quantised_flops_per_s: Quantity | msgspec.UnsetType = msgspec.UNSET  # products over blocks of quantised weights
    quantised_bytes_per_s: Quantity | msgspec.UnsetType = msgspec.UNSET  # what these products read the blocks at
    compute_capability: float | msgspec.UnsetType = msgspec.UNSET  # where a stack asks for one
    power: GpuPower | msgspec.UnsetType = msgspec.UNSET


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the launching thread pays."""

    launch_s: Quantity  # to launch one kernel
    sync_s: Quantity  # to read a GPU result back: wait for the event, and a small copy
    copy_launch_s: Quantity  # to enqueue one asynchronous copy


class Cpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processor and memory beside the GPU."""

    id: str
    name: str
    n_cores: Positive  # physical
    memory_bandwidth_bytes_per_s: Quantity  # effective, all cores reading
    flops_per_s: Quantity  # effective matrix product of a few tokens
    expert_overhead_s: Quantity  # fixed cost of running one expert on the CPU
    memory_bytes: Quantity
    copies_bandwidth_bytes_per_s: Quantity | msgspec.UnsetType = msgspec.UNSET  # of copies to all devices together
    total_bandwidth_bytes_per_s: Quantity | msgspec.UnsetType = msgspec.UNSET  # of all that reads it at once (STREAM)
    power: CpuPower | msgspec.UnsetType = msgspec.UNSET
    note: str = ""

    @property
    def shared_by_copies(self) -> Quantity:
        """What copies to all devices together draw from its memory at most; as the cores read where nobody said."""
        figure = self.copies_bandwidth_bytes_per_s
        return figure if isinstance(figure, Quantity) else self.memory_bandwidth_bytes_per_s

    @property
    def shared_by_all(self) -> Quantity:
        """What all that runs at once draws from its memory at most; as the cores read where nobody said."""
        figure = self.total_bandwidth_bytes_per_s
        return figure if isinstance(figure, Quantity) else self.memory_bandwidth_bytes_per_s


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Extra time of an activity while another runs, as a share of its own (0.05: 5 % slower); 0 is off.

    What is left out follows from the bandwidth of the memory that both share (`sim.machine.memory_law`).
    """

    gpu_slowdown_by_h2d: Quantity | None = None
    h2d_slowdown_by_gpu: Quantity | None = None
    cpu_slowdown_by_h2d: Quantity | None = None
    h2d_slowdown_by_cpu: Quantity | None = None
    h2d_slowdown_by_d2h: Quantity | None = None  # of pieces written back; activations are too small to matter
    d2h_slowdown_by_h2d: Quantity | None = None
    gpu_slowdown_by_d2h: Quantity | None = None

    @property
    def stated(self) -> dict[str, Quantity]:
        """The terms that were measured or set, by name."""
        terms = {term: getattr(self, term) for term in self.__struct_fields__}
        return {term: figure for term, figure in terms.items() if figure is not None}


Power = GpuPower | CpuPower | DrivePower
AT_LEAST: dict[type[Power], tuple[tuple[str, str], ...]] = {
    GpuPower: (("waiting_w", "memory_bound_w"), ("waiting_w", "compute_bound_w")),
    CpuPower: (("waiting_w", "busy_w"), ("memory_waiting_w", "memory_busy_w")),
    DrivePower: (("waiting_w", "busy_w"),),
}
"""Watts while a part waits, and those while it works."""
Range = tuple[float, float]


class Ranges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Least and largest of what a calibration's fits rest on; what is priced above is extrapolated, and labelled so."""

    copy_bytes: Range | None = None
    expert_tokens: Range | None = None
    cpu_expert_tokens: Range | None = None
    context_tokens: Range | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU in its machine."""

    schema: Literal[1]
    id: str
    name: str
    aliases: tuple[str, ...] = ()
    note: str = ""
    vram_bytes: Quantity
    h2d: Link  # page-locked host memory
    d2h: Link
    h2d_pageable: Link
    d2h_pageable: Link
    p2p: Link  # GPU to GPU
    gpu: Gpu
    host: Host
    cpu: Cpu
    contention: Contention = Contention()
    curves: Curves | None = None  # measured on the real machine for one model
    more_curves: tuple[Curves, ...] = ()  # and for others
    ranges: Ranges = Ranges()  # of fits; curves have their own
    drive: Drive | msgspec.UnsetType = msgspec.UNSET  # for experts that host memory does not hold
    one_memory: bool | msgspec.UnsetType = msgspec.UNSET  # of CPU and GPU: no expert is copied
    sources: dict[str, str] = {}

    def curves_of(self, model: str, precision: str) -> Curves | None:
        """What was measured for a model on the real machine; None where it was not."""
        every = (*(() if self.curves is None else (self.curves,)), *self.more_curves)
        return next((c for c in every if (c.model, c.precision) == (model, precision)), None)

    def without(self, paths: Iterable[str]) -> Hardware:
        """The same without these figures of its parts, `gpu.power`, and without what only they cite."""
        parts: dict[str, Any] = {}
        gone: list[Quantity] = []
        for part, _, name in (path.partition(".") for path in paths):
            before = parts.get(part, getattr(self, part))
            figure = msgspec.UNSET if before is msgspec.UNSET else getattr(before, name)
            if figure is not msgspec.UNSET:
                gone += [each for _, each in quantities(figure)]
                parts[part] = msgspec.structs.replace(before, **{name: msgspec.UNSET})
        left = msgspec.structs.replace(self, **parts)
        cited, before_keys = (
            {key for one in of for key in one.refs} for of in ((q for _, q in quantities(left)), gone)
        )
        sources = {key: text for key, text in self.sources.items() if key in cited or key not in before_keys}
        return msgspec.structs.replace(left, sources=sources)

    @property
    def power(self) -> dict[str, Power | msgspec.UnsetType]:
        """The watts of each of its parts."""
        parts: dict[str, Power | msgspec.UnsetType] = {"gpu": self.gpu.power, "cpu": self.cpu.power}
        return parts if self.drive is msgspec.UNSET else {**parts, "drive": self.drive.power}

    def lacking(self, counted: str) -> list[str]:
        """The blocks without which the joules of what `--set sim.energy` counts are not known."""
        wanted = {"gpu"} if counted == GPU else self.power.keys()
        return [f"{name}.power" for name, block in self.power.items() if name in wanted and block is msgspec.UNSET]

    def citation(self, figure: Quantity) -> str:
        """The full text behind a figure's `ref`."""
        return "; ".join(self.sources[key] for key in figure.refs) or figure.ref


def load_hardware(
    name_or_path: str | os.PathLike[str],
    overrides: Mapping[str, object] | None = None,
    link: str | None = None,
    drive: str | None = None,
) -> Hardware:
    """Load a bundled profile by id or alias, or an own YAML file.

    `cpu` is a block, the id of a bundled CPU, or `{from: ID, ...}` with some of its fields replaced.

    Args:
        overrides: dotted field -> value, as `--set hw.h2d.bandwidth_bytes_per_s=5e10` gives them.
        link: a word of `--pcie` (`sim.profiles.pcie`); `overrides` win.
        drive: of `--drive`, a word or `own`; the same. None: without one, whatever the profile has.

    Raises:
        BadInput: unknown name, unreadable or malformed file, an implausible figure.
    """
    path = profiles.find(GPUS, "hardware profile", str(name_or_path))
    where, overrides = profiles.where(path, overrides), dict(overrides or {})
    data = profiles.read(path, "hardware profile")
    cpu = overrides.pop("cpu", data.get("cpu"))
    if isinstance(cpu, str) or (isinstance(cpu, dict) and "from" in cpu):
        data = _with_cpu(data, cpu, where)
    elif cpu is not None:
        data = {**data, "cpu": cpu}
    data = _with_drive(data, drive, overrides, where)
    before = data.get("cpu")
    data = sets.apply(data, overrides, Hardware, "hw")
    hardware = profiles.convert(data, Hardware, where)
    if link is not None:
        from sim.profiles.pcie import relinked

        hardware = relinked(hardware, link, set(overrides))
    hardware = _with_more_channels(hardware, before, overrides, where)
    check_quantities(hardware, hardware.sources, where)
    _check_power(hardware, where)
    if hardware.one_memory and hardware.gpu.link is not None:
        raise BadInput(
            f"{where}: gpu.link, got one: CPU and GPU have one memory (one_memory), and no link; leave one out"
        )
    for curves in (hardware.curves, *hardware.more_curves):
        if curves is not None:
            curves.check(where)
    return hardware


def load_cpu(name: str) -> Cpu:
    """A bundled CPU by its id, or an own file. Raises BadInput: unknown, or malformed."""
    where = f"CPU {name}"
    return profiles.convert(_with_cpu({}, name, where)["cpu"], Cpu, where)


def _check_power(hw: Hardware, where: str) -> None:
    """Raises BadInput for a part that draws less while it works than while it waits."""
    for name, block in hw.power.items():
        for waiting, working in () if block is msgspec.UNSET else AT_LEAST[type(block)]:
            least, most = getattr(block, waiting).value, getattr(block, working).value
            if most < least:
                raise BadInput(
                    f"{where}: {name}.power.{working}, got {most:g}: less than {waiting}, {least:g}; a part draws no "
                    "less while it works, so correct one of them"
                )


def _with_drive(data: dict[str, Any], drive: str | None, overrides: Mapping[str, object], where: str) -> dict[str, Any]:
    """The drive that a run asks for, in place of the profile's own. Raises BadInput where there is none to take."""
    if drive == OWN:
        if "drive" not in data:
            raise BadInput(f"--drive, got {OWN!r}: {where} has no block `drive`; name one, e.g. gen4x4")
        return data
    if drive is None:
        if any(key.partition(".")[0] == "drive" for key in overrides):
            raise BadInput("--set hw.drive, without a drive that a run reads from; add --drive gen4x4")
        return {key: value for key, value in data.items() if key != "drive"}
    chosen = drive_of(drive)
    sources = {key: SOURCES[key] for _, figure in quantities(chosen) for key in figure.refs}
    return {**data, "drive": msgspec.to_builtins(chosen), "sources": {**sources, **data.get("sources", {})}}


def _with_more_channels(hardware: Hardware, before: object, overrides: Mapping[str, object], where: str) -> Hardware:
    """Where another rate of reading experts was set, what memory gives in all is another in proportion: a word for more
    channels. A total that was set itself, or is not there, stays as it is.

    Args:
        before: the block `cpu` without what was set.
    """
    given = {key.removesuffix(".value") for key in overrides}
    total = hardware.cpu.total_bandwidth_bytes_per_s
    if READ not in given or TOTAL in given or not isinstance(total, Quantity):
        return hardware
    read = profiles.convert(before, Cpu, where).memory_bandwidth_bytes_per_s
    ratio = hardware.cpu.memory_bandwidth_bytes_per_s.value / read.value
    note = f"in proportion to {READ}, which was set"
    scaled = Quantity(value=total.value * ratio, source="assumed", ref=USER_REF, note=note)
    cpu = msgspec.structs.replace(hardware.cpu, total_bandwidth_bytes_per_s=scaled)
    return msgspec.structs.replace(hardware, cpu=cpu)


def _with_cpu(data: dict[str, Any], cpu: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Inline a bundled (or own) CPU file and add its citations to the profile's."""
    changes = {} if isinstance(cpu, str) else {key: value for key, value in cpu.items() if key != "from"}
    name = cpu if isinstance(cpu, str) else cpu["from"]
    if not isinstance(name, str):
        raise BadInput(f"{where}: cpu.from, got {name!r}: the id of a CPU, e.g. tr-pro-3955wx")
    own = profiles.read(profiles.find(CPUS, f"{where}: cpu", name), "CPU")
    sources, own_sources = data.get("sources", {}), own.pop("sources", {})
    if not isinstance(sources, dict) or not isinstance(own_sources, dict):
        raise BadInput(f"{where}: sources, got {type(sources).__name__}: a mapping of key to citation")
    own.pop("schema", None)
    own.pop("aliases", None)
    return {**data, "cpu": {**own, **changes}, "sources": {**own_sources, **sources}}
