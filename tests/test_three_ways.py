"""One result, three ways: the frozen loop of 0.1, the engine as it is compiled, and the same modules not compiled.

`random_worlds` draws the worlds; `python tests/random_worlds.py N SEED` hunts further than these tests go.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import random_worlds

from sim.policy.registry import policies

N_QUICK, N_THOROUGH, SLICES = 96, 4000, 8


def disagreements(first: int, n: int, folder: Path) -> list[str]:
    found = []
    for seed in range(first, first + n):
        of = random_worlds.world(seed, folder)
        told, seen = random_worlds.compare(of)
        of.trace.unlink()
        if told or seen.crash:
            found.append(f"{of}\n  {told or seen.crash}")
    return found


@pytest.mark.parametrize("at", range(SLICES))
def test_the_engine_is_the_oracle(at: int, tmp_path: Path) -> None:
    n = N_QUICK // SLICES
    assert not disagreements(at * n, n, tmp_path)


@pytest.mark.parametrize("seed", [1058])  # nothing takes any time: shares of it are null, and told all the same
def test_worlds_that_once_differed(seed: int, tmp_path: Path) -> None:
    assert not disagreements(seed, 1, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(SLICES))
def test_the_engine_is_the_oracle_in_thousands_of_worlds(at: int, tmp_path: Path) -> None:
    n = N_THOROUGH // SLICES
    assert not disagreements(N_QUICK + at * n, n, tmp_path)


@pytest.mark.parametrize("name", policies())
def test_every_policy_has_been_run_and_agrees(name: str, tmp_path: Path) -> None:
    """Worlds of that policy alone, until three were neither refused nor too small."""
    n_ran = 0
    for seed in range(40):
        of = random_worlds.world(seed, tmp_path, name)
        told, seen = random_worlds.compare(of)
        of.trace.unlink()
        assert told is None, f"{of}\n  {told}"
        n_ran += not seen.error
        if n_ran == 3:
            return
    pytest.fail(f"{name} ran in {n_ran} of 40 worlds")


def digests(n: int, pure: bool) -> tuple[int, list[str]]:
    """(compiled modules of the engine in use, one digest per world), from a fresh process."""
    environment = {**os.environ, "MOESIM_PURE": "1" if pure else "0"}
    if not pure:
        del environment["MOESIM_PURE"]
    command = [sys.executable, str(Path(random_worlds.__file__)), "--digests", str(n), "0"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return int(told[0]), told[1:]


@pytest.mark.parametrize("n", [60, pytest.param(2000, marks=pytest.mark.thorough)])
def test_compiled_is_not_compiled(n: int) -> None:
    n_compiled, compiled = digests(n, pure=False)
    if not n_compiled:
        pytest.skip("the engine is not compiled here: no C compiler, or MOESIM_PURE is set")
    n_left, plain = digests(n, pure=True)
    assert n_left == 0, "MOESIM_PURE=1 leaves modules compiled"
    assert len(plain) == len(compiled) == n
    assert plain == compiled, f"first at world {next(i for i in range(n) if plain[i] != compiled[i])}"


def test_a_difference_is_told_where_it_begins(tmp_path: Path) -> None:
    """A harness that finds nothing must be able to find something: one decision, one time, one figure changed."""
    of = random_worlds.world(3, tmp_path)
    want, got = (random_worlds.run(of, random_worlds.oracle_run) for _ in range(2))
    assert want.log and random_worlds.disagreement(want, got) is None and want.digest() == got.digest()
    kind, layer, expert = got.log[5]
    got.log[5] = (kind, layer, expert + 1)
    assert (random_worlds.disagreement(want, got) or "").startswith("log[5][2]: ")
    got.log[5] = (kind, layer, expert)
    *before, end_s = got.spans[7]
    got.spans[7] = (*before, end_s * (1 + 1e-15) + 5e-324)
    assert (random_worlds.disagreement(want, got) or "").startswith("spans[7][7]: ")
    got.spans[7] = (*before, end_s)
    got.result["demand_copies"] = {**got.result["demand_copies"], "n": -1}
    assert (random_worlds.disagreement(want, got) or "").startswith("result.demand_copies.n: ")
    assert want.digest() != got.digest()
