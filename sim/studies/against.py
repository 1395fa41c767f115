"""A comparison that says everything relative to one of its policies, which stands at 1.00x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.base.units import show_seconds
from sim.results.text import show_units
from sim.studies.ranking import is_bound, is_lossy, ranked_by, speed, times

if TYPE_CHECKING:
    from sim.studies.compare import Candidate
    from sim.studies.ranking import Row

MOST_NAMED = 5
ROUNDING = 1e-9


def with_baseline(
    items: Sequence[tuple[str, bool]], against: str | None, said: Sequence[str]
) -> list[tuple[str, bool]]:
    """The policies asked for, and the one they are held against where it is not among them.

    Args:
        said: what labels add to a policy's name, one for each scheduler.

    Raises:
        BadInput: under several schedulers the name stands for several runs.
    """
    if against is None or against in {item + more for item, _ in items for more in said}:
        return [*items]
    if len(said) > 1:
        raise BadInput(
            f"--against, got {against!r}: under {len(said)} schedulers that is no one run; name one of them, e.g. "
            f"--against {against + said[0]!r}, and the policy with --policy"
        )
    return [*items, (against, True)]


def baseline(rows: Sequence[Row], candidates: Sequence[Candidate], against: str | None) -> Row | None:
    """The run that others are held against, which may be shown by another name of the same. Raises BadInput where it
    did not run."""
    if against is None:
        return None
    ids = {one.asked.id for one in candidates if one.label == against}
    found = next((row for row in rows if row.result.run_id in ids), None)
    if found is None:
        raise BadInput(f"--against, got {against!r}: it cannot run here; hold the others against one that can")
    return found


def show_times(ratio: float | None) -> str:
    """`1.00x` is the baseline alone, and what is exactly as fast."""
    if ratio is None:
        return "-"
    text = f"{ratio:.2f}x" if 0.095 <= ratio < 99.5 else f"{ratio:.3g}x" if ratio < 999.5 else f"{ratio:,.0f}x"
    return f"{ratio:.4f}x" if text == "1.00x" and abs(ratio - 1) > ROUNDING else text


def verdict_against(rows: Sequence[Row], base: Row, machine: str) -> str:
    """The first line: what the baseline takes, and how many times as fast the others are, the fastest first; lossy
    ones behind the others."""
    others = [row for row in rows if row is not base and not is_bound(row.result)]
    systems = sorted(others, key=lambda row: is_lossy(row.result))
    over = show_units(base.sample.n_requests, base.sample.n) + f" request{'s' * (base.sample.n_requests != 1)}"
    text = (
        f"against {base.label} ({show_seconds(speed(base.result))} {ranked_by(base.result)} on {machine} over {over}): "
    )
    if not systems:
        return f"{text}no other system was compared"
    said: list[str] = []
    for row in systems[:MOST_NAMED]:
        ratio = times(row, base)
        words = f"{row.label} {show_times(ratio)}" + ("" if said else " as fast")
        words += " (lossy)" if is_lossy(row.result) else ""
        tied = base.sample.n > 1 and not base.sample.significant(row.sample)
        said.append(words + (", not told apart" if tied else ""))
    more = f"; {len(systems) - MOST_NAMED} more below" if len(systems) > MOST_NAMED else ""
    alone = "" if base.sample.n > 1 else "; of n = 1 no sampling error can be given, so this is no ranking"
    return text + "; ".join(said) + more + alone
