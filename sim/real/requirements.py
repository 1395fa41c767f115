"""Whether a run can be carried out on a device: geometry, precisions, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.base.units import show_bytes
from sim.profiles.precisions import BITS_PER_PARAM
from sim.real.devices.environment import free_host_bytes
from sim.real.weights.forms import check_form
from sim.real.weights.weights import check_supported

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.protocol import Device
    from sim.setup.setup import Setup

SLACK_FRAC = 0.9
"""Share of free memory a run may take."""
SMALL = "cpu-small"


def serving_precision(device: str, model: Model) -> str:
    """What a run computes in when nothing is said: bf16, but fp32 on the CPU backend for a model of that type, and
    fp16 on a GPU before compute capability 8.0, which only emulates bf16.
    """
    if device == "cpu":
        return "fp32" if model.native_precision == "fp32" else "bf16"
    import torch

    return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"


def check(setup: Setup) -> None:
    """Raises BadInput for what no real run here carries out."""
    if setup.tier is not None or setup.spec.ram is not None:
        asked = "--ram" if setup.tier is None else "--drive"
        raise BadInput(f"--real, got {asked}: real runs keep every expert in this host's memory; leave it out")
    if setup.spec.sim_energy is not None:
        raise BadInput(
            f"--set sim.energy, got {setup.spec.sim_energy!r} with --real: joules come of a profile's watts, and a "
            "real "
            "run measures none; simulate it"
        )
    if setup.kv is not None:
        raise BadInput("--real, got --kv-memory: real runs have no pool of pages; leave it out")
    if setup.several.unusual:
        raise BadInput(f"--real, got {setup.several.unusual}: simulated only; leave it out")
    if setup.drafter is not None:
        raise BadInput("--draft: a real run decodes a token at a time; leave it out")
    if setup.spec.prefill_chunk is not None or setup.spec.batch_static:
        asked = "--prefill-chunk" if setup.spec.prefill_chunk is not None else "--set batch.static=on"
        raise BadInput(f"{asked}: a real run takes each prompt whole, as an iteration of its own; leave it out")
    if setup.spec.replicas > 1:
        raise BadInput(
            f"--replicas, got {setup.spec.replicas} with --real: it runs on this one machine; leave one of them out"
        )
    check_supported(setup.model, setup.spec.precision)
    for precision in lower_precisions(setup):
        check_form(precision, setup.model.hidden_size)


def lower_precisions(setup: Setup) -> list[str]:
    """Precisions beside the serving one that the policy's parameters name: experts are packed in them beforehand."""
    named = {value for value in setup.policy.settings.values() if isinstance(value, str) and value in BITS_PER_PARAM}
    return sorted(named - {setup.spec.precision})


def check_memory(setup: Setup, device: Device, free: tuple[int, int]) -> int:
    """Host bytes that expert buffers may take.

    Args:
        free: bytes free on the device and on the host; on the CPU backend both come out of host memory.

    Raises:
        BadInput: dense weights, caches and the expert budget do not fit the device, or no layer's experts the host.
    """
    model, precision = setup.model, setup.spec.precision
    on_device, on_host = (int(SLACK_FRAC * n_bytes) for n_bytes in free)
    need = setup.memory.parts.held_bytes + sum(setup.memory.expert_bytes)
    smaller = "lower --cache" if model.id == SMALL else f"take --model {SMALL}, or fewer --cache"
    if need > on_device:
        raise BadInput(
            f"--real, got --model {model.id}: it needs {show_bytes(need)} on {device.place}, which "
            f"has {show_bytes(on_device)} free; {smaller}"
        )
    left = on_host - need if device.place == "cpu" else on_host
    # Lower precisions lie beside the serving one, each a share of it.
    beside = sum(model.expert_bytes(lower) for lower in lower_precisions(setup)) / model.expert_bytes(precision)
    left = int(left / (1.0 + beside))
    layer_bytes = model.n_experts * model.expert_bytes(precision)
    if left < layer_bytes:
        raise BadInput(
            f"--real, got --model {model.id}: one layer's experts take {show_bytes(layer_bytes)} of host "
            f"memory, {show_bytes(max(0, left))} are free; {smaller}"
        )
    return left


def free_bytes(device: Device) -> tuple[int, int]:
    """Bytes free on the device and on the host."""
    host = free_host_bytes()
    if device.place == "cpu":
        return host, host
    return device.free_bytes(), host
