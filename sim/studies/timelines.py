"""Several runs in one timeline: each replayed from the configuration that it was kept with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sim.base.errors import BadInput
from sim.base.files import read_object, to_struct
from sim.options import RunSpec
from sim.results.keep import Keep
from sim.results.run_folder import CONFIG, MAX_RESULT_BYTES, RESULT
from sim.results.sinks import Drawing, new_timeline, told
from sim.run import execute, prepare
from sim.setup.config_file import read_spec
from sim.setup.naming import title_of

Told = Callable[[int, int], None]


def draw(runs: Sequence[Path], keep: Keep, tell: Told) -> None:
    """Write the timeline that `keep` asks for: one process per run, in the order given, each from time 0 on.

    Args:
        runs: folders of `--out`, or configurations. tell: of runs drawn, and how many there are.

    Raises:
        BadInput: no run there, a real one, one whose inputs have changed since, or a file that may not be written.
    """
    specs = [_spec_of(run) for run in runs]
    assert keep.timeline is not None
    with new_timeline(keep.timeline, keep.overwrite) as document:
        for n, (run, (spec, run_id)) in enumerate(zip(runs, specs, strict=True)):
            tell(n, len(specs))
            setup = prepare(spec)
            try:
                if run_id not in (None, setup.run_id):
                    raise BadInput(
                        f"{run}, got inputs that have changed since (run_id {setup.run_id}, then {run_id}): it is "
                        "another run by now; simulate it again"
                    )
                drawing = Drawing(document, f"{_name(run)}: {title_of(setup)}", keep, setup)
                execute(setup, bounds=False, **told(None, drawing))
                drawing.close()
            finally:
                setup.close()
        tell(len(specs), len(specs))
        document.close()


def _name(run: Path) -> str:
    return run.absolute().name


def _spec_of(run: Path) -> tuple[RunSpec, str | None]:
    """The run as it was asked for, and its id where its result lies beside it."""
    folder = run.is_dir()
    config = run / CONFIG if folder else run
    if not config.is_file():
        way = "name a folder that --out has written" if folder else "name a folder of --out, or a config.yaml"
        raise BadInput(f"RUN, got {str(run)!r}: no configuration there; {way}")
    fields, _ = read_spec(config)
    kept = run / RESULT
    told = read_object(kept, MAX_RESULT_BYTES, "simulate it again") if folder and kept.is_file() else {}
    if told.get("simulator") == "real":
        raise BadInput(
            f"RUN, got {str(run)!r}: a real run, whose clock cannot be replayed; draw it while it runs, with simulate "
            "--real --timeline FILE"
        )
    return to_struct(fields, RunSpec, str(config)), told.get("run_id")
