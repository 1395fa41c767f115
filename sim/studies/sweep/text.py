"""What `moesim sweep` prints: the answer first, then the best of each group, the Pareto front, and what did not run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sim.base.units import GIB, RAM, show_bytes, show_count, show_frac, show_seconds
from sim.results.routing_words import of_results
from sim.setup.naming import show
from sim.studies.common_bound import bound_line, show_above
from sim.studies.promised import Columns, draws_least, kept_by
from sim.studies.ranking import AS_FAST, ranked, show_tpot, speed
from sim.studies.sweep.summary import Group, Summary, ranked_by, ratio, settings_of

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.studies.runner import Work
    from sim.studies.sweep.run import PointRow

MOST_SHOWN = 40
"""Rows of a table on a terminal; the Parquet file and `--json` have all."""
MOST_NAMED = 3
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
    groups = [group for group in found.groups if group.best is not None]
    if not groups:
        return "only bounds ran" if any(row.result is not None for row in rows) else "nothing ran"
    every = [row for group in groups if (row := group.best) is not None]
    alike = [row for row in every if ranked(_of(row)) == "tpot_s"] or every  # of two kinds of times none is the least
    first = min(alike, key=lambda row: speed(_of(row)))
    changes = _changes(groups, found)
    leads = len(found.varied) > 1 and "policy" not in found.varied and bool(changes)
    before, after = (f"{changes}; ", "") if leads else ("", f"; {changes}" if changes else "")
    if len(groups) == 1:
        pays = _pays(first, groups)
        if list(found.varied) == ["draft"] and pays:
            return f"{pays.replace(' there', '', 1)}; {_lead(groups[0], found)}{_kept(groups, found)}"
        return before + _lead(groups[0], found) + (f"; {pays}" if pays else "") + _kept(groups, found)
    names = Counter(title(row, found) for group in groups if (row := group.best) is not None)
    (most, n), *others = names.most_common()
    by = f"settings of {', '.join(_word(name) for name in found.by)}"
    of = f"{len(groups)} {by}"
    if not others:
        text = f"{most}: fastest in {f'both {by}' if len(groups) == 2 else f'all {of}'}"
    else:
        said = [f"{name} in {count}" for name, count in others[:MOST_NAMED]]
        more = len(others) - MOST_NAMED
        text = f"{most}: fastest in {n} of {of}; {', '.join(said)}" + (f", {more} more elsewhere" if more > 0 else "")
    apart = sum(_alone(group) for group in groups)
    rivals = sum(group.next_to(row) is not None for group in groups if (row := group.best) is not None)
    if rivals:
        some = f"{apart or 'none'} of them" if apart < len(groups) else "both" if apart == 2 else "all of them"
        text += f"; told apart from the next in {some}"
    where = ", ".join(f"{_word(key)} {value}" for key, value in _settings(first, found.by))
    text += f"; least of all {show_seconds(speed(_of(first)))} {ranked_by(first)}: {title(first, found)} ({where})"
    pays = _pays(first, groups)
    return before + text + (f"; {pays}" if pays else "") + after + _kept(groups, found)


def _pays(best: PointRow, groups: Sequence[Group]) -> str:
    """Whether drafts pay for the fastest, where the same ran without any."""
    alike = _but_for_drafts(best)
    every = [row for group in groups for row in group.systems if _but_for_drafts(row) == alike]
    without = next((row for row in every if not _drafts(row)), None)
    if without is None or not any(_drafts(row) for row in every) or ranked(_of(without)) != "tpot_s":
        return ""
    own = next(group for group in groups if group.best is best)
    known = bool(own.ranks) and not any(row is without for row in own.tied(best))
    if not _drafts(best):
        return "drafts do not pay there"
    times = f"{ratio(without, best):.2f}x as fast as without"
    return f"drafts pay there: {times}" if known else f"whether drafts pay there is not told: {times}"


def _drafts(row: PointRow) -> bool:
    return _of(row).draft is not None


def _but_for_drafts(row: PointRow) -> dict[str, Any]:
    return {**settings_of(row), "draft": None}


def _changes(groups: Sequence[Group], found: Summary) -> str:
    """What each axis is worth, changed alone from the first setting of all: most first; lossless systems."""
    names = [name for name in found.varied if name != "policy"]
    fastest: dict[tuple[tuple[str, str], ...], float] = {}
    times = {ranked(_of(row)) for group in groups for row in group.faithful}
    if len(times) > 1:
        return ""  # a time to the first token is no multiple of one per token
    for group in groups:
        for row in group.faithful:
            at = tuple(_settings(row, names))
            fastest[at] = min(speed(_of(row)), fastest.get(at, math.inf))
    first = tuple((name, _value(name, found.varied[name][0])) for name in names)
    if not names or first not in fastest:
        return ""
    told = []
    for at, seconds in fastest.items():
        changed = [axis for axis, before in zip(at, first, strict=True) if axis != before]
        if len(changed) == 1:
            (name, value), gain = changed[0], fastest[first] / seconds
            told.append((max(gain, 1 / gain), f"{gain:.2f}x with {_word(name)} {value}"))
    if not told:
        return ""
    (_, most), *others = sorted(told, key=lambda one: -one[0])[:MOST_CHANGES]
    said = ", ".join([most.replace("x with", "x as fast with", 1), *(text for _, text in others)])
    start = ", ".join(f"{_word(name)} {value}" for name, value in first)
    return f"{said}, {'each alone ' if len(names) > 1 else ''}against {start}"


def _kept(groups: Sequence[Group], found: Summary) -> str:
    """Who keeps what was promised to the most requests, and who draws the fewest joules."""
    return _promised(groups, found) + _thrifty(groups, found)


def _thrifty(groups: Sequence[Group], found: Summary) -> str:
    systems = [row for group in groups for row in group.faithful or group.systems]
    thrifty = draws_least(systems, _of)
    if thrifty is None:
        return ""
    row, each = thrifty
    where = ", ".join(f"{_word(key)} {value}" for key, value in _settings(row, found.by))
    return f"; least energy per token: {each}, {title(row, found)}" + (f" ({where})" if where else "")


def _promised(groups: Sequence[Group], found: Summary) -> str:
    rows = [row for group in groups if (row := group.keeps) is not None]
    if not rows:
        return ""
    if len(groups) == 1 and len(groups[0].systems) == 1:
        return f"; {kept_by(_of(rows[0]))} keep their SLO"
    if len(groups) == 1:
        others = [_of(row) for row in groups[0].faithful if row is not rows[0]]
        return f"; most keep their SLO under {title(rows[0], found)}: {kept_by(_of(rows[0]), others)}"
    names = Counter(title(row, found) for row in rows).most_common()
    said = [f"{name} in {n}" for name, n in names[:MOST_NAMED]]
    more = len(names) - MOST_NAMED
    return f"; most keep their SLO under {', '.join(said)}" + (f", {more} more elsewhere" if more > 0 else "")


def _alone(group: Group) -> bool:
    best = group.best
    return best is not None and bool(group.ranks) and group.next_to(best) is not None and not group.tied(best)


def _lead(group: Group, found: Summary) -> str:
    best = group.best
    assert best is not None
    n = show_count(_of(best).n_requests, "request")
    where = "" if "hw" in found.varied else f" on {best.point.spec.hw}"  # else the title or the setting says it
    text = f"{title(best, found)}: {show_seconds(speed(_of(best)))} {ranked_by(best)}{where} over {n}"
    other = group.next_to(best)
    if other is None:
        return text
    times = ratio(other, best)
    if times == 1.0:
        return f"{text}, exactly as fast as {title(other, found)}"
    if times < AS_FAST:
        return f"{text}, as fast as {title(other, found)}"
    text += f", {_times(times)} faster than {title(other, found)}"
    if not group.ranks:
        return f"{text} there; of n = 1 no sampling error can be given, so this is no ranking"
    tied = [title(row, found) for row in group.tied(best)]
    if not tied:
        return text
    more = f" and {len(tied) - MOST_NAMED} more" if len(tied) > MOST_NAMED else ""
    return f"{text}; not told apart from {', '.join(tied[:MOST_NAMED])}{more}"


def _times(times: float) -> str:
    return f"{times:.2f}x" if times >= 1.01 else f"{100 * (times - 1):.2g} %"


def title(row: PointRow, found: Summary) -> str:
    """What tells a point from the others of its group: its policy, and what else varies but is not `by`."""
    rest = [name for name in found.varied if name not in found.by and name != "policy"]
    return ", ".join([row.label, *(f"{_word(key)} {value}" for key, value in _settings(row, rest))])


def _settings(row: PointRow, names: Sequence[str]) -> list[tuple[str, str]]:
    own = settings_of(row)
    return [(name, _value(name, own.get(name))) for name in names]


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
    from sim.base.tables import fold, prose, render, table

    by = found.by
    groups = [group for group in found.groups if group.best is not None]
    load = Columns(_of(row) for group in groups for row in group.systems)
    bounded, above = _bounded(found)
    shown = table(
        *(_word(name) for name in by),
        "fastest",
        "TPOT",
        *bounded,
        *load.titles,
        "hit",
        "peak VRAM",
        "next",
        "slower by",
        "told apart",
    )
    prose(shown, *range(len(by) + 1), len(by) + len(bounded) + len(load.titles) + 4)
    for group in groups[:MOST_SHOWN]:
        best = group.best
        assert best is not None
        other, result = group.next_to(best), _of(best)
        tied = [title(row, found) for row in group.tied(best)]
        shown.add_row(
            *(_value(name, group.by[name]) for name in by),
            title(best, found),
            show_tpot(result),
            *above(result),
            *load.cells(result),
            show_frac(result.hit_rate),
            show_bytes(result.peak_vram_bytes),
            "-" if other is None else title(other, found),
            "-" if other is None else _times(ratio(other, best)),
            "-" if other is None or not group.ranks else "yes" if not tied else f"not from {len(tied)}",
        )
    left = len(groups) - MOST_SHOWN
    more = f"and {left:,} groups more: --json, or the table of --out\n" if left > 0 else ""
    spare = ("peak VRAM", "hit", "told apart", *bounded, "slower by", "next", *load.titles)
    return render(shown, spare=spare) + more + fold(_bound_line(found)) + load.below


def points_table(group: Group, found: Summary) -> str:
    """One row per point of the only group there is, fastest first, bounds among them."""
    from sim.base.tables import fold, prose, render, table

    rows = sorted((*group.systems, *group.bounds), key=lambda row: speed(_of(row)))
    load = Columns(_of(row) for row in rows)
    bounded, above = _bounded(found)
    titles = ("TPOT", *bounded, "TTFT", *load.titles, "hit", "peak VRAM", "bound by", "note")
    shown = table("point", "rank", *titles)
    prose(shown, -2, -1)
    for row in rows[:MOST_SHOWN]:
        result, rank = _of(row), found.rank(row)
        places = "-" if rank is None else str(rank.best) if rank.best == rank.worst else f"{rank.best}-{rank.worst}"
        shown.add_row(
            title(row, found),
            places,
            show_tpot(result),
            *above(result),
            show_seconds(result.ttft_s.mean or 0.0),
            *load.cells(result),
            show_frac(result.hit_rate),
            show_bytes(result.peak_vram_bytes),
            str(result.bottleneck.resource),
            ", ".join(label for label in result.caveats if label in ("oracle", "lossy") or "fit" in label),
        )
    left = len(rows) - MOST_SHOWN
    more = f"and {left:,} points more: --json, or the table of --out\n" if left > 0 else ""
    spare = ("peak VRAM", "bound by", "hit", "TTFT", *load.titles, *bounded, "rank")
    return render(shown, spare=spare) + more + fold(_bound_line(found)) + load.below


def front_table(found: Summary) -> str:
    """Who is on a front of latency against memory; a front of one point per workload is no news."""
    from sim.base.tables import prose, render, table

    blocks = []
    for front in found.fronts:
        if len(front) < 2:
            continue
        names = [name for name in found.varied if name != "policy"]
        shown = table("Pareto front", *(_word(name) for name in names), "peak VRAM", "TPOT")
        prose(shown, *range(1, len(names) + 1))
        for row in front[:MOST_SHOWN]:
            result = _of(row)
            cells = [value for _, value in _settings(row, names)]
            shown.add_row(row.label, *cells, show_bytes(result.peak_vram_bytes), show_tpot(result))
        blocks.append(render(shown, spare=()))
    return "\n".join(blocks)


def not_run(found: Summary) -> list[str]:
    """A line for each reason, with how many points it holds for."""
    by_reason: dict[str, list[PointRow]] = {}
    for row in found.failed:
        by_reason.setdefault(row.reason, []).append(row)
    names = [name for name in found.varied if name != "policy"]
    lines = []
    for reason, rows in list(by_reason.items())[:MOST_REASONS]:
        first = ", ".join([rows[0].label, *(f"{_word(key)} {value}" for key, value in _settings(rows[0], names))])
        who = first if len(rows) == 1 else f"{len(rows):,} points, the first {first}"
        lines.append(f"not run: {who}: {reason}")
    left = [row for rows in list(by_reason.values())[MOST_REASONS:] for row in rows]
    return [
        *lines,
        *([f"not run: {show_count(len(left), 'point')} more; `reason` in the table says why"] if left else []),
    ]


def _bounded(found: Summary) -> tuple[list[str], Callable[[Result], list[str]]]:
    """A column beside the bound of all points, and its cells; none where they have no bound in common."""
    if found.bound is None:
        return [], lambda _: []
    common = found.bound[0]
    return ["above bound"], lambda result: [show_above(result, common)]


def _bound_line(found: Summary) -> str:
    if found.bound is None:
        return ""
    common, row = found.bound
    where = _settings(row, [name for name in found.varied if name != "policy"])
    line = bound_line(common, ", ".join(f"{_word(key)} {value}" for key, value in where))
    return "\n" + line.removesuffix("\n") + "; each point's own is `lower_bound.tpot_s` of --json\n"


def _of(row: PointRow) -> Result:
    assert row.result is not None
    return row.result


def list_of(rows: Sequence[PointRow], names: Sequence[str], n_twice: int) -> str:
    """Every point in a line: what varies, its id, and why it cannot be set up."""
    from sim.base.tables import prose, render, table

    shown = table("policy", *(_word(name) for name in names), "id", "")
    prose(shown, *range(1, len(names) + 3))
    for row in rows:
        shown.add_row(row.label, *(value for _, value in _settings(row, names)), row.asked.id, row.reason)
    ready = sum(not row.reason for row in rows)
    head = f"{show_count(len(rows), 'point')}, {ready:,} to run" + (f"; {n_twice:,} said twice" if n_twice else "")
    return f"{head}\n\n{render(shown, spare=())}"
