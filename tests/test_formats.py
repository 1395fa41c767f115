"""Storage formats: block sizes, which matrix of which layer gets which type, whole files against released ones."""

from __future__ import annotations

import msgspec
import pytest
from cli_help import moesim, simulated

from sim.base.errors import BadInput, DoesNotFit
from sim.machine.cost import Cost
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model, model_names
from sim.profiles.precisions import BITS_PER_PARAM, BLOCKS, MIXES, PLAIN, bytes_of, stored
from sim.profiles.stack import load_stack
from sim.profiles.stored import Mixed, StoredAs
from sim.setup.memory import check_host

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


def test_sizes_that_engines_print() -> None:
    # kekzl/imp #1409: one matrix of an expert of Qwen3-30B-A3B in NVFP4 is 768 KiB of weights and 96 KiB of scales.
    assert load_model("qwen3-30b").expert_bytes("nvfp4") == 3 * (768 + 96) * 1024
    # thecodacus/llama.cpp README: 112 of Qwen3.6-35B-A3B's experts in Q4_K_M take 8164 MiB over 40 layers.
    assert 112 * 40 * load_model("qwen3.6-35b").expert_bytes("q4_k_m") == pytest.approx(8164 * 2**20, rel=0.004)
    # noonghunna/club-3090, live-offload-run.log: matrices of 4352 KiB; nibor1896/Crow#44: slots of 548.25 MiB, one
    # expert of each of 43 layers.
    flash = load_model("deepseek-v4-flash")
    assert flash.expert_bytes("mxfp4") == flash.expert_bytes("mxfp4_moe") == 3 * 4352 * 1024
    assert 43 * flash.expert_bytes("mxfp4") == 548.25 * 2**20
    # FlashML-org/FreeToken#257: 63 GiB of experts in NVFP4, 47.7 GiB of n-gram table.
    following = load_model("qwen3.8-flash-next")
    assert following.routed_bytes("nvfp4") / 2**30 == pytest.approx(63, abs=0.5)
    assert following.host_bytes("nvfp4") / 2**30 == pytest.approx(47.7, abs=0.05)


def test_layers_of_other_attention_by_hand() -> None:
    """Qwen3.6-35B-A3B: 10 layers of gated attention, 30 of gated delta nets, which cache nothing."""
    model = load_model("qwen3.6-35b")
    full = 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048 + 2 * 256
    linear = 2048 * (8192 + 4096 + 2 * 32) + 4096 * 2048 + 8192 * 4 + 2 * 32 + 128
    assert model.attention_params_by_layer() == [full if layer % 4 == 3 else linear for layer in range(40)]
    assert model.attention_params() == -(-(10 * full + 30 * linear) // 40)
    assert model.kv_bytes_per_token() == 10 * 2 * 2 * 256 * 2
    assert model.kv_bytes_per_token_per_layer() == 10 * 2 * 2 * 256 * 2 // 40
    keys = model.attention_flops(1, 1000) - model.attention_flops(1, 0)
    assert keys == 2 * 1000 * 10 * 16 * 2 * 256 / 40
    priced = Cost(load_hardware("rtx3090"), model, load_stack("bare"), "q4_k_m").attention.__self__
    assert priced.key_flops == 10 * 16 * 2 * 256 / 40
    pytest.importorskip("torch", reason="the `torch` extra is not installed")
    from sim.real.weights.weights import check_supported

    with pytest.raises(BadInput, match=r"--real, got --model qwen3\.6-35b-a3b: layers of other attention"):
        check_supported(model, "bf16")


def test_a_table_in_host_memory_takes_no_vram() -> None:
    model = load_model("qwen3.8-flash-next")
    assert model.total_params() - model.dense_params() - model.routed_params() == 320_001_536 * 160
    assert model.host_bytes("q4_k_m") == 320_001_536 * 160 * 144 // 256
    assert load_model("qwen3-30b").host_bytes("q4_k_m") == 0
    hw = load_hardware("rtx3090", {"cpu.memory_bytes": 80e9})
    assert model.routed_bytes("nvfp4") < 80e9
    with pytest.raises(DoesNotFit, match="its experts and tables need 119 GB"):
        check_host(model, hw, "nvfp4")


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


def test_three_files_agree_to_the_byte() -> None:
    """With `model_size` of llama-bench, which counts tensors."""
    for name, precision, size in (
        ("qwen3.6-35b", "q4_k_m", 21_155_768_832),
        ("qwen3-30b", "q4_k_s", 17_450_039_296),
        ("olmoe", "q4_k_m", 4_211_730_432),
    ):
        model = load_model(name)
        assert model.routed_bytes(precision) + model.dense_bytes(precision) == size


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


def test_a_file_measured_as_a_whole_is_shared_out() -> None:
    model = load_model("qwen3.6-35b")
    assert model.routed_bytes("ud-q4_k_xl") / 2**30 == pytest.approx(18.3, abs=0.001)
    assert model.dense_bytes("ud-q4_k_xl") == 2.75 * 2**30
    share = model.attention_bytes("ud-q4_k_xl") / model.dense_bytes("ud-q4_k_xl")
    assert share == pytest.approx(model.attention_params() / model.dense_params(), rel=1e-6)
    following = load_model("qwen3.8-flash-next")
    parts = following.routed_bytes, following.dense_bytes, following.host_bytes
    assert sum(part("ud-q4_k_xl") for part in parts) / 2**30 == pytest.approx(103.7, abs=0.05)
    gemma = load_model("gemma-4-26b")  # gate and up 144 bytes per 256; down 24 per 32, in the last of 30 layers 34
    routed = 128 * 704 * 2816 * (30 * 2 * 144 / 256 + (29 * 24 + 34) / 32)
    assert gemma.routed_bytes("ud-q4_k_m") == pytest.approx(routed, rel=1e-6)
    assert gemma.dense_bytes("ud-q4_k_m") == gemma.dense_bytes("gguf-q8_0")
    thinking = load_model("qwen3.6-35b")
    assert thinking.expert_bytes("ud-q4_k_m") == 512 * 2048 * (2 * 144 + 176) // 256
    assert thinking.routed_bytes("ud-q4_k_m") + thinking.dense_bytes("ud-q4_k_m") == 22_123_538_944
    assert thinking.dense_bytes("ud-q4_k_m") == pytest.approx(thinking.dense_bytes("gguf-q8_0"), rel=2e-3)
    with pytest.raises(
        BadInput, match="got 'ud-q4_k_xl': no rule gives its bytes, and of this model none are known; take 'q4_k_m'"
    ):
        load_model("qwen3-30b").expert_bytes("ud-q4_k_xl")


def test_encoder_decoder_models_have_no_such_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match=r"got 'q4_k_m': a file of llama\.cpp.*take 'q4_k', one type"):
        load_model("switch-base-8").expert_bytes("q4_k_m")
    assert "q4_k_m" not in moesim(capsys, "models", "switch-base-8").out


def test_a_run_in_a_mix_copies_its_mean_expert(capsys: pytest.CaptureFixture[str]) -> None:
    """Down in Q6_K in 16 of 32 layers, all else in Q4_K: 4096 x 14336 weights a matrix, 144 and 210 bytes per 256."""
    asked = ("--policy", "lru", "--hw", "rtx3090", "--requests", "1", "--json")
    result = simulated(capsys, *asked, "--precision", "q4_k_m").json
    mean = 4096 * 14336 // 256 * (144 + 144 + (144 + 210) // 2)
    assert result["expert_bytes"] == mean
    assert result["memory"]["dense_bytes"] == load_model("mixtral-8x7b").dense_bytes("q4_k_m")
    assert result["h2d_bytes"] % mean == 0


def test_models_without_newer_fields_keep_the_digest_of_their_runs() -> None:
    newer = {"other_attention", "extra_params", "host_params", "formats"}
    mixtral = load_model("mixtral-8x7b").without_newer
    assert not newer & set(mixtral)
    assert set(mixtral["published"]) == {"total_params", "active_params", "active_counts", "source", "note"}
    assert newer & set(load_model("gpt-oss-20b").without_newer) == {"formats"}
    assert newer & set(load_model("qwen3.8-flash-next").without_newer) == newer
    # What decides nothing is all that is left out: any other field tells runs apart.
    other = msgspec.structs.replace(load_model("mixtral-8x7b"), extra_params=1)
    assert other.without_newer != mixtral
