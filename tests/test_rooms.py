"""Who may import whom: the contract of `pyproject.toml` holds, and it leaves no room out."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter")
grimp = pytest.importorskip("grimp")

ROOT = Path(__file__).parents[1]
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
POLICIES, BELOW = RULES["contracts"][2:]
ROOMS = {f"sim.{path.stem}" for path in (ROOT / "sim").iterdir() if path.suffix in ("", ".py") and path.stem[0] != "_"}
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, **{}))"


def linted(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", LINT.format(options)]
    return subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)


def toml(values: dict[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def test_imports_go_downwards() -> None:
    done = linted(ROOT)
    assert done.returncode == 0, done.stdout


def test_no_room_is_left_out() -> None:
    assert {name for name in POLICIES["forbidden_modules"] if name.startswith("sim.")} == ROOMS - {"sim.policy"}
    assert {name for name in BELOW["source_modules"] if name.startswith("sim.")} == ROOMS - {"sim.cli"}


def test_an_upward_import_breaks_the_contract(tmp_path: Path) -> None:
    """The same rules, over packages of which a policy reaches past `sim.policy` and a room above itself."""
    for package in RULES["root_packages"]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for room in ROOMS:
        (tmp_path / "sim" / f"{room.removeprefix('sim.')}.py").touch()
    (tmp_path / "sim" / "base.py").write_text("import sim.run\n")
    (tmp_path / "policies" / "mine.py").write_text("from sim.policy import Policy\nimport sim.engine\n")
    own = {key: value for key, value in RULES.items() if key != "contracts"}
    text = "[tool.importlinter]\n" + toml(own)
    for contract in RULES["contracts"]:
        text += "[[tool.importlinter.contracts]]\n" + toml({**contract, "ignore_imports": []})
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    done = linted(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "sim.base -> sim.run" in done.stdout
    assert "policies.mine -> sim.engine" in done.stdout
    assert "Every module of sim lies in a room BROKEN" in done.stdout


STILL_IN_CIRCLES = {"sim.engine": 4}
"""Files of the largest circle that begins in a folder, to be made smaller; elsewhere three at most."""


def circles() -> list[list[str]]:
    """Files that import one another, down a chain and back, by annotations and within functions, too (Tarjan)."""
    graph = grimp.build_graph(*RULES["root_packages"], exclude_type_checking_imports=False, cache_dir=None)
    found: list[list[str]] = []
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        open_.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in number:
                visit(other)
            if other in open_:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            at = open_.index(module)
            found.append(sorted(open_[at:]))
            del open_[at:]

    for module in sorted(graph.modules):
        if module not in number:
            visit(module)
    return found


def test_circles_are_of_few_files() -> None:
    for circle in circles():
        folder = ".".join(circle[0].split(".")[:2])
        assert len(circle) <= STILL_IN_CIRCLES.get(folder, 3), circle


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def reached(path: Path) -> list[str]:
    """What a file takes of the private names of a module of ours that is not its own package's."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    found: list[str] = []
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in RULES["root_packages"]:
            hidden = any(private(part) for part in node.module.split("."))
            if (hidden and not node.module.startswith(f"{package}.")) or any(private(one.name) for one in node.names):
                found.append(f"{path.name}:{node.lineno} from {node.module}")
            modules |= {one.asname or one.name for one in node.names if one.name.islower()}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules):
            continue
        if private(node.attr) and node.attr not in ("_replace", "_asdict", "_fields"):  # of a NamedTuple
            found.append(f"{path.name}:{node.lineno} {node.value.id}.{node.attr}")
    return found


def test_nobody_reaches_for_private_names() -> None:
    files = [path for package in RULES["root_packages"] for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 200
    assert [one for path in files for one in reached(path)] == []


def test_a_private_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "sim").mkdir()
    path = tmp_path / "sim" / "mine.py"
    path.write_text("from sim.base.files import _Loader\nfrom traces.format import reader\nreader._secret()\n")
    assert reached(path) == ["mine.py:1 from sim.base.files", "mine.py:3 reader._secret"]


CIMPORT = re.compile(r"^from ((?:sim|traces|policies)[\w.]*) cimport", re.MULTILINE)
# What a policy sees is read straight from what is resident and still to run; a view is made by the engine.
SEEN = {("sim.policy.view", "sim.engine.pending_experts"), ("sim.policy.view", "sim.engine.residency")}


def test_compiled_modules_reach_downwards_too() -> None:
    """`.pxd` files, which import-linter does not read."""
    floor = {room.strip(): i for i, line in enumerate(RULES["contracts"][0]["layers"]) for room in line.split("|")}

    def room(module: str) -> int:
        return floor[next(name for name in floor if f"{module}.".startswith(f"{name}."))]

    up = set()
    for path in (path for top in ("sim", "traces", "policies") for path in (ROOT / top).rglob("*.pxd")):
        here = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        up |= {(here, there) for there in CIMPORT.findall(path.read_text("utf-8")) if room(there) < room(here)}
    assert up == SEEN


@pytest.mark.thorough
def test_every_compiled_module_may_be_the_first_that_is_imported() -> None:
    """In a process of its own: what runs first must not decide whether it can be imported."""
    for path in sorted((ROOT / "sim").rglob("*.pxd")):
        source = path.with_suffix(".py")
        if source.exists():
            name = ".".join(source.relative_to(ROOT).with_suffix("").parts)
            done = subprocess.run(
                [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (name, done.stderr)


def test_counts_may_be_imported_before_policies() -> None:
    """The one order that failed once."""
    code = "import sim.engine.by_expert"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0
