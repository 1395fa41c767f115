"""Which device a name means, and opening it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput, did_you_mean
from sim.base.extras import need

if TYPE_CHECKING:
    from sim.real.devices.lanes import Lanes
    from sim.real.devices.protocol import Device


def usable_device(name: str | None, asking: str = "--real") -> str:
    """The device of `--real`, or of `calibrate --device`: as named, else a CUDA GPU if there is one, else the CPU.

    Raises:
        BadInput: no torch, or no such device.
    """
    need(asking, "torch")
    flag = asking if asking == "--real" else "--device"
    import torch

    if name is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"{flag}, got {name!r}: cpu, or cuda:0, cuda:1 ..; {did_you_mean(kind, ('cpu', 'cuda'))}")
    if colon and not index.isdigit():
        raise BadInput(f"{flag}, got {name!r}: the number of a device follows the colon; write {kind}:0")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"{flag}, got {name!r}: torch sees no CUDA device here; write {flag}=cpu")
    return name if kind == "cpu" or index else "cuda:0"


def open_device(name: str, n_gpus: int = 1) -> Device:
    """A device that `usable_device` has named. Raises BadInput for more GPUs than are carried out there."""
    if name.partition(":")[0] == "cpu":
        from sim.real.devices.cpu import CpuDevice

        return CpuDevice(n_gpus)
    if n_gpus != 1:
        raise BadInput(
            f"--real, got --gpus {n_gpus} on {name}: real runs use one CUDA GPU; leave --gpus out, or "
            "write --real=cpu, where several are carried out"
        )
    from sim.real.devices.cuda import CudaDevice

    return CudaDevice(name)


def open_lanes(device: str, n_gpus: int = 1, precision: str = "bf16") -> Lanes:
    """The lanes of a device that `usable_device` has named, to compute in `precision`."""
    from sim.real.devices import environment
    from sim.real.devices.lanes import Lanes

    if precision == "bf16" and "amx_bf16" in environment.machine()["cpu_flags"]:
        environment.bf16_on_cpu()  # some virtual machines announce AMX and kill a process that uses it
    return Lanes(open_device(device, n_gpus))
