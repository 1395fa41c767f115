"""Memory of the CUDA backend: page-locked buffers without the allocator's rounding, device memory that several streams
use, and small tensors on their way up.
"""

from __future__ import annotations

from typing import Any

from sim.base.device_faults import DeviceFault, fault_of

MOST_PIECE_BYTES = 1 << 33
INLINE_BYTES = 64 << 10
"""Up to this size a pageable copy to the device travels in the command itself; a larger one would block the host."""


def pinned_pieces(n: int, each_bytes: int) -> list[int]:
    """How many buffers of `each_bytes` to put into each page-locked allocation, so that together they hold `n`.

    torch's allocator of page-locked memory rounds every request up to a power of two: 84 GiB asked for in one piece
    would take 128. Pieces that fill a power of two nearly to the brim lose little.
    """
    pieces: list[int] = []
    while n:
        fits = []
        size = 1 << max(12, (each_bytes - 1).bit_length())
        while True:
            held = min(n, size // each_bytes)
            fits.append(((size - held * each_bytes) / held, -held))
            if size >= MOST_PIECE_BYTES or held == n:
                break
            size *= 2
        pieces.append(-min(fits)[1])
        n -= pieces[-1]
    return pieces


class CudaMemory:
    """Allocates for `CudaDevice`; `pin` and `place` are what a test without a device turns off and sets to `cpu`."""

    def __init__(self, torch: Any, cuda: Any, device: str, streams: list[Any], pin: bool) -> None:
        self._torch, self._cuda, self._device, self._streams, self._pin = torch, cuda, device, streams, pin

    def on_device(self, n_bytes: int) -> Any:
        """Zeroed device memory that every lane may use from now on, and until its last user there is done."""
        try:
            tensor = self._torch.zeros(n_bytes, dtype=self._torch.uint8, device=self._device)
            # Zeroed on the stream of the moment, which the lanes' streams do not wait for.
            self._cuda.current_stream().synchronize()
        except (RuntimeError, MemoryError) as error:
            raise fault_of(error, f"allocating {n_bytes} bytes on {self._device}") from None
        for stream in self._streams:
            self.keep(tensor, stream)
        return tensor

    def on_host(self, n_bytes: int, pinned: bool = True) -> Any:
        """uint8 memory; page-locked, its true size is the next power of two."""
        if not pinned:
            return self._torch.empty(n_bytes, dtype=self._torch.uint8)
        try:
            return self._torch.empty(n_bytes, dtype=self._torch.uint8, pin_memory=self._pin)
        except (RuntimeError, MemoryError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise DeviceFault(
                f"page-locked memory was refused: {n_bytes} bytes ({why}); free host memory, raise a "
                "container's limit, or take a smaller --model"
            ) from None

    def host_buffers(self, n: int, each_bytes: int) -> list[Any]:
        """`n` page-locked buffers of one size, uint8."""
        made: list[Any] = []
        for held in pinned_pieces(n, each_bytes):
            piece = self.on_host(held * each_bytes)
            made += [piece[i * each_bytes : (i + 1) * each_bytes] for i in range(held)]
        return made

    def keep(self, tensor: Any, stream: Any) -> None:
        """Memory of `tensor` is not handed out again while `stream`, which did not allocate it, uses it."""
        if tensor.is_cuda:
            tensor.record_stream(stream)
        elif not self._pin:
            self._cuda.keep(tensor, stream)

    def upload(self, tensor: Any) -> Any:
        """A copy on the device, made on the current stream without blocking the host."""
        if self._pin and tensor.device.type == "cpu" and tensor.nbytes > INLINE_BYTES:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def give_back(self) -> None:
        """Return what the allocators keep for reuse to the system; page-locked memory where this torch can."""
        self._cuda.empty_cache()
        for owner, name in (
            (getattr(self._torch, "accelerator", None), "empty_host_cache"),
            (self._torch._C, "_host_emptyCache"),
        ):
            if (empty := getattr(owner, name, None)) is not None and self._pin:
                empty()
                return
