"""`tools/count.py`: what it counts is what it says, on a tree and a run that are counted by hand."""

from __future__ import annotations

import sys
from pathlib import Path

from tools import count

CODE = """
def before(): return [n for n in range(3)]
def layers(): inner()
def inner(): pass
def between(): pass
def after(): pass
class Run:
    def end(self): (lambda: after())()
def run():
    before(), library(), layers(), between(), layers(), Run().end()
"""


def test_lines_are_those_of_sources_in_their_places(tmp_path: Path) -> None:
    (tmp_path / "sim" / "deep").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name, n in (("sim/a.py", 2), ("sim/deep/b.pxd", 3), ("sim/deep/c.yaml", 5), ("tests/d.py", 7), ("one.py", 11)):
        (tmp_path / name).write_text("line\n" * n)
    assert count.lines(tmp_path, ("sim", "one.py", "gone"), count.SOURCES) == 16
    assert count.lines(tmp_path, ("sim",), {".yaml"}) == 5


def test_functions_are_those_before_the_first_layer_and_after_the_last(tmp_path: Path) -> None:
    path = tmp_path / "sim" / "mine.py"
    known: dict[str, object] = {}
    exec(compile(CODE, str(path), "exec"), known)
    exec(compile("def library(): pass", str(tmp_path / ".venv" / "library.py"), "exec"), known)
    entered = count.Entered(tmp_path, ("sim/mine.py", "layers"))
    sys.setprofile(entered)
    try:
        known["run"]()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    assert count.told(entered.before, tmp_path) == ["sim/mine.py:before", "sim/mine.py:run"]
    assert count.told(entered.after, tmp_path) == ["sim/mine.py:Run.end", "sim/mine.py:after"]
    assert entered.served == 2


def test_a_plain_run_is_counted() -> None:
    found = count.entered()
    assert "sim/cli/run.py:command" in found["before"]
    assert not [name for name in found["before"] if ":Engine.run_layer" in name]
    assert any(name.startswith("sim/results/") for name in found["after"])
    assert {name.split("/")[0] for names in found.values() for name in names} <= set(count.PRODUCT)
    assert "run" in count.options() and "traces synth" in count.options()
