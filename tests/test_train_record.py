"""What is recorded is what the model did: choices, weights, scores and the predictions of later layers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("tokenizers", reason="needs tokenizers (comes with transformers)")

from sim.base.errors import BadInput, CheckFailed  # noqa: E402
from tools.train import model as models  # noqa: E402
from tools.train.evaluate import evaluate  # noqa: E402
from tools.train.probe import RoutingProbe  # noqa: E402
from tools.train.record import (  # noqa: E402
    PROMPT_TOKENS,
    PromptedRequest,
    draw_requests,
    load_recording,
    record_requests,
    save_recording,
    stratified_split,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

FAMILIES = ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe", "deepseek-moe-16b"]


def tiny_model(name: str):
    shape = models.SHAPES[name]
    shape = dataclasses.replace(shape, layers=3 + shape.dense_layers, hidden=32, heads=2, expert_width=8)
    model = models.build(shape, 64, seed=5).eval()
    with torch.no_grad():  # sharper than a fresh model, so that routing differs between tokens
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def some_requests() -> list[PromptedRequest]:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, 64, n).astype(np.uint16) for n in (5, 7, 5)]
    return [PromptedRequest(f"task{i % 2}", p, g) for i, (p, g) in enumerate(zip(prompts, (4, 6, 1), strict=True))]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_one_forward_over_the_whole_text(name):
    """Attention is causal, so decoding with a cache must give what one forward over all processed tokens gives."""
    model = tiny_model(name)
    requests = some_requests()
    recording = record_requests(model, requests, seed=3)
    assert recording.n_rows.tolist() == [5 + 4 - 1, 7 + 6 - 1, 5 + 1 - 1]
    assert recording.prompt_len.tolist() == [5, 7, 5]
    start = 0
    for request, rows in zip(requests, recording.n_rows, strict=True):
        part = slice(start, start + rows)
        start += rows
        tokens = recording.tokens[part]
        assert tokens[: len(request.prompt)].tolist() == request.prompt.tolist()
        with torch.no_grad(), RoutingProbe(model) as probe:
            model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
            seen = probe.take()
        np.testing.assert_array_equal(recording.ids[part], seen.ids.numpy())
        np.testing.assert_allclose(recording.weights[part], seen.weights.numpy(), atol=1e-4)
        np.testing.assert_allclose(recording.scores["scores"][part], seen.logits.softmax(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_predictions_equal_a_direct_computation(name):
    model = tiny_model(name)
    recording = record_requests(model, some_requests()[:1], seed=3)
    layers = models.moe_layers(model)
    inputs: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []
    residuals: list[torch.Tensor] = []
    handles = [layer.mlp.register_forward_hook(lambda _m, args, _o: inputs.append(args[0][0])) for layer in layers]
    handles += [
        layer.post_attention_layernorm.register_forward_hook(lambda _m, args, _o: residuals.append(args[0][0]))
        for layer in layers
    ]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(recording.tokens.astype(np.int64))[None], use_cache=False)
        for handle in handles:
            handle.remove()
        count = len(layers)
        for distance in (1, 2, 3):
            for at in range(count):
                logits = inputs[at] @ models.router_of(layers[(at + distance) % count]).weight.T
                direct = logits.softmax(-1).numpy()
                np.testing.assert_allclose(recording.scores[f"ahead{distance}"][:, at], direct, atol=1e-4)
        for at in range(count - 1):
            mlp = layers[at].mlp
            shared = torch.zeros_like(inputs[at])
            if hasattr(mlp, "shared_expert"):
                shared = torch.sigmoid(mlp.shared_expert_gate(inputs[at])) * mlp.shared_expert(inputs[at])
            x = inputs[at] + shared + residuals[at]
            after = layers[at + 1]
            x = after.post_attention_layernorm(after.input_layernorm(x) + x)
            direct = (x @ models.router_of(after).weight.T).softmax(-1).numpy()
            np.testing.assert_allclose(recording.scores["skip_attention"][:, at], direct, atol=1e-4)
    assert not recording.scores["skip_attention"][:, -1].any()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gpu_way_to_run_experts_records_the_same(name):
    model = tiny_model(name)
    expected = record_requests(model, some_requests(), seed=3)
    model.set_experts_implementation("batched_mm")
    again = record_requests(model, some_requests(), seed=3)
    np.testing.assert_array_equal(again.ids, expected.ids)
    np.testing.assert_array_equal(again.tokens, expected.tokens)
    np.testing.assert_allclose(again.scores["ahead1"], expected.scores["ahead1"], atol=1e-4)


def test_a_model_whose_experts_ignore_the_router_is_caught():
    model = tiny_model("mixtral-8x7b")
    experts = models.moe_layers(model)[1].mlp.experts
    experts.register_forward_pre_hook(lambda _m, args: (args[0], (args[1] + 1) % 8, args[2]))
    with torch.no_grad(), RoutingProbe(model) as probe, pytest.raises(CheckFailed, match="disagree"):
        model(input_ids=torch.arange(6)[None], use_cache=False)
        probe.take()


def test_training_mode_is_refused():
    with pytest.raises(BadInput, match="eval"):
        record_requests(tiny_model("mixtral-8x7b").train(), some_requests())


@pytest.mark.parametrize(("precision", "tolerance"), [("f16", 5e-4), ("u8", 4e-3)])
def test_a_saved_recording_comes_back(tmp_path, precision, tolerance):
    recording = record_requests(tiny_model("mixtral-8x7b"), some_requests(), seed=3)
    save_recording(recording, tmp_path, {"note": "x"}, precision)
    again, meta = load_recording(tmp_path)
    assert meta["note"] == "x"
    np.testing.assert_array_equal(again.ids, recording.ids)
    np.testing.assert_array_equal(again.tokens, recording.tokens)
    assert (again.task, again.split) == (recording.task, recording.split)
    for name, values in recording.scores.items():
        np.testing.assert_allclose(again.scores[name], values, atol=tolerance)


def test_requests_are_balanced_reproducible_and_inside_documents():
    rng = np.random.default_rng(0)
    stream = rng.integers(1, 64, 5000).astype(np.uint16)
    stream[::250] = 0
    heldout = {"a": stream, "b": stream + 100 * (stream > 0).astype(np.uint16)}
    requests = draw_requests(heldout, 24, 4, seed=7)
    assert [r.task for r in requests].count("a") == 12
    assert all(PROMPT_TOKENS[0] <= len(r.prompt) <= PROMPT_TOKENS[1] and 0 not in r.prompt for r in requests)
    assert len({len(r.prompt) for r in requests[:4]}) == 1
    again = draw_requests(heldout, 24, 4, seed=7)
    assert all(np.array_equal(x.prompt, y.prompt) for x, y in zip(requests, again, strict=True))
    split = stratified_split(["a", "b"] * 10, seed=1)
    assert split[::2].count("store") == split[1::2].count("store") == 7


def test_evaluation_counts_every_choice_and_knows_reuse_from_popularity():
    model = tiny_model("mixtral-8x7b")
    stream = np.random.default_rng(1).integers(1, 64, 1100).astype(np.uint16)
    result = evaluate(model, {"a": stream, "b": stream[::-1].copy()}, 512)
    routing = result["routing"]
    assert routing["rows"] == 4 * 256
    assert result["predicted_tokens"] == {"a": 512, "b": 512}
    assert routing["chance_accuracy"] == 0.25
    assert 0 <= routing["gate_reuse_accuracy"] <= 1
    assert 0.25 <= routing["popularity_accuracy"] <= 1
