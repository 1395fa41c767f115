"""Say so when a hook of a policy does not return: an endless loop hangs without a word otherwise."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from sim.policy.api import HOOKS, Policy

WARN_AFTER_S = 60.0
LOOKS = 4
"""How often the thread looks in that time; a replay pays for nothing but its start."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch the calling thread; one line on stderr names policy, hook and layer of a hook that does not return."""
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(threading.get_ident(), done), daemon=True, name="watchdog")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(thread: int, done: threading.Event) -> None:
    seen: FrameType | None = None
    since_s = 0.0
    told = False
    while not done.wait(WARN_AFTER_S / LOOKS):
        frame, now_s = _hook_of(thread), time.monotonic()
        if frame is not seen:
            seen, since_s, told = frame, now_s, False
        elif frame is not None and not told and now_s - since_s >= WARN_AFTER_S:
            told = True
            sys.stderr.write(_line(frame, now_s - since_s))
            sys.stderr.flush()


def _hook_of(thread: int) -> FrameType | None:
    """The outermost hook that a thread is in."""
    frame, found = sys._current_frames().get(thread), None
    while frame is not None:
        if frame.f_code.co_name in HOOKS and isinstance(frame.f_locals.get("self"), Policy):
            found = frame
        frame = frame.f_back
    return found


def _line(frame: FrameType, waited_s: float) -> str:
    code, told = frame.f_code, frame.f_locals
    layer = _layer(told)
    where = f" at layer {layer}" if layer is not None else ""
    decided = "" if code.co_flags & inspect.CO_GENERATOR else " and has made no decision"
    return (
        f"warning: {told['self'].name}.{code.co_name}{where} has not returned for {waited_s:.3g} s{decided}: it is at "
        f"{code.co_filename}:{frame.f_lineno}; wait, or stop it with Ctrl-C\n"
    )


def _layer(told: dict[str, Any]) -> int | None:
    """The layer that a hook was told of: by itself, in its gate or its piece."""
    found = told.get("layer", getattr(told.get("gate", told.get("piece")), "layer", None))
    return found if isinstance(found, int) else None
