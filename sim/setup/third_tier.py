"""Host memory as a cache of experts above a drive: what `--ram`, `--drive` and `--set drive.evict` ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import KIB, MIB, show_bytes, show_ram
from sim.options import OPTIONS, RunSpec
from sim.policy.api import Policy
from sim.policy.registry import find

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.profiles.hardware import Hardware
    from sim.profiles.stack import Stack

DIRECT, BUFFERED = "direct", "buffered"
COLD, WARM = "cold", "warm"
LRU = "lru"
DEFAULTS = {DIRECT: (32, MIB), BUFFERED: (1, 128 * KIB)}
"""Depth and block of reads where none is given. Direct: enough requests to reach the drive's bandwidth (assumed).
Buffered: a fault at a time, of Linux' own read-ahead (`read_ahead_kb` is 128 by default)."""
NOT_A_CACHE = ("gate_done", "assign", "gate_input", "predictor_bytes", "copy_done")
"""Hooks of what does more than keep experts."""
REFUSED = ("oracle", "lossy", "timing", "cpu", "bound")


class ThirdTier(NamedTuple):
    """What was asked for.

    depth, block_bytes: requests under way at a time, and the bytes of each. reads: direct, into page-locked memory of
    the program; or buffered, into the page cache, whose pages are pageable. read_ahead: experts that follow in the
    file, read after each that was missing. start: cold, host memory is empty; warm, it holds what a load of the file
    from front to back leaves in it. why: which terms nobody gave, what they are and why; empty where all were given.
    """

    drive: str
    depth: int
    block_bytes: int
    reads: str = DIRECT
    read_ahead: int = 0
    start: str = COLD
    evict: str = LRU
    why: str = ""


def maps_its_file(stack: Stack, asked: Mapping[str, object]) -> bool:
    """Whether an engine holds experts as pages of the file that it maps.

    Args:
        stack: as it was loaded, before a policy has a say in how it copies. asked: what was set of it; `pinned=true`
            is llama.cpp's --no-mmap.
    """
    return stack.maps_weights and asked.get("pinned") is not True


def third_tier(spec: RunSpec, stack: Stack, asked: Mapping[str, object]) -> ThirdTier | None:
    """What a run asks for; None without a drive. Raises BadInput naming option, rule and a way out.

    An engine that maps its file reads through the page cache, in which loading the file has left its end. Others are
    taken to read past it, into memory that is empty.

    Args:
        stack, asked: as for `maps_its_file`.
    """
    maps = maps_its_file(stack, asked)
    since = _since(stack.id, maps, stack.maps_weights)
    if spec.drive is None:
        for row in OPTIONS.terms_of(OPTIONS.by_field["drive"]).values():
            if (value := getattr(spec, row.field)) is not None:
                raise BadInput(
                    f"{row.said}, got {row.show(value)} without a drive: RAM then holds every expert; add --drive "
                    "gen4x4"
                )
        return None
    word = spec.drive
    reads = spec.drive_reads or (BUFFERED if maps else DIRECT)
    start = spec.drive_start or (WARM if maps and reads == BUFFERED else COLD)
    given = {"reads": spec.drive_reads, "start": spec.drive_start}
    left = {key: value for key, value in (("reads", reads), ("start", start)) if given[key] is None}
    depth, block_bytes = DEFAULTS[reads]
    depth, block_bytes = spec.drive_depth or depth, spec.drive_block or block_bytes
    ahead = spec.drive_ahead or 0
    policy = LRU if spec.drive_evict is None else spec.drive_evict
    if reads == BUFFERED and policy != LRU:
        raise BadInput(
            f"--set drive.evict, got {policy!r} with reads=buffered{since if 'reads' in left else ''}: the page "
            f"cache is the kernel's, which keeps what was used last; leave it out, or take --drive {word}:reads=direct"
        )
    try:
        kind = find(policy)
    except BadInput as error:
        raise BadInput(f"--set drive.evict: {error}") from None
    wrong = [trait for trait in REFUSED if trait in kind.traits] + [
        hook for hook in NOT_A_CACHE if getattr(kind, hook) is not getattr(Policy, hook)
    ]
    if wrong or kind.keeps_all:
        why = wrong[0] if wrong else "keeps_all"
        raise BadInput(
            f"--set drive.evict, got {policy!r}: {why} is more than keeping experts, and host memory only does that; "
            "take a "
            "cache, e.g. lru, lfu or fifo"
        )
    terms_left = " and ".join(f"{key}={value}" for key, value in left.items())
    why = f"{terms_left} by default{since}" if left else ""
    return ThirdTier(word, depth, block_bytes, reads, ahead, start, policy, why)


def _since(stack: str, maps: bool, may_map: bool) -> str:
    """Why a default is what it is."""
    if maps:
        return f", since engine {stack} maps its file"
    if may_map:
        return f", since engine {stack} maps no file with engine.pinned=true"
    return f", since engine {stack} maps no file (llama.cpp does, and reads more slowly: --engine llama_cpp)"


def host_memory_of(spec: RunSpec, hw: Hardware) -> int:
    """Host memory for experts: what was asked for, or all that the profile's host has."""
    return int(hw.cpu.memory_bytes.value) if spec.ram is None else spec.ram


def described(tier: ThirdTier, n_bytes: int) -> str:
    """In words, for a label."""
    return (
        f"host memory of {show_ram(n_bytes)} caches experts by {tier.evict}, above {tier.drive} "
        f"({tier.reads} reads, {show_bytes(tier.block_bytes)} at a depth of {tier.depth}"
        f"{f'; {tier.why}' if tier.why else ''})"
    )


def price_drive(cost: Cost, tier: ThirdTier, expert_bytes: int) -> None:
    """Let a machine of these prices read from the drive."""
    from sim.machine.drive_prices import DrivePrices
    from sim.profiles.drives import Drive

    drive = cost.hw.drive
    assert isinstance(drive, Drive)
    cost.drive = DrivePrices(drive, tier.depth, tier.block_bytes, expert_bytes, cost.figures)
