"""What is timed alone on the real machine's lanes, copies and unpacking; and what copies both ways cost each other, as
when a policy swaps experts and writes back the one that leaves.

Swaps are timed where they happen, in runs of `mixtral_offloading` on the lanes of the real machine; what a write-back
takes alone, which such runs hardly show, is that of a copy up times the ratio of both alone on the same lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.stats import measured, summarise
from sim.real.devices.work import COMPUTE, D2H, H2D, Work
from sim.real.weights.forms import BITS, pack

if TYPE_CHECKING:
    from sim.real.devices.lanes import Lanes
    from sim.real.machine.decoder import Decoder
    from sim.real.weights.weights import Weights

ROUNDS = 6
COPIES = 12  # in a row
SLOTS = 4
PLACES = 4  # of packed experts, in turn, so that the bytes are not those just read
TIMES = 16
ENOUGH = 30  # samples below which a coefficient is not given
MOST = 1.0
Pairs = Sequence[tuple[float, float]]  # seconds a copy took, and seconds of them beside the other way


def alone(lanes: Lanes, weights: Weights, decoder: Decoder, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of single copies of whole experts, `up` and `down`, each alone on its way while experts are computed."""
    size, hidden = int(weights.experts[0][0].numel()), weights.embedding.shape[1]
    device, home = lanes.device.on_device(SLOTS * size), lanes.device.on_host(SLOTS * size)
    experts = [raw for row in weights.experts for raw in row]
    place = lanes.device.place
    x = lanes.torch.zeros((1, hidden), dtype=weights.dtype, device=place)
    values = experts[0].view(weights.dtype)[: 3 * weights.rows * hidden].view(3, weights.rows, hidden).to(place)

    def slot(buffer: Any, index: int) -> Any:
        return buffer[index % SLOTS * size : (index % SLOTS + 1) * size]

    def copies(lane: int, first: int) -> list[Work]:
        found = []
        for index in range(first, first + COPIES):
            source, target = (
                (experts[index % len(experts)], slot(device, index))
                if lane == H2D
                else (slot(device, index), slot(home, index))
            )
            found.append(Work(lane, "duplex", partial(target.copy_, source, non_blocking=True)))
        return found

    n_beside = COPIES
    found: dict[str, list[float]] = {"up": [], "down": []}
    for number in range(rounds + 1):  # the first one touches memory, and tells how many experts last as long
        for name, lane in (("up", H2D), ("down", D2H)):
            works = copies(lane, number * COPIES)
            beside = [Work(COMPUTE, "duplex", lambda: decoder.ffn(x, values)) for _ in range(n_beside)]
            for index in range(max(n_beside, COPIES)):
                for queue in (works, beside):
                    if index < len(queue):
                        lanes.submit(queue[index])
            lanes.settle()
            lanes.finished.clear()
            if number:
                found[name] += [work.end_s - work.start_s for work in works]
            each_s = float(np.median([work.end_s - work.start_s for work in beside]))
            n_beside = max(COPIES, min(4096, int(1.2 * (works[-1].end_s - works[0].start_s) / max(each_s, 1e-6))))
    return found


def unpacking(lanes: Lanes, weights: Weights) -> Iterator[tuple[int, float]]:
    """(bits of a value, seconds) of unpacking whole experts of lower precisions, which real runs do before each use."""
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


def ratio_down(samples: Mapping[str, list[float]]) -> float | None:
    """What a copy down takes alone, in copies up; None without samples."""
    if len(samples.get("up", [])) < 3 or len(samples.get("down", [])) < 3:
        return None
    return summarise(samples["down"]).median / summarise(samples["up"]).median


def slowdown(pairs: Pairs, alone_s: float) -> dict[str, Any] | None:
    """Extra time of copies while the other way is busy, as a figure; None where too little was seen.

    Seconds outside the overlap do their own worth of work, those inside 1 / (1 + c) of it, and together they do what
    a copy alone takes. So c = overlap / (n x alone - seconds outside) - 1, over all copies but the 2.5 % that took
    longest. Two copies share what one has alone, so that neither takes more than twice as long: 0 to 1.
    """
    pairs = sorted(pairs)[: len(pairs) - int(0.025 * len(pairs))]
    beside_s = math.fsum(beside for _, beside in pairs)
    outside_s = math.fsum(took - beside for took, beside in pairs)
    done_s = len(pairs) * alone_s - outside_s  # work done beside the other way
    if len(pairs) < ENOUGH or beside_s < 0.1 * len(pairs) * alone_s:
        return None
    value = MOST if done_s <= 0.0 else min(MOST, max(0.0, beside_s / done_s - 1.0))
    found = summarise([took for took, _ in pairs])
    note = f"in swaps; {beside_s / (beside_s + outside_s):.0%} of their time beside the other way"
    return measured(value, found.noise_frac * (1.0 + value), found.n, note, "lanes")


def rate_down(samples: Mapping[str, list[float]], up: dict[str, Any]) -> dict[str, Any] | None:
    """Bandwidth of write-backs: that of copies `up` in runs, by what both take alone."""
    ratio = ratio_down(samples)
    if ratio is None:
        return None
    found = summarise(samples["down"])
    value = up["value"] / ratio
    note = "that of copies to the device in runs, by the ratio of both alone"
    return measured(value, value * found.noise_frac, found.n, note, "lanes")
