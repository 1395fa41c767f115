"""Every case of `moesim validate`, on lanes and weights that are opened once: what is kept, printed and resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.interrupts import answered
from sim.base.json import finite
from sim.figures import SCHEMA
from sim.real.devices import environment
from sim.real.devices.lanes import cores
from sim.real.order import order
from sim.real.requirements import prepare_real
from sim.real.run import opened
from sim.real.validate import Case, compared, judge, summary

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.real.comparison import Comparison, Report


@dataclass(frozen=True)
class Asked:
    """What is compared: every case on one device, so many times in turn. earlier: comparisons that need not be made."""

    specs: Sequence[RunSpec]
    place: str
    precision_given: bool
    outputs: int | None
    repeat: int
    tolerance_frac: float
    earlier: Sequence[Comparison] = ()


def validate(
    asked: Asked, tell: Callable[[str], object], note: Callable[[str], object], keep: Callable[[Report], object]
) -> Report:
    """Every case in both worlds, on lanes and weights that are opened once.

    Args:
        tell: told what runs. note: told what has to be known. keep: told of all there is after each run.

    Raises:
        BadInput: what cannot be carried out, before anything runs.
        KeyboardInterrupt: before the first case was compared; later ones end the report, which says so.
    """
    setups = []
    for spec in asked.specs:
        setups.append(prepare_real(spec, asked.place, asked.precision_given))
        setups[-1].close()
    for text in setups[0].notes():
        tell(text)
    largest = max(setups, key=lambda setup: sum(setup.memory.expert_bytes))
    cases = [Case(setup.spec, asked.outputs) for setup in setups]
    with opened(largest, asked.place, largest.spec.seed) as (lanes, weights):
        if largest.hw.name != lanes.title:
            note(
                f"note: the profile {largest.hw.id} describes another device than {lanes.title}, so errors are "
                "not the simulator's; `calibrate` writes one of this device"
            )
        of_all = {"device": lanes.title, "machine": environment.machine(), "distinct_host_experts": weights.distinct}
        for case in cases:
            known = [c for c in asked.earlier if c.get("case") == case.asked and c["device"] == lanes.title]
            case.kept = next((c for c in known if len(c["repeats"]["ttft_s"]) >= asked.repeat), None)
        todo = [case for case in cases if case.kept is None]
        try:
            for case in todo:
                case.predict()
            for number in range(asked.repeat):  # in turn, so that a machine that drifts does so for all of them
                for case in todo:
                    of = f", run {number + 1} of {asked.repeat}" if asked.repeat > 1 else ""
                    tell(f"{case.spec.policy}, cache {case.spec.cache or 'default'}{of} ...")
                    case.carry_out(lanes, weights)
                    keep(_report(asked, cases, of_all, interrupted=True))
        except KeyboardInterrupt:
            if not any(case.kept or case.reals for case in cases):
                raise
            answered()
            return _report(asked, cases, of_all, interrupted=True)
    return _report(asked, cases, of_all, interrupted=False)


def _report(asked: Asked, cases: Sequence[Case], of_all: dict[str, Any], interrupted: bool) -> Report:
    """All that was compared so far."""
    comparisons: list[Comparison] = [
        one.kept or {**compared(one), "case": one.asked} for one in cases if one.kept or one.reals
    ]
    found: Report = finite(
        {
            "schema": SCHEMA,
            **of_all,
            "cores": cores(),
            "profile": Path(hw).stem if (hw := cases[0].spec.hw).endswith((".yaml", ".yml")) else hw,
            "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "tolerance_frac": asked.tolerance_frac,
            "comparisons": comparisons,
            "order": order(comparisons),
            **summary(comparisons),
            "repeats": asked.repeat,
            "interrupted": interrupted,
            "wrong": [
                f"{c['policy']}, cache {c['case']['cache'] or 'default'}: {text}"
                for c in comparisons
                for text in judge(c, asked.tolerance_frac)
            ],
        }
    )
    return found
