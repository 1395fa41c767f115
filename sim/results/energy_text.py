"""Joules as people read them: a token's, with their range, by part of the machine, and what they rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.units import show_frac, show_joules
from sim.profiles.hardware import MACHINE
from sim.results.grounds import TOP_FIGURES, show_ground

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.results.record import Result

LANES = {
    "gpu_waiting": "GPU waiting",
    "gpu_memory_bound": "GPU bound by memory",
    "gpu_compute_bound": "GPU bound by arithmetic",
    "cpu_waiting": "CPU waiting",
    "cpu_busy": "CPU on experts",
    "memory_waiting": "host memory waiting",
    "memory_busy": "host memory at work",
    "drive_waiting": "drive waiting",
    "drive_busy": "drive reading",
    "rest": "the rest",
}


def at_once(result: Result) -> str:
    """A token's joules in a few words, for the verdict; empty where nobody counts them."""
    found = result.energy
    if found is None:
        return ""
    each_j = found.joules_per_token
    return (
        f", {'joules not known' if each_j is None else f'{show_joules(each_j)} of {_whose(result)} per output token'}"
    )


def unknown(result: Result) -> str:
    """Why a run that was asked for joules has none, and what would help; empty where it has."""
    if result.energy is None or not result.energy.missing:
        return ""
    blocks = " and ".join(f"hw.{block}" for block in result.energy.missing)
    return f"not known: {result.hw} has no {blocks}; give its watts in a profile of yours (docs/energy.md)"


def joules(result: Result) -> Iterator[tuple[str, str]]:
    """(title, text) of each line; none where no energy is counted."""
    found = result.energy
    if found is None:
        return
    if why := unknown(result):
        yield "energy", why
        return
    if found.joules_per_token is None or found.provenance is None:
        return
    if not found.energy_j:
        yield "energy", "0 J: every watt that was counted is 0"
        return
    ends = found.range_joules_per_token
    band = "" if ends is None else f" ({show_joules(ends[0])} to {show_joules(ends[1])}, were all figures off at once)"
    each = f"{show_joules(found.joules_per_token)} of {_whose(result)} per output token, prefill included{band}"
    yield "energy", f"{each}; {found.mean_w:.0f} W on average"
    largest = sorted(found.lanes_j.items(), key=lambda item: -item[1])
    shares = ((LANES[lane], show_frac(lane_j / found.energy_j)) for lane, lane_j in largest)
    yield "", ", ".join(f"{name} {share}" for name, share in shares if share != show_frac(0.0))
    grounds = ", ".join(f"{show_frac(share)} {source}" for source, share in found.provenance.by_source().items())
    without = "" if "rest" in found.lanes_j else _left_out(found.counted)
    yield "", f"derived: watts x seconds; {grounds} watts, by share of joules{without}; the largest:"
    for figure in found.provenance.figures[:TOP_FIGURES]:
        yield "", show_ground(figure)


def _whose(result: Result) -> str:
    counted = result.energy is not None and result.energy.counted
    what, several = ("machine", False) if counted == MACHINE else ("GPU", result.gpus > 1)
    return f"the {what}s" if several or result.replicas is not None else f"the {what}"


def _left_out(counted: str) -> str:
    return ", board, fans and losses left out" if counted == MACHINE else ""
