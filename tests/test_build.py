"""hatch_build.py: what has a .pxd, and some policies, are compiled where that can be done; the same bits everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CYTHON = pytest.importorskip("Cython", reason="Cython is not installed")
LANE = '''
from __future__ import annotations


class Lane:
    def __init__(self) -> None:
        self.free_s = 0.1

    def use(self, ready_s: float, duration_s: float) -> float:
        """Where a compiler may fuse, divide by multiplying, or add in another order, the last bit shows it."""
        self.free_s = ready_s * duration_s + self.free_s
        return (self.free_s + duration_s) / 3.0 + ready_s / duration_s
'''
LANE_PXD = """
cdef class Lane:
    cdef public double free_s
    cpdef double use(self, double ready_s, double duration_s)
"""
TOTAL = """
from sim.base.lane import Lane


def total(n: int) -> float:
    lane = Lane()
    found = 0.0
    for i in range(n):
        found = found + lane.use(i / 7.0, 1.0 / (i + 3.0))
    return found
"""
TOTAL_PXD = """
cimport cython
from sim.base.lane cimport Lane
@cython.locals(lane=Lane, i=int, found=double)
cpdef double total(int n)
"""
POLICY = """
def share(n: int) -> float:
    return n / 7.0
"""
PROJECT = """
[build-system]
requires = []
build-backend = "hatchling.build"
[project]
name = "sample"
version = "1"
requires-python = ">=3.11"
[tool.hatch.build.targets.wheel]
packages = ["sim", "policies"]
[tool.hatch.build.targets.wheel.hooks.custom]
"""
SHOW_POLICY = "import policies.promoe as p; print(type(p.__loader__).__name__, p.__file__[-9:], p.share(3).hex())"
SHOW = "import sim.base.total as t; print(t.__file__.endswith('.py'), t.total(1000).hex())"


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHONPATH": str(cwd), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    for name in {"MOESIM_PURE", "PRE_COMMIT"} - set(environment):
        whole.pop(name, None)
    return subprocess.run([sys.executable, *command], cwd=cwd, env=whole, capture_output=True, text=True, timeout=600)


def make(folder: Path) -> Path:
    """Two modules, one of which uses the other's class as it is compiled, and a policy."""
    (folder / "sim" / "base").mkdir(parents=True)
    (folder / "policies").mkdir()
    shutil.copy(ROOT / "hatch_build.py", folder)
    (folder / "pyproject.toml").write_text(PROJECT)
    shutil.copy(ROOT / "sim" / "base" / "compiled.py", folder / "sim" / "base")
    shutil.copy(ROOT / "policies" / "__init__.py", folder / "policies")
    (folder / "policies" / "promoe.py").write_text(POLICY)
    texts = {
        "__init__.py": "from sim.base.compiled import choose\n\nchoose()\n",
        "base/lane.py": LANE,
        "base/lane.pxd": LANE_PXD,
        "base/total.py": TOTAL,
        "base/total.pxd": TOTAL_PXD,
    }
    for name, text in {**texts, "base/plain.py": "n = 1\n"}.items():
        (folder / "sim" / name).write_text(text)
    return folder


def built(folder: Path) -> list[str]:
    found = (folder / "sim" / "base").iterdir()
    return sorted(path.name.split(".")[0] for path in found if path.suffix in (".so", ".pyd"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("sample") / "sample")
    plain = run("-c", SHOW, cwd=folder).stdout.split()
    assert plain[0] == "True"
    done = run("hatch_build.py", cwd=folder)
    if done.returncode and "compil" in done.stderr.splitlines()[-1].lower():
        pytest.skip(f"no C compiler: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (folder / "plain.txt").write_text(plain[1])
    return folder


def test_in_place_what_has_a_pxd_is_compiled_and_gives_the_same_bits(compiled: Path) -> None:
    assert built(compiled) == ["_shared", "lane", "total"]
    assert run("-c", SHOW, cwd=compiled).stdout.split() == ["False", (compiled / "plain.txt").read_text()]


def test_what_was_compiled_runs_while_the_sources_are_what_it_was_compiled_from(compiled: Path, tmp_path: Path) -> None:
    """Whenever any of them was written: a clock does not tell what a source holds."""
    folder = tmp_path / "sample"
    shutil.copytree(compiled, folder)
    source, text = folder / "sim" / "base" / "total.py", TOTAL

    def shown() -> list[str]:
        return run("-c", SHOW, cwd=folder).stdout.split()

    for later_s in (5, -5):
        written_s = source.stat().st_mtime + later_s
        os.utime(source, (written_s, written_s))
        assert shown() == ["False", (compiled / "plain.txt").read_text()]
    for later_s in (5, -5):
        source.write_text(text.replace("3.0", "4.0"))
        os.utime(source, (written_s + later_s, written_s + later_s))
        plain, found = shown()
        assert (plain, found == (compiled / "plain.txt").read_text()) == ("True", False)
    source.write_text(text)
    assert shown()[0] == "False", "the same text is the same source"
    assert (folder / "sim" / "compiled.seen").exists(), "and is not read again"
    source.write_text(text.replace("1", "2", 1))
    assert shown()[0] == "True", "of the same size, it is another text"
    source.write_text(text)
    (shared,) = (folder / "sim" / "base").glob("_shared.*")
    shared.rename(folder / shared.name)
    assert shown()[0] == "True", "what all of them import is gone"
    (folder / shared.name).rename(shared)
    assert shown()[0] == "False"
    (folder / "sim" / "compiled.sha256").unlink()
    assert shown()[0] == "True", "nobody knows what was compiled"


def test_a_policy_runs_compiled_while_its_source_is_what_it_was_compiled_from(compiled: Path, tmp_path: Path) -> None:
    """Whenever either was written, and not where the source is asked for."""
    folder = tmp_path / "sample"
    shutil.copytree(compiled, folder)
    source = folder / "policies" / "promoe.py"

    def shown(**environment: str) -> list[str]:
        return run("-c", SHOW_POLICY, cwd=folder, **environment).stdout.split()

    before, after = (3 / 7.0).hex(), (3 / 9.0).hex()
    assert shown() == ["PolicyLoader", "promoe.py", before]
    assert shown(MOESIM_PURE="1") == ["SourceFileLoader", "promoe.py", before]
    written_s = source.stat().st_mtime
    source.write_text(POLICY.replace("7.0", "9.0"))
    for changed_s in (written_s + 5, written_s - 5):
        os.utime(source, (changed_s, changed_s))
        assert shown() == ["SourceFileLoader", "promoe.py", after]
    assert run("hatch_build.py", cwd=folder).returncode == 0
    assert shown() == ["PolicyLoader", "promoe.py", after]
    assert len(list((folder / "policies").glob("promoe.*"))) == 2, "what was compiled before lies there still"


@pytest.mark.thorough
def test_flags_of_the_environment_do_not_change_the_bits(compiled: Path, tmp_path: Path) -> None:
    if os.name == "nt":
        pytest.skip("CFLAGS is how Unix compilers are told")
    folder = make(tmp_path / "sample")
    done = run("hatch_build.py", cwd=folder, CFLAGS="-Ofast -ffast-math -ffp-contract=fast -march=native")
    assert done.returncode == 0, done.stderr
    assert run("-c", SHOW, cwd=folder).stdout.split() == ["False", (compiled / "plain.txt").read_text()]


def test_a_module_without_its_pxd_is_plain_again(compiled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    shutil.copytree(compiled, folder)
    (folder / "sim" / "base" / "total.pxd").unlink()
    assert run("hatch_build.py", cwd=folder).returncode == 0
    assert built(folder) == ["_shared", "lane"]
    assert run("-c", SHOW, cwd=folder).stdout.split() == ["True", (compiled / "plain.txt").read_text()]


@pytest.mark.thorough
@pytest.mark.parametrize("changed", [None, "sim/base/total.pxd", "sim/base/lane.py", "policies/promoe.py"])
def test_a_wheel_takes_what_lies_there_compiled_unless_it_has_changed_since(
    compiled: Path, tmp_path: Path, changed: str | None
) -> None:
    folder = tmp_path / "sample"
    shutil.copytree(compiled, folder)
    (folder / ".gitignore").write_text("*.so\n*.pyd\nbuild\n")
    if changed is not None:
        with (folder / changed).open("a") as file:
            file.write("\n")
    _, names, said = wheel_of(folder, CC="false", CXX="false")  # nothing can be compiled anew
    binaries = [name for name in names if name.startswith("sim/base/total.") and name.endswith((".so", ".pyd"))]
    assert len(binaries) == (changed is None)
    assert ("not compiled" in said) == (changed is not None)


def wheel_of(folder: Path, **environment: str) -> tuple[str, set[str], str]:
    done = run("-m", "hatchling", "build", "-t", "wheel", cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if name.startswith(("sim/", "policies/"))}
    return path.name, names, done.stdout + done.stderr


PLAIN = {f"sim/base/{name}" for name in ("compiled.py", "lane.py", "lane.pxd", "total.py", "total.pxd", "plain.py")}
PLAIN |= {"sim/__init__.py", "policies/__init__.py", "policies/promoe.py"}


@pytest.mark.thorough
def test_a_wheel_carries_what_was_compiled(compiled: Path, tmp_path: Path) -> None:
    name, files, _ = wheel_of(make(tmp_path / "sample"))
    assert "none-any" not in name
    assert sorted(Path(file).name.split(".")[0] for file in files - PLAIN) == ["_shared", "lane", "promoe", "total"]


@pytest.mark.parametrize(
    "environment", [{"MOESIM_PURE": "1"}, {"PRE_COMMIT": "1"}, {"CC": "false", "LDSHARED": "false"}, {"PATH": ""}]
)
def test_without_a_compiler_a_wheel_is_plain_and_nobody_is_bothered(
    environment: dict[str, str], tmp_path: Path
) -> None:
    if os.name == "nt" and not {"MOESIM_PURE", "PRE_COMMIT"} & set(environment):
        pytest.skip("MSVC is found without CC and PATH")
    name, files, told = wheel_of(make(tmp_path / "sample"), **environment)
    assert name.endswith("-py3-none-any.whl")
    assert files == PLAIN
    assert "Traceback" not in told and "rror:" not in told


def test_one_module_that_does_not_compile_leaves_all_of_them_plain(compiled: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "sample")
    (folder / "sim" / "base" / "total.pxd").write_text("cpdef double total(no such type)\n")
    name, files, _ = wheel_of(folder)
    assert name.endswith("-py3-none-any.whl") and files == PLAIN


@pytest.mark.parametrize(("word", "plain"), [("0", False), ("1", True)])
def test_pure_is_asked_for_by_anything_but_zero(compiled: Path, tmp_path: Path, word: str, plain: bool) -> None:
    folder = tmp_path / "sample"
    shutil.copytree(compiled, folder)
    (folder / ".gitignore").write_text("*.so\n*.pyd\nbuild\n")
    assert wheel_of(folder, CC="false", MOESIM_PURE=word)[0].endswith("-py3-none-any.whl") is plain


def test_a_build_that_is_killed_leaves_no_half_of_a_module(compiled: Path, tmp_path: Path) -> None:
    """Which would end whatever imports it in a crash of the loader."""
    folder = tmp_path / "sample"
    shutil.copytree(compiled, folder)
    script = (
        "import hatch_build, os, pathlib, shutil\n"
        "def killed(one, two):\n"
        "    last = 'total' in str(one)\n"
        "    pathlib.Path(two).write_bytes(pathlib.Path(one).read_bytes()[: 1000 if last else None])\n"
        "    return os._exit(9) if last else two\n"
        "shutil.copy = killed\n"
        "hatch_build.put_in_place(pathlib.Path.cwd(), pathlib.Path.cwd() / 'build' / 'compiled')\n"
    )
    assert run("-c", script, cwd=folder).returncode == 9
    assert run("-c", SHOW, cwd=folder).stdout.split() == ["True", (compiled / "plain.txt").read_text()]


@pytest.mark.thorough
def test_gcc_and_clang_give_the_same_bits(tmp_path: Path) -> None:
    """The engine itself by two compilers, over random worlds."""
    if not list((ROOT / "sim").rglob("*.pxd")):
        pytest.skip("nothing is compiled yet")
    clang = os.environ.get("CLANG") or shutil.which("clang")
    if not clang or not shutil.which("gcc"):
        pytest.skip("needs gcc and clang (or CLANG='python -m ziglang cc')")
    found = {}
    for compiler in ("gcc", clang):
        folder = tmp_path / f"by{len(found)}"
        ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "data", "models", "goldens")
        for name in ("sim", "policies", "traces", "hwprofiles", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=None if name == "hwprofiles" else ignored)
        shutil.copy(ROOT / "hatch_build.py", folder)
        linked = f"{compiler} -shared"
        done = run("hatch_build.py", cwd=folder, CC=compiler, LDSHARED=linked)
        assert done.returncode == 0, done.stderr
        found[compiler] = run("tests/random_worlds.py", "--digests", "300", "0", cwd=folder).stdout.split()
        binaries = [path for top in ("sim", "policies") for path in (folder / top).rglob("*.so")]
        assert int(found[compiler][0]) == len(binaries) > 0
        assert len(found[compiler]) == 301
    assert found["gcc"] == found[clang]
