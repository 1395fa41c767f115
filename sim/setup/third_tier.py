"""Host memory as a cache of experts above a drive: what `--host-memory`, `--nvme` and `--ram-policy` ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sim.base.errors import BadInput, did_you_mean
from sim.base.units import KIB, MIB, parse_bytes, show_bytes, show_ram
from sim.policy.api import Policy
from sim.policy.registry import find

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.profiles.hardware import Hardware
    from sim.profiles.stack import Stack
    from sim.setup.setup import Setup
    from sim.setup.spec import RunSpec

DIRECT, BUFFERED = "direct", "buffered"
READS = (DIRECT, BUFFERED)
COLD, WARM = "cold", "warm"
STARTS = (COLD, WARM)
LRU = "lru"
DEFAULTS = {DIRECT: (32, MIB), BUFFERED: (1, 128 * KIB)}
"""Depth and block of reads where none is given. Direct: enough requests to reach the drive's bandwidth (assumed).
Buffered: a fault at a time, of Linux' own read-ahead (`read_ahead_kb` is 128 by default)."""
MOST_DEPTH, MOST_AHEAD, LEAST_BLOCK = 65536, 4096, 512
NOT_A_CACHE = ("gate_done", "assign", "gate_input", "predictor_bytes", "copy_done")
"""Hooks of what does more than keep experts."""
REFUSED = ("oracle", "lossy", "timing", "cpu", "bound")


class ThirdTier(NamedTuple):
    """What was asked for.

    depth, block_bytes: requests under way at a time, and the bytes of each. reads: direct, into page-locked memory of
    the program; or buffered, into the page cache, whose pages are pageable. read_ahead: experts that follow in the
    file, read after each that was missing. start: cold, host memory is empty; warm, it holds what a load of the file
    from front to back leaves in it. said: the option with the terms that the engine's way of reading added. why: which
    terms nobody gave, what they are and why; empty where all were given.
    """

    drive: str
    depth: int
    block_bytes: int
    reads: str = DIRECT
    read_ahead: int = 0
    start: str = COLD
    ram_policy: str = LRU
    said: str = ""
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
    if spec.nvme is None:
        if spec.ram_policy is not None:
            raise BadInput(
                f"--ram-policy, got {spec.ram_policy!r} without a drive: host memory then holds every expert; add "
                "--nvme gen4x4"
            )
        return None
    word, *terms = spec.nvme.split(":")
    given: dict[str, str] = {}
    for term in terms:
        key, equals, value = term.partition("=")
        if not equals or key not in _TERMS:
            raise BadInput(
                f"--nvme, got {term!r}: no such term; write e.g. {word}:depth=8:block=256KiB, or {word}:reads=buffered "
                f"({did_you_mean(key, _TERMS)})"
            )
        if key in given:
            raise BadInput(f"--nvme, got {key} twice: one value each; keep one of them")
        given[key] = value
    reads = _word(given, "reads", READS, BUFFERED if maps else DIRECT)
    start = _word(given, "start", STARTS, WARM if maps and reads == BUFFERED else COLD)
    left = {key: value for key, value in (("reads", reads), ("start", start)) if key not in given}
    depth, block_bytes = DEFAULTS[reads]
    if "depth" in given:
        depth = _whole(given["depth"], "depth", 1, MOST_DEPTH)
    if "block" in given:
        block_bytes = parse_bytes(given["block"], "--nvme block")
        if block_bytes < LEAST_BLOCK:
            raise BadInput(f"--nvme block, got {given['block']!r}: at least {LEAST_BLOCK} bytes, a sector; e.g. 1MiB")
    ahead = _whole(given["ahead"], "ahead", 0, MOST_AHEAD) if "ahead" in given else 0
    policy = LRU if spec.ram_policy is None else spec.ram_policy
    if reads == BUFFERED and policy != LRU:
        raise BadInput(
            f"--ram-policy, got {policy!r} with reads=buffered{since if 'reads' in left else ''}: the page "
            f"cache is the kernel's, which keeps what was used last; leave it out, or take --nvme {word}:reads=direct"
        )
    try:
        kind = find(policy)
    except BadInput as error:
        raise BadInput(f"--ram-policy: {error}") from None
    wrong = [trait for trait in REFUSED if trait in kind.traits] + [
        hook for hook in NOT_A_CACHE if getattr(kind, hook) is not getattr(Policy, hook)
    ]
    if wrong or kind.keeps_all:
        why = wrong[0] if wrong else "keeps_all"
        raise BadInput(
            f"--ram-policy, got {policy!r}: {why} is more than keeping experts, and host memory only does that; take a "
            "cache, e.g. lru, lfu or fifo"
        )
    added = [f"{key}={value}" for key, value in left.items() if value in (BUFFERED, WARM)]
    terms_left = " and ".join(f"{key}={value}" for key, value in left.items())
    why = f"{terms_left} by default{since}" if left else ""
    return ThirdTier(word, depth, block_bytes, reads, ahead, start, policy, ":".join([spec.nvme, *added]), why)


_TERMS = ("depth", "block", "reads", "ahead", "start")


def _since(stack: str, maps: bool, may_map: bool) -> str:
    """Why a default is what it is."""
    if maps:
        return f", since stack {stack} maps its file"
    if may_map:
        return f", since stack {stack} maps no file with stack.pinned=true"
    return f", since stack {stack} maps no file (llama.cpp does, and reads more slowly: --stack llama_cpp)"


def _word(given: dict[str, str], key: str, known: tuple[str, ...], default: str) -> str:
    value = given.get(key, default)
    if value not in known:
        raise BadInput(f"--nvme {key}, got {value!r}: no such way; {did_you_mean(value, known)}")
    return value


def _whole(text: str, key: str, least: int, most: int) -> int:
    whole = text.isascii() and text.isdigit() and len(text) <= len(str(most))  # more digits take long to read
    if not whole or not least <= int(text) <= most:
        raise BadInput(f"--nvme {key}, got {text!r}: a whole number from {least} to {most}; e.g. {key}=8")
    return int(text)


def check_together(setup: Setup) -> None:
    """Raises BadInput for what a drive below host memory does not go with."""
    if setup.tier is not None and setup.machine is not None:
        raise BadInput("--nvme with a machine of one's own: it reads from no drive; leave it out")


def host_memory_of(spec: RunSpec, hw: Hardware) -> int:
    """Host memory for experts: what was asked for, or all that the profile's host has."""
    return int(hw.cpu.memory_bytes.value) if spec.host_memory_bytes is None else spec.host_memory_bytes


def described(tier: ThirdTier, n_bytes: int) -> str:
    """In words, for a label."""
    return (
        f"host memory of {show_ram(n_bytes)} caches experts by {tier.ram_policy}, above {tier.drive} "
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
