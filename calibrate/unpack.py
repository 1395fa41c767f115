"""What unpacking an expert of a lower precision takes on the compute lane, which real runs do before each use of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from sim.real.devices.work import COMPUTE, Work
from sim.real.weights.forms import BITS, pack

if TYPE_CHECKING:
    from sim.real.devices.lanes import Lanes
    from sim.real.weights.weights import Weights

PLACES = 4  # in turn, so that the bytes are not those just read
TIMES = 16


def measure(lanes: Lanes, weights: Weights) -> Iterator[tuple[int, float]]:
    """(bits of a value, seconds) of whole experts, one after the other."""
    hidden, n_rows = int(weights.embedding.shape[1]), 3 * weights.rows
    expert = weights.experts[0][:1]
    for precision, bits in BITS.items():
        if hidden * bits % 8:
            continue
        form = pack(precision, expert, weights.dtype, hidden, n_rows, lanes.device)
        packed = [form.buffers[0].to(lanes.device.place, copy=True) for _ in range(PLACES)]
        works = [Work(COMPUTE, "unpack", partial(form.unpack, packed[i % PLACES], 0, 0, n_rows)) for i in range(TIMES)]
        for work in works:
            lanes.submit(work)
        lanes.settle()
        lanes.finished.clear()
        yield from ((bits, work.end_s - work.start_s) for work in works[PLACES:])
