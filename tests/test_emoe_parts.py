"""What eMoE is made of, by hand: task types, equation 2, rerouting; the predictor against torch."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from policies.common.mlp import load, save
from policies.emoe.predict import ONE, SHARE, find, frequencies, read
from policies.emoe.tasks import (
    by_tokens,
    choose,
    classify,
    expected_tokens,
    profile,
    reroute,
)
from sim.base.errors import BadInput
from sim.conformance import seeded

# -- task types (section 3.2.1) ---------------------------------------------------------------------------------------

# The task types of Table 1. The profiled keywords are not published; these begin with the two examples.
KEYWORDS = {
    "SUM": frozenset({"summarize", "summarise", "summary", "synopsis", "condense", "brief", "tldr"}),
    "CLSFY": frozenset({"classify", "sentiment", "positive", "negative", "neutral", "category", "label"}),
    "QA": frozenset({"question", "answer", "what", "who", "when", "where", "why", "context"}),
    "COMP": frozenset({"compare", "similar", "similarity", "same", "difference", "pair", "equivalent"}),
    "CONV": frozenset({"conversation", "chat", "assistant", "human", "hello", "reply", "respond"}),
}


def words_of(text):
    """Lower-case words of a text, without punctuation around them."""
    return [word for raw in text.lower().split() if (word := raw.strip(".,;:!?\"'()[]"))]


def test_the_examples_of_section_3_2_1():
    for prompt in ("Summarize the following text:", "Write a synopsis for the following text."):
        assert classify(words_of(prompt), KEYWORDS) == "SUM"
    assert classify(words_of("What is the answer to this question? Do not summarize."), KEYWORDS) == "QA"
    assert classify(words_of("Lorem ipsum"), KEYWORDS) is None
    equal = {"a": frozenset({1}), "b": frozenset({2})}
    assert classify([2, 1], equal) == "a"  # the first listed among equals
    assert classify([2, 1, 2], equal) == "b"


def test_profiled_keywords_tell_tasks_apart():
    prompts = {"a": [[1, 2, 9], [1, 3, 9]], "b": [[4, 5, 9], [4, 1, 9]]}
    found = profile(prompts)
    # 9 is everywhere; 1 in all prompts of a and half of b's, 4 in all of b's; 2, 3, 5 in one each.
    assert found == {"a": {1, 2, 3}, "b": {4, 5}}
    assert profile(prompts, 1) == {"a": {1}, "b": {4}}  # leads: 1 has 1 - 1/2, as 2 and 3; first seen first
    assert classify([4, 4, 1], found) == "b"


# -- task-aware loading (section 3.4) ---------------------------------------------------------------------------------


def test_equation_2():
    share = np.array([[30, 10], [5, 35]])
    # Two requests of 100 and 50 input tokens, 20 outputs expected of each: (150 + 2 x 20) x s x f
    expected = expected_tokens(150, 2, 20, np.array([True, False]), share)
    assert expected.tolist() == [[190 * 30, 190 * 10], [0, 0]]


def test_the_top_l_of_a_layer():
    tokens = np.array([5, 9, 9, 1])
    assert choose(tokens, 2, lambda e: 0, [4]) == {1, 2}
    assert choose(tokens, 3, lambda e: 0, [4]) == {0, 1, 2}
    assert choose(np.array([7, 7, 7]), 2, lambda e: 0, [3]) == {0, 1}  # ties to the lowest id
    assert choose(tokens, 2, lambda e: e % 2, [1, 1]) == {1, 2}
    assert choose(tokens, 4, lambda e: e % 2, [1, 1]) == {1, 2}  # a GPU's quota is its own
    assert by_tokens({0, 1, 2}, tokens) == [1, 2, 0]


def test_rerouting_by_hand():
    scores = np.array([[40.0, 30, 20, 10], [40, 30, 20, 10], [1, 2, 3, 4]])
    ids = np.array([[0, 1], [1, 0], [3, 2]])
    assert reroute(scores, ids, {1, 2, 3}).tolist() == [[2, 1], [1, 2], [3, 2]]
    assert reroute(scores, ids, {2, 3}).tolist() == [[2, 3], [2, 3], [3, 2]]
    assert reroute(scores, ids, {2}).tolist() == [[2, -1], [2, -1], [-1, 2]]
    assert reroute(np.array([[5.0, 3, 3, 3]]), np.array([[0]]), {2, 3}).tolist() == [[2]]  # ties to the lowest id


def test_rerouting_against_a_naive_one():
    chance = random.Random(4)
    for _ in range(300):
        n, k = chance.choice([(6, 2), (5, 3)])
        row = [chance.randrange(9) for _ in range(n)]
        ranked = sorted(range(n), key=lambda e: (-row[e], e))
        resident = {e for e in range(n) if chance.random() < 0.6}
        out = reroute(np.array([row], dtype=float), np.array([ranked[:k]]), resident)[0].tolist()
        # Walk down the ranking: the first k residents are those that serve, dropped choices make up the number.
        serving = [e for e in ranked if e in resident][:k]
        assert sorted(e for e in out if e >= 0) == sorted(serving)
        assert [e for e in out if e in ranked[:k]] == [e for e in ranked[:k] if e in resident]


# -- the predictor (section 3.2.2) ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """The predictor that is bundled for the trace of the conformance checks: 4 layers of 6, k = 2."""
    path = find("seeded")
    assert path is not None
    return read(path, seeded.N_LAYERS, seeded.N_EXPERTS, seeded.TOP_K, seeded.TASKS)


def past(seed=0):
    return np.random.default_rng(seed).integers(0, 50, (seeded.N_LAYERS, seeded.N_EXPERTS))


def test_both_forms_put_out_shares(small):
    for form in ("A", "L"):
        found = small.predict(form, past(), 0)
        assert found.shape == (seeded.N_LAYERS, seeded.N_EXPERTS)
        assert found.dtype == np.int64
        assert np.abs(found.sum(axis=1) - SHARE).max() <= seeded.N_EXPERTS
        assert (found != small.predict(form, past(), 1)).any()  # the task is read
        assert (found != small.predict(form, past(1), 0)).any()  # and so is the past
    assert small.predict("L", past(), 0)[0].tolist() == frequencies(past()[0]).tolist()


def test_predictions_are_the_same_everywhere(small):
    """Golden: whole numbers, whatever library multiplies matrices here."""
    found = np.concatenate(
        [small.predict(form, past(seed), task).ravel() for form in ("A", "L") for seed in range(3) for task in range(2)]
    )
    assert hashlib.sha256(found.astype("<i8").tobytes()).hexdigest()[:16] == GOLDEN


GOLDEN = "21a9fdfdab96d76e"  # of seeded.emoe.safetensors as bundled


def test_sums_are_exact(small):
    """A product summed in another order, and in Python's whole numbers, is the same."""
    net = small._nets["A"]
    hidden, weight = net.hidden(list(range(9))), net._layers[0]["q"]
    exact = [[sum(int(a) * int(b) for a, b in zip(row, column, strict=True)) for column in weight.T] for row in hidden]
    backwards = hidden[:, ::-1] @ weight[::-1]
    assert (hidden @ weight).tolist() == exact == backwards.tolist()
    assert np.array_equal(hidden, np.rint(hidden))


def test_the_same_network_as_torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from policies.emoe.predict import Xlnet
    from policies.emoe.train import Net, TrainingPlan, in_whole_numbers

    torch.manual_seed(1)
    plan = TrainingPlan(width=32, inner=48)
    net = Net(plan, vocabulary=20, n_words=18).eval()
    ids = [19, 3, 0, 7, 17, 7]
    with torch.no_grad():
        for norm in (m for m in net.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
        true = net.encoder(torch.tensor([ids]), use_mems=False).last_hidden_state[0].double().numpy()
        logits = net.logits(torch.tensor([ids[:5]]), torch.tensor([[0, 1]]), 2, 9)
    found = Xlnet(in_whole_numbers(net, len(ids)), plan.n_heads, len(ids), 20, None).hidden(ids) / ONE
    assert np.abs(found - true).max() < 0.01
    assert logits.shape == (1, 2, 9)


def test_files_that_are_no_predictor(tmp_path, small):
    path = find("seeded")
    shape = (seeded.N_LAYERS, seeded.N_EXPERTS, seeded.TOP_K)
    tensors, facts = load(path)
    with pytest.raises(BadInput, match="train one with `moesim train emoe`"):
        read(path, 4, 7, 2, seeded.TASKS)
    with pytest.raises(BadInput, match="no task 'law'"):
        read(path, *shape, ("chat", "law"))
    for name, wrong in {
        "A.words": tensors["A.words"][:-1],
        "A.0.q": tensors["A.0.q"].astype(np.int32),
        "L.bias": np.zeros(3, np.int16),
        "L.0.layer_1": tensors["L.0.layer_1"][:, :-1],
        "similarity": np.zeros((1, 1), np.int16),
    }.items():
        save(tmp_path / "wrong", {**tensors, name: wrong}, facts)
        with pytest.raises(BadInput, match=name.split(".", 1)[-1]):
            read(tmp_path / "wrong", *shape, seeded.TASKS)
    save(tmp_path / "other", tensors, {**facts, "format": "duoserve/1"})
    with pytest.raises(BadInput, match="not a predictor of emoe"):
        read(tmp_path / "other", *shape, seeded.TASKS)
