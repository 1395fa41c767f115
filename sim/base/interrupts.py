"""Ctrl-C, heard only where nothing is left half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: inside the lock of an event that another
thread sets at that moment (both then fail), in the middle of an import (libraries turn it into errors of their own), or
in a finaliser (where it is printed and lost). Here it is noted instead, and raised a little later.

None is lost. What is noted stays noted until it is raised, whatever else is under way. What is raised and dropped
before it has ended the command (in a finaliser, by C code that clears every exception, as msgspec does where it hashes
a type) is noted again. And a command during which Ctrl-C came ends with 130, though somebody caught it.
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
INTERRUPTED = 130
"""Exit status, as shells have it."""

_noted_s: float | None = None  # when the first one came that is still to be raised
_heard_s = float("-inf")
_holds = 0
_interrupted = False  # whether one came since the command began
_answered = False  # whether somebody who caught the last one made something of it


class _Raised(KeyboardInterrupt):
    """Of a command: nothing that catches it may drop it but `answered`."""

    def __del__(self) -> None:
        if not _answered and _has_timer():
            _note(time.monotonic())


def answered() -> None:
    """Say that what was caught is not to be raised again: a result tells that it was interrupted."""
    global _answered
    _answered = True


def heard() -> None:
    """Raise KeyboardInterrupt if Ctrl-C has come while it was held back."""
    global _noted_s, _heard_s
    if _noted_s is not None:
        _noted_s, _heard_s = None, time.monotonic()
        raise _exception()


def pressed(error: BaseException) -> bool:
    """Whether somebody has pressed Ctrl-C, rather than code of a third party's having raised what looks like it."""
    return isinstance(error, KeyboardInterrupt) and (_interrupted or not _has_timer())


def _exception() -> KeyboardInterrupt:
    return _Raised() if _has_timer() else KeyboardInterrupt()


def wait_for(event: threading.Event) -> None:
    """Until another thread sets it; Ctrl-C is heard meanwhile, but never inside the event's lock. Needs `held`."""
    while not event.wait(POLL_S):
        heard()
    heard()


def _came(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - handlers have this form
    """The handler."""
    global _interrupted, _answered
    _interrupted, _answered = True, False
    now_s = time.monotonic()
    if now_s - _heard_s >= SAME_S:
        _raise_here(frame, now_s, _noted_s is None or now_s - _noted_s < PATIENCE_S)


def _again(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - handlers have this form
    if _noted_s is not None:
        _raise_here(frame, time.monotonic(), True)


def _raise_here(frame: FrameType | None, now_s: float, patient: bool) -> None:
    """Raise KeyboardInterrupt, or note it where it would break something or be lost.

    Args:
        patient: whether there is time. Without, only the functions of this file are left to end.
    """
    global _noted_s, _heard_s
    ours = frame is not None and frame.f_code.co_filename == __file__
    if ours or (patient and (_holds or (_has_timer() and _lost_here(frame)))):
        _note(now_s)
        return
    _noted_s, _heard_s = None, now_s
    raise _exception()


def _note(now_s: float) -> None:
    global _noted_s
    if _noted_s is None:
        _noted_s = now_s
    if not _holds and _has_timer():  # who holds it back hears it
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def _has_timer() -> bool:
    """Whether a command runs, on a system that can remind it of what is noted."""
    return hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is _again


def _dropped(unraisable: sys.UnraisableHookArgs) -> None:
    """What Python calls in place of raising, where nobody could catch it."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _note(time.monotonic())
    else:
        _say_dropped(unraisable)


_say_dropped = sys.unraisablehook


def _lost_here(frame: FrameType | None) -> bool:
    """Whether an exception would not arrive: within an import, a finaliser or a callback of a weak reference."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__":
            return True
        if code is run_command.__code__:  # the command begins here; what runs it may be an import itself
            return False
        if code.co_filename in (__file__, signal.__file__):  # a handler, or a change of handlers
            return True
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
        global _holds, _noted_s
        self._held = _ours_to_handle()
        self._before: Any = None
        if self._held:
            if not _holds and signal.getsignal(signal.SIGINT) is not _came:
                _noted_s = None  # of an earlier one, outside a command, while it ended
            self._before = signal.signal(signal.SIGINT, _came)
            _holds += 1
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
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            _noted_s = None  # it is being raised
        heard()  # in place of any other exception, which a caller may be glad to catch


def run_command(call: Callable[[], None], process: bool) -> None:
    """Call it as the command that this process is for (`process`), or as one of several.

    Raises:
        SystemExit: with 130 after Ctrl-C, whatever it hit.
    """
    global _interrupted, _answered, _noted_s, _heard_s, _say_dropped
    if not _ours_to_handle():
        call()
        return
    _interrupted, _answered, _noted_s, _heard_s = False, False, None, float("-inf")
    dropped, _say_dropped = sys.unraisablehook, sys.unraisablehook
    before = signal.signal(signal.SIGINT, _came)
    alarm = signal.signal(signal.SIGALRM, _again) if hasattr(signal, "setitimer") else None
    sys.unraisablehook = _dropped
    said = False
    try:
        try:
            heard()
            call()
        except SystemExit as ending:
            said = ending.code == INTERRUPTED
            raise
        finally:
            sys.unraisablehook = dropped
            if alarm is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, alarm)
            # What has been said is said: nothing may turn the end of a process into a traceback.
            signal.signal(signal.SIGINT, signal.SIG_IGN if process else before)
            _noted_s = None
            if _interrupted:  # looked at only now that none can come any more
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not said:
            _say_interrupted()
        raise SystemExit(INTERRUPTED) from None


def _say_interrupted() -> None:
    try:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
