"""What shared memory added to the time of a run's lanes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.base.quantities import USER_REF
from sim.figures import Contention, Slowed
from sim.machine.memory_law import BY_LAW, SLOWS

if TYPE_CHECKING:
    from sim.engine.report import Report
    from sim.profiles.hardware import Hardware

LAW = "law"
SET = "set"
LEAST_FRAC = 1e-9
"""Of a lane's time: less is rounding of ends that were worked out twice."""


def contention(report: Report, hw: Hardware) -> Contention | None:
    """Of a run that is over; None where nothing was slowed."""
    figures, busy_s = report.lanes.figures, report.lanes.busy_s
    if figures is None or not figures.cost.sharing.on:
        return None
    sharing = figures.cost.sharing
    added_s = {
        "cpu": figures.cpu_s[sharing.q_cpu],
        "h2d": figures.copies_slowed_s,
        "d2h": figures.write_backs_slowed_s,
        "gpu": figures.gpu_s[sharing.q_gpu],
        "nvme": figures.reads_slowed_s,
    }
    slowed: dict[str, Slowed | None] = {}
    for activity, seconds in added_s.items():
        lanes = [spent_s for lane, spent_s in busy_s.items() if lane.rstrip("0123456789") == activity]
        whole_s = report.n_machines * math.fsum(lanes)
        by = ", ".join(_reckoned(activity, hw))
        slowed[activity] = Slowed(seconds, seconds / whole_s, by) if seconds > LEAST_FRAC * whole_s else None
    return Contention(**slowed) if any(slowed.values()) else None


def _reckoned(activity: str, hw: Hardware) -> list[str]:
    """By what an activity was slowed: the law, or where a term's figure is from; a term of 0 slows nothing."""
    found: list[str] = []
    for term in SLOWS[activity]:
        figure = hw.contention.stated.get(term)
        if figure is None and term in BY_LAW:
            found.append(LAW)
        elif figure is not None and figure.value > 0.0:
            found.append(SET if figure.ref == USER_REF else figure.source)
    return list(dict.fromkeys(found)) or [LAW]  # what is copied back, or read, shares host memory by law
