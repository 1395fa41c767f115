"""Drives that hold what host memory does not: `--drive gen4x4` names one, with what was measured on such drives.

A profile may have one of its own (block `drive`), which `--drive own` takes; `--set hw.drive.*` changes single figures.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sim.base.errors import BadInput, did_you_mean
from sim.base.quantities import Quantity


class DrivePower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drive: between reads, and while it reads."""

    waiting_w: Quantity
    busy_w: Quantity


class Drive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reads of one drive; `sim.machine.drive_prices` has the law.

    latency_s: of a request, before its bytes flow. request_bytes_per_s: of a single request. bandwidth_bytes_per_s: of
    large requests, enough of them at a time. request_s: what each costs the drive beside its bytes. power:
    for `--set sim.energy`. measured: the drive that its figures are of.
    """

    id: str
    bandwidth_bytes_per_s: Quantity
    latency_s: Quantity
    request_bytes_per_s: Quantity
    request_s: Quantity
    power: DrivePower | msgspec.UnsetType = msgspec.UNSET
    measured: str = ""
    note: str = ""


OWN = "own"
SOURCES = {
    "crow30": "github.com/nibor1896/Crow/issues/30 (68 KB blocks: 776.9 MB/s at depth 1, 5,862.1 at 8, 9,003.9 at 64; "
    "4 MB blocks, one thread: 3,529.6) and issues/39 (12.75 MiB blocks at depth 8: 10,523.9 MB/s)",
    "gx10": "github.com/0xBakeer/deepseek-v41-flash-spark/issues/2 (Phison E27T, PCIe 4 x4, O_DIRECT: 64 KiB 0.49 GB/s "
    "at depth 1, 3.90 at 128; 256 KiB 1.06 and 5.88; 18 MiB 6.4)",
    "anand970": "anandtech.com/show/12670 (Samsung 970 EVO: 6.2 W at most in power state 0)",
    "storedbits": "storedbits.com/?p=134 (NVMe, PCIe 4: 1 to 3 W idle, 2 to 8 reading; PCIe 5: 1 to 3 and 4 to 10)",
    "kitguru970": "kitguru.net review of the Samsung 970 EVO 2TB (sequential 3,402 MB/s; 128 KB at depth 2: 2,594)",
}
WAITS_W = Quantity(value=1.5, source="assumed", ref="storedbits", low=0.5, high=3.0, note="class value: 1 to 3")
DRIVES = {
    "gen3x4": Drive(
        id="gen3x4",
        measured="a Samsung 970 EVO",
        bandwidth_bytes_per_s=Quantity(
            value=3.4e9, source="assumed", ref="kitguru970", low=2.6e9, high=3.5e9, note="measured on a 970 EVO"
        ),
        latency_s=Quantity(
            value=6.3e-5, source="assumed", ref="kitguru970", note="derived: 128 KB at depth 2, less its bytes"
        ),
        request_bytes_per_s=Quantity(value=3.4e9, source="assumed", note="no measurement found: as its bandwidth"),
        request_s=Quantity(value=5e-6, source="assumed", note="no measurement found: as gen4x4"),
        power=DrivePower(
            waiting_w=WAITS_W,
            busy_w=Quantity(value=5.0, source="assumed", ref="anand970, storedbits", low=2.0, high=6.2),
        ),
    ),
    "gen4x4": Drive(
        id="gen4x4",
        measured="a Phison E27T without DRAM",
        bandwidth_bytes_per_s=Quantity(
            value=6.4e9, source="assumed", ref="gx10", low=5.9e9, high=7.4e9, note="18 MiB reads on a DRAM-less E27T"
        ),
        latency_s=Quantity(value=9.6e-5, source="assumed", ref="gx10", note="derived: 64 and 256 KiB at depth 1"),
        request_bytes_per_s=Quantity(value=1.73e9, source="assumed", ref="gx10", note="derived: the same two"),
        request_s=Quantity(
            value=5e-6, source="assumed", ref="gx10", low=3.6e-6, high=6.6e-6, note="derived: both sizes at depth 128"
        ),
        power=DrivePower(
            waiting_w=WAITS_W, busy_w=Quantity(value=6.0, source="assumed", ref="storedbits", low=2.0, high=8.0)
        ),
    ),
    "gen5x4": Drive(
        id="gen5x4",
        measured="nibor1896/Crow's drive",
        bandwidth_bytes_per_s=Quantity(
            value=1.052e10, source="assumed", ref="crow30", low=9.0e9, high=1.45e10, note="12.75 MiB reads at depth 8"
        ),
        latency_s=Quantity(value=7.1e-5, source="assumed", ref="crow30", note="derived: 68 KB and 4 MB, one at a time"),
        request_bytes_per_s=Quantity(value=3.75e9, source="assumed", ref="crow30", note="derived: the same two"),
        request_s=Quantity(value=1.1e-6, source="assumed", ref="crow30", note="derived: 68 KB at depth 64"),
        power=DrivePower(
            waiting_w=WAITS_W, busy_w=Quantity(value=9.0, source="assumed", ref="storedbits", low=4.0, high=11.0)
        ),
    ),
}
"""Measured on one drive of each link, so assumed of another."""


def drive_of(word: str) -> Drive:
    """The drive of a word. Raises BadInput."""
    found = DRIVES.get(word)
    if found is None:
        raise BadInput(f"--drive, got {word!r}: no such drive; {did_you_mean(word, [*DRIVES, OWN])} (see docs/nvme.md)")
    return found


def compared(words: Iterable[str]) -> str:
    """Of which drives the figures are that are compared, in a line; nothing for fewer than two bundled ones."""
    told = {word: drive for full in words if (drive := DRIVES.get(word := full.split(":")[0]))}
    if len(told) < 2:
        return ""
    of = ", ".join(f"{word} {drive.measured}" for word, drive in told.items())
    return f"drives, each as one was measured: {of}; others of a generation differ (docs/nvme.md)"
