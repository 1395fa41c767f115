"""eMoE on traces: loading and rerouting by hand, what it costs, and every parameter. `test_emoe_parts` has its parts.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s, attention 1 s, head 1 s.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from tiny_traces import tiny_header, tiny_trace

from policies.common.mlp import load, save
from policies.emoe.policy import Emoe
from policies.emoe.predict import Transformer, find, published_s, read
from sim.base.errors import BadInput, DoesNotFit
from sim.conformance import seeded
from sim.profiles.models import load_model
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace


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
        seen = execute_easy(setup(Emoe(predictor="frequency", reload="request"), trace, room=4))
    assert seen.log == [
        # chat: 0 and 1 in every layer
        ("evict", 0, 3),
        ("prefetch", 0, 1),
        ("evict", 1, 3),
        ("prefetch", 1, 1),
        ("gpu", 0, 0),
        ("gpu", 1, 1),
        ("gpu", 0, 0),
        ("gpu", 1, 0),  # 3 is not there, next in its ranking is 0
        # code: 3, then 2
        ("evict", 0, 0),
        ("evict", 0, 1),
        ("prefetch", 0, 3),
        ("prefetch", 0, 2),
        ("evict", 1, 0),
        ("evict", 1, 1),
        ("prefetch", 1, 3),
        ("prefetch", 1, 2),
        ("gpu", 0, 3),
        ("gpu", 1, 2),
        ("gpu", 0, 2),
        ("gpu", 1, 3),
        ("gpu", 0, 2),
        ("gpu", 1, 3),  # 0 is not there: 1 is not, 2 is
    ]
    # Copies 0..10 and 10..20; layer 0 waits for its own: 10..12, attention 12..13, layer 1 20..22, head 23. One more
    # token 23..30. Four copies for code, 30..70: layer 0 at 50..52, layer 1 at 70..72, head 73.
    assert seen.lane("h2d") == [
        ("prefetch 0.1", 0, 10),
        ("prefetch 1.1", 10, 20),
        ("prefetch 0.3", 30, 40),
        ("prefetch 0.2", 40, 50),
        ("prefetch 1.3", 50, 60),
        ("prefetch 1.2", 60, 70),
    ]
    assert seen.end_s == 73 + 7 + 7
    loss = seen.outcome.report.counts.tally.loss
    assert (loss.changed, loss.dropped, loss.activations) == (2, 0, 10)
    assert seen.result.gate_mass_kept == pytest.approx((8 * 2048 + 1024 + 640) / (10 * 2048))
    # Most used: chat 0 and 0 (ties), as foretold; code 0 (a tie) and 3, foretold 3 and 3.
    assert seen.outcome.setup.policy.stats() == {
        "invocations": 0,
        "loaded_per_request": 3.0,
        "right_frac": 3 / 4,
        "tasks_right_frac": 1.0,
    }


def test_nothing_is_loaded_between_two_invocations(tmp_path):
    """Section 3.3, p = 2: prompts 1 and 3 use what is there. Prompt 0 is not due, so what the loader put there first
    (0 and 3) serves it too; prompt 2's task, chat, then decides for prompts 2 and 3, and a code prompt finds 0 and 1.
    """
    with Trace(written(tmp_path / "t", STORE + STEPS * 2)) as trace:
        seen = execute_easy(setup(Emoe(predictor="frequency", p=2), trace, room=4))
        every = execute_easy(setup(Emoe(predictor="frequency", p=2, reload="request"), trace, room=4))
    # Layer 1: chat was foretold 0 and 1; chat's own first prompt used 1 and 0, which changes nothing.
    assert [what for what in seen.log if what[0] in ("evict", "prefetch")] == [
        ("evict", 0, 3),
        ("prefetch", 0, 1),
        ("evict", 1, 3),
        ("prefetch", 1, 1),
    ]
    stats = seen.outcome.setup.policy.stats()
    assert (stats["invocations"], stats["loaded_per_request"]) == (1, 2 / 4)
    assert every.outcome.setup.policy.stats()["loaded_per_request"] == (2 + 4 + 4 + 4) / 4
    assert seen.end_s < every.end_s


def test_copies_of_a_layer_wait_for_those_of_the_layer_before(tmp_path):
    """Section 4, over two links: layer 1's copies start when layer 0's have ended, not when their link is free."""
    store = [("chat", "store", [[0, 0], [2, 0]]), ("code", "store", [[1, 1], [3, 3], [3, 3]])]
    steps = [("code", "test", [[1, 1]])]
    with Trace(written(tmp_path / "t", store + steps)) as trace:
        policy = Emoe(predictor="frequency", reload="request", experts_per_layer=1)
        seen = execute_easy(setup(policy, trace, room=[2, 2], gpus=2))
    copies = sorted(
        (start, end, what)
        for _, op, layer, expert, _, _, start, end in seen.spans
        if op == "prefetch"
        for what in [(layer, expert)]
    )
    for start, _, (layer, _) in copies:
        assert all(end <= start for _, end, (other, _) in copies if other < layer)


def test_the_predictor_is_invoked_every_p_prompts(tmp_path):
    requests = STORE + STEPS * 3
    with Trace(written(tmp_path / "t", requests)) as trace:
        runs = {
            p: execute_easy(setup(Emoe(predictor="frequency", p=p, predict_s=100.0), trace, room=8)) for p in (1, 2, 40)
        }
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
    assert [published_s(form, "openmoe-8b", 4) for form in "AL"] == [0.381, 1.387]
    assert [published_s(form, "mixtral-8x7b", 32) for form in "AL"] == [0.334, 4.211]


def test_a_share_of_the_experts(tmp_path):
    """60 % of 4 is 2 a layer (2.4), also where there is room for all; a number of experts goes before it."""
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        for settings, kept in (({"kept_frac": 0.6}, 2), ({"kept_frac": 0.6, "experts_per_layer": 3}, 3), ({}, 4)):
            made = setup(Emoe(predictor="frequency", **settings), trace, room=8)
            seen = execute_easy(made)
            assert made.policy.settings["experts_per_layer"] == kept
            assert list(seen.outcome.report.counts.peak_bytes) == [2 * kept * 160]


def test_a_profile_of_the_tasks_decides_whose_experts_are_loaded(tmp_path):
    """Section 3.4 by hand: code minds no layer, chat only the second; nothing is loaded where nobody minds."""
    profile = tmp_path / "profile.json"
    profile.write_text('{"chat": 1, "code": 2}')
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        policy = Emoe(predictor="frequency", reload="request", sensitivity=str(profile))
        seen = execute_easy(setup(policy, trace, room=4))
        assert [what for what in seen.log if what[0] in ("evict", "prefetch")] == [("evict", 1, 3), ("prefetch", 1, 1)]
        for text, what in (
            ('{"chat": 1}', "code"),
            ('{"chat": 3, "code": 0}', "write 0 to 2"),
            ("[1]", "write JSON of"),
        ):
            profile.write_text(text)
            with pytest.raises(BadInput, match=what):
                execute_easy(setup(Emoe(predictor="frequency", sensitivity=str(profile)), trace, room=4))


def test_an_invocation_takes_what_is_published_with_its_copies(tmp_path, monkeypatch):
    """Section 5.7's seconds include moving the experts: copies of 10 s each, one layer after the other, go off them."""
    monkeypatch.setattr("policies.emoe.policy.published_s", lambda *_: 50.0)
    monkeypatch.setattr(Emoe, "_is_trained", True, raising=False)
    told = {"predictor": "surrogate:1", "p": 1, "experts_per_layer": 1, "memory_bytes": 0}
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        runs = {s: execute_easy(setup(Emoe(**told, predict_s=s), trace, room=2)) for s in (None, 0.0, 50.0)}
    copies_s = 10 * sum(what[0] == "prefetch" for what in runs[0.0].log)
    assert copies_s > 0
    assert runs[50.0].end_s - runs[0.0].end_s == 100  # two prompts
    assert runs[50.0].end_s - runs[None].end_s == copies_s


def test_nothing_waits_for_a_predictor_in_a_process_of_its_own(tmp_path):
    """Section 4, with section 3.4's "next dispatching": prompt 2 of four is due, and its experts come with prompt 3."""
    runs = {}
    with Trace(written(tmp_path / "t", STORE + STEPS * 2)) as trace:
        for way in ("waited", "aside"):
            for seconds in (0.0, 7.0):
                policy = Emoe(predictor="frequency", p=2, predict_s=seconds, invocation=way)
                runs[way, seconds] = execute_easy(setup(policy, trace, room=4))
    assert runs["waited", 7.0].end_s - runs["waited", 0.0].end_s == 7
    assert runs["aside", 7.0].end_s == runs["aside", 0.0].end_s
    first = {way: [what[0] for what in runs[way, 7.0].log].index("prefetch") for way in ("waited", "aside")}
    n_tokens = 2  # of prompt 2, each through two layers
    assert first["aside"] - first["waited"] >= 2 * n_tokens


def test_the_least_room(tmp_path):
    with Trace(written(tmp_path / "t", STORE + STEPS)) as trace:
        with pytest.raises(DoesNotFit, match="at least 2 whole experts"):
            execute_easy(setup(Emoe(predictor="frequency"), trace, room=1))
        with pytest.raises(BadInput, match="holds 2 per layer"):
            execute_easy(setup(Emoe(predictor="frequency", experts_per_layer=3), trace, room=4))
    with pytest.raises(BadInput, match="classifier"):
        Emoe(classifier="words")


def test_a_surrogate_names_the_share_it_is_told(known):
    """Invoked at every prompt: one that is always right foretells the k experts each prompt uses most, by layer."""
    stats, mass = {}, {}
    for share in (1, 0.5, 0):
        policy = Emoe(predictor=f"surrogate:{share}", p=1, experts_per_layer=2, predict_s=0.0)
        seen = execute_easy(setup(policy, known, room=13))
        stats[share], mass[share] = seen.outcome.setup.policy.stats()["right_frac"], seen.result.gate_mass_kept
        assert seen.result.caveats.count("surrogate") == 1
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
    loss = seen.outcome.report.counts.tally.loss
    assert (loss.changed, loss.activations) == (2, 6)
    assert seen.log.count(("gpu", 0, 0)) == 3
    assert seen.log.count(("gpu", 1, 1)) == 3


def test_rerouted_tokens_get_the_weights_the_gate_would_give():
    """It answers with experts alone, so the engine applies the weights of the model. Of Phi-3.5, a sparse mixer, they
    are recorded; scores do not have them."""
    import moesim

    found = moesim.simulate("emoe", "rtx3090", trace="phi-3.5-moe-small", requests=1)
    assert 0 < found.activations_changed_frac < 1
    assert found.gate_mass_kept is not None


def facts_of(policy, trace, room=13):
    seen = execute_easy(setup(policy, trace, room=room, batch=2))
    return seen.log, seen.end_s


#: Every parameter, the value it is changed to, and what else must be set for that to show.
KNOBS = {
    "predictor": ("frequency", {}),
    "form": ("L", {"p": 1}),
    "p": (1, {}),
    "experts_per_layer": (1, {}),
    "kept_frac": (0.2, {}),
    "selection": ("random", {}),
    "first": ("all", {"experts_per_layer": 1}),
    "reload": ("request", {"predictor": "frequency"}),
    "task_aware": (False, {"predictor": "frequency", "reload": "request"}),
    "threshold": (0.5, {"predictor": "similar", "p": 1, "experts_per_layer": 2}),
    "classifier": ("keywords", {"predictor": "frequency", "reload": "request"}),
    "sensitivity": ("profile", {"predictor": "frequency", "reload": "request"}),
    "invocation": ("aside", {"p": 1, "predictor": "frequency"}),
    "task_accuracy": (0.0, {"predictor": "frequency", "reload": "request"}),
    "predict_s": (9.0, {"p": 1}),
    "memory_bytes": (160 * 4, {}),
    "seed": (1, {"selection": "random"}),
}


@pytest.mark.parametrize("name", KNOBS)
def test_no_parameter_is_dead(name, tmp_path, known):
    tensors, facts = load(find("seeded"))
    similar = np.array([[9000, 6000, 6000, 2000]] * 2, np.int16)
    save(tmp_path / "similar", {**tensors, "similarity": similar}, facts)
    value, others = KNOBS[name]
    if value == "profile":
        value = str(tmp_path / "profile.json")
        Path(value).write_text(json.dumps(dict.fromkeys(known.header.tasks, known.n_layers)))
    if others.get("predictor") == "similar":
        others = {**others, "predictor": str(tmp_path / "similar")}
    assert facts_of(Emoe(**others), known) != facts_of(Emoe(**{**others, name: value}), known)


def test_training(tmp_path, capsys, monkeypatch):
    """A few steps through the command: a file that the policy takes."""
    pytest.importorskip("transformers")
    from sim.cli import moesim

    monkeypatch.setenv("COLUMNS", "400")
    trace, out = tmp_path / "tiny.safetensors", tmp_path / "p.safetensors"
    tiny_trace(trace, 2, 4, 2, n_requests=4, levels={"scores", "tasks"})
    moesim.main(
        ["train", "emoe", "--trace", str(trace), "--out", str(out), "--steps", "2", "--width", "16", "--layers", "1"],
        standalone_mode=False,
    )
    assert "trained on 2 requests" in capsys.readouterr().out
    with Trace(trace) as opened:
        found = read(out, 2, 4, 2, opened.header.tasks)
        assert isinstance(found, Transformer)
        execute_easy(setup(Emoe(predictor=str(out)), opened, room=6))
