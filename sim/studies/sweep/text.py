"""What `moesim sweep` prints: the answer first, then the best of each group, the Pareto front, and what did not run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.base.tables import fold, tabled
from sim.base.units import GIB, RAM, show_bytes, show_count, show_frac, show_seconds
from sim.results.routing_words import of_results
from sim.setup.naming import show
from sim.studies.common_bound import bound_line, show_above
from sim.studies.promised import Columns, draws_least, kept_by
from sim.studies.ranking import MOST_NAMED, ahead, ranked, ranked_by, show_ratio, show_tpot
from sim.studies.sweep.summary import Group, Summary, ratio, settings_of

if TYPE_CHECKING:
    from sim.figures import Bound
    from sim.studies.runner.runner import Work
    from sim.studies.sweep.run import PointRow

MOST_SHOWN = 40
"""Rows of a table on a terminal; the Parquet file and `--json` have all."""
MOST_REASONS = 5
MOST_CHANGES = 4
_UNITS = (("_bytes_per_s", "GB/s", 1e9), ("_bytes", "GB", 1e9))


def answer(rows: Sequence[PointRow], found: Summary) -> str:
    """The first line: who is fastest, where, by how much, from whom the requests do not tell it apart, and whether
    routing rests on little.

    Of one policy in several machines or settings, what each of these is worth stands first.
    """
    return _fastest(rows, found) + of_results(row.result for row in rows if row.result is not None)


def _fastest(rows: Sequence[PointRow], found: Summary) -> str:
    groups, every = [group for group in found.groups if group.systems], found.leaders
    if not every:
        return "only bounds ran" if any(row.result is not None for row in rows) else "nothing ran"
    alike = [row for row in every if ranked(row.ran) == "tpot_s"] or every  # of two kinds of times none is the least
    first = min(alike, key=lambda row: row.speed_s)
    changes, pays, kept = _changes(groups, found), _pays(first, groups), _promised(groups, found)
    kept += _thrifty(groups, found)
    leads = len(found.varied) > 1 and "policy" not in found.varied
    before = f"{changes}; " if leads and changes else ""
    worth = f"; {pays}" if pays else ""
    if len(groups) == 1:
        if list(found.varied) == ["draft"] and pays:
            return f"{pays.replace(' there', '', 1)}; {_lead(groups[0], found)}{kept}"
        return before + _lead(groups[0], found) + worth + kept
    (most, n), *others = Counter(title(row, found) for row in every).most_common()
    by = f"settings of {', '.join(map(_word, found.by))}"
    of = f"{len(groups)} {by}"
    if not others:
        text = f"{most}: fastest in {f'both {by}' if len(groups) == 2 else f'all {of}'}"
    else:
        text = f"{most}: fastest in {n} of {of}; {_in(others)}"
    apart = sum(_alone(group) for group in groups)
    if any(group.next_to(row) is not None for group, row in zip(groups, every, strict=True)):
        some = f"{apart or 'none'} of them" if apart < len(groups) else "both" if apart == 2 else "all of them"
        text += f"; told apart from the next in {some}"
    where = ", ".join(_settings(first, found.by))
    text += f"; least of all {show_seconds(first.speed_s)} {ranked_by(first.ran)}: {title(first, found)} ({where})"
    return before + text + worth + (f"; {changes}" if changes and not leads else "") + kept


def _in(names: Sequence[tuple[str, int]]) -> str:
    """`lru in 3, lfu in 2`, of many the first few."""
    more = len(names) - MOST_NAMED
    said = ", ".join(f"{name} in {n}" for name, n in names[:MOST_NAMED])
    return said + (f", {more} more elsewhere" if more > 0 else "")


def _pays(best: PointRow, groups: Sequence[Group]) -> str:
    """Whether drafts pay for the fastest, where the same ran without any."""
    alike = _but_for_drafts(best)
    every = [row for group in groups for row in group.systems if _but_for_drafts(row) == alike]
    without = next((row for row in every if not _drafts(row)), None)
    if without is None or not any(_drafts(row) for row in every) or ranked(without.ran) != "tpot_s":
        return ""
    own = next(group for group in groups if group.best is best)
    known = bool(own.ranks) and not any(row is without for row in own.tied(best))
    if not _drafts(best):
        return "drafts do not pay there"
    times = f"{ratio(without, best):.2f}x as fast as without"
    return f"drafts pay there: {times}" if known else f"whether drafts pay there is not told: {times}"


def _drafts(row: PointRow) -> bool:
    return row.ran.draft is not None


def _but_for_drafts(row: PointRow) -> dict[str, Any]:
    return {**settings_of(row), "draft": None}


def _changes(groups: Sequence[Group], found: Summary) -> str:
    """What each axis is worth, changed alone from the first setting of all: most first; lossless systems."""
    fastest: dict[tuple[str, ...], float] = {}
    rows = [row for group in groups for row in group.faithful]
    if len({ranked(row.ran) for row in rows}) > 1:
        return ""  # a time to the first token is no multiple of one per token
    for row in rows:
        at = tuple(_settings(row, found.axes))
        fastest[at] = min(row.speed_s, fastest.get(at, math.inf))
    first = tuple(_setting(name, found.varied[name][0]) for name in found.axes)
    if not first or first not in fastest:
        return ""
    told = []
    for at, seconds in fastest.items():
        changed = [axis for axis, before in zip(at, first, strict=True) if axis != before]
        if len(changed) == 1:
            gain = fastest[first] / seconds
            told.append((max(gain, 1 / gain), f"{gain:.2f}x with {changed[0]}"))
    if not told:
        return ""
    (_, most), *others = sorted(told, key=lambda one: -one[0])[:MOST_CHANGES]
    said = ", ".join([most.replace("x with", "x as fast with", 1), *(text for _, text in others)])
    return f"{said}, {'each alone ' if len(first) > 1 else ''}against {', '.join(first)}"


def _thrifty(groups: Sequence[Group], found: Summary) -> str:
    """Who draws the fewest joules."""
    thrifty = draws_least([row for group in groups for row in group.faithful], lambda row: row.ran)
    if thrifty is None:
        return ""
    row, each = thrifty
    where = ", ".join(_settings(row, found.by))
    return f"; least energy per token: {each}, {title(row, found)}" + (f" ({where})" if where else "")


def _promised(groups: Sequence[Group], found: Summary) -> str:
    """Who keeps what was promised to the most requests."""
    rows = [row for group in groups if (row := group.keeps) is not None]
    if not rows:
        return ""
    if len(groups) > 1:
        return f"; most keep their SLO under {_in(Counter(title(row, found) for row in rows).most_common())}"
    if len(groups[0].systems) == 1:
        return f"; {kept_by(rows[0].ran)} keep their SLO"
    others = [row.ran for row in groups[0].faithful if row is not rows[0]]
    return f"; most keep their SLO under {title(rows[0], found)}: {kept_by(rows[0].ran, others)}"


def _alone(group: Group) -> bool:
    best = group.best
    return best is not None and bool(group.ranks) and group.next_to(best) is not None and not group.tied(best)


def _lead(group: Group, found: Summary) -> str:
    best = group.best
    assert best is not None
    n = show_count(best.ran.n_requests, "request")
    where = "" if "hw" in found.varied else f" on {best.point.spec.hw}"  # else the title or the setting says it
    text = f"{title(best, found)}: {show_seconds(best.speed_s)} {ranked_by(best.ran)}{where} over {n}"
    other = group.next_to(best)
    if other is None:
        return text
    tied = [title(row, found) for row in group.tied(best)] if group.ranks else None
    return text + ahead(ratio(other, best), title(other, found), tied)


def title(row: PointRow, found: Summary) -> str:
    """What tells a point from the others of its group: its policy, and what else varies but is not `by`."""
    return ", ".join([row.label, *_settings(row, [name for name in found.axes if name not in found.by])])


def _settings(row: PointRow, names: Sequence[str]) -> list[str]:
    """`cache 20%` of each."""
    own = settings_of(row)
    return [_setting(name, own.get(name)) for name in names]


def _setting(name: str, value: Any) -> str:
    return f"{_word(name)} {_value(name, value)}"


def _cells(row: PointRow, names: Sequence[str]) -> list[str]:
    own = settings_of(row)
    return [_value(name, own.get(name)) for name in names]


def _word(name: str) -> str:
    """An axis in few letters; figures of a profile keep their path."""
    return name.removesuffix("_bytes_per_s").removesuffix("_bytes")


def _value(name: str, value: Any) -> str:
    if value is None:
        return "default"
    for end, unit, scale in [("_bytes", "GiB", GIB)] * (name in RAM) + [*_UNITS]:
        if name.endswith(end) and isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value / scale:g} {unit}"
    return show(name, value)


def counts(rows: Sequence[PointRow], found: Summary, n_twice: int, work: Work) -> str:
    """How many points, of what, and what became of them."""
    axes = ", ".join(f"{len(values)} of {_word(name)}" for name, values in found.varied.items())
    ran = sum(row.result is not None for row in rows)
    text = f"{show_count(len(rows), 'point')}" + (f": {axes}" if axes else "")
    text += f"; {ran:,} ran" if ran != len(rows) else ""
    text += f"; {n_twice:,} more were the same runs again" if n_twice else ""
    if not (work.timed_by_recording or work.there):
        return text
    told = [f"{work.there:,} recorded before"] if work.there else []
    told += [f"{work.replayed:,} replayed"] if work.replayed or work.timed_by_recording else []
    if work.timed_by_recording:
        told.append(f"{work.timed_by_recording:,} timed by the decisions of these")
    return f"{text}; {', '.join(told)}"


def groups_table(found: Summary) -> str:
    """One row per group: its settings, the fastest, and the next."""
    by, groups = found.by, [group for group in found.groups if group.systems]
    load = Columns(row.ran for group in groups for row in group.systems)
    bounded, common = _bounded(found)
    titles = [*map(_word, by), "fastest", "TPOT", *bounded, *load.titles, "hit", "peak VRAM", "next", "slower by"]
    rows = []
    for group in groups[:MOST_SHOWN]:
        best = group.faithful[0]
        other, n_tied = group.next_to(best), len(group.tied(best))
        row = [*(_value(name, group.by[name]) for name in by), title(best, found), *_measured(best, common)]
        row += [*load.cells(best.ran), show_frac(best.ran.hit_rate), show_bytes(best.ran.peak_vram_bytes)]
        if other is None:
            row += ["-", "-", "-"]
        else:
            apart = "-" if not group.ranks else f"not from {n_tied}" if n_tied else "yes"
            row += [title(other, found), show_ratio(ratio(other, best)), apart]
        rows.append(row)
    spare = ("peak VRAM", "hit", "told apart", *bounded, "slower by", "next", *load.titles)
    words = (*range(len(by) + 1), titles.index("next"))
    text = tabled([*titles, "told apart"], rows, words, spare)
    return text + _more(groups, "groups") + fold(_bound_line(found)) + load.below


def points_table(group: Group, found: Summary) -> str:
    """One row per point of the only group there is, fastest first, bounds among them."""
    points = sorted((*group.systems, *group.bounds), key=lambda row: row.speed_s)
    load = Columns(row.ran for row in points)
    bounded, common = _bounded(found)
    titles = ["point", "rank", "TPOT", *bounded, "TTFT", *load.titles, "hit", "peak VRAM", "bound by", "note"]
    rows = []
    for row in points[:MOST_SHOWN]:
        result, rank = row.ran, found.rank(row)
        cells = [title(row, found), "-" if rank is None else rank.places, *_measured(row, common)]
        cells += [show_seconds(result.ttft_s.mean or 0.0), *load.cells(result), show_frac(result.hit_rate)]
        cells += [show_bytes(result.peak_vram_bytes), str(result.bottleneck.resource)]
        notes = [label for label in result.caveats if label in ("oracle", "lossy") or "fit" in label]
        rows.append([*cells, ", ".join(notes)])
    spare = ("peak VRAM", "bound by", "hit", "TTFT", *load.titles, *bounded, "rank")
    text = tabled(titles, rows, (-2, -1), spare)
    return text + _more(points, "points") + fold(_bound_line(found)) + load.below


def _more(all_of_them: Sequence[object], what: str) -> str:
    left = len(all_of_them) - MOST_SHOWN
    return f"and {left:,} {what} more: --json, or the table of --out\n" if left > 0 else ""


def front_table(found: Summary) -> str:
    """Who is on a front of latency against memory; a front of one point per workload is no news."""
    names, blocks = found.axes, []
    for front in found.fronts:
        rows = [
            [row.label, *_cells(row, names), show_bytes(row.ran.peak_vram_bytes), show_tpot(row.ran)]
            for row in front[:MOST_SHOWN]
        ]
        if len(rows) > 1:
            titles = ["Pareto front", *map(_word, names), "peak VRAM", "TPOT"]
            blocks.append(tabled(titles, rows, range(1, len(names) + 1), ()))
    return "\n".join(blocks)


def not_run(found: Summary) -> list[str]:
    """A line for each reason, with how many points it holds for."""
    by_reason: dict[str, list[PointRow]] = {}
    for row in found.failed:
        by_reason.setdefault(row.reason, []).append(row)
    lines = []
    for reason, rows in list(by_reason.items())[:MOST_REASONS]:
        first = ", ".join([rows[0].label, *_settings(rows[0], found.axes)])
        who = first if len(rows) == 1 else f"{len(rows):,} points, the first {first}"
        lines.append(f"not run: {who}: {reason}")
    if left := sum(map(len, list(by_reason.values())[MOST_REASONS:])):
        lines.append(f"not run: {show_count(left, 'point')} more; `reason` in the table says why")
    return lines


def _bounded(found: Summary) -> tuple[list[str], Bound | None]:
    """The title of a column beside the bound of all points, and that bound; neither where they have none in common."""
    return ([], None) if found.bound is None else (["above bound"], found.bound[0])


def _measured(row: PointRow, common: Bound | None) -> list[str]:
    return [show_tpot(row.ran), *([] if common is None else [show_above(row.ran, common)])]


def _bound_line(found: Summary) -> str:
    if found.bound is None:
        return ""
    common, row = found.bound
    line = bound_line(common, ", ".join(_settings(row, found.axes)))
    return "\n" + line.removesuffix("\n") + "; each point's own is `lower_bound.tpot_s` of --json\n"


def list_of(rows: Sequence[PointRow], names: Sequence[str], n_twice: int) -> str:
    """Every point in a line: what varies, its id, and why it cannot be set up."""
    cells = [[row.label, *_cells(row, names), row.asked.id, row.reason] for row in rows]
    shown = tabled(["policy", *map(_word, names), "id", ""], cells, range(1, len(names) + 3), ())
    ready = sum(not row.reason for row in rows)
    head = f"{show_count(len(rows), 'point')}, {ready:,} to run" + (f"; {n_twice:,} said twice" if n_twice else "")
    return f"{head}\n\n{shown}"
