"""`--pcie gen5x16`: what copies reach over a PCIe link of a generation and width, as figures with source and range.

Measured figures are those of bundled cards on such a link; of widths and generations that nobody here has measured, the
share of the theoretical rate that the nearest measured ones reach. On another card both are assumed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from sim.base.errors import BadInput, did_you_mean
from sim.base.quantities import Quantity
from sim.profiles.hardware import Bus, Hardware, Link

LANE_BYTES_PER_S = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8, 6: 64e9 * 236 / 256 / 8}
"""One lane each way, after encoding: 128b/130b, and from generation 6 on 236 of a flit's 256 bytes."""
WIDTHS = (16, 8, 4)
LINKS = tuple(f"gen{generation}x{lanes}" for generation in LANE_BYTES_PER_S for lanes in WIDTHS)


class Reached(NamedTuple):
    """A rate that cards of such a link have reached with large pinned copies, in bytes/s. Of x8, where one card was
    measured once, the low end is the share that x16 falls to."""

    value: float
    low: float
    high: float
    ref: str
    who: str


SOURCES = {
    "dask98": "github.com/rapidsai/dask-cuda/issues/98 (V100 PCIe3: pageable 5-6, pinned 11-12, max 12.35)",
    "gears82": "github.com/mpicbg-scicomp/gearshifft/pull/82 (P100: 12.15/12.89; wrong NUMA node 3.78/2.54)",
    "nvbw15": "github.com/NVIDIA/nvbandwidth/issues/15 (v0.2, 8x RTX 4090)",
    "nvbw53": "github.com/NVIDIA/nvbandwidth/issues/53 and forums.developer.nvidia.com t/352186 (A100-SXM4-80GB)",
    "oxide": "github.com/NVlabs/cuda-oxide/pull/976 (RTX 4090 pageable/pinned size sweep, median of 10)",
    "fid7": "github.com/efeslab/fiddler/issues/7 (RTX 4090)",
    "clp205": "github.com/krrishnarraj/clpeak/issues/205 (RTX 4060, gen4 x8)",
    "tiny29": "github.com/tinygrad/open-gpu-kernel-modules/issues/29 (8x RTX 5090, Xeon 8458P, nvbandwidth)",
    "imp": "github.com/kekzl/imp issues/pulls #1377, #1409, #2063 (RTX 5090, 9800X3D)",
    "nvblog": "NVIDIA nvbandwidth tutorial/blog sample (55.63 GB/s H2D CE; device not named)",
    "warp": "sqliteai/warp@7f1fbba docs/LEARNED.md (RTX 5060 Ti, gen5 x8, Zen 5)",
}
_UP = {
    (3, 16): Reached(1.2e10, 1.1e10, 1.235e10, "dask98, gears82", "V100, P100"),
    (4, 16): Reached(2.5e10, 2.25e10, 2.65e10, "nvbw15, oxide, fid7, nvbw53", "RTX 4090, A100"),
    (4, 8): Reached(1.32e10, 1.125e10, 1.327e10, "clp205", "RTX 4060"),
    (5, 16): Reached(5.5e10, 5.1e10, 5.64e10, "tiny29, imp, nvblog", "RTX 5090, H100"),
    (5, 8): Reached(2.85e10, 2.55e10, 2.88e10, "warp", "RTX 5060 Ti"),
}
_DOWN = {
    (3, 16): Reached(1.25e10, 1.1e10, 1.289e10, "dask98, gears82", "V100, P100"),
    (4, 16): Reached(2.6e10, 2.54e10, 2.71e10, "nvbw15, oxide", "RTX 4090"),
    (4, 8): Reached(1.32e10, 1.125e10, 1.327e10, "clp205", "RTX 4060"),
    (5, 16): Reached(5.6e10, 5.28e10, 5.73e10, "tiny29", "RTX 5090"),
    (5, 8): Reached(2.85e10, 2.55e10, 2.88e10, "warp", "RTX 5060 Ti"),
}


def bus_of(word: str) -> Bus:
    """`gen5x16`, `PCIe 4.0 x8` -> generation, lanes, theoretical rate. Raises BadInput for any other."""
    plain = re.sub(r"^pcie(gen)?", "gen", re.sub(r"[\s_-]", "", word.lower()).replace(".0", ""))
    if plain not in LINKS:
        raise BadInput(
            f"--pcie, got {word!r}: no such link; {did_you_mean(plain, LINKS)} (`moesim hw --links` lists them)"
        )
    generation, lanes = (int(number) for number in re.findall(r"\d+", plain))
    return Bus(generation=generation, lanes=lanes, theoretical_bytes_per_s=LANE_BYTES_PER_S[generation] * lanes)


def bandwidth(bus: Bus, up: bool) -> Quantity:
    """What large pinned copies reach on a link: measured elsewhere, or a measured share of its theoretical rate."""
    table, key = _UP if up else _DOWN, (bus.generation, bus.lanes)
    if (known := table.get(key)) is not None:
        return Quantity(
            value=known.value,
            source="assumed",
            ref=known.ref,
            low=known.low,
            high=known.high,
            note=f"gen{bus.generation} x{bus.lanes} class, measured on {known.who}",
        )
    near = min(bus.generation, 5)
    whole = table[near, 16]
    peers = [
        (LANE_BYTES_PER_S[g] * lanes, row) for (g, lanes), row in table.items() if g == near or bus.generation == 6
    ]
    share = whole.value / (LANE_BYTES_PER_S[near] * 16)
    least, most = min(row.low / rate for rate, row in peers), max(row.high / rate for rate, row in peers)
    of = f"derived: {share:.3f} of {bus.theoretical_bytes_per_s / 1e9:.1f} GB/s, as {whole.who} reach on gen{near} x16"
    rest = "; none measured" if bus.generation == 6 else ""
    theory = bus.theoretical_bytes_per_s
    return Quantity(
        value=share * theory, source="assumed", ref=whole.ref, low=least * theory, high=most * theory, note=of + rest
    )


def relinked(hw: Hardware, word: str, given: set[str]) -> Hardware:
    """The profile with its card on another link: bandwidth of copies, and of what goes over the same lanes.

    A copy's latency stays: it is the driver's and the host's. The card's own link leaves everything as it is.

    Args:
        given: paths that `--set` replaced, which stay.

    Raises:
        BadInput: no such link, or a machine that has none.
    """
    bus = bus_of(word)
    if hw.one_memory:
        raise BadInput(f"--pcie, got {word!r} on {hw.id}: CPU and GPU have one memory there, and no link; leave it out")
    own = hw.gpu.link
    if own is not None and (own.generation, own.lanes) == (bus.generation, bus.lanes):
        return hw
    new: dict[str, Link] = {}
    for name, up in (("h2d", True), ("d2h", False)):
        pinned = _no_faster_than_host(bandwidth(bus, up), hw)
        new[name] = _with(hw, name, pinned, given)
        slow = getattr(hw, f"{name}_pageable").bandwidth_bytes_per_s
        if slow.value > pinned.value:
            new[f"{name}_pageable"] = _with(hw, f"{name}_pageable", pinned, given)
    peer = hw.p2p.bandwidth_bytes_per_s
    if own is None or peer.value <= own.theoretical_bytes_per_s:  # over PCIe; NVLink is faster, and another link
        ratio = new["h2d"].bandwidth_bytes_per_s.value / hw.h2d.bandwidth_bytes_per_s.value
        scaled = Quantity(value=peer.value * ratio, source="assumed", note="in proportion to host to device")
        new["p2p"] = _with(hw, "p2p", scaled, given)
    return msgspec.structs.replace(
        hw, **new, gpu=msgspec.structs.replace(hw.gpu, link=bus), sources={**SOURCES, **hw.sources}
    )


def _with(hw: Hardware, name: str, figure: Quantity, given: set[str]) -> Link:
    link: Link = getattr(hw, name)
    path = f"{name}.bandwidth_bytes_per_s"
    if any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in given):
        return link
    return msgspec.structs.replace(link, bandwidth_bytes_per_s=figure)


def _no_faster_than_host(figure: Quantity, hw: Hardware) -> Quantity:
    """Copies come out of host memory."""
    host = hw.cpu.memory_bandwidth_bytes_per_s.value
    if figure.value <= host:
        return figure
    return msgspec.structs.replace(
        figure,
        value=host,
        low=min(figure.low or host, host),
        high=None,
        note=f"no faster than the host's memory; else {figure.note}",
    )
