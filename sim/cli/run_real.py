"""`simulate --real`: carry the run out on this machine, and print the prediction for --hw beside what was measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.cli.say import say

if TYPE_CHECKING:
    from sim.cli.run_request import RunRequest
    from sim.real.run import Measured
    from sim.results.record import Result
    from sim.setup.setup import Setup


def run_real(request: RunRequest) -> int:
    """Measure, predict, print. Returns the exit status: 0, 1 after a fault of the device, 130 after an interrupt."""
    from sim.cli.progress import Bar
    from sim.cli.spec_options import specify, tell_drawing, warn_if_changed
    from sim.real.devices.open import usable_device
    from sim.real.requirements import prepare_real
    from sim.real.run import execute_real
    from sim.results.sinks import check_places, recorded

    check_places(request.keep)
    place, folder = usable_device(request.device), None
    if request.checkpoint is not None:
        folder = checkpoint_folder(request.checkpoint)
        request = request.of_model(folder)
    spec, meant = specify(request.given, request.settings, request.config)
    tell_drawing(spec)
    setup = prepare_real(spec, place, request.given.get("precision") is not None or request.config is not None)
    try:
        _say_where(setup, place, request)
        warn_if_changed(setup, meant, request.config)
        for note in filter(None, (*setup.notes(), setup.idle)):
            click.echo(note, err=True)
        run = partial(execute_real, device=place, checkpoint=folder)
        with Bar(f"{setup.policy.name} on {setup.hw.id}") as bar:
            if request.keep:
                done = recorded(run, setup, bar.progress, request.keep, _with_prediction)
            else:
                done = run(setup, progress=bar.progress)
        if done.result.prediction is None:
            _with_prediction(done, {})
    finally:
        setup.close()
    _print(done, request)
    if done.fault:
        click.echo(f"error: {done.fault}; what was measured until then is above", err=True)
    return 0 if not done.fault else 130 if done.fault == "interrupted" else 1


def checkpoint_folder(name: str) -> Path:
    """The folder of a checkpoint, given as such or by the name of the one that comes with the project.

    Raises:
        BadInput: there is none.
    """
    from traces.record.load import named

    folder = Path(named(name))
    if not (folder / "config.json").is_file():
        raise BadInput(f"--checkpoint, got {name!r}: no config.json in it; give a folder, or mixtral-8x7b-small")
    return folder


def _say_where(setup: Setup, place: str, request: RunRequest) -> None:
    """The first line: where the run takes place, and why there."""
    from sim.real.devices.lanes import cores

    where = f"the CPU backend ({cores()} cores)" if place == "cpu" else place
    why = "; no CUDA GPU was found" if request.device is None and place == "cpu" else ""
    click.echo(f"real run on {where}: {setup.model.id} in {setup.spec.precision}{why}", err=request.as_json)


def _with_prediction(done: Measured, drawn: dict[str, Any]) -> None:
    """Put the simulation of the very same run into the result, and into its timeline where there is one."""
    from sim.figures import Prediction
    from sim.run import execute, prepare

    again = prepare(done.setup.spec)
    try:
        result = execute(again, bounds=False, **drawn).result
    finally:
        again.close()
    label = None
    if done.setup.hw.name != done.machine.lanes.title:
        label = f"the profile {again.hw.id} describes another device than {done.machine.lanes.title}"
    same = {name: getattr(result, name) for name in Prediction.__struct_fields__ if name not in ("hw", "label")}
    done.result.prediction = Prediction(hw=again.hw.id, label=label, **same)


def _print(done: Measured, request: RunRequest) -> None:
    import msgspec

    if request.as_json:
        click.echo(done.result.to_json())
        return
    from sim.results.text import render, verdict

    # Times are the clock's: what was set of the profile and the stack shaped the prediction beside them.
    of_clock = {
        key: value
        for key, value in done.result.overrides.items()
        if key not in ("cpu", "pcie") and not key.startswith(("hw.", "engine."))
    }
    shown = msgspec.structs.replace(done.result, hw=done.result.device or "", overrides=of_clock)
    say(f"measured: {verdict(shown)}", bold=True)
    say()
    say(beside(done.result))
    say(render(shown), nl=False)
    if request.keep.out is not None:
        say(f"\nwritten: {request.keep.out}")
    if request.keep.timeline is not None:
        say(f"\nwritten: {request.keep.timeline} (open it at ui.perfetto.dev)")


def beside(result: Result) -> str:
    """Measured and predicted, two lines of times and one of what the host spent on policy code."""
    from sim.base.tables import tabled
    from sim.base.units import show_bytes, show_seconds

    predicted, measured = result.prediction, result.measured
    assert predicted is not None
    assert measured is not None
    rows = []
    scatter, each_s = predicted.uncertainty.plus_minus_frac, measured.policy_code_per_iteration_s
    for title, real_s, said_s in (
        ("TTFT", result.ttft_s.mean, predicted.ttft_s.mean),
        ("TPOT", result.tpot_s.mean, predicted.tpot_s.mean),
    ):
        if real_s is not None and said_s is not None:
            spread = f" +- {show_seconds(said_s * scatter)}" if scatter else ""
            rows.append((title, show_seconds(real_s), show_seconds(said_s) + spread, f"{said_s / real_s:.2f}"))
    rows.append(("to the device", show_bytes(result.h2d_bytes), show_bytes(predicted.h2d_bytes), ""))
    if each_s is not None:
        rows.append(("policy code", f"{show_seconds(each_s)} an iteration", "not simulated", ""))
    notes = [label for label in result.caveats if "host buffers" in label or label.startswith("stopped")]
    notes += [predicted.label] if predicted.label else []
    table = tabled(("", "measured", f"predicted for {predicted.hw}", "ratio"), rows)
    return table + "".join(f"note: {label}\n" for label in notes)
