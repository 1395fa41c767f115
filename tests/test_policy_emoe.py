"""eMoE: task types, equation 2, rerouting and loading by hand; the predictor in whole numbers against torch.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s, attention 1 s, head 1 s.
"""

from __future__ import annotations

import hashlib
import math
import random
from pathlib import Path

import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from tiny_traces import tiny_header, tiny_trace

from policies._emoe_load import by_tokens, choose, expected_tokens, insensitive_layers, reroute
from policies._emoe_predict import SHARE, Transformer, digits, find, frequencies, read
from policies._emoe_schedule import Asked, admitted, expected_latency_s
from policies._emoe_tasks import KEYWORDS, classify, profile, words_of
from policies._emoe_xlnet import ONE, exponential, shares
from policies._mlp import load, save
from policies.emoe import Emoe
from sim.checks import seeded
from sim.errors import BadInput, DoesNotFit
from sim.models import load_model
from traces.catalogue import bundled_traces
from traces.reader import Trace
from traces.requests import Request
from traces.writer import write_trace

# -- task types (section 3.2.1) ---------------------------------------------------------------------------------------


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


def asked(inputs, profiled, first_token_s=1.0, slo_s=100.0, elapsed_s=0.0):
    return Asked(inputs, profiled, first_token_s, slo_s, elapsed_s)


def test_equation_3():
    """Three run; 200 input tokens join; loading takes 3 s, an input token 0.01 s."""
    short, middle, long = asked(50, 10, elapsed_s=1.0), asked(50, 40, elapsed_s=5.0), asked(50, 90)
    running = [short, middle, long]
    # dE + (W + n x G) x c + r: two end after the short one, one after the middle one, none after the long one.
    for request, expected in ((short, 3 + (200 + 2 * 10) * 0.01 + 1), (middle, 3 + (200 + 1 * 40) * 0.01 + 5),
                              (long, 3 + 200 * 0.01)):  # fmt: skip
        assert expected_latency_s(request, running, 200, 3.0, 0.01) == pytest.approx(expected)


def test_tokens_to_go_start_anew_at_five_per_cent():
    request = asked(10, 40)
    for _ in range(39):
        request.generated()
    assert request.left == 1
    request.generated()
    assert request.left == 2  # 5 % of 40
    request.generated()
    request.generated()
    assert request.left == 2


def test_algorithm_1():
    """Room for 400 tokens, 100 taken; who runs may take 4 s; loading takes 1 s, an input token 0.01 s."""
    runs = asked(100, 10, slo_s=4.0, elapsed_s=0.5)
    urgent, large, late = asked(150, 20, 0.1), asked(200, 20, 0.2), asked(50, 20, 0.3)

    def who(waiting, max_tokens=400):
        names = {id(urgent): "urgent", id(large): "large", id(late): "late"}
        return [names[id(one)] for one in admitted(waiting, [runs], max_tokens, 1.0, 0.01)]

    # Stringent first: urgent 1 + 1.5 + 0.5 = 3 s; large would pass 400 tokens; late 1 + (200 + 10) x 0.01 + 0.5 = 3.6 s
    # (urgent, which has more to go than the one that runs, ends after it).
    assert who([late, large, urgent]) == ["urgent", "late"]
    # With room for all, large would make the one that runs wait 1 + (350 + 10) x 0.01 + 0.5 = 5.1 s.
    assert who([late, large, urgent], 10_000) == ["urgent", "late"]
    assert who([large], 10_000) == ["large"]  # 1 + 2 + 0.5 = 3.5 s
    assert who([large], 300) == []  # the engine's tokens must stay below the limit
    runs.slo_s = 3.0
    assert who([late, large, urgent], 10_000) == ["late"]  # 3 s is not below 3 s; 1 + 0.5 + 0.5 is


def test_sensitivity_runs_from_the_input():
    similarity = np.array([0.99, 0.90, 0.80, 0.95])
    assert insensitive_layers(similarity, 0.85).tolist() == [True, True, False, False]
    assert insensitive_layers(similarity, 0.999).tolist() == [False] * 4


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


def test_digits_and_frequencies():
    counts = np.array([[1, 5, 5, 0], [0, 0, 0, 0]])
    assert digits(counts, 2).tolist() == [[1, 2], [0, 1]]
    assert frequencies(np.array([[1, 3], [0, 0]])).tolist() == [[SHARE // 4, 3 * SHARE // 4], [0, 0]]


def test_the_exponential_needs_no_library():
    x = -np.arange(0, 60, 0.37)
    assert exponential(x) == pytest.approx(np.exp(x), rel=1e-8)
    out = shares(np.array([[0.0, 0.0, -1e9], [ONE, 0.0, 0.0]]), 1000.0)
    assert out.tolist() == [[500, 500, 0], [round(1000 * math.e / (math.e + 2)), *[round(1000 / (math.e + 2))] * 2]]


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
    found = np.concatenate([small.predict(form, past(seed), task).ravel()
                            for form in ("A", "L") for seed in range(3) for task in range(2)])  # fmt: skip
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
    from policies._emoe_train import Net, Plan, in_whole_numbers
    from policies._emoe_xlnet import Xlnet

    torch.manual_seed(1)
    plan = Plan(width=32, inner=48)
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
        "A.words": tensors["A.words"][:-1], "A.0.q": tensors["A.0.q"].astype(np.int32), "L.bias": np.zeros(3, np.int16),
        "L.0.layer_1": tensors["L.0.layer_1"][:, :-1], "similarity": np.zeros((1, 1), np.int16),
    }.items():  # fmt: skip
        save(tmp_path / "wrong", {**tensors, name: wrong}, facts)
        with pytest.raises(BadInput, match=name.split(".", 1)[-1]):
            read(tmp_path / "wrong", *shape, seeded.TASKS)
    save(tmp_path / "other", tensors, {**facts, "format": "duoserve/1"})
    with pytest.raises(BadInput, match="not a predictor of emoe"):
        read(tmp_path / "other", *shape, seeded.TASKS)


# -- on traces --------------------------------------------------------------------------------------------------------


def written(path, requests, n_experts=4):
    """A trace of (task, split, rows[token][layer] = the one expert chosen); each prompt is its first token.

    Scores fall with the distance from the chosen expert, upwards and around.
    """
    table, experts = [], []
    for index, (task, split, rows) in enumerate(requests):
        table.append(Request(index, len(experts), 1, len(rows), task, None, split))
        experts += rows
    ids = np.array(experts)[..., None]
    distance = (np.arange(n_experts) - ids) % n_experts
    whole = np.array([2048, 1024, 640, 383])[distance]
    header = tiny_header(ids.shape[1], n_experts, 1, tasks=("chat", "code"))
    return write_trace(path, header, table, None, experts=ids, scores=whole / 4095)


#: Two layers of 4, one expert per token. In the store, chat uses 0 mostly, then 1; code 3 mostly, then 2.
STORE = [("chat", "store", [[0, 0], [0, 0], [1, 1]]), ("code", "store", [[3, 3], [3, 3], [2, 2]])]
STEPS = [("chat", "test", [[0, 1], [3, 0]]), ("code", "test", [[3, 2], [2, 3], [0, 3]])]


def test_five_steps(tmp_path):
    """Room for two experts a layer. At the start the best of both tasks, 0 and 3, are there; then those of who asks."""
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        seen = execute_easy(setup(Emoe(predictor="frequency"), trace, room=4))
    assert seen.log == [
        # chat: 0 and 1 in every layer
        ("evict", 0, 3), ("prefetch", 0, 1), ("evict", 1, 3), ("prefetch", 1, 1),
        ("gpu", 0, 0), ("gpu", 1, 1),
        ("gpu", 0, 0), ("gpu", 1, 0),  # 3 is not there, next in its ranking is 0
        # code: 3, then 2
        ("evict", 0, 0), ("evict", 0, 1), ("prefetch", 0, 3), ("prefetch", 0, 2),
        ("evict", 1, 0), ("evict", 1, 1), ("prefetch", 1, 3), ("prefetch", 1, 2),
        ("gpu", 0, 3), ("gpu", 1, 2),
        ("gpu", 0, 2), ("gpu", 1, 3),
        ("gpu", 0, 2), ("gpu", 1, 3),  # 0 is not there: 1 is not, 2 is
    ]  # fmt: skip
    # Copies 0..10 and 10..20; layer 0 waits for its own: 10..12, attention 12..13, layer 1 20..22, head 23. One more
    # token 23..30. Four copies for code, 30..70: layer 0 at 50..52, layer 1 at 70..72, head 73.
    assert seen.lane("h2d") == [
        ("prefetch 0.1", 0, 10), ("prefetch 1.1", 10, 20), ("prefetch 0.3", 30, 40), ("prefetch 0.2", 40, 50),
        ("prefetch 1.3", 50, 60), ("prefetch 1.2", 60, 70),
    ]  # fmt: skip
    assert seen.end_s == 73 + 7 + 7
    loss = seen.outcome.engine.tally.loss
    assert (loss.changed, loss.dropped, loss.activations) == (2, 0, 10)
    assert seen.result["gate_mass_kept"] == pytest.approx((8 * 2048 + 1024 + 640) / (10 * 2048))
    # Most used: chat 0 and 0 (ties), as foretold; code 0 (a tie) and 3, foretold 3 and 3.
    assert seen.outcome.setup.policy.stats() == {
        "invocations": 0, "loaded_per_request": 3.0, "right_frac": 3 / 4, "tasks_right_frac": 1.0}  # fmt: skip


def test_copies_of_a_layer_wait_for_those_of_the_layer_before(tmp_path):
    """Section 4, over two links: layer 1's copies start when layer 0's have ended, not when their link is free."""
    store = [("chat", "store", [[0, 0], [2, 0]]), ("code", "store", [[1, 1], [3, 3], [3, 3]])]
    steps = [("code", "test", [[1, 1]])]
    with Trace(written(tmp_path / "t", store + steps)) as trace:
        seen = execute_easy(setup(Emoe(predictor="frequency", experts_per_layer=1), trace, room=[2, 2], gpus=2))
    copies = sorted((start, end, what) for _, op, layer, expert, _, _, start, end in seen.spans
                    if op == "prefetch" for what in [(layer, expert)])  # fmt: skip
    for start, _, (layer, _) in copies:
        assert all(end <= start for _, end, (other, _) in copies if other < layer)


def test_the_predictor_is_invoked_every_p_prompts(tmp_path):
    requests = STORE + STEPS * 3
    with Trace(written(tmp_path / "t", requests)) as trace:
        runs = {p: execute_easy(setup(Emoe(predictor="frequency", p=p, predict_s=100.0), trace, room=8))
                for p in (1, 2, 40)}  # fmt: skip
    assert {p: run.outcome.setup.policy.stats()["invocations"] for p, run in runs.items()} == {1: 5, 2: 2, 40: 0}
    # Everything is on the GPU, so that only the prediction's time differs, and the prompt waits for it.
    assert runs[1].end_s - runs[40].end_s == 500
    assert runs[2].end_s - runs[40].end_s == 200


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The conformance checks' trace, for which a predictor is bundled."""
    path = tmp_path_factory.mktemp("emoe") / "seeded.safetensors"
    with Trace(seeded.write(path, {"experts", "scores", "tasks", "token_ids"})) as trace:
        yield trace


def test_published_costs(known):
    mixtral = load_model("mixtral-8x7b")

    class Sees:
        n_layers, n_experts, top_k, n_gpus = 32, 8, 2, 1
        expert_bytes = mixtral.expert_bytes("bf16")

    assert Emoe().predictor_bytes(Sees()) == 216_000_000  # 0.24 % of the model
    assert Emoe(predictor="frequency").predictor_bytes(Sees()) == 0
    assert Emoe(selection="random").predictor_bytes(Sees()) == 0
    assert Emoe(memory_bytes=5).predictor_bytes(Sees()) == 5
    assert Emoe().p == 40
    assert Emoe().threshold == 0.85
    for form, seconds in (("A", 0.334), ("L", 4.211 / 8)):
        made = setup(Emoe(form=form), known, room=24)
        execute_easy(made)
        assert made.policy.settings["predict_s"] == pytest.approx(seconds)


def test_the_least_room(tmp_path):
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        with pytest.raises(DoesNotFit, match="at least 2 whole experts"):
            execute_easy(setup(Emoe(predictor="frequency"), trace, room=1))
        with pytest.raises(BadInput, match="holds 2 per layer"):
            execute_easy(setup(Emoe(predictor="frequency", experts_per_layer=3), trace, room=4))
    with pytest.raises(BadInput, match="classifier"):
        Emoe(classifier="words")


def test_no_predictor_for_a_model_says_how_to_get_one(tmp_path):
    with (
        Trace(written(tmp_path / "t", STORE + STEPS)) as trace,
        pytest.raises(BadInput, match=r"moesim train emoe --trace .* or take --predictor frequency"),
    ):
        execute_easy(setup(Emoe(), trace, room=4))


def test_nothing_is_sensitive_below_a_threshold(tmp_path, known):
    """With s = 0 for all, nobody's experts are loaded; with s = 1 they are."""
    tensors, facts = load(find("seeded"))
    similar = np.full((len(seeded.TASKS), seeded.N_LAYERS), 9000, np.int16)
    save(tmp_path / "p", {**tensors, "similarity": similar}, facts)
    loaded = {}
    for threshold in (0.85, 0.95):
        policy = Emoe(predictor=str(tmp_path / "p"), threshold=threshold, p=1, experts_per_layer=2)
        loaded[threshold] = execute_easy(setup(policy, known, room=14)).outcome.setup.policy.stats()
    assert loaded[0.85]["loaded_per_request"] == 0
    assert loaded[0.95]["loaded_per_request"] > 0


def test_a_surrogate_names_the_share_it_is_told(known):
    """Invoked at every prompt: one that is always right foretells the k experts each prompt uses most, by layer."""
    stats, mass = {}, {}
    for share in (1, 0.5, 0):
        policy = Emoe(predictor=f"surrogate:{share}", p=1, experts_per_layer=2, predict_s=0.0)
        seen = execute_easy(setup(policy, known, room=13))
        stats[share], mass[share] = seen.outcome.setup.policy.stats()["right_frac"], seen.result["gate_mass_kept"]
        assert seen.result["labels"].count("surrogate") == 1
    assert stats[1] == 1.0
    assert stats[0] == 0.0  # two of six: there are enough others
    assert 0.2 < stats[0.5] < 0.8
    assert mass[1] > mass[0.5] > mass[0]
    assert "surrogate" not in Emoe().labels
    with pytest.raises(BadInput, match=r"write surrogate:0\.85"):
        execute_easy(setup(Emoe(predictor="surrogate:2"), known, room=13))


def test_a_surrogate_that_is_right_keeps_the_most_mass_of_all_choices(tmp_path):
    """By hand: chat uses 0 twice, 3 once in layer 0, so that room for one keeps 0 and loses a token of three."""
    steps = [("chat", "test", [[0, 1], [0, 1], [3, 2]])]
    with Trace(written(tmp_path / "t", STORE + steps)) as trace:
        policy = Emoe(predictor="surrogate:1", p=1, experts_per_layer=1, memory_bytes=0, predict_s=0.0)
        seen = execute_easy(setup(policy, trace, room=2))
    loss = seen.outcome.engine.tally.loss
    assert (loss.changed, loss.activations) == (2, 6)
    assert seen.log.count(("gpu", 0, 0)) == 3
    assert seen.log.count(("gpu", 1, 1)) == 3


def test_rerouted_tokens_get_the_weights_the_gate_would_give(tmp_path):
    """Renormalised over those that serve, as the model does: with k = 1 always 1, however small the score."""

    class Watched(Emoe):
        def assign(self, gate, view):
            found = super().assign(gate, view)
            if found is not None:
                weights.append(found.weights.tolist())
            return found

    weights = []
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        execute_easy(setup(Watched(predictor="frequency"), trace, room=4))
    assert weights == [[[1.0]], [[1.0]]]


def facts_of(policy, trace, room=13):
    seen = execute_easy(setup(policy, trace, room=room, batch=2))
    return seen.log, seen.end_s


#: Every parameter, the value it is changed to, and what else must be set for that to show.
KNOBS = {
    "predictor": ("frequency", {}),
    "form": ("L", {"p": 1}),
    "p": (1, {}),
    "experts_per_layer": (1, {}),
    "selection": ("random", {}),
    "first": ("all", {"experts_per_layer": 1}),
    "task_aware": (False, {"predictor": "frequency"}),
    "threshold": (0.5, {"predictor": "similar", "p": 1, "experts_per_layer": 2}),
    "classifier": ("keywords", {"predictor": "frequency"}),
    "task_accuracy": (0.0, {"predictor": "frequency"}),
    "predict_s": (9.0, {"p": 1}),
    "memory_bytes": (160 * 4, {}),
    "seed": (1, {"selection": "random"}),
}


def test_every_parameter_has_a_knob():
    assert set(KNOBS) == {param.name for param in Emoe.params}


@pytest.mark.parametrize("name", KNOBS)
def test_no_parameter_is_dead(name, tmp_path, known):
    tensors, facts = load(find("seeded"))
    similar = np.array([[9000, 6000, 6000, 2000]] * 2, np.int16)
    save(tmp_path / "similar", {**tensors, "similarity": similar}, facts)
    value, others = KNOBS[name]
    if others.get("predictor") == "similar":
        others = {**others, "predictor": str(tmp_path / "similar")}
    assert facts_of(Emoe(**others), known) != facts_of(Emoe(**{**others, name: value}), known)


def test_only_keywords_need_tokens():
    assert Emoe().needs == {"experts", "scores", "tasks"}
    assert Emoe(classifier="keywords").needs == {"experts", "scores", "tasks", "token_ids"}


def test_training(tmp_path, capsys):
    """A few steps through the command: a file that the policy takes."""
    pytest.importorskip("transformers")
    from sim.cli import moesim

    trace, out = tmp_path / "tiny.safetensors", tmp_path / "p.safetensors"
    tiny_trace(trace, 2, 4, 2, n_requests=4, levels={"scores", "tasks"})
    moesim.main(["train", "emoe", "--trace", str(trace), "--out", str(out), "--steps", "2", "--width", "16",
                 "--layers", "1"], standalone_mode=False)  # fmt: skip
    assert "trained on 2 requests" in capsys.readouterr().out
    with Trace(trace) as opened:
        found = read(out, 2, 4, 2, opened.header.tasks)
        assert isinstance(found, Transformer)
        execute_easy(setup(Emoe(predictor=str(out)), opened, room=6))


def test_the_page_quotes_the_bundled_predictors():
    """Accuracy and sensitivity in docs/emoe.md are those in the bundled files."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "emoe.md").read_text(encoding="utf-8")
    found = {name: load(find(name)) for name in bundled_traces()}
    for name, (_, facts) in found.items():
        test = facts["test"]
        kinds = ("A", "L", "frequency", "previous", "chance")
        quoted = " | ".join(f"{test[kind]:.1%}".replace("%", " %") for kind in kinds)
        assert f"| {name} | {quoted} | {test['n']} |" in page
    similar = {name: tensors["similarity"] / 10_000 for name, (tensors, _) in found.items()}
    mixtral, deepseek = similar["mixtral-8x7b-small"], similar["deepseek-moe-16b-small"]
    for n, text in ((0, "in the first layer alone it is"), (1, "in the first two")):
        assert f"{text} {mixtral[:, n].min():.2f} to {mixtral[:, n].max():.2f}" in page
    assert mixtral.max() < 0.85  # so that s = 1 throughout, as the page says
    assert (mixtral[:, -1] < mixtral[:, 0] / 2).all()
    assert max(similar["phi-3.5-moe-small"].max(), similar["qwen1.5-moe-small"].max()) == pytest.approx(0.72, abs=0.005)
    tolerant = dict(zip(found["deepseek-moe-16b-small"][1]["tasks"], (deepseek >= 0.85).sum(axis=1), strict=True))
    assert (min(tolerant.values()), max(tolerant.values())) == (tolerant["german"], tolerant["prose"]) == (15, 21)
    assert "until the first 15 (German) to 21 (prose) of 27 layers route at random" in page
