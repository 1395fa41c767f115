"""Whole routes: what they share, and that a search for similar histories finds them."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from test_synth import BUNDLED, SOURCE, all_rows, profile, routed
from tiny_traces import from_rows

from sim.base.errors import BadInput
from sim.cli import main
from traces.format.bundled import bundled_traces
from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.summary import summarise
from traces.synth import published
from traces.synth.compare import PERCENT, POLICIES, TOLERANCE
from traces.synth.draw import Drawer
from traces.synth.fit import fit
from traces.synth.fit_routes import _factor, _positive, _with_share
from traces.synth.profile import Vocabulary, from_json, to_json
from traces.synth.routes import Routes, packed, unpacked
from traces.synth.scale import scaled
from traces.synth.streams import RequestPlan
from traces.synth.text import Text
from traces.synth.write import write


def rows_of(made, n_requests=12, seed=3):
    """Experts, token ids, request, task and position of requests."""
    drawer = Drawer(made, seed)
    parts = []
    for plan in drawer.plans(n_requests, None):
        tensors = all_rows(drawer, plan)
        n = len(tensors["experts"])
        told = np.full(n, plan.index), np.full(n, plan.task), np.arange(n)
        parts.append((tensors["experts"], tensors["token_ids"], *told))
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def test_weights_are_kept_as_bytes():
    weights = np.array([[0.5, -0.25], [0.9, 2.0]])
    text = packed(weights)
    assert unpacked(text, 2, "here").tolist() == [[0.5, -0.25], [115 / 128, 127 / 128]]
    with pytest.raises(BadInput, match="layers x experts"):
        unpacked(text, 3, "here")
    with pytest.raises(BadInput, match="no base64"):
        unpacked("no base64", 2, "here")


def test_the_nearest_covariance_leaves_out_what_is_noise():
    true = np.diag([3.0, 1.0, 0.0, 0.0])
    noise = np.diag([0.0, 0.0, 0.4, -0.4])
    assert _positive(true + noise) == pytest.approx(true), "two directions have all of the variance"
    assert np.linalg.matrix_rank(_positive(true, 1)) == 1
    assert np.trace(_positive(true + noise, noisy=False)) == pytest.approx(4.4)


def test_all_of_a_layers_variance_is_in_the_directions_kept():
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((8, 8))
    share = np.array([0.5, 0.2])
    weights = _factor(_with_share(wide @ wide.T, share, 4), 3, 4)
    assert weights.shape == (8, 3)
    assert (weights**2).sum(axis=1).reshape(2, 4).mean(axis=1) == pytest.approx(share)


def test_rows_of_other_ids_foretell_what_follows_from_the_even_layers(tmp_path):
    """Two routes: even layers tell which; of one's own request and id nothing is taken."""
    routes = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])[[0, 0, 1, 1, 0, 0, 1, 1]][..., None]
    path = from_rows(tmp_path / "t", routes, 2, [(1, 4), (1, 4)])
    with Trace(path) as trace:
        rows = replace(observe.sample(trace), token_ids=np.array([1, 2, 3, 4, 2, 1, 4, 3]))
        assert observe.foretold(rows) == 1.0
        same = replace(rows, token_ids=np.array([1, 1, 3, 3, 1, 1, 3, 3]))
        assert observe.foretold(same) == 0.0, "only the other route is of another id"


def test_pairs_that_come_again_in_their_request():
    ids = np.array([1, 2, 1, 2, 1, 1, 2, 3])
    request = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    position = np.array([0, 1, 2, 3, 4, 0, 1, 2])
    assert observe.repeated(ids, request, position) == pytest.approx(2 / 6), "1 2 and 2 1 of the first request"


def test_rows_of_one_id_are_paired_across_requests(tmp_path):
    experts = np.zeros((6, 1, 1), np.int64)
    path = from_rows(tmp_path / "t", experts, 2, [(1, 3), (1, 3)])
    with Trace(path) as trace:
        rows = replace(observe.sample(trace), token_ids=np.array([7, 8, 9, 7, 9, 5]))
        one, two = observe.id_pairs(rows, 8, np.random.default_rng(0))
    assert set(zip(one.tolist(), two.tolist(), strict=True)) == {(0, 3), (3, 0), (2, 4), (4, 2)}


def test_a_stretch_that_comes_again_goes_on():
    words = Vocabulary([1, 10, 400], [-4.0, -5.0, -7.0], 0.3)

    def again(repeat):
        ids = Text(words, 2, repeat).ids(600, np.random.default_rng(4))
        assert ids.min() >= 0
        assert ids.max() < 400
        return observe.repeated(ids, np.zeros(600, int), np.arange(600))

    assert again(0.8) > again(0.0) + 0.2


def test_ids_of_a_kind_have_like_vectors():
    def nearest(kind):
        table = Routes(routed(directions=40, kind=kind), 1).table[20:]
        alike = table @ table.T / (np.linalg.norm(table, axis=1) * np.linalg.norm(table, axis=1)[:, None])
        np.fill_diagonal(alike, -1.0)
        return np.median(alike.max(axis=1))

    assert nearest(0.95) > 0.85 > 0.7 > nearest(0.0)


def test_tokens_of_other_ids_go_one_way_the_more_the_fewer_directions_there_are():
    """What a search lives on: routes of different ids that are alike in all layers."""

    def far_alike(made):
        experts, ids, *_ = rows_of(made)
        one, two = np.random.default_rng(0).integers(0, len(ids), (2, 20_000))
        differ = ids[one] != ids[two]
        same = (experts[one][..., :, None] == experts[two][..., None, :]).sum(axis=(1, 2, 3)) / (8 * 3)
        return np.quantile(same[differ], 0.98)

    assert far_alike(routed(8, 2, kind=0.0)) > far_alike(routed(8, 40, kind=0.0)) + 0.08


def test_a_task_turns_routes_the_way_its_weights_say():
    """One column of weights per task: a request of the second task has that one's scores and none of the first's."""
    made = routed()
    assert made.routes is not None
    weights = np.zeros((4 * 12, 2))
    weights[5, 1] = 0.5
    turned = msgspec.structs.replace(made.routes, factors=made.routes.factors | {"task": packed(weights)})
    plain = msgspec.structs.replace(turned, factors=turned.factors | {"task": packed(0 * weights)})
    scores = []
    for routes in (turned, plain):
        drawn = Routes(msgspec.structs.replace(made, routes=msgspec.structs.replace(routes, spread=0.0)), 1)
        plans = [RequestPlan(3, 5, 5, task, "") for task in (0, 1)]
        scores.append([drawn.scores(plan, drawn.tokens(plan)).take(10).reshape(10, -1) for plan in plans])
    assert np.allclose(scores[0][0], scores[1][0])
    apart = scores[0][1] - scores[1][1]
    assert apart[:, 5] == pytest.approx(np.full(10, 0.5 * np.sqrt(2)), abs=0.005)  # on a grain
    assert np.delete(apart, 5, axis=1) == pytest.approx(0, abs=1e-6)
    with pytest.raises(BadInput, match=r"got 2 columns: one per task \(3\)"):
        Routes(msgspec.structs.replace(made, tasks=["a", "b", "c"]), 1)


def test_what_routes_have_comes_back_as_text_and_stays_with_their_shape(monkeypatch):
    monkeypatch.setattr(published, "fit_accuracy", lambda bent, distance, values: bent)  # of no matter here, and slow
    made = routed()
    assert from_json(to_json(made), "here") == made
    assert scaled(made, 4, 12, 3).routes == made.routes
    assert scaled(made, 6, 12, 3).routes is None, "which way another shape's go together is not known"
    figures = published.load("adapmoe-accuracy")
    assert published.fit_to(routed(), figures).routes is None
    assert sum(made.varies_with().values()) == pytest.approx(1.0)
    assert next(iter(profile().varies_with())) == "task"


@pytest.mark.thorough
def test_a_fit_finds_what_was_drawn(tmp_path):
    requests = profile().requests
    longer = [msgspec.structs.replace(like, prompt=60, decode=240) for like in requests]
    made = msgspec.structs.replace(routed(), requests=longer)
    with Trace(write(tmp_path / "drawn.safetensors", made, seed=5)) as trace:
        found = fit(trace).routes
        assert fit(trace, routes=False).routes is None
    assert found is not None
    assert np.mean(found.shares["token"]) == pytest.approx(0.6, abs=0.15)
    assert found.lasting["request"] + found.lasting["fade64"] > 0.5
    assert found.repeat == pytest.approx(0.5, abs=0.25)


@pytest.mark.thorough
@BUNDLED
def test_a_drawn_trace_keeps_what_maps_and_histories_live_on(tmp_path, capsys):
    """FineMoE's and MoE-Infinity's predictions within three points of the recorded trace's, plain caches within two."""

    def seen(trace, policy):
        with pytest.raises(SystemExit) as stop:
            main(["run", "--policy", policy, "--cache", "20%", "--hw", "rtx3090", "--trace", trace, "--json"])
        assert stop.value.code == 0
        return json.loads(capsys.readouterr().out)

    with Trace(bundled_traces()[SOURCE]) as trace:
        drawn = write(tmp_path / "drawn.safetensors", fit(trace), seed=1)
        recorded = summarise(trace).figures
    maps = [seen(trace, "fine_moe")["policy_stats"]["predicted_frac"] for trace in (SOURCE, str(drawn))]
    assert maps[1] == pytest.approx(maps[0], abs=0.03)
    used = []
    for trace in (SOURCE, str(drawn)):
        n = {kind: copies["n"] for kind, copies in seen(trace, "moe_infinity")["prefetch"].items()}
        used.append((n["useful"] + n["late"]) / (n["issued"] - n["cancelled"]))
    assert used[1] == pytest.approx(used[0], abs=0.03)
    with Trace(drawn) as trace:
        found = summarise(trace).figures
    for name in (f"{policy}_{percent}" for policy in POLICIES for percent in PERCENT):
        assert found[name] == pytest.approx(recorded[name], abs=TOLERANCE), name
    for name in ("predicted_1", "predicted_2", "predicted_3", "predicted_shared"):
        assert found[name] == pytest.approx(recorded[name], abs=0.01), name
