"""What can go wrong on a device, as errors that say what to do."""

from __future__ import annotations

from sim.errors import BadInput


class DeviceFault(BadInput):
    """A device ran out of memory, refused page-locked memory, or was lost."""


def fault_of(error: BaseException, doing: str) -> BaseException:
    """The fault behind an exception of torch or CUDA, with the way out; anything else (a bug) as it is."""
    if isinstance(error, DeviceFault):
        return error
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    lower = text.lower()
    if ("pin" in lower and "memory" in lower) or "cudahostalloc" in lower or "hostregister" in lower:
        return DeviceFault(f"page-locked memory was refused while {doing} ({text}): raise `ulimit -l`, free host "
                           "memory, or take a smaller --model")  # fmt: skip
    if isinstance(error, MemoryError) or "out of memory" in lower or "can't allocate" in lower or (
        "not enough memory" in lower
    ):
        return DeviceFault(f"out of memory while {doing} ({text}): lower --experts, --cache-frac or --batch, or take "
                           "--model cpu-small")  # fmt: skip
    if "cuda" in lower or "device-side" in lower or "nvml" in lower:
        return DeviceFault(f"the device was lost while {doing} ({text}): results so far are kept; check the driver's "
                           "log (dmesg, nvidia-smi) and run again")  # fmt: skip
    return error
