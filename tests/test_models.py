"""Model catalogue: parameters against published totals and model classes, bytes by hand, files that must be refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.base.errors import BadInput
from sim.profiles.models import Model, load_model, model_names
from sim.profiles.precisions import BITS_PER_PARAM, bytes_of

CATALOGUE = sorted(model_names())

NOT_AS_PUBLISHED = {"llama-4-scout": -0.0113, "openmoe-8b": 0.4819, "deepseek-v3.2": -0.0197}


@pytest.fixture
def mixtral() -> Model:
    return load_model("mixtral-8x7b")


def write(tmp_path: Path, changes: dict[str, Any], name: str = "own.yaml") -> Path:
    """A copy of Mixtral's file with fields replaced (None removes one)."""
    data = msgspec.to_builtins(load_model("mixtral-8x7b")) | changes
    path = tmp_path / name
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return path


@pytest.mark.parametrize("name", CATALOGUE)
def test_file_is_sound(name: str) -> None:
    model = load_model(name)
    assert model.id == name
    assert model.source
    assert model.gate.order
    assert model.dense_params() + model.routed_params() + model.host_params == model.total_params()
    assert len(model.moe_layer_ids) == model.n_moe_layers
    text = model_names()[name].read_text()
    assert not re.search(r"/work|shared/|seed 0", text)


@pytest.mark.parametrize("name", CATALOGUE)
def test_total_is_within_1_percent_of_the_published_one(name: str) -> None:
    model = load_model(name)
    if model.published.total_params is None:
        assert name.startswith(("cpu-", "switch-base"))
        return
    error = model.total_params() / model.published.total_params - 1
    if name in NOT_AS_PUBLISHED:
        assert error == pytest.approx(NOT_AS_PUBLISHED[name], abs=1e-4)
        assert len(model.published.note) > 60, "an exception needs its reason"
    else:
        assert abs(error) < 0.01


@pytest.mark.parametrize("name", CATALOGUE)
def test_active_is_near_the_published_count(name: str) -> None:
    published = load_model(name).published
    if published.active_params is not None:
        ours = load_model(name).active_params(published.active_counts)
        assert ours == pytest.approx(published.active_params, rel=0.025)


def test_mixtral_by_hand(mixtral: Model) -> None:
    assert mixtral.expert_params() == 3 * 4096 * 14336 == 176_160_768
    assert mixtral.expert_bytes() == 352_321_536
    assert mixtral.expert_bytes("int4_g128") == 91_521_024
    assert mixtral.expert_bytes("hqq2") == 67_436_544  # 67 MB, as HQQ reports for 2-bit groups of 16
    assert mixtral.kv_bytes_per_token_per_layer() == 2 * 8 * 128 * 2 == 4096
    assert mixtral.kv_bytes_per_token() == 131_072
    assert mixtral.attention_bytes() == 2 * (4096 * 4096 * 2 + 2 * 4096 * 1024) == 83_886_080
    assert mixtral.gate_bytes() == 2 * 4096 * 8
    assert mixtral.embedding_bytes() == mixtral.head_bytes() == 2 * 32000 * 4096
    assert mixtral.dense_ffn_bytes() == mixtral.shared_expert_bytes() == 0
    assert mixtral.all_miss_bytes_per_token() == 64 * 352_321_536
    assert mixtral.routed_bytes() + mixtral.dense_bytes() == 93_405_585_408
    assert mixtral.moe_layer_ids == tuple(range(32))


def test_flops_by_hand(mixtral: Model) -> None:
    assert mixtral.expert_flops(5) == 2 * 5 * 176_160_768
    assert mixtral.gate_flops(3) == 2 * 3 * 4096 * 8
    assert mixtral.head_flops(1) == 2 * 4096 * 32000
    assert mixtral.attention_flops(2, 0) == 2 * 2 * 41_943_040
    # Scores and values: each of 32 heads of width 128 meets 1000 keys twice.
    assert mixtral.attention_flops(2, 1000) - mixtral.attention_flops(2, 0) == 2 * 2 * 2 * 32 * 128 * 1000
    qwen = load_model("qwen1.5-moe-a2.7b")
    assert qwen.shared_expert_flops(1) == 2 * (3 * 2048 * 5632 + 2048)
    lite = load_model("deepseek-v2-lite")
    assert lite.dense_ffn_flops(1) == 2 * 3 * 2048 * 10944
    # Absorbed MLA: a key of 512 + 64 per head, then a value of 512.
    assert lite.attention_flops(1, 10) - lite.attention_flops(1, 0) == 2 * 16 * (576 + 512) * 10


def test_papers_agree() -> None:
    # FineMoE (arXiv 2502.05370), Table 1 and section 2: 72, 81 and 84 % of the parameters idle; 67, 23 and 70 GB.
    for name, percent, gigabytes in (
        ("mixtral-8x7b", 72, 67.6),
        ("qwen1.5-moe-a2.7b", 81, 23.3),
        ("phi-3.5-moe", 84, 70.5),
    ):
        model = load_model(name)
        idle = model.total_params() - model.active_params()
        assert round(100 * idle / model.total_params()) == percent
        assert idle * 2 / 1e9 == pytest.approx(gigabytes, abs=0.06)
    # MoEpic (arXiv 2509.08342) prints Qwen1.5-MoE's 28.63 GB as 26.67 "GB", which is GiB; R1's experts are 97.45 %.
    qwen, r1 = load_model("qwen1.5-moe"), load_model("deepseek-r1")
    total_bytes = qwen.routed_bytes() + qwen.dense_bytes()
    assert total_bytes / 1e9 == pytest.approx(28.63, abs=0.005)
    assert total_bytes / 1024**3 == pytest.approx(26.67, abs=0.006)
    assert 100 * r1.routed_params() / r1.total_params() == pytest.approx(97.449, abs=0.001)


def test_mla_caches_the_latent() -> None:
    assert load_model("deepseek-v2-lite").kv_bytes_per_token() == 27 * (512 + 64) * 2
    assert load_model("deepseek-v3-r1").kv_bytes_per_token() == 70_272


def test_openmoe_has_four_matrices_in_four_layers() -> None:
    model = load_model("openmoe")
    assert model.moe_layer_ids == (5, 11, 17, 23)
    assert model.expert_bytes() == 4 * 2048 * 8192 * 2


def test_encoder_decoder_counts_a_decode_step() -> None:
    model = load_model("switch-base-8")
    assert model.n_layers == 12
    assert model.moe_layer_ids == (1, 3, 5, 7, 9, 11)
    assert model.all_miss_bytes_per_token("fp32") == 6 * 18_874_368
    assert model.routed_params() == 12 * 8 * 4_718_592, "the encoder's experts are memory all the same"
    assert model.attention_params() == 2 * model.self_attention_params(), "cross-attention runs in every step"
    assert model.head_bytes() == model.embedding_bytes(), "tied: no parameters of its own, but bytes read"
    assert model.head_params() == 0


@pytest.mark.parametrize(
    ("precision", "bits"),
    [
        ("fp32", 32),
        ("bf16", 16),
        ("fp8", 8),
        ("int4", 4),
        ("int4_g128", 4 + 20 / 128),
        ("mxfp4", 4 + 8 / 32),
        ("q4_k", 144 * 8 / 256),
        ("nvfp4", 4 + 8 / 16),
        ("hqq2", 2 + 16 / 16 + 128 / 2048),
    ],
)
def test_precisions(precision: str, bits: float) -> None:
    assert BITS_PER_PARAM[precision] == bits


def test_bytes_round_up_once_and_exactly() -> None:
    assert bytes_of(3, "int4") == 2
    assert bytes_of(0, "int4") == 0
    assert bytes_of(10**18 + 1, "int4_g128") == -(-(10**18 + 1) * 133 // 256)
    with pytest.raises(BadInput, match=r"precision, got 'int4_g12': unknown; did you mean 'int4_g128'\?"):
        bytes_of(1, "int4_g12")


def test_overrides() -> None:
    changed = load_model("mixtral-8x7b", {"top_k": 1, "gate.renormalised": False})
    assert (changed.top_k, changed.gate.renormalised) == (1, False)
    assert changed.all_miss_bytes_per_token() == 32 * 352_321_536
    assert load_model("deepseek-v2-lite", {"mla.kv_lora_rank": 256}).kv_bytes_per_token() == 27 * (256 + 64) * 2


def test_own_file_round_trips(tmp_path: Path, mixtral: Model) -> None:
    assert load_model(write(tmp_path, {})) == mixtral


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, r"top_k, got 9: a token cannot use more than the 8 experts of a layer; lower it"),
        ({"n_layers": 0}, r"own\.yaml: n_layers: Expected `int` >= 1; correct the field"),
        ({"n_experts": "8"}, r"n_experts: Expected `int`, got `str`"),
        ({"hidden_size": None}, r"top level: Object missing required field `hidden_size`"),
        ({"hiddensize": 1}, r"unknown field `hiddensize`; did you mean 'hidden_size'\?"),
        ({"gate": {"score": "softmax"}}, r"gate: Object missing required field `renormalised`"),
        ({"gate": {"score": "tanh", "renormalised": True}}, r"gate\.score: Invalid enum value 'tanh'"),
        ({"matrices_per_expert": 5}, r"matrices_per_expert: Invalid enum value 5"),
        ({"dense_layers": [32]}, r"dense_layers, got \[32\]: distinct layer numbers below 32"),
        ({"dense_layers": [1, 1]}, r"dense_layers, got \[1, 1\]: distinct"),
        ({"dense_layers": list(range(32)), "dense_intermediate_size": 8}, r"at least one layer must hold experts"),
        ({"dense_layers": [0]}, r"dense_intermediate_size, got 0: 1 layers are dense; give the width of their FFN"),
        ({"n_shared_experts": 1}, r"shared_intermediate_size, got 0: n_shared_experts is 1; give both, or neither"),
        ({"attention": "mla"}, r"mla, got nothing: attention is 'mla'"),
        ({"n_kv_heads": 5}, r"n_kv_heads, got 5: must divide n_heads, 32"),
        ({"native_precision": "bf17"}, r"native_precision, got 'bf17': known: fp32, bf16"),
        ({"schema": 2}, r"schema: Invalid enum value 2"),
        ({"published": {"total_params": 0}}, r"published\.total_params, got 0: a finite number above 0"),
        ({"published": {"active_params": -1}}, r"published\.active_params, got -1: a finite number above 0"),
        (
            {"published": {"files": [{"precision": "q4_k_m", "bytes": 0, "source": "x"}]}},
            r"published\.files\[0\]\.bytes, got 0: a finite number above 0",
        ),
        ({"gate": {"score": "softmax", "renormalised": True, "scale": -1}}, r"gate\.scale, got -1: a finite number"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        load_model(write(tmp_path, changes))
    assert "\n" not in str(error.value)


def test_names_and_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model, got 'mixtrl-8x7b': unknown; did you mean 'mixtral-8x7b'\?"):
        load_model("mixtrl-8x7b")
    with pytest.raises(BadInput, match=r"model, got '.*none\.yaml': no such file; check the path"):
        load_model(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(BadInput, match=r"got a list: a model file maps fields to values"):
        load_model(tmp_path / "list.yaml")
    with pytest.raises(BadInput, match=r"--set model\.topk, got 1: no field 'topk'; did you mean 'top_k'\?"):
        load_model("mixtral-8x7b", {"topk": 1})
    with pytest.raises(BadInput, match=r"mixtral-8x7b\.yaml with --set top_k: top_k, got 9"):
        load_model("mixtral-8x7b", {"top_k": 9})


def test_a_file_by_another_ending_is_not_called_unknown(tmp_path: Path) -> None:
    mine = tmp_path / "mixtral-8x7b.txt"
    mine.write_text("id: mine", encoding="utf-8")
    with pytest.raises(BadInput, match=r"8x7b\.txt': a file of yours ends in \.yaml, \.yml or \.json; rename it"):
        load_model(str(mine))


# Hugging Face config.json --------------------------------------------------------------------------------------------

MIXTRAL_JSON = {
    "model_type": "mixtral",
    "_name_or_path": "mistralai/Mixtral-8x7B-v0.1",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


def test_hf_config_gives_the_catalogue_geometry(tmp_path: Path, mixtral: Model) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_JSON))
    for place in (tmp_path, tmp_path / "config.json"):
        read = load_model(place)
        assert read.id == "mixtral-8x7b-v0.1"
        assert read.total_params() == mixtral.total_params()
        assert read.kv_bytes_per_token() == mixtral.kv_bytes_per_token()
        assert read.gate.renormalised


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type, got 'llama': not an MoE architecture known here"),
        ({"model_type": "qwen3_mo"}, r"did you mean 'qwen3_moe'\?"),
        ({"model_type": None}, r"model_type, got None: not a Hugging Face config\.json"),
        ({"num_local_experts": None}, r"num_local_experts, got nothing: this architecture needs it"),
        ({"num_local_experts": -1}, r"num_local_experts, got -1: a whole number of at least 0"),
        ({"hidden_size": "4096"}, r"hidden_size, got '4096': a whole number"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings, got 'no': true or false"),
        (
            {"model_type": "deepseek", "n_routed_experts": 8, "moe_intermediate_size": 8, "routed_scaling_factor": "x"},
            r"routed_scaling_factor, got 'x': a number",
        ),
        ({"model_type": "llama4", "text_config": 3}, r"model_type, got 'llama4': not an MoE architecture known here"),
        ({"num_experts_per_tok": 9}, r"top_k, got 9: a token cannot use more than the 8 experts"),
    ],
)
def test_hf_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_JSON | changes))
    with pytest.raises(BadInput, match=message) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


SMALL = {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 101}
MLA = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
NETS = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mixtral": (
        "Mixtral",
        {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2, "num_local_experts": 9, "intermediate_size": 40},
        (0, 1, 2),
    ),
    "phimoe": (
        "Phimoe",
        {
            **SMALL,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_local_experts": 9,
            "intermediate_size": 40,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        (0, 1),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **SMALL,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "num_experts": 9,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "intermediate_size": 88,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        (3, 5),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_experts": 9,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "mlp_only_layers": [0],
            "head_dim": 32,
            "attention_bias": True,
        },
        (1, 2, 3),
    ),
    "olmoe": (
        "Olmoe",
        {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 3, "num_experts": 9, "intermediate_size": 40},
        (0, 1),
    ),
    "gpt_oss": (
        "GptOss",
        {
            **SMALL,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_local_experts": 9,
            "intermediate_size": 40,
            "head_dim": 16,
        },
        (0, 1),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **SMALL,
            **MLA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 6,
            "num_experts_per_tok": 2,
            "n_routed_experts": 9,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "q_lora_rank": None,
        },
        (2, 3),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SMALL,
            **MLA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 6,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
        },
        (1, 2, 3),
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **SMALL,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "n_routed_experts": 8,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
        },
        (1, 2),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **SMALL,
            **MLA,
            "num_hidden_layers": 3,
            "num_key_value_heads": 6,
            "n_routed_experts": 8,
            "moe_intermediate_size": 40,
            "intermediate_size": 88,
            "q_lora_rank": 20,
        },
        (1, 2),
    ),
    "qwen3_next": ("Qwen3Next", {**SMALL, **NETS, "shared_expert_intermediate_size": 24}, (0, 1, 2, 3, 4)),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**SMALL, **NETS, "shared_expert_intermediate_size": 24}, (0, 1, 2, 3, 4)),
    "gemma4_text": (
        "Gemma4",
        {
            **SMALL,
            "num_hidden_layers": 6,
            "num_key_value_heads": 3,
            "num_global_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 24,
            "intermediate_size": 88,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        (0, 1, 2, 3, 4, 5),
    ),
    "llama4_text": (
        "Llama4",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 9,
            "intermediate_size": 40,
            "intermediate_size_mlp": 88,
            "interleave_moe_layer_step": 2,
            "head_dim": 16,
        },
        (1, 3),
    ),
    "switch_transformers": (
        "SwitchTransformers",
        {
            "d_model": 96,
            "d_kv": 16,
            "d_ff": 40,
            "num_layers": 4,
            "num_decoder_layers": 6,
            "num_heads": 6,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "num_experts": 9,
            "vocab_size": 101,
        },
        (1, 4),
    ),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns about special tokens outside the small vocabulary
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_hf_config_counts_as_its_class(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the `torch` extra is not installed")
    torch = pytest.importorskip("torch", reason="the `torch` extra is not installed")
    name, settings, moe_layers = ARCHITECTURES[kind]
    suffix = "TextConfig" if kind.endswith("_text") else "Config"
    head = {"SwitchTransformers": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    config = getattr(transformers, name + suffix)(**settings)
    with torch.device("meta"):
        reference = getattr(transformers, name + head)(config)
    config.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.total_params() == reference.num_parameters()
    assert model.moe_layer_ids == moe_layers


# As published: nvidia/Qwen3.6-35B-A3B-NVFP4, Qwen/Qwen3.5-122B-A10B and -397B-A17B, Qwen/Qwen3-Next-80B-A3B-Thinking
# and google/gemma-4-26B-A4B; what the reader uses of them (of their text_config, where they have one).
PUBLISHED = {
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "qwen3.5-122b-a10b": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 3072,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "vocab_size": 248320,
    },
    "qwen3.5-397b-a17b": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "full_attention_interval": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "vocab_size": 248320,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "vocab_size": 262144,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_catalogue_is_what_the_published_configuration_gives(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": PUBLISHED[name]}))
    ours, theirs = (msgspec.to_builtins(model) for model in (load_model(name), load_model(tmp_path)))
    differ = {key for key in ours if ours[key] != theirs[key]}
    said = {"id", "name", "hf_id", "aliases", "source", "note", "gate", "published", "formats", "architecture"}
    assert differ <= said


def test_layers_of_a_configuration_without_a_list_are_as_its_class_has_them(tmp_path: Path) -> None:
    for changes, tokens in (({"layer_types": None}, 1024), ({"layer_types": None, "sliding_window": None}, None)):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gemma-4-26b-a4b"] | changes))
        read = load_model(tmp_path)
        assert read.other_attention[0].layers == (5, 11, 17, 23, 29)
        assert (None if read.window is None else read.window.tokens) == tokens


def test_gpt_oss_read_from_its_configuration_is_as_released(tmp_path: Path) -> None:
    data = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
    data |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32}
    data |= {"num_experts_per_tok": 4, "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    read, ours = load_model(tmp_path), load_model("gpt-oss-20b")
    assert (read.native_precision, read.window) == ("mxfp4", ours.window)
    assert (read.expert_bytes("mxfp4"), read.dense_bytes("mxfp4")) == (13_236_480, ours.dense_bytes("bf16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": False}, r"enable_moe_block, got false: a model without experts"),
        ({"hidden_size_per_layer_input": 64}, r"hidden_size_per_layer_input: embeddings per layer"),
        ({"layer_types": ["full_attention"]}, r"layer_types, got .*: a word for each of 30 layers"),
        (
            {"layer_types": ["chunked_attention"] * 30},
            r"layer_types, got 'chunked_attention': full_attention or sliding",
        ),
        ({"sliding_window": 0}, r"sliding_window, got 0: 1 to 1073741824 tokens; correct the field"),
        ({"sliding_window": 2**40}, r"sliding_window, got 1099511627776: 1 to 1073741824 tokens"),
    ],
)
def test_configurations_that_no_reader_covers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gemma-4-26b-a4b"] | changes))
    with pytest.raises(BadInput, match=message):
        load_model(tmp_path)


# Command line --------------------------------------------------------------------------------------------------------
