"""Rooms and pieces: what is refused, what suffices to compute."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sim.base.errors import IllegalDecision
from sim.engine.residency import DEMANDED, Residency
from sim.policy.pieces import Pieces

SIZES = {"bf16": 101, "int4": 26}


def pieces(n_gpus: int = 1) -> Pieces:
    return Pieces(2, 3, "bf16", n_gpus, SIZES.__getitem__)


def test_bytes_are_booked_and_freed():
    made = pieces()
    cache = Residency(made, [250])
    a, b, c = made.whole[0]
    cache.add(a, None, 0.0, DEMANDED)
    cache.add(b, None, 0.0, DEMANDED)
    assert (list(cache.used_bytes), cache.fits(c), cache.holds(a)) == ([202], False, True)
    with pytest.raises(IllegalDecision, match="303 bytes would exceed the expert budget of 250 on GPU 0"):
        cache.add(c, None, 0.0, DEMANDED)
    with pytest.raises(IllegalDecision, match="it is resident"):
        cache.add(a, None, 0.0, DEMANDED)
    cache.remove(a)
    with pytest.raises(IllegalDecision, match="it is not resident"):
        cache.remove(a)
    assert (list(cache.used_bytes), list(cache.peak_bytes)) == ([101], [202])
    assert (cache.resident_pieces(), cache.holds(a)) == ([b], False)


def test_every_gpu_has_its_own_room():
    made = pieces(2)
    cache = Residency(made, [101, 101])
    assert [made.home(layer, e) for layer in range(2) for e in range(3)] == [0, 1, 0, 1, 0, 1]
    cache.add(made.whole[0][0], None, 0.0, DEMANDED)
    assert not cache.fits(made.whole[0][2])
    assert cache.fits(made.whole[0][1])


def test_layers_with_budgets_of_their_own():
    made = pieces()
    cache = Residency(made, [303])
    cache.divide([[202, 101]])
    assert cache.divided
    cache.add(made.whole[1][0], None, 0.0, DEMANDED)
    assert not cache.fits(made.whole[1][1])
    cache.remove(made.whole[1][0])
    assert cache.fits(made.whole[1][1])
    with pytest.raises(IllegalDecision, match="304 bytes on GPU 0: its expert budget is 303"):
        Residency(pieces(), [303]).divide([[202, 102]])


def test_parts_add_up_and_are_interned():
    made = pieces()
    cuts = (0.0, 1 / 3, 2 / 3, 1.0)
    parts = [made.part(0, 0, a, b) for a, b in pairwise(cuts)]
    assert sum(part.n_bytes for part in parts) == 101
    assert made.part(0, 0, 0.0, 1 / 3) is parts[0]
    assert made.part(0, 0, 0.0, 1.0) is made.whole[0][0]
    assert made.part(0, 0, 0.0, 1.0, "int4").n_bytes == 26
    with pytest.raises(ValueError, match="need 0 <= start < stop <= 1"):
        made.part(0, 0, 0.5, 0.5)


def test_what_suffices_to_compute():
    made = pieces()
    cache = Residency(made, [500])
    whole = made.whole[0][0]
    left, right, middle = made.part(0, 0, 0.0, 0.5), made.part(0, 0, 0.5, 1.0), made.part(0, 0, 0.25, 0.75)
    assert cache.sufficient(whole) is None
    for part in (left, middle):
        cache.add(part, None, 0.0, DEMANDED)
    assert cache.sufficient(whole) is None  # the last quarter is missing
    cache.add(right, None, 0.0, DEMANDED)
    cache.remove(middle)
    assert cache.sufficient(whole) == [left, right]
    assert cache.parts(whole) == [left, right]


def test_no_column_is_computed_twice():
    made = pieces()
    cache = Residency(made, [500])
    whole = made.whole[0][0]

    def part(start, stop, precision=None):
        piece = made.part(0, 0, start, stop, precision)
        if not cache.holds(piece):
            cache.add(piece, None, 0.0, DEMANDED)
        return piece

    def chosen(precision=None, done=()):
        return cache.sufficient(whole, precision, done)

    left, late, low = part(0.0, 0.6), part(0.4, 1.0), part(0.0, 1.0, "int4")
    assert chosen() is None  # together they hold every column, some of them twice
    assert chosen("int4") == [low]  # the better half would leave nothing that fits on to it
    right = part(0.6, 1.0)
    assert chosen("int4") == [left, right]
    assert chosen(done=[left]) == [right]
    assert chosen(done=[right]) == [left]
    assert chosen(done=[left, right]) == []
    assert chosen("int4", done=[right]) == [left]
    assert chosen(done=[late]) is None  # 0.0..0.4 is nowhere
    cache.remove(left)
    assert chosen("int4", done=[right]) is None  # the low-precision whole would compute the right part again
    cache.add(whole, None, 0.0, DEMANDED)
    assert chosen() == [whole]
    assert chosen(done=[right]) is None
