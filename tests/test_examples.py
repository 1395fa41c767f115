"""The examples of docs/notebooks.md are short, are on the page, and run; the page holds what they print."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from grids import few_each_time

DOCS = Path(__file__).parents[1] / "docs"
PLUG_INS = {"shortest_prompt", "two_halves", "native_rule"}  # tests/test_scheduler_rules.py, test_policy_file.py
EXAMPLES = sorted(path for path in (DOCS / "examples").glob("*.py") if path.stem not in PLUG_INS)
PAGE = (DOCS / "notebooks.md").read_text(encoding="utf-8")
MOST_LINES = 60


def test_there_are_three() -> None:
    assert [path.stem for path in EXAMPLES] == ["compare_policies", "find_out_why", "size_a_machine"]


@pytest.mark.parametrize("path", few_each_time(EXAMPLES, EXAMPLES[1:2]), ids=lambda path: path.stem)
def test_it_runs_and_prints_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    cells = re.split(r"^# %%.*$", text, flags=re.MULTILINE)
    assert len(cells) > 4
    for cell in cells:
        ast.parse(cell)  # each can be run by itself, after those before it
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    block = re.search(rf"<!-- output of: python {path.name} -->\n```text\n(.*?)```\n", PAGE, re.DOTALL)
    assert block is not None
    assert f"](examples/{path.name})" in PAGE
    assert printed.rstrip("\n") == block[1].rstrip("\n"), f"stale: run python tools/paste.py {DOCS / 'notebooks.md'}"
