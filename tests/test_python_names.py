"""`import moesim` beside a user's own `sim.py`, `policies/` and `traces/`: both work, whichever was imported first.

Each case is a script in a folder with such files, run by a Python of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MINE = """
from moesim import Policy

class Mine(Policy):
    name = "mine"

    def bind(self, view):
        self._order = {}

    def accessed(self, piece, hit, view):
        self._order.setdefault(piece)

    def evicted(self, piece, view):
        del self._order[piece]

    def victim(self, piece, speculative, view):
        return view.first_evictable(self._order)
"""
FILES = {
    "sim.py": "def double(x):\n    return 2 * x\n\nclass Point:\n    pass\n\nrun = 'theirs'\n",
    "policies/__init__.py": "",
    "policies/mine.py": MINE,
    "policies/lru.py": "THEIRS = True\n",
    "traces/__init__.py": "COLOUR = 'red'\n",
    "traces/walk.py": "from . import COLOUR\n",
    "hwprofiles.py": "raise RuntimeError('nobody asked for this one')\n",
    "reports/notes.txt": "a folder without code\n",
}
RUN = "result = moesim.simulate(policy='on_demand', hw='rtx3090', requests=1)\nassert result.hit_rate == 0\n"


def said(
    folder: Path, script: str, *interpreter: str, files: dict[str, str] = FILES
) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "script.py").write_text(script, encoding="utf-8")
    words = [sys.executable, "-W", "error", *(interpreter or ("script.py",))]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "script",
    [
        f"import moesim\n{RUN}",
        f"import sim, traces, policies.lru\nimport moesim\n{RUN}assert sim.double(2) == 4 and policies.lru.THEIRS",
        f"import moesim\n{RUN}import sim\nfrom sim import double\nassert sim.double(2) == double(2) == 4",
        f"import sim\nPoint = sim.Point\nimport moesim\n{RUN}import sim\n"
        "assert sim.Point is Point and sim.double(1) == 2",
        f"import sim\nimport moesim\n{RUN}import pickle\np = sim.Point\nassert pickle.loads(pickle.dumps(p)) is p",
        f"import moesim\n{RUN}import traces.walk\nassert traces.walk.COLOUR == traces.COLOUR == 'red'",
        f"from traces.walk import COLOUR\nimport moesim\n{RUN}import traces.walk\nassert traces.walk.COLOUR is COLOUR",
    ],
    ids=["beside", "first", "after", "first and again", "pickle", "package after", "package first"],
)
def test_both_work(tmp_path: Path, script: str) -> None:
    done = said(tmp_path, script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "import moesim\nfrom policies.mine import Mine",
        "from policies.mine import Mine",
        "import policies\nfrom policies.mine import Mine",
    ],
)
def test_a_policy_in_a_folder_of_that_name(tmp_path: Path, first: str) -> None:
    """The folder's own module imports moesim while it is being imported itself."""
    script = f"{first}\nimport moesim\nassert moesim.simulate(policy=Mine, hw='rtx3090', requests=1).policy == 'mine'\n"
    done = said(tmp_path, script)
    assert done.returncode == 0, done.stderr


def test_a_package_that_imports_moesim_itself(tmp_path: Path) -> None:
    script = """
import policies
assert policies.ALL == [policies.Mine]
import moesim
assert moesim.simulate(policy=policies.Mine, hw="rtx3090", requests=1).policy_file.name == "mine.py"
"""
    files = FILES | {"policies/__init__.py": "from moesim import Policy\nfrom .mine import Mine\nALL = [Mine]\n"}
    done = said(tmp_path, script, files=files)
    assert done.returncode == 0, done.stderr


def test_what_both_have_means_ours(tmp_path: Path) -> None:
    script = """
import moesim, sim.run, policies.lru
assert callable(sim.run.execute)
assert issubclass(policies.lru.Lru, moesim.Policy) and not hasattr(policies.lru, "THEIRS")
import sim
try:
    sim.nothing
except AttributeError as error:
    print(error)
try:
    sim.__wrapped__
except AttributeError as error:
    print(error)
"""
    done = said(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'sim' has no attribute 'nothing'\nmodule 'sim' has no attribute '__wrapped__'\n"


@pytest.mark.parametrize(
    "interpreter",
    [
        ("-m", "moesim", "run"),
        ("-c", "from moesim.commands import simulate; simulate()"),
    ],
)
def test_commands_run_beside_them(tmp_path: Path, interpreter: tuple[str, ...]) -> None:
    done = said(tmp_path, "", *interpreter, "--policy", "lru", "--hw", "rtx3090", "--requests", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lru on rtx3090")


def test_without_files_of_ones_own_nothing_is_looked_up(tmp_path: Path) -> None:
    script = "import moesim, sim\ntry:\n    sim.nothing\nexcept AttributeError as error:\n    print(error)\n"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "module 'sim' has no attribute 'nothing'\n"


@pytest.mark.thorough
def test_mypy_sees_both(tmp_path: Path) -> None:
    """What an editor is told of a name is what runs; an option that does not exist is an error before anything runs."""
    script = "import sim\nimport moesim\nreveal_type(sim.double)\n"
    script += "reveal_type(moesim.simulate('lfu', 'a').tpot_s.mean)\nmoesim.simulate('lfu', 'a', request=1)\n"
    said(tmp_path, script)
    words = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'script.py:3: note: Revealed type is "def (x: Any) -> Any"' in done.stdout, done.stdout + done.stderr
    assert 'script.py:4: note: Revealed type is "float | None"' in done.stdout
    assert 'script.py:5: error: Unexpected keyword argument "request" for "simulate"; did you mean' in done.stdout
