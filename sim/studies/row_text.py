"""What is said of runs beside one another: columns of tables, for text and pages alike, and sentences of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sim.base.tables import fold, tabled
from sim.base.units import show_count, show_frac, show_fracs, show_joules, show_number, show_seconds, show_value
from sim.figures import row_of
from sim.results.figure import label_of, plot_unit
from sim.results.text import no_joules
from sim.studies.rows import draws_least

if TYPE_CHECKING:
    from sim.setup.naming import Overrides
    from sim.studies.rows import Common, Group, Rank, Row

AS_FAST = 1.0 + 1e-9  # a ratio of times below this is rounding
MOST_NAMED = 3  # of those that a run is tied with; tables show all
MOST_IN_A_CELL = 32  # characters of a caveat; a longer one stands below the table
ROUNDING = 1e-9
LANES = {"copy": "with this link and room", "copy + cpu": "with experts on the CPU too"}

LOAD = "queue_s.mean slo.attained_frac slo.goodput_requests_per_s energy.joules_per_token"
SPARE = f"peak_vram_bytes copied late_hit_rate times_ttft ttft_s.mean hit_rate bottleneck.resource {LOAD} above rank"
"""Columns that a narrow terminal may go without, in the order in which they go."""


@dataclass
class Column:
    """A column of a table of runs.

    Attributes:
        unit: as pages call units; nothing for words. read: its value for a run. show: the value as text.
        mark: what is said behind that.
    """

    title: str
    unit: str
    read: Callable[[Row], Any]
    show: Callable[[Any], str] | None = None
    mark: Callable[[Row], str] = lambda _: ""

    def text(self, row: Row) -> str:
        """The cell of a table."""
        value = self.read(row)
        if isinstance(value, str):
            return value
        if value is None:
            return "-"
        return (self.show(value) if self.show else show_value(value, self.unit)) + self.mark(row)


@dataclass
class Table:
    """Runs as rows.

    Args:
        rows: in their order. ranks: of those that have one. common: the bound of all. base: the run that the others
            are held against. most: rows that text shows, and then no caveats of
            single ones below them.
    """

    rows: Sequence[Row]
    ranks: dict[Row, Rank]
    common: Common | None = None
    base: Row | None = None
    most: int | None = None

    def columns(self, names: str) -> list[Column]:
        """Those of these, with blanks between, that some run has a value for; `rank` always. Names are keys of figures,
        or of what is known of runs beside others."""
        columns = [(name, self._column(name)) for name in names.split()]
        return [one for name, one in columns if name == "rank" or any(one.read(row) is not None for row in self.rows)]

    def _column(self, name: str) -> Column:
        base, common = self.base, self.common
        if name == "rank":
            return Column("rank", "n", lambda row: self.ranks[row].places if row in self.ranks else None)
        if name == "above":
            return Column("above bound", "frac", lambda row: common and common.above_frac(row), _whole_percent)
        if name in ("times", "times_ttft"):
            time, said = ("tpot_s", "") if name == "times" else ("ttft_s", "TTFT ")
            title = f"{said}vs {base.label}" if base else ""
            return Column(title, "x", lambda row: base and row.times(base, time), show_times)  # type: ignore[arg-type]
        if name == "copied":
            return Column(
                "to the GPU per token", "bytes", lambda row: row.ran.h2d_bytes / (row.ran.n_outputs or math.inf)
            )
        if name == "note":
            return Column("note", "", lambda row: ", ".join(self.caveats(row, MOST_IN_A_CELL)))
        figure = row_of(name)
        assert figure is not None
        if name == "queue_s.mean":
            return Column("queue", "s", lambda row: row.ran.load and row.ran.queue_s.mean, mark=_grows)
        return Column(
            label_of(name), "" if figure.kind == "text" else plot_unit(name), lambda row: figure.read(row.ran)
        )

    def text(
        self,
        first: Sequence[str],
        cells: Callable[[Row], Sequence[str]],
        names: str,
        last: Sequence[str] = (),
        more: Sequence[str] = (),
        further: Callable[[Row], Sequence[str]] = lambda _: (),
    ) -> str:
        """The rows under their titles: words that tell each from the others, then columns.

        Args:
            first: titles of these words. cells: of a row. last: labels of what does not run.
            more, further: titles and cells behind the columns, a word and numbers.
        """
        found = self.columns(names)
        rows = [[*cells(row), *(one.text(row) for one in found), *further(row)] for row in self.rows[: self.most]]
        rows += [[label, *["-"] * (len(found) - 1), "does not run"] for label in last]
        words = [at for at, one in enumerate(found, len(first)) if not one.unit]
        words += [*range(1, len(first)), *range(len(first) + len(found), len(first) + len(found) + len(more[:1]))]
        spare = [*(self._column(name).title for name in SPARE.split()), *reversed(more)]
        return tabled([*first, *(one.title for one in found), *more], rows, words, spare)

    def caveats(self, row: Row, most: int | None = None) -> list[str]:
        """Those that tell a run from the others, `oracle` first; `most`: characters of each."""
        own = [note for note in row.ran.caveats if note not in self.shared]
        own.sort(key=lambda note: note != "oracle")
        return [note for note in own if most is None or len(note) <= most]

    @cached_property
    def shared(self) -> list[str]:
        """Caveats that every run has, so that they are the trace's, not a policy's; of one run, none."""
        first, *others = (row.ran.caveats for row in self.rows)
        return [note for note in first if note != "oracle" and others and all(note in some for some in others)]

    def below(self, title: Callable[[Row], str], where: str = "", beside: str = "") -> str:
        """What stands under the table: whose joules are not known, caveats too long for a cell, and the bound.

        Args:
            where: settings of the run whose own the bound is. beside: what is said behind it.
        """
        lines = [f"vs {self.base.label}: times as fast"] if self.base else []
        lines += [f"energy {why}" for why in dict.fromkeys(no_joules(row.ran) for row in self.rows) if why]
        told = [(title(row), note) for row in self.rows for note in self.caveats(row) if len(note) > MOST_IN_A_CELL]
        if self.most is None:
            lines += [f"{who}: {note}" for who, note in told]
        elif told:
            lines.append(f"{show_count(len(told), 'caveat')} of single points: --json")
        lines += [f"all of them: {', '.join(self.shared)}"] if self.shared else []
        lines += [bound_line(self.common, where) + beside] if self.common else []
        return fold("".join(f"{line}\n" for line in ("", *lines))) if lines else ""


def _grows(row: Row) -> str:
    return ", grows" if row.ran.load is not None and not row.ran.load.stable else ""


def _whole_percent(frac: float) -> str:
    return f"{100 * frac:.0f} %"


def show_times(ratio: float) -> str:
    """`1.00x` is the baseline alone, and what is exactly as fast."""
    text = f"{ratio:.2f}x" if 0.095 <= ratio < 99.5 else f"{ratio:.3g}x" if ratio < 999.5 else f"{ratio:,.0f}x"
    return f"{ratio:.4f}x" if text == "1.00x" and abs(ratio - 1) > ROUNDING else text


def show_ratio(times: float) -> str:
    """`1.25x`, or in percent where that would be all but 1."""
    return f"{times:.2f}x" if times >= 1.01 else f"{100 * (times - 1):.2g} %"


def bound_line(common: Common, where: str = "") -> str:
    """The bound of all runs of a table. where: settings of the run whose own it is."""
    at = f", {where}" if where else ""
    least, lanes = show_seconds(common.bound.tpot_s or 0.0), LANES[common.bound.resource]
    return f"lower bound: TPOT {least}, which no lossless policy in this table beats ({lanes}{at})"


def set_for_all(rows: Iterable[Row]) -> Overrides:
    """What was set for every run alike; what was set for one stands in its label."""
    first, *others = (row.ran.overrides for row in rows)
    return {key: value for key, value in first.items() if all(key in own and own[key] == value for own in others)}


def pace(row: Row) -> str:
    """`649 ms per token`: what is ranked of a run."""
    return f"{show_seconds(row.speed_s)} {'per token' if row.time == 'tpot_s' else 'to the first token'}"


def takes(row: Row, where: str) -> str:
    """`649 ms per token on rtx3090 over 4 requests`."""
    n = row.sample
    assert n is not None
    batches = f" in {n.n} batch{'es' * (n.n > 1)}" if n.n != n.n_requests else ""
    return f"{pace(row)}{where} over {show_count(n.n_requests, 'request')}{batches}"


def lead(group: Group, title: Callable[[Row], str], where: str) -> str:
    """The fastest lossless system, by how much the next is slower, whom these requests do not tell it apart from, and
    which lossy one is faster still. Only where every system is lossy, the fastest of them comes first."""
    best, second = group.best, group.second
    assert best is not None
    text = f"{title(best)}: {takes(best, where)}"
    if second is not None and best.speed_s:
        text += _ahead(second.speed_s / best.speed_s, group, title)
    first = group.systems[0]
    return text + ("" if first is best else f"; a lossy one, {title(first)}, takes {show_seconds(first.speed_s)}")


def _ahead(times: float, group: Group, title: Callable[[Row], str]) -> str:
    best, second = group.faithful[:2]
    if times < AS_FAST:  # exactly: on each of the requests, none told them apart
        return f", {'exactly as' if times == 1.0 else 'as'} fast as {title(second)}"
    text = f", {show_ratio(times)} faster than {title(second)}"
    if not group.ranks:
        return f"{text} there; of n = 1 no sampling error can be given, so this is no ranking"
    tied = [row for row in group.tied(best) if best.lossy or not row.lossy]
    said = ["it"] if tied == [second] else [title(row) for row in tied]
    return text + (f"; not told apart from {few(said)}" if said else "")


def few(names: Sequence[str]) -> str:
    """`a, b, c and 2 more`."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def keeps_slo(group: Group, title: Callable[[Row], str]) -> str:
    """Who keeps what was promised to the most requests; nothing where nothing was promised."""
    row = group.keeps
    if row is None or (slo := row.ran.slo) is None:
        return ""
    more = []
    if slo.attained_ends is not None:
        shares = [other.ran.slo.attained_frac or 0.0 for other in group.faithful if other is not row and other.ran.slo]
        n = sum(share >= slo.attained_ends[0] for share in shares)
        beside = f", as {show_count(n, 'other')}" if n else ""
        more.append(f"{show_fracs(slo.attained_ends)} at 95 %{beside}")
    if slo.goodput_requests_per_s is not None:
        more.append(f"goodput {show_number(slo.goodput_requests_per_s)} requests/s")
    kept = show_frac(slo.attained_frac) + (f" ({'; '.join(more)})" if more else "")
    if len(group.systems) == 1:
        return f"; {kept} keep their SLO"
    return f"; most keep their SLO under {title(row)}: {kept}"


def thrifty(rows: Sequence[Row], title: Callable[[Row], str]) -> str:
    """Who draws the fewest joules; nothing where nobody counts them."""
    found = draws_least(rows)
    if found is None:
        return ""
    row, each_j = found
    if len(rows) == 1:
        return f"; {show_joules(each_j)} per token"
    return f"; least energy per token under {title(row)}: {show_joules(each_j)}"
