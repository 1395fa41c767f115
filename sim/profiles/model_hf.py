"""Read the geometry of an MoE model from a Hugging Face `config.json`.

Only architectures whose parameters were counted are accepted: a wrong guess (a shared expert missed, a dense layer
taken for an MoE layer) would shift every result without a sign. Field names and defaults follow the configuration
classes of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.base.errors import BadInput, did_you_mean
from sim.profiles.hf_config import Config
from sim.profiles.model_hf_hybrid import gated_delta_nets, gemma4, layer_types, window
from sim.profiles.precisions import bytes_of

Fields = dict[str, Any]
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def from_hf_config(data: Fields, where: str) -> Fields:
    """Turn a `config.json` into the plain data of a model file.

    Raises:
        BadInput: an architecture not in the table, or a field it needs is missing.
    """
    kind = data.get("model_type")
    if kind in ("llama4", "mistral3", "qwen3_vl_moe", "qwen3_5_moe", "gemma4") and isinstance(
        data.get("text_config"), dict
    ):
        outer, data = data, data["text_config"]
        data = {**data, "_name_or_path": outer.get("_name_or_path") or data.get("_name_or_path")}
        kind = data.get("model_type", kind)
    if not isinstance(kind, str):
        raise BadInput(f"{where}: model_type, got {kind!r}: not a Hugging Face config.json; give one, or a model file")
    reader = READERS.get(kind)
    if reader is None:
        raise BadInput(
            f"{where}: model_type, got {kind!r}: not an MoE architecture known here; "
            f"{did_you_mean(kind, READERS)}; or describe it in a model file (see `moesim models mixtral-8x7b`)"
        )
    config = Config(data, where)
    fields = reader(config)
    name = str(config.get("_name_or_path", default="") or kind)
    dtype = str(config.get("torch_dtype", "dtype", default="bfloat16"))
    quantised = config.get("quantization_config", default={})
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return {
        "schema": 1,
        "id": name.rstrip("/").rsplit("/", 1)[-1].lower(),
        "name": name,
        "source": where,
        "architecture": kind,
        "native_precision": {"fp8": "fp8", "mxfp4": "mxfp4"}.get(str(method), _DTYPES.get(dtype, "bf16")),
        **fields,
    }


def _common(config: Config) -> Fields:
    n_heads = config.count("num_attention_heads")
    hidden_size = config.count("hidden_size")
    head_dim = config.count("head_dim", default=hidden_size // max(n_heads, 1))
    return {
        "hidden_size": hidden_size,
        "n_layers": config.layer_count("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": config.count("num_key_value_heads", default=n_heads),
        "head_dim": head_dim,
        "vocab_size": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "activation": str(config.get("hidden_act", default="silu")),
    }


def _gate(renormalised: bool, score: str = "softmax", **more: Any) -> Fields:
    return {"score": score, "renormalised": renormalised, **more}


def _mixtral(config: Config) -> Fields:
    return _common(config) | {
        "n_experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": config.count("intermediate_size"),
        "gate": _gate(True),
    }


def _phimoe(config: Config) -> Fields:
    bias = config.flag("attention_bias")
    return _mixtral(config) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "head_bias": config.flag("lm_head_bias"),
        "norm_bias": True,
        "gate": _gate(False, "sparsemixer"),
    }


def _sparse_steps(config: Config) -> list[int]:
    """Qwen2-MoE and Qwen3-MoE: a layer is sparse unless listed, or off the beat of `decoder_sparse_step`."""
    step, listed = max(config.count("decoder_sparse_step", default=1), 1), config.layers("mlp_only_layers", default=[])
    n_layers = config.layer_count("num_hidden_layers")
    return [layer for layer in range(n_layers) if layer in listed or (layer + 1) % step]


def _qwen2_moe(config: Config) -> Fields:
    shared = config.count("shared_expert_intermediate_size")
    return _common(config) | {
        "n_experts": config.count("num_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": config.count("moe_intermediate_size"),
        "dense_layers": _sparse_steps(config),
        "dense_intermediate_size": config.count("intermediate_size"),
        "n_shared_experts": 1 if shared else 0,
        "shared_intermediate_size": shared,
        "shared_gate": bool(shared),
        "qkv_bias": config.flag("qkv_bias", default=True),
        "gate": _gate(config.flag("norm_topk_prob")),
    }


def _qwen3_moe(config: Config) -> Fields:
    bias = config.flag("attention_bias")
    return _common(config) | {
        "n_experts": config.count("num_experts", "num_local_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": config.count("moe_intermediate_size"),
        "dense_layers": _sparse_steps(config),
        "dense_intermediate_size": config.count("intermediate_size"),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "head",
        "gate": _gate(config.flag("norm_topk_prob")),
    }


def _olmoe(config: Config) -> Fields:
    bias = config.flag("attention_bias")
    return _common(config) | {
        "n_experts": config.count("num_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": config.count("intermediate_size"),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "full",
        "gate": _gate(config.flag("norm_topk_prob")),
    }


def _mxfp4_experts(config: Config) -> Fields:
    """As released: the experts' matrices in MXFP4, their biases and everything else in bf16."""
    hidden, width = config.count("hidden_size"), config.count("intermediate_size")
    n_bytes = bytes_of(3 * hidden * width, "mxfp4") + bytes_of(2 * width + hidden, "bf16")
    return {"precision": "mxfp4", "expert_bytes": n_bytes, "dense": "bf16", "source": config.where}


def _gpt_oss(config: Config) -> Fields:
    quantised = config.get("quantization_config", default={})
    packed = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"
    kinds = layer_types(config, "sliding_attention", 2)
    return _common(config) | {
        "formats": [_mxfp4_experts(config)] if packed else [],
        "window": window(config, kinds, 128),
        "n_experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok", "experts_per_token"),
        "expert_intermediate_size": config.count("intermediate_size"),
        "ffn_bias": True,
        "router_bias": True,
        "attention_sinks": True,
        "qkv_bias": config.flag("attention_bias", default=True),
        "out_bias": config.flag("attention_bias", default=True),
        "gate": _gate(True),
    }


def _deepseek_ffn(config: Config) -> Fields:
    """DeepSeek and GLM-4.5: dense layers first (and, in the first DeepSeek, off the beat of `moe_layer_freq`)."""
    n_first = config.count("first_k_dense_replace", default=0)
    step = max(config.count("moe_layer_freq", default=1), 1)
    width, n_shared = config.count("moe_intermediate_size"), config.count("n_shared_experts", default=0)
    score = str(config.get("scoring_func", default="softmax"))
    if score not in ("softmax", "sigmoid"):
        raise BadInput(f"{config.where}: scoring_func, got {score!r}: softmax or sigmoid; describe it in a model file")
    gate = _gate(config.flag("norm_topk_prob"), score, scale=config.number("routed_scaling_factor", 1.0))
    if config.get("topk_method", default="") == "noaux_tc" or score == "sigmoid":
        gate["selection_bias"] = True
    if config.get("topk_method", default="greedy") != "greedy":
        gate |= {"n_groups": config.count("n_group", default=1), "top_groups": config.count("topk_group", default=1)}
    n_layers = config.layer_count("num_hidden_layers")
    return {
        "n_experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": width,
        "dense_layers": [layer for layer in range(n_layers) if layer < n_first or layer % step],
        "dense_intermediate_size": config.count("intermediate_size"),
        "n_shared_experts": n_shared,
        "shared_intermediate_size": n_shared * width,
        "gate": gate,
    }


def _deepseek(config: Config) -> Fields:
    return _common(config) | _deepseek_ffn(config)


def _deepseek_mla(config: Config) -> Fields:
    if config.flag("attention_bias"):
        raise BadInput(f"{config.where}: attention_bias, got true: MLA is known without; describe it in a model file")
    mla: Fields = {
        "kv_lora_rank": config.count("kv_lora_rank"),
        "qk_nope_head_dim": config.count("qk_nope_head_dim"),
        "qk_rope_head_dim": config.count("qk_rope_head_dim"),
        "v_head_dim": config.count("v_head_dim"),
        "q_lora_rank": config.count("q_lora_rank", default=0) or None,
    }
    head_dim = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]
    return _common(config) | _deepseek_ffn(config) | {"attention": "mla", "mla": mla, "head_dim": head_dim}


def _deepseek_v3(config: Config) -> Fields:
    # The class routes with sigmoid and groups whatever the file says, and its files do not always say it.
    fixed = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return _deepseek_mla(Config({**config.data, **fixed}, config.where))


def _glm4_moe_lite(config: Config) -> Fields:
    kinds = config.get("mlp_layer_types", default=None)
    n_dense = kinds.count("dense") if isinstance(kinds, list) else config.count("first_k_dense_replace", default=1)
    if isinstance(kinds, list) and kinds[:n_dense] != ["dense"] * n_dense:
        raise BadInput(f"{config.where}: mlp_layer_types: dense layers are known at the start only; use a model file")
    return _deepseek_v3(Config({**config.data, "first_k_dense_replace": n_dense}, config.where))


def _hybrid_qwen(config: Config) -> Fields:
    common = _common(config) | {"dense_layers": _sparse_steps(config)}
    return (
        common
        | gated_delta_nets(config, common)
        | {"dense_intermediate_size": config.count("intermediate_size", default=0)}
    )


def _gemma4(config: Config) -> Fields:
    common = _common(config)
    return common | gemma4(config, common)


def _glm4_moe(config: Config) -> Fields:
    ffn = _deepseek_ffn(Config({**config.data, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}, config.where))
    qk_norm = "head" if config.flag("use_qk_norm") else "none"
    return _common(config) | ffn | {"qkv_bias": config.flag("attention_bias"), "qk_norm": qk_norm}


def _llama4(config: Config) -> Fields:
    n_layers, width = config.layer_count("num_hidden_layers"), config.count("intermediate_size")
    step = max(config.count("interleave_moe_layer_step", default=1), 1)
    sparse = config.layers("moe_layers", default=[]) or list(range(step - 1, n_layers, step))
    bias = config.flag("attention_bias")
    return _common(config) | {
        "n_experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": width,
        "dense_layers": [layer for layer in range(n_layers) if layer not in sparse],
        "dense_intermediate_size": config.count("intermediate_size_mlp", default=0),
        "n_shared_experts": 1,
        "shared_intermediate_size": width,
        "qkv_bias": bias,
        "out_bias": bias,
        "gate": _gate(False, "sigmoid", applied_to="input"),
    }


def _switch(config: Config) -> Fields:
    if config.flag("is_gated_act"):
        raise BadInput(f"{config.where}: is_gated_act, got true: a plain FFN is expected; describe it in a model file")
    n_encoder = config.layer_count("num_layers")
    n_decoder = config.layer_count("num_decoder_layers", default=n_encoder)
    n_heads = config.count("num_heads")

    def dense(n_layers: int, n_sparse: int) -> list[int]:
        # As SwitchTransformersStack has it, the oddity included that zero sparse blocks still make block 1 sparse.
        step = n_layers // n_sparse if n_sparse else n_layers
        return [layer for layer in range(n_layers) if step > 1 and layer % step != 1]

    return {
        "hidden_size": config.count("d_model"),
        "n_layers": n_decoder,
        "dense_layers": dense(n_decoder, config.count("num_sparse_decoder_layers")),
        "dense_intermediate_size": config.count("d_ff"),
        "n_experts": config.count("num_experts"),
        "top_k": 1,
        "expert_intermediate_size": config.count("d_ff"),
        "matrices_per_expert": 2,
        "activation": "relu",
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": config.count("d_kv"),
        "vocab_size": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "router_bias": config.flag("router_bias"),
        "relative_position_buckets": config.count("relative_attention_num_buckets", default=32),
        "encoder": {"n_layers": n_encoder, "dense_layers": dense(n_encoder, config.count("num_sparse_encoder_layers"))},
        "gate": _gate(False),
    }


READERS: dict[str, Callable[[Config], Fields]] = {
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_mla,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen3_next": _hybrid_qwen,
    "qwen3_5_moe_text": _hybrid_qwen,
    "gemma4_text": _gemma4,
    "llama4_text": _llama4,
    "switch_transformers": _switch,
}
