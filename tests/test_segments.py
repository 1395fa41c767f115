"""Compiled nouns by hand: what is said of segments, in which order, what room that leaves; and who an order spares."""

from __future__ import annotations

import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, setup
from tiny_traces import from_rows

from sim.policy import (
    FREE,
    LAST,
    NOT_FOR_PREFETCH,
    Buffer,
    Evict,
    Fetch,
    Policy,
    Prefetch,
    Rank,
    RunGpu,
    RunPart,
    Segment,
    Spared,
    SplitExpert,
    lowest,
)
from traces.format.reader import Trace

HALF = EXPERT_BYTES // 2


def split(view, expert, layer=0):
    """An expert in halves, of which the top is copied in two slices."""
    top, bottom = view.part(layer, expert, 0.0, 0.5), view.part(layer, expert, 0.5, 1.0)
    slices = view.part(layer, expert, 0.0, 0.25), view.part(layer, expert, 0.25, 0.5)
    return SplitExpert(Segment(top, slices, [2.5, 2.5]), Segment(bottom, (bottom,), [5.0]))


class Asks(Policy):
    """Calls back when the first gate has spoken, then leaves the layer to the engine."""

    name = "asks"
    title = "Asks"
    source = "tests"
    traits = frozenset({"timing"})

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def gate_done(self, gate, view):
        ask, self.ask = self.ask, None
        return ask(view) if ask else [part for e in gate.needs for part in (Fetch(view.piece(0, e)), RunGpu(e))]


def asked(tmp_path, ask):
    with Trace(from_rows(tmp_path / "t", [[[0]]], n_experts=4)) as trace:
        return execute_easy(setup(Asks(ask), trace, room=3))


def test_what_is_said_holds_at_once(tmp_path):
    def ask(view):
        buffer, one, other = Buffer(1), split(view, 0), split(view, 1)
        a, b, c = (*one.top.slices, *one.bottom.slices)
        buffer.begin(view, [HALF])
        assert buffer.room == [3 * EXPERT_BYTES - HALF]  # but for what is kept
        one.look(view)
        assert (one.n_slices, one.n_held, one.absent, one.missing_bytes()) == (3, 0, [], EXPERT_BYTES)
        assert buffer.fits(one, 0)
        buffer.demand(one)
        assert buffer.said == [Fetch(a), Fetch(b), Fetch(c)]
        assert buffer.room == [2 * EXPERT_BYTES - HALF]
        assert one.missing_bytes() == 0
        buffer.demand(one)  # it lacks nothing
        assert len(buffer.said) == 3
        # 10 s of copies each: a window of 9 s is passed after the first; expert 3 lives elsewhere.
        assert buffer.ahead({1: other, 2: split(view, 2)}, [3, 1, 2], 0, 9.0) == [other.top, other.bottom]
        assert buffer.said[3:] == [Prefetch(one) for one in (*other.top.slices, *other.bottom.slices)]
        assert buffer.room == [HALF]
        assert buffer.ahead({2: split(view, 2)}, [2], 0, 9.0) == []  # no room
        one.look(view)
        assert (one.n_held, one.absent) == (3, [Fetch(a), Fetch(b), Fetch(c)])  # nothing has been applied yet
        before = len(buffer.said)
        buffer.wait(one)
        buffer.run_ready(one)  # nothing is there
        buffer.run(one, None, keeps_top=True)
        top, bottom = RunPart(view.part(0, 0, 0.0, 0.5), (), (a, b)), RunPart(c)
        assert buffer.said[before:] == [Fetch(a), Fetch(b), Fetch(c), top, bottom, Evict(c)]
        assert buffer.room == [EXPERT_BYTES]
        assert (one.top.held, one.bottom.held, one.missing_bytes()) == (True, False, HALF)
        buffer.leave(one.top)
        assert buffer.said[-2:] == [Evict(a), Evict(b)]
        return [*buffer.said[:3], top, bottom]

    assert asked(tmp_path, ask).log


def test_what_is_there_runs_first_and_once(tmp_path):
    found = {}

    def first(view):
        found["split"] = one = split(view, 0)
        buffer = Buffer(1)
        buffer.begin(view, [0])
        buffer.demand(one)
        said = buffer.said
        buffer.run(one, RunGpu(0, joined=True), keeps_top=True)
        assert said[3:] == [RunGpu(0, joined=True), Evict(one.bottom.slices[0])]
        found["policy"].ask = second
        return [*said[:4]]

    def second(view):
        one, buffer = found["split"], Buffer(1)
        one.bottom.hold(True)  # the eviction was not applied
        buffer.begin(view, [0])
        one.look(view)
        assert (one.n_held, one.absent) == (3, [])
        buffer.run_ready(one)
        buffer.run(one, None, keeps_top=False)
        bottom = one.bottom.slices[0]
        assert buffer.said == [one.top.run, one.bottom.run, Evict(bottom), *(Evict(part) for part in one.top.slices)]
        return buffer.said

    with Trace(from_rows(tmp_path / "t", [[[0]], [[0]]], n_experts=4)) as trace:
        found["policy"] = policy = Asks(first)
        seen = execute_easy(setup(policy, trace, room=3))
    assert [what for what, *_ in seen.log] == ["fetch"] * 3 + ["gpu", "part", "gpu"] + ["evict"] * 3


@pytest.mark.parametrize(
    ("keys", "experts", "but_for", "found"),
    [
        ([3, 1, 2], {0: None, 1: None, 2: None}, {}, 1),
        ([3, 1, 2], {0: None, 1: None, 2: None}, {1: 5}, 2),
        ([1, 1, 1], {2: None, 1: None}, {}, 1),  # equal: the lowest id, whatever the order
        ([-(2**70), 2**70], {0: None, 1: None}, {0: 1}, 1),  # keys may outgrow machine numbers
        ([1, 2], {0: None}, {0: 1}, -1),
        ([], {}, {}, -1),
    ],
)
def test_the_lowest_that_is_not_spared(keys, experts, but_for, found):
    assert lowest(keys, experts, but_for) == found


def test_who_is_spared():
    order = Rank(8)
    spared = Spared(order, 4)
    spared.aim(1, [1, 2])
    assert order.bar.tolist() == [FREE] * 5 + [NOT_FOR_PREFETCH] * 2 + [FREE]
    spared.shield(1, [0, 1])
    assert order.bar.tolist() == [FREE] * 4 + [LAST, LAST, NOT_FOR_PREFETCH, FREE]
    spared.aim(0, [3])  # who was aimed at is free, unless its layer still runs
    assert order.bar.tolist() == [FREE, FREE, FREE, NOT_FOR_PREFETCH, LAST, LAST, FREE, FREE]
    spared.unshield()
    assert order.bar.tolist() == [FREE, FREE, FREE, NOT_FOR_PREFETCH] + [FREE] * 4
    spared.shield(0, [3])
    spared.unshield()  # still aimed at
    assert order.bar.tolist() == [FREE, FREE, FREE, NOT_FOR_PREFETCH] + [FREE] * 4
