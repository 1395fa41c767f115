"""A policy in a package of somebody else's, installed by pip, is a policy like any other.

The package is the guide's own: class and entry point are read from docs/policies.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
MOESIM = (sys.executable, "-c", "from sim.cli import main; main()")
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "second-example"
version = "1.0"

[tool.hatch.build.targets.wheel]
packages = ["my_package"]

"""


def block(language: str) -> str:
    """The guide's first block in a language."""
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert found
    return found[1]


def moesim(installed: Path, *words: str) -> str:
    env = os.environ | {"PYTHONPATH": f"{installed}{os.pathsep}{Path(__file__).parent.parent}"}
    done = subprocess.run([*MOESIM, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("project")
    (project / "my_package").mkdir()
    (project / "my_package" / "__init__.py").touch()
    (project / "my_package" / "second.py").write_text(block("python"), encoding="utf-8")
    (project / "pyproject.toml").write_text(PYPROJECT + block("toml"), encoding="utf-8")
    target = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        str(target),
        str(project),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_it_is_listed_and_described(installed: Path) -> None:
    assert "Second in, first out" in moesim(installed, "policies")
    assert "how many older ones to spare" in moesim(installed, "policies", "second_example")


def test_it_runs_and_keeps_every_rule(installed: Path) -> None:
    run = ("run", "--policy", "second_example", "--set", "rank=3", "--requests", "1", "--hw", "rtx3090")
    assert "second_example" in moesim(installed, *run)
    told = moesim(installed, "conformance", "second_example")
    assert "second_example keeps every rule that applies" in told


def test_without_it_nobody_knows_it() -> None:
    done = subprocess.run([*MOESIM, "policies", "second_example"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "second_example" in done.stderr
