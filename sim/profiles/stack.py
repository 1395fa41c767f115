"""Serving stacks as data: what the software around the kernels costs, one YAML file per framework."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from sim.base.quantities import Quantity, check_quantities
from sim.profiles import find as profiles
from sim.profiles import overrides as sets

if TYPE_CHECKING:
    from sim.profiles.hardware import Hardware

PACKAGE = "hwprofiles.stacks"

Count = Annotated[int, msgspec.Meta(ge=0)]
Calls = Annotated[int, msgspec.Meta(ge=0, le=1024)]
CpuRegion = Literal["expert", "layer"]
ROUNDED = 1e-9  # a third of three calls is one


class Kernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels per operation; each launch, of a kernel or of a graph, costs `host.launch_s` on the host lane."""

    attention: Count  # one layer, from its norm to the residual addition
    gate: Count  # one router, its norm included
    expert: Count  # one routed expert on the GPU, or one group of them; gather and weighted addition included
    shared_expert: Count  # the shared experts of one layer
    head: Count  # final norm, logits, next token
    dense_ffn: Count  # one dense layer's FFN, its norm included


class KernelTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Device seconds that each kernel takes beside what it reads and multiplies: to start, to drain, to wait for the
    one before. An operation then takes kernels x these + bytes / bandwidth + FLOPs / rate."""

    launched_s: Quantity  # launched one by one
    replayed_s: Quantity  # as a node of a replayed graph


class Quantised(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """At what rate weights in blocks are multiplied that are not unpacked to 16 bits first."""

    dense_frac: Quantity  # of the 16-bit rate, on a GPU that has no `quantised_flops_per_s`
    expert_frac: Quantity  # of the rate above, for products of experts: few rows each, many in one launch
    reads_of_card: bool = False  # blocks are read at a GPU's own `quantised_bytes_per_s`, where it has one


class Resident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What differs where every expert lies on the GPU for good: nobody reads a router's choice, so that with `graphs` a
    token is one graph."""

    graphs: bool
    kernels: Kernels
    prompt_kernels: Count = 0


NOTHING = Quantity(value=0.0, source="assumed", note="left out")
NOTHING_IN_A_LAYER = Quantity(value=0.0, source="assumed", note="every expert is on the GPU: no router is read")


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host seconds are spent on the host lane on top of kernel and copy launches.

    `grouped`: one set of kernels runs all experts of a layer that are there when it is launched (grouped products);
    else each expert launches kernels of its own. `graphs`: kernels are replayed as CUDA graphs, each launched at the
    price of one kernel: one from attention to the router and the shared experts, one per expert or group of experts,
    one for a dense layer, one for the head.

    `cpu_region`: what of experts on the CPU runs as one parallel region, and so pays `cpu.expert_overhead_s` once: each
    expert, or all of a layer.

    `kernel_times`: without them, operations take the longest of their kernels' floors, their bytes and their FLOPs.
    `graphs_from`: the least compute capability on which graphs are replayed; a GPU whose profile has none replays them.
    `reads_routers`: the host reads each router's choice before it launches experts; not with `resident`.
    `kernels_of`: by id, models whose layers hold more than attention and experts, in place of `kernels`.
    `prompt_kernels`: what a layer runs beyond these in a pass that has a prompt in it; their time on the GPU alone.
    `splits_by`: how the engine uses several GPUs, as `--parallel` names it, unless a run says otherwise.
    """

    schema: Literal[1]
    id: str
    name: str
    aliases: tuple[str, ...] = ()
    note: str = ""
    pinned: bool  # experts lie in page-locked host memory, or are copied through it
    maps_weights: bool = (
        False  # they lie in a mapped file, and a policy that copies straight out of it has them pageable
    )
    copy_efficiency_frac: Quantity  # of the profile's bandwidth
    per_layer_s: Quantity
    per_expert_s: Quantity  # per routed expert run on the GPU
    per_copy_s: Quantity  # per whole expert copied; a part of one takes its share
    per_iteration_s: Quantity
    hybrid_layer_s: Quantity = NOTHING  # per layer in which the CPU computes an expert: submit, synchronise, merge
    overlap_layer_s: Quantity = NOTHING  # per layer that GPU and CPU compute at once: a worker thread, and joining it
    copy_calls: Calls = (
        1  # that copy a whole expert: each is enqueued, and waits for the link's latency; 0: a kernel reads it
    )
    cpu_region: CpuRegion = "expert"
    grouped: bool = False
    graphs: bool = False
    kernels: Kernels
    kernel_times: KernelTimes | None = None
    quantised: Quantised | None = None
    graphs_from: float | None = None
    reads_routers: bool = True
    resident: Resident | None = None
    kernels_of: dict[str, Kernels] = {}
    prompt_kernels: Count = 0
    splits_by: Literal["layers"] | None = None
    sources: dict[str, str] = {}

    @property
    def copies_pinned(self) -> bool:
        """Whether experts are copied out of page-locked memory, or through it."""
        return self.pinned and not self.maps_weights

    @property
    def without_newer(self) -> dict[str, Any]:
        """Its fields, less those that stacks did not always have where they say nothing: a run keeps its `run_id`."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["splits_by"]  # a run has what it says
        for name, default in _newer().items():
            if getattr(self, name) == default:
                del fields[name]
        return fields

    def of(self, model: str) -> Stack:
        """What it is for the model of this id."""
        return msgspec.structs.replace(self, kernels=self.kernels_of.get(model, self.kernels), kernels_of={})

    def on(self, hw: Hardware, keeps_all: bool) -> Stack:
        """What it is on this GPU, where every expert lies there for good or not."""
        stack, resident = self, self.resident
        if keeps_all and resident is not None:
            stack = msgspec.structs.replace(
                stack,
                graphs=resident.graphs,
                kernels=resident.kernels,
                prompt_kernels=resident.prompt_kernels,
                per_layer_s=NOTHING_IN_A_LAYER,
                reads_routers=False,
            )
        capability = hw.gpu.compute_capability
        if stack.graphs_from is not None and isinstance(capability, float) and capability < stack.graphs_from:
            stack = msgspec.structs.replace(stack, graphs=False)
        return stack


NEWER = (
    "maps_weights",
    "hybrid_layer_s",
    "overlap_layer_s",
    "copy_calls",
    "cpu_region",
    "kernel_times",
    "quantised",
    "graphs_from",
    "reads_routers",
    "resident",
    "kernels_of",
    "prompt_kernels",
)
"""Fields that stacks did not always have: at their default they say nothing."""


@cache
def _newer() -> dict[str, Any]:
    """`NEWER` with what each says when it says nothing."""
    return {field.name: field.default for field in msgspec.structs.fields(Stack) if field.name in NEWER}


def load_stack(name_or_path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> Stack:
    """Load a bundled stack by id or alias, or an own YAML file.

    Args:
        overrides: dotted field -> value, as `--set engine.per_layer_s=1e-3` gives them.

    Raises:
        BadInput: unknown name, unreadable or malformed file, an implausible figure.
    """
    path = profiles.find(PACKAGE, "engine", str(name_or_path))
    where = profiles.where(path, overrides)
    data = sets.apply(profiles.read(path, "stack"), overrides or {}, Stack, "engine")
    stack = profiles.convert(data, Stack, where)
    check_quantities(stack, stack.sources, where)
    if any(field.startswith("kernels.") for field in overrides or {}):  # what is asked for goes before a model's own
        stack = msgspec.structs.replace(stack, kernels_of={})
    return stack


def calls_of(n_calls: int, frac: float) -> int:
    """Calls that copy this share of an expert, where so many copy all of it: its share, rounded up."""
    return n_calls if n_calls <= 1 else max(1, math.ceil(n_calls * frac - ROUNDED))
