"""Searches and choices that compile: against the same said plainly, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sim.policy import (
    FREE,
    LAST,
    Likeness,
    Outlook,
    PathSearch,
    Rank,
    Ticket,
    VectorSearch,
    inverse_norm,
    replaced_in_turn,
)


def stored(rng: np.random.Generator, shape: tuple[int, int, int], top: int) -> tuple[np.ndarray, np.ndarray]:
    paths = rng.integers(0, top + 1, shape).astype(np.float32 if top < 1000 else np.float64)
    paths[:, :, rng.integers(shape[2])] = 0  # one is all zeros
    squares = (paths.astype(np.float64) ** 2).sum(axis=1)
    return paths, inverse_norm(squares.cumsum(axis=0))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 9), (5, 7, 40), (4, 8, 33)])
@pytest.mark.parametrize("top", [3, 60_000])  # 3: many ties; beyond single precision
def test_a_search_along_layers_is_one_search_for_every_beginning(shape, top):
    rng = np.random.default_rng(shape[2] + top)
    paths, norms = stored(rng, shape, top)
    search = PathSearch(paths, norms)
    n_layers, width, n_all = shape
    for n in {1, n_all // 2, n_all} - {0}:
        rows = rng.integers(0, top + 1, (n_layers, width)).astype(float)
        slots, similarities, own = np.zeros(n_layers, dtype=np.int64), np.zeros(n_layers), np.zeros(n_layers)
        whole = np.zeros(n)
        assert search.along(rows, n, slots, similarities, whole, own)
        for layer in range(n_layers):
            beginning = rows[: layer + 1].reshape(-1)
            length = float(inverse_norm(np.array(beginning @ beginning)))
            cosines = (beginning @ paths[: layer + 1, :, :n].reshape(-1, n).astype(float)) * norms[layer, :n]
            best = int(cosines.argmax())
            assert (slots[layer], similarities[layer], own[layer]) == (best, cosines[best] * length, length)
        assert whole.tolist() == (cosines * length).tolist()
        out = np.zeros((n_layers, width))
        search.rows(0, slots, out)
        assert out.tolist() == [paths[layer, :, slots[layer]].tolist() for layer in range(n_layers)]


@pytest.mark.parametrize("top", [3, 20_000, 65_000, 70_000])
@pytest.mark.parametrize("n_all", [1, 7, 8, 9, 31, 64])
def test_paths_taken_several_at_a_time_give_the_same_bits_as_one_by_one(n_all, top):
    """Where this processor cannot (or nothing is compiled) both go one by one, against the same answer.

    3: many ties. 20,000: beyond single precision. 65,000: more than 15 bits hold, in one number of eight. 70,000: more
    than 16 bits hold.
    """
    rng = np.random.default_rng(n_all + top)
    able = PathSearch(np.zeros((1, 8, 1)), np.zeros((1, 1))).wide

    def drawn(*shape: int) -> np.ndarray:
        values = rng.integers(0, min(top, 20_000) + 1, shape).astype(float)
        if top > 20_000:
            values //= 100
            values[..., rng.integers(8)] = top
        return values

    paths = np.ascontiguousarray(drawn(n_all, 5, 8).transpose(1, 2, 0), dtype=np.float32 if top == 3 else np.float64)
    search, rows, answers = PathSearch(paths, norms_of(paths)), drawn(5, 8), []
    fits = able and top < 70_000
    assert search.wide == fits
    slot = n_all // 2
    for given in (None, drawn(5, 8), drawn(5, 8)):  # as it is, and with another path in a slot, told in two ways
        if given is not None:
            paths[:, :, slot] = given
            norms = norms_of(paths)[:, slot].copy()
            if len(answers) == 2:
                search.put(slot, given, norms)
            else:
                search.put_all(np.array([slot]), given[:, :, None], norms[:, None])
        for wide in (search.wide, False):
            search.wide = wide
            slots, similarities, own, whole = np.zeros(5, dtype=np.int64), np.zeros(5), np.zeros(5), np.zeros(n_all)
            assert search.along(rows, n_all, slots, similarities, whole, own)
            answers.append((slots.tolist(), similarities.tolist(), own.tolist(), whole.tolist()))
        search.wide = fits
        assert answers[-1] == answers[-2]
        products = np.einsum("le,len->ln", rows, paths.astype(float)).cumsum(axis=0)
        assert answers[-1][0] == (products * norms_of(paths)).argmax(axis=1).tolist()
    for wrong in (70_000.0, 0.5, -1.0):  # once what does not fit is stored, all is compared one by one
        search.wide = fits
        search.put(0, np.full((5, 8), wrong), np.zeros(5))
        assert not search.wide
        assert not PathSearch(np.full((5, 8, 1), wrong), np.zeros((5, 1))).wide


def norms_of(paths: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(inverse_norm((paths.astype(np.float64) ** 2).sum(axis=1).cumsum(axis=0)))


@pytest.mark.parametrize("n_values", [1, 15, 16, 17, 600])  # 600: more than 32 bits hold of the largest products
def test_a_search_among_vectors_is_the_cosine_with_each(n_values):
    rng = np.random.default_rng(n_values)
    vectors = rng.integers(-2047, 2048, (9, n_values)).astype(float)
    vectors[3] = 0.0
    vectors[4] = 2047.0
    search = VectorSearch(12, n_values)
    search.put_all(np.arange(5), vectors[:5])
    for slot in range(5, 9):
        search.put(slot, vectors[slot])
    norms = inverse_norm((vectors * vectors).sum(axis=1))
    for asked in (vectors[4], vectors[3], vectors[0]):
        length = float(inverse_norm(asked @ asked))
        for n in (0, 1, 9):
            cosines = (vectors[:n] @ asked) * norms[:n] * length
            assert search.cosines(asked, n).tolist() == cosines.tolist()
            if n:
                assert search.nearest(asked, n) == int(cosines.argmax())
                assert search.alike_array[:n].tolist() == cosines.tolist()
    for wrong in (np.full(n_values, 2048.0), np.full(n_values, 0.5)):
        for call in (lambda v: search.put(0, v), lambda v: search.put_all(np.array([0]), v[None])):
            with pytest.raises(ValueError, match="whole numbers"):
                call(wrong)
        with pytest.raises(ValueError, match="whole numbers"):
            search.cosines(wrong, 3)
    assert search.vectors[:9].tolist() == vectors.tolist()
    with pytest.raises(ValueError, match="for slot 12"):
        search.put(12, vectors[0])
    for call in (search.cosines, search.nearest):
        with pytest.raises(ValueError, match="13 vectors"):
            call(vectors[0], 13)
        with pytest.raises(ValueError, match=f"{n_values + 1} values"):
            call(np.zeros(n_values + 1), 3)
    with pytest.raises(ValueError, match="0 vectors"):
        search.nearest(vectors[0], 0)


@pytest.mark.parametrize("n_experts", [4, 8, 24])  # 24: more than are looked at one by one
def test_choices_from_a_search_are_those_from_the_rows_that_it_finds(n_experts):
    rng = np.random.default_rng(n_experts)
    paths, norms = stored(rng, (6, n_experts, 11), 5)
    search = PathSearch(paths, norms)
    for slot in range(20):
        assert search.find(rng.integers(0, 6, (6, n_experts)).astype(float), 11)
        found, named = [], Outlook(6, n_experts, 2, Rank(6 * n_experts))
        for by_rows in (True, False):
            outlook = Outlook(6, n_experts, 2, Rank(6 * n_experts), LAST)
            for joins in (False, True):
                if by_rows:
                    rows = np.zeros((4, n_experts))
                    search.rows(2, search.slot_array, rows)
                    outlook.choose(2, rows, search.similarity_array, 2, True, joins)
                    search.rows(0, np.full(6, slot % 11), rows)
                    outlook.choose(0, rows, np.full(4, 0.5), 2, slot % 2 == 0, joins)
                else:
                    outlook.choose_found(search, 2, 4, 2, True, joins)
                    outlook.choose_path(search, slot % 11, 0.5, 0, 4, 2, slot % 2 == 0, joins)
            for layer in range(6):
                outlook.believe(layer)
            found.append([outlook.named_of(layer) for layer in range(6)])
        assert found[0] == found[1] and any(found[0])
        with pytest.raises(ValueError, match="5 rows from layer 2"):
            named.choose_found(search, 2, 5, 1, True)
    with pytest.raises(ValueError, match="slot 11"):
        named.choose_path(search, 11, 0.5, 0, 1, 1, True)
    with pytest.raises(ValueError, match="7 layers"):
        named.choose_found(search, 0, 7, 1, True)
    with pytest.raises(ValueError, match="12 paths"):
        search.find(np.zeros((6, n_experts)), 12)


def test_newcomers_take_slots_as_if_they_came_one_by_one():
    """Ties are many: the vectors are short and of small numbers."""
    rng = np.random.default_rng(2)
    for n, m, share in ((1, 3, 0.5), (4, 30, 0.25), (20, 9, 0.0), (6, 40, 1.0)):
        held = [rng.integers(0, 3, (n, width)).astype(float) for width in (2, 3)]
        new = [rng.integers(0, 3, (m, width)).astype(float) for width in (2, 3)]
        given = [
            Likeness(
                rows @ have.T,
                inverse_norm((have * have).sum(axis=1)),
                rows @ rows.T,
                inverse_norm((rows * rows).sum(axis=1)),
            )
            for have, rows in zip(held, new, strict=True)
        ]
        expected = []
        for i in range(m):
            alike = np.zeros(n)
            for have, rows, weight in zip(held, new, (share, 1.0 - share), strict=True):
                norms, own = (inverse_norm((x * x).sum(axis=-1)) for x in (have, rows[i]))
                alike = alike + weight * ((have @ rows[i]) * norms * own)
            expected.append(int(alike.argmax()))
            for have, rows in zip(held, new, strict=True):
                have[expected[-1]] = rows[i]
        assert replaced_in_turn(*given, share).tolist() == expected
    with pytest.raises(ValueError, match="got arrays of shapes"):
        replaced_in_turn(given[0], given[0]._replace(own=np.zeros(1)), 0.5)


def test_an_outlook_by_hand():
    """Three layers of four experts, looking two ahead."""
    order = Rank(12)
    outlook = Outlook(3, 4, 2, order, LAST)
    outlook.visit(2, {1: 5})  # nothing was expected: 1 / 4 x 1 visit, and nothing is counted
    assert order.rank.tolist() == [0] * 9 + [0.25, 0, 0]
    assert (outlook.needed, outlook.named, outlook.right) == (0, 0, 0)

    rows = np.array([[6.0, 2.0, 2.0, 0.0], [1.0, 0.0, 9.0, 0.0]])
    outlook.choose(1, rows, np.array([0.3, 0.5]), 1, True)  # 0.7 of the first row takes two, 0.5 of the other one
    assert outlook.named_of(1) == []
    outlook.believe(1)
    outlook.believe(2)
    assert outlook.named_of(1) == [(0, 0.6), (1, 0.2)]
    assert outlook.named_of(2) == [(2, 0.9)]
    assert order.rank.tolist() == [0] * 9 + [0, 0, 0]  # expert 1 of layer 2: probability 0 x 1 visit
    assert order.bar.tolist() == [0, 0, 0, 0, LAST, LAST, 0, 0, 0, 0, LAST, 0]

    ticket = Ticket(1.0, 0)
    wishes, start, stop, fresh, after, now, most = outlook.ahead(0, (ticket,))
    asked = list(zip(wishes.indices[:stop], wishes.priorities[:stop], strict=True))
    assert asked == [(4, 0.6), (5, 0.2), (10, 0.45)]  # probabilities over the distance
    assert (start, fresh, after, now, most) == (0, 2, (ticket,), 0, -1)
    first = outlook.ahead(-1, (ticket,))
    assert (list(wishes.priorities[: first.stop]), first.fresh, first.up_to_layer) == ([0.3, 0.1], 0, -1)

    # A second sequence adds what it names, and raises probabilities.
    outlook.choose(1, np.array([[0.0, 5.0, 5.0, 0.0]]), np.array([0.9]), 2, False, joins=True)
    outlook.believe(1)
    assert outlook.named_of(1) == [(0, 0.6), (1, 0.5), (2, 0.5)]

    outlook.visit(1, {1: 1, 3: 2})
    assert (outlook.needed, outlook.named, outlook.right) == (2, 3, 1)
    assert order.rank.tolist()[4:8] == [0, 0.5, 0, 0]
    outlook.forget(1)
    assert order.bar.tolist()[4:8] == [FREE] * 4
    assert outlook.named_of(1) == []
    assert outlook.ahead(0, ()).stop == 1
    assert outlook.named_of(2) != []
    assert outlook.ahead(2, ()).stop == 0  # what has passed is forgotten
    assert outlook.named_of(2) == []
    assert order.bar.tolist() == [FREE] * 12
    outlook.visit(1, {1: 1})
    assert (outlook.needed, outlook.named, outlook.right) == (2, 3, 1)  # a layer is asked for once


def test_a_prediction_about_all_layers_to_the_last_is_replaced_by_the_next_one():
    """Four layers of two experts, one layer ahead; probabilities over the distance, what is new waits."""
    outlook = Outlook(4, 2, 1, Rank(8), LAST, to_last=True)
    seen = []
    for now, row in ((0, [3.0, 1.0]), (1, [1.0, 3.0])):
        first = now + 1
        outlook.choose(first, np.array([row] * (4 - first)), np.ones(4 - first), 1, True)
        outlook.foresee(now)
        asked = outlook.ahead(now, ())
        wishes = list(zip(asked.wishes.indices[: asked.stop], asked.wishes.priorities[: asked.stop], strict=True))
        seen.append((wishes, asked.fresh))
    assert seen == [([(2, 0.75), (4, 0.375), (6, 0.25)], 0), ([(5, 0.75), (7, 0.375)], 0)]
    outlook.visit(2, {1: 1})
    assert (outlook.needed, outlook.named, outlook.right) == (1, 1, 1)  # by the last prediction alone
