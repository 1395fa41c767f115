"""Ctrl-C, heard only where nothing is left half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: inside the lock of an event that another
thread sets at that moment (both then fail), in the middle of an import (libraries turn it into errors of their own), or
in a finaliser (where it is printed and lost). Here it is noted instead, and raised a little later.
"""

# Imported before anything else of a command, so it imports little.
from __future__ import annotations

import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self

POLL_S = 0.1
"""How often a wait for another thread looks whether Ctrl-C has come."""
SAME_S = 0.4
"""Signals so shortly after one that was heard are that one again: a terminal and a wrapper may both send it."""
PATIENCE_S = 1.5
"""Ctrl-C again after this long is raised wherever the program stands."""
AGAIN_S = 0.02

_noted_s: float | None = None
_heard_s = float("-inf")
_holds = 0


def heard() -> None:
    """Raise KeyboardInterrupt if Ctrl-C has come while it was held back."""
    global _noted_s, _heard_s
    if _noted_s is not None:
        _noted_s, _heard_s = None, time.monotonic()
        raise KeyboardInterrupt


def wait_for(event: threading.Event) -> None:
    """Until another thread sets it; Ctrl-C is heard meanwhile, but never inside the event's lock. Needs `held`."""
    while not event.wait(POLL_S):
        heard()
    heard()


def _came(signum: int, frame: FrameType | None) -> None:
    """The handler."""
    global _noted_s, _heard_s
    now_s = time.monotonic()
    if now_s - _heard_s < SAME_S:
        return
    first_s = now_s if _noted_s is None else _noted_s
    if now_s - first_s < PATIENCE_S or signum != signal.SIGINT:
        if _holds:
            _noted_s = first_s
            return
        if hasattr(signal, "setitimer") and _lost_here(frame):
            _noted_s = first_s
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)  # once more, when that is over
            return
    _noted_s, _heard_s = None, now_s
    raise KeyboardInterrupt


def _again(signum: int, frame: FrameType | None) -> None:
    if _noted_s is not None:
        _came(signum, frame)


def _lost_here(frame: FrameType | None) -> bool:
    """Whether an exception would not arrive: within an import, a finaliser or a callback of a weak reference."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__":
            return True
        if code.co_filename == __file__:  # the command begins here; what runs it may be an import itself
            return False
        if code.co_filename.endswith(("weakref.py", "_weakrefset.py")):
            return True
        frame = frame.f_back
    return False


def _ours_to_handle() -> bool:
    """Whether Ctrl-C means what it does by default: nobody ignores it or handles it otherwise."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in (
        signal.default_int_handler,
        _came,
    )


class held:  # noqa: N801 - used as a function
    """While this lasts, Ctrl-C waits for `heard`, or for the end. Holds may be nested.

    Where another thread runs this, or somebody else handles Ctrl-C, nothing changes.
    """

    def __enter__(self) -> Self:
        global _holds
        self._held = _ours_to_handle()
        self._before: Any = None
        if self._held:
            _holds += 1
            self._before = signal.signal(signal.SIGINT, _came)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _holds, _noted_s
        if not self._held:
            return
        _holds -= 1
        if self._before is not _came:
            signal.signal(signal.SIGINT, self._before)
        if _holds:
            return
        if kind is None:
            heard()
        _noted_s = None  # what is under way ends the command, too


def run_command(call: Callable[[], None], process: bool) -> None:
    """Call it as the command that this process is for (`process`), or as one of several.

    Raises:
        SystemExit: with 130 after Ctrl-C, whatever it hit.
    """
    if not _ours_to_handle():
        call()
        return
    before = signal.signal(signal.SIGINT, _came)
    alarm = signal.signal(signal.SIGALRM, _again) if hasattr(signal, "setitimer") else None

    def give_back() -> None:
        # What has been said is said: nothing may turn the end of a process into a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN if process else before)
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, alarm)

    try:
        try:
            call()
        finally:
            give_back()
    except KeyboardInterrupt:
        give_back()  # Ctrl-C may have come just before it was done
        _say_interrupted()
        raise SystemExit(130) from None


def _say_interrupted() -> None:
    try:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
