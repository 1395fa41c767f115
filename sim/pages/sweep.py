"""The page of a sweep: selectors for its axes, so that the file answers what-if questions by itself."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.options import OPTIONS
from sim.pages.curves import plot_of
from sim.pages.page import Cell, Column, Explorer, Note, Page, Plot, Section, Table
from sim.pages.plots import against_memory
from sim.results.figure import label_of, plot_unit
from sim.studies.rows import kind_of

if TYPE_CHECKING:
    from sim.pages.inputs import Grid

# An axis of a sweep -> its column in the table, where that has another name.
COLUMN_OF = {"policy": "label"} | {row.key: row.columned for row in OPTIONS.axes}
TITLES = {"label": "policy", "max_requests": "requests", "cache": "room for experts", "vram_bytes": "VRAM cap"}
MEASURED = (
    *("tpot_s.mean", "ttft_s.mean", "e2e_s.mean", "peak_vram_bytes", "memory.cache_capacity_bytes"),
    *("throughput_tokens_per_s", "hit_rate", "miss_rate", "h2d_bytes", "bottleneck.decode.copy"),
)
COMMON = ("above_common_bound_frac", "above the lower bound of all points", "frac")
MOST_FRONT, MOST_REASONS, MOST_LINES = 60, 30, 21
BUDGETS = {"cache", "vram_bytes"}
HITS = {
    "experts": ("experts", "n"),
    "cache_frac": ("share", "frac"),
    "hit_rate": ("hits", "frac"),
    "demand_copies_n": ("copies", "n"),
    "h2d_bytes": ("copied", "bytes"),
}
MANY = 4_000  # points, above which a page holds fewer figures of each
OF_MANY = {"tpot_s.mean", "ttft_s.mean", "peak_vram_bytes", "hit_rate"}


def of_grid(grid: Grid) -> Page:
    """The page. Raises BadInput for a table in which nothing ran."""
    return _of_hits(grid) if grid.hits else _of_points(grid)


def _of_points(grid: Grid) -> Page:
    ran = [row for row in grid.rows if row.get("status") == "ok"]
    failed = [row for row in grid.rows if row.get("status") != "ok"]
    if not ran:
        why = next((str(row.get("reason")) for row in failed), "it is empty")
        raise BadInput(f"sweep, got a table in which no point ran ({why}); sweep what can run")
    axes = _axes(grid)
    answer = grid.answer or f"{show_count(len(grid.rows), 'point')}, {len(ran):,} ran"
    sections = [_choose(ran, axes), _front(ran, axes), *_not_run(failed)]
    counted = f"{show_count(len(grid.rows), 'point')}, {len(ran):,} ran."
    return Page("sweep", "A sweep", answer, [counted, *grid.notes], sections)


def _axes(grid: Grid) -> list[str]:
    """Columns of the axes, as far as they hold several values."""
    names = [COLUMN_OF.get(name, name) for name in grid.varied]
    found = [name for name in dict.fromkeys(names) if len({row.get(name) for row in grid.rows}) > 1]
    return found if "label" in found else ["label", *found]


def _unit(name: str) -> str:
    return "bytes" if name.endswith("_bytes") else ""


def _title(name: str) -> str:
    return TITLES.get(name, name.replace("_", " ") if "." not in name else name)


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    """What a row is of, and its caveats in words."""
    told = row.get("caveats")
    labels = [str(label) for label in told] if isinstance(told, list) else []
    return kind_of(labels), ", ".join(labels)


def _short(value: Any, digits: int) -> Cell:
    """A figure that is only drawn and shown."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _choose(rows: list[dict[str, Any]], axes: list[str]) -> Section:
    many = len(rows) > MANY
    digits = 5 if many else 7
    known = [*((key, label_of(key), plot_unit(key)) for key in MEASURED), COMMON]
    measures = [one for one in known if any(row.get(one[0]) is not None for row in rows)]
    measures = [one for one in measures if not many or one[0] in OF_MANY]
    numeric = [name for name in axes if all(type(row.get(name)) in (int, float, type(None)) for row in rows)]
    kinds = [_kind(row) for row in rows]
    common = set(kinds[0][1].split(", ")).intersection(*(set(note.split(", ")) for _, note in kinds))
    columns = [(name, _title(name), _unit(name) or ("x" if name in numeric else "")) for name in axes]
    columns += [*measures, ("kind", "kind", ""), ("note", "note", "")]
    shown: list[list[Any]] = [
        [
            *(_short(row.get(name), digits) for name in axes),
            *(_short(row.get(name), digits) for name, _, _ in measures),
            kind,
            ", ".join(word for word in note.split(", ") if word not in common),
        ]
        for row, (kind, note) in zip(rows, kinds, strict=True)
    ]
    names = [name for name, _, _ in measures]
    time = next((name for name in ("tpot_s.mean", "ttft_s.mean") if name in names), names[0])
    room = next((name for name in numeric if len({row.get(name) for row in rows}) > 2), "peak_vram_bytes")
    goal, capacities = (time, "peak_vram_bytes"), [name for name in axes if name in BUDGETS]
    measured = [*names, *numeric]
    explorer = Explorer("points", columns, shown, axes, measured, room, time, "label", goal, capacities)
    blocks: list[Any] = [explorer]
    if common - {""}:
        blocks.append(Note([f"All of them: {', '.join(sorted(common))}."]))
    sentence = "Choose values, what is drawn against what, and a goal: the sentence, the plot and the rows follow."
    if many:
        sentence += f" Of more than {MANY:,} points a page holds fewer figures; `sweep.parquet` has all."
    return Section("choose", "What if", sentence, blocks)


def _front(rows: list[dict[str, Any]], axes: list[str]) -> Section:
    """Time against memory, a line for each policy, machine and workload; and the points that nothing beats."""
    on_front = [row for row in rows if row.get("pareto")][:MOST_FRONT]
    columns = [*(Column(_title(name), _unit(name)) for name in axes), Column("peak VRAM", "bytes"), Column("TPOT", "s")]
    cells: list[list[Any]] = [
        [*(row.get(name) for name in axes), row.get("peak_vram_bytes"), row.get("tpot_s.mean")] for row in on_front
    ]
    sentence = (
        "Down is faster, left takes less memory; the grey line joins lossless systems that no other of the same "
        "workload beats in both."
    )
    table = Table("The Pareto front, least memory first.", columns, sorted(cells, key=lambda row: row[-2] or 0))
    return Section("front", "Time against memory", sentence, [*_memory(rows, axes, on_front), table])


def _memory(rows: list[dict[str, Any]], axes: list[str], on_front: list[dict[str, Any]]) -> list[Plot]:
    """The plot; none where the policies and settings are too many for one."""
    own = [name for name in axes if name not in BUDGETS and len({row.get(name) for row in rows}) > 1]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (at := _at(row)) is not None:
            rest = [f"{_title(name)} {row.get(name)}" for name in own if name != "label"]
            bound = ["(bound)"] if _kind(row)[0] == "bound" else []
            lines.setdefault(" ".join([", ".join([str(row["label"]), *rest]), *bound]), []).append(at)
    if not lines or len(lines) > MOST_LINES:
        return []
    return [against_memory("TPOT", lines, sorted(at for row in on_front if (at := _at(row)) is not None))]


def _at(row: dict[str, Any]) -> tuple[float, float] | None:
    memory, time_s = row.get("peak_vram_bytes"), row.get("tpot_s.mean")
    return None if memory is None or time_s is None else (memory, time_s)


def _not_run(failed: list[dict[str, Any]]) -> list[Section]:
    if not failed:
        return []
    reasons = Counter((str(row.get("status")), str(row.get("reason"))) for row in failed)
    rows: list[list[Any]] = [[n, status, reason] for (status, reason), n in reasons.most_common(MOST_REASONS)]
    columns = [Column("points", "n"), Column("status"), Column("reason")]
    sentence = f"{show_count(len(failed), 'point')} could not run; `sweep.parquet` has the reason of each."
    return [Section("not-run", "Not run", sentence, [Table("Why, most frequent first.", columns, rows)])]


def _of_hits(grid: Grid) -> Page:
    """Miss-ratio curves, a line for each cache and workload."""
    own = [name for name in ("trace", "model", "batch", "split", "precision", "seed") if _several(grid.rows, name)]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in grid.rows:
        label = ", ".join([str(row.get("label")), *(f"{_title(name)} {row.get(name)}" for name in own)])
        if isinstance(row.get("hit_rate"), float) and isinstance(row.get("cache_frac"), float):
            lines.setdefault(label, []).append(row)
    if not lines:
        raise BadInput("hits, got a table without a hit rate: count hits of some requests")
    shown = [
        (label, [row["cache_frac"] for row in rows], [row["hit_rate"] for row in rows]) for label, rows in lines.items()
    ]
    columns = [Column("cache"), *(Column(title, unit) for title, unit in HITS.values())]
    cells: list[list[Any]] = [
        [label, *(row.get(key) for key in HITS)]
        for label, rows in lines.items()
        for row in rows[:: max(1, len(rows) // 16)]
    ]
    table = Table("Hits and copies by room.", columns, cells, folded=True)
    sentence = "Each line is one cache at every size, counted in one pass; where it is steep, memory pays."
    section = Section("misses", "Misses by room", sentence, [plot_of(shown), table])
    return Page("hits", "Hits by room", grid.answer or "Hits of caches of every size", grid.notes, [section])


def _several(rows: list[dict[str, Any]], name: str) -> bool:
    return len({row.get(name) for row in rows}) > 1
