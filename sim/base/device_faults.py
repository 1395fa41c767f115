"""What can go wrong on a device, as errors that say what to do."""

from __future__ import annotations

from sim.base.errors import BadInput

REFUSED = ("pin_memory", "pinned memory", "pin memory", "page-locked", "cudahostalloc", "hostregister")
TOO_LITTLE = ("out of memory", "can't allocate", "not enough memory", "status_alloc_failed", "status_not_initialized")
"""cuBLAS and cuDNN say the last two when there is no room left for their workspaces."""
LOST = ("cuda error", "cuda driver error", "cublas_status", "cudnn_status", "nvml", "gpu is lost")
"""How torch reports a fault of the device; a mere mention of cuda (a tensor in the wrong place) is a bug."""


class DeviceFault(BadInput):
    """A device ran out of memory, refused page-locked memory, or was lost."""


def fault_of(error: BaseException, doing: str) -> BaseException:
    """The fault behind an exception of torch or CUDA, with the way out; anything else (a bug) as it is."""
    if isinstance(error, DeviceFault):
        return error
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    lower = text.lower()
    if any(word in lower for word in REFUSED):
        return DeviceFault(
            f"page-locked memory was refused while {doing} ({text}): raise `ulimit -l`, free host "
            "memory, or take a smaller --model"
        )
    if isinstance(error, MemoryError) or any(word in lower for word in TOO_LITTLE):
        return DeviceFault(f"out of memory while {doing} ({text}): lower --cache or --batch, or take --model cpu-small")
    if isinstance(error, RuntimeError) and any(word in lower for word in LOST):
        return DeviceFault(
            f"the device was lost while {doing} ({text}): results so far are kept; check the driver's "
            "log (dmesg, nvidia-smi) and run again"
        )
    return error
