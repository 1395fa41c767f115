"""What `moesim sweep` prints: the answer first, then the best of each group, the Pareto front, and what did not run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.base.tables import fold, tabled
from sim.base.units import GIB, RAM, show_count
from sim.results.routing_words import of_results
from sim.setup.naming import machine_of, show
from sim.studies.row_text import LOAD, Table, few, keeps_slo, lead, pace, set_for_all, show_ratio, thrifty
from sim.studies.rows import Group
from sim.studies.sweep.summary import Summary, settings_of

if TYPE_CHECKING:
    from sim.studies.rows import Row
    from sim.studies.runner.runner import Work

MOST = 40
"""Rows of a table on a terminal; the Parquet file and `--json` have all."""
MOST_REASONS = 5
MOST_CHANGES = 4
_UNITS = (("_bytes_per_s", "GB/s", 1e9), ("_bytes", "GB", 1e9))


class SweepText:
    """A sweep in words."""

    def __init__(self, rows: Sequence[Row], found: Summary) -> None:
        self.rows, self.found = rows, found
        self.groups = [group for group in found.groups if group.systems]

    def answer(self) -> str:
        """The first line: who is fastest, where, by how much, from whom the requests do not tell it apart, and whether
        routing rests on little.

        Of one policy in several machines or settings, what each of these is worth stands first.
        """
        return self._fastest() + of_results(row.ran for row in self.rows if row.result is not None)

    def _fastest(self) -> str:
        found, groups, every = self.found, self.groups, self.found.leaders
        if not every:
            return "only bounds ran" if any(row.result is not None for row in self.rows) else "nothing ran"
        alike = [row for row in every if row.time == "tpot_s"] or every  # of two kinds of times none is the least
        first = min(alike, key=lambda row: row.speed_s)
        changes, pays, kept = self._changes(), self._pays(first), self._kept()
        leads = len(found.varied) > 1 and "policy" not in found.varied
        before = f"{changes}; " if leads and changes else ""
        worth = f"; {pays}" if pays else ""
        if len(groups) == 1:
            where = "" if "hw" in found.varied else f" on {machine_of(first.ran.hw, set_for_all(every))}"
            text = lead(groups[0], self.title, where)
            if list(found.varied) == ["draft"] and pays:
                return f"{pays.replace(' there', '', 1)}; {text}{kept}"
            return before + text + worth + kept
        (most, n), *others = Counter(map(self.title, every)).most_common()
        by = f"settings of {', '.join(map(_word, found.by))}"
        of = f"{len(groups)} {by}"
        if not others:
            text = f"{most}: fastest in {f'both {by}' if len(groups) == 2 else f'all {of}'}"
        else:
            text = f"{most}: fastest in {n} of {of}; {_in(others)}"
        if any(group.second is not None for group in groups):
            apart = sum(bool(group.ranks and group.second and not group.tied(group.faithful[0])) for group in groups)
            some = f"{apart or 'none'} of them" if apart < len(groups) else "both" if apart == 2 else "all of them"
            text += f"; told apart from the next in {some}"
        text += f"; least of all {pace(first)}: {self._where(first)}"
        return before + text + worth + (f"; {changes}" if changes and not leads else "") + kept

    def title(self, row: Row) -> str:
        """What tells a point from the others of its group: its policy, and what else varies but is not `by`."""
        names = [name for name in self.found.axes if name not in self.found.by]
        return ", ".join([row.label, *_settings(row, names)])

    def _where(self, row: Row) -> str:
        """The same, and what its group has in common."""
        where = ", ".join(_settings(row, self.found.by))
        return self.title(row) + (f" ({where})" if where else "")

    def _pays(self, best: Row) -> str:
        """Whether drafts pay for the fastest, where the same ran without any."""
        alike = _but_for_drafts(best)
        every = [row for group in self.groups for row in group.systems if _but_for_drafts(row) == alike]
        without = next((row for row in every if row.ran.draft is None), None)
        if without is None or all(row.ran.draft is None for row in every) or without.time != "tpot_s":
            return ""
        if best.ran.draft is None:
            return "drafts do not pay there"
        own = next(group for group in self.groups if group.best is best)
        times = f"{_ratio(without, best):.2f}x as fast as without"
        known = own.ranks and without not in own.tied(best)
        return f"drafts pay there: {times}" if known else f"whether drafts pay there is not told: {times}"

    def _changes(self) -> str:
        """What each axis is worth, changed alone from the first setting of all: most first; lossless systems."""
        found = self.found
        fastest: dict[tuple[str, ...], float] = {}
        rows = [row for group in self.groups for row in group.faithful]
        if len({row.time for row in rows}) > 1:
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

    def _kept(self) -> str:
        """Who keeps what was promised to the most requests, and who draws the fewest joules."""
        if len(self.groups) == 1:
            text = keeps_slo(self.groups[0], self.title)
        else:
            most = Counter(self.title(row) for group in self.groups if (row := group.keeps) is not None).most_common()
            text = f"; most keep their SLO under {_in(most)}" if most else ""
        return text + thrifty([row for group in self.groups for row in group.faithful], self._where)

    def counts(self, n_twice: int, work: Work) -> str:
        """How many points, of what, and what became of them."""
        axes = ", ".join(f"{len(values)} of {_word(name)}" for name, values in self.found.varied.items())
        ran = sum(row.result is not None for row in self.rows)
        text = f"{show_count(len(self.rows), 'point')}" + (f": {axes}" if axes else "")
        text += f"; {ran:,} ran" if ran != len(self.rows) else ""
        text += f"; {n_twice:,} more were the same runs again" if n_twice else ""
        if not (work.timed_by_recording or work.there):
            return text
        told = [f"{work.there:,} recorded before"] if work.there else []
        told += [f"{work.replayed:,} replayed"] if work.replayed or work.timed_by_recording else []
        told += [f"{work.timed_by_recording:,} timed by the decisions of these"] if work.timed_by_recording else []
        return f"{text}; {', '.join(told)}"

    def tables(self) -> str:
        """The points of the only group there is, or the best of each; the Pareto front; and what did not run.

        Where nothing but bounds ran, all of them stand in one table.
        """
        groups, ran = self.found.groups, [row for row in self.rows if row.result is not None]
        if len(groups) > 1 and self.groups:
            main = self._best()
        else:
            main = self._points(groups[0] if len(groups) == 1 else Group(ran)) if ran else ""
        return "\n".join(filter(None, [main, *self._fronts(), fold("".join(self._not_run()))]))

    def _points(self, group: Group) -> str:
        """Fastest first, bounds among them."""
        table = Table(group.rows, group.ranks, self.found.common, most=MOST)
        columns = f"rank tpot_s.mean above ttft_s.mean {LOAD} hit_rate peak_vram_bytes bottleneck.resource note"
        text = table.text(["point"], lambda row: [self._where(row)], columns)
        return text + _more(len(group.rows), "points") + table.below(self._where, *self._bound())

    def _best(self) -> str:
        """One row per group: its settings, the fastest, and the next."""
        by, own = self.found.by, {group.faithful[0]: group for group in self.groups}
        table = Table([*own], {}, self.found.common, most=MOST)

        def next_(row: Row) -> list[str]:
            group, second = own[row], own[row].second
            if second is None:
                return ["-", "-", "-"]
            n_tied = len(group.tied(row))
            apart = "-" if not group.ranks else f"not from {n_tied}" if n_tied else "yes"
            return [self.title(second), show_ratio(_ratio(second, row)), apart]

        text = table.text(
            [*map(_word, by), "fastest"],
            lambda row: [*_cells(row, by), self.title(row)],
            f"tpot_s.mean above {LOAD} hit_rate peak_vram_bytes",
            more=("next", "slower by", "told apart"),
            further=next_,
        )
        return text + _more(len(own), "groups") + table.below(self._where, *self._bound())

    def _bound(self) -> list[str]:
        """Where the lower bound holds that stands below a table, and what is kept of each point's own."""
        common = self.found.common
        where = [] if common is None else _settings(common.whose, self.found.axes)
        return [", ".join(where), "; each point's own is `lower_bound.tpot_s` of --json"]

    def _fronts(self) -> list[str]:
        """Who is on a front of latency against memory; a front of one point per workload is no news."""
        names = self.found.axes
        return [
            Table(front, {}, most=MOST).text(
                ["Pareto front", *map(_word, names)],
                lambda row: [row.label, *_cells(row, names)],
                "peak_vram_bytes tpot_s.mean",
            )
            for front in self.found.fronts
            if len(front) > 1
        ]

    def _not_run(self) -> list[str]:
        """A line for each reason, with how many points it holds for."""
        by_reason: dict[str, list[Row]] = {}
        for row in self.found.failed:
            by_reason.setdefault(row.reason, []).append(row)
        lines = []
        for reason, rows in list(by_reason.items())[:MOST_REASONS]:
            first = ", ".join([rows[0].label, *_settings(rows[0], self.found.axes)])
            who = first if len(rows) == 1 else f"{len(rows):,} points, the first {first}"
            lines.append(f"not run: {who}: {reason}\n")
        if left := sum(map(len, list(by_reason.values())[MOST_REASONS:])):
            lines.append(f"not run: {show_count(left, 'point')} more; `reason` in the table says why\n")
        return lines


def _in(names: Sequence[tuple[str, int]]) -> str:
    """`lru in 3, lfu in 2`, of many the first few."""
    return few([f"{name} in {n}" for name, n in names]).replace(" more", " more elsewhere")


def _but_for_drafts(row: Row) -> dict[str, Any]:
    return {**settings_of(row), "draft": None}


def _ratio(slower: Row, faster: Row) -> float:
    return slower.speed_s / faster.speed_s if faster.speed_s > 0 else math.inf


def _settings(row: Row, names: Sequence[str]) -> list[str]:
    """`cache 20%` of each."""
    own = settings_of(row)
    return [_setting(name, own.get(name)) for name in names]


def _setting(name: str, value: Any) -> str:
    return f"{_word(name)} {_value(name, value)}"


def _cells(row: Row, names: Sequence[str]) -> list[str]:
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


def _more(n: int, what: str) -> str:
    return f"and {n - MOST:,} {what} more: --json, or the table of --out\n" if n > MOST else ""


def list_of(rows: Sequence[Row], names: Sequence[str], n_twice: int) -> str:
    """Every point in a line: what varies, its id, and why it cannot be set up."""
    cells = [[row.label, *_cells(row, names), row.asked.id, row.reason] for row in rows]
    shown = tabled(["policy", *map(_word, names), "id", ""], cells, range(1, len(names) + 3), ())
    ready = sum(not row.reason for row in rows)
    head = f"{show_count(len(rows), 'point')}, {ready:,} to run" + (f"; {n_twice:,} said twice" if n_twice else "")
    return f"{head}\n\n{shown}"
