"""The integer network: exact products, files that cannot be trusted, a stand-in that is right as often as it says."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save_file

from policies.common.mlp import BLOCK, LIMITS, Dense, IntMlp, best, load, mlp_of, quantised, save, step_for
from sim.base.errors import BadInput
from sim.workload.surrogate import Surrogate, outcomes


def dense(weight, scale=1.0, bias=0.0):
    n = len(weight)
    return Dense(weight, np.full(n, scale), np.full(n, bias))


@pytest.mark.parametrize("kind", ["int8", "int16"])
@pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_products_are_exact_at_the_extremes_and_in_any_order(kind, width):
    rng = np.random.default_rng(width)
    limit = LIMITS[kind]
    weight = rng.integers(-limit, limit + 1, (3, width)).astype(kind)
    weight[0] = limit  # the largest sum there can be
    x = rng.integers(0, limit + 1, (2, width))
    x[0] = limit
    exact = x.astype(object) @ weight.T.astype(object)  # Python integers
    assert dense(weight).product(x.astype(np.float64)).tolist() == exact.tolist()
    mix = rng.permutation(width)
    assert dense(weight[:, mix]).product(x[:, mix].astype(np.float64)).tolist() == exact.tolist()


def test_a_network_by_hand():
    # (3, -2) -> relu(0.5 * (1*3 + 2*-2)) = 0, relu(0.5 * (4*3 - 1*-2) + 1) = 8 -> 2 * 8 - 3
    first = dense(np.array([[1, 2], [4, -1]], dtype=np.int16), 0.5)
    first = Dense(first.stored, first.scale, np.array([0.0, 1.0]))
    second = dense(np.array([[5, 2]], dtype=np.int8), 1.0, -3.0)
    assert IntMlp([first, second]).scores(np.array([[3.0, -2.0]])).tolist() == [[13.0]]
    # What the next layer takes is capped: 4 * 100 * 0.5 + 1 = 201 becomes 127.
    assert IntMlp([first, second]).scores(np.array([[100.0, 0.0]])).tolist() == [[5 * 50 + 2 * 127 - 3]]


def test_quantised_layers_follow_the_real_ones():
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(8, 30)), rng.normal(size=8)
    x = np.abs(rng.normal(size=(200, 30)))
    steps = step_for(x, 127), 2.0**-20
    tensors = {f"{k}.0": v for k, v in quantised(weight, bias, *steps, "int8").items()}
    net = mlp_of(tensors, 30, 8, None)
    whole = np.clip(np.rint(x / steps[0]), 0, 127)  # the largest 0.1 % of the values are cut off
    got = net.scores(whole) * steps[1]
    assert np.abs(got - (whole * steps[0] @ weight.T + bias)).max() < 0.15  # weights alone are rounded
    assert (best(got, 1) == best(x @ weight.T + bias, 1)).mean() > 0.95


def test_ties_go_to_the_lowest():
    assert best(np.array([[1.0, 3.0, 3.0, 2.0, 3.0]]), 2).tolist() == [[1, 2]]


def whole():
    return {"weight.0": np.ones((2, 3), np.int16), "scale.0": np.ones(2), "bias.0": np.zeros(2)}


def test_files_round_trip_and_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, whole(), {"format": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tensors, facts = load(tmp_path / "a")
    assert facts == {"format": 1}
    assert mlp_of(tensors, 3, 2, tmp_path / "a").scores(np.ones((1, 3))).tolist() == [[3.0, 3.0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight.0": np.ones((2, 4), np.int16)}, "3 inputs"),
        ({"weight.0": np.ones((2, 3), np.int32)}, "int32"),
        ({"weight.0": np.full((2, 3), -128, np.int8)}, "values lie in"),
        ({"scale.0": np.ones(3)}, "scale and a bias"),
        ({"scale.0": np.array([1.0, np.nan])}, "not finite"),
        ({"weight.0": np.ones((5, 3), np.int16), "scale.0": np.ones(5), "bias.0": np.ones(5)}, "5 outputs"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        mlp_of(whole() | change, 3, 2, tmp_path)
    with pytest.raises(BadInput, match="0 layers"):
        mlp_of({}, 3, 2, tmp_path)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(BadInput, match="check the path"):
        load(tmp_path / "none")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\x10" * 40)
    with pytest.raises(BadInput, match="not a trained predictor"):
        load(bad)
    save_file(whole(), bad)
    with pytest.raises(BadInput, match="no facts"):
        load(bad)
    save_file(whole(), bad, {"facts": json.dumps([1])})
    with pytest.raises(BadInput, match="no facts"):
        load(bad)


# -- the stand-in ------------------------------------------------------------------------------------------------------


def test_outcomes():
    assert outcomes("surrogate:0.5", 2) == [0.25, 0.5, 0.25]
    # Table 3, Mixtral-8x7B on Orca: both 66.85 %, at least one 95.45 %; so exactly one 28.60 %, none 4.55 %.
    assert outcomes("surrogate:0.6685/0.9545", 2) == pytest.approx([0.0455, 0.2860, 0.6685])
    assert sum(outcomes("surrogate:0.2/0.9", 4)) == pytest.approx(1)
    for wrong in ("surrogate", "surrogate:x", "surrogate:1.5", "surrogate:0.9/0.5", "surrogate:nan", "surrogate:1/1/1"):
        with pytest.raises(BadInput, match="surrogate"):
            outcomes(wrong, 2)
    with pytest.raises(BadInput, match="all of 1"):
        outcomes("surrogate:0.5/0.6", 1)


def test_a_surrogate_is_right_as_often_as_it_is_told():
    made = Surrogate("surrogate:0.6685/0.9545", 2, 8, 7)
    found: Counter[int] = Counter()
    for row in range(5000):
        named = made.name(row, 3, [6, 1])
        assert len(set(named)) == 2
        found[len({6, 1} & set(named))] += 1
    assert found[2] / 5000 == pytest.approx(0.6685, abs=0.02)
    assert (found[1] + found[2]) / 5000 == pytest.approx(0.9545, abs=0.01)


def test_a_surrogate_draws_by_seed_row_and_layer_not_by_order():
    one, other = Surrogate("surrogate:0.5", 2, 8, 1), Surrogate("surrogate:0.5", 2, 8, 2)
    forth = [one.name(row, 1, [0, 1]) for row in range(40)]
    assert [one.name(row, 1, [0, 1]) for row in reversed(range(40))] == forth[::-1]
    assert [other.name(row, 1, [0, 1]) for row in range(40)] != forth
    # Wrong guesses are others; where there are not enough others, some are right all the same.
    assert Surrogate("surrogate:0", 3, 4, 0).name(0, 1, [0, 1, 2])[2] == 3
    assert len(set(Surrogate("surrogate:0", 3, 4, 0).name(0, 1, [0, 1, 2]))) == 3
