"""The policy `random`: its hit rate, its seeds, and that it draws evenly."""

from __future__ import annotations

import pytest
from easy_numbers import setup
from tiny_traces import from_rows, noise, tiny_trace

from policies.random import Random
from sim.options import RunSpec
from sim.run import execute, prepare
from traces.format.reader import Trace


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    with Trace(tiny_trace(folder / "t", 3, 6, 2, n_requests=6, prompt=3, outputs=12, levels=set(), seed=5)) as trace:
        yield trace


# -- random ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uniform(tmp_path_factory):
    """4,000 tokens that ask one of 20 experts, evenly and independently."""
    rows = (noise(11, 4000, 1, 1) % 20).tolist()
    with Trace(from_rows(tmp_path_factory.mktemp("even") / "t", rows, 20)) as trace:
        yield trace


@pytest.mark.parametrize("room", [2, 5, 10, 16])
def test_random_hits_as_often_as_it_caches(uniform, room):
    """MoEpic Table 1, RND: 16.4, 33.0, 49.7, 67.4, 83.2 % at 10 to 50 of 60 experts: the share cached."""
    result = execute(setup(Random(), uniform, room)).result
    # Standard deviation of the share: below sqrt(p (1 - p) / 4000) < 0.008.
    assert result.hit_rate == pytest.approx(room / 20, abs=0.025)


def test_random_is_a_function_of_its_seed(tiny, tmp_path):
    first, again = (execute(setup(Random(seed=3), tiny, 5)) for _ in range(2))
    assert first.result.tpot_s == again.result.tpot_s
    counts = {execute(setup(Random(seed=s), tiny, 5)).report.counts.tally.n_demand for s in range(8)}
    assert len(counts) > 1


def test_the_run_seed_reaches_it_unless_it_has_one_of_its_own(tmp_path):
    path = tiny_trace(tmp_path / "t", 32, 8, 2, levels=set())

    def seed(**given):
        with_own = {"seed": 7} if given.pop("own", False) else {}
        made = prepare(
            RunSpec(policy="random", hw="h200-sxm", trace=str(path), model="mixtral-8x7b", set=with_own, **given)
        )
        made.close()
        return made.policy.settings["seed"]

    assert (seed(), seed(seed=4), seed(seed=4, own=True)) == (0, 4, 7)


def test_random_draws_evenly():
    """Who stands where after others came and went does not matter: every resident leaves about as often."""

    class Room:
        n_gpus = 1

        def evictable(self, piece):
            return piece != 3

    policy, left = Random(seed=1), [0] * 6
    policy.bind(Room())
    policy.group = lambda piece: 0
    for piece in range(6):
        policy.accessed(piece, False, None)
    for _ in range(6000):
        out = policy.victim(None, False, Room())
        left[out] += 1
        policy.evicted(out, None)
        policy.accessed(out, False, None)
    assert left[3] == 0
    assert all(abs(n - 1200) < 150 for at, n in enumerate(left) if at != 3)
