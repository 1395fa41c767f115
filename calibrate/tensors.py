"""What probes compute with and copy: filled memory on either side of the link."""

from __future__ import annotations

from typing import Any

from sim.real.devices.protocol import Device

Tensor = Any

TILE_VALUES = 4 * 1024 * 1024


def random_tensor(device: Device, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A device tensor filled with small random numbers (zeros would draw less power and clock higher)."""
    torch = device.torch
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind, device=device.place)
    if not kind.is_floating_point:
        return tensor.fill_(1)
    flat = tensor.view(-1)
    if not device.threaded:
        flat.normal_(0.0, 0.02)
        return tensor
    # The CPU draws slowly: a tile over and over.
    tile = torch.empty(min(flat.numel(), TILE_VALUES), dtype=kind).normal_(0.0, 0.02)
    return _tiled(tensor, flat, tile)


def touched_buffer(device: Device, n_bytes: int, *, pinned: bool) -> Tensor:
    """A uint8 host tensor whose pages have been touched."""
    tensor = device.on_host(n_bytes, pinned)
    tile = device.torch.randint(0, 256, (min(n_bytes, TILE_VALUES),), dtype=device.torch.uint8)
    return _tiled(tensor, tensor, tile)


def _tiled(tensor: Tensor, flat: Tensor, tile: Tensor) -> Tensor:
    for at in range(0, flat.numel(), tile.numel()):
        part = flat[at : at + tile.numel()]
        part.copy_(tile[: part.numel()])
    return tensor
