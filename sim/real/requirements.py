"""Whether a run can be carried out on a device: geometry, precisions, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_bytes
from sim.profiles.precisions import BITS_PER_PARAM
from sim.real.devices.environment import free_host_bytes
from sim.real.weights.forms import check_form
from sim.real.weights.weights import check_supported
from sim.run import prepare

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.profiles.models import Model
    from sim.real.devices.protocol import Device
    from sim.setup.setup import Setup

SLACK_FRAC = 0.9
"""Share of free memory a run may take."""
SMALL = "cpu-small"
HOST_ALONE = "it keeps every expert in this host's memory"


def serving_precision(device: str, model: Model) -> str:
    """What a run computes in when nothing is said: bf16, but fp32 on the CPU backend for a model of that type, and
    fp16 on a GPU before compute capability 8.0, which only emulates bf16.
    """
    if device == "cpu":
        return "fp32" if model.native_precision == "fp32" else "bf16"
    import torch

    return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"


def prepare_real(spec: RunSpec, place: str, precision_given: bool) -> Setup:
    """The setup of a real run: in the precision that the device computes in, unless another was asked for."""
    setup = prepare(spec)
    precision = serving_precision(place, setup.model)
    if not precision_given and precision != spec.precision:
        setup.close()
        setup = prepare(msgspec.structs.replace(spec, precision=precision))
    try:
        check(setup)
    except BaseException:
        setup.close()
        raise
    return setup


def check(setup: Setup) -> None:
    """Raises BadInput for what no real run here carries out."""
    spec, whole = setup.spec, "a real run takes each prompt whole, as an iteration of its own"
    for option, asked, why in (
        ("--drive", None if setup.tier is None else spec.drive, HOST_ALONE),
        ("--ram", spec.ram, HOST_ALONE),
        ("--set sim.energy", spec.sim_energy, "joules come of a profile's watts, and it measures none"),
        ("--kv-memory", None if setup.kv is None else spec.kv_memory, "it has no pool of pages"),
        ("--draft", None if setup.drafter is None else spec.draft, "it decodes a token at a time"),
        ("--prefill-chunk", spec.prefill_chunk, whole),
        ("--set batch.static", spec.batch_static or None, whole),
        ("--replicas", spec.replicas if spec.replicas > 1 else None, "it runs on this one machine"),
    ):
        if asked is not None:
            raise BadInput(f"{option}, got {asked!r} with --real: {why}; leave it out")
    if setup.several.unusual:
        raise BadInput(f"--real, got {setup.several.unusual}: simulated only; leave it out")
    check_supported(setup.model, spec.precision)
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
        BadInput: dense weights, KV caches and experts do not fit the device, or no layer's experts the host.
    """
    model, precision = setup.model, setup.spec.precision
    on_device, on_host = (int(SLACK_FRAC * n_bytes) for n_bytes in free)
    need = setup.memory.parts.held_bytes + sum(setup.memory.expert_bytes)
    smaller = "lower --cache" if model.id == SMALL else f"take --model {SMALL}, or lower --cache"
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
