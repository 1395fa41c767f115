"""Entry points of the commands: whatever lies in the folders of `PYTHONPATH`, `sim` is the one installed here."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def _ended(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - handlers have this form
    """Ctrl-C while nothing has begun but imports: in their middle, an exception would be a traceback."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


_usual = signal.getsignal(signal.SIGINT)
try:
    if _usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ended)
except ValueError:  # another thread imports this
    _usual = None
try:
    from sim.cli import calibrating, main, simulate
finally:
    if _usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _usual)  # whoever imports this need not call it

__all__ = ["calibrating", "main", "simulate"]
