"""Thorough tests: slices that leave nothing out, and the places that run them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import part, pytest_collection_modifyitems

ROOT = Path(__file__).resolve().parent.parent


def sliced(n_items: int, chosen: str) -> tuple[list[Any], list[Any]]:
    """(kept, deselected) of numbered items."""
    items: list[Any] = list(range(n_items))
    gone: list[Any] = []
    told = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config: Any = SimpleNamespace(getoption=lambda _name: part(chosen), hook=told)
    pytest_collection_modifyitems(config, items)
    return items, gone


@pytest.mark.parametrize("n_items", [0, 3, 22])
def test_every_test_is_in_one_slice(n_items: int) -> None:
    found = [sliced(n_items, f"{i}/7") for i in range(1, 8)]
    assert sorted(item for kept, _ in found for item in kept) == list(range(n_items))
    assert all(sorted(kept + gone) == list(range(n_items)) for kept, gone in found)


@pytest.mark.parametrize("text", ["0/7", "8/7", "1", "1/0", "a/b", "-1/7", ""])
def test_no_other_slice_is_taken(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="I/N"):
        part(text)


def test_the_nightly_job_runs_every_slice_of_what_is_left_out_by_default() -> None:
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    job = nightly["jobs"]["thorough"]
    slices = [part(text) for text in job["strategy"]["matrix"]["slice"]]
    n = slices[0][1]
    assert slices == [(i, n) for i in range(1, n + 1)]
    commands = [step.get("run", "") for step in job["steps"]]
    assert any(re.search(r"pytest -m thorough --slice \$\{\{ matrix\.slice \}\}", command) for command in commands)
    assert "-m 'not thorough'" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '-m thorough --slice "$slice"' in (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "pytest -m thorough" in (ROOT / "README.md").read_text(encoding="utf-8")
