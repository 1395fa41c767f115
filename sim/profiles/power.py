"""Watts of a machine's parts, while they wait and while they work: what `--set sim.energy` multiplies by seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from sim.base.errors import BadInput
from sim.base.quantities import Quantity

if TYPE_CHECKING:
    from sim.profiles.hardware import Hardware

COUNTED = GPU, MACHINE = "gpu", "machine"
"""What `--set sim.energy` counts: the boards alone, as their own counters do, or also CPU, host memory and drive."""


class GpuPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One board.

    waiting_w: the program's context is alive and clocks are up, and no kernel runs; copies may. memory_bound_w,
    compute_bound_w: kernels run, and their bytes or their arithmetic take longest.
    """

    waiting_w: Quantity
    memory_bound_w: Quantity
    compute_bound_w: Quantity


class CpuPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processor's package and the modules of host memory.

    waiting_w: one thread drives the GPU. busy_w: all cores compute experts. memory_waiting_w, memory_busy_w: nothing is
    read; read at all that memory gives. rest_w: what else a meter at the wall would see (board, fans, losses).
    """

    waiting_w: Quantity
    busy_w: Quantity
    memory_waiting_w: Quantity
    memory_busy_w: Quantity
    rest_w: Quantity | msgspec.UnsetType = msgspec.UNSET


class DrivePower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drive: between reads, and while it reads."""

    waiting_w: Quantity
    busy_w: Quantity


def lacking(hw: Hardware, counted: str) -> list[str]:
    """The blocks without which the joules of what is counted are not known."""
    blocks: dict[str, object] = {"gpu.power": hw.gpu.power}
    if counted == MACHINE:
        blocks["cpu.power"] = hw.cpu.power
        if hw.drive is not msgspec.UNSET:
            blocks["drive.power"] = hw.drive.power
    return [path for path, block in blocks.items() if block is msgspec.UNSET]


def check_power(hw: Hardware, where: str) -> None:
    """Raises BadInput for a part that draws less while it works than while it waits."""
    for block, waiting, working in _pairs(hw):
        least, most = getattr(block[1], waiting).value, getattr(block[1], working).value
        if most < least:
            raise BadInput(
                f"{where}: {block[0]}.{working}, got {most:g}: less than {waiting}, {least:g}; a part draws no less "
                "while it works, so correct one of them"
            )


def _pairs(hw: Hardware) -> Iterator[tuple[tuple[str, msgspec.Struct], str, str]]:
    """((path, block), waiting, working) of everything that has watts."""
    if isinstance(gpu := hw.gpu.power, GpuPower):
        yield ("gpu.power", gpu), "waiting_w", "memory_bound_w"
        yield ("gpu.power", gpu), "waiting_w", "compute_bound_w"
    if isinstance(cpu := hw.cpu.power, CpuPower):
        yield ("cpu.power", cpu), "waiting_w", "busy_w"
        yield ("cpu.power", cpu), "memory_waiting_w", "memory_busy_w"
    if hw.drive is not msgspec.UNSET and isinstance(drive := hw.drive.power, DrivePower):
        yield ("drive.power", drive), "waiting_w", "busy_w"
