"""The Expert Map Store: equations 4 to 8 and section 4.4 on numbers small enough to check by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from policies.fine_moe import tracks
from policies.fine_moe.map_store import MapStore, Trajectory, as_embedding, as_embeddings, as_map
from policies.fine_moe.tracks import MapTrack
from sim.options import RunSpec
from sim.policy import Outlook, Rank, StoreSplit, keep, recalled
from sim.run import assemble, prepare, training_split
from traces.format.bundled import DEFAULT, bundled_traces

BUNDLED = pytest.mark.skipif(DEFAULT not in bundled_traces(), reason="the bundled traces are not in this checkout")


def store_of(maps: list[list[list[float]]], embeddings: list[list[float]], capacity: int = 8) -> MapStore:
    store = MapStore(capacity, len(maps[0]), len(maps[0][0]), distance=1)
    for new_map, embedding in zip(maps, embeddings, strict=True):
        store.add(np.array(new_map), np.array(embedding))
    return store


def test_semantic_similarity_is_the_cosine_of_equation_4() -> None:
    store = store_of([[[1, 0]], [[0, 1]]], [[3, 4], [1, 0]])
    # (3*4 + 4*3) / (5 * 5) = 0.96 and (1*4) / (1 * 5) = 0.8
    assert store.semantic(np.array([4.0, 3.0])) == pytest.approx([0.96, 0.8], abs=1e-15)


def test_trajectory_similarity_grows_layer_by_layer_as_equation_5() -> None:
    store = store_of([[[2, 0], [0, 2]], [[2, 0], [2, 0]]], [[1], [1]])
    path = Trajectory(store)
    path.observe(np.array([1.0, 0.0]))
    assert path.similarities() == pytest.approx([1.0, 1.0])
    path.observe(np.array([0.0, 1.0]))
    # own prefix (1,0,0,1); map 0 (2,0,0,2): 4 / (sqrt 2 * sqrt 8) = 1; map 1 (2,0,2,0): 2 / 4 = 0.5
    assert path.similarities() == pytest.approx([1.0, 0.5])


def chosen(rows: np.ndarray, similarities: np.ndarray, top_k: int, threshold: bool) -> list[list[int]]:
    """Experts that an outlook names for layers with these scores."""
    outlook = Outlook(*rows.shape, 1, Rank(rows.size))
    outlook.choose(0, rows, similarities, top_k, threshold)
    for layer in range(len(rows)):
        outlook.believe(layer)
    return [[expert for expert, _ in outlook.named_of(layer)] for layer in range(len(rows))]


def test_threshold_takes_more_experts_when_the_map_is_less_similar() -> None:
    def select(scores, similarity, top_k, threshold):
        return chosen(scores[None], np.array([similarity]), top_k, threshold)[0]

    scores = np.array([10.0, 50.0, 30.0, 10.0])
    # delta = 0.1: one expert reaches it, but at least K = 2 are taken
    assert select(scores, 0.9, 2, True) == [1, 2]
    # delta = 0.85: 50 + 30 = 0.80 is not enough, a tie of two tens goes to the lower id
    assert select(scores, 0.15, 2, True) == [1, 2, 0]
    # delta is clipped to 1: everything
    assert select(scores, -0.5, 2, True) == [1, 2, 0, 3]
    # equation 7 is >=: exactly 0.8 is enough
    assert select(scores, 1 - 0.8, 1, True) == [1, 2]
    # Map (T+S) of Figure 14a: the K most probable whatever the similarity
    assert select(scores, -0.5, 2, False) == [1, 2]


def test_full_store_replaces_the_most_redundant_map() -> None:
    # L = 2, d = 1: redundancy is half semantic, half trajectory similarity
    store = store_of([[[1, 0], [1, 0]], [[0, 1], [0, 1]]], [[1, 0], [0, 1]], capacity=2)
    slot = store.add(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.0, 1.0]))
    # map 0: 0.5 * 0 + 0.5 * 0.5 = 0.25; map 1: 0.5 * 1 + 0.5 * 0.5 = 0.75 -> replaced
    assert slot == 1
    assert store.n_maps == 2
    assert store.maps[:, :, 1].tolist() == [[1, 0], [0, 1]]


def test_fill_equals_adding_one_by_one() -> None:
    rng = np.random.default_rng(3)
    maps = rng.integers(0, 100, (60, 3, 4)).astype(float)
    embeddings = rng.integers(-50, 50, (60, 5)).astype(float)
    one, many = MapStore(8, 3, 4, 1), MapStore(8, 3, 4, 1)
    for new_map, embedding in zip(maps, embeddings, strict=True):
        one.add(new_map, embedding)
    many.fill(maps, embeddings)
    assert np.array_equal(one.maps, many.maps)
    assert np.array_equal(one.meanings.vectors, many.meanings.vectors)


def test_prefill_takes_the_mean_and_zero_vectors_are_harmless() -> None:
    assert as_map(np.array([[[1.0, 3.0]], [[2.0, 5.0]]])).tolist() == [[2.0, 4.0]]  # 1.5 rounds to even
    assert as_embedding(np.array([[1, 0], [3, 2]], dtype=np.float32), last=False).tolist() == [2047, 1024]
    assert as_embedding(np.array([[1, 0], [3, 2]], dtype=np.float32), last=True).tolist() == [2047, 1365]
    assert as_embedding(np.zeros((1, 2), dtype=np.float32), last=False).tolist() == [0, 0]
    store = store_of([[[0, 0]]], [[0]])
    path = Trajectory(store)
    path.observe(np.zeros(2))
    assert path.similarities().tolist() == [0.0]


@pytest.mark.parametrize("top", [40, 4095, 60_000])  # scores whose products are exact in single precision, and beyond
def test_all_layers_at_once_are_the_trajectory_layer_by_layer(top: int) -> None:
    rng = np.random.default_rng(top)
    store = MapStore(12, 5, 6, 2)
    for n_added in range(30):  # grows, then replaces
        rows = rng.integers(0, top + 1, (5, 6)).astype(float)
        rows[rng.integers(5)] *= rng.integers(2)  # now and then a layer without scores
        if n_added:
            search, path = store.along(rows), Trajectory(store)
            for layer, row in enumerate(rows):
                path.observe(row)
                slot, similarity = path.nearest()
                assert (search.slot_array[layer], search.similarity_array[layer]) == (slot, similarity)
            assert np.array_equal(search.whole_array[: store.n_maps], path.similarities())
        exact = rows.reshape(-1) @ np.array([m.reshape(-1) for m in np.moveaxis(store.maps, 2, 0)], dtype=float).T
        assert [
            sum(store.products(layer, row)[slot] for layer, row in enumerate(rows)) for slot in range(store.n_maps)
        ] == exact[: store.n_maps].tolist()
        store.add(rows, rng.integers(-9, 10, 3).astype(float))
    assert store.maps.dtype == (np.float32 if top == 40 else np.float64)


def test_embeddings_of_many_tokens_are_those_of_each() -> None:
    rows = np.random.default_rng(1).standard_normal((9, 5)).astype(np.float32)
    rows[4] = 0
    assert as_embeddings(rows).tolist() == [as_embedding(row[None], last=False).tolist() for row in rows]


def one_by_one(scores: list[float], similarity: float, top_k: int, threshold: bool) -> list[int]:
    """Equations 6 to 8, one expert after the other."""
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)  # stable: ties stay in order of id
    if not any(scores):
        return []
    if not threshold:
        return order[:top_k]
    target, reached, count = max(0.0, min(1.0 - similarity, 1.0)) * sum(scores), 0.0, 0
    while count < len(order) and (reached < target or count < top_k):
        reached += scores[order[count]]
        count += 1
    return order[:count]


def test_selecting_for_many_layers_is_selecting_one_expert_after_the_other() -> None:
    rng = np.random.default_rng(5)
    for n_experts, top_k in ((4, 2), (8, 2), (60, 4), (3, 3), (2, 5)):
        rows = rng.integers(0, 12, (40, n_experts)).astype(float)  # small numbers: many ties
        rows[0] = 0
        similarities = rng.uniform(-0.2, 1.2, 40)
        similarities[1:4] = 0.0, 1.0, 0.5
        for threshold in (True, False):
            each = zip(rows.tolist(), similarities.tolist(), strict=True)
            expected = [one_by_one(row, alike, top_k, threshold) for row, alike in each]
            assert chosen(rows, similarities, top_k, threshold) == expected


def taught(trace: str, **settings: object) -> tuple[MapTrack, StoreSplit]:
    """FineMoE's track after it has learned, and what it learned from."""
    asked = {f"fine_moe.{name}": value for name, value in settings.items()}
    made = prepare(RunSpec(policy="fine_moe", hw="h200", trace=trace, set=asked))
    try:
        assemble(made)
        return made.policy._track, training_split(made, made.policy)
    finally:
        made.close()


def same(one: MapStore, two: MapStore) -> bool:
    arrays = [(s.maps, s.inverse_norms, s.meanings.vectors, s.meanings.inverse_norms) for s in (one, two)]
    return one.n_maps == two.n_maps and all((a == b).all() for a, b in zip(*arrays, strict=True))


@BUNDLED
@pytest.mark.parametrize("trace", ["mixtral-8x7b-small", "phi-3.5-moe-small"])
def test_kept_maps_are_what_is_learned(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = taught(trace)
    monkeypatch.setattr(tracks, "kept_for", lambda store: None)
    learned, _ = taught(trace)
    assert same(kept.store, learned.store)


@BUNDLED
def test_every_bundled_trace_has_its_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `python tools/keep_maps.py` has to be run."""
    monkeypatch.setattr(MapTrack, "learn", lambda self, store: None)
    for trace in bundled_traces():
        track, store = taught(trace)
        file = tracks.kept_for(store)
        assert file is not None
        assert recalled(file, track.origin(store)) is not None, trace


@BUNDLED
def test_maps_of_anything_else_are_learned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another trace, other parameters, a drawn level, and a file in which one bit is wrong."""
    monkeypatch.setattr(MapTrack, "learn", lambda self, store: None)
    track, store = taught("mixtral-8x7b-small")
    file = tracks.kept_for(store)
    assert file is not None
    mine = track.origin(store)
    others = [
        taught("phi-3.5-moe-small"),
        taught("mixtral-8x7b-small", distance=2),
        taught("mixtral-8x7b-small", capacity=999),
        taught("mixtral-8x7b-small", variant="code"),
        (track, StoreSplit(store.trace, store.requests[1:])),
    ]
    origins = [other.origin(of) for other, of in others]
    assert len({mine, *origins}) == 1 + len(origins)
    assert [recalled(file, other) for other in origins] == [None] * len(origins)
    assert recalled(tmp_path / "none", mine) is None
    data, damaged = file.read_bytes(), tmp_path / "damaged"
    for at in (3, 64, 80, 200, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert recalled(damaged, mine) is None, at
    damaged.write_bytes(data[:100])
    assert recalled(damaged, mine) is None


def test_arrays_are_kept_to_the_last_bit(tmp_path: Path) -> None:
    arrays = {"a": np.array([[0.0, 255.0], [3.0, 4.0]]), "b": np.array([-2047, 2047]), "c": np.array([70_000.0])}
    keep(tmp_path / "kept", "mine", arrays)
    again = recalled(tmp_path / "kept", "mine")
    assert again is not None
    assert [again[name].dtype.str for name in arrays] == ["|u1", "<i2", "<u4"]
    assert all((again[name] == array).all() for name, array in arrays.items())
    with pytest.raises(ValueError, match="whole numbers"):
        keep(tmp_path / "kept", "mine", {"a": np.array([0.5])})
