"""Device memory for experts: one buffer, blocks handed out oldest-freed first, and what
must end before one is written again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.real.devices.work import Work

ALIGN_BYTES = 4096


def aligned(n_bytes: int) -> int:
    """Rounded up so that the next block starts on a page: equal kernels then see equal alignment."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(eq=False)
class Block:
    """Room for one piece: `hazards` is the work that must end before the room may be written."""

    start: int
    n_bytes: int
    buffer: Any
    freed_at: int = 0
    hazards: list[Work] = field(default_factory=list)
    views: Any = None  # whatever the reader cut out of it last, with the shape it was cut for

    def bytes(self, n_bytes: int) -> Any:
        """The first `n_bytes` as a uint8 tensor."""
        return self.buffer[self.start : self.start + n_bytes]


class Arena:
    """Blocks of one device buffer. For pieces of one size it is a free list of slots, first freed first used.

    Pieces of several sizes may leave the free bytes in splinters; a piece that no block holds then gets memory of its
    own from `more`, and `spilt_bytes` says how much that was at most.
    """

    def __init__(self, buffer: Any, n_bytes: int, more: Callable[[int], Any]) -> None:
        self.n_bytes = n_bytes
        self._buffer = buffer
        self._more = more
        self._free: list[Block] = [Block(0, n_bytes, buffer)] if n_bytes else []
        self._count = 0
        self._spilt = 0
        self.spilt_bytes = 0

    def take(self, n_bytes: int) -> Block:
        """Room for `n_bytes`, the block that has been free longest among those that hold it."""
        n_bytes = aligned(n_bytes)
        found = self._oldest(n_bytes)
        if found is None:
            self._merge()
            found = self._oldest(n_bytes)
        if found is None:
            self._spilt += n_bytes
            self.spilt_bytes = max(self.spilt_bytes, self._spilt)
            return Block(0, n_bytes, self._more(n_bytes))
        if found.n_bytes == n_bytes:
            self._free.remove(found)
            return found
        taken = Block(found.start, n_bytes, found.buffer, found.freed_at, list(found.hazards))
        found.start += n_bytes
        found.n_bytes -= n_bytes
        found.views = None
        return taken

    def give(self, block: Block, hazards: list[Work]) -> None:
        """Take a block back; whoever gets it next waits for `hazards`."""
        if block.buffer is not self._buffer:
            self._spilt -= block.n_bytes
            return
        self._count += 1
        block.freed_at, block.hazards = self._count, hazards
        self._free.append(block)

    def _oldest(self, n_bytes: int) -> Block | None:
        # Appended in order of being freed, and splitting keeps a block's age: the first that fits is the oldest.
        return next((block for block in self._free if block.n_bytes >= n_bytes), None)

    def _merge(self) -> None:
        """Join free neighbours; a joined block is as old as its youngest part."""
        self._free.sort(key=lambda block: block.start)
        merged: list[Block] = []
        for block in self._free:
            last = merged[-1] if merged else None
            if last is not None and last.start + last.n_bytes == block.start:
                last.n_bytes += block.n_bytes
                last.freed_at = max(last.freed_at, block.freed_at)
                last.hazards = [*last.hazards, *block.hazards]
                last.views = None
            else:
                merged.append(block)
        self._free = sorted(merged, key=lambda block: block.freed_at)
