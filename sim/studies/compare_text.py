"""What `moesim compare` prints: who is fastest, one row per run, and the bound that none of them can beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.units import show_bytes, show_count, show_frac, show_seconds
from sim.profiles.overrides import of_profile
from sim.results.routing_words import of_results
from sim.results.text import show_lengths
from sim.setup.naming import machine_of, show
from sim.studies.against import show_times, verdict_against
from sim.studies.common_bound import bound_line, common_bound, show_above
from sim.studies.promised import Columns, draws_least, keeps_most, kept_by
from sim.studies.ranking import ahead, is_bound, is_lossy, ranked_by, show_tpot, speed, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.figures import Bound, Timed
    from sim.results.record import Result
    from sim.setup.naming import Overrides
    from sim.studies.ranking import Rank, Row

MOST_IN_A_CELL = 32  # characters of a note; a longer one stands below the table
TPOT: Timed = "tpot_s"
TTFT: Timed = "ttft_s"


def verdict(rows: Sequence[Row], found: dict[str, Rank], base: Row | None = None) -> str:
    """The fastest lossless system, by how much the next is slower, whom these requests do not tell it apart from, and
    which lossy one is faster still. With a baseline, how many times as fast the others are.

    Only where every system is lossy, the fastest of them comes first.
    """
    if base is not None:
        text = verdict_against(rows, base, machine_of(base.result.hw, _set_for_all(rows)))
        return text + _promised(rows) + of_results(row.result for row in rows)
    systems = [row for row in rows if not is_bound(row.result)]
    if not systems:
        return "only bounds were compared"
    faithful = [row for row in systems if not is_lossy(row.result)]
    text = _lead(faithful or systems, found, machine_of(rows[0].result.hw, _set_for_all(rows)))
    if faithful and systems[0] is not faithful[0]:
        text += f"; a lossy one, {systems[0].label}, takes {show_seconds(speed(systems[0].result))}"
    return text + _promised(rows) + of_results(row.result for row in rows)


def _promised(rows: Sequence[Row]) -> str:
    """Who keeps what was promised to the most requests, and who draws the fewest joules; lossless systems first."""
    systems = [row for row in rows if not is_bound(row.result)]
    faithful, text = [row for row in systems if not is_lossy(row.result)], ""
    keeps = keeps_most(faithful or systems, lambda row: row.result)
    if keeps is not None and len(systems) == 1:
        text += f"; {kept_by(keeps.result)} keep their SLO"
    elif keeps is not None:
        others = [row.result for row in faithful or systems if row is not keeps]
        text += f"; most keep their SLO under {keeps.label}: {kept_by(keeps.result, others)}"
    thrifty = draws_least(faithful or systems, lambda row: row.result)
    if thrifty is not None and len(systems) == 1:
        text += f"; {thrifty[1]} per token"
    elif thrifty is not None:
        text += f"; least energy per token under {thrifty[0].label}: {thrifty[1]}"
    return text


def served(rows: Sequence[Row]) -> str:
    """The requests that every run served."""
    result = rows[0].result
    what = f"{result.trace}, split {result.split}: {show_count(result.n_requests, 'request')}"
    return f"{what}; {show_lengths(result.lengths)}"


def _set_for_all(rows: Sequence[Row]) -> Overrides:
    """What was set for every run alike; what was set for one stands in its label."""
    first, *others = (row.result.overrides for row in rows)
    return {key: value for key, value in first.items() if all(key in own and own[key] == value for own in others)}


def _lead(systems: Sequence[Row], found: dict[str, Rank], machine: str) -> str:
    first = systems[0]
    over = _over(first)
    text = f"{first.label}: {show_seconds(speed(first.result))} {ranked_by(first.result)} on {machine} over {over}"
    if len(systems) < 2 or not speed(first.result):
        return text
    second, rank = systems[1], found.get(first.label)
    tied = None if rank is None else [row.label for row in systems[1:] if row.label in rank.tied]
    named = ["it"] if tied == [second.label] else tied
    return text + ahead(speed(second.result) / speed(first.result), second.label, named)


def _over(row: Row) -> str:
    sample = row.sample
    batches = f" in {sample.n} batch{'es' * (sample.n > 1)}" if sample.n != sample.n_requests else ""
    return show_count(sample.n_requests, "request") + batches


def table_of(rows: Sequence[Row], found: dict[str, Rank], base: Row | None = None, not_run: Sequence[str] = ()) -> str:
    """One row per run, fastest first, then those that cannot run, and the lower bound under them.

    With a baseline times are relative to its own.
    """
    from sim.base.tables import prose, render, table

    load = Columns(row.result for row in rows)
    beside = [] if base is None else [f"vs {base.label}"]
    to_first_titles = [f"TTFT {title}" for title in beside]
    shown = table(
        "policy",
        "rank",
        "TPOT",
        *beside,
        "above bound",
        "TTFT",
        *to_first_titles,
        *load.titles,
        "hit",
        "late hit",
        "to the GPU per token",
        "bound by",
        "note",
    )
    prose(shown, -2, -1)
    spare = ("to the GPU per token", "late hit", *to_first_titles, "TTFT", "hit", "bound by", *load.titles)
    spare = (*spare, "above bound", "rank")
    common, told = _of_all(rows), []
    least = common_bound(row.result for row in rows)
    bound = None if least is None else least[0]
    for row in rows:
        label, result, _ = row
        per_token, to_first = ([] if base is None else [show_times(times(row, base, t))] for t in (TPOT, TTFT))
        notes = [note for note in result.caveats if note != "oracle" and note not in common]
        notes = ["oracle", *notes] if "oracle" in result.caveats else notes
        told += [f"{label}: {note}\n" for note in notes if len(note) > MOST_IN_A_CELL]
        shown.add_row(
            label,
            found[label].places if label in found else "-",
            show_tpot(result),
            *per_token,
            show_above(result, bound),
            show_seconds(result.ttft_s.mean or 0.0),
            *to_first,
            *load.cells(result),
            show_frac(result.hit_rate),
            show_frac(result.late_hit_rate),
            show_bytes(result.h2d_bytes / result.n_outputs),
            str(result.bottleneck.resource),
            ", ".join(note for note in notes if len(note) <= MOST_IN_A_CELL),
        )
    for label in not_run:
        shown.add_row(label, *["-"] * (len(shown.columns) - 2), "does not run")
    vs = [] if base is None else [f"vs {base.label}: times as fast\n"]
    below = [
        *vs,
        *load.notes,
        *told,
        *([f"all of them: {', '.join(common)}\n"] if common else []),
        _bounds(rows, least),
    ]
    below = [text for text in below if text]
    return render(shown, spare=spare) + ("\n" if below else "") + "".join(below)


def _of_all(rows: Sequence[Row]) -> list[str]:
    """Labels that every run carries, so that they are the trace's, not a policy's; of one run, none."""
    first, *others = (row.result.caveats for row in rows)
    return [note for note in first if others and all(note in labels for labels in others)]


def _bounds(rows: Sequence[Row], least: tuple[Bound, Result] | None) -> str:
    """The bound of all rows. Where it rests on what was set for one row alone, that is named."""
    if least is None:
        return ""
    common, (bound, whose) = _set_for_all(rows), least
    own = (
        f"{key}={show(key, value)}" for key, value in whose.overrides.items() if of_profile(key) and key not in common
    )
    return bound_line(bound, ", ".join(own))
