"""Whether cards that are compared come with unlike hosts: what is said of cards is then said of CPU and RAM, too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.base.units import show_ram
from sim.profiles.hardware import CPUS, load_hardware
from sim.profiles.overrides import grouped

if TYPE_CHECKING:
    from sim.options import RunSpec

MOST_NAMED = 4


class Host(NamedTuple):
    """What stands beside a card."""

    cpu: str
    ram_bytes: int


class Machine(NamedTuple):
    """A card as it was asked for. ram_bytes: host memory, where it was given."""

    hw: str
    overrides: Mapping[str, object]
    ram_bytes: int | None = None


def of_specs(specs: Iterable[RunSpec]) -> str:
    """The line of runs as they were asked for."""
    return unlike_hosts(
        Machine(spec.hw, spec.set | ({} if spec.cpu is None else {"hw.cpu": spec.cpu}), spec.ram) for spec in specs
    )


def unlike_hosts(machines: Iterable[Machine]) -> str:
    """A line; nothing where all cards have the same host. A profile that is not at hand (any more) says nothing."""
    hosts: dict[str, set[Host]] = {}
    cards: dict[Host, list[str]] = {}
    known: set[tuple[str, str, int | None]] = set()
    for one in machines:
        own = {key: value for key, value in one.overrides.items() if key.startswith("hw.")}
        asked = one.hw, json.dumps(own, sort_keys=True), one.ram_bytes
        if asked in known:
            continue
        known.add(asked)
        try:
            hw = load_hardware(one.hw, grouped(own).hw)
        except BadInput:
            continue
        host = Host(hw.cpu.id, int(hw.cpu.memory_bytes.value) if one.ram_bytes is None else one.ram_bytes)
        hosts.setdefault(hw.id, set()).add(host)
        cards.setdefault(host, []).append(hw.id)
    if len({frozenset(found) for found in hosts.values()}) < 2:
        return ""
    said = [
        f"{', '.join(dict.fromkeys(names))} with {host.cpu} and {show_ram(host.ram_bytes)} of RAM"
        for host, names in cards.items()
    ]
    less = f"; and {len(said) - MOST_NAMED} more hosts" if len(said) > MOST_NAMED else ""
    cpu = next((host.cpu for host in cards if host.cpu in bundled(CPUS, ".yaml")), "ID")
    return f"unlike hosts: {'; '.join(said[:MOST_NAMED])}{less}; --set hw.cpu={cpu} puts one CPU beside all"
