"""Experts in the precisions that a policy may ask for beside the serving one: packed on the host, copied packed, and
unpacked by whoever computes with them.

An integer code c of b bits stands for (c - (2^b - 1) / 2) x scale; there is one scale per row of a matrix. The sizes of
int8, int4 and int2 (`sim.profiles.geometry`) count no scales, so scales stay on the device, as norms and routers do:
a copy moves the very bytes that a simulation bills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput

if TYPE_CHECKING:
    from sim.real.devices.protocol import Device

BITS = {"int8": 8, "int4": 4, "int2": 2}
CASTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
CUTS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.33)
"""Shares of a row's largest value at which codes may end; the one with the least squared error is taken."""
VALUES_AT_ONCE = 1 << 18
"""Values quantised together: a whole expert of Mixtral's took 2.6 GiB beside its own."""


def check_form(precision: str, hidden_size: int) -> None:
    """Raises BadInput for a precision that no expert can be had in here."""
    known = (*BITS, *CASTS)
    if precision not in known:
        raise BadInput(
            f"--real, got experts in {precision}: real runs pack {', '.join(known)} and no other block "
            "format; choose one of these for the policy's low precision"
        )
    if precision in BITS and hidden_size * BITS[precision] % 8:
        raise BadInput(
            f"--real, got experts in {precision} of {hidden_size} columns: rows fill whole bytes; take "
            "another precision or model"
        )


@dataclass
class Form:
    """All experts of a model in one precision.

    `buffers[i]` is uint8 host memory, `scales[i]` [3 x intermediate, 1] on the device (None: values are cast, not
    coded); `row_bytes` is one row of a matrix; `dtype` is what rows are unpacked to.
    """

    precision: str
    row_bytes: int
    hidden_size: int
    dtype: Any
    buffers: list[Any]
    scales: list[Any] | None
    stored: Any = None  # type of the values as they lie, where they are cast

    def unpack(self, raw: Any, index: int, start_row: int, stop_row: int) -> Any:
        """Rows `[start_row, stop_row)` of expert `index` from their bytes, as values [rows, hidden]."""
        n = stop_row - start_row
        if self.scales is None:
            return raw.view(self.stored).view(n, self.hidden_size).to(self.dtype)
        bits = BITS[self.precision]
        codes = unpacked(raw.view(n, -1), bits).to(self.dtype)
        return codes.sub_((2**bits - 1) / 2).mul_(self.scales[index][start_row:stop_row])


def unpacked(packed: Any, bits: int) -> Any:
    """Codes [rows, columns] uint8 of packed bytes [rows, columns x bits / 8], lowest bits first."""
    import torch

    per = 8 // bits
    if per == 1:
        return packed
    shifts = torch.arange(per, dtype=torch.uint8, device=packed.device) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).reshape(len(packed), -1)


def quantised(values: Any, bits: int) -> tuple[Any, Any]:
    """Packed codes [rows, columns x bits / 8] and scales [rows, 1] float32 of values [rows, columns]."""
    import torch

    values = values.float()
    centre = (2**bits - 1) / 2
    largest = values.abs().amax(1, keepdim=True).clamp_min(1e-30)
    best = torch.full_like(largest, float("inf"))
    scale = largest / centre
    for cut in CUTS if bits < 8 else (1.0,):
        tried = largest * cut / centre
        off = (codes(values, tried, centre) - centre) * tried - values
        loss = off.square_().sum(1, keepdim=True)
        scale = torch.where(loss < best, tried, scale)
        best = torch.minimum(best, loss)
    per = 8 // bits
    found = codes(values, scale, centre).to(torch.uint8).view(len(values), -1, per)
    packed = found[..., 0].clone()
    for place in range(1, per):
        packed |= found[..., place] << (bits * place)
    return packed, scale


def codes(values: Any, scale: Any, centre: float) -> Any:
    """The nearest codes, as floats."""
    return (values / scale + centre).round_().clamp_(0, 2 * centre)


def pack(precision: str, buffers: list[Any], dtype: Any, hidden_size: int, n_rows: int, device: Device) -> Form:
    """Every expert in another precision.

    Args:
        buffers: experts in the serving type `dtype`, uint8 host memory whose first `n_rows` x hidden values count.
    """
    import torch

    check_form(precision, hidden_size)
    bits = BITS.get(precision)
    stored: Any = None if bits else getattr(torch, CASTS[precision])
    row_bytes = hidden_size * bits // 8 if bits else hidden_size * stored.itemsize
    size = n_rows * row_bytes
    found, scales = device.host_buffers(len(buffers), size), []
    at_once = max(1, VALUES_AT_ONCE // hidden_size)  # a row's codes are its own: in blocks that stay in the cache
    for buffer, place in zip(buffers, found, strict=True):
        values = buffer.view(dtype)[: n_rows * hidden_size].view(n_rows, hidden_size)
        if bits:
            parts = []
            for first in range(0, n_rows, at_once):
                packed, scale = quantised(values[first : first + at_once], bits)
                place[first * row_bytes : first * row_bytes + packed.numel()].copy_(packed.view(-1))
                parts.append(scale)
            scales.append(torch.cat(parts).to(dtype).to(device.place))
        else:
            place.copy_(values.to(stored).contiguous().view(torch.uint8).view(-1))
    return Form(precision, row_bytes, hidden_size, dtype, found, scales if bits else None, stored)
