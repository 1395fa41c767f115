"""`simulate`, which is `moesim run`: replay a routing trace under a policy on a described GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim import __version__
from sim.cli.expect import judged, parsed
from sim.cli.once import OnceEach
from sim.errors import BadInput
from sim.units import parse_bytes, show_count

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

    from sim.run import Outcome, Progress, Setup
    from sim.spec import RunSpec

SHOW_BAR_AFTER_S = 1.0
TIMELINE_ITERATIONS = 20
LEAST_MEANT = 1000  # bytes without a unit: fewer hold no expert of any model


class Size(click.ParamType[int]):
    """Bytes, written with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        option, n_bytes = param.opts[0] if param else "size", parse_bytes(value, param.opts[0] if param else self.name)
        if 0 < n_bytes < LEAST_MEANT and value.strip().isdigit():
            raise BadInput(f"{option}, got {value!r}: that is {n_bytes} bytes; did you mean {value.strip()}GB?")
        return n_bytes


# What makes a run besides its policy; `moesim compare` takes the same.
SPEC_OPTIONS = (
    click.option("--hw", metavar="NAME|FILE", help="GPU and its machine: see `moesim hw`."),
    click.option("--model", metavar="NAME|FILE", help="Geometry; default: a model of the trace's routing shape."),
    click.option("--trace", metavar="NAME|FILE", help="Routing trace; default: the bundled one."),
    click.option("--precision", metavar="TYPE", help="Type of the weights; default: bf16."),
    click.option("--vram", "vram_bytes", type=Size(), help="Cap the GPU's whole memory."),
    click.option("--expert-cache", "expert_cache_bytes", type=Size(), help="Cap the expert part, in bytes."),
    click.option("--experts", type=int, metavar="N", help="Cap the expert part, in whole experts over all GPUs."),
    click.option("--cache-frac", type=float, metavar="F", help="Cap the expert part, as a share of all experts."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                  help="A parameter of the policy, or hw.*, model.*, stack.*; repeat it."),
    click.option("--stack", metavar="NAME|FILE", help="Serving framework and what it costs; default: bare."),
    click.option("--gpus", type=int, metavar="N", help="GPUs that hold experts; default: 1."),
    click.option("--batch", type=int, metavar="N", help="Requests decoded together; default: 1."),
    click.option("--split", metavar="NAME", help="Requests to score: test (default), store or all."),
    click.option("--requests", type=int, metavar="N", help="Only the first N requests of the split."),
    click.option("--predictor", metavar="P",
                 help="What a policy predicts with: trained (default), a file, or surrogate:0.85 (labelled)."),
    click.option("--hit-definition", metavar="NAME", help="What is a hit: gate (default), room, cached or token."),
    click.option("--seed", type=int, metavar="N", help="For policies that draw at random; default: 0."),
)  # fmt: skip


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `SPEC_OPTIONS`, in their order."""
    for option in reversed(SPEC_OPTIONS):
        command = option(command)
    return command


@click.command(
    cls=OnceEach,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: simulate --policy fine_moe --hw rtx3090 --cache-frac 0.2. Sizes take kB, MB, GB (powers of "
    "1000) or KiB, MiB, GiB. Names: moesim policies, moesim hw, moesim models, moesim traces.",
)
@click.version_option(__version__, prog_name="moesim")
@click.option("--policy", metavar="NAME", help="What decides: see `moesim policies`.")
@spec_options
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="Start from a saved configuration.")
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Write configuration, result and tables; missing folders are made.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the run that --out DIR holds.")
@click.option("--timeline", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the lanes as trace events for Perfetto; missing folders are made.")  # fmt: skip
@click.option("--timeline-iterations", type=click.IntRange(min=1), default=TIMELINE_ITERATIONS, show_default=True,
              metavar="N", help="How many iterations the timeline covers.")  # fmt: skip
@click.option("--real", is_flag=True, help="Carry it out on this machine, with the prediction for --hw beside it.")
@click.option("--device", metavar="cpu|cuda:N", help="Where --real runs; default: a GPU if there is one, else the CPU.")
@click.option("--checkpoint", metavar="NAME|FOLDER",
              help="With --real: weights and geometry of this model in place of random ones.")
@click.option("--expect", "expected", multiple=True, metavar="'KEY >= N'",
              help="Exit 1 unless this figure of the result keeps to it: 'hit_rate >= 0.3'; repeat it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    settings: tuple[str, ...], config: Path | None, out: Path | None, force: bool, timeline: Path | None,
    timeline_iterations: int, real: bool, device: str | None, checkpoint: str | None, expected: tuple[str, ...],
    as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Replay a routing trace under a policy on a described GPU: time, hits, PCIe traffic, memory, what bounds it."""
    expectations = parsed(expected)
    try:
        if real:
            from sim.cli.run_real import run_real

            if expectations:
                raise BadInput("--expect, got it with --real: measured figures differ from run to run; hold a "
                               "simulation to it, or see moesim validate --tolerance")  # fmt: skip
            sys.exit(run_real(settings, config, out, force, timeline, timeline_iterations, as_json, given, device,
                              checkpoint))  # fmt: skip
        if device is not None:
            raise BadInput(f"--device, got {device!r}: it says where --real runs; add --real, or leave it out")
        if checkpoint is not None:
            raise BadInput(f"--checkpoint, got {checkpoint!r}: weights are what --real computes with; "
                           "add --real, or leave it out")  # fmt: skip
        result = _run(settings, config, out, force, timeline, timeline_iterations, as_json, given)
    except KeyboardInterrupt:
        raise click.Abort from None
    status = 0
    for held, line in judged(expectations, result):
        click.echo(line, err=True)
        status = status if held else 1
    return status


def _run(
    settings: tuple[str, ...], config: Path | None, out: Path | None, force: bool, timeline: Path | None,
    timeline_iterations: int, as_json: bool, given: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    spec, meant = specify(given, settings, config)
    from sim.run import execute, prepare

    setup = prepare(spec)
    try:
        warn_if_changed(setup, meant, config)
        for note in notes(setup):
            click.echo(note, err=True)
        if out is None and timeline is None:
            with _Bar(setup) as progress:
                outcome = execute(setup, progress=progress)
        else:
            from sim.sinks import recorded

            with _Bar(setup) as progress:
                outcome = recorded(setup, progress, out, force, timeline, timeline_iterations)
    finally:
        setup.close()
    _print(outcome, as_json, out, timeline)
    return outcome.result


def _print(outcome: Outcome, as_json: bool, out: Path | None, timeline: Path | None) -> None:
    from sim.output import to_json

    if as_json:
        click.echo(to_json(outcome.result))
        return
    from sim.render import render, verdict

    click.echo(click.style(verdict(outcome.result), bold=True))
    click.echo()
    click.echo(render(outcome.result), nl=False)
    if out is not None or timeline is not None:
        click.echo()
    if out is not None:
        click.echo(f"written: {out} (again: simulate --config {out / 'config.yaml'})")
    if timeline is not None:
        click.echo(f"written: {timeline} (open it at ui.perfetto.dev)")


def specify(
    given: dict[str, Any], settings: tuple[str, ...], config: Path | None
) -> tuple[RunSpec, dict[str, Any]]:
    """The run the command line asks for, over a saved configuration where one is named.

    Returns:
        The specification, and the saved configuration's `resolved` block.

    Raises:
        BadInput: an unreadable configuration, a malformed `--set`, or no policy or hardware named.
    """
    from sim.data import parse_yaml, to_struct
    from sim.overrides import parse_set
    from sim.spec import CAPS, RunSpec, read_spec

    fields: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    if config is not None:
        fields, meant = read_spec(config)
    typed = {name: value for name, value in given.items() if value is not None}
    if any(name in typed for name in CAPS):
        fields = {name: value for name, value in fields.items() if name not in CAPS}  # a new cap replaces the old one
    parse_set(settings)
    if settings:
        meant = {}  # what the command line changes on purpose needs no warning
    pairs = ((key.strip(), text) for key, _, text in (item.partition("=") for item in settings))
    changes = {key: parse_yaml(text, f"--set {key}") for key, text in pairs}
    fields = {**fields, **typed, "set": {**fields.get("set", {}), **changes}}
    _require_names(fields)
    return to_struct(fields, RunSpec, "--set" if config is None else f"{config} and command line"), meant


def _require_names(fields: dict[str, Any]) -> None:
    """Neither policy nor hardware has a default: which one is meant decides everything."""
    missing = []
    if "policy" not in fields:
        from sim.registry import policies

        missing.append(f"--policy, got none: name what to replay ({', '.join(policies())})")
    if "hw" not in fields:
        missing.append("--hw, got none: name the GPU (rtx3090, rtx4090, a100-80g-sxm ...; `moesim hw` lists all)")
    if missing:
        raise BadInput("; ".join(missing) + "; e.g. simulate --policy fine_moe --hw rtx3090")


def notes(setup: Setup) -> list[str]:
    """What was asked for and cannot be had in full, one line each."""
    spec, has = setup.spec, show_count(len(setup.requests), "request")
    found = []
    if spec.requests is not None and spec.requests > len(setup.requests):
        found.append(f"note: --requests {spec.requests}: split {spec.split} of {setup.trace.name} has {has}, not more")
    if spec.batch > len(setup.requests):
        found.append(f"note: --batch {spec.batch}: no more than {has} to run together")
    return found


def warn_if_changed(setup: Setup, meant: dict[str, Any], config: Path | None) -> None:
    """Say so when what a saved configuration names is no longer what it was saved with."""
    from sim.output import resolved

    now = resolved(setup)
    for what in ("trace", "hw", "model", "stack"):
        key = f"{what}_sha256"
        if meant.get(what) == now[what] and meant.get(key) != now[key]:
            click.echo(f"note: {config}: {what} {now[what]} has changed since this was saved; figures may differ",
                       err=True)  # fmt: skip


class Bar:
    """A progress bar on stderr once a second has gone by; nothing where stderr is not a terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._bar: RichBar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress | None:
        return self._update if self._shown else None

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() - self._began_s < SHOW_BAR_AFTER_S:
                return
            from rich.console import Console
            from rich.progress import Progress as RichBar

            self._bar = RichBar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)


class _Bar(Bar):
    """The bar of one run."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(f"{setup.policy.name} on {setup.hw.id}")
