"""Segmented LRU and Least-Stale: by hand, against their published lists, and where Least-Stale is LRU."""

from __future__ import annotations

from pathlib import Path
from random import Random as Draws
from typing import Any

import pytest
from cpu_bench import replay, seeded, written
from easy_numbers import Run, run

from policies.least_stale import LeastStale
from policies.lru import Lru
from policies.slru import Slru
from sim.policy import Policy, Recency, View


def left(seen: Run) -> list[tuple[int, int]]:
    return [(layer, expert) for kind, layer, expert in seen.log if kind == "evict"]


def experts_left(policy: Policy, tmp_path: Path, asked: list[int], room: int) -> list[int]:
    """Experts in the order they left, for tokens that each ask for one expert of one layer."""
    return [expert for _, expert in left(run(policy, tmp_path, [[[e]] for e in asked], room=room, n_experts=8))]


def test_slru_evicts_the_oldest_on_probation_and_spares_what_was_used_again(tmp_path):
    # Room for 5, 4 of them protected. 0 and 1 are used again; LRU would let 0 leave for 5, 1 for 6.
    asked = [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert experts_left(Slru(), tmp_path, asked, room=5) == [2, 3]
    assert experts_left(Lru(), tmp_path, asked, room=5) == [0, 1]


def test_slru_demotes_the_oldest_protected_as_the_youngest_on_probation(tmp_path):
    # Room for 5, 2 protected: 0 and 1, then 2 is used again and 0 goes back on probation, behind 3 and 4.
    asked = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert experts_left(Slru(protected_frac=0.4), tmp_path, asked, room=5) == [3, 4, 0]


def test_slru_takes_a_protected_one_where_nobody_is_on_probation(tmp_path):
    # All five are used again with the whole cache protected: 0 is the oldest of them.
    asked = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert experts_left(Slru(protected_frac=1.0), tmp_path, asked, room=5) == [0]


class TwoLists:
    """SLRU's or Least-Stale's two lists, the second of which gives room only when the first is empty."""

    def __init__(self, rule: str, room: int) -> None:
        self.rule, self.room, self.most = rule, room, max(1, int(room * 0.8))
        self.first: list[Any] = []
        self.second: list[Any] = []

    def begin_pass(self) -> None:
        if self.rule == "least_stale":
            self.first += self.second
            self.second = []

    def look_up(self, key: Any) -> Any:
        """Serve one expert; who left for it, or None."""
        gone = None
        if key in self.second:
            if self.rule == "slru":
                self.second.remove(key)
                self.second.append(key)
        elif key in self.first:
            self.first.remove(key)
            if self.rule == "slru" and len(self.second) >= self.most:
                self.first.append(self.second.pop(0))
            self.second.append(key)
        else:
            if len(self.first) + len(self.second) == self.room:
                gone = (self.first or self.second).pop(0)
            (self.first if self.rule == "slru" else self.second).append(key)
        return gone


@pytest.mark.parametrize("kind", [Slru, LeastStale])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_against_a_replay_of_the_published_lists(kind, scope, tmp_path):
    draw, n_layers, n_experts, room = Draws(5), 3, 8, 15
    rows = [[[int(n_experts * draw.random() ** 2)] for _ in range(n_layers)] for _ in range(150)]
    caches = [TwoLists(kind.name, room if scope == "global" else room // n_layers) for _ in range(n_layers)]
    expected = []
    for row in rows:
        for cache in caches:
            cache.begin_pass()
        for layer, (expert,) in enumerate(row):
            gone = caches[0 if scope == "global" else layer].look_up((layer, expert))
            expected += [gone] if gone else []
    assert left(run(kind(scope=scope), tmp_path, rows, room=room, n_experts=n_experts)) == expected
    assert len(expected) > 60


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("room", [9, 20, 33])
def test_without_prefetching_least_stale_is_lru(scope, room, tmp_path):
    """Z2 of the published replays has one figure for both, per layer; with one expert touched once a pass, so here."""
    facts = {"n_layers": 4, "n_experts": 16, "top_k": 2, "prompt": 5, "outputs": 12, "n_requests": 4}
    with seeded(tmp_path, **facts) as trace:
        path = trace.path
    logs = [replay(kind(scope=scope), path, room).log for kind in (LeastStale, Lru)]
    assert logs[0] == logs[1]
    assert any(kind == "evict" for kind, _, _ in logs[0])


class RecentlyUsed(LeastStale):
    """The same prefetching under LRU."""

    def bind(self, view: View) -> None:
        super().bind(view)
        self.order = Recency()


def test_a_use_in_the_pass_that_prefetched_it_moves_nothing(tmp_path):
    # Room for 4: layer 0's 0 and 1, used in every pass, and two of layer 1. Decode step 1 prefetches 1.3, then 1.2, and
    # uses 1.2, then 1.3. In step 2 they are stale: the one prefetched first leaves first; of LRU, the one used first.
    asked = [[0, 1], [2, 3], [0, 1]]
    foretold = [[0, 0, 0, 0], [0, 0, 0.25, 0.75], [0.75, 0.25, 0, 0]]
    rows = [[[0, 1], ids] for ids in asked]
    shares = [[scores, [0.25] * 4] for scores in foretold]
    path = written(tmp_path / "t.safetensors", [(1, len(rows), "test")], rows, 4, next_scores_1=shares)
    assert left(replay(LeastStale(prefetch=2), path, 4)) == [(1, 0), (1, 1), (1, 3), (1, 2)]
    assert left(replay(RecentlyUsed(prefetch=2), path, 4)) == [(1, 0), (1, 1), (1, 2), (1, 3)]
