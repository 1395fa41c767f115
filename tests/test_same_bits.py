"""Every policy's result to the last bit, whatever the hashes, and however the interpreter adds up floats.

Python 3.12 began to add up floats with a correction, so `sum` of three or more is not the same number everywhere. With
either way put in its place nothing may move: one interpreter shows what several would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_traces import ALL, tiny_trace

from sim.policy.registry import policies

TESTS = Path(__file__).parent
SUMS = """
import builtins, json, math, sys

def one_by_one(values, start=0):
    for value in values:
        start = start + value
    return start

def exactly(values, start=0):
    values = [start, *values]
    numbers = all(isinstance(value, int | float) for value in values)
    return math.fsum(values) if numbers and float in map(type, values) else one_by_one(values[1:], values[0])

builtins.sum = globals()[sys.argv[1]]
if sys.argv[2:]:
    import version_runs
    version_runs.SHAPES = ((1, 1),)
    first = version_runs.runs(sys.argv[2])
    version_runs.SHAPES = ((2, 2),)
    print(json.dumps({**first, **version_runs.runs(sys.argv[2])}))
else:
    print(sum([1e16, 1.0, 1.0]).hex())
"""


def said(how: str, *words: str, hash_seed: str = "0") -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))), "PYTHONHASHSEED": hash_seed}
    words = (sys.executable, "-c", SUMS, how, *words)
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_sums_and_hashes_move_nothing(tmp_path: Path) -> None:
    # Qwen1.5-MoE's shape: four experts per token, so that sums over them have enough terms to differ.
    trace = tiny_trace(
        tmp_path / "t.safetensors", 24, 60, 4, n_requests=2, prompt=3, outputs=4, levels=ALL - {"arrivals"}
    )
    one = json.loads(said("one_by_one", str(trace), hash_seed="1"))
    two = json.loads(said("exactly", str(trace), hash_seed="2"))
    assert list(one) == list(two)
    ran = {name.split()[0] for name, result in one.items() if isinstance(result, dict)}
    assert len(ran) > len(policies()) * 0.8, f"hardly a policy ran: {sorted(ran)}"
    assert [name for name in one if one[name] != two[name]] == []


def test_the_two_ways_differ() -> None:
    assert said("one_by_one") != said("exactly")
