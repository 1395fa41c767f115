"""Every Hugging Face class that can be recorded, instantiated small with random weights; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
SHARED: dict[str, Any] = {"moe_intermediate_size": 16, "n_shared_experts": 2, "intermediate_size": 48}

# name -> (configuration class, what differs from COMMON). Five layers that route, where nothing else is said.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        {"num_hidden_layers": 5, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_hidden_layers": 6,
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 5,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "num_hidden_layers": 5,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "norm_topk_prob": False,
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "router_jitter_noise": 0.2,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "head_dim": 8,
            "sliding_window": 4,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            **SHARED,
            "num_hidden_layers": 6,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
    ),
    "deepseek_v2 in groups": (
        "DeepseekV2Config",
        {
            **LATENT,
            **SHARED,
            "num_hidden_layers": 6,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 16.0,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            **SHARED,
            "num_hidden_layers": 6,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **SHARED,
            "num_hidden_layers": 6,
            "n_routed_experts": 12,
            "head_dim": 8,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
    ),
}


def tiny_moe(name: str, seed: int = 5) -> Any:
    """The model in float32 and evaluation mode, its weights wide enough for routing to differ between tokens."""
    import torch
    import transformers

    kind, facts = SMALL[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**COMMON, **facts})).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("bias") or parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if path.endswith("gate.weight") else 0.2))
        if name in ("deepseek_v3", "glm4_moe"):
            for path, buffer in model.named_buffers():
                if path.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def saved_moe(name: str, folder: Path, seed: int = 5) -> Path:
    """The same as a checkpoint folder with safetensors weights."""
    tiny_moe(name, seed).save_pretrained(folder)
    return folder
