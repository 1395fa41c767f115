"""Every class of input of `fuzz_inputs.py`, by seeds of its own: a slice, and a larger one as `thorough`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_inputs import CLASSES


@pytest.mark.parametrize("each", [4, pytest.param(100, marks=pytest.mark.thorough)])
def test_whatever_is_handed_over(tmp_path: Path, each: int) -> None:
    script = Path(__file__).with_name("fuzz_inputs.py")
    n = each * len(CLASSES)
    done = subprocess.run(
        [sys.executable, str(script), str(n), "tests"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ended = re.findall(r"^ *(\d+) .* ([012]|its own)$", done.stdout, re.MULTILINE)
    assert sum(int(count) for count, _ in ended) == n
    assert {code for _, code in ended} >= {"0", "2"}  # both ends are reached, or the mutations have lost their point
