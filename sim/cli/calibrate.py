"""`moesim calibrate`: measure this machine and write its hardware profile."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim import __version__
from sim.base.errors import BadInput
from sim.base.extras import need
from sim.base.interrupts import held
from sim.base.tables import lines
from sim.base.units import show_flops, show_rate, show_seconds
from sim.cli import calibrating as main
from sim.cli.output_place import OutputFolder
from sim.cli.progress import Bar
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from calibrate.runner import Progress
    from calibrate.session import Calibration


@click.command(
    cls=UniqueOptions,
    epilog="Example: calibrate --device cpu --model cpu-small --name my-cpu, then simulate --policy lru "
    "--hw my-cpu.yaml --model cpu-small. docs/validate.md goes on.",
)
@click.version_option(__version__, prog_name="moesim")
@click.option("--device", default=None, help="cuda:0, cuda:1 .., or cpu (a stand-in device in host memory).")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("mixtral-8x7b",),
    show_default=True,
    help="Model whose shapes are measured; repeat for several.",
)
@click.option("--name", default=None, help="Id of the profile; default: made from the device's name.")
@click.option(
    "--out",
    "folder",
    type=OutputFolder(),
    default=Path(),
    show_default=True,
    help="Folder for NAME.yaml, NAME.samples.jsonl.gz and NAME.environment.json.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.01, 600),
    default=5.0,
    show_default=True,
    help="Time budget; points over it are skipped and marked.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 20),
    default=3,
    show_default=True,
    help="Repeat everything up to this often while time lasts.",
)
@click.option("--probe", "probes", multiple=True, help="Only this probe; repeat for several.")
@click.option("--resume", is_flag=True, help="Keep the samples of an interrupted run and measure what is missing.")
@click.option("--fit-only", is_flag=True, help="Measure nothing: fit the samples of NAME in --out again.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def command(
    device: str | None,
    models: tuple[str, ...],
    name: str | None,
    folder: Path,
    minutes: float,
    rounds: int,
    probes: tuple[str, ...],
    resume: bool,
    fit_only: bool,
    quiet: bool,
) -> None:
    """Measure copies, experts, attention and host costs of this machine, and write a profile that --hw accepts."""
    from calibrate.runner import PROBES
    from calibrate.session import LANES, CalibrationRequest, calibrate, finish
    from sim.base.errors import did_you_mean
    from sim.profiles.models import load_model
    from sim.real.devices.open import open_device, usable_device

    need("calibrate", "scipy")
    known = [*(probe.name for probe in PROBES), LANES]
    for probe in probes:
        if probe not in known:
            raise BadInput(f"--probe, got {probe!r}: no such probe; {did_you_mean(probe, known)}")
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise BadInput(f"--name, got {name!r}: lower-case letters, digits, '.', '_' and '-'; for example h100-sxm")
    if fit_only and name:
        _report(finish(CalibrationRequest(device or "", models, name, folder, 0.0)))
        return
    if device is None or fit_only:
        raise BadInput("calibrate: --device is missing (with --fit-only: --name); give --device cuda:0 or --device cpu")
    for model in models:
        load_model(model)  # refused before anything is said or opened
    with held():  # but while a lane is waited for: `sim.base.interrupts`
        opened = open_device(usable_device(device, "calibrate"))
        try:
            name = name or (re.sub(r"[^a-z0-9]+", "-", opened.facts.title.lower()).strip("-") or "my-machine")
            request = CalibrationRequest(device, models, name, folder, minutes * 60, resume, rounds, probes)
            where = f"{opened.facts.title} ({device})"
            say(f"{where}, {', '.join(models)}, {minutes:g} minutes -> {request.profile_path}")
            with Bar("starting") as bar:
                outcome = calibrate(request, device=opened, progress=told_on(quiet, bar))
        finally:
            opened.close()
    _report(outcome)


def told_on(quiet: bool, bar: Bar) -> Progress:
    """A bar on a terminal, one line per probe elsewhere (a log must show how far a remote run got)."""
    from calibrate.runner import Progress

    if quiet:
        return Progress()
    if not bar.shown:
        return Progress(probe=lambda probe, n: click.echo(f"  round {n + 1}: {probe}", err=True))
    title, done_frac = "", 0.0

    def probe(name: str, n_round: int) -> None:
        nonlocal title
        title = f"round {n_round + 1}: {name}"
        bar.update(done_frac, 1.0, title)

    def point(_: str, key: Mapping[str, str | int], used_frac: float) -> None:
        nonlocal done_frac
        done_frac = min(1.0, used_frac)
        bar.update(done_frac, 1.0, f"{title} {' '.join(str(value) for value in key.values())[:48]}")

    return Progress(probe, point)


def _report(outcome: Calibration) -> None:
    """The verdict first: links, experts and host in human units, then doubts, then files."""
    data, ways = outcome.data, ("h2d", "d2h", "h2d_pageable", "d2h_pageable")
    links = {way: (data[way]["bandwidth_bytes_per_s"], data[way]["latency_s"]) for way in ways}
    rows = [
        (way, f"{_show(rate, show_rate)}  + {_show(latency, show_seconds)}") for way, (rate, latency) in links.items()
    ]
    gpu, host = data["gpu"], data["host"]
    rows.append(("memory", _show(gpu["memory_bandwidth_bytes_per_s"], show_rate)))
    rows += [(dtype, _show(rate, show_flops)) for dtype, rate in gpu["flops_per_s"].items()]
    rows += [
        (name.removesuffix("_s"), _show(host[name], show_seconds)) for name in ("launch_s", "sync_s", "copy_launch_s")
    ]
    say(lines(rows), nl=False)
    _list("failed", [f"{_point(r.probe, r.key)}: {r.why}" for r in outcome.table.failed])
    _list("skipped", [_point(r.probe, r.key) for r in outcome.table.skipped])
    for why in sorted({r.why for r in outcome.table.skipped}):
        say(f"skipped points are {why}")
    _list("doubtful", outcome.warnings)
    say("wrote " + ", ".join(str(path) for path in outcome.files))


def _point(probe: str, key: Mapping[str, object]) -> str:
    return f"{probe} ({', '.join(f'{name} {value}' for name, value in key.items())})"


def _show(figure: Mapping[str, Any], unit: Any) -> str:
    spread = f" +- {unit(figure['iqr'] / 2)}" if figure.get("iqr") else ""
    return f"{unit(figure['value'])}{spread}" + ("" if figure["source"] == "measured" else f" ({figure['source']})")


def _list(title: str, said: Sequence[str], most: int = 12) -> None:
    for line in said[:most]:
        say(f"{title}: {line}")
    if len(said) > most:
        say(f"{title}: and {len(said) - most} more, see the samples")


__all__ = ["command", "main"]
