"""CUDA: one stream per lane, events as marks, page-locked host memory. On this path only this module imports torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch as _torch

from sim.base.errors import BadInput

_TILE_BYTES = 16 * 1024 * 1024
_SPIN_HZ = 1.98e9
"""Cycles per second that `_sleep` is asked in; a slower clock only holds the lane longer, which is harmless."""


class CudaBackend:
    """A CUDA device. Without one, a test passes a stand-in for `torch.cuda` and the `place` of tensors."""

    kind = "cuda"

    def __init__(self, device: str = "cuda:0", *, cuda: Any = None, place: str | None = None) -> None:
        self.torch: Any = _torch
        self._cuda: Any = _torch.cuda if cuda is None else cuda
        if not self._cuda.is_available():
            raise BadInput(f"device, got {device!r}: torch sees no CUDA device; use --device cpu, or another torch")
        index = int(device.partition(":")[2] or 0)
        count = self._cuda.device_count()
        if index >= count:
            raise BadInput(f"device, got {device!r}: {count} CUDA devices here; use cuda:0 to cuda:{count - 1}")
        self._pin = place is None
        self.index = index
        self.device = place or f"cuda:{index}"
        self._cuda.set_device(index)
        properties = self._cuda.get_device_properties(index)
        self.title: str = properties.name
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or 64 * 1024 * 1024
        self.n_sms = int(getattr(properties, "multi_processor_count", 1))
        ampere = int(getattr(properties, "major", 8)) >= 8  # older ones emulate bf16, slowly
        self.dtype = "bfloat16" if ampere else "float16"
        self.int4 = place is None and ampere and hasattr(_torch.ops.aten, "_weight_int4pack_mm")
        self.uuid = str(getattr(properties, "uuid", ""))
        self.total_bytes = int(properties.total_memory)
        free_bytes, _ = self._cuda.mem_get_info(index)
        self.device_bytes = int(free_bytes * 0.9)
        self.max_copy_bytes = 1 << 30
        self.compute, self.h2d, self.d2h = (self._cuda.Stream(device=index) for _ in range(3))

    def on_device(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(self.torch, dtype)
        tensor = self.torch.empty(shape, dtype=kind, device=self.device)
        if not kind.is_floating_point:
            tensor.fill_(1)
        else:
            tensor.normal_(0.0, 0.02)
        return tensor

    def on_host(self, n_bytes: int, *, pinned: bool) -> Any:
        tensor = self.torch.empty(n_bytes, dtype=self.torch.uint8, pin_memory=pinned and self._pin)
        tile = self.torch.randint(0, 256, (min(n_bytes, _TILE_BYTES),), dtype=self.torch.uint8)
        for at in range(0, n_bytes, _TILE_BYTES):
            part = tensor[at : at + _TILE_BYTES]
            part.copy_(tile[: part.numel()])
        return tensor

    def block(self, lane: Any, call: Callable[[], object], n: int) -> float:
        with self.torch.inference_mode(), self._cuda.stream(lane):
            start_s = time.perf_counter()
            for _ in range(n):
                call()
            return time.perf_counter() - start_s

    def spin(self, lane: Any, duration_s: float) -> None:
        with self._cuda.stream(lane):
            self._cuda._sleep(int(duration_s * _SPIN_HZ))

    def mark(self, lane: Any) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(lane)
        return event

    def wait(self, lane: Any, mark: Any) -> None:
        lane.wait_event(mark)

    def done(self, mark: Any) -> bool:
        return bool(mark.query())

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def join(self, lane: Any) -> None:
        lane.synchronize()

    def settle(self) -> None:
        self._cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        self._cuda.empty_cache()

    def close(self) -> None:
        self.free()
