"""`moesim hw`: hardware profiles, every figure with its origin."""

from __future__ import annotations

import json
from typing import Any

import click

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.base.quantities import quantities, show_figure
from sim.base.tables import fold, prose, render, table
from sim.base.units import RAM, show_bytes, show_count, show_ram, show_rate
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions
from sim.profiles import find as profiles
from sim.profiles.hardware import CPUS, GPUS, Bus, Hardware, Quantity, load_cpu, load_hardware
from sim.profiles.overrides import grouped, parse_set


@click.command(cls=UniqueOptions)
@click.argument("name", required=False, metavar="[NAME|FILE]")
@click.option("--set", "settings", multiple=True, metavar="hw.KEY=VALUE", help="Change a figure, e.g. hw.cpu=ID.")
@click.option("--pcie", "link", metavar="WORD", help="Put the card on another link: gen3x4 to gen6x16.")
@click.option("--links", is_flag=True, help="List the words of --pcie: what copies reach, and who measured it.")
@click.option("--cpus", is_flag=True, help="List the CPUs that --set hw.cpu=ID puts beside a card.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list without NAME).")
@click.option(
    "--yaml", "as_yaml", is_flag=True, help="Print NAME's file without aliases and note: a start for your own."
)
def command(
    name: str | None, settings: tuple[str, ...], link: str | None, links: bool, cpus: bool, as_json: bool, as_yaml: bool
) -> None:
    """List hardware profiles, or show one: an id, an alias, or a profile file."""
    if links or cpus:
        if (links and cpus) or name is not None or settings or link is not None or as_json or as_yaml:
            word, what = ("--links", "the words of --pcie") if links else ("--cpus", "what --set hw.cpu takes")
            raise BadInput(f"{word}, got something beside it: it lists {what}; give it alone")
        say(_links() if links else _cpus(), nl=False)
        return
    changes = grouped(parse_set(settings))
    if changes.model or changes.engine or changes.policy or changes.policies:
        raise BadInput("--set, got a key of something else: only hw.* belongs here; write e.g. --set hw.cpu=xeon-8358p")
    if as_yaml:
        alone = not (settings or link or as_json)
        click.echo(profiles.as_a_start(GPUS, "hardware profile", name, alone=alone), nl=False)
        return
    if name is None:
        if link is not None:
            raise BadInput("--pcie, got it without a profile: name one, e.g. moesim hw rtx3090 --pcie gen5x16")
        if settings:
            raise BadInput("--set, got it without a profile: name one, e.g. moesim hw rtx3090 --set hw.cpu=xeon-8358p")
        found = [load_hardware(key) for key in bundled(GPUS, ".yaml")]
        click.echo(json.dumps([_summary(hw) for hw in found], indent=2) if as_json else fold(_list(found)), nl=as_json)
        return
    hardware = load_hardware(name, changes.hw, link)
    if as_json:
        import msgspec

        click.echo(json.dumps(msgspec.to_builtins(hardware), indent=2))
    else:
        say(_page(hardware), nl=False)


def _summary(hw: Hardware) -> dict[str, Any]:
    return {
        "id": hw.id,
        "name": hw.name,
        "aliases": list(hw.aliases),
        "vram_bytes": hw.vram_bytes.value,
        "h2d_bytes_per_s": hw.h2d.bandwidth_bytes_per_s.value,
        "h2d_source": hw.h2d.bandwidth_bytes_per_s.source,
        "memory_bandwidth_bytes_per_s": hw.gpu.memory_bandwidth_bytes_per_s.value,
        "cpu": hw.cpu.id,
        "figures": _tally(hw),
    }


def _tally(hw: Hardware) -> dict[str, int]:
    counts = dict.fromkeys(("measured", "datasheet", "assumed"), 0)
    for _, figure in quantities(hw):
        counts[figure.source] += 1
    return counts


def _list(found: list[Hardware]) -> str:
    rows = table("id", "VRAM", "PCIe", "H2D pinned", "", "GPU memory", "", "bf16", "", "CPU")
    for hw in found:
        bf16, up = hw.gpu.flops_per_s.get("bf16"), hw.h2d.bandwidth_bytes_per_s
        memory = hw.gpu.memory_bandwidth_bytes_per_s
        link = ("one memory", "-", "") if hw.one_memory else (_bus(hw.gpu.link), show_rate(up.value), up.source)
        flops = (_show("flops_per_s", bf16.value), bf16.source) if bf16 else ("-", "")
        size, reads = show_bytes(hw.vram_bytes.value), (show_rate(memory.value), memory.source)
        rows.add_row(hw.id, size, *link, *reads, *flops, hw.cpu.id)
    return render(rows) + f"{len(found)} profiles. `moesim hw NAME` shows every figure, its source, and aliases.\n"


def _links() -> str:
    from sim.profiles.pcie import LINKS, SOURCES, bandwidth, bus_of

    rows = table("link", "in theory", "to the GPU", "range", "back", "range", "note")
    refs: dict[str, None] = {}
    prose(rows, -1)
    for word in LINKS:
        bus = bus_of(word)
        up, down = (bandwidth(bus, towards) for towards in (True, False))
        cells = [cell for figure in (up, down) for cell in (show_rate(figure.value), _range("_bytes_per_s", figure))]
        rows.add_row(word, show_rate(bus.theoretical_bytes_per_s), *cells, f"{up.note} [{up.ref}]")
        refs |= dict.fromkeys((*up.refs, *down.refs))
    told = "All of them assumed on another card than those named; a card's own link leaves its profile's figures.\n"
    return render(rows) + told + "".join(f"[{key}] {SOURCES[key]}\n" for key in refs)


def _cpus() -> str:
    rows = table("id", "cores", "experts are read at", "", "products", "", "note")
    prose(rows, -1)
    found = [load_cpu(key) for key in bundled(CPUS, ".yaml")]
    for cpu in found:
        read, flops = cpu.memory_bandwidth_bytes_per_s, cpu.flops_per_s
        rates = show_rate(read.value), read.source, _show("flops_per_s", flops.value), flops.source
        rows.add_row(cpu.id, str(cpu.n_cores), *rates, cpu.note)
    told = "`--set hw.cpu=ID` puts one beside a card, `--set hw.cpu.memory_bytes=64GB` says how much memory it has"
    return render(rows) + f"{len(found)} CPUs. {told}.\n"


def _page(hw: Hardware) -> str:
    counts = ", ".join(f"{count} {source}" for source, count in _tally(hw).items())
    bus, up = hw.gpu.link, hw.h2d.bandwidth_bytes_per_s
    copies = f"{show_rate(up.value)} host to device ({up.source}), {show_bytes(hw.vram_bytes.value)} of memory"
    pcie = f"PCIe {_bus(bus)}{f' ({show_rate(bus.theoretical_bytes_per_s)} in theory)' if bus else ''}"
    if hw.one_memory:
        copies, pcie = f"{show_bytes(hw.vram_bytes.value)} of memory for CPU and GPU", "no link"
    head = [
        f"{hw.name} ({hw.id}): {copies}; figures: {counts}",
        f"{pcie}, {show_count(hw.gpu.n_sms, 'SM')}, {show_bytes(hw.gpu.l2_bytes)} L2; {hw.cpu.name}, "
        f"{hw.cpu.n_cores} cores",
        *([f"aliases: {', '.join(hw.aliases)}"] if hw.aliases else []),
        *(f"note: {note}" for note in (hw.note, hw.cpu.note) if note),
        "",
    ]
    rows = table("figure", "value", "range", "source", "ref", "note", numbers=False)
    for path, figure in quantities(hw):
        rows.add_row(path, _show(path, figure.value), _range(path, figure), figure.source, figure.ref, figure.note)
    used = sorted({key for _, figure in quantities(hw) for key in figure.refs})
    citations = [f"[{key}] {hw.sources[key]}" for key in used]
    return "\n".join(head) + render(rows) + "\n".join(citations) + ("\n" if citations else "")


def _range(path: str, figure: Quantity) -> str:
    if figure.low is None and figure.high is None:
        return ""
    low, high = (None if bound is None else _show(path, bound) for bound in (figure.low, figure.high))
    if low and high:
        return f"{low} to {high}"
    return f"from {low}" if low else f"to {high}"


def _bus(bus: Bus | None) -> str:
    return "not known" if bus is None else f"{bus.generation}.0 x{bus.lanes}"


def _show(path: str, value: float) -> str:
    """A figure in the unit people use; one without a unit is a share."""
    name = path.rsplit(".", 1)[-1]
    if name in RAM:
        return show_ram(value)
    if "flops_per_s" in path or name.endswith(("_s", "_bytes", "_w")):
        return show_figure(path, value)
    return f"{100 * value:.3g} %"
