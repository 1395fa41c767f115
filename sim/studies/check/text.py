"""A checked baseline for people: the answer, what is off, and the same as Markdown and JUnit XML."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from sim.base.tables import tabled
from sim.base.units import show_count
from sim.results.compared import BETTER, NEW, SAME
from sim.results.figure import show_figure
from sim.studies.check.check import MISSPELT
from sim.studies.runner.work import OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.check.check import Checked, Judged, Verdict

WORDS = {NEW: "not recorded yet (--update records them)", MISSPELT: "misspelt"}
_TITLES = ("run", "figure", "expected", "found", "change", "may differ by", "")


def answer(verdict: Verdict) -> str:
    """The first line: whether all holds, and else what is off the most."""
    n = Counter(one.verdict for run in verdict.runs for one in run.figures)
    every = f"{show_count(n.total(), 'figure')} of {show_count(len(verdict.runs), 'run')}"
    if not verdict.failed:
        more = f"; {show_count(n[BETTER], 'figure')} better (--update records that)" if n[BETTER] else ""
        return f"as expected: {every}{more}"
    parts = [f"{n[kind]:,} {WORDS.get(kind, kind)}" for kind in verdict.failing if n[kind]]
    if stopped := sum(run.status != OK for run in verdict.runs):
        parts.append(f"{show_count(stopped, 'run')} did not run")
    return f"not as expected: {', '.join(parts)}; {every} were checked; {_first(verdict, verdict.failed[0])}"


def _first(verdict: Verdict, run: Checked) -> str:
    if run.status != OK:
        return f"the first, {run.name}, did not run: {run.reason}"
    one = verdict.failures(run)[0]
    if one.verdict == MISSPELT:
        return f"the first: {run.name}, {one.key}: {one.why}"
    before = "nothing is recorded" if one.verdict == NEW else f"expected {show_figure(one.key, one.a)}"
    return f"the first: {run.name}, {one.key} is {show_figure(one.key, one.b)}, {before}"


def inputs_line(verdict: Verdict) -> str:
    """What the names in the file mean now that they did not when it was recorded; empty where nothing changed."""
    if not verdict.changed_inputs:
        return ""
    return f"inputs that changed since it was recorded: {', '.join(verdict.changed_inputs)}"


def rows_of(verdict: Verdict, every: bool) -> list[tuple[str, ...]]:
    """One row per figure that is not the same (all of them with `every`), and per run that did not run."""
    rows: list[tuple[str, ...]] = []
    for run in verdict.runs:
        if run.status != OK:
            rows.append((run.name, *["-"] * 5, f"did not run: {run.reason}"))
        for one in run.figures:
            if every or one.verdict != SAME:
                numbers = show_figure(one.key, one.a), show_figure(one.key, one.b), change(one)
                rows.append((run.name, one.key, *numbers, one.tolerance, one.why or one.verdict))
    return rows


def change(one: Judged) -> str:
    """By how much a figure is off, as a share of what was expected where that can be said."""
    if one.b is None or one.a is None:
        return "-"
    if one.b == one.a:
        return "none"
    if one.a == 0:
        return "from 0"
    frac = (one.b - one.a) / abs(one.a)
    return f"{100.0 * frac:+,.0f} %" if abs(frac) >= 9.995 else f"{100.0 * frac:+.3g} %"


def table_of(verdict: Verdict, every: bool) -> str:
    """The rows as a table; empty where there are none."""
    rows = rows_of(verdict, every)
    return tabled(_TITLES, rows, words=(1, 6), spare=("may differ by", "change")) if rows else ""


def markdown(verdict: Verdict) -> str:
    """For a pull request or the summary of a job."""
    mark = "❌" if verdict.failed else "✅"
    lines = [f"### {mark} moesim check {verdict.held.path.name}", "", _cell(answer(verdict))]
    if verdict.changed_inputs:
        lines += ["", _cell(inputs_line(verdict))]
    off, every = rows_of(verdict, False), rows_of(verdict, True)
    if off:
        lines += ["", *_table(off)]
    if len(every) > len(off):
        lines += ["", f"<details><summary>all {show_count(len(every), 'figure')}</summary>", "", *_table(every)]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    head = ["| " + " | ".join((*_TITLES[:-1], "verdict")) + " |", "|---|---|---:|---:|---:|---:|---|"]
    return [*head, *("| " + " | ".join(_cell(text) for text in row) + " |" for row in rows)]


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def junit(verdict: Verdict) -> str:
    """JUnit XML: a test case per figure, named by run and figure."""
    cases: list[tuple[str, str, str, str, str]] = []  # run, figure, what became of it, why, and of which kind
    for run in verdict.runs:
        if run.status != OK:
            cases.append((run.name, "run", "error", run.reason, run.status))
        failures = verdict.failures(run)
        for one in run.figures:
            told = one.why or f"is {one.b!r}, expected {one.a!r}, may differ by {one.tolerance}"
            became = "failure" if one in failures else ""
            cases.append((run.name, one.key, became, f"{one.key} {told}", one.verdict))
    n = {"tests": len(cases)} | {f"{what}s": sum(one[2] == what for one in cases) for what in ("failure", "error")}
    counts = {name: str(count) for name, count in n.items()}
    top = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(top, "testsuite", {"name": f"moesim check {verdict.held.path.name}", **counts})
    for name, key, became, message, kind in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=_printable(name), name=key)
        if became:
            ElementTree.SubElement(case, became, message=_printable(message), type=kind)
    ElementTree.indent(top)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(top, encoding="unicode") + "\n"


def _printable(text: str) -> str:
    """XML has no letters for control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
