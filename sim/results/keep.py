"""Where a run is kept beside its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TIMELINE_ITERATIONS = 20


@dataclass(frozen=True)
class Keep:
    """Tables go to the folder `out`, trace events of the first iterations to the file `timeline`; None: to neither.

    Spans, which take far more room than all other tables, are kept `with_spans` only. `force` replaces what is there.
    """

    out: Path | None = None
    with_spans: bool = False
    force: bool = False
    timeline: Path | None = None
    timeline_iterations: int = TIMELINE_ITERATIONS

    def __bool__(self) -> bool:
        return self.out is not None or self.timeline is not None
