"""What lies under a name, asked without an exception."""

from __future__ import annotations

from pathlib import Path


def mode_of(path: Path) -> int:
    """`st_mode`; 0 where nothing has that name, or nothing can (too long, a null character)."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0
