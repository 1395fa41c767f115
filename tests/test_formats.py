"""Storage formats: block sizes, which matrix of which layer gets which type, whole files against released ones."""

from __future__ import annotations

import msgspec
import pytest
from cli_help import moesim, simulated

from sim.base.errors import BadInput
from sim.profiles.geometry import BITS_PER_PARAM, PLAIN, StoredAs, bytes_of
from sim.profiles.gguf import BLOCKS, MIXES, Mixed, stored
from sim.profiles.models import load_model, model_names

# (weights, bytes) of a block: the static_asserts of ggml-org/llama.cpp ggml/src/ggml-common.h.
GGML = {
    "q4_0": (32, 2 + 16),
    "q5_0": (32, 2 + 4 + 16),
    "q5_1": (32, 2 * 2 + 4 + 16),
    "q8_0": (32, 2 + 32),
    "mxfp4": (32, 1 + 16),
    "q2_k": (256, 2 * 2 + 16 + 64),
    "q3_k": (256, 2 + 64 + 32 + 12),
    "q4_k": (256, 2 * 2 + 12 + 128),
    "q5_k": (256, 2 * 2 + 12 + 128 + 32),
    "q6_k": (256, 2 + 16 + 192),
    "iq2_xxs": (256, 2 + 64),
    "iq2_xs": (256, 2 + 64 + 8),
    "iq2_s": (256, 2 + 64 + 16),
    "iq3_xxs": (256, 2 + 96),
    "iq3_s": (256, 2 + 13 * 8 + 4),
    "iq4_nl": (32, 2 + 16),
    "iq4_xs": (256, 2 + 2 + 4 + 128),
}
FILES = [(name, file) for name in model_names() for file in load_model(name).published.files]


def test_blocks_are_those_of_ggml() -> None:
    assert {name: tuple(block) for name, block in BLOCKS.items()} == GGML
    for name, (weights, n_bytes) in GGML.items():
        assert BITS_PER_PARAM[name] == 8 * n_bytes / weights
        assert bytes_of(weights * 1000, name) == 1000 * n_bytes
    assert not set(PLAIN) & set(MIXES)
    assert not set(BLOCKS) & set(MIXES)


def test_q4_k_m_by_hand() -> None:
    """Qwen3-30B-A3B: `down` is Q6_K in the first and last 6 of 48 layers, and in every third of those between."""
    model = load_model("qwen3-30b")
    matrix = 768 * 2048 // 256
    usual, more = 3 * matrix * 144, matrix * (2 * 144 + 210)
    by_layer = model.expert_bytes_by_layer("q4_k_m")
    given = {*range(6), *range(42, 48), *range(8, 42, 3)}
    assert by_layer == [more if layer in given else usual for layer in range(48)]
    assert len(given) == 24
    assert model.expert_bytes("q4_k_m") == (usual + more) // 2 == 2_856_960
    assert model.routed_bytes("q4_k_m") == 128 * sum(by_layer)
    # Attention: v as down is; q, k, o in Q4_K; norms of q and k in fp32.
    q, k = 32 * 128 * 2048, 4 * 128 * 2048
    rest = (2 * q + k) // 256 * 144 + 4 * 2 * 128
    assert model.attention_bytes("q4_k_m") == rest + k // 256 * (144 + 210) // 2
    assert model.gate_bytes("q4_k_m") == 4 * 2048 * 128
    assert model.embedding_bytes("q4_k_m") == 151936 * 2048 // 256 * 144
    assert model.head_bytes("q4_k_m") == 151936 * 2048 // 256 * 210
    norms = 4 * 97 * 2048
    attention = 48 * rest + 24 * k // 256 * (144 + 210)
    whole = model.embedding_bytes("q4_k_m") + model.head_bytes("q4_k_m") + norms + attention + 48 * 4 * 2048 * 128
    assert model.dense_bytes("q4_k_m") == whole


def test_a_mean_of_unlike_layers_is_rounded_up_and_the_total_is_exact() -> None:
    model = load_model("deepseek-v2-lite")
    by_layer = model.expert_bytes_by_layer("q4_k_m")
    assert len(by_layer) == 26
    assert len(set(by_layer)) == 2
    assert model.routed_bytes("q4_k_m") == 64 * sum(by_layer)
    mean = sum(by_layer) / 26
    assert mean <= model.expert_bytes("q4_k_m") < mean + 1


def test_rows_that_do_not_divide_fall_back() -> None:
    """DeepSeek-V2-Lite's `down` has rows of 1408 = 5.5 x 256: Q4_K becomes Q5_0, Q6_K becomes Q8_0."""
    assert stored("q4_k", 2048, 1408) == 2048 * 1408 // 32 * 22
    assert stored("q6_k", 2048, 1408) == 2048 * 1408 // 32 * 34
    assert stored("iq3_xxs", 8, 32) == 8 * 18
    assert stored("q8_0", 8, 40) == stored("q4_k", 8, 40) == 2 * 8 * 40, "no block fits: fp16"
    up = 2 * 2048 * 1408 // 256 * 144
    sizes = set(load_model("deepseek-v2-lite").expert_bytes_by_layer("q4_k_m"))
    assert sizes == {up + stored("q4_k", 2048, 1408), up + stored("q6_k", 2048, 1408)}


def test_eight_experts_are_given_more_attention() -> None:
    mixed = Mixed(load_model("mixtral-8x7b"), "q4_k_m")
    assert [mixed.type_of(matrix, 10) for matrix in ("q", "k", "v", "o")] == ["q4_k", "q8_0", "q8_0", "q5_k"]
    assert Mixed(load_model("mixtral-8x7b"), "gguf-q6_k").type_of("o", 10) == "q6_k"
    q3 = Mixed(load_model("qwen3-30b"), "q3_k_m")
    assert [q3.type_of("v", layer) for layer in (0, 1, 2)] == ["q5_k", "q5_k", "q4_k"]
    assert [q3.type_of("down", layer) for layer in (2, 3)] == ["q5_k", "q4_k"]


def test_gpt_oss_as_released() -> None:
    for name, experts in (("gpt-oss-20b", 24 * 32), ("gpt-oss-120b", 36 * 128)):
        model = load_model(name)
        assert model.expert_bytes("mxfp4") == 3 * 2880 * 2880 * 17 // 32 + 2 * 3 * 2880 == 13_236_480
        assert model.routed_bytes("mxfp4") == experts * 13_236_480
        assert model.dense_bytes("mxfp4") == model.dense_bytes("bf16")
        assert model.attention_bytes("mxfp4") == model.attention_bytes("bf16")
        assert model.dense_bytes("q4_k") == bytes_of(model.dense_params(), "q4_k")


def test_a_released_file_may_leave_its_experts_to_the_precision() -> None:
    file = StoredAs(precision="nvfp4", dense="fp8", source="made up here")
    model = msgspec.structs.replace(load_model("qwen3-30b"), formats=(file,))
    plain = load_model("qwen3-30b")
    assert model.expert_bytes("nvfp4") == plain.expert_bytes("nvfp4")
    assert model.dense_bytes("nvfp4") == plain.dense_bytes("fp8")
    assert model.expert_bytes("q4_k_m") == plain.expert_bytes("q4_k_m")


@pytest.mark.parametrize(("name", "file"), FILES, ids=[f"{name}-{file.precision}" for name, file in FILES])
def test_files_are_as_large_as_released(name: str, file: object) -> None:
    model = load_model(name)
    ours = sum(part(file.precision) for part in (model.routed_bytes, model.dense_bytes, model.host_bytes))
    assert ours == pytest.approx(file.bytes, rel=0.01), file.source


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_lies_between_its_types(name: str) -> None:
    mix = MIXES[name]
    kinds = [mix.base, *(kind for _, _, kind in mix.rules), *([mix.experts] if mix.experts else [])]
    bits = [BITS_PER_PARAM[kind] for kind in kinds]
    model = load_model("qwen3-30b")
    own = 8 * model.routed_bytes(name) / model.routed_params()
    assert min(bits) <= own <= max(bits)
    assert own == pytest.approx(BITS_PER_PARAM[name], rel=0.02), "what it is ordered by is what it nearly has"
    assert all(size % 2 == 0 for size in model.expert_bytes_by_layer(name))


def test_encoder_decoder_models_have_no_such_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match=r"got 'q4_k_m': a file of llama\.cpp.*take 'q4_k', one type"):
        load_model("switch-base-8").expert_bytes("q4_k_m")
    assert "q4_k_m" not in moesim(capsys, "models", "switch-base-8").out


def test_a_run_in_a_mix_copies_its_mean_expert(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--policy", "lru", "--hw", "rtx3090", "--model", "qwen3-30b", "--requests", "1", "--json")
    result = simulated(capsys, *asked, "--precision", "q4_k_m").json
    assert result["expert_bytes"] == 2_856_960
    assert result["memory"]["dense_bytes"] == load_model("qwen3-30b").dense_bytes("q4_k_m")
    assert result["h2d_bytes"] % 2_856_960 == 0


def test_the_page_shows_released_files(capsys: pytest.CaptureFixture[str]) -> None:
    shown = moesim(capsys, "models", "qwen3-30b").out
    assert "released files" in shown
    assert "-0.02 %" in shown
