"""Equal input, equal output on every supported Python: all policies, bit for bit.

The environment variable MOESIM_PYTHONS names interpreters that have this project's dependencies, apart from torch:

    MOESIM_PYTHONS=/tmp/p3.12/bin/python:/tmp/p3.13/bin/python python -m pytest tests/test_versions.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped
from version_runs import SHAPES

from sim.policy.registry import policies

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [path for path in os.environ.get("MOESIM_PYTHONS", "").split(os.pathsep) if path]


def printed(python: str, trace: Path) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    words = [python, str(ROOT / "tests" / "version_runs.py"), str(trace)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{python}\n{done.stderr}"
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("versions"), n_requests=6, prompt=4, outputs=6)


@pytest.fixture(scope="module")
def mine(trace: Path) -> dict[str, Any]:
    return printed(sys.executable, trace)


@pytest.mark.skipif(not PYTHONS, reason="MOESIM_PYTHONS names no other interpreter")
@pytest.mark.parametrize("python", PYTHONS or ["none"])
def test_every_interpreter_gives_the_same_bits(python: str, trace: Path, mine: dict[str, Any]) -> None:
    theirs = printed(python, trace)
    assert list(theirs) == list(mine) == [f"{name} {b} {g}" for name in policies() for b, g in SHAPES]
    ran = [name for name, result in mine.items() if isinstance(result, dict)]
    assert {name.split()[0] for name in ran} == set(policies()), "a policy ran in none of the shapes"
    differing = {}
    for name, result in mine.items():
        other = theirs[name]
        if other != result:
            both = isinstance(result, dict) and isinstance(other, dict)
            differing[name] = [key for key in result if result[key] != other.get(key)] if both else (result, other)
    assert not differing


@pytest.mark.skipif(not PYTHONS, reason="MOESIM_PYTHONS names no other interpreter")
def test_they_are_other_interpreters() -> None:
    words = "import sys; print(sys.version_info[:2])"
    found = [
        subprocess.run([python, "-c", words], capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, *PYTHONS)
    ]
    assert len(set(found)) == len(found), found
