"""The engine against two references, in random worlds and under every policy.

`sim.machine.events` is the reference of time: with contention off every figure, decision and span is equal to the bit.
`sim.reference` is the reference of residency and counts: it is told what a policy said and when copies were made, and
must arrive at every deed of the engine, in order, and at every count. `ENGINES` are held to both.

`python tests/random_worlds.py N SEED` hunts further than these tests go.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import random_worlds
from easy_numbers import figure, setup
from following import Followed, Today, difference_from_reference
from tiny_traces import from_rows

from policies.lru import Lru
from sim.policy.registry import policies
from traces.format.reader import Trace

ENGINES = (Today,)
N_QUICK, N_THOROUGH, SLICES = 96, 4000, 8
ONCE_APART = (484, 799, 1142, 2106, 2242, 2329, 2702, 3194, 10380, 13221)
"""Worlds in which what had happened by an instant once depended on who had looked."""

WORTH_A_LOOK = {
    205: "a prefetch is withdrawn whose room is still read",
    285: "pieces of unlike size share a room that is still read",
    1058: "nothing takes any time",
}

every_engine = pytest.mark.parametrize("kind", ENGINES)


TERMS = {"gpu_slowdown_by_h2d": 0.5, "cpu_slowdown_by_h2d": 0.5, "h2d_slowdown_by_cpu": 0.25}


def shared(of: random_worlds.World) -> random_worlds.World:
    """A world in which copies slow kernels, and experts on the CPU and copies each other."""
    hw, spec = of.facts["hw"], msgspec.structs.replace(of.facts["spec"], sim_contention=True)
    terms = {name: figure(term) for name, term in TERMS.items()}
    hw = msgspec.structs.replace(hw, contention=msgspec.structs.replace(hw.contention, **terms))
    return replace(of, facts={**of.facts, "hw": hw, "spec": spec})


def differences(first: int, n: int, folder: Path, kind: Any) -> Iterator[str]:
    for seed in range(first, first + n):
        of = random_worlds.world(seed, folder)
        told, seen = random_worlds.told_apart(of, kind)
        of.trace.unlink()
        if told or seen.crash:
            yield f"{of}\n  {told or seen.crash}"


@every_engine
@pytest.mark.parametrize("at", range(SLICES))
def test_random_worlds(at: int, kind: Any, tmp_path: Path) -> None:
    n = N_QUICK // SLICES
    assert not list(differences(at * n, n, tmp_path, kind))


@every_engine
def test_random_worlds_in_which_memory_is_shared(kind: Any, tmp_path: Path) -> None:
    """Residency and counts hold as they are, and so does what is told when nobody looks."""
    for seed in range(N_QUICK // 2):
        of = random_worlds.world(seed, tmp_path)
        told, _ = random_worlds.told_apart(shared(of), kind, time=False)
        of.trace.unlink()
        assert told is None, f"{of}\n  {told}"


@every_engine
@pytest.mark.thorough
@pytest.mark.parametrize("at", range(SLICES))
def test_thousands_of_random_worlds(at: int, kind: Any, tmp_path: Path) -> None:
    n = N_THOROUGH // SLICES
    assert not list(differences(N_QUICK + at * n, n, tmp_path, kind))


@every_engine
@pytest.mark.parametrize("seed", ONCE_APART)
def test_worlds_that_once_told_the_engines_apart(seed: int, kind: Any, tmp_path: Path) -> None:
    told, seen = random_worlds.told_apart(random_worlds.world(seed, tmp_path, "drawn"), kind)
    assert told is None
    assert seen.result, "the world is refused, and shows nothing"


@every_engine
@pytest.mark.parametrize("seed", WORTH_A_LOOK)
def test_worlds_worth_a_look(seed: int, kind: Any, tmp_path: Path) -> None:
    assert not list(differences(seed, 1, tmp_path, kind))


@every_engine
@pytest.mark.parametrize("name", policies())
def test_every_policy(name: str, kind: Any, tmp_path: Path) -> None:
    """Worlds of that policy alone, until three ran; with memory shared, residency and counts hold as they are."""
    n_ran = 0
    for seed in range(40):
        of = random_worlds.world(seed, tmp_path, name)
        told, seen = random_worlds.told_apart(of, kind)
        assert told is None, f"{of}\n  {told}"
        if not seen.error:
            n_ran += 1
            told, _ = random_worlds.told_apart(shared(of), kind, time=False)
            assert told is None, f"with contention: {of}\n  {told}"
        of.trace.unlink()
        if n_ran == 3:
            return
    pytest.fail(f"{name} ran in {n_ran} of 40 worlds")


# -- a harness that finds nothing must be able to find something ------------------------------------------------------


def test_a_difference_of_time_is_told_where_it_begins(tmp_path: Path) -> None:
    """One decision, one time, one figure changed."""
    of = random_worlds.world(3, tmp_path)
    want, got = (random_worlds.run(of, random_worlds.by_engine) for _ in range(2))
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


ROWS = [[[0, 1], [0, 1]], [[2, 1], [1, 0]], [[0, 1], [0, 2]]]


def followed(tmp_path: Path) -> tuple[Followed, Any, list[Any]]:
    spans: list[Any] = []
    with Trace(from_rows(tmp_path / "rows.safetensors", ROWS, 4)) as trace:
        one = Followed(setup(Lru(scope="global"), trace, 3))
        return one, one.follow(Today, lambda *span: spans.append(span), lambda *_: None), spans


def test_a_difference_of_residency_is_told_where_it_begins(tmp_path: Path) -> None:
    """Another victim, a deed left out, one too many; a copy that begins too soon; one count changed."""
    one, run, spans = followed(tmp_path)
    assert difference_from_reference(one, run, spans) is None
    done = one.script.done
    at = next(at for at, deed in enumerate(done) if deed[0] == "evict")
    wrong = {
        at: [*done[:at], ("evict", 1 - done[at][1], *done[at][2:]), *done[at + 1 :]],
        at + 0.5: [*done[:at], *done[at + 1 :]],
        len(done): [*done, ("evict", 0, 0, 99.0)],
    }
    for first, changed in wrong.items():
        script = replace(one.script, done=changed, n_said=0, n_done=0)
        said = difference_from_reference(replace(one, script=script), run, spans) or ""
        assert said.startswith(f"deed {int(first)}: expected ")
    soon = [(*span[:6], 0.0, span[7]) if span[1] == "demand" else span for span in spans]
    again = replace(one, script=replace(one.script, n_said=0, n_done=0))
    assert (difference_from_reference(again, run, soon) or "").startswith(
        "GPU 0 at 0.0 s: 640 bytes lie in room for 480"
    )
    run.outcome.report.counts.tally.by_expert.more(3, 0, 1)  # one more that was missing and cold
    again = replace(one, script=replace(one.script, n_said=0, n_done=0))
    assert (difference_from_reference(again, run, spans) or "").startswith("hit_n of ")


# -- the source gives what is compiled --------------------------------------------------------------------------------


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
