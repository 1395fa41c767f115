"""Every class that can be recorded: the trace holds what the model did, and the model did what it does unwatched."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")

from cli_help import simulated  # noqa: E402
from tiny_moe import SMALL, saved_moe, tiny_moe  # noqa: E402

from sim.base.errors import BadInput, CheckFailed  # noqa: E402
from sim.profiles.models import load_model  # noqa: E402
from traces.format.check import check_trace  # noqa: E402
from traces.format.header import GateRule  # noqa: E402
from traces.format.layout import DISTANCES  # noqa: E402
from traces.format.reader import Trace  # noqa: E402
from traces.record.families import FAMILIES, family_of, gate_of, moe_layers  # noqa: E402
from traces.record.generate import Sampling, run_batch  # noqa: E402
from traces.record.load import Settings, Source  # noqa: E402
from traces.record.probe import RoutingProbe  # noqa: E402
from traces.record.prompts import Prompt  # noqa: E402
from traces.record.recorder import record  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CLASSES = list(SMALL)
PROMPTS = [
    Prompt(tuple(range(3, 3 + n)), outputs, fixed_length=True) for n, outputs in ((5, 4), (9, 6), (1, 1), (6, 3))
]
GATES = {
    "mixtral": GateRule("softmax", True),
    "qwen2_moe": GateRule("softmax", False),
    "qwen3_moe": GateRule("softmax", True),
    "olmoe": GateRule("softmax", False),
    "phimoe": GateRule("sparsemixer", False),
    "gpt_oss": GateRule("softmax", True),
    "deepseek_v2": GateRule("softmax", False),
    "deepseek_v2 in groups": GateRule("softmax", False, "other", 16.0),
    "deepseek_v3": GateRule("sigmoid", True, "other", 2.5),
    "glm4_moe": GateRule("sigmoid", True, "other"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CLASSES)
def named(request):
    return request.param, tiny_moe(request.param)


def probe_of(model, **facts):
    layers = moe_layers(model, "model")
    ranked = FAMILIES[model.config.model_type].ranked
    return RoutingProbe(layers, gate_of(model, layers), ranked, model.get_input_embeddings(), **facts)


def rows_of(model, prompts, temperature=1.0, first=0, most=1024, end_ids=(0,), **facts):
    """Tensor name -> array over all rows, per request."""
    parts = [[] for _ in prompts]
    with probe_of(model, **facts) as probe:
        for slot, rows in run_batch(model, probe, prompts, first, Sampling(temperature, 7, end_ids), most):
            parts[slot].append(rows)
    return [{name: np.concatenate([rows[name] for rows in own]) for name in own[0]} for own in parts]


def test_the_gate_is_told_as_the_class_has_it(named):
    name, model = named
    assert gate_of(model, moe_layers(model, "model")) == GATES[name]


def test_recorded_choice_is_what_the_experts_were_given_bit_for_bit(named):
    name, model = named
    layers = moe_layers(model, "model")
    given = [[] for _ in layers]  # per layer and forward: the arguments, seen by other means than hooks
    for layer, seen in zip(layers, given, strict=True):
        inner = layer.experts.forward

        def spy(hidden, ids, weights, inner=inner, seen=seen):
            seen.append((ids.clone(), weights.clone()))
            return inner(hidden, ids, weights)

        layer.experts.forward = spy
    try:
        found = rows_of(model, PROMPTS)
    finally:
        for layer in layers:
            del layer.experts.forward
    width = max(len(prompt.token_ids) for prompt in PROMPTS)
    for i, (prompt, rows) in enumerate(zip(PROMPTS, found, strict=True)):
        n_prompt = len(prompt.token_ids)
        assert len(rows["experts"]) == n_prompt + prompt.max_outputs - 1
        for at, seen in enumerate(given):
            mine = slice((i + 1) * width - n_prompt, (i + 1) * width)
            ids, weights = (
                torch.cat([seen[0][j][mine], *(s[j][i][None] for s in seen[1 : prompt.max_outputs])]) for j in (0, 1)
            )
            if not FAMILIES[model.config.model_type].ranked:  # the class leaves its choice unsorted
                order = weights.argsort(dim=-1, descending=True, stable=True)
                ids, weights = ids.gather(-1, order), weights.gather(-1, order)
            np.testing.assert_array_equal(rows["experts"][:, at], ids.numpy())
            np.testing.assert_array_equal(rows["weights"][:, at], weights.float().numpy())
    if name != "phimoe":
        assert all((np.diff(rows["weights"], axis=-1) <= 0).all() for rows in found)
    chosen = np.concatenate([rows["experts"] for rows in found])
    assert (
        min(len(np.unique(chosen[:, at], axis=0)) for at in range(len(layers))) > 3
    )  # routing does depend on the token


def test_generation_is_unchanged_by_recording(named):
    _, model = named
    prompt = Prompt(tuple(range(3, 10)), 8)
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        bare = model(input_ids=ids).logits
        with probe_of(model, keep_inputs=True) as probe:
            watched = model(input_ids=ids).logits
            probe.take()
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0]
    assert torch.equal(bare, watched)
    (rows,) = rows_of(model, [prompt], temperature=0)
    assert rows["token_ids"].tolist() == tokens[:-1].tolist()


def test_a_request_ends_with_the_end_of_text_unless_its_length_is_fixed():
    model = tiny_moe("mixtral")
    prompt = Prompt((3, 4, 5), 12)
    (free,) = rows_of(model, [prompt], temperature=0, end_ids=())
    outputs = free["token_ids"][3:].tolist()
    assert len(outputs) == 11
    end = next(token for token in outputs if outputs.index(token) >= 2)
    (ended,) = rows_of(model, [prompt], temperature=0, end_ids=(63, end))
    assert ended["token_ids"].tolist() == [3, 4, 5, *outputs[: outputs.index(end)]]  # the end itself is not processed
    (fixed,) = rows_of(model, [Prompt((3, 4, 5), 12, fixed_length=True)], temperature=0, end_ids=(63, end))
    assert len(fixed["token_ids"]) == 14
    assert end not in fixed["token_ids"][3:]


def test_padding_leaks_nothing(named):
    _, model = named
    together = rows_of(model, PROMPTS, most=4)  # the prefill in pieces, too, some of them nothing but padding
    for i, prompt in enumerate(PROMPTS):
        (alone,) = rows_of(model, [prompt], first=i)
        for tensor, values in together[i].items():
            if values.dtype.kind == "i":
                np.testing.assert_array_equal(values, alone[tensor], err_msg=tensor)
            else:
                np.testing.assert_allclose(values, alone[tensor], atol=2e-4, err_msg=tensor)


def direct(model, tokens):
    """Gate inputs, residuals and shared outputs [rows, h] by layer, from one forward without a cache."""
    layers = moe_layers(model, "model")
    blocks = [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    inputs, residuals = [], []
    handles = [block.mlp.register_forward_pre_hook(lambda _m, args: inputs.append(args[0][0])) for block in blocks]
    handles += [
        block.post_attention_layernorm.register_forward_pre_hook(lambda _m, args: residuals.append(args[0][0]))
        for block in blocks
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
        for handle in handles:
            handle.remove()
        shared = []
        for block, x in zip(blocks, inputs, strict=True):
            if hasattr(block.mlp, "shared_experts"):
                shared.append(block.mlp.shared_experts(x))
            elif hasattr(block.mlp, "shared_expert"):
                shared.append(torch.sigmoid(block.mlp.shared_expert_gate(x)) * block.mlp.shared_expert(x))
            else:
                shared.append(torch.zeros_like(x))
    return layers, blocks, inputs, residuals, shared


def test_scores_and_predictions_equal_a_direct_computation(named):
    name, model = named
    (rows,) = rows_of(model, PROMPTS[1:2], keep_inputs=True)
    layers, blocks, inputs, residuals, shared = direct(model, rows["token_ids"].tolist())
    n_layers = len(layers)

    def scores(at, x):
        router = layers[at].router
        logits = x @ router.weight.T + (0 if getattr(router, "bias", None) is None else router.bias)
        return (logits.sigmoid() if GATES[name].score == "sigmoid" else logits.softmax(-1)).detach().numpy()

    def agree(found, wanted):
        np.testing.assert_allclose(found, wanted, atol=2e-4)

    for at in range(n_layers):
        agree(rows["scores"][:, at], scores(at, inputs[at]))
        agree(rows["gate_inputs"][:, at], inputs[at].numpy())
        agree(rows["gate_input_norms"][:, at], inputs[at].norm(dim=-1).numpy())
        agree(rows["next_scores_1"][:, at], scores((at + 1) % n_layers, inputs[at]))  # the last layer wraps around
        for d in DISTANCES[1:]:
            if at + d < n_layers:
                agree(rows[f"next_scores_{d}"][:, at], scores(at + d, inputs[at]))
        if at + 1 < n_layers:
            after = blocks[at + 1]
            x = inputs[at] + shared[at] + residuals[at]
            x = after.post_attention_layernorm(after.input_layernorm(x) + x)
            agree(rows["shared_scores"][:, at], scores(at + 1, x))
    shapes = {d: rows[f"next_scores_{d}"].shape[1] for d in DISTANCES}
    assert shapes == {1: n_layers, 2: n_layers - 2, 3: n_layers - 3}
    embedded = model.get_input_embeddings().weight.detach()[torch.from_numpy(rows["token_ids"])]
    np.testing.assert_array_equal(rows["embeddings"], embedded.numpy())


def test_phimoe_weights_are_shares_among_close_experts():
    """sparsemixer of PhiMoE (2409.12136) by hand: experts further than 2 * jitter from the chosen one do not count."""
    model = tiny_moe("phimoe")
    (rows,) = rows_of(model, PROMPTS[:1])
    layers, _, inputs, _, _ = direct(model, rows["token_ids"].tolist())
    for at, layer in enumerate(layers):
        for row, logits in enumerate((inputs[at] @ layer.router.weight.T).tolist()):
            left = dict(enumerate(logits))
            for rank, expert in enumerate(rows["experts"][row, at].tolist()):
                best = max(left.values())
                assert left[expert] == pytest.approx(best, abs=1e-5)
                close = [
                    v for v in left.values() if (best - v) / max(abs(v), best) <= 2 * layer.router.router_jitter_noise
                ]
                share = np.exp(best) / sum(np.exp(v) for v in close)
                assert rows["weights"][row, at, rank] == pytest.approx(share, abs=1e-4)
                del left[expert]


def test_the_whole_path(named, tmp_path, capsys):
    """Record a checkpoint, check the trace, and simulate it with the geometry of its own configuration."""
    name, _ = named
    folder = saved_moe(name, tmp_path / "mine")
    settings = Settings(
        Source(str(folder)),
        tmp_path / "t.safetensors",
        prompt_tokens="3-9",
        output_tokens="2-5",
        n_requests=5,
        batch=3,
        hidden=True,
    )
    done = record(settings)
    with Trace(done.path) as trace:
        assert check_trace(trace) == []
        assert trace.levels == {
            "experts",
            "weights",
            "scores",
            "next_scores_1",
            "next_scores_2",
            "next_scores_3",
            "shared_scores",
            "embeddings",
            "token_ids",
            "gate_inputs",
            "gate_input_norms",
        }
        model = load_model(done.config)
        assert (trace.n_layers, trace.n_experts, trace.top_k) == (model.n_moe_layers, model.n_experts, model.top_k)
        gate = trace.header.gate
        assert (gate.score, gate.renormalised, gate.scaling) == (
            model.gate.score,
            model.gate.renormalised,
            model.gate.scale,
        )
        assert trace.header.labels == ("random-prompts",)
        n_test = len(trace.requests.in_split("test"))
    said = simulated(
        capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", done.path, "--model", done.config, "--json"
    )
    assert said.json["requests"] == n_test > 0
    assert "random-prompts" in said.json["caveats"]


def test_experts_that_ignore_the_router_are_caught():
    model = tiny_moe("mixtral")
    experts = moe_layers(model, "model")[1].experts
    experts.register_forward_pre_hook(lambda _m, args: (args[0], (args[1] + 1) % 6, args[2]))
    with pytest.raises(CheckFailed, match="disagree"):
        rows_of(model, PROMPTS)


def test_a_block_that_does_not_call_its_router_is_caught():
    model = tiny_moe("gpt_oss")
    model.model.layers[2].mlp.forward = lambda hidden: (hidden, None)
    with pytest.raises(CheckFailed, match="got 2 calls and 2 of experts in 5 layers"):
        rows_of(model, PROMPTS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (GateRule("softmax", False), "weights do not follow"),
        (GateRule("sigmoid", True), "weights do not follow"),
        (GateRule("softmax", True, scaling=2.0), "weights do not follow"),
    ],
)
def test_a_gate_that_is_told_wrongly_is_caught(wrong, message):
    model = tiny_moe("mixtral")
    probe = RoutingProbe(moe_layers(model, "model"), wrong, ranked=True)
    with torch.no_grad(), probe, pytest.raises(CheckFailed, match=message):
        model(input_ids=torch.arange(6)[None])
        probe.take()


def test_a_choice_that_is_not_the_top_k_is_caught():
    model = tiny_moe("deepseek_v3")
    probe = RoutingProbe(moe_layers(model, "model"), GateRule("sigmoid", True, "topk", 2.5), ranked=False)
    with torch.no_grad(), probe, pytest.raises(CheckFailed, match="not the top-k"):
        model(input_ids=torch.arange(6)[None])
        probe.take()


def test_unknown_models_are_told_what_is_supported():
    with pytest.raises(BadInput) as told:
        family_of("dbrx", "mine")
    assert "\n" not in str(told.value)
    assert all(f"({name})" in str(told.value) for name in FAMILIES)


def test_a_class_built_otherwise_is_told_so():
    model = tiny_moe("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList()
    with pytest.raises(
        BadInput, match=r"no mlp.gate beside one mlp.experts module; recording is tested with transformers"
    ):
        moe_layers(model, "mine")


def test_a_router_of_another_form_is_told_so():
    model = tiny_moe("gpt_oss")
    router = moe_layers(model, "mine")[0].router
    router.register_forward_hook(lambda _m, _args, output: output[1:])  # transformers 4 has scores and ids
    with pytest.raises(BadInput, match="router, got 2 outputs: logits, weights and ids"):
        rows_of(model, PROMPTS)
