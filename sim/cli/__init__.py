"""The command line: `moesim VERB`, and `simulate` for `moesim run`.

Hardly anything is imported before a command has made sure that an interrupt, missing memory or a closed stream
meanwhile ends in one line.
"""

from __future__ import annotations

import gc
import os
import sys

from sim.base.interrupts import run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

TOO_LITTLE = ("cannot allocate memory", "failed to map segment", "cannot apply additional memory protection")
"""How an import fails where there is no room for a library."""
NEW_OBJECTS = 200_000
"""Before a process looks for cycles: imports and tables make many objects and none of them; a look takes 5 ms."""
LEAST_BYTES = 120e6
"""NumPy alone takes about as much; with less, its OpenBLAS ends the process as it likes."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `moesim`."""

    def call() -> None:
        from sim.cli.verbs import guarded, moesim

        guarded(moesim, args, "moesim")

    _command(call, args is None)


def simulate(args: Sequence[str] | None = None) -> None:
    """Entry point of `simulate`."""

    def call() -> None:
        from sim.cli.run import command
        from sim.cli.verbs import guarded

        guarded(command, args, "simulate")

    _command(call, args is None)


def calibrating(args: Sequence[str] | None = None) -> None:
    """Entry point of `calibrate`."""

    def call() -> None:
        from sim.cli.calibrate import command
        from sim.cli.verbs import guarded

        guarded(command, args, "calibrate")

    _command(call, args is None)


def _command(call: Callable[[], None], process: bool) -> None:
    """Call what a command does; `process`: the process is there for nothing else."""

    def whole() -> None:
        if process:
            gc.set_threshold(NEW_OBJECTS)
            _open_streams()
            if _limit_bytes() < LEAST_BYTES:
                _out_of_memory()
            _say_outdated()
        call()

    try:
        run_command(whole, process)
    except (MemoryError, ImportError, OSError, SystemError) as error:
        if not (
            isinstance(error, MemoryError)
            or any(text in str(error).lower() for text in TOO_LITTLE)
            or (isinstance(error, SystemError) and _limit_bytes() < float("inf"))
        ):
            raise
        _out_of_memory()
    finally:
        if process:
            gc.freeze()  # what is left goes with the process; nobody looks through it once more


def _say_outdated() -> None:
    """One line for whoever edits a checkout and then waits for it."""
    from sim.base import compiled

    if compiled.outdated and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(
            "note: sources were edited after they had been compiled, and run as they are, several times slower; "
            "`python hatch_build.py` compiles them again\n"
        )


def _limit_bytes() -> float:
    """Address space that the process may have (`ulimit -v`)."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return float("inf")
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _out_of_memory() -> NoReturn:
    if sys.stderr is not None:
        sys.stderr.write(
            "error: out of memory: this process may use too little of it; raise `ulimit -v` (or the "
            "container's limit), or take a smaller model or fewer requests\n"
        )
    raise SystemExit(2) from None


def _open_streams() -> None:
    """A closed stream (`2>&-`) becomes one that nobody reads: else the next file that is opened takes its number, and
    what is meant for the terminal is written into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def __getattr__(name: str) -> Any:
    """`moesim`, `guarded` and `VERBS`, as if they were here."""
    if name in ("VERBS", "guarded", "moesim"):
        from sim.cli import verbs

        return getattr(verbs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
