"""The CPU backend: a thread per stream, an arena as "device" memory, real memcpy between the two sides.

Nothing sleeps and nothing is made up: compute is torch on the compute stream's thread, a copy is a memcpy on the copy
stream's thread, and every figure is a time that this machine really needed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from sim.base.device_faults import fault_of
from sim.base.interrupts import held
from sim.real.devices import environment
from sim.real.devices.clock import HostClock
from sim.real.devices.protocol import Facts
from sim.real.devices.threads import HostMark, ThreadStream
from sim.real.devices.work import COMPUTE, LANES

L2_BYTES = 32 * 1024 * 1024
"""What a rotated working set must exceed."""


class CpuDevice:
    """The host playing both sides. A stream has its thread from its first use on.

    Whoever drives holds Ctrl-C back (`sim.base.interrupts`): it is heard while waiting for a stream.

    Args:
        n_gpus: compute streams and copy engines, each with an arena that stands for a GPU's memory.
    """

    place = "cpu"
    threaded = True

    def __init__(self, n_gpus: int = 1) -> None:
        import torch

        self.torch: Any = torch
        self.n_gpus, self.busy_cores = n_gpus, 2 * n_gpus
        # What stands for device memory lies in the host's.
        self.facts = Facts("cpu", "CPU backend", environment.host_memory_bytes(), L2_BYTES, 1, "float32", int4=False)
        self._raised: BaseException | None = None
        self.failed: Callable[[BaseException], None] = self._keep
        self._streams: dict[tuple[int, int], ThreadStream] = {}
        with held():
            self.stream(COMPUTE)

    def _keep(self, error: BaseException) -> None:
        self._raised = self._raised or error

    def stream(self, lane: int, gpu: int = 0) -> ThreadStream:
        found = self._streams.get((lane, gpu))
        if found is None:
            found = ThreadStream(LANES[lane], self.torch, 1, lambda error: self.failed(error))
            self._streams[lane, gpu] = found
        return found

    def mark(self) -> HostMark:
        return HostMark()

    def elapsed_s(self, start: HostMark, end: HostMark) -> float:
        return end.at_s - start.at_s

    def settle(self) -> None:
        """Raises the first of what calls have raised since the last time."""
        for stream in list(self._streams.values()):
            stream.synchronize()
        error, self._raised = self._raised, None
        if error is not None:
            raise error

    def clock(self) -> HostClock:
        return HostClock()

    def bind_thread(self) -> None:
        """Every thread has the CPU."""

    def on_device(self, n_bytes: int) -> Any:
        return self._touched(n_bytes)

    def on_host(self, n_bytes: int, pinned: bool = True) -> Any:
        return self._touched(n_bytes)

    def host_buffers(self, n: int, each_bytes: int) -> list[Any]:
        raw = self._touched(n * each_bytes)
        return [raw[i * each_bytes : (i + 1) * each_bytes] for i in range(n)]

    def _touched(self, n_bytes: int) -> Any:
        """Memory whose pages exist, from a page boundary on."""
        try:
            raw = self.torch.zeros(n_bytes + 4096, dtype=self.torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise fault_of(error, f"allocating {n_bytes} bytes") from None
        raw[::4096] = 0
        skip = -raw.data_ptr() % 4096
        return raw[skip : skip + n_bytes]

    def upload(self, tensor: Any) -> Any:
        """The tensor itself: the device's arena lies in host memory."""
        return tensor

    def used_here(self, tensor: Any) -> None:
        """Nothing to do: memory lives as long as its tensor."""

    def free_bytes(self) -> int:
        return environment.free_host_bytes()

    def free(self) -> None:
        gc.collect()

    def close(self) -> None:
        with held():
            for stream in self._streams.values():
                with contextlib.suppress(Exception):
                    stream.stop()
            gc.collect()
