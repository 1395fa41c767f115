"""`moesim.diff`: two runs beside each other, from Python and for the command line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.extras import need
from sim.results.record import Result
from sim.studies.diff.diff import Diff, compare
from sim.studies.diff.named import Named, both, named
from sim.studies.diff.side import opened
from sim.studies.simulate import Replay

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.diff.side import Progress

Run = str | os.PathLike[str] | Result
Told = Callable[[float, float | None, str], None]


def diff(a: Run, b: Run, *, replay: bool = True, one_at_a_time: bool = False) -> Diff:
    """Two runs beside each other: what `moesim diff` does on the command line.

    Args:
        a, b: results of `moesim.simulate`, folders of `--out`, or runs in words (`"lru hw=rtx3090"`); what words do not
            say is as in the other one. replay: recorded runs are replayed where their inputs are still the same.
        one_at_a_time: replay A with each single input of B that differs, too.

    Raises:
        BadInput: a run that cannot be read or set up, in one line.
    """
    with tempfile.TemporaryDirectory(prefix="moesim-") as scratch:
        sides = [_of_result(run) if isinstance(run, Result) else run for run in (a, b)]
        return _compared(*_both(sides[0], sides[1], {}), Path(scratch), replay, one_at_a_time, None)


def compared(
    a: str,
    b: str,
    given: dict[str, Any],
    scratch: Path,
    replay: bool,
    one_at_a_time: bool,
    progress: Told | None,
    before: Callable[[RunSpec], None],
) -> Diff:
    """The same for a command line: fields of runs in words. `before` is told of what is to be run.

    Raises:
        BadInput: as `diff` does.
    """
    sides = both(a, b, given)
    for side in sides:
        if side.facts is None and side.spec is not None:
            before(side.spec)
    return _compared(*sides, scratch, replay, one_at_a_time, progress)


def _both(a: Any, b: Any, given: Mapping[str, Any]) -> tuple[Named, Named]:
    if not isinstance(a, Named) and not isinstance(b, Named):
        return both(os.fspath(a), os.fspath(b), dict(given))
    first = a if isinstance(a, Named) else named(os.fspath(a), {}, b.spec)
    return first, b if isinstance(b, Named) else named(os.fspath(b), {}, first.spec)


def _of_result(result: Result) -> Named:
    kept = result.kept
    if isinstance(kept, Replay):
        return Named(result.name, facts=result.to_dict(), spec=kept.spec, kind=kept.kind)
    return Named(result.name, facts=result.to_dict())


def _compared(a: Named, b: Named, scratch: Path, replay: bool, one_at_a_time: bool, progress: Told | None) -> Diff:
    def told(which: str) -> Progress | None:
        return None if progress is None else lambda done, total: progress(done, total, f"replaying {which}")

    need("diff", "pyarrow")
    sides = []
    for which, one in (("A", a), ("B", b)):
        folder = scratch / which
        folder.mkdir()
        sides.append(opened(one, folder, replay, told(which)))
    found = compare(*sides)
    if one_at_a_time:
        from sim.studies.diff.alone import alone

        found.alone_rows = alone(found.a, found.b, told("A with one input of B"))
    return found
