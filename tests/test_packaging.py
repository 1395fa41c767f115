"""What an installed wheel carries, and what a command may import."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"moesim", "sim", "policies", "calibrate", "hwprofiles", "traces", "reports"}
HEAVY = {"numpy", "pandas", "plotly", "torch", "pyarrow", "rich", "scipy", "simpy", "transformers", "safetensors"}


def imported_by(*statements: str) -> set[str]:
    """Top-level names of everything a fresh interpreter has imported after the statements."""
    code = "\n".join((*statements, "import sys", "print(*sorted({name.split('.')[0] for name in sys.modules}))"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "entry",
    [
        "simulate(['--help'])",
        "main(['--help'])",
        "main(['run', '--help'])",
        "simulate([])",
    ],
)
def test_help_imports_nothing_heavy(entry: str) -> None:
    allowed = {"numpy"} if entry == "simulate([])" else set()  # listing the policies imports them
    found = imported_by("from sim.cli import main, simulate", "try:", f"    {entry}", "except SystemExit:", "    pass")
    assert not (found & HEAVY) - allowed


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_a_run_imports_only_what_it_uses(output: list[str]) -> None:
    run = f"simulate({['--policy', 'lru', '--hw', 'rtx3090', '--requests', '1', *output]})"
    code = f"""
        import sys
        from sim.cli import simulate
        try:
            {run}
        except SystemExit as done:
            assert done.code == 0
        print()
        print(*sorted(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    found = set(done.stdout.splitlines()[-1].split())
    assert not found & HEAVY - {"numpy", "safetensors"}
    assert "importlib.metadata" not in found  # what a package of somebody else's brings is looked up for its name alone
    own = {name for name in found if name.startswith("policies.")}
    assert (
        own <= {"policies.lru", "policies.common", "policies.common.cache", "policies.common.placement"}
        and "policies.lru" in own
    )


@pytest.fixture(scope="module")
def wheel() -> set[str]:
    """What its builder puts into it; `.ci/run` builds one, tests/test_build.py is about what is compiled."""
    return {file.distribution_path.replace("\\", "/") for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def test_wheel_carries_data(wheel: set[str]) -> None:
    patterns = (
        "hwprofiles/gpus/*.yaml",
        "hwprofiles/cpus/*.yaml",
        "hwprofiles/models/*.yaml",
        "hwprofiles/stacks/*.yaml",
        "traces/FORMAT.md",
        "traces/data/*.safetensors",
        "sim/DESIGN.md",
        "policies/data/*.safetensors",
    )
    for pattern in patterns:
        files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert files <= wheel, f"missing of {pattern}: {sorted(files - wheel)}"
        assert files or "traces/data" in pattern, pattern


def test_wheel_carries_code_and_nothing_else(wheel: set[str]) -> None:
    kept = (".py", ".pxd", ".typed")
    paths = [path for top in PACKAGES for path in (ROOT / top).rglob("*") if path.suffix in kept]
    code = {path.relative_to(ROOT).as_posix() for path in paths}
    assert code <= wheel
    assert not [name for name in wheel if name.endswith((".so", ".pyd", ".c"))]
    assert {name.split("/")[0] for name in wheel} == PACKAGES
    assert {f"{top}/py.typed" for top in PACKAGES} <= wheel
    assert WheelBuilder(str(ROOT)).metadata.core.license_files == ["LICENSE"]
    weights = {name.split("/")[2] for name in wheel if re.fullmatch(r"traces/models/.*[.]safetensors", name)}
    assert weights == {"mixtral-8x7b-small"}, "the one that --real and record run; of the others the logs are kept"


def test_commands_are_declared_for_what_works() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, attribute in (("simulate", "simulate"), ("moesim", "main"), ("calibrate", "calibrating")):
        assert scripts[name] == f"moesim.commands:{attribute}"
        assert callable(getattr(importlib.import_module("moesim.commands"), attribute))
